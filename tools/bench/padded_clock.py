"""The clock of ranks that stand for a slower device: reading it where an operator ends first sleeps until its seconds are over.

Two ways of counting what an operator has had:

    wall clock      operators that hold no communication: a rank that loses its core for a moment catches up in its sleep
    processor time  operators of tensor-parallel ranks hold collectives, whose seconds come on top
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from moe_overlap.plan.instructions import COMPUTE
from moe_overlap.plan.operators import is_state_key
from moe_overlap.runtime.spans import HostClock
from tools.bench.profile import LATE_SECONDS


class PaddedClock(HostClock):
    """The recorder's clock: before it is read where a computing span ends, that span is given what it lacks.

    Args:
        recorder: the recorder whose clock this is.
        seconds: operator -> seconds of one of its instructions.
        holds_collectives: whether operators hold collectives; see above.
    Attributes:
        late: by how much operators took longer than their profile, by name, since the last `reset`.
        unknown: operators of passes that computed and have no seconds.
    """

    def __init__(self, recorder: Any, seconds: Mapping[str, float], holds_collectives: bool) -> None:
        self._recorder, self._seconds = recorder, seconds
        self._now = time.thread_time if holds_collectives else time.perf_counter
        self._padded: Any = None
        self._begun = 0.0
        self.late: dict[str, float] = {}
        self.unknown: set[str] = set()

    def reset(self) -> None:
        """Begin to count anew."""
        self.late, self._padded = {}, None

    def mark(self) -> float:
        """Read the clock, behind the sleep of the span that is open."""
        current = self._recorder._current
        if current is not None and current.channel == COMPUTE and current is not self._padded:
            self._pad(current.name)
            self._padded = current
        self._begun = self._now()
        return time.perf_counter()

    def _pad(self, name: str) -> None:
        if is_state_key(name):
            return  # an update takes what it takes: no profile is asked for it
        if name not in self._seconds:
            self.unknown.add(name)
            return
        left = self._seconds[name] - (self._now() - self._begun)
        if left < 0:
            self.late[name] = self.late.get(name, 0.0) - left
        elif left > LATE_SECONDS:
            time.sleep(left - LATE_SECONDS)
