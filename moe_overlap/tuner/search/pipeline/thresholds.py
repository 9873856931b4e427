"""The smallest f(T) + weight · T over thresholds T, where f falls as T grows: with few evaluations of f.

f(T) is the smallest sum of a plan whose stages all take T at most; weight · max t_i is the rest of the objective. Steps:

1. Thresholds are the sorted seconds of stages, `levels`. In an interval levels[first..last] no plan is better than
   f(levels[last]) + weight · levels[first].
2. The middle of an interval is evaluated. Its plan, whose slowest stage takes t, also answers all levels from t to the middle.
   What remains is in front of t, with a sum of at least f(middle), and behind the middle.

Alpa (section 5.2) evaluates levels one after the other from the smallest, skips those closer than ε, and stops at B · T >= best.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1e-12
"""Share of an objective that may be lost in the rounding of sums."""


class Found(Protocol):
    """A plan below a threshold."""

    @property
    def total(self) -> float:
        """Its sum."""

    @property
    def slowest(self) -> float:
        """Its slowest stage; one of the levels."""


F = TypeVar("F", bound=Found)


@dataclass(frozen=True, slots=True)
class Searched(Generic[F]):
    """The end of a search.

    Attributes:
        found: the best plan; None where none is below the objective to beat.
        bound: no plan has a smaller objective, but for rounding.
        is_complete: whether the search came to its end before the deadline.
    """

    found: F | None
    bound: float
    is_complete: bool


def search_thresholds(
    levels: NDArray[np.float64],
    weight: float,
    least: float,
    shortest: Callable[[float, float], F | None],
    best: float,
    deadline: float,
) -> Searched[F]:
    """Steps 1 and 2.

    Args:
        levels: increasing.
        weight: of the slowest stage.
        least: a lower bound of f at the last level.
        shortest: a threshold and a sum -> the plan of f; None where f is not below the sum.
        best: an objective to beat.
        deadline: of time.perf_counter.
    """
    chosen: F | None = None
    intervals = [(0, len(levels) - 1, least)]
    while intervals:
        first, last, total = intervals.pop()
        if first > last or total + weight * levels[first] >= best * (1.0 - ROUNDING):
            continue
        if time.perf_counter() > deadline:
            left = [(first, last, total), *intervals]
            bound = min(total + weight * float(levels[first]) for first, last, total in left if first <= last)
            return Searched(chosen, min(bound, best), False)
        middle = (first + last) // 2
        intervals.append((middle + 1, last, total))
        # A sum that is too large even with the interval's fastest stage closes it up to the middle.
        found = shortest(float(levels[middle]), best - weight * float(levels[first]))
        if found is not None:
            objective = found.total + weight * found.slowest
            if objective < best:
                best, chosen = objective, found
            intervals.append((first, int(np.searchsorted(levels, found.slowest)) - 1, found.total))
    return Searched(chosen, best, True)
