"""How long a call takes: warmed up and repeated."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

Call = Callable[[], object]
FLUSHED_BYTES = 256 << 20
"""Written between calls on a GPU, more than its second-level cache holds."""
BATCHES = 10


def call_seconds(call: Call, device: str, budget_seconds: float) -> float:
    """Seconds of one call.

    On a CPU the least of several batches, each batch its mean: what else the machine does only adds to it. Operands stay as warm
    as a training step's.
    On a GPU the median over single calls between events, with the cache flushed before each.

    Args:
        budget_seconds: about how long to measure.
    """
    return _cuda_seconds(call, budget_seconds) if device == "cuda" else _host_seconds(call, budget_seconds)


def _host_seconds(call: Call, budget_seconds: float) -> float:
    call()
    start = time.perf_counter()
    call()
    once = max(time.perf_counter() - start, 1e-7)
    repeats = max(1, int(budget_seconds / BATCHES / once))
    times = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - start) / repeats)
    return min(times)


def _cuda_seconds(call: Call, budget_seconds: float) -> float:
    """Not run on hardware."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    end_time = time.perf_counter() + budget_seconds
    while len(times) < 5 or (time.perf_counter() < end_time and len(times) < 200):
        flushed.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)
