"""Orders to ranks that measure themselves and their links; measuring.py follows them. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from moe_overlap.tuner.profile.database import Database
from moe_overlap.tuner.profile.keys import OperatorKey

ORDER_OPERATORS, ORDER_LINKS, ORDER_SLOWDOWN, ORDER_COUNTS = "operators", "links", "slowdown", "counts"
ORDERS = (ORDER_OPERATORS, ORDER_LINKS, ORDER_SLOWDOWN, ORDER_COUNTS)
TRANSFERS = "point_to_point"
"""Kind of link that leads to the next stage."""


def order_of(database: Database, keys: Sequence[OperatorKey], seconds_each: float) -> dict[str, Any]:
    """The order to measure operators into a database."""
    return {
        "do": ORDER_OPERATORS,
        "path": str(database.path.resolve()),
        "device": dataclasses.asdict(database.device),
        "operators": [[key.kind, key.direction, key.dtype, list(key.shape)] for key in keys],
        "seconds_each": seconds_each,
    }
