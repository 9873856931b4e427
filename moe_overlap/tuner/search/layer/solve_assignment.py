"""The best assignment that can be found in a time limit, with a bound: greedy, repeated layers, integer program."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moe_overlap.tuner.search.layer.assignment import Assignment, Problem, best_fit, held_shortly
from moe_overlap.tuner.search.layer.exact_assignment import flow_bound, solve_exactly
from moe_overlap.tuner.search.layer.repeated_layers import LayerSpan, Run, longest_run, one_period, repeat

Method = Literal["greedy", "repeated", "exact"]
MOST_PAIRS = 5_000
"""Of a weight gradient and a slot: larger integer programs find nothing in seconds that greedy and repetition have not."""

LEAST_GAIN = 1e-10
"""Seconds; less is rounding."""


@dataclass(frozen=True, slots=True)
class Solution:
    """An assignment and how good it is; seconds are those that one backward pass hides.

    Attributes:
        greedy_value: of the best-fit greedy alone.
        value: of the assignment.
        bound: no assignment hides more.
        method: what found the assignment.
        repeated: the run of identical layers that was solved once; None where none was used.
        held_bytes: most that is held at a time.
        solver_seconds: time it took.
    """

    assignment: Assignment
    greedy_value: float
    value: float
    bound: float
    method: Method
    repeated: Run | None
    held_bytes: int
    solver_seconds: float

    @property
    def gap(self) -> float:
        """What may be missing, as a share of the bound."""
        return 1.0 - self.value / self.bound if self.bound > 0 else 0.0


def solve(problem: Problem, layers: Sequence[LayerSpan], seconds: float, gap: float = 0.0) -> Solution:
    """Steps, each only while the gap is open and time is left:

    1. The best-fit greedy, and the bound of the flow.
    2. One period of the longest run of identical layers, solved by itself, repeated; greedy fills what is left at its ends.
    3. The integer program over everything, from the better of the two.

    Args:
        layers: where each layer's weight gradients and slots stand; empty: nothing repeats.
        seconds: time limit.
        gap: share of the bound that may be missing.
    """
    started = time.monotonic()
    deadline = started + seconds
    best = greedy = best_fit(problem)
    greedy_value = problem.hidden_seconds(greedy)
    bound = flow_bound(problem)
    method: Method = "greedy"

    def is_open() -> bool:
        return problem.hidden_seconds(best) < (1.0 - gap) * bound and time.monotonic() < deadline

    run = longest_run(problem, layers)
    used: Run | None = None
    if run is not None and is_open():
        repeated = _repeated(problem, layers, run, deadline - time.monotonic(), gap)
        if problem.hidden_seconds(repeated) > problem.hidden_seconds(best) + LEAST_GAIN:
            best, method, used = repeated, "repeated", run
    if is_open() and sum(len(one.under) for one in problem.gradients) <= MOST_PAIRS:
        exact = solve_exactly(problem, best, deadline - time.monotonic(), gap)
        bound = min(bound, exact.bound)
        found = exact.assignment
        if found is not None and problem.hidden_seconds(found) > problem.hidden_seconds(best) + LEAST_GAIN:
            best, method, used = found, "exact", None
    if not problem.cyclic:
        best = held_shortly(problem, best)
    assert problem.is_feasible(best)
    value = problem.hidden_seconds(best)
    return Solution(
        assignment=best,
        greedy_value=greedy_value,
        value=value,
        bound=max(bound, value),
        method=method,
        repeated=used,
        held_bytes=max(problem.held_bytes(best), default=0),
        solver_seconds=time.monotonic() - started,
    )


def _repeated(problem: Problem, layers: Sequence[LayerSpan], run: Run, seconds: float, gap: float) -> Assignment:
    """Step 2; nothing where the repeated assignment breaks a rule of the whole."""
    period = one_period(problem, layers, run)
    solution = solve(period, (), seconds, gap)
    whole = repeat(problem, layers, run, solution.assignment)
    return best_fit(problem, whole) if problem.is_feasible(whole) else (None,) * len(problem.gradients)
