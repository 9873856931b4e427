"""P(i, n, k): the seconds of a range of operators in k partitions, by itself, forward and backward.

Problem. The search for ranges needs thousands of P; each must equal the seconds of a simulated instruction list.
Terms.
- A *step* is one operator of a pipeline: it computes or communicates, in k partitions or uncut.
- A *pipeline* is an unbroken run of the range's operators in one pass of a micro-batch. A range has one forward pass, and one
  backward pass in reverse order with recomputation and with weight gradients under its all-to-alls.
- There are two *streams*, one for computation and one for all-to-alls.
Steps.
1. Cut the passes of a chunk into pipelines (`ChunkPasses`). Operators, order and buffers are those of the plan's lists
   (plan/lowering/layers.py), so that a simulated list of one range takes as long.
2. Price every operator at the size of one partition; dividing the uncut price by k would miss that small kernels are less
   efficient (`RangePrices`). Cutting the hidden states that enter a pipeline reads and writes them once, with one kernel per
   partition; joining the hidden states that leave it costs the same.
3. Simulate the two streams (`run`); equal pipelines, those of repeated layers, once:
   a. Steps are issued in the order of the lowered plan: stage after stage, in a stage partition after partition
      (plan/lowering/interleave.py), uncut steps between stages. Each stream starts its steps in that order.
   b. A partition starts when its stream is free and its inputs are written: by the same partition of an earlier step, or by all
      its partitions if one of the two steps is uncut.
   c. While both streams are busy, each progresses at a rate of 1 / (1 + slowdown).
Without slowdown, P is at least the sum of each stream and at least the longest path, and it grows with the seconds of every step.
The order need not be optimal: `gap_to_best` compares it with all orders if there are few.

Source: Lancet, section 5.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import sizes as payload
from moe_overlap.plan.lowering.deferral import backward_of
from moe_overlap.plan.lowering.dependencies import Draft
from moe_overlap.plan.lowering.interleave import stage_major
from moe_overlap.plan.lowering.layers import LayerLowering, LayerOperator, LayerSequence
from moe_overlap.plan.operators import GATE
from moe_overlap.plan.overlap import LayerOverlap, Place
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.tuner.cost.interference import Interference
from moe_overlap.tuner.cost.machine import Machine
from moe_overlap.tuner.cost.simulate.engine import BETWEEN_DEVICES, COMPUTING

MOST_PIECES = 20
"""Largest number of partitions, summed over the steps, for which all orders are compared; that takes a tenth of a second."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of a pipeline.

    Attributes:
        exchange: whether it runs on the stream of all-to-alls.
        after: indices of the earlier steps whose results it reads.
        uncut: not cut, whatever the number of partitions.
    """

    exchange: bool
    after: tuple[int, ...] = ()
    uncut: bool = False


@dataclass(frozen=True, slots=True)
class Timed:
    """When one partition of a step starts and ends, in seconds from the start of the pipeline."""

    step: int
    part: int
    start: float
    end: float


def pipeline_seconds(
    steps: Sequence[Step],
    seconds: Sequence[float],
    parts: int,
    slowdown: float = 0.0,
    prelude: float = 0.0,
    epilogue: float = 0.0,
) -> float:
    """P: seconds from the start of a pipeline to its end.

    Args:
        seconds: of one partition of every step; of the complete step where it is uncut.
        slowdown: relative increase of the seconds of a stream while both are busy.
        prelude, epilogue: seconds of cutting the inputs before the first step, and of joining the outputs after the last.
    """
    return prelude + max((timed.end for timed in run(steps, seconds, parts, slowdown)), default=0.0) + epilogue


def run(steps: Sequence[Step], seconds: Sequence[float], parts: int, slowdown: float = 0.0) -> list[Timed]:
    """Every partition of every step, sorted by end. Arguments as for `pipeline_seconds`."""
    # 3a. The order per stream is fixed in advance. It respects all dependencies, so one of the two queue heads can always
    # start.
    queues: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    counts = [1 if step.uncut else parts for step in steps]
    places = range(len(steps))
    for place, piece in stage_major(places, counts.__getitem__, lambda place: steps[place].exchange, last_first=False):
        queues[steps[place].exchange].append((place, piece.index))
    remaining, done = [*counts], set[tuple[int, int]]()
    heads, running = [0, 0], dict[int, tuple[float, float]]()
    now, timed = 0.0, list[Timed]()
    while len(timed) < len(queues[0]) + len(queues[1]):
        for stream in (0, 1):
            if stream in running or heads[stream] == len(queues[stream]):
                continue
            place, part = queues[stream][heads[stream]]
            # 3b. A head that is not ready blocks its stream: later steps of the queue may not overtake it.
            if _is_ready(steps, place, part, remaining, done):
                running[stream] = now, seconds[place]
        # 3c. Both streams are slowed by the same factor, so the one with less remaining work ends first. `spent` counts work
        # at full rate; `pace` turns it into time.
        pace = 1.0 + slowdown if len(running) > 1 else 1.0
        first = min(running, key=lambda stream: running[stream][1])
        spent = running[first][1]
        now += spent * pace
        started, _ = running.pop(first)
        running = {stream: (since, work - spent) for stream, (since, work) in running.items()}
        place, part = queues[first][heads[first]]
        heads[first] += 1
        remaining[place] -= 1
        done.add((place, part))
        timed.append(Timed(place, part, started, now))
    return timed


def _is_ready(
    steps: Sequence[Step], place: int, part: int, remaining: Sequence[int], done: set[tuple[int, int]]
) -> bool:
    """Rule 3b."""
    return all(
        remaining[other] == 0 if steps[place].uncut or steps[other].uncut else (other, part) in done
        for other in steps[place].after
    )


def gap_to_best(steps: Sequence[Step], seconds: Sequence[float], parts: int) -> float | None:
    """Seconds of the plan's order over those of the best order, minus 1; None if there are too many orders to compare.

    Consecutive steps on one stream stay together, as they do in a stage of the plan's order. No slowdown.
    """
    merged, sums = _joined(steps, seconds)
    if sum(1 if step.uncut else parts for step in merged) > MOST_PIECES:
        return None
    ours = pipeline_seconds(merged, sums, parts)
    best = best_order_seconds(merged, sums, parts)
    return ours / best - 1.0 if best > 0 else 0.0


def best_order_seconds(steps: Sequence[Step], seconds: Sequence[float], parts: int) -> float:
    """The shortest time over all orders of both streams, by branch and bound over the sequences of starts.

    Partitions of a step are equivalent, so it is enough to start them in ascending order.
    """
    counts = [1 if step.uncut else parts for step in steps]
    best = pipeline_seconds(steps, seconds, parts)
    seen: set[tuple[object, ...]] = set()

    def ready(place: int, part: int, ends: tuple[tuple[float, ...], ...]) -> float | None:
        """When the inputs of a partition are written; None if one of their writers has not been placed."""
        latest = 0.0
        for other in steps[place].after:
            needed = counts[other] if steps[place].uncut or steps[other].uncut else part + 1
            if len(ends[other]) < needed:
                return None
            latest = max(latest, ends[other][needed - 1])
        return latest

    def visit(ends: tuple[tuple[float, ...], ...], free: tuple[float, float], work: tuple[float, float]) -> None:
        nonlocal best
        # Prune: a stream needs at least its remaining seconds, and a state with equal ends has been visited with equal choices.
        if (ends, free) in seen or max(free[0] + work[0], free[1] + work[1]) >= best:
            return
        seen.add((ends, free))
        if all(len(part_ends) == count for part_ends, count in zip(ends, counts, strict=True)):
            best = max(free)
            return
        for place, step in enumerate(steps):
            part = len(ends[place])
            start = ready(place, part, ends) if part < counts[place] else None
            if start is None:
                continue
            end = max(start, free[step.exchange]) + seconds[place]
            rest = work[step.exchange] - seconds[place]
            after = (*ends[:place], (*ends[place], end), *ends[place + 1 :])
            if step.exchange:
                visit(after, (free[0], end), (work[0], rest))
            else:
                visit(after, (end, free[1]), (rest, work[1]))

    sums = [
        sum(seconds[place] * counts[place] for place, step in enumerate(steps) if step.exchange == exchange)
        for exchange in (False, True)
    ]
    visit(((),) * len(steps), (0.0, 0.0), (sums[0], sums[1]))
    return best


def _joined(steps: Sequence[Step], seconds: Sequence[float]) -> tuple[list[Step], list[float]]:
    """Consecutive steps on one stream, cut or uncut alike, merged into one step."""
    merged: list[Step] = []
    sums: list[float] = []
    place_of: list[int] = []
    for step, step_seconds in zip(steps, seconds, strict=True):
        read = {place_of[other] for other in step.after}
        if merged and (merged[-1].exchange, merged[-1].uncut) == (step.exchange, step.uncut):
            read = {*merged[-1].after, *read} - {len(merged) - 1}
            # The plan's order runs such steps directly one after the other, so they count as one.
            merged[-1] = Step(step.exchange, tuple(sorted(read)), step.uncut)
            sums[-1] += step_seconds
        else:
            merged.append(Step(step.exchange, tuple(sorted(read)), step.uncut))
            sums.append(step_seconds)
        place_of.append(len(merged) - 1)
    return merged, sums


# Step 1: the passes of a chunk as pipelines.


@dataclass(frozen=True, slots=True)
class PassStep:
    """One operator of a pass.

    Attributes:
        place: layer and part; the operator belongs to a range if its place does.
        draft: the instruction of the uncut operator.
        uncut: stays uncut even in a range that runs in partitions.
    """

    place: Place
    draft: Draft
    uncut: bool


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Consecutive operators of a pass.

    Attributes:
        names: of its operators, as in an instruction list.
    """

    names: tuple[str, ...]
    steps: tuple[Step, ...]


class ChunkPasses:
    """One micro-batch through the layers of a chunk.

    Args:
        plan: its overlap gives the slots of weight gradients; its ranges are ignored.
        whole_gate: whether the gate of a layer needs all tokens of the micro-batch, so that it stays uncut.
    """

    def __init__(
        self,
        plan: Plan,
        stage: StagePlan,
        model: ModelDescription,
        layers: range,
        whole_gate: Callable[[int], bool],
    ) -> None:
        uncut = dataclasses.replace(stage, overlap=without_ranges(stage).overlap)
        lowering = LayerLowering(plan, uncut, model)
        self.operators: tuple[LayerOperator, ...] = tuple(LayerSequence(uncut, model, lambda _: False).forward(layers))
        drafts = {draft.name: draft for write in (lowering.forward, lowering.backward) for draft in write(layers, 0, 0)}
        slots = {name: under for entry in uncut.overlap.layers for name, under in entry.weight_gradient_slots.items()}
        self._passes: dict[bool, tuple[list[PassStep], ...]] = {}
        self._places: dict[bool, dict[Place, list[tuple[int, int]]]] = {}
        for cut in (False, True):
            sequence = LayerSequence(uncut, model, lambda _, cut=cut: cut)  # type: ignore[misc]
            passes = (sequence.forward(layers), sequence.backward(layers))
            self._passes[cut] = tuple(
                [step for operator in members for step in _steps_of(operator, drafts, slots, whole_gate)]
                for members in passes
            )
            places: dict[Place, list[tuple[int, int]]] = {}
            for number, members in enumerate(self._passes[cut]):
                for at, step in enumerate(members):
                    places.setdefault(step.place, []).append((number, at))
            self._places[cut] = places
        self._pipelines: dict[tuple[int, int, bool], tuple[Pipeline, ...]] = {}

    def pipelines(self, first: int, last: int, cut: bool) -> tuple[Pipeline, ...]:
        """The pipelines of the operators first, …, last - 1 of the chunk, forward first.

        Args:
            cut: whether the range runs in partitions.
        """
        key = first, last, cut
        if key not in self._pipelines:
            self._pipelines[key] = tuple(_pipeline_of(run, cut) for run in self._runs(*key))
        return self._pipelines[key]

    def _runs(self, first: int, last: int, cut: bool) -> Iterator[Sequence[PassStep]]:
        """The longest runs of consecutive steps of the range in either pass."""
        places = (self._places[cut][operator.layer, operator.part] for operator in self.operators[first:last])
        begin = end = (0, 0)
        for at in sorted(at for several in places for at in several):
            if at != end:
                if begin != end:
                    yield self._passes[cut][begin[0]][begin[1] : end[1]]
                begin = at
            end = (at[0], at[1] + 1)
        if begin != end:
            yield self._passes[cut][begin[0]][begin[1] : end[1]]


def without_ranges(stage: StagePlan) -> StagePlan:
    """A stage without ranges; gates, dispatchers and slots of weight gradients stay."""
    layers = tuple(
        LayerOverlap(
            layer=entry.layer,
            gate=entry.gate,
            dispatcher=entry.dispatcher,
            weight_gradient_slots=entry.weight_gradient_slots,
        )
        for entry in stage.overlap.layers
    )
    return dataclasses.replace(stage, overlap=dataclasses.replace(stage.overlap, layers=layers))


def _steps_of(
    operator: LayerOperator,
    drafts: dict[str, Draft],
    slots: dict[str, tuple[str, ...]],
    whole_gate: Callable[[int], bool],
) -> Iterator[PassStep]:
    """An operator, and the weight gradients under it."""
    place = operator.layer, operator.part
    yield PassStep(place, drafts[operator.name], operator.part == GATE and whole_gate(operator.layer))
    yield from (PassStep(place, drafts[name], True) for name in slots.get(operator.name, ()))


def _pipeline_of(run: Sequence[PassStep], cut: bool) -> Pipeline:
    writer: dict[str, int] = {}
    steps = []
    for place, step in enumerate(run):
        # Buffers written before the pipeline exist when it starts, so they add no dependency.
        after = {writer[buffer] for buffer in step.draft.reads if buffer in writer}
        steps.append(Step(step.draft.kind == "collective", tuple(sorted(after)), cut and step.uncut))
        writer |= dict.fromkeys(step.draft.writes, place)
    return Pipeline(tuple(step.draft.name for step in run), tuple(steps))


# Step 2: prices of pipelines.

Priced = tuple[tuple[Step, ...], tuple[float, ...], int]
"""Steps of a pipeline, seconds of one partition of each, number of partitions: all that its seconds depend on."""


class Prices(Protocol):
    """Prices of the operators of one stage: an instruction_seconds.StagePrices that has read the stage's list."""

    @property
    def machine(self) -> Machine: ...
    @property
    def slowed(self) -> Interference: ...
    def piece_seconds(self, name: str, pieces: int) -> float: ...


class RangePrices:
    """Prices of the ranges of one stage.

    Attributes:
        hidden_bytes: bytes of the hidden states between operators.
    """

    def __init__(self, plan: Plan, stage: StagePlan, model: ModelDescription, prices: Prices) -> None:
        self.hidden_bytes = payload.boundary_bytes(plan, stage, model)
        self._prices = prices
        together = (COMPUTING, BETWEEN_DEVICES)
        # Rule 3c has one rate for both streams: the mean of their two factors.
        self._slowdown = sum(prices.slowed.factor(stream, together) for stream in together) / 2.0 - 1.0
        self._pieces: dict[tuple[str, int], float] = {}
        self._simulated: dict[Priced, float] = {}
        self._gaps: dict[Priced, float | None] = {}

    @property
    def simulated(self) -> int:
        """Pipelines so far, equal ones counted once."""
        return len(self._simulated)

    def operator_seconds(self, name: str, pieces: int = 1) -> float:
        """Seconds of one partition of an operator that is cut into `pieces`."""
        key = name, pieces
        if key not in self._pieces:
            self._pieces[key] = self._prices.piece_seconds(name, pieces)
        return self._pieces[key]

    def seconds(self, pipelines: Iterable[Pipeline], parts: int) -> float:
        """P of a range: the sum of its pipelines."""
        return sum(self._simulate(self._price(pipeline, parts)) for pipeline in pipelines)

    def order_gap(self, pipeline: Pipeline, parts: int) -> float | None:
        """`gap_to_best` of a pipeline."""
        priced = self._price(pipeline, parts)
        if priced not in self._gaps:
            self._gaps[priced] = gap_to_best(*priced)
        return self._gaps[priced]

    def _price(self, pipeline: Pipeline, parts: int) -> Priced:
        named = tuple(zip(pipeline.names, pipeline.steps, strict=True))
        cut = {name for name, step in named if not step.uncut}

        def seconds(name: str, uncut: bool) -> float:
            # The weight gradient of a partitioned operator is one step, but computes one product per partition.
            if uncut and backward_of(name) in cut:
                return parts * self.operator_seconds(name, parts)
            return self.operator_seconds(name, 1 if uncut else parts)

        return pipeline.steps, tuple(seconds(name, step.uncut) for name, step in named), parts

    def _simulate(self, priced: Priced) -> float:
        # Repeated layers have equal steps at equal prices: of thousands of P only a few are simulated.
        if priced not in self._simulated:
            edge = self._edge_seconds(priced[2])
            self._simulated[priced] = pipeline_seconds(*priced, self._slowdown, edge, edge)
        return self._simulated[priced]

    def _edge_seconds(self, parts: int) -> float:
        """Seconds of cutting, or of joining, the hidden states."""
        if parts == 1:
            return 0.0
        machine = self._prices.machine
        rate = machine.cluster.group_of(0).gpu.memory_gb_per_s * 1e9 * machine.constants.memory
        # A cut copies: the hidden states are read once and written once, by one kernel per partition.
        return 2.0 * self.hidden_bytes / rate + parts * machine.constants.kernel_seconds
