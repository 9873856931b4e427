"""Measure what a database lacks, key by key."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moe_overlap.tuner.profile.database import Database
from moe_overlap.tuner.profile.keys import OperatorKey
from moe_overlap.tuner.profile.measure.operators import call_of
from moe_overlap.tuner.profile.measure.timing import call_seconds


def measure_operators(
    database: Database,
    keys: Sequence[OperatorKey],
    seconds_each: float,
    measured: Callable[[OperatorKey], None] = lambda key: None,
) -> int:
    """Time every key that the database lacks, and keep each at once.

    Args:
        seconds_each: about how long to time one.
        keys: of kinds that `can_be_measured`.
        measured: called after each key, timed now or before.
    Returns:
        How many were timed.
    """
    device, count = database.device, 0
    if device.kind == "cpu":
        torch.set_num_threads(device.threads)
    for key in keys:
        if key not in database.operators:
            call = call_of(key, device.kind)
            database.add_operator(key, call_seconds(call, device.kind, seconds_each))
            count += 1
        measured(key)
    return count
