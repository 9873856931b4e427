"""Shares of a search, one per process (`plan_search/processes.py`), and the bar that all processes lower together.

`share_of` divides the layouts by their ranks, so that no two processes build the same graphs.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moe_overlap.tuner.search.space import UniformLayout


@dataclass(frozen=True, slots=True)
class LayoutShare:
    """A share of a search: the `index`-th of `count`, counted from 0."""

    index: int
    count: int


def share_of(layouts: Sequence[UniformLayout], share: LayoutShare) -> list[UniformLayout]:
    """The layouts of a share, in their order; possibly empty."""
    ranks = list(dict.fromkeys(layout.ranks for layout in layouts))
    dealt = set(ranks[share.index :: share.count])
    return [layout for layout in layouts if layout.ranks in dealt]


class SharedBar:
    """The bar of step seconds of all processes that search one space in shares. It must exist before they are forked.

    Every process writes the steps of its incumbents into memory shared by forked processes; the bar is the `keep`-th smallest of
    all steps. Without it a process would price layouts that the incumbents of others prune: two processes together would price
    nearly twice as many as one.

    No lock is needed. The incumbents of a process only improve, so each number of its ascending row only falls. A reader during a
    write sees new and old numbers, none below the new number at its place. So the bar may be too high for a moment, which prunes
    too few layouts, never too many.

    Args:
        processes: number of processes, each with a share of the shapes by which plans are ranked.
        keep: number of plans that the search ranks.
    """

    def __init__(self, processes: int, keep: int) -> None:
        memory = mmap.mmap(-1, processes * keep * np.dtype(np.float64).itemsize)
        self._rows = np.frombuffer(memory, dtype=np.float64).reshape(processes, keep)
        self._rows[:] = math.inf
        self._keep = keep

    @property
    def seconds(self) -> float:
        """Step seconds above which a plan is not among the fastest of all processes; infinite until there are `keep` plans."""
        return float(np.partition(self._rows, self._keep - 1, axis=None)[self._keep - 1])

    def tell(self, index: int, steps: Iterable[float]) -> None:
        """Publish the steps of a process's incumbents.

        Args:
            index: index of the process.
            steps: seconds, at most `keep` of them.
        """
        row = sorted(steps)
        self._rows[index, : len(row)] = row
