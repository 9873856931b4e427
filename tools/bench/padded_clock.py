"""The clock of ranks that emulate a slower device: a reading at the end of an operator first sleeps until its seconds are over.

The elapsed seconds of an operator are those of the wall clock, so that a rank that loses its core for a moment catches up in its
sleep. Waits for collectives inside the operator (of tensor-parallel ranks) do not count; they are added. Computation between a
collective and its wait hides as much of the collective as on the slower device, so that share of the sleep comes before the wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_overlap.plan.instructions import COMPUTE
from moe_overlap.plan.operators import is_state_key
from moe_overlap.runtime.spans import HostClock
from tools.bench.profile import LATE_SECONDS


@dataclass(frozen=True, slots=True)
class Inside:
    """A collective inside an operator: when it began, and whether its caller waits at once."""

    begun: float
    blocks: bool


class PaddedClock(HostClock):
    """The recorder's clock: at the end of a computing span it first sleeps until the span has its profiled seconds.

    Args:
        recorder: the recorder of this clock; the clock takes over collectives inside operators, which no longer split a span: the
            seconds of an operator are the seconds of one span.
        seconds: operator -> seconds of one of its instructions.
        slower: seconds of an operator on the device over seconds on this machine.
    Attributes:
        late: by how much operators took longer than their profile, by name, since the last `reset`.
        unknown: operators of passes that computed and have no seconds.
    """

    def __init__(self, recorder: Any, seconds: Mapping[str, float], slower: float) -> None:
        self._recorder, self._seconds, self._slower = recorder, seconds, slower
        self._padded: Any = None
        self._begun = self._waited = 0.0
        self.late: dict[str, float] = {}
        self.unknown: set[str] = set()
        recorder.start_inside, recorder.wait_inside = self.start_inside, self.wait_inside

    def reset(self) -> None:
        """Reset the counts."""
        self.late, self._padded = {}, None

    def mark(self) -> float:
        """Read the clock after the sleep of the open span."""
        current = self._recorder._current
        if current is not None and current.channel == COMPUTE and current is not self._padded:
            self._pad(current.name)
            self._padded = current
        self._begun, self._waited = time.perf_counter(), 0.0
        return self._begun

    def start_inside(self, channel: str, blocks: bool) -> Inside:
        """A collective inside an operator starts; its caller may wait at once, or compute before."""
        return Inside(time.perf_counter(), blocks)

    def wait_inside(self, opened: Inside, wait: Callable[..., Any], *timeout: Any) -> Any:
        """Wait for a collective of `start_inside`: the wait does not count for its operator."""
        begun = opened.begun
        if not opened.blocks:
            overlapped = time.perf_counter() - begun
            self._sleep(min((self._slower - 1.0) * overlapped, self._remaining()))
            begun = time.perf_counter()
        answer = wait(*timeout)
        self._waited += time.perf_counter() - begun
        return answer

    def _remaining(self) -> float:
        """Seconds until the current operator reaches its profiled time; negative if it is late."""
        current = self._recorder._current
        if current is None or current.channel != COMPUTE or current.name not in self._seconds:
            return 0.0
        return self._seconds[current.name] - (time.perf_counter() - self._begun - self._waited)

    def _sleep(self, seconds: float) -> None:
        if seconds > LATE_SECONDS:
            time.sleep(seconds - LATE_SECONDS)

    def _pad(self, name: str) -> None:
        if is_state_key(name):
            return  # an update has no profile
        if name not in self._seconds:
            self.unknown.add(name)
            return
        remaining = self._remaining()
        if remaining < 0:
            self.late[name] = self.late.get(name, 0.0) - remaining
        self._sleep(remaining)
