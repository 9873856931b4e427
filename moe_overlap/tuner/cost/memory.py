"""Bytes of one part of a model on one rank: what it keeps for its backward pass, and the most that is live inside a pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.capture.expression import evaluate
from moe_overlap.tuner.capture.graph import Part
from moe_overlap.tuner.capture.liveness import kept_bytes, peak_bytes
from moe_overlap.tuner.cost.features import Features
from moe_overlap.tuner.cost.operators import OpTable

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


def part_bytes(
    table: OpTable, b: int, s: int, parameter_bytes: float, features: Features, load: float = 1.0
) -> PartBytes:
    """Bytes of a part.

    Args:
        parameter_bytes: of one parameter, as captured.
        load: rows of the busiest rank over the mean: what the experts' operators make grows with them.
    """
    part = table.part
    numbers = {"dp": 0.0, "edp": 0.0}
    sizes: Floats = np.asarray(evaluate([storage.bytes for storage in part.storages], b, s), dtype=np.float64)
    for storage in part.storages:
        if storage.role == "parameter":
            numbers[storage.replicas or "dp"] += float(sizes[storage.id]) / parameter_bytes
    kept = float(kept_bytes(part, b, s))
    most = max(float(peak_bytes(part, "forward", b, s)), float(peak_bytes(part, "backward", b, s)))
    grown = _grows(part, sizes) * (load - 1.0)
    scores, kept_scores = _scores(table, features)
    return PartBytes(
        saved=kept + grown + kept_scores,
        working=max(0.0, most - kept) + scores,
        dense_parameters=numbers["dp"],
        expert_parameters=numbers["edp"],
    )


def _scores(table: OpTable, features: Features) -> tuple[float, float]:
    """Bytes of attention's scores without a fused kernel: while it works, and kept where they are not computed again."""
    if features.flash:
        return 0.0, 0.0
    scores = float(table.scores[~table.backward].sum())
    kept = scores * (5.0 if features.dropped_scores else 2.0)
    again = table.part.variant == "full" or "core_attn" in table.part.variant
    return (4.0 * scores + kept, 0.0) if again else (4.0 * scores, kept)


def _grows(part: Part, sizes: Floats) -> float:
    """Kept bytes that grow with the rows routed to a rank."""
    loaded = {index for op in part.ops if op.scales_with_load for index in op.writes}
    kept = [index for index in part.saved if index in loaded and part.storages[index].role == "activation"]
    return float(sizes[kept].sum())
