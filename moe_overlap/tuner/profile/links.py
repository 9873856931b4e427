"""Latency and bandwidth of a tier from its measured collectives.

Model: seconds = latency + moved bytes / bandwidth, where of a tensor of H bytes over n ranks H (n - 1) / n moves, twice that in
an all-reduce. The fit minimises relative errors and gives less weight to what it misses most, so that a disturbed measurement
does not bend it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moe_overlap.tuner.profile.database import LinkKey

ROUNDS = 20
LEAST_ERROR = 0.02
"""Relative errors below this weigh alike."""
LEAST_LATENCY_SECONDS = 1e-7


@dataclass(frozen=True, slots=True)
class Fitted:
    """A line through measurements.

    Attributes:
        error: median relative error on them.
    """

    latency_seconds: float
    bytes_per_second: float
    error: float


def moved_bytes(key: LinkKey) -> float:
    """What crosses a rank's links."""
    if key.kind in ("point_to_point", "to_device", "to_host"):
        return float(key.held_bytes)
    return key.held_bytes * (key.ranks - 1) / key.ranks * (2.0 if key.kind == "all_reduce" else 1.0)


def fit_links(links: Mapping[LinkKey, float], kinds: Iterable[str], tier: str) -> Fitted | None:
    """One line through the measured collectives of a tier; None without two sizes."""
    chosen = [(moved_bytes(key), seconds) for key, seconds in links.items() if key.kind in kinds and key.tier == tier]
    if len({moved for moved, _ in chosen}) < 2:
        return None
    return fit_line([moved for moved, _ in chosen], [seconds for _, seconds in chosen])


def fit_line(moved: Sequence[float], seconds: Sequence[float]) -> Fitted:
    """Weighted least squares of the relative error, repeated with weights of 1 / error."""
    x, y = np.asarray(moved, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    rows = np.stack([1.0 / y, x / y], axis=1)
    weights = np.ones_like(y)
    latency, pace = LEAST_LATENCY_SECONDS, float(np.median(y / np.maximum(x, 1.0)))
    for _ in range(ROUNDS):
        solved = np.linalg.lstsq(rows * weights[:, None], weights, rcond=None)[0]
        latency, pace = float(solved[0]), float(solved[1])
        if latency < LEAST_LATENCY_SECONDS or pace <= 0:
            latency = max(latency, LEAST_LATENCY_SECONDS) if pace > 0 else float(np.median(y))
            pace = float(np.median(np.maximum(y - latency, 0.02 * y) / np.maximum(x, 1.0)))
        errors = np.abs((latency + pace * x) / y - 1.0)
        weights = 1.0 / np.sqrt(np.maximum(errors, LEAST_ERROR))
    return Fitted(latency, 1.0 / pace, float(np.median(np.abs((latency + pace * x) / y - 1.0))))
