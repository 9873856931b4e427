"""The best assignment of weight gradients to slots that a time limit allows, with a bound on what any other could hide.

Problem and terms: assignment.py. Steps, each only while the gap is open and time is left (`solve`):
1. The best-fit greedy, and an upper bound from a maximum flow (`flow_bound`): weight gradients are divisible there, and nothing
   but each alone holds bytes.
2. One period of the longest run of identical layers, solved by itself and repeated; greedy fills what is left at its ends.
3. The integer program over everything, from the better of the two (`solve_exactly`).
The answer states its value, the bound and the gap; it is never worse than the greedy.

Seconds become whole nanoseconds, rounded up on both sides, so that bounds hold for the seconds themselves. (In microseconds the
rounding of short all-to-alls is a larger gap than most that are left.)

Source: Lancet, section 4.2, constraints (1) and (2), which it states and leaves to a greedy heuristic. Bytes are added.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from ortools.graph.python.max_flow import SimpleMaxFlow
from ortools.sat.python import cp_model

from moe_overlap.tuner.search.layer.assignment import (
    Assignment,
    AssignmentProblem,
    LayerSpan,
    OperatorRun,
    best_fit,
    held_shortly,
    longest_run,
    one_period,
    repeat,
    without_idlers,
)

TICK = 1e-9
"""Seconds of a unit of time."""
ROUNDING = 1e-3
"""Share of a tick by which seconds may exceed it and count as no more."""


@dataclass(frozen=True, slots=True)
class Exact:
    """The answer of the solver in its time.

    Attributes:
        assignment: the best; None where there was no time to find one.
        bound: no assignment hides more seconds.
    """

    assignment: Assignment | None
    bound: float


def flow_bound(problem: AssignmentProblem) -> float:
    """Most seconds that could be hidden if weight gradients were divisible and nothing else held bytes.

    But none hides more than it could in the longest slot it may run in.
    """
    flow = SimpleMaxFlow()
    # Arcs carry nanoseconds: source -> gradient t_i^W, gradient -> slot where constraint (2) allows it,
    # slot -> sink t_j^a.
    source, sink = 0, 1
    gradients, slots = 2, 2 + len(problem.gradients)
    for slot, seconds in enumerate(problem.slots):
        flow.add_arc_with_capacity(slots + slot, sink, _ticks(seconds))
    for index, gradient in enumerate(problem.gradients):
        # Alone too large: no assignment has it, so the bound need not either.
        under = gradient.under if gradient.bytes <= problem.max_bytes else ()
        hides = {slot: _ticks(min(gradient.seconds, problem.slots[slot])) for slot in under}
        # Divided over short slots it would hide more in sum than whole in any one of them: hence its longest slot, not
        # its seconds.
        flow.add_arc_with_capacity(source, gradients + index, max(hides.values(), default=0))
        for slot, most in hides.items():
            flow.add_arc_with_capacity(gradients + index, slots + slot, most)
    if flow.num_arcs() == 0:
        return 0.0
    status = flow.solve(source, sink)
    assert status == flow.OPTIMAL, status
    return float(flow.optimal_flow()) * TICK


def solve_exactly(problem: AssignmentProblem, hint: Assignment, seconds: float, gap: float) -> Exact:
    """Step 3: the integer program.

    Args:
        hint: a feasible assignment to start from.
        seconds: time limit; from 0 down there is none left.
        gap: share of the value that the bound may exceed it by when the search ends.
    """
    model = cp_model.CpModel()
    # Variables. runs[i, j]: whether weight gradient i runs in slot j. Constraint (2) of the paper, that it may run there, holds
    # by construction: there is no variable of other pairs.
    runs = {
        (i, j): model.new_bool_var(f"runs_{i}_{j}")
        for i, gradient in enumerate(problem.gradients)
        for j in gradient.under
    }
    # hidden[j]: nanoseconds of slot j in which something computes.
    hidden = [model.new_int_var(0, _ticks(t), f"hidden_{j}") for j, t in enumerate(problem.slots)]
    # Constraint (1): a weight gradient runs in one slot at most.
    for i, gradient in enumerate(problem.gradients):
        model.add_at_most_one(runs[i, j] for j in gradient.under)
    # The min of the objective: a slot hides no more than what runs in it; no more than its own seconds by the domain of `hidden`.
    for j, seconds_j in enumerate(hidden):
        model.add(seconds_j <= sum(_ticks(problem.gradients[i].seconds) * runs[i, k] for i, k in runs if k == j))
    # Bytes, which are not in the paper: what is held at the start of a slot is within the bytes.
    _limit_bytes(model, problem, runs)
    # Objective: the hidden seconds.
    model.maximize(sum(hidden))
    for (i, j), variable in runs.items():
        model.add_hint(variable, hint[i] == j)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.0, seconds)
    solver.parameters.relative_gap_limit = gap
    # One worker searches in the same order every time; only the time limit can make two answers differ.
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN), solver.status_name(status)
    if status == cp_model.UNKNOWN:
        # No time for any bound of its own: no assignment hides more than all slots.
        return Exact(None, sum(map(_ticks, problem.slots)) * TICK)
    chosen: list[int | None] = [None] * len(problem.gradients)
    for (i, j), variable in runs.items():
        if solver.boolean_value(variable):
            chosen[i] = j
    # The objective is indifferent to weight gradients in slots that are full without them.
    return Exact(without_idlers(problem, tuple(chosen)), solver.best_objective_bound * TICK)


def _limit_bytes(
    model: cp_model.CpModel, problem: AssignmentProblem, runs: dict[tuple[int, int], cp_model.IntVar]
) -> None:
    """At the start of every slot, what is held is within the bytes; slots that hold less whatever runs need no row."""
    held: list[list[tuple[int, int]]] = [[] for _ in problem.slots]
    for i, j in runs:
        for slot in problem.held_at(i, j):
            held[slot].append((i, j))
    for pairs in held:
        most = sum(problem.gradients[i].bytes for i, _ in pairs)
        # Bytes, over all pairs whose weight gradient is waiting at the start of this slot.
        if most > problem.max_bytes:
            model.add(sum(problem.gradients[i].bytes * runs[i, j] for i, j in pairs) <= problem.max_bytes)


def _ticks(seconds: float) -> int:
    # Rounded up on both sides, the bound holds for the seconds; float noise above a whole tick is no tick.
    return ceil(seconds / TICK - ROUNDING)


Method = Literal["greedy", "repeated", "exact"]
MOST_PAIRS = 5_000
"""Pairs of a weight gradient and a slot: larger integer programs find nothing in seconds that greedy and repetition have not."""

LEAST_GAIN = 1e-10
"""Seconds; less is rounding."""


@dataclass(frozen=True, slots=True)
class AssignmentSolution:
    """An assignment and how good it is; seconds are those that one backward pass hides.

    Attributes:
        greedy_value: of the best-fit greedy alone.
        value: of the assignment.
        bound: no assignment hides more.
        method: the step that found the assignment.
        repeated: the run of identical layers that was solved once; None where none was used.
        held_bytes: most that is held at a time.
        solver_seconds: time it took.
    """

    assignment: Assignment
    greedy_value: float
    value: float
    bound: float
    method: Method
    repeated: OperatorRun | None
    held_bytes: int
    solver_seconds: float

    @property
    def gap(self) -> float:
        """Share of the bound that may be missing."""
        return 1.0 - self.value / self.bound if self.bound > 0 else 0.0


def solve(
    problem: AssignmentProblem, layers: Sequence[LayerSpan], seconds: float, gap: float = 0.0
) -> AssignmentSolution:
    """Steps 1 to 3.

    Args:
        layers: where each layer's weight gradients and slots stand; empty: nothing repeats.
        seconds: time limit.
        gap: share of the bound that may be missing.
    """
    started = time.monotonic()
    deadline = started + seconds
    # Step 1.
    best = greedy = best_fit(problem)
    greedy_value = problem.hidden_seconds(greedy)
    bound = flow_bound(problem)
    method: Method = "greedy"

    def is_open() -> bool:
        return problem.hidden_seconds(best) < (1.0 - gap) * bound and time.monotonic() < deadline

    # Step 2.
    run = longest_run(problem, layers)
    used: OperatorRun | None = None
    if run is not None and is_open():
        repeated = _repeated(problem, layers, run, deadline - time.monotonic(), gap)
        if problem.hidden_seconds(repeated) > problem.hidden_seconds(best) + LEAST_GAIN:
            best, method, used = repeated, "repeated", run
    # Step 3.
    if is_open() and sum(len(gradient.under) for gradient in problem.gradients) <= MOST_PAIRS:
        exact = solve_exactly(problem, best, deadline - time.monotonic(), gap)
        # Both are valid for the whole problem; that of step 2 is not, since a period knows nothing of the run's ends.
        bound = min(bound, exact.bound)
        assignment = exact.assignment
        if assignment is not None and problem.hidden_seconds(assignment) > problem.hidden_seconds(best) + LEAST_GAIN:
            best, method, used = assignment, "exact", None
    if not problem.cyclic:
        # Last, because it changes bytes alone: nothing after it would notice.
        best = held_shortly(problem, best)
    assert problem.is_feasible(best)
    value = problem.hidden_seconds(best)
    return AssignmentSolution(
        assignment=best,
        greedy_value=greedy_value,
        value=value,
        # Seconds that exceed a tick by ROUNDING count as no more, so the bound may be short of the value by that.
        bound=max(bound, value),
        method=method,
        repeated=used,
        held_bytes=max(problem.held_bytes(best), default=0),
        solver_seconds=time.monotonic() - started,
    )


def _repeated(
    problem: AssignmentProblem, layers: Sequence[LayerSpan], run: OperatorRun, seconds: float, gap: float
) -> Assignment:
    """Step 2; nothing where the repeated assignment breaks a rule of the whole."""
    period = one_period(problem, layers, run)
    # Without layers the recursion ends here: a period is not searched for periods.
    solution = solve(period, (), seconds, gap)
    whole = repeat(problem, layers, run, solution.assignment)
    # The period allowed every slot and counted bytes as in an endless run; the whole has labels, ends and other layers.
    return best_fit(problem, whole) if problem.is_feasible(whole) else (None,) * len(problem.gradients)
