"""Bytes of captured parts, told simply: what `memory.part_bytes` and sums over stages are held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_overlap.tuner.capture.expression import Values, evaluate
from moe_overlap.tuner.capture.graph import CapturedPart, Phase
from moe_overlap.tuner.cost.memory import alive_bytes, lifetimes


def live_bytes(part: CapturedPart, phase: Phase, b: Any, s: Any) -> Values:
    """Bytes alive at each operator of a pass, for any samples and tokens."""
    return alive_bytes(part, phase, lifetimes(part), evaluate([storage.bytes for storage in part.storages], b, s))


def peak_bytes(part: CapturedPart, phase: Phase, b: Any, s: Any) -> Values:
    """Peak of the bytes alive in a pass."""
    peak: Values = live_bytes(part, phase, b, s).max(axis=0)
    return peak


def kept_bytes(part: CapturedPart, b: Any, s: Any) -> Values:
    """Bytes that one micro-batch keeps between the passes, its input hidden states included where they are kept."""
    total: Values = evaluate([part.storages[index].bytes for index in part.saved], b, s).sum(axis=0)
    return total


def peak_of_sequence(parts: Sequence[CapturedPart], b: int, s: int) -> float:
    """Peak bytes of parts run one after another, all forward, then all backward, with one micro-batch in flight.

    Beside the bytes alive in a part it counts those that the other parts keep at that time.
    """
    kept, peak = 0.0, 0.0
    for part in parts:
        peak = max(peak, kept + float(peak_bytes(part, "forward", b, s)))
        kept += float(kept_bytes(part, b, s))
    for part in reversed(parts):
        kept -= float(kept_bytes(part, b, s))
        peak = max(peak, kept + float(peak_bytes(part, "backward", b, s)))
    return peak
