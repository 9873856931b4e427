"""Single figures of a device: what large operators reach of it, and what the least one takes. They feed the roofline."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from moe_overlap.tuner.profile.database import Database
from moe_overlap.tuner.profile.keys import OperatorKey, Pass, work_of
from moe_overlap.tuner.profile.measure.operators import call_of
from moe_overlap.tuner.profile.measure.timing import call_seconds

BACKWARD_PRODUCTS = 2.5
"""Products of attention's backward pass over those of its forward pass."""


def measure_rates(database: Database, dtype: str, seconds_each: float) -> None:
    """Measure the figures that a database lacks.

    `product_flops` and the like: multiplications and additions per second; attention counts half its square, as the capture
    does. `copy_bytes_per_second`: read and written. `kernel_seconds`: of the least operator. `memory_bytes`: of the device.
    """
    device = database.device.kind
    if "memory_bytes" not in database.rates:
        database.add_rate("memory_bytes", _memory_bytes(device))
    for name, key, work in _figures(dtype, device):
        if name not in database.rates:
            seconds = call_seconds(call_of(key, device), device, seconds_each)
            database.add_rate(name, work / seconds if work else seconds)


def _figures(dtype: str, device: str) -> Iterator[tuple[str, OperatorKey, float]]:
    """Name, operator and its work; 0 where its seconds are the figure."""
    size, copied = (512, 1 << 24) if device == "cpu" else (8192, 1 << 30)
    product = OperatorKey("gemm", "forward", dtype, (size, size, size))
    yield "product_flops", product, work_of(product)
    grouped = OperatorKey("grouped_gemm", "forward", dtype, (4, size, size, size))
    yield "grouped_product_flops", grouped, work_of(grouped)
    passes: tuple[tuple[Pass, float], ...] = (("forward", 1.0), ("backward", BACKWARD_PRODUCTS))
    for direction, products in passes:
        key = OperatorKey("attention", direction, dtype, (2, 8, 8, size, size, 64, 64, 0))
        yield f"attention_{direction}_flops", key, work_of(key) / 2 * products
    each = getattr(torch, dtype).itemsize
    yield (
        "copy_bytes_per_second",
        OperatorKey("clone", "forward", dtype, (copied // each, 2 * copied)),
        2.0 * copied,
    )
    yield "kernel_seconds", OperatorKey("mul", "forward", dtype, (16, 3 * 16 * each)), 0.0


def _memory_bytes(device: str) -> float:
    if device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
