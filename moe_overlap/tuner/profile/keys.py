"""Under what a measured operator is kept: its kind, its pass, its format, its sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from moe_overlap.tuner.capture.graph import Op

Pass = Literal["forward", "backward", "weight_gradient"]
"""Products of the three have differently transposed operands."""
Origin = Literal["measured", "interpolated"]
"""Where seconds come from: this very size, or sizes around it."""
PRODUCTS = ("gemm", "grouped_gemm", "attention")
"""Kinds whose seconds follow their shape. Every other kind is torch's operator (`mul`) and follows the bytes it moves."""


@dataclass(frozen=True, slots=True, order=True)
class OperatorKey:
    """One operator at one size, as a rank runs it: a partitioned shape is another key.

    Attributes:
        kind: one of PRODUCTS, or the name of torch's operator.
        dtype: of its result, as torch says it (`float32`).
        shape: gemm (m, n, k); grouped_gemm (groups, total rows, n, k); attention (batch, heads, key/value heads, query
            length, key length, query/key width, value width, window or 0); else (elements written, bytes read and written).
    """

    kind: str
    direction: Pass
    dtype: str
    shape: tuple[int, ...]


def key_of(op: Op, shape: tuple[float, ...], moved_bytes: float) -> OperatorKey | None:
    """The key of a captured operator at numeric sizes; None for collectives, views and empty work."""
    if op.cost_class in ("collective", "free"):
        return None
    direction: Pass = "weight_gradient" if op.is_weight_gradient else op.phase
    if op.cost_class in PRODUCTS:
        sizes = tuple(round(size) for size in shape)
        needed = sizes[:-1] if op.cost_class == "attention" else sizes
        return OperatorKey(op.cost_class, direction, op.dtype, sizes) if all(size > 0 for size in needed) else None
    written = round(shape[0]) if shape else 0
    if moved_bytes <= 0:
        return None
    return OperatorKey(op.name, direction, op.dtype, (written, round(moved_bytes)))


def distinct(keys: Iterable[OperatorKey | None]) -> list[OperatorKey]:
    """Each key once, sorted."""
    return sorted({key for key in keys if key is not None})


def work_of(key: OperatorKey) -> float:
    """What a kind's seconds grow with: multiplications and additions of products, bytes of everything else."""
    if key.kind == "gemm":
        m, n, k = key.shape
        return 2.0 * m * n * k
    if key.kind == "grouped_gemm":
        _, rows, n, k = key.shape
        return 2.0 * rows * n * k
    if key.kind == "attention":
        batch, heads, _, queries, keys, qk, v, window = key.shape
        return 2.0 * batch * heads * queries * (min(keys, window) if window else keys) * (qk + v)
    return float(key.shape[1])
