"""Which ranges of operators of a plan run in partitions, and in how many.

Problem. Divide the operators of every stage into ranges and each range into partitions, so that all-to-alls of one partition
overlap with computation of another and a micro-batch takes the least time.
Terms.
- A *group* is a run of neighbouring operators that no range may split. A *range* (i, n] holds the groups i, …, n - 1.
- k is the number of partitions of a range; k = 1 leaves it uncut. The *candidates* are the k that divide the samples of a
  micro-batch.
- P(i, n, k) are the seconds of a range by itself: forward and backward pass of a micro-batch, with recomputation and with weight
  gradients under all-to-alls (partition_pipeline.py).
- ρ, γ and ι are the limits of the search: most partitions, seconds of a group, groups of a range (`SearchLimits`).
Steps, for every chunk of every stage.
1. Group the operators (`group`). The operators of an MoE block, from its gate to its merge, are one group; other groups end as
   soon as they reach γ seconds.
2. A range may be cut if it holds an all-to-all, if the plan's rules and the runtime accept it, and if its tensors have axes
   (partition_axes.py); all others have k = 1. Values of k whose bytes do not fit are left out, range by range.
3. Dynamic programming (`solve`): T(0) = 0, T(n) = min over i in [n - ι, n), k in {1, candidates} of T(i) + P(i, n, k). Among
   equals the shorter last range and the smaller k win. T is exact for ranges executed one after the other; if neighbours have
   equal k, the runtime joins them to one pipeline, which takes less.
4. Write the ranges with k > 1 into the plan (`with_ranges`).
Time: groups × ι × candidates calls of P.

Source: Lancet, section 5.1, whose recurrence begins at 1 and counts the instruction between two ranges twice.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.capabilities import refuse_cut_blocks, refuse_cuts_of, refuse_what_cannot_be_lowered
from moe_overlap.plan.lowering.layers import LayerOperator
from moe_overlap.plan.operators import GATE, MERGE, OperatorId
from moe_overlap.plan.overlap import Axis, LayerOverlap, LoweredLimit, SearchLimits
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.rules.overlap import indivisible, validate_ranges
from moe_overlap.tuner.limits import check_limits
from moe_overlap.tuner.search.layer.partition_axes import Conflict, CutAxes, Form, cut_axes
from moe_overlap.tuner.search.layer.partition_pipeline import ChunkPasses, Prices, RangePrices, without_ranges

SAME = 1e-12
"""Relative difference below which two times count as equal."""
Span = tuple[int, int]
"""Half-open range of groups or operators."""


def group(operators: Sequence[LayerOperator], seconds: Callable[[LayerOperator], float], least: float) -> list[Span]:
    """Step 1: group the operators of a chunk.

    Args:
        operators: forward operators in order.
        seconds: seconds of an uncut operator.
        least: γ; at 0 every operator outside an MoE block is a group by itself.
    Returns:
        The groups, as spans of operators.
    """
    groups: list[Span] = []
    begin, inside, total = 0, False, 0.0
    for place, operator in enumerate(operators):
        # An MoE block is never split: irregular rows between its all-to-alls need the gate in the same range
        # (partition_axes.py).
        if operator.part == GATE:
            if begin < place:
                groups.append((begin, place))
            begin, inside, total = place, True, 0.0
        total += seconds(operator)
        if operator.part == MERGE or (not inside and total >= least):
            groups.append((begin, place + 1))
            begin, inside, total = place + 1, False, 0.0
    if begin < len(operators):
        groups.append((begin, len(operators)))
    return groups


@dataclass(frozen=True, slots=True)
class RangeProblem:
    """The problem of choosing ranges and their partitions.

    Attributes:
        groups: number of groups.
        range_limit: ι, most groups in a range.
        candidates: numbers of partitions other than 1, ascending.
        may_be_cut: whether a range holds an all-to-all and can be cut.
        seconds: P; defined for k = 1, and for the candidates of ranges that may be cut.
        bytes: bytes that a range in partitions needs in addition to the uncut range.
        free_bytes: memory available for them.
    """

    groups: int
    range_limit: int
    candidates: Sequence[int]
    may_be_cut: Callable[[Span], bool]
    seconds: Callable[[Span, int], float]
    bytes: Callable[[Span, int], float]
    free_bytes: float

    def fitting(self, span: Span) -> list[int]:
        """The candidates of a range whose bytes fit."""
        return [parts for parts in self.candidates if self.bytes(span, parts) <= self.free_bytes]


@dataclass(frozen=True, slots=True)
class Cut:
    """A range of the answer."""

    span: Span
    partitions: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Lowered:
    """A range of the answer for which memory allows fewer partitions than the limit.

    Attributes:
        most: largest number of partitions that fits; 1: the range stays uncut.
        needed_bytes: additional bytes of the next larger candidate.
    """

    span: Span
    most: int
    needed_bytes: float


@dataclass(frozen=True, slots=True)
class Ranges:
    """The answer: ranges from the first group to the last, and the sum of their seconds."""

    cuts: tuple[Cut, ...]
    seconds: float
    lowered: tuple[Lowered, ...]
    evaluations: int
    """Calls of P."""


def solve(problem: RangeProblem) -> Ranges:
    """Step 3: the dynamic program."""
    # best[n] is T(n) in seconds; T(0) = 0 is the base case that the paper's recurrence lacks. last[n] is the range that ends at
    # n in the best answer.
    best = [0.0] + [math.inf] * problem.groups
    last: list[Cut | None] = [None] * (problem.groups + 1)
    evaluations = 0
    for end in range(1, problem.groups + 1):
        # i descends, k ascends, and the best is replaced only by a time that is shorter by more than rounding. So ties go to
        # the shorter range and the smaller k.
        for begin in range(end - 1, max(0, end - problem.range_limit) - 1, -1):
            span = begin, end
            for parts in (1, *(problem.fitting(span) if problem.may_be_cut(span) else ())):
                # P(i, n, k). The paper sets P to infinity for k > 1 if a range may not be cut; here such k are skipped.
                seconds = problem.seconds(span, parts)
                evaluations += 1
                total = best[begin] + seconds
                if last[end] is None or total < best[end] - SAME * abs(best[end]):
                    best[end], last[end] = total, Cut(span, parts, seconds)
    cuts = tuple(_backwards(last))[::-1]
    return Ranges(cuts, best[-1], tuple(_lowered(problem, cuts)), evaluations)


def _backwards(last: Sequence[Cut | None]) -> Iterator[Cut]:
    end = len(last) - 1
    while end > 0:
        cut = last[end]
        assert cut is not None
        yield cut
        end = cut.span[0]


def _lowered(problem: RangeProblem, cuts: Sequence[Cut]) -> Iterator[Lowered]:
    for cut in cuts:
        if not problem.may_be_cut(cut.span):
            continue
        too_large = [parts for parts in problem.candidates if parts not in problem.fitting(cut.span)]
        if too_large:
            most = max((parts for parts in problem.candidates if parts < too_large[0]), default=1)
            yield Lowered(cut.span, most, problem.bytes(cut.span, too_large[0]))


# The answer for a stage, and step 4.


@dataclass(frozen=True, kw_only=True, slots=True)
class CutRange:
    """A range in partitions; `layer` is the first MoE layer of the range, whose entry in the plan holds it."""

    first_operator: str
    last_operator: str
    layer: int
    partitions: int
    axis: Axis


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenRange(CutRange):
    """A range that was chosen.

    Attributes:
        seconds, uncut_seconds: of one micro-batch, with and without partitions.
        order_gap: seconds of its forward pass over those in the best order, minus 1; None if there are too many orders.
    """

    seconds: float
    uncut_seconds: float
    order_gap: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredRange:
    """A range for which memory allows fewer partitions than the limit of the search; 1: it stays uncut."""

    first_operator: str
    last_operator: str
    most_partitions: int
    needed_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRanges:
    """The ranges chosen for a stage; seconds are those of one micro-batch through its layers, forward and backward.

    Attributes:
        seconds: as executed, with neighbours of equal k joined to one pipeline.
        separate_seconds: T, one range after the other.
        uncut_seconds: without partitions.
        excluded: (range, reason) of ranges with an all-to-all that may not be cut; reasons that differ in layer numbers only are
            given once.
        evaluations: calls of P.
        simulated: different pipelines that were simulated for them.
    """

    ranges: tuple[ChosenRange, ...]
    seconds: float
    separate_seconds: float
    uncut_seconds: float
    lowered: tuple[LoweredRange, ...]
    excluded: tuple[tuple[str, str], ...]
    evaluations: int
    simulated: int


def with_ranges(stage: StagePlan, ranges: Sequence[CutRange], limits: SearchLimits | None) -> StagePlan:
    """A stage with these ranges in place of its present ones; default entries are left out."""
    uncut = without_ranges(stage)
    entries = {entry.layer: entry for entry in uncut.overlap.layers}
    for chosen in ranges:
        entries[chosen.layer] = dataclasses.replace(
            entries.get(chosen.layer, LayerOverlap(layer=chosen.layer)),
            mechanism="partitioned",
            partitions=chosen.partitions,
            first_operator=chosen.first_operator,
            last_operator=chosen.last_operator,
            axis=chosen.axis,
        )
    layers = tuple(entry for _, entry in sorted(entries.items()) if entry != LayerOverlap(layer=entry.layer))
    return dataclasses.replace(uncut, overlap=dataclasses.replace(uncut.overlap, layers=layers, search_limits=limits))


# Step 2, and the search of one stage, chunk after chunk.


@dataclass(slots=True)
class RangeSearch:
    """The search of one stage; fields as the arguments of `partition_ranges`, for this stage."""

    plan: Plan
    index: int
    model: ModelDescription
    prices: RangePrices
    limits: SearchLimits
    free_bytes: float
    _excluded: dict[str, tuple[str, str]] = field(default_factory=dict)
    _axes: dict[tuple[object, ...], CutAxes | Conflict] = field(default_factory=dict)

    def solve(self) -> StageRanges:
        """Search chunk after chunk; seconds and counts are summed."""
        form = Form.of(self.model, self.stage)
        chunks = [_ChunkSearch(self, form, range(*chunk)) for chunk in self.stage.chunks]
        answers = [(chunk, chunk.solve()) for chunk in chunks]
        return StageRanges(
            ranges=tuple(of_chunk for chunk, answer in answers for of_chunk in chunk.chosen(answer.cuts)),
            seconds=sum(chunk.joined_seconds(answer.cuts) for chunk, answer in answers),
            separate_seconds=sum(answer.seconds for _, answer in answers),
            uncut_seconds=sum(chunk.seconds((0, len(chunk.groups)), 1) for chunk in chunks),
            lowered=tuple(of_chunk for chunk, answer in answers for of_chunk in chunk.lowered(answer)),
            excluded=tuple(self._excluded.values()),
            evaluations=sum(answer.evaluations for _, answer in answers),
            simulated=self.prices.simulated,
        )

    @property
    def stage(self) -> StagePlan:
        """The stage as the plan has it."""
        return self.plan.stages[self.index]

    def candidates(self) -> list[int]:
        """Numbers of partitions, from 2 to the limit, that divide the samples of a micro-batch."""
        samples, most = self.stage.micro_batch_size, self.limits.max_partitions
        return [parts for parts in range(2, min(samples, most) + 1) if samples % parts == 0]

    def axes(self, operators: Sequence[LayerOperator], form: Form) -> CutAxes | Conflict:
        """The axes of a range of operators; solved once for equal ranges."""
        # Layers are counted from the first of the range, so that ranges of repeated layers share one solution.
        base = operators[0].layer
        key = tuple(
            (operator.layer - base, operator.part, form.takes_samples(operator.layer)) for operator in operators
        )
        if key not in self._axes:
            self._axes[key] = cut_axes(
                [OperatorId(operator.part, layer=operator.layer) for operator in operators], form
            )
        return self._axes[key]

    def exclude(self, ends: str, reason: str) -> None:
        """Record why a range may not be cut, once for ranges that differ in layer numbers only."""
        self._excluded.setdefault(re.sub(r"\d+", "", reason), (ends, reason))

    def refusal(self, chosen: CutRange, layers: Collection[int]) -> str | None:
        """Why the plan's rules or the runtime refuse a range over these layers; None if they accept it."""
        # The stage gets this range only: collisions of two ranges need no check, since the ranges of an answer do not overlap.
        entries = tuple(entry for entry in self.stage.overlap.layers if entry.layer in layers)
        around = dataclasses.replace(self.stage, overlap=dataclasses.replace(self.stage.overlap, layers=entries))
        stage = with_ranges(around, [chosen], None)
        stages = (*self.plan.stages[: self.index], stage, *self.plan.stages[self.index + 1 :])
        try:
            validate_ranges(stage, self.model, "overlap")
            plan = dataclasses.replace(self.plan, stages=stages)
            refuse_what_cannot_be_lowered(plan)
            refuse_cut_blocks(plan, "plan")
            refuse_cuts_of(stage, "stage")
        except ConfigError as error:
            field_name = error.subject.replace(".", " ").split()[-1]
            return f"{field_name} {error.value}: {error.rule}"
        return None


class _ChunkSearch:
    """The search of one chunk of a stage.

    Attributes:
        groups: groups of the chunk's operators.
    """

    def __init__(self, stage: RangeSearch, form: Form, layers: range) -> None:
        self._stage, self._form = stage, form
        self._passes = ChunkPasses(
            stage.plan, stage.stage, stage.model, layers, lambda layer: not form.takes_samples(layer)
        )
        self._operators = self._passes.operators
        self.groups = group(
            self._operators, lambda operator: stage.prices.operator_seconds(operator.name), stage.limits.group_seconds
        )
        self._axis: dict[Span, Axis | None] = {}

    def solve(self) -> Ranges:
        """The best ranges."""
        return solve(
            RangeProblem(
                groups=len(self.groups),
                range_limit=self._stage.limits.range_limit,
                candidates=self._stage.candidates(),
                may_be_cut=lambda span: self._axis_of(span) is not None,
                seconds=self.seconds,
                bytes=self.held_bytes,
                free_bytes=self._stage.free_bytes,
            )
        )

    def seconds(self, span: Span, parts: int) -> float:
        """P of a range, forward and backward."""
        return self._stage.prices.seconds(self._passes.pipelines(*self._places(span), parts > 1), parts)

    def held_bytes(self, span: Span, parts: int) -> float:
        """Additional bytes of a range in partitions: copies of the hidden states that are cut, and of those that are joined."""
        return 2.0 * self._stage.prices.hidden_bytes

    def joined_seconds(self, cuts: Sequence[Cut]) -> float:
        """Seconds of ranges, with neighbours of equal k joined to one pipeline."""
        total, begin = 0.0, 0
        for place, cut in enumerate(cuts):
            if place + 1 == len(cuts) or cuts[place + 1].partitions != cut.partitions:
                total += self.seconds((cuts[begin].span[0], cut.span[1]), cut.partitions)
                begin = place + 1
        return total

    def chosen(self, cuts: Sequence[Cut]) -> Iterator[ChosenRange]:
        """The ranges that are cut."""
        for cut in cuts:
            # Ranges with k = 1 need no entry: operators outside all ranges of a plan are uncut.
            if cut.partitions > 1:
                axis = self._axis_of(cut.span)
                assert axis is not None
                forward, *_ = self._passes.pipelines(*self._places(cut.span), True)
                yield ChosenRange(
                    **dataclasses.asdict(self._range(cut.span, cut.partitions, axis)),
                    seconds=cut.seconds,
                    uncut_seconds=self.seconds(cut.span, 1),
                    order_gap=self._stage.prices.order_gap(forward, cut.partitions),
                )

    def lowered(self, answer: Ranges) -> Iterator[LoweredRange]:
        """Ranges with fewer partitions than the limit, with the names of their operators."""
        for lowered_range in answer.lowered:
            first, last = self._ends(lowered_range.span)
            yield LoweredRange(
                first_operator=first,
                last_operator=last,
                most_partitions=lowered_range.most,
                needed_bytes=lowered_range.needed_bytes,
            )

    def _axis_of(self, span: Span) -> Axis | None:
        """The axis along which a range is cut; None if it may not be cut."""
        if span not in self._axis:
            self._axis[span] = self._find_axis(span)
        return self._axis[span]

    def _find_axis(self, span: Span) -> Axis | None:
        first, last = self._places(span)
        operators = self._operators[first:last]
        if not any(operator.is_exchange for operator in operators):
            return None
        layers, candidates = {operator.layer for operator in operators}, self._stage.candidates()
        axis: Axis | None = None
        if not candidates:
            samples, most = self._stage.stage.micro_batch_size, self._stage.limits.max_partitions
            reason: str | None = (
                f"no number of partitions up to {most} divides the micro-batch of {samples}: {indivisible(samples)[1]}"
            )
        else:
            # Cheap rules first, with the axis that most ranges get; they are checked again if the solver finds another axis.
            reason = self._stage.refusal(self._range(span, candidates[0], "batch"), layers)
        if reason is None:
            cut = self._stage.axes(operators, self._form)
            axis = None if isinstance(cut, Conflict) else cut.axis
            reason = cut.reason if isinstance(cut, Conflict) else None
            if axis is not None and axis != "batch":
                reason = self._stage.refusal(self._range(span, candidates[0], axis), layers)
        if reason is not None:
            self._stage.exclude(" … ".join(self._ends(span)), reason)
            return None
        return axis

    def _range(self, span: Span, partitions: int, axis: Axis) -> CutRange:
        """A span with an all-to-all, as a range of a plan."""
        first, last = self._ends(span)
        operators = self._operators[slice(*self._places(span))]
        owner = next(operator.layer for operator in operators if operator.part == GATE)
        return CutRange(first_operator=first, last_operator=last, layer=owner, partitions=partitions, axis=axis)

    def _places(self, span: Span) -> Span:
        """The span of operators of a span of groups."""
        return self.groups[span[0]][0], self.groups[span[1] - 1][1]

    def _ends(self, span: Span) -> tuple[str, str]:
        first, last = self._places(span)
        return self._operators[first].name, self._operators[last - 1].name


@dataclass(frozen=True, slots=True)
class PartitionedPlan:
    """A plan with its ranges, and the answer for each stage."""

    plan: Plan
    stages: tuple[StageRanges, ...]


def partition_ranges(
    plan: Plan,
    model: ModelDescription,
    prices: Mapping[int, Prices],
    limits: SearchLimits,
    free_bytes: Sequence[float],
) -> PartitionedPlan:
    """Cut the micro-batches of a plan where that is predicted to be shorter.

    Args:
        plan: its ranges and other mechanisms are replaced; gates, dispatchers and slots of weight gradients stay. Layers without
            a gate in the plan stay uncut.
        prices: first rank of every stage -> prices of this plan, as `SimulatedStep` has them.
        free_bytes: [stages] free memory of a device when the plan without ranges is executed.
    Raises:
        ConfigError: a limit is out of range, or the plan has several micro-batches in flight.
        UndecidedError: the solver of axes ran out of time.
    """
    _check(plan, limits)
    answers, stages = [], []
    for index, stage in enumerate(plan.stages):
        priced = RangePrices(plan, stage, model, prices[stage.devices.ranks[0]])
        answer = RangeSearch(plan, index, model, priced, limits, free_bytes[index]).solve()
        answers.append(answer)
        recorded = dataclasses.replace(limits, lowered=tuple(map(_limit, answer.lowered)))
        stages.append(with_ranges(stage, answer.ranges, recorded))
    return PartitionedPlan(dataclasses.replace(plan, stages=tuple(stages), predicted=None), tuple(answers))


def _limit(lowered: LoweredRange) -> LoweredLimit:
    return LoweredLimit(
        first_operator=lowered.first_operator,
        last_operator=lowered.last_operator,
        max_partitions=lowered.most_partitions,
    )


def _check(plan: Plan, limits: SearchLimits) -> None:
    check_limits(limits)
    for index, stage in enumerate(plan.stages):
        if stage.overlap.micro_batches_in_flight > 1:
            rule = "ranges are priced for one micro-batch after the other"
            subject = f"plan stages[{index}].overlap.micro_batches_in_flight"
            raise ConfigError(subject, stage.overlap.micro_batches_in_flight, rule, "write 1")
