"""The integer program of choices against brute force, and what happens without its edges and its memory rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from moe_overlap.tuner.search.layer.sharding_ilp import ChoiceProblem, MemoryRow, solve_choices

INSTANCES = 120
MICRO = 1e-6


def random_problem(seed: int) -> ChoiceProblem:
    """A few nodes with a few choices, edges with forbidden pairs, two memory rows that often bind."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, size=rng.integers(2, 6))
    nodes = range(len(sizes))
    costs = tuple(rng.integers(0, 40, size=size) * 10 * MICRO for size in sizes)
    edges = []
    for a, b in product(nodes, nodes):
        if a != b and rng.random() < 0.4:
            matrix = rng.integers(0, 30, size=(sizes[a], sizes[b])) * 10 * MICRO
            matrix[rng.random(matrix.shape) < 0.1] = np.inf
            edges.append((a, b, matrix))
    rows = tuple(
        MemoryRow(tuple(rng.integers(1, 20, size=size).astype(float) for size in sizes), float(11 * len(sizes)))
        for _ in range(2)
    )
    return ChoiceProblem(costs, tuple(edges), rows)


def brute_force(problem: ChoiceProblem) -> float:
    choices = product(*(range(len(costs)) for costs in problem.costs))
    return min((problem.cost(chosen) for chosen in choices if problem.is_feasible(chosen)), default=np.inf)


def test_equals_brute_force() -> None:
    infeasible = without_edges = without_rows = 0
    for seed in range(INSTANCES):
        problem = random_problem(seed)
        best, solution = brute_force(problem), solve_choices(problem)
        if best == np.inf:
            assert (solution.value, solution.status) == (None, "infeasible"), seed
            infeasible += 1
            continue
        assert solution.value is not None and problem.is_feasible(solution.value)
        assert solution.objective == pytest.approx(best, abs=1e-10), seed
        assert solution.status == "optimal" and solution.gap < 1e-6 and solution.bound <= solution.objective
        # The instances would show a program without its edges, or without its memory rows.
        without_edges += brute_force(replace(problem, edges=())) < best
        without_rows += brute_force(replace(problem, rows=())) < best
    assert infeasible >= 10 and without_edges >= 50 and without_rows >= 15, (infeasible, without_edges, without_rows)


def test_a_few_nodes_choose_anew() -> None:
    """`freed` against all choices of two nodes beside fixed others, in both orders."""
    rng, feasible = np.random.default_rng(1), 0
    for seed in range(40):
        problem = random_problem(seed)
        sizes = [len(costs) for costs in problem.costs]
        chosen = [int(rng.integers(size)) for size in sizes]
        free = [int(node) for node in rng.permutation(len(sizes))[:2]]
        options = product(*(range(size) if node in free else [chosen[node]] for node, size in enumerate(sizes)))
        best = min((problem.cost(option) for option in options if problem.is_feasible(option)), default=np.inf)
        solution = solve_choices(problem.freed(chosen, free))
        if solution.value is None:
            # Others may be forbidden among themselves, which the freed problem does not see.
            assert best == np.inf and solution.status == "infeasible", seed
            continue
        anew = list(chosen)
        for node, choice in zip(free, solution.value, strict=True):
            anew[node] = choice
        assert problem.cost(anew) == pytest.approx(best), seed
        feasible += 1
    assert feasible >= 15


def test_a_cutoff_ends_what_cannot_win() -> None:
    ended = 0
    for seed in range(20):
        problem = random_problem(seed)
        best = brute_force(problem)
        if best == np.inf:
            continue
        beaten = solve_choices(problem, cutoff=best + 5 * MICRO)
        assert beaten.objective == pytest.approx(best, abs=1e-10), "a cost above the best one cuts nothing off"
        useless = solve_choices(problem, cutoff=best * 0.5)
        ended += useless.status == "cut off"
        assert useless.status == "optimal" or (useless.value is None and useless.bound >= best * 0.5)
    assert ended >= 5


def test_a_forbidden_choice_and_an_empty_node() -> None:
    costs = (np.array([1.0, np.inf]) * MICRO, np.array([5.0, 2.0]) * MICRO)
    edge = np.array([[0.0, np.inf], [0.0, 0.0]])
    solution = solve_choices(ChoiceProblem(costs, ((0, 1, edge),)))
    assert solution.value == (0, 0) and solution.objective == pytest.approx(6 * MICRO)
    nothing = ChoiceProblem((np.array([np.inf]),), ())
    assert solve_choices(nothing).status == "infeasible"
