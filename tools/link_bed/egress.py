"""When data leave a rank whose exit has a given rate: a virtual clock."""

from __future__ import annotations

import time
from collections.abc import Callable

HANDED_OVER_BYTES = 128 * 1024
"""Most that one connection puts into the queue of an exit: `tcp_limit_output_bytes` of the bed (bed.py)."""


class EgressClock:
    """The exit of one rank.

    Args:
        bytes_per_second: rate; None: not limited.
        latency_seconds: from the exit to the receiver.
        now: seconds of a clock that all processes of the machine share.
    Attributes:
        sent_bytes: bytes that have been sent so far.
        busy_seconds: how long the exit was busy with them.
    """

    def __init__(
        self,
        bytes_per_second: float | None,
        latency_seconds: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bytes_per_second, self.latency_seconds = bytes_per_second, latency_seconds
        self.sent_bytes, self.busy_seconds = 0, 0.0
        self._now = now
        self._free_at = 0.0

    def send(self, count: int) -> float:
        """Send bytes now, behind what is already on its way out.

        Returns:
            The moment at which the last of them has left.
        """
        seconds = 0.0 if self.bytes_per_second is None else count / self.bytes_per_second
        self._free_at = max(self._now(), self._free_at) + seconds
        self.sent_bytes += count
        self.busy_seconds += seconds
        return self._free_at

    def overtake(self, count: int) -> float:
        """Send a few bytes over a connection of their own: they pass what another one holds back, not what it has handed over.

        What they take from the rate of the others is neglected.

        Returns:
            The moment at which the last of them has left.
        """
        now = self._now()
        self.sent_bytes += count
        if self.bytes_per_second is None:
            return now
        ahead = min(max(0.0, self._free_at - now), HANDED_OVER_BYTES / self.bytes_per_second)
        return now + ahead + count / self.bytes_per_second


def sleep_until(moment: float, now: Callable[[], float] = time.monotonic) -> None:
    """Sleep until a clock has reached a moment."""
    while (left := moment - now()) > 0:
        time.sleep(left)
