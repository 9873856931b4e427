"""From seconds of steps to the figures of the overlap benchmark.

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


@dataclass(frozen=True, slots=True)
class Spread:
    """Minimum, median and maximum of repeated measurements."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(min(values), statistics.median(values), max(values))

    def __str__(self) -> str:
        return f"{self.min:.3f} {self.median:.3f} {self.max:.3f}"


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of a variant: the slowest rank's seconds."""

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
        alone_seconds: its communication without computation; None where that was not measured.
        both_seconds: computation and communication at once; only_computation_seconds: nothing under way. With the median of
            `exposed_seconds` they make up the median step.
        speedup: over the sequential variant; plain_speedup: over megatron-core's all-to-all.
        hidden: share of the sequential variant's communication; None where there is none.
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
    """What every variant has to get through, in seconds of one step."""

    sequential: float
    computation: float
    communication: float

    @property
    def ratio(self) -> float:
        """All-to-all seconds per second of the rest."""
        return (self.sequential - self.computation) / self.computation

    @property
    def bound(self) -> float:
        """No step is shorter."""
        return max(self.computation, self.communication)

    @property
    def bound_speedup(self) -> float:
        """The largest gain there is."""
        return self.sequential / self.bound

    def __str__(self) -> str:
        both = f"computation {self.computation:.3f} s, communication {self.communication:.3f} s"
        return f"{both}; no step is below {self.bound:.3f} s, no speedup above {self.bound_speedup:.2f}"


@dataclass(frozen=True, slots=True)
class Measured:
    """Turns of all variants at one link rate; the n-th turns of all belong together.

    Attributes:
        limited, free: variant -> turns with the limited and the free link.
        alone: variant -> seconds of its communication without computation.
    """

    limited: Mapping[str, Sequence[Turn]]
    free: Mapping[str, Sequence[Turn]]
    alone: Mapping[str, Sequence[float]]

    def totals(self, sequential: str) -> Totals:
        """Computation and communication of the sequential variant."""
        whole, computation = _median(self.limited[sequential]), _median(self.free[sequential])
        alone = self.alone.get(sequential)
        return Totals(whole, computation, statistics.median(alone) if alone else whole - computation)

    def figures(self, sequential: str, plain: str | None) -> list[Figures]:
        """A row per variant, in the order of their turns."""
        return [self._row(name, sequential, plain) for name in self.limited]

    def _row(self, name: str, sequential: str, plain: str | None) -> Figures:
        turns, free, totals = self.limited[name], self.free[name], self.totals(sequential)
        alone = statistics.median(self.alone[name]) if self.alone.get(name) else None
        exposed = Spread.of([turn.exposed for turn in turns])
        both = max(0.0, (totals.communication if alone is None else alone) - exposed.median)
        hideable = totals.sequential - totals.computation
        return Figures(
            variant=name,
            step_seconds=Spread.of([turn.step for turn in turns]),
            free_step_seconds=Spread.of([turn.step for turn in free]),
            exposed_seconds=exposed,
            free_exposed_seconds=statistics.median(turn.exposed for turn in free),
            exposed_by_difference=_median(turns) - _median(free),
            alone_seconds=alone,
            only_computation_seconds=_median(turns) - exposed.median - both,
            both_seconds=both,
            speedup=self._speedup(name, sequential),
            plain_speedup=self._speedup(name, plain) if plain is not None else None,
            hidden=1 - (_median(turns) - totals.computation) / hideable if hideable > 0 else None,
        )

    def _speedup(self, name: str, baseline: str) -> Spread:
        pairs = zip(self.limited[baseline], self.limited[name], strict=True)
        return Spread.of([slow.step / fast.step for slow, fast in pairs])


def _median(turns: Sequence[Turn]) -> float:
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
"""Of the table; three numbers are minimum, median and maximum."""


def table(rows: Sequence[Figures]) -> str:
    """Aligned text, a Markdown table."""
    cells = [tuple(COLUMNS), *(tuple(shown(row) for shown in COLUMNS.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells)
    header, *body = (f"| {' | '.join(line)} |" for line in padded)
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([header, rule, *body]) + "\n"
