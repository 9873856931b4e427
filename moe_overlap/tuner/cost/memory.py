"""Bytes of one part of a model on one rank: what it keeps for its backward pass, and the most that is live inside a pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.capture.expression import evaluate
from moe_overlap.tuner.capture.graph import Part
from moe_overlap.tuner.capture.liveness import kept_bytes, output_bytes, peak_bytes


Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartBytes:
    """Of one micro-batch; parameters are numbers, not bytes."""

    saved: float
    """Kept from the forward to the backward pass, the input of the part among it where it is kept."""
    working: float
    """Most that is live inside a pass beyond what is kept."""
    dense_parameters: float
    expert_parameters: float


def part_bytes(part: Part, b: int, s: int, parameter_bytes: float, load: float = 1.0) -> PartBytes:
    """Bytes of a part.

    Args:
        parameter_bytes: of one parameter, as captured.
        load: rows of the busiest rank over the mean: what the experts' operators make grows with them.
    """
    numbers = {"dp": 0.0, "edp": 0.0}
    sizes: Floats = np.asarray(evaluate([storage.bytes for storage in part.storages], b, s), dtype=np.float64)
    for storage in part.storages:
        if storage.role == "parameter":
            numbers[storage.replicas or "dp"] += float(sizes[storage.id]) / parameter_bytes
    saved = float(sizes[[index for index in part.saved if index not in part.outputs]].sum())
    kept = float(kept_bytes(part, b, s))
    gradient = 0.0 if part.kind == "head" else float(output_bytes(part, b, s))
    incoming = float(sizes[list(part.inputs)].sum())
    # As in capture/liveness.py, peak_of_sequence: a pass has its own peak, what it is handed, and what other parts keep.
    forward = float(peak_bytes(part, "forward", b, s)) + incoming - saved
    backward = float(peak_bytes(part, "backward", b, s)) + gradient - kept
    grown = _grows(part, sizes) * (load - 1.0)
    return PartBytes(
        saved=saved + grown,
        working=max(0.0, forward, backward),
        dense_parameters=numbers["dp"],
        expert_parameters=numbers["edp"],
    )


def _grows(part: Part, sizes: Floats) -> float:
    """Kept bytes that grow with the rows routed to a rank."""
    loaded = {index for op in part.ops if op.scales_with_load for index in op.writes}
    kept = [index for index in part.saved if index in loaded and part.storages[index].role == "activation"]
    return float(sizes[kept].sum())
