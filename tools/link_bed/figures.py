"""From seconds of steps to the figures of the overlap benchmark.

    sequential     the step without overlap on the same transport
    computation    the sequential step with a free link
    speedup        sequential / step, turn by turn
    share hidden   1 - (step - computation) / (sequential - computation), of the medians
    ratio          (sequential - computation) / computation, of the medians: all-to-all seconds per second of the rest

Steps are forward and backward of all micro-batches, of the slowest rank; the update is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
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
    speedup: Spread
    plain_speedup: Spread | None
    hidden: float | None


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

    def ratio(self, sequential: str) -> float:
        """All-to-all seconds per second of the rest of the sequential step."""
        computation = _median(self.free[sequential])
        return (_median(self.limited[sequential]) - computation) / computation

    def figures(self, sequential: str, plain: str | None) -> list[Figures]:
        """A row per variant, in the order of their turns."""
        return [self._row(name, sequential, plain) for name in self.limited]

    def _row(self, name: str, sequential: str, plain: str | None) -> Figures:
        turns, free = self.limited[name], self.free[name]
        computation, whole = _median(self.free[sequential]), _median(self.limited[sequential])
        alone = self.alone.get(name)
        return Figures(
            variant=name,
            step_seconds=Spread.of([turn.step for turn in turns]),
            free_step_seconds=Spread.of([turn.step for turn in free]),
            exposed_seconds=Spread.of([turn.exposed for turn in turns]),
            free_exposed_seconds=statistics.median(turn.exposed for turn in free),
            exposed_by_difference=_median(turns) - _median(free),
            alone_seconds=statistics.median(alone) if alone else None,
            speedup=self._speedup(name, sequential),
            plain_speedup=self._speedup(name, plain) if plain is not None else None,
            hidden=1 - (_median(turns) - computation) / (whole - computation) if whole > computation else None,
        )

    def _speedup(self, name: str, baseline: str) -> Spread:
        pairs = zip(self.limited[baseline], self.limited[name], strict=True)
        return Spread.of([slow.step / fast.step for slow, fast in pairs])


def _median(turns: Sequence[Turn]) -> float:
    return statistics.median(turn.step for turn in turns)


def table(rows: Sequence[Figures]) -> str:
    """Aligned text; three numbers are minimum, median and maximum."""
    header = ("variant", "step s", "free link s", "alone s", "exposed s", "speedup", "over alltoall", "hidden")
    cells = [header]
    for row in rows:
        cells.append(
            (
                row.variant,
                str(row.step_seconds),
                f"{row.free_step_seconds.median:.3f}",
                "-" if row.alone_seconds is None else f"{row.alone_seconds:.3f}",
                str(row.exposed_seconds),
                str(row.speedup),
                "-" if row.plain_speedup is None else str(row.plain_speedup),
                "-" if row.hidden is None else f"{row.hidden:.0%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join(lines) + "\n"
