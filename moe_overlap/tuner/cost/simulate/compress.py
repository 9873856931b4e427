"""Steady-state compression: long steps are simulated from blocks, and equivalent stages are simulated once.

Problem. A step of many micro-batches repeats a few kinds of passes; simulating every instruction of every stage takes long.
Terms.
- A *block* is what `pipeline_blocks` says: a pass, or a backward and a forward pass that run interleaved.
- A *contact* is the place in a block where it needs a transfer from another stage, or can send its own.
- A *slice* is the computation of a block between two contacts: one instruction of a compressed list.
- Two stages are *equivalent* if they have the same parallelism, layers of the same kinds in the same order, and the same
  overlap at the same places (`equivalence_key`). The first and the last stage are equivalent to no other.
Steps.
1. A few passes with every kind of block (`sample_blocks`) are lowered, and simulated on one rank alone, transfers taking nothing
   (`run_alone`).
2. Every kind of block is cut at its contacts (`compress`).
3. Of equivalent stages one is simulated; the others are its renamed copies (`renamed`, `renames`).
4. A step of any number of micro-batches is written from the slices (`compressed_list`) and simulated with all stages together.
   Gathers of weights in front of the passes stay instructions of their own, that the first micro-batch's slices wait for: how
   long they are hidden depends on when it arrives.

Error. A block computes in the order of its list and behind the block before, so that little is lost: all-to-alls that share their
link with a transfer between stages or a gather of weights, and gradient buckets that travel under more than the last two backward
passes of a chunk.
Stages whose parameter groups step by themselves move states across blocks; their lists are not compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import COMPUTE, PIPELINE, Instruction, boundary_channel
from moe_overlap.plan.lowering.gradient_buckets import DATA_CHANNEL
from moe_overlap.plan.lowering.pipeline_order import Step, paired, pipeline_blocks
from moe_overlap.plan.operators import NORM, OperatorKind, parse_operator
from moe_overlap.plan.overlap import LayerOverlap
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.interference import Interference
from moe_overlap.tuner.cost.links import LinkUse
from moe_overlap.tuner.cost.simulate.engine import Ran, Simulation, pass_of, simulate

LEAST_SECONDS = 1e-9
"""Differences of times below this are rounding."""
Key = tuple[tuple[str, int, bool], ...]
"""Kind of a block: direction, chunk, and whether gradients are complete behind it, of each of its passes."""
Blocks = Sequence[Sequence[Step]]


@dataclass(frozen=True, slots=True)
class Contact:
    """A transfer of a block.

    Attributes:
        number: of the pass it belongs to.
        at: seconds after the beginning of the block when it is needed, or can be sent.
        posted: the same when a receive is posted; negative: before the block.
    """

    transfer: Instruction
    number: int
    at: float
    posted: float = 0.0


@dataclass(frozen=True, slots=True)
class Block:
    """One kind of block, when no transfer keeps it waiting.

    Attributes:
        name: of its first operator.
        seconds: from its first computation to its last.
        busy: seconds in which it computes.
        tail: the last of `seconds`: weight gradients in its bubble slot, before which the next block's receives are posted.
    """

    name: str
    seconds: float
    busy: float
    contacts: tuple[Contact, ...]
    tail: float = 0.0


@dataclass(frozen=True, slots=True)
class Gather:
    """A gather of a parameter group's weights in front of the passes (plan/lowering/weight_gathers.py).

    Attributes:
        chunk: whose first forward pass needs it.
        at: seconds after the beginning of that pass.
    """

    seconds: float
    chunk: int | None
    at: float


@dataclass(frozen=True, slots=True)
class Compressed:
    """The blocks of one rank of a stage, and the end of its step.

    Attributes:
        before_norm: seconds from the last computation until the norm of all gradients begins.
        after_norm: seconds from there to the end of the step.
        optimizer: seconds of them in which the optimizer computes.
        gathers: of weights, in order.
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
    """A few passes in which every kind of block of a stage stands, those that complete its gradients at the end."""
    chunks = range(len(plan.stages[stage].chunks))
    if plan.stages[stage].overlap.micro_batches_in_flight > 1:
        return _sample_pairs(len(plan.stages), len(chunks))
    # Two of each: gradients are complete behind the last backward pass only, which is another kind of block.
    numbers = range(min(2, plan.stages[stage].gradient_accumulation_steps))
    forward = [Step("forward", chunk, m) for chunk in chunks for m in numbers]
    backward = [Step("backward", chunk, m) for chunk in reversed(chunks) for m in numbers]
    return tuple((step,) for step in (*forward, *backward))


@cache
def _sample_pairs(stages: int, chunks: int) -> Blocks:
    """Every pair of chunks that meets at any stage, lone passes of every chunk, and one behind which gradients are complete.

    Also where a stage runs no pair, as it has too few micro-batches: a stage behind it that is priced alike may.
    """
    # Pairs repeat themselves with every round of the stages; three rounds show all of them.
    blocks = [block for stage in range(stages) for block in paired(stages, stage, 3 * stages, chunks)]
    kinds = sorted({(block[0].chunk, block[1].chunk) for block in blocks if len(block) > 1})
    given = [sum(backward == chunk for backward, _ in kinds) for chunk in range(chunks)]
    taken = [sum(forward == chunk for _, forward in kinds) for chunk in range(chunks)]
    # As few as let every backward pass of a pair follow its forward pass, and leave two lone ones behind; all chunks alike.
    count = max(back + 1 + max(1, fore) for back, fore in zip(given, taken, strict=True))
    begun = [count - fore for fore in taken]
    lone = [(Step("forward", chunk, m),) for chunk in range(chunks) for m in range(begun[chunk])]
    ended, pairs = [0] * chunks, []
    for backward, forward in kinds:
        pairs.append((Step("backward", backward, ended[backward]), Step("forward", forward, begun[forward])))
        ended[backward] += 1
        begun[forward] += 1
    rest = [(Step("backward", chunk, m),) for chunk in reversed(range(chunks)) for m in range(ended[chunk], count)]
    return (*lone, *pairs, *rest)


def run_alone(
    instructions: Sequence[Instruction],
    rank: int,
    seconds: Callable[[Instruction], float],
    model: Interference,
    queue_seconds: float = 0.0,
    uses: Callable[[Instruction], LinkUse] | None = None,
) -> Simulation:
    """Simulate one rank's list as if its transfers took nothing; arguments as `simulate` takes them."""
    # As copies they have no peer to meet, but keep their channel, so that the order and all dependencies stay.
    alone = [replace(i, kind="copy", peers=()) if i.kind == "point-to-point" else i for i in instructions]
    return simulate(
        {rank: alone},
        lambda _, i: 0.0 if i.channel_group == PIPELINE else seconds(i),
        model,
        queue_seconds,
        None if uses is None else lambda _, i: uses(i),
    )


def compress(
    stage: int,
    blocks: Blocks,
    instructions: Sequence[Instruction],
    alone: Simulation,
    ahead: Mapping[int, float] = MappingProxyType({}),
) -> Compressed:
    """Cut the blocks of a list at their contacts.

    Args:
        blocks: the passes of the list, as `sample_blocks` gives them.
        instructions: the list.
        alone: its simulation (`run_alone`).
        ahead: seconds, by id, of the gathers of weights in front of the passes, which took nothing in the simulation.
    """
    ran = {event.instruction.id: event for event in alone.ran}
    of_pass: dict[Step, list[Instruction]] = {step: [] for block in blocks for step in block}
    for i in instructions:
        if i.micro_batch is not None:
            of_pass[pass_of(i)].append(i)
    needs: dict[int, float] = {}
    # A receive is needed when the first instruction behind it starts.
    for i in instructions:
        for number in i.after:
            needs[number] = min(needs.get(number, ran[i.id].start), ran[i.id].start)
    last = max(step.micro_batch for step in of_pass)
    kinds: dict[Key, Block] = {}
    gathers: dict[int, Gather] = {}
    end = 0.0
    for block in blocks:
        start = end
        # A block begins where the one before ended: idle time before its first computation is communication of its own
        # that nothing hides.
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
        # `busy` leaves out the idle time inside the block: on a rank alone that is exposed communication.
        busy = sum(map(_seconds, computed))
        in_bubble_slot = _in_bubble_slot([i for step in block for i in of_pass[step]])
        tail = sum(_seconds(ran[i.id]) for i in in_bubble_slot)
        kinds[_key(block, last)] = Block(computed[0].instruction.name, end - start, busy, tuple(contacts), tail)
    norm = next(event for event in alone.ran if event.instruction.name == NORM)
    return Compressed(
        rank=norm.rank,
        stage=stage,
        blocks=kinds,
        before_norm=norm.start - end,
        norm=norm.end - norm.start,
        after_norm=alone.step_seconds - norm.end,
        optimizer=sum(_seconds(event) for event in alone.ran if event.instruction.kind == "optimizer"),
        gathers=tuple(gathers[number] for number in ahead),
    )


def _in_bubble_slot(block: Sequence[Instruction]) -> list[Instruction]:
    """The weight gradients behind the last send of a block; none where other instructions follow it, too."""
    ordered = sorted(block, key=lambda i: i.id)
    last = max((n for n, i in enumerate(ordered) if i.sends), default=len(ordered))
    behind = ordered[last + 1 :]
    return behind if all(i.kind == "weight-gradient" for i in behind) else []


def blocks_of(compressed: Compressed, plan: Plan) -> list[Block]:
    """The blocks of a whole step of a plan, in order."""
    last = plan.stages[compressed.stage].gradient_accumulation_steps - 1
    return [compressed.blocks[_key(steps, last)] for steps in pipeline_blocks(plan, compressed.stage)]


def compressed_list(compressed: Compressed, plan: Plan) -> tuple[list[Instruction], dict[int, float]]:
    """The list of a step of a plan, which may have another number of micro-batches, and seconds by id, transfers apart."""
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
        # None waits for another by its name: their channel runs in order.
        self._gathers = [(gather, self._collect(OperatorKind.PARAMETERS, gather.seconds, ())) for gather in gathers]

    def block(self, steps: Sequence[Step], block: Block) -> None:
        """Append receives, then the slices between contacts, each followed by the transfers that it lets go."""
        received = [c for c in block.contacts if c.transfer.receives]
        incoming = [(c.at, self._transfer(c, steps, self._before(c))) for c in received if c.posted <= 0.0]
        later = sorted((c for c in received if c.posted > 0.0), key=lambda c: c.posted)
        outgoing = sorted((c for c in block.contacts if c.transfer.sends), key=lambda c: c.at)
        gathered = list(self._gathered_for(steps))
        incoming += gathered
        opens = block.seconds - block.tail
        # These are the only places at which other stages, gathers, or the next block, see this one: a finer cut changes no time.
        cuts = {c.at for c in block.contacts} | {c.posted for c in later} | {at for at, _ in gathered} | {opens}
        ends = sorted({at for at in cuts if 0.0 < at < block.seconds} | {block.seconds})
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
                # The next block's receives are posted behind this slice: weight gradients in the bubble slot must not
                # delay them.
                self._open = self._computed
            while later and (later[0].posted <= end or end == block.seconds):
                contact = later.pop(0)
                incoming.append((contact.at, self._transfer(contact, steps, (self._computed,))))
            while outgoing and (outgoing[0].at <= end or end == block.seconds):
                self._transfer(outgoing.pop(0), steps, (self._computed,))
            begin = end
        self._tail = block.tail

    def _gathered_for(self, steps: Sequence[Step]) -> Iterator[tuple[float, int]]:
        """When a block needs the gathers of weights that its chunks use for the first time, and their ids."""
        begun = {step.chunk for step in steps if step.direction == "forward" and step.micro_batch == 0}
        for gather, number in self._gathers:
            if gather.chunk in begun:
                # The place was seen in a pass by itself; in a pair it is another one, at the beginning at the earliest.
                yield gather.at if len(steps) == 1 else 0.0, number

    def _before(self, contact: Contact) -> tuple[int, ...]:
        """Dependencies of a receive at the beginning of a block: the block before but its tail, unless it is posted earlier."""
        # The tolerance is for rounding: both sides are sums of the same seconds in different orders.
        return (self._open,) if contact.posted >= -self._tail - LEAST_SECONDS and self._open >= 0 else ()

    def end(self, compressed: Compressed) -> None:
        """Append the end of the step: reduction of gradients, the norm, where all ranks meet, and the update."""
        after = (self._computed,)
        # The norm keeps its name, by which the simulator makes the ranks of all stages meet.
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

    def _transfer(self, contact: Contact, steps: Sequence[Step], after: tuple[int, ...] = ()) -> int:
        micro_batch = steps[contact.number].micro_batch
        self.instructions.append(
            replace(contact.transfer, id=len(self.instructions), micro_batch=micro_batch, after=after)
        )
        return len(self.instructions) - 1

    def _append(self, instruction: Instruction, seconds: float) -> int:
        self.instructions.append(instruction)
        self.seconds[instruction.id] = seconds
        return instruction.id


def _key(block: Sequence[Step], last: int) -> Key:
    # Gradient buckets leave behind the last backward pass of a chunk, which makes it a kind of its own.
    return tuple((s.direction, s.chunk, s.direction == "backward" and s.micro_batch == last) for s in block)


def _seconds(event: Ran) -> float:
    return event.end - event.start


NAMED_FIELDS = ("layer", "first_operator", "last_operator", "weight_gradient_slots")
"""Fields of a layer's overlap that name layers; equal places of two stages have other names."""


def equivalence_key(plan: Plan, index: int, model: ModelDescription, prices: StagePrices) -> Hashable:
    """The equivalence key of a stage: equal for stages whose simulations differ by names alone.

    Args:
        prices: of the stage; those of one family share their `priced`.
    """
    # The first and the last stage have one neighbour only, and embedding or head; unlike stages have transfers of their
    # own.
    if index in (0, len(plan.stages) - 1) or plan.transfers:
        return index
    stage = plan.stages[index]
    # Counts of layers are not enough: equal layers in another order give another list.
    kinds = tuple(tuple((model.moe_layers[n], model.windows[n]) for n in range(*span)) for span in stage.chunks)
    overlap = _overlap_key(plan, index)
    return id(prices.priced), prices.priced.family.counts[:, prices.column].tobytes(), kinds, overlap


def _overlap_key(plan: Plan, index: int) -> Hashable:
    """A stage's overlap, with its layers by chunk and place inside it, and the stages of its transfers by their distance."""
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
    """The blocks of a stage as those of an equivalent one: its names, channels and peers."""
    shift = index - compressed.stage

    def transfer(i: Instruction) -> Instruction:
        operator = i.operator.on(shift=shift)
        # Peers are representatives, the first rank of each stage: shifting the stage shifts them.
        peers = tuple(plan.stages[plan.stage_of(peer) + shift].devices.ranks[0] for peer in i.peers)
        return replace(i, name=str(operator), channel=boundary_channel(operator), stage=index, peers=peers)

    def shifted(block: Block) -> Block:
        contacts = (replace(contact, transfer=transfer(contact.transfer)) for contact in block.contacts)
        return replace(block, contacts=tuple(contacts))

    blocks = {key: shifted(block) for key, block in compressed.blocks.items()}
    return replace(compressed, rank=plan.stages[index].devices.ranks[0], stage=index, blocks=blocks)


def renames(plan: Plan, index: int, other: int) -> Callable[[str], str]:
    """Names of a stage's operators -> those of an equivalent stage at the same places."""
    layers = dict(zip(plan.stages[index].layers, plan.stages[other].layers, strict=True))
    return lambda name: str(parse_operator(name).on(layers))
