"""Limits of the search for overlap inside a layer (Lancet, section 5): their defaults, flags and rules."""

from __future__ import annotations

import math

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.overlap import SearchLimits

PLAN_SEARCH_LIMITS = SearchLimits(max_partitions=8, group_seconds=0.0, range_limit=16)
"""Limits where no flag sets others."""
LIMIT_FLAGS = {
    "max_partitions": "--overlap-max-partitions",
    "group_seconds": "--overlap-group-seconds",
    "range_limit": "--overlap-range-limit",
}
"""Field of `SearchLimits` -> the flag of tools/autotune.py that sets it, as errors name it."""


def check_limits(limits: SearchLimits) -> None:
    """Refuse limits that are too small or infinite.

    Raises:
        ConfigError: it names the flag.
    """
    for name, least in (("max_partitions", 1), ("group_seconds", 0), ("range_limit", 1)):
        value = getattr(limits, name)
        if not least <= value < math.inf:
            raise ConfigError(LIMIT_FLAGS[name], value, f"must be at least {least} and finite", f"use {least}")
