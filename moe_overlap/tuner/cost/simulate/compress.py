"""Steady-state compression: long steps are simulated from blocks, and equivalent stages are simulated once.

Problem. A step of many micro-batches repeats a few kinds of passes; simulating every instruction of every stage takes long.
Terms.
- A *block* is an element of `pipeline_blocks`: a pass, or an interleaved pair of a backward and a forward pass.
- A *contact* is a place in a block at which it needs a transfer from another stage, or can start its own.
- A *slice* is the computation of a block between two contacts: one instruction of a compressed list.
- Two stages are *equivalent* if they have the same parallelism, layers of the same kinds in the same order, and the same
  overlap at the same places (`equivalence_key`). The first and the last stage have no equivalent.
Steps.
1. Lower a few passes with every kind of block (`sample_blocks`), and simulate them on one rank by itself, with transfers that
   take no time (`run_alone`).
2. Cut every kind of block at its contacts (`compress`).
3. Copy the result to equivalent stages, with their names (`renamed`, `renames`).
4. Write a step of any number of micro-batches from the slices (`compressed_list`), and simulate all stages together. Gathers of
   weights before the passes remain separate instructions, and slices of the first micro-batch wait for them: how much of them is
   hidden depends on its arrival.

Error. A block computes in the order of its list and after the previous block, so the loss is small. Ignored are: all-to-alls that
share their link with a transfer between stages or a gather of weights, and gradient buckets that are on the link for longer than
the last two backward passes of a chunk.
Stages whose parameter groups have separate optimizer steps move states across blocks; their lists are not compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import COMPUTE, PIPELINE, Instruction, boundary_channel
from moe_overlap.plan.lowering.gradient_buckets import DATA_CHANNEL
from moe_overlap.plan.lowering.pipeline_order import PipelineStep, paired, pipeline_blocks
from moe_overlap.plan.operators import NORM, OperatorKind, parse_operator
from moe_overlap.plan.overlap import LayerOverlap
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.interference import Interference
from moe_overlap.tuner.cost.links import LinkUse
from moe_overlap.tuner.cost.simulate.engine import Ran, Simulation, pass_of, simulate

LEAST_SECONDS = 1e-9
"""Smaller differences of times are rounding."""
Key = tuple[tuple[str, int, bool], ...]
"""Kind of a block: for each of its passes direction, chunk, and whether gradients are complete after it."""
Blocks = Sequence[Sequence[PipelineStep]]


@dataclass(frozen=True, slots=True)
class Contact:
    """A transfer of a block.

    Attributes:
        number: index of the pass in the block.
        at: seconds from the start of the block until it is needed, or can be sent.
        posted: seconds from the start of the block until a receive is posted; negative: before the block.
    """

    transfer: Instruction
    number: int
    at: float
    posted: float = 0.0


@dataclass(frozen=True, slots=True)
class Block:
    """One kind of block, executed without waiting for transfers.

    Attributes:
        name: name of its first operator.
        seconds: from its first computation to its last.
        busy: seconds of computation.
        tail: the last of `seconds`: weight gradients in its bubble slot; the next block's receives are posted before them.
    """

    name: str
    seconds: float
    busy: float
    contacts: tuple[Contact, ...]
    tail: float = 0.0


@dataclass(frozen=True, slots=True)
class Gather:
    """A gather of a parameter group's weights before the passes (plan/lowering/weight_gathers.py).

    Attributes:
        chunk: the chunk whose first forward pass needs it.
        at: seconds from the start of that pass until it is needed.
    """

    seconds: float
    chunk: int | None
    at: float


@dataclass(frozen=True, slots=True)
class Compressed:
    """The blocks of one rank of a stage, and the end of its step.

    Attributes:
        before_norm: seconds from the last computation to the start of the norm of all gradients.
        norm: seconds of the norm.
        after_norm: seconds from the end of the norm to the end of the step.
        optimizer: seconds of computation of the optimizer.
        gathers: gathers of weights, in order.
    """

    rank: int
    stage: int
    blocks: dict[Key, Block]
    before_norm: float
    norm: float
    after_norm: float
    optimizer: float
    gathers: tuple[Gather, ...] = ()


def sample_blocks(plan: Plan, stage: int) -> Blocks:
    """A few passes that contain every kind of block of a stage; those that complete its gradients come last."""
    chunks = range(len(plan.stages[stage].chunks))
    if plan.stages[stage].overlap.micro_batches_in_flight > 1:
        return _sample_pairs(len(plan.stages), len(chunks))
    # Two micro-batches: gradients are complete after the last backward pass only, which is another kind of block.
    numbers = range(min(2, plan.stages[stage].gradient_accumulation_steps))
    forward = [PipelineStep("forward", chunk, m) for chunk in chunks for m in numbers]
    backward = [PipelineStep("backward", chunk, m) for chunk in reversed(chunks) for m in numbers]
    return tuple((step,) for step in (*forward, *backward))


@cache
def _sample_pairs(stages: int, chunks: int) -> Blocks:
    """Every pair of chunks that occurs on any stage, single passes of every chunk, and one that completes the gradients.

    Pairs are included even if a stage has too few micro-batches for them, because a later stage with equal prices may have them.
    """
    # Pairs repeat with every round of the stages; three rounds contain all of them.
    blocks = [block for stage in range(stages) for block in paired(stages, stage, 3 * stages, chunks)]
    kinds = sorted({(block[0].chunk, block[1].chunk) for block in blocks if len(block) > 1})
    of_backward = [sum(backward == chunk for backward, _ in kinds) for chunk in range(chunks)]
    of_forward = [sum(forward == chunk for _, forward in kinds) for chunk in range(chunks)]
    # The fewest micro-batches, equal for all chunks, with which every backward pass of a pair follows its forward pass and two
    # single backward passes remain at the end.
    count = max(back + 1 + max(1, fore) for back, fore in zip(of_backward, of_forward, strict=True))
    begun = [count - fore for fore in of_forward]
    lone = [(PipelineStep("forward", chunk, m),) for chunk in range(chunks) for m in range(begun[chunk])]
    ended, pairs = [0] * chunks, []
    for backward, forward in kinds:
        pairs.append(
            (PipelineStep("backward", backward, ended[backward]), PipelineStep("forward", forward, begun[forward]))
        )
        ended[backward] += 1
        begun[forward] += 1
    rest = [
        (PipelineStep("backward", chunk, m),) for chunk in reversed(range(chunks)) for m in range(ended[chunk], count)
    ]
    return (*lone, *pairs, *rest)


def run_alone(
    instructions: Sequence[Instruction],
    rank: int,
    seconds: Callable[[Instruction], float],
    model: Interference,
    queue_seconds: float = 0.0,
    uses: Callable[[Instruction], LinkUse] | None = None,
) -> Simulation:
    """Simulate one rank's list with transfers that take no time; arguments as for `simulate`."""
    # Transfers become copies, which meet no peer but keep their channel, so that order and dependencies stay.
    copies = [replace(i, kind="copy", peers=()) if i.kind == "point-to-point" else i for i in instructions]
    return simulate(
        {rank: copies},
        lambda _, i: 0.0 if i.channel_group == PIPELINE else seconds(i),
        model,
        queue_seconds,
        None if uses is None else lambda _, i: uses(i),
    )


def compress(
    stage: int,
    blocks: Blocks,
    instructions: Sequence[Instruction],
    simulation: Simulation,
    ahead: Mapping[int, float] = MappingProxyType({}),
) -> Compressed:
    """Cut the blocks of a list at their contacts.

    Args:
        blocks: the passes of the list, from `sample_blocks`.
        instructions: the list.
        simulation: its simulation, from `run_alone`.
        ahead: id -> seconds of the gathers of weights before the passes, which take no time in the simulation.
    """
    # 1. The instructions of each pass, and the time at which the first instruction that waits for each transfer starts.
    ran = {event.instruction.id: event for event in simulation.ran}
    of_pass: dict[PipelineStep, list[Instruction]] = {step: [] for block in blocks for step in block}
    for i in instructions:
        if i.micro_batch is not None:
            of_pass[pass_of(i)].append(i)
    needs: dict[int, float] = {}
    for i in instructions:
        for number in i.after:
            needs[number] = min(needs.get(number, ran[i.id].start), ran[i.id].start)
    # 2. Cut the blocks.
    last = max(step.micro_batch for step in of_pass)
    kinds: dict[Key, Block] = {}
    gathers: dict[int, Gather] = {}
    end = 0.0
    for block in blocks:
        start = end
        # A block starts where the previous one ended: idle time before its first computation is its own exposed communication.
        computed = [ran[i.id] for step in block for i in of_pass[step] if i.channel == COMPUTE]
        end = max(event.end for event in computed)
        contacts = [
            Contact(
                i,
                number,
                at=(needs.get(i.id, start) if i.receives else ran[i.id].start) - start,
                posted=ran[i.id].start - start,
            )
            for number, step in enumerate(block)
            for i in of_pass[step]
            if i.kind == "point-to-point"
        ]
        for step in block:
            for i in of_pass[step]:
                for number in ahead.keys() & set(i.after) - gathers.keys():
                    gathers[number] = Gather(ahead[number], step.chunk, ran[i.id].start - start)
        # Idle time inside the block is exposed communication, since nothing else delays a rank that is simulated by itself.
        busy = sum(map(_seconds, computed))
        in_bubble_slot = _in_bubble_slot([i for step in block for i in of_pass[step]])
        tail = sum(_seconds(ran[i.id]) for i in in_bubble_slot)
        kinds[_key(block, last)] = Block(computed[0].instruction.name, end - start, busy, tuple(contacts), tail)
    # 3. The end of the step, around the norm at which all stages meet.
    norm = next(event for event in simulation.ran if event.instruction.name == NORM)
    return Compressed(
        rank=norm.rank,
        stage=stage,
        blocks=kinds,
        before_norm=norm.start - end,
        norm=norm.end - norm.start,
        after_norm=simulation.step_seconds - norm.end,
        optimizer=sum(_seconds(event) for event in simulation.ran if event.instruction.kind == "optimizer"),
        gathers=tuple(gathers[number] for number in ahead),
    )


def _in_bubble_slot(block: Sequence[Instruction]) -> list[Instruction]:
    """The weight gradients after the last send of a block; none if other instructions follow the send, too."""
    ordered = sorted(block, key=lambda i: i.id)
    last = max((n for n, i in enumerate(ordered) if i.sends), default=len(ordered))
    following = ordered[last + 1 :]
    return following if all(i.kind == "weight-gradient" for i in following) else []


def blocks_of(compressed: Compressed, plan: Plan) -> list[Block]:
    """The blocks of a complete step of a plan, in order."""
    last = plan.stages[compressed.stage].gradient_accumulation_steps - 1
    return [compressed.blocks[_key(steps, last)] for steps in pipeline_blocks(plan, compressed.stage)]


def compressed_list(compressed: Compressed, plan: Plan) -> tuple[list[Instruction], dict[int, float]]:
    """The compressed list of a step of a plan with any number of micro-batches, and id -> seconds except of transfers."""
    writer = _Writer(compressed.stage, compressed.gathers)
    for steps, block in zip(pipeline_blocks(plan, compressed.stage), blocks_of(compressed, plan), strict=True):
        writer.block(steps, block)
    writer.end(compressed)
    return writer.instructions, writer.seconds


class _Writer:
    """Appends the slices and transfers of blocks to a list."""

    def __init__(self, stage: int, gathers: Sequence[Gather]) -> None:
        self.instructions: list[Instruction] = []
        self.seconds: dict[int, float] = {}
        self._stage = stage
        self._computed = -1
        self._open, self._tail = -1, 0.0
        # Gathers need no dependencies on each other, because their channel executes in order.
        self._gathers = [(gather, self._collect(OperatorKind.PARAMETERS, gather.seconds, ())) for gather in gathers]

    def block(self, steps: Sequence[PipelineStep], block: Block) -> None:
        """Append the receives of a block, then its slices, each followed by the transfers that can start after it."""
        # 1. Transfers and gathers that the block needs, with the time at which it needs them; later ones are posted inside it.
        received = [c for c in block.contacts if c.transfer.receives]
        incoming = [(c.at, self._transfer(c, steps, self._before(c))) for c in received if c.posted <= 0.0]
        later = sorted((c for c in received if c.posted > 0.0), key=lambda c: c.posted)
        outgoing = sorted((c for c in block.contacts if c.transfer.sends), key=lambda c: c.at)
        gathered = list(self._gathered_for(steps))
        incoming += gathered
        opens = block.seconds - block.tail
        # 2. Cuts. Other stages, gathers and the next block depend on the block at these places only, so a finer cut changes no
        # time.
        cuts = {c.at for c in block.contacts} | {c.posted for c in later} | {at for at, _ in gathered} | {opens}
        ends = sorted({at for at in cuts if 0.0 < at < block.seconds} | {block.seconds})
        # 3. Slices. Each waits for the transfers that are needed up to its start.
        begin = 0.0
        for end in ends:
            after = tuple(number for at, number in incoming if at <= begin)
            incoming = [(at, number) for at, number in incoming if at > begin]
            part = Instruction(
                id=len(self.instructions),
                kind="compute",
                name=block.name,
                stage=self._stage,
                chunk=steps[0].chunk,
                micro_batch=steps[0].micro_batch,
                after=after,
            )
            self._computed = self._append(part, end - begin)
            if begin < opens:
                # The next block's receives are posted after this slice, so that weight gradients in the bubble slot do not
                # delay them.
                self._open = self._computed
            while later and (later[0].posted <= end or end == block.seconds):
                contact = later.pop(0)
                incoming.append((contact.at, self._transfer(contact, steps, (self._computed,))))
            while outgoing and (outgoing[0].at <= end or end == block.seconds):
                self._transfer(outgoing.pop(0), steps, (self._computed,))
            begin = end
        self._tail = block.tail

    def _gathered_for(self, steps: Sequence[PipelineStep]) -> Iterator[tuple[float, int]]:
        """(seconds, id) of the gathers of weights whose chunks a block uses first: when it needs them."""
        begun = {step.chunk for step in steps if step.direction == "forward" and step.micro_batch == 0}
        for gather, number in self._gathers:
            if gather.chunk in begun:
                # The time was measured in a single pass. In a pair it differs, so the start of the block is used, the earliest.
                yield gather.at if len(steps) == 1 else 0.0, number

    def _before(self, contact: Contact) -> tuple[int, ...]:
        """Dependencies of a receive at the start of a block: the previous block without its tail, unless it is posted earlier."""
        # The tolerance covers rounding, because both sides sum the same seconds in different orders.
        return (self._open,) if contact.posted >= -self._tail - LEAST_SECONDS and self._open >= 0 else ()

    def end(self, compressed: Compressed) -> None:
        """Append the end of the step: reduction of gradients, the norm, at which all ranks meet, and the update."""
        after = (self._computed,)
        # The norm keeps its name, by which the simulator recognises that all stages meet.
        for name, seconds in (
            (str(OperatorKind.GRADIENTS), compressed.before_norm),
            (str(NORM), compressed.norm),
            (str(OperatorKind.PARAMETERS), compressed.after_norm),
        ):
            after = (self._collect(name, seconds, after),)

    def _collect(self, name: str, seconds: float, after: tuple[int, ...]) -> int:
        """Append a collective of the replicas."""
        instruction = Instruction(
            id=len(self.instructions),
            kind="collective",
            name=str(name),
            stage=self._stage,
            channel=DATA_CHANNEL,
            after=after,
        )
        return self._append(instruction, seconds)

    def _transfer(self, contact: Contact, steps: Sequence[PipelineStep], after: tuple[int, ...] = ()) -> int:
        micro_batch = steps[contact.number].micro_batch
        self.instructions.append(
            replace(contact.transfer, id=len(self.instructions), micro_batch=micro_batch, after=after)
        )
        return len(self.instructions) - 1

    def _append(self, instruction: Instruction, seconds: float) -> int:
        self.instructions.append(instruction)
        self.seconds[instruction.id] = seconds
        return instruction.id


def _key(block: Sequence[PipelineStep], last: int) -> Key:
    # Gradient buckets are reduced after the last backward pass of a chunk, which makes it a kind of its own.
    return tuple((s.direction, s.chunk, s.direction == "backward" and s.micro_batch == last) for s in block)


def _seconds(event: Ran) -> float:
    return event.end - event.start


NAMED_FIELDS = ("layer", "first_operator", "last_operator", "weight_gradient_slots")
"""Fields of a layer's overlap that contain names of layers, which differ between equivalent stages."""


def equivalence_key(plan: Plan, index: int, model: ModelDescription, prices: StagePrices) -> Hashable:
    """The equivalence key of a stage: equal for stages whose simulations differ in names only.

    Args:
        prices: prices of the stage; stages of one family share their `priced`.
    """
    # The first and the last stage have one neighbour only, and embedding or head; unlike stages have different transfers.
    if index in (0, len(plan.stages) - 1) or plan.transfers:
        return index
    stage = plan.stages[index]
    # Counts of layers are not enough, because the order of the layers changes the list.
    kinds = tuple(tuple((model.moe_layers[n], model.windows[n]) for n in range(*span)) for span in stage.chunks)
    overlap = _overlap_key(plan, index)
    return id(prices.priced), prices.priced.family.counts[:, prices.column].tobytes(), kinds, overlap


def _overlap_key(plan: Plan, index: int) -> Hashable:
    """A stage's overlap with names made relative: layers as chunk and position, stages of transfers as distance."""
    stage = plan.stages[index]
    place = {layer: (chunk, n) for chunk, span in enumerate(stage.chunks) for n, layer in enumerate(range(*span))}

    def at(name: str | None) -> Hashable:
        if name is None:
            return None
        operator = parse_operator(name).on(shift=-index)
        return replace(operator, layer=None), None if operator.layer is None else place[operator.layer]

    def entry(layer: LayerOverlap) -> Hashable:
        slots = layer.weight_gradient_slots.items()
        return (
            place[layer.layer],
            at(layer.first_operator),
            at(layer.last_operator),
            tuple((at(slot), tuple(map(at, names))) for slot, names in slots),
            tuple(getattr(layer, field.name) for field in fields(layer) if field.name not in NAMED_FIELDS),
        )

    limits = stage.overlap.search_limits
    lowered = () if limits is None else limits.lowered
    return (
        replace(stage.overlap, layers=(), search_limits=None if limits is None else replace(limits, lowered=())),
        tuple((at(limit.first_operator), at(limit.last_operator), limit.max_partitions) for limit in lowered),
        tuple(map(entry, stage.overlap.layers)),
    )


def renamed(compressed: Compressed, plan: Plan, index: int) -> Compressed:
    """The blocks of a stage with the names, channels and peers of an equivalent stage `index`."""
    shift = index - compressed.stage

    def transfer(i: Instruction) -> Instruction:
        operator = i.operator.on(shift=shift)
        # A peer is the first rank of its stage, so it shifts with the stage.
        peers = tuple(plan.stages[plan.stage_of(peer) + shift].devices.ranks[0] for peer in i.peers)
        return replace(i, name=str(operator), channel=boundary_channel(operator), stage=index, peers=peers)

    def shifted(block: Block) -> Block:
        contacts = (replace(contact, transfer=transfer(contact.transfer)) for contact in block.contacts)
        return replace(block, contacts=tuple(contacts))

    blocks = {key: shifted(block) for key, block in compressed.blocks.items()}
    return replace(compressed, rank=plan.stages[index].devices.ranks[0], stage=index, blocks=blocks)


def renames(plan: Plan, index: int, other: int) -> Callable[[str], str]:
    """Maps names of a stage's operators to those of an equivalent stage at the same places."""
    layers = dict(zip(plan.stages[index].layers, plan.stages[other].layers, strict=True))
    return lambda name: str(parse_operator(name).on(layers))
