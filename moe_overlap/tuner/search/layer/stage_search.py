"""The search of ranges for one stage: chunk after chunk, what may be cut along which axis, and what it takes."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.capabilities import refuse_cuts_of, refuse_what_cannot_be_lowered
from moe_overlap.plan.layer_sequence import LayerOperator
from moe_overlap.plan.operators import GATE, Operator
from moe_overlap.plan.overlap import Axis, SearchLimits
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.validate_ranges import indivisible, validate_ranges
from moe_overlap.tuner.search.layer.chunk_passes import ChunkPasses
from moe_overlap.tuner.search.layer.found_ranges import ChosenRange, CutRange, LoweredRange, StageRanges, with_ranges
from moe_overlap.tuner.search.layer.operations import Form
from moe_overlap.tuner.search.layer.partition_axis import Conflict, CutAxes, cut_axes
from moe_overlap.tuner.search.layer.partition_range import Cut, RangeProblem, Ranges, Span, group, solve
from moe_overlap.tuner.search.layer.range_prices import RangePrices

HeldBytes = Callable[[str, str, int], float]
"""First and last operator of a range, partitions -> bytes that it holds beyond the whole range."""


@dataclass(slots=True)
class StageSearch:
    """The search of one stage; the arguments of `partition_ranges`, of this stage."""

    plan: Plan
    index: int
    model: ModelDescription
    prices: RangePrices
    limits: SearchLimits
    free_bytes: float
    held_bytes: HeldBytes | None
    _excluded: dict[str, tuple[str, str]] = field(default_factory=dict)
    _axes: dict[tuple[object, ...], CutAxes | Conflict] = field(default_factory=dict)

    def solve(self) -> StageRanges:
        """Chunk after chunk; seconds and counts are sums."""
        begun = time.perf_counter()
        form = Form.of(self.model, self.stage)
        chunks = [_ChunkSearch(self, form, range(*chunk)) for chunk in self.stage.chunks]
        found = [(chunk, chunk.solve()) for chunk in chunks]
        return StageRanges(
            ranges=tuple(one for chunk, answer in found for one in chunk.chosen(answer.cuts)),
            seconds=sum(chunk.joined_seconds(answer.cuts) for chunk, answer in found),
            separate_seconds=sum(answer.seconds for _, answer in found),
            uncut_seconds=sum(chunk.seconds((0, len(chunk.groups)), 1) for chunk in chunks),
            lowered=tuple(one for chunk, answer in found for one in chunk.lowered(answer)),
            excluded=tuple(self._excluded.values()),
            evaluations=sum(answer.evaluations for _, answer in found),
            simulated=self.prices.simulated,
            solve_seconds=time.perf_counter() - begun,
        )

    @property
    def stage(self) -> StagePlan:
        """As the plan has it."""
        return self.plan.stages[self.index]

    def candidates(self) -> list[int]:
        """Numbers of partitions that divide the samples of a micro-batch."""
        samples, most = self.stage.micro_batch_size, self.limits.max_partitions
        return [parts for parts in range(2, min(samples, most) + 1) if samples % parts == 0]

    def axes(self, operators: Sequence[LayerOperator], form: Form) -> CutAxes | Conflict:
        """How operators can be cut; solved once for equal ones."""
        base = operators[0].layer
        key = tuple((one.layer - base, one.part, form.takes_samples(one.layer)) for one in operators)
        if key not in self._axes:
            self._axes[key] = cut_axes([Operator(one.part, layer=one.layer) for one in operators], form)
        return self._axes[key]

    def exclude(self, ends: str, reason: str) -> None:
        """Take down why a range may not be cut, unless another layer's may not for the same reason."""
        self._excluded.setdefault(re.sub(r"\d+", "", reason), (ends, reason))

    def refusal(self, chosen: CutRange, layers: Collection[int]) -> str | None:
        """Why the plan's rules or the runtime refuse a range over these layers; None where they do not."""
        entries = tuple(one for one in self.stage.overlap.layers if one.layer in layers)
        around = dataclasses.replace(self.stage, overlap=dataclasses.replace(self.stage.overlap, layers=entries))
        stage = with_ranges(around, [chosen], None)
        stages = (*self.plan.stages[: self.index], stage, *self.plan.stages[self.index + 1 :])
        try:
            validate_ranges(stage, self.model, "overlap")
            refuse_what_cannot_be_lowered(dataclasses.replace(self.plan, stages=stages))
            refuse_cuts_of(stage, "stage")
        except ConfigError as error:
            field_name = error.subject.replace(".", " ").split()[-1]
            return f"{field_name} {error.value}: {error.rule}"
        return None


class _ChunkSearch:
    """The search of one chunk of a stage.

    Attributes:
        groups: of its operators.
    """

    def __init__(self, stage: StageSearch, form: Form, layers: range) -> None:
        self._stage, self._form = stage, form
        self._passes = ChunkPasses(
            stage.plan, stage.stage, stage.model, layers, lambda layer: not form.takes_samples(layer)
        )
        self._operators = self._passes.operators
        self.groups = group(
            self._operators, lambda one: stage.prices.operator_seconds(one.name), stage.limits.group_seconds
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
                bytes=self._held_bytes,
                free_bytes=self._stage.free_bytes,
            )
        )

    def seconds(self, span: Span, parts: int) -> float:
        """P of a range, forward and backward."""
        return self._stage.prices.seconds(self._passes.pipelines(*self._places(span), parts > 1), parts)

    def _held_bytes(self, span: Span, parts: int) -> float:
        if self._stage.held_bytes is None:
            return 2.0 * self._stage.prices.hidden_bytes
        return self._stage.held_bytes(*self._ends(span), parts)

    def joined_seconds(self, cuts: Sequence[Cut]) -> float:
        """Of ranges of which neighbours of equal k are one pipeline."""
        total, begin = 0.0, 0
        for place, cut in enumerate(cuts):
            if place + 1 == len(cuts) or cuts[place + 1].partitions != cut.partitions:
                total += self.seconds((cuts[begin].span[0], cut.span[1]), cut.partitions)
                begin = place + 1
        return total

    def chosen(self, cuts: Sequence[Cut]) -> Iterator[ChosenRange]:
        """The ranges that are cut."""
        for cut in cuts:
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
        """By names."""
        for one in answer.lowered:
            first, last = self._ends(one.span)
            yield LoweredRange(
                first_operator=first, last_operator=last, most_partitions=one.most, needed_bytes=one.needed_bytes
            )

    def _axis_of(self, span: Span) -> Axis | None:
        """What a range is cut along; None where it may not be."""
        if span not in self._axis:
            self._axis[span] = self._find_axis(span)
        return self._axis[span]

    def _find_axis(self, span: Span) -> Axis | None:
        first, last = self._places(span)
        operators = self._operators[first:last]
        if not any(one.is_exchange for one in operators):
            return None
        layers, candidates = {one.layer for one in operators}, self._stage.candidates()
        axis: Axis | None = None
        if not candidates:
            samples, most = self._stage.stage.micro_batch_size, self._stage.limits.max_partitions
            reason: str | None = (
                f"no number of partitions up to {most} divides the micro-batch of {samples}: {indivisible(samples)[1]}"
            )
        else:
            # Cheap rules first; the axis they ask for is what the solver must find.
            reason = self._stage.refusal(self._range(span, candidates[0], "batch"), layers)
        if reason is None:
            found = self._stage.axes(operators, self._form)
            axis = None if isinstance(found, Conflict) else found.axis
            reason = found.reason if isinstance(found, Conflict) else None
            if axis is not None and axis != "batch":
                reason = self._stage.refusal(self._range(span, candidates[0], axis), layers)
        if reason is not None:
            self._stage.exclude(" … ".join(self._ends(span)), reason)
            return None
        return axis

    def _range(self, span: Span, partitions: int, axis: Axis) -> CutRange:
        """A range that holds an exchange."""
        first, last = self._ends(span)
        operators = self._operators[slice(*self._places(span))]
        owner = next(one.layer for one in operators if one.part == GATE)
        return CutRange(first_operator=first, last_operator=last, layer=owner, partitions=partitions, axis=axis)

    def _places(self, span: Span) -> Span:
        """Operators of groups."""
        return self.groups[span[0]][0], self.groups[span[1] - 1][1]

    def _ends(self, span: Span) -> tuple[str, str]:
        first, last = self._places(span)
        return self._operators[first].name, self._operators[last - 1].name
