"""The exact Pareto frontier of many points: the candidates of a stage that a search over pipelines needs.

Contract. Smaller is better in every column: seconds of a stable, the first and the last micro-batch, optimizer seconds, peak
bytes. A point is dominated if another is not larger in any column, and smaller in one. The frontier holds all points that are not
dominated; of points that are equal in all columns only the first. Hence for every objective that is monotone in the columns the
best point of the frontier is as good as the best of all points, and the frontier of the joined frontiers of neighbouring lots is
that of all points.

Which columns make this exact for the seconds of a pipeline: `objective_columns`.

Steps of `pareto`.
1. Columns become dense ranks, which compare as the values do; a column with a single value is dropped.
2. Points are sorted by the sum of their ranks, then by row: each point comes after all points that dominate or equal it.
3. The next lot of points is compared with itself. Its undominated points belong to the frontier; all later points that they
   dominate are dropped. Lots double: the few points that dominate most come first, and few points remain when lots are long.

n points, f of them on the frontier, take O(n log n) and at worst n · f comparisons; the first lots drop most points.
Source: Mist, section 5.3, where the frontier is sampled by weights α; sort and filter is Chomicki et al., "Skyline with
Presorting", ICDE 2003.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.cost.pipeline import StageTimes

Floats = NDArray[np.float64]

FIRST_LOT = 8
LAST_LOT = 1024
CELLS = 1 << 22
"""Most comparisons in memory at a time: a few MiB."""


def objective_columns(times: StageTimes, optimizer: Floats, stage: int, stages: int, virtual: int = 1) -> Floats:
    """[n, C] columns of n candidates for a stage, such that a dominated candidate never makes a pipeline faster.

    The columns are the terms of pipeline.py's formula at this stage. Forward and backward seconds are separate columns, because
    forward seconds of earlier stages hide the extra seconds of a later stage's first pass. Candidates are comparable by these
    columns only if their transfers take equally long.
    """
    shape = np.shape(optimizer)
    is_last, passes_again = stage == stages - 1, virtual > 1
    # The last stage hides nothing for later stages: its forward and backward seconds count as a sum, unless later chunks of
    # earlier stages follow it.
    halves = [times.stable] if is_last and not passes_again else [times.forward, times.backward]
    columns = [*halves, times.first, times.tail, optimizer]
    return np.stack([np.broadcast_to(column, shape) for column in columns], axis=1)


def pareto(points: Floats) -> NDArray[np.intp]:
    """Row numbers, increasing, of the points on the frontier; of equal points the first row.

    Args:
        points: [n, C]; infinite values are allowed, others must compare.
    """
    assert points.ndim == 2 and not np.isnan(points).any(), points.shape
    if not len(points):
        return np.empty(0, dtype=np.intp)
    # Step 1. Integers, whose sums are exact: a dominated point has the larger sum.
    ranks = [rank for rank in (_dense_ranks(column) for column in points.T) if rank.any()]
    if not ranks:
        return np.zeros(1, dtype=np.intp)
    # Step 2.
    order = np.argsort(np.sum(ranks, axis=0, dtype=np.int64), kind="stable")
    rest = np.stack(ranks)[:, order]
    # Step 3.
    frontier, lot = [], FIRST_LOT
    while len(order):
        head = _first_of_each(rest[:, :lot])
        frontier.append(order[:lot][head])
        alive = ~_covered(rest[:, lot:], rest[:, :lot][:, head])
        order, rest = order[lot:][alive], rest[:, lot:][:, alive]
        lot = min(2 * lot, LAST_LOT)
    return np.sort(np.concatenate(frontier))


def _dense_ranks(column: Floats) -> NDArray[np.int32]:
    """Ranks of the values of a column; equal values have the same."""
    order = np.argsort(column, kind="stable")
    inside = column[order]
    ranks = np.empty(len(column), dtype=np.int32)
    ranks[order] = np.concatenate([[0], np.cumsum(inside[1:] != inside[:-1])])
    return ranks


def _first_of_each(lot: NDArray[np.int32]) -> NDArray[np.bool_]:
    """[k] True for a point of the sorted lot [C, k] that no earlier one dominates or equals."""
    below = np.ones((lot.shape[1], lot.shape[1]), dtype=bool)
    for column in lot:
        below &= column[:, None] <= column[None, :]
    # below[i, j]: point i is not larger than j in any column; only earlier points i < j count.
    return np.logical_not(np.any(np.triu(below, 1), axis=0))


def _covered(rest: NDArray[np.int32], frontier: NDArray[np.int32]) -> NDArray[np.bool_]:
    """[n] True for a point of rest [C, n] that a point of frontier [C, k] dominates or equals."""
    size, many = rest.shape[1], frontier.shape[1]
    covered = np.zeros(size, dtype=bool)
    step = max(1, CELLS // max(1, many))
    for first in range(0, size, step):
        block = rest[:, first : first + step]
        below = frontier[0][:, None] <= block[0][None, :]
        for column, frontier_column in zip(block[1:], frontier[1:], strict=True):
            below &= frontier_column[:, None] <= column[None, :]
        covered[first : first + step] = below.any(axis=0)
    return covered
