"""One choice for every node, exactly: Alpa's integer linear program, solved by HiGHS.

    minimise  Σ_v c_v · s_v + Σ_(v,u) s_vᵀ R_vu s_u     with s_v one-hot and, for every memory row, Σ_v m_v · s_v ≤ limit

1. The quadratic term is linearised by one variable e_ij for every pair of choices: its rows sum to s_v, its columns to s_u. If
   both are one-hot, so is e, which may therefore be continuous. Choices with equal costs on an edge share a variable there, so
   variables belong to pairs of specs and not to pairs of algorithms. Pairs of infinite cost have no variable.
2. If a cutoff is given, the program without integrality is solved first: its bound is nearly tight, so most problems that cannot
   beat the cutoff end there.
3. Dominated choices are left out: another choice of the node has equal costs on every edge and is no worse in its own cost and in
   every memory row.

Source: Alpa, section 4.2, equation 1 and its linearisation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray
from ortools.math_opt.python import mathopt

from moe_overlap.tuner.search.solution import Solution, Status

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]
Chosen = tuple[int, ...]
"""The choice of every node."""
TOLERANCE = 2e-6
"""Share of a row's limit by which HiGHS may exceed it."""
UNIT = 1e-6
"""Seconds per unit of the objective. Solvers round to a millionth of a unit."""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A bound on a sum over all nodes.

    Attributes:
        coefficients: for every node, [choices] amounts.
        limit: upper bound of the sum.
    """

    coefficients: tuple[Floats, ...]
    limit: float


@dataclass(frozen=True, slots=True)
class ChoiceProblem:
    """Nodes with choices.

    Attributes:
        costs: for every node, [choices] costs; infinite if a choice is forbidden.
        edges: two different nodes, and [choices, choices] costs of the pairs.
    """

    costs: tuple[Floats, ...]
    edges: tuple[tuple[int, int, Floats], ...]
    rows: tuple[MemoryRow, ...] = ()

    def cost(self, chosen: Sequence[int]) -> float:
        """Cost of one choice per node."""
        total = sum(float(costs[choice]) for costs, choice in zip(self.costs, chosen, strict=True))
        return total + sum(float(matrix[chosen[a], chosen[b]]) for a, b, matrix in self.edges)

    def freed(self, chosen: Sequence[int], free: Sequence[int]) -> ChoiceProblem:
        """The problem of the `free` nodes, in this order; all other nodes keep their choice, and their own costs are left out."""
        place_of = {node: place for place, node in enumerate(free)}
        costs = [self.costs[node].copy() for node in free]
        edges = []
        for a, b, matrix in self.edges:
            if a in place_of and b in place_of:
                edges.append((place_of[a], place_of[b], matrix))
            elif a in place_of:
                costs[place_of[a]] += matrix[:, chosen[b]]
            elif b in place_of:
                costs[place_of[b]] += matrix[chosen[a], :]
        rows = []
        for row in self.rows:
            fixed = sum(float(v[chosen[node]]) for node, v in enumerate(row.coefficients) if node not in place_of)
            rows.append(MemoryRow(tuple(row.coefficients[node] for node in free), row.limit - fixed))
        return ChoiceProblem(tuple(costs), tuple(edges), tuple(rows))

    def is_feasible(self, chosen: Sequence[int], tolerance: float = 0.0) -> bool:
        """Whether no choice is forbidden and every memory row is within (1 + tolerance) times its limit."""
        fits = all(
            sum(float(values[choice]) for values, choice in zip(row.coefficients, chosen, strict=True))
            <= row.limit * (1 + tolerance)
            for row in self.rows
        )
        return fits and bool(np.isfinite(self.cost(chosen)))


def solve_choices(problem: ChoiceProblem, seconds: float = 60.0, cutoff: float = float("inf")) -> Solution[Chosen]:
    """The cheapest choice of every node.

    Args:
        seconds: time limit; at 0 or less nothing is solved.
        cutoff: cost that a solution must beat, or the answer is `cut off`.
    """
    started = time.monotonic()
    # Step 3 first: it makes the program smaller, and may show that it is infeasible.
    candidates = [_undominated(problem, node) for node in range(len(problem.costs))]
    if _nothing_fits(problem, candidates):
        return _without(Status.INFEASIBLE, np.inf, started)
    if seconds <= 0.0:
        return _without(Status.TIME_LIMIT, 0.0, started)  # Seconds are not negative.
    model = mathopt.Model()
    # Variables: s[v][i], whether node v takes its choice i; then those of the edges, in `_add_edge`.
    selected = [{int(i): model.add_binary_variable() for i in places} for places in candidates]
    for of_node in selected:
        model.add_linear_constraint(mathopt.fast_sum(of_node.values()) == 1)
    terms = [
        variable * (float(problem.costs[node][choice]) / UNIT)
        for node, of_node in enumerate(selected)
        for choice, variable in of_node.items()
    ]
    constant = 0.0
    for first, second, matrix in problem.edges:
        constant += _add_edge(model, (selected[first], selected[second]), matrix, terms)
    for row in problem.rows:
        # Scaled by the limit, so that the coefficients of all rows are of one magnitude. In a freed problem the limit may be 0
        # or negative.
        scale = row.limit if row.limit > 0 else 1.0
        used = [
            variable * (float(row.coefficients[node][choice]) / scale)
            for node, of_node in enumerate(selected)
            for choice, variable in of_node.items()
        ]
        model.add_linear_constraint(mathopt.fast_sum(used) <= row.limit / scale)
    model.minimize(mathopt.fast_sum(terms) + constant / UNIT)
    if np.isfinite(cutoff):
        bound = _relaxed_bound(model, selected, seconds)
        if bound * UNIT >= cutoff:
            return _without(Status.CUT_OFF, bound * UNIT, started)
    remaining = started + seconds - time.monotonic()
    parameters = mathopt.SolveParameters(
        time_limit=timedelta(seconds=max(0.1, remaining)), relative_gap_tolerance=1e-7, absolute_gap_tolerance=1e-6
    )
    result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)
    return _solution(problem, result, selected, started)


def _nothing_fits(problem: ChoiceProblem, candidates: Sequence[Integers]) -> bool:
    """Whether a node has no choice, or the smallest amounts of all nodes exceed the limit of a memory row."""
    if any(not len(places) for places in candidates):
        return True
    return any(
        sum(float(values[places].min()) for values, places in zip(row.coefficients, candidates, strict=True))
        > row.limit + TOLERANCE * abs(row.limit)
        for row in problem.rows
    )


def _relaxed_bound(model: mathopt.Model, selected: list[dict[int, mathopt.Variable]], seconds: float) -> float:
    """Step 2: the objective of the linear relaxation; inf if it is infeasible, -inf if time ran out."""
    binaries = [variable for of_node in selected for variable in of_node.values()]
    for variable in binaries:
        variable.integer = False
    limit = mathopt.SolveParameters(time_limit=timedelta(seconds=seconds))
    result = mathopt.solve(model, mathopt.SolverType.GLOP, params=limit)
    for variable in binaries:
        variable.integer = True
    reason = result.termination.reason
    if reason == mathopt.TerminationReason.OPTIMAL:
        return result.objective_value()
    return float("inf") if reason == mathopt.TerminationReason.INFEASIBLE else -float("inf")


def _solution(
    problem: ChoiceProblem, result: mathopt.SolveResult, selected: list[dict[int, mathopt.Variable]], started: float
) -> Solution[Chosen]:
    reason = result.termination.reason
    if not result.has_primal_feasible_solution():
        if reason == mathopt.TerminationReason.INFEASIBLE:
            return _without(Status.INFEASIBLE, np.inf, started)
        return _without(Status.TIME_LIMIT, result.dual_bound() * UNIT, started)
    values = result.variable_values()
    chosen = tuple(max(of_node, key=lambda choice: values[of_node[choice]]) for of_node in selected)
    assert problem.is_feasible(chosen, TOLERANCE)
    objective = problem.cost(chosen)
    return Solution(
        value=chosen,
        objective=objective,
        bound=min(objective, result.dual_bound() * UNIT),
        status=Status.OPTIMAL if reason == mathopt.TerminationReason.OPTIMAL else Status.TIME_LIMIT,
        seconds=time.monotonic() - started,
    )


def _without(status: Status, bound: float, started: float) -> Solution[Chosen]:
    """A solution without a value."""
    return Solution(value=None, objective=np.inf, bound=bound, status=status, seconds=time.monotonic() - started)


def _add_edge(
    model: mathopt.Model,
    ends: tuple[dict[int, mathopt.Variable], dict[int, mathopt.Variable]],
    matrix: Floats,
    terms: list[mathopt.LinearTerm],
) -> float:
    """Step 1: add the variables of an edge, and their costs to `terms`; returns the cost that all pairs have in common."""
    first, second = ends
    rows, of_row = _classes(matrix[np.ix_(list(first), list(second))])
    columns, of_column = _classes(rows.T)
    pairs = columns.T
    finite = np.isfinite(pairs)
    least = float(pairs[finite].min()) if finite.any() else 0.0
    variables = {(int(i), int(j)): model.add_variable(lb=0.0, ub=1.0) for i, j in zip(*np.nonzero(finite), strict=True)}
    terms += [
        variable * ((float(pairs[place]) - least) / UNIT)
        for place, variable in variables.items()
        if pairs[place] > least
    ]
    for axis, end, classes in ((0, first, of_row), (1, second, of_column)):
        # Constraint, for every class of choices: sum of its pairs - sum of its choices = 0.
        sums: list[list[mathopt.LinearTerm]] = [[] for _ in range(pairs.shape[axis])]
        for place, variable in variables.items():
            sums[place[axis]].append(variable * 1.0)
        for choice, index in zip(end.values(), classes, strict=True):
            sums[index].append(choice * -1.0)
        for of_class in sums:
            model.add_linear_constraint(mathopt.fast_sum(of_class) == 0)
    return least


def _classes(matrix: Floats) -> tuple[Floats, Integers]:
    """Distinct rows, and the class of every row."""
    rows, classes = np.unique(matrix, axis=0, return_inverse=True)
    return rows, np.asarray(classes).reshape(-1)


def _undominated(problem: ChoiceProblem, node: int) -> Integers:
    """Step 3: the choices of a node that no other choice dominates."""
    costs = problem.costs[node]
    rows = [problem.costs[node], *(row.coefficients[node] for row in problem.rows)]
    sides = [matrix for a, _, matrix in problem.edges if a == node]
    sides += [matrix.T for _, b, matrix in problem.edges if b == node]
    seen = np.hstack([np.zeros((len(costs), 1)), *sides])
    _, classes = _classes(seen)
    values = np.stack(rows, axis=1)
    undominated: list[int] = []
    for choice in np.lexsort(values.T[::-1]):
        if not np.isfinite(costs[choice]):
            continue
        rivals = [other for other in undominated if classes[other] == classes[choice]]
        if not any((values[other] <= values[choice]).all() for other in rivals):
            undominated.append(int(choice))
    return np.array(sorted(undominated), dtype=np.intp)
