"""Differences of seconds and bytes as an answer and the files beside it write them."""

from __future__ import annotations

from moe_overlap.describe.cluster import GIB

VISIBLE_BYTES = GIB / 20
"""Smallest number of bytes that is shown, given one decimal of a GiB."""
FEW_SECONDS = 0.01
"""Smaller differences are shown in ms, with two decimals."""


def difference(seconds: float) -> str:
    """A signed difference of step seconds, in ms if it is small."""
    if abs(seconds) >= FEW_SECONDS:
        return f"{seconds:+.3f} s"
    # + 0.0 turns a rounded -0.0 into 0.
    return f"{round(1e3 * seconds, 2) + 0.0:+g} ms"
