"""The figures of the overlap benchmark, computed from seconds of steps, and the plans that a chosen plan is judged against.

    sequential     the step without overlap on the same transport
    computation    the sequential step with a free link
    communication  of the sequential step without computation; where that cannot be measured, sequential - computation
    bound          max(computation, communication): no order of the same work is faster
    speedup        sequential / step, turn by turn
    share hidden   1 - (step - computation) / (sequential - computation), of the medians
    ratio          (sequential - computation) / computation, of the medians: all-to-all seconds per second of the rest

A step, taken apart as in Lancet's figure 13: computation alone, both at once, communication alone (exposed).

Steps are forward and backward of all micro-batches, of the slowest rank; the update is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moe_overlap.plan.gates import GATE_FACTS, RANGES_BEFORE
from moe_overlap.plan.overlap import TUTEL_DEGREES
from tools.bench.variants import CHUNKS, DEFER, INTERLEAVE, PLAIN, SEQUENTIAL, Variant, base_flags, plain_flags


@dataclass(frozen=True, slots=True)
class Spread:
    """Minimum, median and maximum of repeated measurements."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(min(values), statistics.median(values), max(values))

    def __str__(self) -> str:
        return f"{self.min:.3f} {self.median:.3f} {self.max:.3f}"


@dataclass(frozen=True, slots=True)
class MeasuredTurn:
    """One step of a variant, in seconds of the slowest rank."""

    step: float
    exposed: float
    """Communication that no computation of its rank covered, from spans."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One variant at one link rate.

    Attributes:
        free_step_seconds: its step with a free link.
        exposed_seconds: communication that no computation covered, from spans; free_exposed_seconds: with a free link, median.
        exposed_by_difference: median step minus its median step with a free link. It should equal the difference of the two
            above: on a free link the messages still cost a little.
        alone_seconds: its communication without computation; None if that was not measured.
        both_seconds: computation and communication at once; only_computation_seconds: nothing under way. With the median of
            `exposed_seconds` they make up the median step.
        speedup: over the sequential variant; plain_speedup: over megatron-core's all-to-all.
        hidden: share of the sequential variant's communication; None if there is none.
    """

    variant: str
    step_seconds: Spread
    free_step_seconds: Spread
    exposed_seconds: Spread
    free_exposed_seconds: float
    exposed_by_difference: float
    alone_seconds: float | None
    only_computation_seconds: float
    both_seconds: float
    speedup: Spread
    plain_speedup: Spread | None
    hidden: float | None


@dataclass(frozen=True, slots=True)
class Totals:
    """The work of every variant, in seconds of one step."""

    sequential: float
    computation: float
    communication: float

    @property
    def ratio(self) -> float:
        """All-to-all seconds per second of the rest."""
        return (self.sequential - self.computation) / self.computation

    @property
    def bound(self) -> float:
        """Seconds below which no step can be."""
        return max(self.computation, self.communication)

    @property
    def bound_speedup(self) -> float:
        """The largest speedup that any variant can reach."""
        return self.sequential / self.bound

    def __str__(self) -> str:
        both = f"computation {self.computation:.3f} s, communication {self.communication:.3f} s"
        return f"{both}; no step is below {self.bound:.3f} s, no speedup above {self.bound_speedup:.2f}"


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Turns of all variants at one link rate; the n-th turns of all belong together.

    Attributes:
        limited, free: variant -> turns with the limited and the free link.
        communication: variant -> seconds of its communication without computation.
    """

    limited: Mapping[str, Sequence[MeasuredTurn]]
    free: Mapping[str, Sequence[MeasuredTurn]]
    communication: Mapping[str, Sequence[float]]

    def totals(self, sequential: str) -> Totals:
        """Computation and communication of the sequential variant."""
        sequential_seconds, computation = _median(self.limited[sequential]), _median(self.free[sequential])
        turns = self.communication.get(sequential)
        return Totals(
            sequential_seconds, computation, statistics.median(turns) if turns else sequential_seconds - computation
        )

    def figures(self, sequential: str, plain: str | None) -> list[Figures]:
        """A row per variant, in the order of their turns."""
        return [self._row(name, sequential, plain) for name in self.limited]

    def _row(self, name: str, sequential: str, plain: str | None) -> Figures:
        turns, free, totals = self.limited[name], self.free[name], self.totals(sequential)
        communication = statistics.median(self.communication[name]) if self.communication.get(name) else None
        exposed = Spread.of([turn.exposed for turn in turns])
        both = max(0.0, (totals.communication if communication is None else communication) - exposed.median)
        hideable = totals.sequential - totals.computation
        return Figures(
            variant=name,
            step_seconds=Spread.of([turn.step for turn in turns]),
            free_step_seconds=Spread.of([turn.step for turn in free]),
            exposed_seconds=exposed,
            free_exposed_seconds=statistics.median(turn.exposed for turn in free),
            exposed_by_difference=_median(turns) - _median(free),
            alone_seconds=communication,
            only_computation_seconds=_median(turns) - exposed.median - both,
            both_seconds=both,
            speedup=self._speedup(name, sequential),
            plain_speedup=self._speedup(name, plain) if plain is not None else None,
            hidden=1 - (_median(turns) - totals.computation) / hideable if hideable > 0 else None,
        )

    def _speedup(self, name: str, baseline: str) -> Spread:
        pairs = zip(self.limited[baseline], self.limited[name], strict=True)
        return Spread.of([slow.step / fast.step for slow, fast in pairs])


def _median(turns: Sequence[MeasuredTurn]) -> float:
    return statistics.median(turn.step for turn in turns)


COLUMNS: dict[str, Callable[[Figures], str]] = {
    "variant": lambda row: row.variant,
    "step s": lambda row: str(row.step_seconds),
    "computation s": lambda row: f"{row.only_computation_seconds:.3f}",
    "both s": lambda row: f"{row.both_seconds:.3f}",
    "exposed s": lambda row: str(row.exposed_seconds),
    "free link s": lambda row: f"{row.free_step_seconds.median:.3f}",
    "speedup": lambda row: str(row.speedup),
    "over alltoall": lambda row: "-" if row.plain_speedup is None else str(row.plain_speedup),
    "hidden": lambda row: "-" if row.hidden is None else f"{row.hidden:.0%}",
}
"""Columns of the table; three numbers are minimum, median and maximum."""


def table(rows: Sequence[Figures]) -> str:
    """Aligned text, a Markdown table."""
    cells = [tuple(COLUMNS), *(tuple(shown(row) for shown in COLUMNS.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells)
    header, *body = (f"| {' | '.join(line)} |" for line in padded)
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([header, rule, *body]) + "\n"


PARTITIONS = (2, 4, 8)
RANGES = ("experts", "after", "around")
BASELINES = (PLAIN, SEQUENTIAL)
CHOSEN = "chosen"


def baselines(gate: str) -> list[Variant]:
    """megatron-core's list without overlap: over its own all-to-all, and over the transport of all other plans."""
    return [Variant(PLAIN, plain_flags(gate), plain=True), Variant(SEQUENTIAL, base_flags(gate))]


def hand_set(gate: str, samples: int) -> list[Variant]:
    """Every plan that flags can say by hand: mechanism × deferral × one or two micro-batches at a time.

    The sequential plan and those that a plan may not have are left out.

    Args:
        samples: of a micro-batch, which partitions divide.
    """
    cuts: list[tuple[str, tuple[str, ...]]] = [("", ())]
    cuts += [(f"tutel {degree}", (CHUNKS, str(degree))) for degree in TUTEL_DEGREES[1:]]
    for name in RANGES:
        if name in RANGES_BEFORE and not GATE_FACTS[gate].partitionable_before:
            continue
        for count in PARTITIONS:
            if samples % count == 0:
                flags = ("--moe-overlap-partitions", str(count), "--moe-overlap-range", name)
                cuts.append((f"{name} {count}", flags))
    plans = []
    for together, interleaved in (("", ()), ("two micro-batches", INTERLEAVE)):
        for cut, cut_flags in cuts:
            if interleaved and CHUNKS in cut_flags:
                continue  # a plan may not have both
            for deferred, defer_flags in (("", ()), ("deferral", DEFER)):
                if parts := [word for word in (cut, deferred, together) if word]:
                    flags = (*base_flags(gate), *cut_flags, *defer_flags, *interleaved)
                    plans.append(Variant(" + ".join(parts), flags))
    return plans


def fastest(steps: Mapping[str, Sequence[float]], count: int) -> list[str]:
    """Names of the plans with the shortest step: the least of several steps is the one that was disturbed least."""
    return sorted(steps, key=lambda name: min(steps[name]))[:count]


@dataclass(frozen=True, slots=True)
class Judged:
    """The measurements of one cell, and the judgement of the plan that was chosen.

    Attributes:
        finals: plan -> its steps of the last round: the chosen one, the baselines, the fastest hand-set ones.
        swept: hand-set plan -> its steps of the sweep.
        predicted: plan -> seconds that the tuner expects of it.
    """

    finals: Mapping[str, Sequence[float]]
    swept: Mapping[str, Sequence[float]]
    predicted: Mapping[str, float]

    @property
    def best(self) -> str:
        """The hand-set plan with the shortest median."""
        return min((name for name in self.finals if name not in (*BASELINES, CHOSEN)), key=self.median)

    def median(self, name: str) -> float:
        """Median step of a plan: of the last round, where it took part."""
        return statistics.median(self.finals.get(name) or self.swept[name])

    @property
    def over_best(self) -> float:
        """Share by which the chosen plan is slower than the best hand-set one."""
        return self.median(CHOSEN) / self.median(self.best) - 1.0

    def gain(self, baseline: str) -> Spread:
        """Steps of a baseline over those of the chosen plan, turn by turn."""
        return Spread.of([slow / fast for slow, fast in zip(self.finals[baseline], self.finals[CHOSEN], strict=True)])

    def error(self, name: str) -> float:
        """Error of the predicted step, relative to the measured one."""
        return self.predicted[name] / self.median(name) - 1.0

    @property
    def mean_error(self) -> float:
        """Mean of the absolute errors over all hand-set plans."""
        return statistics.fmean(abs(self.error(name)) for name in self.swept)
