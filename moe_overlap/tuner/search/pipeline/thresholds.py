"""The minimum of f(T) + weight · T over thresholds T with few evaluations of f, which never rises with T.

f(T) is the smallest sum over plans whose stages all take at most T; weight · max t_i is the rest of the objective. Steps:

1. Thresholds are the sorted seconds of stages, `levels`. In an interval levels[first..last] no plan is better than
   f(levels[last]) + weight · levels[first].
2. f is evaluated at the middle of an interval. If the slowest stage of its plan takes t, the plan is optimal for all levels from
   t to the middle. Two intervals remain: below t, with a sum of at least f(middle), and above the middle.

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
"""Largest relative rounding error of an objective."""


class ThresholdPlan(Protocol):
    """A plan whose stages all stay below a threshold."""

    @property
    def total(self) -> float:
        """Sum of the seconds of its stages."""

    @property
    def slowest(self) -> float:
        """Seconds of its slowest stage; one of the levels."""


F = TypeVar("F", bound=ThresholdPlan)


@dataclass(frozen=True, slots=True)
class Searched(Generic[F]):
    """The end of a search.

    Attributes:
        plan: the best plan; None if no plan is below the objective to beat.
        bound: no plan has a smaller objective, except for rounding.
        is_complete: True if the search ended before the deadline.
    """

    plan: F | None
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
        levels: thresholds, increasing.
        weight: factor of the slowest stage in the objective.
        least: a lower bound of f at the last level.
        shortest: (threshold, sum) -> the plan of f; None if f is not below the sum.
        best: the objective to beat.
        deadline: time by `time.perf_counter`.
    """
    chosen: F | None = None
    intervals = [(0, len(levels) - 1, least)]
    while intervals:
        first, last, total = intervals.pop()
        if first > last or total + weight * levels[first] >= best * (1.0 - ROUNDING):
            continue
        if time.perf_counter() > deadline:
            open_intervals = [(first, last, total), *intervals]
            bound = min(total + weight * float(levels[first]) for first, last, total in open_intervals if first <= last)
            return Searched(chosen, min(bound, best), False)
        middle = (first + last) // 2
        intervals.append((middle + 1, last, total))
        # If f(middle) is too large even with the fastest stage of the interval, no level up to the middle can win.
        plan = shortest(float(levels[middle]), best - weight * float(levels[first]))
        if plan is not None:
            objective = plan.total + weight * plan.slowest
            if objective < best:
                best, chosen = objective, plan
            intervals.append((first, int(np.searchsorted(levels, plan.slowest)) - 1, plan.total))
    return Searched(chosen, best, True)
