"""The Pareto frontier against its definition, point by point, and against objectives over all points."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_overlap.tuner.cost.pipeline import PipelineRules, StageTimes, pipeline_seconds
from moe_overlap.tuner.search.solution import Solution, Status
from moe_overlap.tuner.search.stage import frontier as under_test
from moe_overlap.tuner.search.stage.frontier import objective_columns, pareto

INSTANCES = 150


def by_definition(points: NDArray[np.float64]) -> list[int]:
    """Rows that no other row dominates, and of equal rows the first."""
    rows = [tuple(row) for row in points.tolist()]
    return [
        i
        for i, row in enumerate(rows)
        if not any(other != row and all(a <= b for a, b in zip(other, row, strict=True)) for other in rows)
        and row not in rows[:i]
    ]


def random_points(draw: np.random.Generator) -> NDArray[np.float64]:
    """Ties in some columns and in all, constant columns, infinities, trade-offs."""
    n, columns = int(draw.integers(0, 60)), int(draw.integers(1, 7))
    points = draw.integers(0, int(draw.choice([2, 4, 1000])), (n, columns)).astype(float)
    if draw.random() < 0.3:
        points[:, 0] = 5.0
    if draw.random() < 0.3:
        points[:, -1] = points[:, :-1].sum(axis=1).max(initial=0.0) - points[:, :-1].sum(axis=1)
    if n and draw.random() < 0.3:
        points[draw.integers(n), draw.integers(columns)] = math.inf
    return points


@pytest.mark.parametrize(("first", "last", "cells"), [(8, 1024, 1 << 22), (1, 2, 3), (3, 7, 50)])
def test_frontier_is_what_its_definition_says(
    first: int, last: int, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the size of lots and blocks."""
    for name, value in (("FIRST_LOT", first), ("LAST_LOT", last), ("CELLS", cells)):
        monkeypatch.setattr(under_test, name, value)
    draw = np.random.default_rng(3)
    for _ in range(INSTANCES):
        points = random_points(draw)
        assert pareto(points).tolist() == by_definition(points)


def test_frontier_is_the_same_in_any_order_and_in_any_lots() -> None:
    """Points in another order have the same frontier, and lots of them have frontiers whose frontier it is."""
    draw = np.random.default_rng(4)
    for _ in range(INSTANCES):
        points = random_points(draw)
        whole = points[pareto(points)]
        cuts = np.sort(draw.integers(0, len(points) + 1, 3))
        growing = np.empty(0, dtype=np.intp)
        for lot in np.split(np.arange(len(points)), cuts):
            rows = np.concatenate([growing, lot[pareto(points[lot])]])
            growing = rows[pareto(points[rows])]
        assert growing.tolist() == pareto(points).tolist()
        shuffled = points[draw.permutation(len(points))]
        other = shuffled[pareto(shuffled)]
        assert sorted(map(tuple, other.tolist())) == sorted(map(tuple, whole.tolist()))


def test_best_of_the_frontier_is_the_best_of_all_for_monotone_objectives() -> None:
    draw = np.random.default_rng(5)
    for _ in range(INSTANCES):
        points = random_points(draw)
        points = points[np.isfinite(points).all(axis=1)]
        if not len(points):
            continue
        rows, weights = pareto(points), draw.uniform(0, 2, points.shape[1]) * draw.integers(0, 2, points.shape[1])
        for objective in (
            points @ weights,
            np.max(points * weights, axis=1),
            np.sum(np.floor(points * weights), axis=1),
            # The fastest that fits: infeasible points cost more than all others.
            np.where(points[:, -1] <= np.median(points[:, -1]), points @ weights, math.inf),
        ):
            assert objective[rows].min() == objective.min()


def test_candidates_off_the_frontier_make_no_pipeline_faster() -> None:
    """At every place of a pipeline, whatever the other stages are."""
    draw = np.random.default_rng(6)
    for _ in range(INSTANCES):
        stages, n = int(draw.integers(1, 5)), 12
        place = int(draw.integers(stages))
        # Few columns differ, and in few values, so that points dominate one another.
        names = ("optimizer", *(field.name for field in fields(StageTimes)))
        differ = draw.choice(names, int(draw.integers(1, 4)), replace=False)
        drawn = {name: 1.0 + (draw.integers(0, 5, n) if name in differ else np.zeros(n)) for name in names}
        optimizer = drawn.pop("optimizer")
        candidates = StageTimes(**drawn)
        rules = PipelineRules(virtual=int(draw.integers(1, 3)), transfer_slowdown=None)
        rows = pareto(objective_columns(candidates, optimizer, place, stages, rules.virtual))
        others = [
            StageTimes(
                forward=draw.uniform(0.2, 3),
                backward=draw.uniform(0.2, 3),
                first=draw.uniform(0, 3),
                tail=draw.uniform(0, 3),
            )
            for _ in range(stages)
        ]
        updates = draw.uniform(0, 8, stages).tolist()
        seconds = pipeline_seconds(
            [*others[:place], candidates, *others[place + 1 :]],
            [*updates[:place], optimizer, *updates[place + 1 :]],
            [0.1] * (stages - 1),
            [int(draw.integers(1, 9))] * stages,
            rules,
        ).total
        assert isinstance(seconds, np.ndarray)
        assert seconds[rows].min() == pytest.approx(seconds.min(), rel=1e-12)


def test_many_points_are_sorted_out() -> None:
    """A fifth of a million: comparing all pairs would need terabytes."""
    kept = pareto(np.random.default_rng(0).random((200_000, 5)))
    assert 500 < len(kept) < 3000


def test_a_solution_knows_its_gap() -> None:
    def solution(value: str | None, objective: float, bound: float) -> Solution[str]:
        return Solution(value=value, objective=objective, bound=bound, status=Status.TIME_LIMIT, seconds=0.1)

    assert solution("plan", 10.0, 9.0).gap == pytest.approx(0.1)
    assert solution("plan", 10.0, 10.0).gap == 0.0
    assert solution(None, math.inf, 3.0).gap == math.inf
    with pytest.raises(AssertionError):
        solution("plan", 10.0, 11.0)
    with pytest.raises(AssertionError):
        solution(None, 10.0, 9.0)
