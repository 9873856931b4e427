"""Quantiles of measured over predicted peaks of memory, for `--memory-margin`.

1. The logarithms of measured over predicted peaks of calibration runs are modelled as normally distributed. `MemoryErrors` has
   their mean, their standard deviation and their number n (`tuner/calibrate/fit`).
2. With few runs the deviation is uncertain itself. The quantile for another run is exp(mean + t · deviation · √(1 + 1/n)), with t
   from Student's distribution with n - 1 degrees of freedom.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_overlap.describe.errors import ConfigError
from moe_overlap.tuner.cost.feasibility import CERTAINTY, MemoryQuantiles

_HALVINGS = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryErrors:
    """Logarithms of measured over predicted peaks.

    Attributes:
        deviation: sample standard deviation (n - 1 in the denominator).
        runs: n, at least two. Runs of one model on one GPU type count as one, with their mean.
    """

    mean: float
    deviation: float
    runs: int

    def quantiles(self, margin: float = CERTAINTY) -> MemoryQuantiles:
        """The quantiles of a verdict, 5 % and the margin, rounded to three digits like the constants."""
        return MemoryQuantiles(low=self._factor(1.0 - CERTAINTY), high=self._factor(margin), margin=margin)

    def _factor(self, quantile: float) -> float:
        spread = student_quantile(quantile, self.runs - 1) * self.deviation * math.sqrt(1.0 + 1.0 / self.runs)
        return float(f"{math.exp(self.mean + spread):.3g}")


def require_margin(margin: float | None) -> None:
    """Check a margin.

    Raises:
        ConfigError: it is not between 0 and 1, both excluded.
    """
    if margin is not None and not 0.0 < margin < 1.0:
        raise ConfigError("--memory-margin", margin, "must be a quantile, between 0 and 1", f"use {CERTAINTY}")


def student_quantile(quantile: float, freedom: int) -> float:
    """The quantile of Student's distribution with an integer number of degrees of freedom, by bisection.

    Args:
        quantile: between 0 and 1, both excluded.
    """
    if quantile < 0.5:
        return -student_quantile(1.0 - quantile, freedom)
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if (1.0 + _within(middle, freedom)) / 2 < quantile else (low, middle)
    return math.tan((low + high) / 2) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """The probability of |T| < tan(angle) · √freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    if freedom % 2:
        term, total = cosine, 0.0
        for power in range(1, freedom - 1, 2):
            total += term
            term *= cosine * cosine * (power + 1) / (power + 2)
        return 2.0 / math.pi * (angle + sine * total)
    term, total = 1.0, 0.0
    for power in range(0, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return sine * total
