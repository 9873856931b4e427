"""How much longer kernels take that run at the same time: computation, device to device, host to device, device to host.

Terms. A stream is one of these four. The *alone seconds* of a stream are what its work takes when nothing else runs. While
a set of streams is busy, each of them is slowed down by a factor that belongs to the set: it does 1 / factor seconds of its
work per second.
Contract. Factors are at least 1 and, per set, their inverses add up to at least 1: together the streams do at least as much
as one of them alone. So the whole takes at least as long as its longest stream, and at most as long as all in a row.
Method (`Interference.seconds`), for every row:
1. Look up the factors of the streams that are still busy.
2. Let time pass until the first of them ends; take what the others did off their work.
3. Repeat until nothing is left.

Source: Mist, algorithm 1 and section 5.2.2; it goes through the sets one after the other, largest first, which is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from moe_overlap.describe.errors import ConfigError

STREAMS = ("compute", "device_to_device", "host_to_device", "device_to_host")
SETS = tuple(
    "".join("1" if stream in members else "0" for stream in range(4))
    for size in (4, 3, 2)
    for members in combinations(range(4), size)
)
"""Sets of busy streams as words, a digit per stream in the order of STREAMS; one stream alone is not slowed down."""
BLOCK = 1 << 14
"""Rows worked on at a time, few enough to stay in the cache."""

Floats = NDArray[np.float64]
Factors = Mapping[str, Sequence[float]]
"""Set -> factors of its busy streams."""


def serial_share(factors: Sequence[float]) -> float:
    """Work that a set does per second, in alone seconds: 1 is as much as its streams in a row."""
    return sum(1 / factor for factor in factors)


class Interference:
    """The factors of one host, or of one group of its devices.

    Args:
        factors: for each of SETS.
        subject: where they stand, for errors.
    Raises:
        ConfigError: a set is missing or unknown, or its factors break the contract above.
    """

    def __init__(self, factors: Factors, subject: str = "interference factors") -> None:
        _check(factors, subject)
        self.factors = {word: tuple(factors[word]) for word in SETS}
        self._table = np.ones((4, 16))
        for word, values in factors.items():
            busy = [stream for stream in range(4) if word[stream] == "1"]
            self._table[busy, int(word, 2)] = values

    def factor(self, stream: int, busy: Collection[int]) -> float:
        """Slowdown of one stream while the streams `busy`, itself among them, are."""
        return float(self._table[stream, sum(8 >> other for other in set(busy))])

    def seconds(self, compute: Floats, device: Floats, to_device: Floats, to_host: Floats) -> Floats:
        """Seconds until everything has ended that began at the same time.

        Args:
            compute, device, to_device, to_host: alone seconds of the streams, 0 where one has nothing to do; they broadcast.
        """
        alone = np.stack(np.broadcast_arrays(compute, device, to_device, to_host)).astype(np.float64, copy=False)
        rows = alone.reshape(4, -1)
        total = np.empty(rows.shape[1])
        for first in range(0, rows.shape[1], BLOCK):
            total[first : first + BLOCK] = self._block(rows[:, first : first + BLOCK])
        return total.reshape(alone.shape[1:])

    def _block(self, alone: Floats) -> Floats:
        left, total = alone, np.zeros(alone.shape[1])
        for _ in range(3):
            busy = left > 0
            sets = busy[0] * 8 + busy[1] * 4 + busy[2] * 2 + busy[3]
            factors = self._table.take(sets, axis=1)
            ends = np.where(busy, left * factors, np.inf)
            passed = ends.min(axis=0)
            passed[sets == 0] = 0.0
            total += passed
            left = np.where(busy, (ends - passed) / factors, 0.0)
        return total + left.sum(axis=0)


def _check(factors: Factors, subject: str) -> None:
    """ConfigError for the first set that breaks the contract."""
    for word in factors:
        if word not in SETS:
            raise ConfigError(f"{subject} {word}", "", "no set of busy streams", f"use {', '.join(SETS)}")
    for word in SETS:
        values = factors.get(word, ())
        shown = " ".join(map(str, values))
        if len(values) != word.count("1"):
            rule = f"the set has {word.count('1')} busy streams"
            raise ConfigError(f"{subject} {word}", shown, rule, "give a factor for each")
        if not all(1 <= value < np.inf for value in values):
            raise ConfigError(f"{subject} {word}", shown, "work beside other work is not faster", "use factors from 1")
        if serial_share(values) < 1:
            rule = f"slower than one after the other: the inverses add up to {serial_share(values):.4f}"
            raise ConfigError(f"{subject} {word}", shown, rule, "make them smaller")


NO_INTERFERENCE = Interference({word: (1.0,) * word.count("1") for word in SETS})
"""What runs at the same time ends when its longest stream does."""
