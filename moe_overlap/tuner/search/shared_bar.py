"""The seconds that a plan must stay below, told among processes that search shares of one space.

Every process writes the steps of the plans that it keeps into memory that forked processes share; the bar of all is the `keep`-th
smallest of them. A process that knew only its own plans would price layouts that the others have long ruled out: two of them
together nearly twice as many as one alone.

No lock is needed. A process keeps faster plans over time, so that each place of its ascending row only ever falls. Whoever reads
a row while it is written sees new and old numbers, of which none is below the new one in its place: the bar may be too high for
a moment, and rules out too little, never too much.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable

import numpy as np


class SharedBar:
    """The bar of all processes. Build it before they are forked.

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
