"""What is measured before anyone asks: a coarse grid over the sizes of operators and links; the rest is interpolated."""

from __future__ import annotations

from collections.abc import Iterator

from moe_overlap.tuner.profile.database import LinkKey
from moe_overlap.tuner.profile.keys import OperatorKey, Pass, distinct, work_of
from moe_overlap.tuner.profile.vocabulary import BOUND_BY_BYTES, can_be_measured

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DIRECTIONS: tuple[Pass, ...] = ("forward", "backward", "weight_gradient")
ROW = 128
REDUCTIONS = ("sum", "mean", "max")
OF_TWO = ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_", "copy_", "silu_backward")
MOST_WORK = {"cpu": 2e9, "cuda": 2e13}
"""Multiplications and additions of the largest product measured."""


def operator_grid(dtype: str, device: str, quick: bool) -> list[OperatorKey]:
    """Keys to measure, sorted."""
    made = [*_products(dtype, quick, device), *_attention(dtype, quick, device), *_bound_by_bytes(dtype, quick, device)]
    return distinct(key for key in made if can_be_measured(key))


def link_grid(tier: str, ranks: int, kinds: tuple[str, ...], device: str, quick: bool) -> list[LinkKey]:
    """Collectives of a group, by size; each a multiple of 4 bytes per rank."""
    largest = (20 if quick else 24) if device == "cpu" else (26 if quick else 30)
    sizes = [1 << power for power in range(12, largest + 1, 2)]
    return [LinkKey(kind, tier, ranks, size // (4 * ranks) * 4 * ranks) for kind in kinds for size in sizes]


def _products(dtype: str, quick: bool, device: str) -> Iterator[OperatorKey]:
    small = ((128, 1024), (64, 256)) if quick else ((64, 256, 1024, 4096), (8, 64, 256, 1024))
    large = ((512, 8192), (512, 4096)) if quick else ((128, 1024, 8192, 32768), (256, 1024, 4096, 16384))
    rows, widths = small if device == "cpu" else large
    for direction in DIRECTIONS:
        for m in rows:
            for n in widths:
                for k in widths:
                    # A weight's gradient sums over the rows.
                    shape = (n, k, m) if direction == "weight_gradient" else (m, n, k)
                    key = OperatorKey("gemm", direction, dtype, shape)
                    if work_of(key) <= MOST_WORK[device]:
                        yield key
        for groups in (2, 8):
            for n, k in zip(widths[1:], widths[:-1], strict=True):
                yield OperatorKey("grouped_gemm", direction, dtype, (groups, rows[1], n, k))


def _attention(dtype: str, quick: bool, device: str) -> Iterator[OperatorKey]:
    lengths = (256,) if quick else (128, 512, 1024)
    for direction in DIRECTIONS[:2]:
        for length in lengths:
            size = length if device == "cpu" else 4 * length
            for width in (32, 128):
                yield OperatorKey("attention", direction, dtype, (1, 4, 4, size, size, width, width, 0))


def _bound_by_bytes(dtype: str, quick: bool, device: str) -> Iterator[OperatorKey]:
    powers = (12, 18) if quick else (10, 14, 18, 21)
    each = DTYPE_BYTES[dtype]
    for name in BOUND_BY_BYTES:
        for power in powers:
            elements = 1 << (power if device == "cpu" else power + 5)
            written = elements // ROW if name in REDUCTIONS else elements
            moved = (elements + written) * each
            if name in OF_TWO:
                moved += elements * each
            elif name not in REDUCTIONS:
                moved += 8 * elements // ROW
            for direction in DIRECTIONS[:1]:
                yield OperatorKey(name, direction, dtype, (written, moved))
