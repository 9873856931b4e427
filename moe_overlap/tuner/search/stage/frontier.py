"""The exact Pareto frontier of many points: what is left of a stage's candidates for a search over pipelines.

Contract. Every column is to be small: seconds of a stable, the first and the last micro-batch, optimizer seconds, peak bytes. A
point is dominated when another is not larger in any column, and smaller in one. The frontier holds all points that are not
dominated; of points that are equal in all columns the first. Hence for every objective that is monotone in the columns the best
point of the frontier is as good as the best of all points, and the frontier of the frontiers of neighbouring lots is that of all
points.

Which columns make this exact for the seconds of a pipeline: `objective_columns`.

Steps of `pareto`.
1. Columns become dense ranks, which compare as the values do; a column of one value alone decides nothing and is left out.
2. Points are sorted by the sum of their ranks, then by row: a point stands behind all that dominate it or equal it.
3. The first points of the rest are compared with one another, what is left of them belongs to the frontier, and everything they
   dominate goes. The lots double: the few that dominate most come first, and the rest is short when lots are long.

n points of which f are on the frontier take O(n log n) and, at worst, n · f comparisons; most points die in the first lots.
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
"""Comparisons held at a time: a few MiB."""


def objective_columns(times: StageTimes, optimizer: Floats, stage: int, stages: int, virtual: int = 1) -> Floats:
    """[n, C] columns of n candidates for a stage in which a dominated candidate never makes a pipeline faster.

    Every column of pipeline.py's formula that counts at this place of the pipeline. Forward and backward seconds stand for
    themselves, not for their sum: forward seconds of stages in front hide what a later stage has to do first. Two candidates
    are only comparable like this where their transfers take equally long.
    """
    shape = np.shape(optimizer)
    is_last, passes_again = stage == stages - 1, virtual > 1
    # The last stage hides nothing for stages behind it: its forward and backward seconds count as a sum, unless chunks of
    # stages in front come behind it.
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
    # Step 1. Whole numbers, whose sums are exact: a dominated point has the larger sum.
    ranks = [rank for rank in (_dense_ranks(column) for column in points.T) if rank.any()]
    if not ranks:
        return np.zeros(1, dtype=np.intp)
    # Step 2.
    order = np.argsort(np.sum(ranks, axis=0, dtype=np.int64), kind="stable")
    rest = np.stack(ranks)[:, order]
    # Step 3.
    kept, lot = [], FIRST_LOT
    while len(order):
        head = _first_of_each(rest[:, :lot])
        kept.append(order[:lot][head])
        alive = ~_covered(rest[:, lot:], rest[:, :lot][:, head])
        order, rest = order[lot:][alive], rest[:, lot:][:, alive]
        lot = min(2 * lot, LAST_LOT)
    return np.sort(np.concatenate(kept))


def _dense_ranks(column: Floats) -> NDArray[np.int32]:
    """Ranks of the values of a column; equal values have the same."""
    order = np.argsort(column, kind="stable")
    inside = column[order]
    ranks = np.empty(len(column), dtype=np.int32)
    ranks[order] = np.concatenate([[0], np.cumsum(inside[1:] != inside[:-1])])
    return ranks


def _first_of_each(lot: NDArray[np.int32]) -> NDArray[np.bool_]:
    """[k] whether a point of the sorted lot [C, k] is neither dominated by an earlier one nor equal to it."""
    below = np.ones((lot.shape[1], lot.shape[1]), dtype=bool)
    for column in lot:
        below &= column[:, None] <= column[None, :]
    # Row i covers column j; only earlier points count, and a point covers itself.
    return np.logical_not(np.any(np.triu(below, 1), axis=0))


def _covered(rest: NDArray[np.int32], kept: NDArray[np.int32]) -> NDArray[np.bool_]:
    """[n] whether a point of rest [C, n] is dominated by one of kept [C, k], or equal to it."""
    size, many = rest.shape[1], kept.shape[1]
    covered = np.zeros(size, dtype=bool)
    step = max(1, CELLS // max(1, many))
    for first in range(0, size, step):
        block = rest[:, first : first + step]
        below = kept[0][:, None] <= block[0][None, :]
        for column, own in zip(block[1:], kept[1:], strict=True):
            below &= own[:, None] <= column[None, :]
        covered[first : first + step] = below.any(axis=0)
    return covered
