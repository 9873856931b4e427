"""Bytes of one part of a model on one rank: what it keeps for its backward pass, and the most that is live inside a pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_overlap.tuner.capture.expression import evaluate
from moe_overlap.tuner.capture.graph import Part


@dataclass(frozen=True, kw_only=True, slots=True)
class PartBytes:
    """Of one micro-batch; parameters are numbers, not bytes."""

    saved: float
    """Kept from the forward to the backward pass; the input of the part is among it where it is kept."""
    working: float
    """Most that is live inside a pass beyond what is kept."""
    dense_parameters: float
    expert_parameters: float


def part_bytes(part: Part, b: int, s: int, parameter_bytes: float, load: float = 1.0) -> PartBytes:
    """Bytes of a part.

    Args:
        parameter_bytes: of one parameter, as captured.
        load: rows of the busiest rank over the mean: what grows with them is held in the experts' storages.
    """
    sizes = evaluate([storage.bytes for storage in part.storages], b, s)
    loaded = np.zeros(len(part.storages), dtype=np.bool_)
    for op in part.ops:
        if op.scales_with_load:
            loaded[list(op.writes)] = True
    sizes = sizes * np.where(loaded, load, 1.0)
    numbers = {"dp": 0.0, "edp": 0.0}
    for storage in part.storages:
        if storage.role == "parameter":
            numbers[storage.replicas or "dp"] += sizes[storage.id] / parameter_bytes
    saved = float(sizes[list(part.saved)].sum())
    return PartBytes(
        saved=saved,
        working=max(0.0, _most_live(part, sizes) - saved),
        dense_parameters=numbers["dp"],
        expert_parameters=numbers["edp"],
    )


def _most_live(part: Part, sizes: np.ndarray) -> float:
    """Largest sum of activations that are alive at an operator, what is saved included."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for op in part.ops:
        for storage in (*op.reads, *op.writes):
            last[storage] = op.id
        for storage in op.writes:
            first.setdefault(storage, op.id)
    change = np.zeros(len(part.ops) + 1)
    for storage in part.storages:
        if storage.role in ("activation", "input") and storage.id in last:
            end = last[storage.id] if storage.freed_after is None else storage.freed_after
            change[first.get(storage.id, 0)] += sizes[storage.id]
            change[end + 1] -= sizes[storage.id]
    return float(np.cumsum(change).max())
