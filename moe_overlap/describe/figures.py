"""Differences of seconds and bytes as an answer and the files beside it write them."""

from __future__ import annotations

from moe_overlap.describe.cluster import GIB

VISIBLE_BYTES = GIB / 20
"""Less is none, where a tenth of a GiB is shown."""
FEW_SECONDS = 0.01
"""Below them differences are shown in ms, to a hundredth."""


def difference(seconds: float) -> str:
    """More or less seconds of a step, in ms where they are few."""
    if abs(seconds) >= FEW_SECONDS:
        return f"{seconds:+.3f} s"
    # Rounding leaves differences that are none.
    return f"{round(1e3 * seconds, 2) + 0.0:+g} ms"
