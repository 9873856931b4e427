"""The assignment of weight gradients to slots, exactly: an integer program, and a bound from a flow.

Seconds become whole nanoseconds, rounded up on both sides, so that bounds hold for the seconds themselves. (In microseconds the
rounding of short exchanges is a larger gap than most that are left.)

Source: Lancet, section 4.2, equations 1 and 2; which solves neither. Bytes are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ortools.graph.python.max_flow import SimpleMaxFlow
from ortools.sat.python import cp_model

from moe_overlap.tuner.search.layer.assignment import Assignment, Problem, without_idlers

TICK = 1e-9
"""Seconds of a unit of time."""
ROUNDING = 1e-3
"""Of a tick: what seconds may exceed it by and count as no more."""


@dataclass(frozen=True, slots=True)
class Exact:
    """What the solver found in its time.

    Attributes:
        assignment: the best; None where there was no time to find one.
        bound: no assignment hides more seconds.
    """

    assignment: Assignment | None
    bound: float


def flow_bound(problem: Problem) -> float:
    """Most seconds that could be hidden if weight gradients were divisible and nothing else held bytes.

    But none hides more than it could in the longest slot it may run in.
    """
    flow = SimpleMaxFlow()
    source, sink = 0, 1
    gradients, slots = 2, 2 + len(problem.gradients)
    for slot, seconds in enumerate(problem.slots):
        flow.add_arc_with_capacity(slots + slot, sink, _ticks(seconds))
    for index, gradient in enumerate(problem.gradients):
        under = gradient.under if gradient.bytes <= problem.max_bytes else ()
        hides = {slot: _ticks(min(gradient.seconds, problem.slots[slot])) for slot in under}
        flow.add_arc_with_capacity(source, gradients + index, max(hides.values(), default=0))
        for slot, most in hides.items():
            flow.add_arc_with_capacity(gradients + index, slots + slot, most)
    if flow.num_arcs() == 0:
        return 0.0
    status = flow.solve(source, sink)
    assert status == flow.OPTIMAL, status
    return float(flow.optimal_flow()) * TICK


def solve_exactly(problem: Problem, hint: Assignment, seconds: float, gap: float) -> Exact:
    """The integer program.

    Args:
        hint: a feasible assignment to start from.
        seconds: time limit; from 0 down there is none left.
        gap: share of the value that the bound may exceed it by when the search ends.
    """
    model = cp_model.CpModel()
    # runs[i, j]: whether weight gradient i runs in slot j.
    runs = {
        (i, j): model.new_bool_var(f"runs_{i}_{j}")
        for i, gradient in enumerate(problem.gradients)
        for j in gradient.under
    }
    # hidden[j]: nanoseconds of slot j in which something computes.
    hidden = [model.new_int_var(0, _ticks(t), f"hidden_{j}") for j, t in enumerate(problem.slots)]
    # Equation 1: a weight gradient runs in one slot at most.
    for i, gradient in enumerate(problem.gradients):
        model.add_at_most_one(runs[i, j] for j in gradient.under)
    # A slot hides no more than what runs in it; no more than its own seconds by the domain of `hidden`.
    for j, seconds_j in enumerate(hidden):
        model.add(seconds_j <= sum(_ticks(problem.gradients[i].seconds) * runs[i, k] for i, k in runs if k == j))
    _limit_bytes(model, problem, runs)
    model.maximize(sum(hidden))
    for (i, j), variable in runs.items():
        model.add_hint(variable, hint[i] == j)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.0, seconds)
    solver.parameters.relative_gap_limit = gap
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN), solver.status_name(status)
    if status == cp_model.UNKNOWN:
        return Exact(None, sum(map(_ticks, problem.slots)) * TICK)
    chosen: list[int | None] = [None] * len(problem.gradients)
    for (i, j), variable in runs.items():
        if solver.boolean_value(variable):
            chosen[i] = j
    return Exact(without_idlers(problem, tuple(chosen)), solver.best_objective_bound * TICK)


def _limit_bytes(model: cp_model.CpModel, problem: Problem, runs: dict[tuple[int, int], cp_model.IntVar]) -> None:
    """At the start of every slot, what is held is within the bytes; slots that hold less whatever runs need no row."""
    held: list[list[tuple[int, int]]] = [[] for _ in problem.slots]
    for i, j in runs:
        for slot in problem.held_at(i, j):
            held[slot].append((i, j))
    for pairs in held:
        most = sum(problem.gradients[i].bytes for i, _ in pairs)
        if most > problem.max_bytes:
            model.add(sum(problem.gradients[i].bytes * runs[i, j] for i, j in pairs) <= problem.max_bytes)


def _ticks(seconds: float) -> int:
    return ceil(seconds / TICK - ROUNDING)
