"""Shares of a search, each for a process (`plan_search/processes.py`), and the bar that the processes tell each other.

`share_of` deals the layouts: a share has all layouts of its ranks, so no two put together the same graphs.
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
    """A share of a search: the `index`-th of `count`, from 0 on."""

    index: int
    count: int


def share_of(layouts: Sequence[UniformLayout], share: LayoutShare) -> list[UniformLayout]:
    """The layouts of a share, in their order; there may be none."""
    ranks = list(dict.fromkeys(layout.ranks for layout in layouts))
    dealt = set(ranks[share.index :: share.count])
    return [layout for layout in layouts if layout.ranks in dealt]


class SharedBar:
    """The seconds that a plan must stay below, of all processes that search shares of one space. Build it before they are forked.

    Every process writes the steps of the plans that it keeps into memory that forked processes share; the bar of all is the
    `keep`-th smallest of them. A process that knew only its own plans would price layouts that the others have long ruled out:
    two of them together nearly twice as many as one alone.

    No lock is needed. A process keeps faster plans over time, so that each place of its ascending row only ever falls. Whoever
    reads a row while it is written sees new and old numbers, of which none is below the new one in its place: the bar may be too
    high for a moment, and rules out too little, never too much.

    Args:
        processes: that search, each a share of the shapes that plans are ranked by.
        keep: plans that the search ranks.
    """

    def __init__(self, processes: int, keep: int) -> None:
        memory = mmap.mmap(-1, processes * keep * np.dtype(np.float64).itemsize)
        self._rows = np.frombuffer(memory, dtype=np.float64).reshape(processes, keep)
        self._rows[:] = math.inf
        self._keep = keep

    @property
    def seconds(self) -> float:
        """Seconds of a step: slower plans are not among the fastest of all processes. Infinity while too few are known."""
        return float(np.partition(self._rows, self._keep - 1, axis=None)[self._keep - 1])

    def tell(self, index: int, steps: Iterable[float]) -> None:
        """Tell the others the steps of what a process keeps.

        Args:
            index: of the process, from 0 on.
            steps: seconds, at most `keep` of them.
        """
        row = sorted(steps)
        self._rows[index, : len(row)] = row
