"""The answer of a solver: its best value, with an objective and a bound.

All solvers minimise. `bound` is a lower bound of all feasible objectives. It is never above `objective`:
solvers cap it, because a proof of optimality leaves differences by rounding.
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
    """No value is better."""
    FEASIBLE = "feasible"
    """The search ended at the requested gap."""
    INFEASIBLE = "infeasible"
    """No value satisfies the constraints."""
    TIME_LIMIT = "time limit"
    """The search was stopped, with or without a value; a better one may exist."""
    CUT_OFF = "cut off"
    """No value is better than the incumbent of the caller; the answer has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution(Generic[Value]):
    """The answer of a solver.

    Attributes:
        value: the best value of the search; None if it has none.
        objective: the minimised quantity, such as seconds; infinite without a value.
        bound: no feasible value has a smaller objective; infinite if no value is feasible.
        status: how the search ended.
        seconds: wall-clock time of the search.
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
        """Relative gap between objective and bound; infinite without a value."""
        if self.value is None:
            return math.inf
        if self.objective == self.bound:
            return 0.0
        return (self.objective - self.bound) / abs(self.objective) if self.objective else math.inf
