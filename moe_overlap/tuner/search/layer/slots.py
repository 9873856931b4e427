"""The weight-gradient slots of a plan: which may hold what, for how long, and the plan with other slots.

Problem. From the instruction list of one rank, make the assignment problem of every chunk (assignment.py).
Terms.
- An instruction *depends* on an earlier one that wrote what it reads, or wrote or read what it writes (RAW, WAW, WAR), that
  stands in its `after`, or that stands in front of it on a channel other than `compute`: collectives start in one order on all
  ranks. Additions to one sum of gradients commute, so that they do not depend on each other; what reads the sum (its reduction,
  the optimizer) depends on all of them.
- The *label* of an all-to-all names the weight gradients that may run under it: no path of dependencies joins the two. Beyond the
  paper: a weight gradient is issued right behind the all-to-all, so that what it depends on must stand in front of the
  all-to-all, and what depends on it, such as the reduction of its sum, behind it.
- *Idle seconds* of a slot: the time in which nothing computes where weight gradients stand.
Steps.
1. Labelling by reachability (`may_run_under`). Ancestors are bit sets, a bit per place in the list; time: dependencies × places /
   64.
2. Idle seconds (`idle_seconds`), read from a simulation in which every weight gradient that can be deferred is, in program order,
   and takes no time: what is idle then is what they can fill. Around a whole all-to-all that is the all-to-all itself; behind the
   last partition of a cut one, what the other partitions leave of it; under two micro-batches in turn, what neither fills.
3. The problem of a chunk (`chunk_problem`).
4. Back to a plan: slots by name (`named_slots`), and the plan with them (`with_slots`).

Source: Lancet, section 4.1 and algorithm 1, lines 1-9; dependencies of writes on reads and writes are added.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import COMPUTE, BufferRole, Instruction, parse_buffer
from moe_overlap.plan.lowering.deferral import default_slots
from moe_overlap.plan.lowering.layers import COUNT_CHANNEL, EXPERT_CHANNEL
from moe_overlap.plan.operators import parse_operator
from moe_overlap.plan.overlap import NO_OVERLAP, LayerOverlap, Mechanism, StageOverlap
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.simulate.engine import Ran
from moe_overlap.tuner.search.layer.assignment import Assignment, AssignmentProblem, Gradient, LayerSpan

FEWEST_MICRO_BATCHES = 4
"""Micro-batches of a simulated step, which otherwise has one for each stage: a multiple of the stages, as interleaved pipelines
need it."""
SUMMED = (BufferRole.GRADIENT, BufferRole.D_WEIGHTS)
"""Buffers on the device that computation only adds to."""


def may_run_under(
    instructions: Sequence[Instruction], exchanges: Iterable[int], gradients: Iterable[int]
) -> dict[int, tuple[int, ...]]:
    """Step 1: the label of every all-to-all, as far as issue order allows.

    Args:
        instructions: one rank's list or a part of it; dependencies on what is left out are ignored.
        exchanges, gradients: places of all-to-alls and of weight gradients in it.
    Returns:
        Place of an all-to-all -> places of the weight gradients, ascending.
    """
    before = ancestors(dependencies(instructions))
    wanted = list(gradients)
    first_dependent = {place: len(before) for place in wanted}
    for place in wanted:
        bit = 1 << place
        first_dependent[place] = next((n for n in range(place, len(before)) if before[n] & bit), len(before))
    return {
        # Bit sets compare as numbers: before[w] < 1 << a says that all that w depends on stands in front of a,
        # 1 << a < 1 << first_dependent[w] that all that depends on w stands behind it.
        a: tuple(w for w in wanted if not related(before, a, w) and before[w] < 1 << a < 1 << first_dependent[w])
        for a in exchanges
    }


def related(before: Sequence[int], one: int, other: int) -> bool:
    """Whether a path joins two places."""
    return bool(before[one] >> other & 1 or before[other] >> one & 1)


def ancestors(dependencies_of: Sequence[Iterable[int]]) -> list[int]:
    """Bit sets of everything that must end before each place starts.

    Args:
        dependencies_of: by place, earlier places.
    """
    before: list[int] = []
    for needed in dependencies_of:
        bits = 0
        for place in needed:
            bits |= before[place] | 1 << place
        before.append(bits)
    return before


@dataclass(slots=True)
class _Accesses:
    """Accesses of a buffer since its last write, and that write."""

    writer: tuple[int, ...] = ()
    readers: list[int] = field(default_factory=list)
    additions: list[int] = field(default_factory=list)


def dependencies(instructions: Sequence[Instruction]) -> list[set[int]]:
    """By place, the earlier places that an instruction depends on."""
    places = {i.id: place for place, i in enumerate(instructions)}
    buffers: dict[str, _Accesses] = defaultdict(_Accesses)
    last_on: dict[str, int] = {}
    dependencies_of: list[set[int]] = []
    for place, i in enumerate(instructions):
        needed = {places[number] for number in i.after if number in places}
        # Collectives start in list order on every rank (NCCL), so each depends on the one before it on its channel.
        if i.channel != COMPUTE:
            if i.channel in last_on:
                needed.add(last_on[i.channel])
            last_on[i.channel] = place
        for name in dict.fromkeys((*i.reads, *i.writes)):
            accesses = buffers[name]
            # Additions wait for the last write and its readers, not for each other.
            if name in i.writes and _adds(i, name):
                needed.update(accesses.writer, accesses.readers)
                accesses.additions.append(place)
            # WAW and WAR: a write waits for everything that has touched the buffer since the last one.
            elif name in i.writes:
                needed.update(accesses.writer, accesses.readers, accesses.additions)
                buffers[name] = _Accesses((place,))
            else:
                # RAW; readers do not wait for each other.
                needed.update(accesses.writer, accesses.additions)
                accesses.readers.append(place)
        dependencies_of.append(needed)
    return dependencies_of


def _adds(i: Instruction, name: str) -> bool:
    return i.kind in ("compute", "weight-gradient") and parse_buffer(name).word in SUMMED


# Steps 2 and 3.


DIGITS = 9
"""Decimal places of seconds: below a nanosecond, equal layers differ by rounding alone."""


@dataclass(frozen=True, slots=True)
class ChunkProblem:
    """The assignment problem of one chunk.

    Attributes:
        gradients, slots: names of the problem's weight gradients and slots.
        layers: where each layer stands in the problem.
    """

    problem: AssignmentProblem
    gradients: tuple[str, ...]
    slots: tuple[str, ...]
    layers: tuple[LayerSpan, ...]


def idle_seconds(ran: Sequence[Ran], slot_of: Mapping[str, str]) -> dict[str, float]:
    """Seconds of every slot in which nothing computes, the mean over micro-batches.

    Args:
        ran: of one rank.
        slot_of: weight gradient -> the slot it stands in.
    """
    total: dict[str, float] = defaultdict(float)
    times: Counter[str] = Counter()
    free, slot = 0.0, ""
    for executed in sorted(ran, key=lambda executed: executed.instruction.id):
        i = executed.instruction
        if i.channel != COMPUTE:
            continue
        if i.kind == "weight-gradient":
            slot = slot_of[i.name]
            continue
        if slot:
            # The weight gradients of the slot take no time here, so this is all the time between their neighbours on
            # the device.
            total[slot] += executed.start - free
            times[slot] += 1
            slot = ""
        free = executed.end
    return {slot: round(total[slot] / times[slot], DIGITS) for slot in times}


def chunk_problem(prices: StagePrices, chunk: int, idle: Mapping[str, float], max_bytes: int) -> ChunkProblem:
    """The assignment problem of one backward pass through a chunk.

    Reductions, transfers and copies are no constraints: lowering places them anew, behind what they wait for.

    Args:
        prices: of the stage, its list read.
        idle: `idle_seconds`.
    """
    # One micro-batch stands for all: every pass through a chunk has the same instructions.
    instructions = [i for i in prices.made if (i.chunk, i.micro_batch) == (chunk, 0) and _is_decided(i)]
    last = {i.name: place for place, i in enumerate(instructions) if i.name in idle}
    gradients = {place: i.name for place, i in enumerate(instructions) if i.kind == "weight-gradient"}
    label = may_run_under(instructions, last.values(), gradients)
    slots = sorted(last, key=last.__getitem__)
    under = {place: tuple(j for j, slot in enumerate(slots) if place in label[last[slot]]) for place in gradients}
    # Without a legal slot there is nothing to decide: it stays in its pass, and solvers never see it.
    names = [(place, name) for place, name in gradients.items() if under[place]]
    return ChunkProblem(
        problem=AssignmentProblem(
            gradients=tuple(
                Gradient(
                    seconds=round(prices.seconds(instructions[place]), DIGITS),
                    bytes=prices.bounded_bytes(name),
                    first=under[place][0],
                    under=under[place],
                )
                for place, name in names
            ),
            slots=tuple(idle[slot] for slot in slots),
            max_bytes=max_bytes,
        ),
        gradients=tuple(name for _, name in names),
        slots=tuple(slots),
        layers=_layers([name for _, name in names], slots),
    )


def _is_decided(i: Instruction) -> bool:
    return i.kind in ("compute", "weight-gradient") or i.channel in (EXPERT_CHANNEL, COUNT_CHANNEL)


def _layers(gradients: Sequence[str], slots: Sequence[str]) -> tuple[LayerSpan, ...]:
    """Layers in backward order; the head counts as one in front of them."""
    places = [[_layer(name) for name in names] for names in (gradients, slots)]
    spans, start = [], (0, 0)
    for layer in sorted({layer for names in places for layer in names}, reverse=True):
        end = tuple(first + names.count(layer) for first, names in zip(start, places, strict=True))
        spans.append(LayerSpan((start[0], end[0]), (start[1], end[1])))
        start = (end[0], end[1])
    return tuple(spans)


def _layer(name: str) -> float:
    layer = parse_operator(name).layer
    return float("inf") if layer is None else layer


# Step 4.

Slots = Mapping[int, Mapping[str, tuple[str, ...]]]
"""Layer -> backward all-to-all, or send of a chunk -> weight gradients."""


def program_order(plan: Plan, index: int, model: ModelDescription) -> Slots:
    """Every weight gradient of a stage under the next all-to-all."""
    stage = plan.stages[index]
    slots: dict[int, dict[str, tuple[str, ...]]] = {}
    for chunk in stage.chunks:
        exchanges = stage.expert * stage.expert_tensor > 1
        slots |= default_slots(range(*chunk), model, exchanges, holds_head(plan, index, model, chunk))
    return slots


def holds_head(plan: Plan, index: int, model: ModelDescription, chunk: tuple[int, int]) -> bool:
    """Whether a chunk of a stage ends in a head with a weight of its own."""
    is_tied = model.tied_embeddings and index == plan.embedding_stage
    return index == plan.loss_stage and not is_tied and chunk == plan.stages[index].chunks[-1]


def without_pieces(plan: Plan) -> Plan:
    """The plan with gradients reduced, and weights gathered, at the end: their buckets are placed anew behind what completes
    them, and decide nothing here."""

    def at_the_end(overlap: StageOverlap) -> StageOverlap:
        return replace(overlap, gradient_chunk_bytes=0, reduce_at_once=False, overlap_param_gather=False)

    stages = (replace(stage, overlap=at_the_end(stage.overlap)) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))


def shortened(plan: Plan, micro_batches: int) -> Plan:
    """The plan with fewer micro-batches a step, for simulations: those of the first stage, the same where it has no more.

    Stages of unlike shape cut the samples differently: so many more that every stage has whole micro-batches.
    """
    whole = plan.stages[0].gradient_accumulation_steps
    together = whole // math.gcd(*(stage.gradient_accumulation_steps for stage in plan.stages))
    return plan.with_micro_batches(min(whole, -(-micro_batches // together) * together))


def enough_micro_batches(stages: int) -> int:
    """The fewest whole rounds of the stages that show how a step fills, goes on and drains."""
    return stages * -(-FEWEST_MICRO_BATCHES // stages)


def with_slots(plan: Plan, slots: Sequence[Slots], max_deferred_bytes: int) -> Plan:
    """The plan with other slots in place of those that it has.

    Args:
        slots: by stage.
        max_deferred_bytes: of stages that have any.
    """
    stages = (
        replace(stage, overlap=_with_slots(stage, of_stage, max_deferred_bytes))
        for stage, of_stage in zip(plan.stages, slots, strict=True)
    )
    return replace(plan, stages=tuple(stages))


def _with_slots(stage: StagePlan, slots: Slots, max_deferred_bytes: int) -> StageOverlap:
    overlap = stage.overlap
    # A layer that only gets slots keeps the mechanism that its stage runs anyway.
    whole: Mechanism = "cross_micro_batch" if overlap.micro_batches_in_flight > 1 else "none"
    layers = {layer: LayerOverlap(layer=layer, mechanism=whole) for layer in slots}
    layers |= {layer.layer: layer for layer in overlap.layers}
    decided = (replace(layers[n], weight_gradient_slots=dict(slots.get(n, {}))) for n in stage.layers if n in layers)
    return replace(
        overlap,
        max_deferred_bytes=max_deferred_bytes if slots else NO_OVERLAP.max_deferred_bytes,
        layers=tuple(layer for layer in decided if layer != LayerOverlap(layer=layer.layer)),
    )


def named_slots(assigned: Iterable[tuple[ChunkProblem, Assignment]]) -> Slots:
    """The slots that assignments of the chunks of a stage decide; in program order inside a slot."""
    slots: dict[int, dict[str, tuple[str, ...]]] = {}
    for chunk, assignment in assigned:
        for name, place in zip(chunk.gradients, assignment, strict=True):
            if place is not None:
                slot = chunk.slots[place]
                layer = parse_operator(slot).layer
                assert layer is not None, slot
                of_layer = slots.setdefault(layer, {})
                of_layer[slot] = (*of_layer.get(slot, ()), name)
    return slots
