"""The answer of every solver: the best value that it found, and how good that is.

All solvers minimise. `bound` is below every feasible objective, whether the solver has seen it or not; it is never above
`objective`, since what remains between the two after a proof is the rounding of floating-point sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Status(StrEnum):
    """How a search ended."""

    OPTIMAL = "optimal"
    """No other value is better."""
    FEASIBLE = "feasible"
    """The search ended at the gap that was asked for."""
    INFEASIBLE = "infeasible"
    """Nothing satisfies the constraints."""
    TIME_LIMIT = "time limit"
    """The search was stopped; there may be a value, and there may be a better one."""
    CUT_OFF = "cut off"
    """Nothing is better than what was known before; there is no value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution(Generic[Value]):
    """The answer of a solver.

    Attributes:
        value: the best that was found; None where there is none.
        objective: seconds, or whatever the solver minimises; infinite without a value.
        bound: no feasible value has a smaller objective; infinite where nothing is feasible.
        status: how the search ended.
        seconds: time that the search took, on the wall clock.
    """

    value: Value | None
    objective: float
    bound: float
    status: Status
    seconds: float

    def __post_init__(self) -> None:
        assert (self.value is None) == math.isinf(self.objective), (self.value, self.objective)
        assert not math.isnan(self.bound) and self.bound <= self.objective, (self.bound, self.objective)

    @property
    def gap(self) -> float:
        """Share of the objective by which an unseen value might be better; infinite without a value."""
        if self.value is None:
            return math.inf
        if self.objective == self.bound:
            return 0.0
        return (self.objective - self.bound) / abs(self.objective) if self.objective else math.inf
