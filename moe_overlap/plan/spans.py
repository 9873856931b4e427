"""What ran when, under the names of the instruction list: measured by the runtime's recorder or simulated by the tuner."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moe_overlap.plan.instructions import COMPUTE, OPTIMIZER

COMPUTING = (COMPUTE, OPTIMIZER)
"""Channels that keep the device busy; the others move bytes."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work on one channel; times in seconds since the start of the step."""

    name: str
    channel: str
    chunk: int
    micro_batch: int
    start: float
    end: float


def communication_seconds(spans: Sequence[Span]) -> tuple[float, float]:
    """Communication of a step.

    Returns:
        Seconds in which communication ran, and those of them in which no compute span covered it (exposed).
    """
    communication = _union((s.start, s.end) for s in spans if s.channel not in COMPUTING)
    compute = _union((s.start, s.end) for s in spans if s.channel in COMPUTING)
    covered = sum(max(0.0, min(e1, e2) - max(s1, s2)) for s1, e1 in communication for s2, e2 in _near(compute, s1, e1))
    total = sum(end - start for start, end in communication)
    return total, total - covered


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _near(intervals: list[tuple[float, float]], start: float, end: float) -> list[tuple[float, float]]:
    first = bisect.bisect_left(intervals, (start, start))
    last = bisect.bisect_right(intervals, (end, end))
    return intervals[max(0, first - 1) : last]
