"""The weight-gradient slots of a plan: allowed weight gradients and idle seconds of each slot, and plans with other slots.

Problem. Build the assignment problem of every chunk (assignment.py) from the instruction list of one rank.
Terms.
- An instruction *depends* on an earlier one in three cases: the two access one buffer and at least one of them writes it (RAW,
  WAW, WAR); the earlier one is in its `after`; or both are on one channel other than `compute`, because collectives start in one
  order on all ranks. Additions to one sum of gradients commute and do not depend on each other; readers of the sum (its
  reduction, the optimizer) depend on all of them.
- The *label* of an all-to-all is the set of weight gradients that may run under it: no path of dependencies joins the two. Beyond
  the paper: a weight gradient is issued directly after the all-to-all, so the instructions it depends on must stand before the
  all-to-all, and those that depend on it, such as the reduction of its sum, after it.
- The *idle seconds* of a slot are the time without computation at the position of its weight gradients.
Steps.
1. Labels by reachability (`may_run_under`). Ancestors are bit sets, one bit per place in the list; time: dependencies × places /
   64.
2. Idle seconds (`idle_seconds`), from a simulation in which all deferrable weight gradients are deferred in program order and
   take no time, so that the idle time is the time they can fill. For an uncut all-to-all that is the all-to-all itself; after the
   last partition of a cut one, the part that other partitions do not hide; with two micro-batches in flight, the part that
   neither hides.
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
"""Fewest micro-batches of a simulated step. It has a multiple of the number of stages, as interleaved pipelines require."""
SUMMED = (BufferRole.GRADIENT, BufferRole.D_WEIGHTS)
"""Roles of buffers on the device that computation only adds to."""


def may_run_under(
    instructions: Sequence[Instruction], exchanges: Iterable[int], gradients: Iterable[int]
) -> dict[int, tuple[int, ...]]:
    """Step 1: the label of every all-to-all, within the rule for the order of issue.

    Args:
        instructions: one rank's list, or a part of it; dependencies on instructions outside the part are ignored.
        exchanges, gradients: places of all-to-alls and of weight gradients in it.
    Returns:
        Place of an all-to-all -> places of the weight gradients, ascending.
    """
    before = ancestors(dependencies(instructions))
    weight_gradients = list(gradients)
    first_dependent = {place: len(before) for place in weight_gradients}
    for place in weight_gradients:
        bit = 1 << place
        first_dependent[place] = next((n for n in range(place, len(before)) if before[n] & bit), len(before))
    return {
        # Bit sets compare as numbers: before[w] < 1 << a means that every ancestor of w stands before a;
        # 1 << a < 1 << first_dependent[w] means that every dependent of w stands after a.
        a: tuple(
            w for w in weight_gradients if not related(before, a, w) and before[w] < 1 << a < 1 << first_dependent[w]
        )
        for a in exchanges
    }


def related(before: Sequence[int], first: int, second: int) -> bool:
    """Whether a path of dependencies joins two places."""
    return bool(before[first] >> second & 1 or before[second] >> first & 1)


def ancestors(dependencies_of: Sequence[Iterable[int]]) -> list[int]:
    """[places] bit set of all places that must end before each starts.

    Args:
        dependencies_of: [places] earlier places that each depends on.
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
    """The last write of a buffer, and the accesses since."""

    writer: tuple[int, ...] = ()
    readers: list[int] = field(default_factory=list)
    additions: list[int] = field(default_factory=list)


def dependencies(instructions: Sequence[Instruction]) -> list[set[int]]:
    """[places] earlier places that each instruction depends on."""
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
            # WAW and WAR: a write waits for all accesses since the last write.
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
"""Decimal places of seconds: differences below a nanosecond between equal layers are rounding."""


@dataclass(frozen=True, slots=True)
class ChunkProblem:
    """The assignment problem of one chunk.

    Attributes:
        gradients, slots: names of the problem's weight gradients and slots.
        layers: for each layer, its weight gradients and slots in the problem.
    """

    problem: AssignmentProblem
    gradients: tuple[str, ...]
    slots: tuple[str, ...]
    layers: tuple[LayerSpan, ...]


def idle_seconds(ran: Sequence[Ran], slot_of: Mapping[str, str]) -> dict[str, float]:
    """Idle seconds of every slot, averaged over micro-batches.

    Args:
        ran: the simulated instructions of one rank.
        slot_of: weight gradient -> its slot.
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
            # The slot's weight gradients take no time, so this is the gap between their neighbours on the device.
            total[slot] += executed.start - free
            times[slot] += 1
            slot = ""
        free = executed.end
    return {slot: round(total[slot] / times[slot], DIGITS) for slot in times}


def chunk_problem(prices: StagePrices, chunk: int, idle: Mapping[str, float], max_bytes: int) -> ChunkProblem:
    """The assignment problem of one backward pass through a chunk.

    Reductions, transfers and copies do not constrain it: lowering places them after the instructions they wait for.

    Args:
        prices: prices of the stage, with its list read in.
        idle: result of `idle_seconds`.
    """
    # One micro-batch stands for all: every pass through a chunk has the same instructions.
    instructions = [i for i in prices.instructions if (i.chunk, i.micro_batch) == (chunk, 0) and _is_decided(i)]
    last = {i.name: place for place, i in enumerate(instructions) if i.name in idle}
    gradients = {place: i.name for place, i in enumerate(instructions) if i.kind == "weight-gradient"}
    label = may_run_under(instructions, last.values(), gradients)
    slots = sorted(last, key=last.__getitem__)
    under = {place: tuple(j for j, slot in enumerate(slots) if place in label[last[slot]]) for place in gradients}
    # A weight gradient without an allowed slot stays in its pass and is not part of the problem.
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
    """Layers in backward order; the head counts as a layer before them."""
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
    """Slots that hold every weight gradient of a stage under the next all-to-all."""
    stage = plan.stages[index]
    slots: dict[int, dict[str, tuple[str, ...]]] = {}
    for chunk in stage.chunks:
        exchanges = stage.expert * stage.expert_tensor > 1
        slots |= default_slots(range(*chunk), model, exchanges, holds_head(plan, index, model, chunk))
    return slots


def holds_head(plan: Plan, index: int, model: ModelDescription, chunk: tuple[int, int]) -> bool:
    """Whether a chunk of a stage ends in a head whose weight is not tied to the embedding."""
    is_tied = model.tied_embeddings and index == plan.embedding_stage
    return index == plan.loss_stage and not is_tied and chunk == plan.stages[index].chunks[-1]


def without_pieces(plan: Plan) -> Plan:
    """The plan with gradients reduced and weights gathered at the end of the step.

    Their buckets do not matter for the slots: lowering places them after the gradients that complete them.
    """

    def at_the_end(overlap: StageOverlap) -> StageOverlap:
        return replace(overlap, gradient_chunk_bytes=0, reduce_at_once=False, overlap_param_gather=False)

    stages = (replace(stage, overlap=at_the_end(stage.overlap)) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))


def shortened(plan: Plan, micro_batches: int) -> Plan:
    """The plan with fewer micro-batches per step, for simulations; unchanged if it has no more than `micro_batches`.

    The number counts micro-batches of the first stage. Stages of unlike shape divide the samples differently, so it is rounded up
    until every stage has an integer number.
    """
    present = plan.stages[0].gradient_accumulation_steps
    multiple = present // math.gcd(*(stage.gradient_accumulation_steps for stage in plan.stages))
    return plan.with_micro_batches(min(present, -(-micro_batches // multiple) * multiple))


def enough_micro_batches(stages: int) -> int:
    """The smallest multiple of the number of stages, at least FEWEST_MICRO_BATCHES: it shows fill, steady state and drain."""
    return stages * -(-FEWEST_MICRO_BATCHES // stages)


def with_slots(plan: Plan, slots: Sequence[Slots], max_deferred_bytes: int) -> Plan:
    """The plan with its slots replaced.

    Args:
        slots: [stages] new slots.
        max_deferred_bytes: byte limit of stages that have slots.
    """
    stages = (
        replace(stage, overlap=_with_slots(stage, of_stage, max_deferred_bytes))
        for stage, of_stage in zip(plan.stages, slots, strict=True)
    )
    return replace(plan, stages=tuple(stages))


def _with_slots(stage: StagePlan, slots: Slots, max_deferred_bytes: int) -> StageOverlap:
    overlap = stage.overlap
    # A layer that had no entry gets one with the mechanism that its stage gives to such layers.
    mechanism: Mechanism = "cross_micro_batch" if overlap.micro_batches_in_flight > 1 else "none"
    layers = {layer: LayerOverlap(layer=layer, mechanism=mechanism) for layer in slots}
    layers |= {layer.layer: layer for layer in overlap.layers}
    decided = (replace(layers[n], weight_gradient_slots=dict(slots.get(n, {}))) for n in stage.layers if n in layers)
    return replace(
        overlap,
        max_deferred_bytes=max_deferred_bytes if slots else NO_OVERLAP.max_deferred_bytes,
        layers=tuple(layer for layer in decided if layer != LayerOverlap(layer=layer.layer)),
    )


def named_slots(assigned: Iterable[tuple[ChunkProblem, Assignment]]) -> Slots:
    """The slots of a stage according to the assignments of its chunks; weight gradients of a slot in program order."""
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
