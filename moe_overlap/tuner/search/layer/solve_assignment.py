"""The best assignment of weight gradients to slots within a time limit, with an upper bound of the hidden seconds.

Problem and terms: assignment.py. Steps, each only if the gap is open and the deadline has not passed (`solve`):
1. The best-fit greedy, and an upper bound from a maximum flow (`flow_bound`). The flow divides weight gradients among slots, and
   limits bytes only for each weight gradient by itself.
2. One period of the longest run of identical layers, solved as a problem of its own and repeated; greedy fills both ends.
3. The integer program over the complete problem, from the better of both assignments (`solve_exactly`).
The answer states its value, the bound and the gap; it is never worse than the greedy.

Seconds become whole nanoseconds, rounded up on both sides, so that bounds hold for the seconds, too. (In microseconds the
rounding of short all-to-alls would exceed most gaps.)

Source: Lancet, section 4.2, constraints (1) and (2), which Lancet solves by a greedy heuristic. The limit on bytes is ours.
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
"""Seconds per unit of time of the programs."""
ROUNDING = 1e-3
"""Share of a tick by which seconds may exceed a whole tick without being rounded up."""


@dataclass(frozen=True, slots=True)
class Exact:
    """The answer of the solver at its time limit.

    Attributes:
        assignment: the best; None if the time was too short for any.
        bound: no assignment hides more seconds.
    """

    assignment: Assignment | None
    bound: float


def flow_bound(problem: AssignmentProblem) -> float:
    """Upper bound of the hidden seconds: weight gradients are divisible, and each may use all bytes.

    No weight gradient hides more than in the longest of its slots.
    """
    flow = SimpleMaxFlow()
    # Arcs carry nanoseconds: source -> gradient t_i^W, gradient -> slot where constraint (2) allows it,
    # slot -> sink t_j^a.
    source, sink = 0, 1
    gradients, slots = 2, 2 + len(problem.gradients)
    for slot, seconds in enumerate(problem.slots):
        flow.add_arc_with_capacity(slots + slot, sink, _ticks(seconds))
    for index, gradient in enumerate(problem.gradients):
        # A weight gradient larger than the limit is in no assignment.
        under = gradient.under if gradient.bytes <= problem.max_bytes else ()
        hides = {slot: _ticks(min(gradient.seconds, problem.slots[slot])) for slot in under}
        # Divided over short slots it would hide more than undivided in any one of them: its longest slot limits it, not its
        # seconds.
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
        seconds: time limit; zero or less: no search.
        gap: relative gap at which the search may stop.
    """
    model = cp_model.CpModel()
    # Variables. runs[i, j]: 1 if weight gradient i runs in slot j. Constraint (2) of the paper, that it may run there, holds by
    # construction: other pairs have no variable.
    runs = {
        (i, j): model.new_bool_var(f"runs_{i}_{j}")
        for i, gradient in enumerate(problem.gradients)
        for j in gradient.under
    }
    # hidden[j]: nanoseconds of slot j that weight gradients hide.
    hidden = [model.new_int_var(0, _ticks(t), f"hidden_{j}") for j, t in enumerate(problem.slots)]
    # Constraint (1): a weight gradient runs in one slot at most.
    for i, gradient in enumerate(problem.gradients):
        model.add_at_most_one(runs[i, j] for j in gradient.under)
    # The minimum in the objective: a slot hides at most the seconds of its weight gradients (this row), and at most its own (the
    # domain of `hidden`).
    for j, seconds_j in enumerate(hidden):
        model.add(seconds_j <= sum(_ticks(problem.gradients[i].seconds) * runs[i, k] for i, k in runs if k == j))
    # Bytes, which are not in the paper: those held at the start of a slot are within the limit.
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
        # The solver had no time for a bound: no assignment hides more than all slots.
        return Exact(None, sum(map(_ticks, problem.slots)) * TICK)
    chosen: list[int | None] = [None] * len(problem.gradients)
    for (i, j), variable in runs.items():
        if solver.boolean_value(variable):
            chosen[i] = j
    # Weight gradients in slots that are full without them add nothing to the objective.
    return Exact(without_idlers(problem, tuple(chosen)), solver.best_objective_bound * TICK)


def _limit_bytes(
    model: cp_model.CpModel, problem: AssignmentProblem, runs: dict[tuple[int, int], cp_model.IntVar]
) -> None:
    """Rows: the bytes held at the start of every slot are within the limit; slots that can never exceed it need no row."""
    held: list[list[tuple[int, int]]] = [[] for _ in problem.slots]
    for i, j in runs:
        for slot in problem.held_at(i, j):
            held[slot].append((i, j))
    for pairs in held:
        most = sum(problem.gradients[i].bytes for i, _ in pairs)
        # The sum over all pairs whose weight gradient waits at the start of this slot.
        if most > problem.max_bytes:
            model.add(sum(problem.gradients[i].bytes * runs[i, j] for i, j in pairs) <= problem.max_bytes)


def _ticks(seconds: float) -> int:
    # Rounding up on both sides keeps the bound valid; floating-point noise above a whole tick is not rounded up.
    return ceil(seconds / TICK - ROUNDING)


Method = Literal["greedy", "repeated", "exact"]
MOST_PAIRS = 5_000
"""Most pairs of a weight gradient and a slot in step 3: within seconds larger integer programs improve nothing."""

LEAST_GAIN = 1e-10
"""Seconds; smaller gains are rounding errors."""


@dataclass(frozen=True, slots=True)
class AssignmentSolution:
    """An assignment and how good it is; seconds are those that one backward pass hides.

    Attributes:
        greedy_value: hidden seconds of the best-fit greedy.
        value: hidden seconds of the assignment.
        bound: no assignment hides more seconds.
        method: the step that found the assignment.
        repeated: the run of identical layers that was solved once; None if step 2 did not give the assignment.
        held_bytes: most bytes that are held at a time.
        solver_seconds: run time of all steps.
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
        """Relative gap between value and bound."""
        return 1.0 - self.value / self.bound if self.bound > 0 else 0.0


def solve(
    problem: AssignmentProblem, layers: Sequence[LayerSpan], seconds: float, gap: float = 0.0
) -> AssignmentSolution:
    """Steps 1 to 3.

    Args:
        layers: ranges of each layer's weight gradients and slots; empty: no repetition is tried.
        seconds: time limit.
        gap: relative gap at which to stop.
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
        # Both bounds hold for the complete problem. That of step 2 does not: a period ignores the ends of the run.
        bound = min(bound, exact.bound)
        assignment = exact.assignment
        if assignment is not None and problem.hidden_seconds(assignment) > problem.hidden_seconds(best) + LEAST_GAIN:
            best, method, used = assignment, "exact", None
    if not problem.cyclic:
        # Last, because it changes only held bytes, not hidden seconds.
        best = held_shortly(problem, best)
    assert problem.is_feasible(best)
    value = problem.hidden_seconds(best)
    return AssignmentSolution(
        assignment=best,
        greedy_value=greedy_value,
        value=value,
        # Ticks neglect up to ROUNDING, so the bound may be below the value by that.
        bound=max(bound, value),
        method=method,
        repeated=used,
        held_bytes=max(problem.held_bytes(best), default=0),
        solver_seconds=time.monotonic() - started,
    )


def _repeated(
    problem: AssignmentProblem, layers: Sequence[LayerSpan], run: OperatorRun, seconds: float, gap: float
) -> Assignment:
    """Step 2; an empty assignment if the repeated one is infeasible for the complete problem."""
    period = one_period(problem, layers, run)
    # Without layers the recursion ends: no periods within a period.
    solution = solve(period, (), seconds, gap)
    assignment = repeat(problem, layers, run, solution.assignment)
    # The period allowed every slot and counted bytes as in an endless run; the complete problem has labels, ends, other layers.
    return best_fit(problem, assignment) if problem.is_feasible(assignment) else (None,) * len(problem.gradients)
