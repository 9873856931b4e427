"""Seconds of collectives, transfers and host copies, between the ranks that run this; and single figures of a device.

The single figures are inputs of the roofline: the rate of large operators on the device, and the seconds of the smallest
operator.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from moe_overlap.tuner.profile.database import Database, LinkKey, OperatorKey, Pass, work_of
from moe_overlap.tuner.profile.measure.operators import Call, call_of, call_seconds

BACKWARD_PRODUCTS = 2.5
"""Products of attention's backward pass over those of its forward pass."""


def measure_rates(database: Database, dtype: str, seconds_each: float) -> None:
    """Measure the figures that a database lacks.

    `product_flops` and the like: multiplications and additions per second; attention counts half its square, as the capture
    does. `copy_bytes_per_second`: bytes read and written. `kernel_seconds`: the smallest operator's. `memory_bytes`: the
    device's.
    """
    device = database.device.kind
    if "memory_bytes" not in database.rates:
        database.add_rate("memory_bytes", _memory_bytes(device))
    for name, key, work in _figures(dtype, device):
        if name not in database.rates:
            seconds = call_seconds(call_of(key, device), device, seconds_each)
            database.add_rate(name, work / seconds if work else seconds)


def _figures(dtype: str, device: str) -> Iterator[tuple[str, OperatorKey, float]]:
    """Name, operator and its work; 0 if its seconds are the figure."""
    size, copied = (512, 1 << 24) if device == "cpu" else (8192, 1 << 30)
    product = OperatorKey("gemm", "forward", dtype, (size, size, size))
    yield "product_flops", product, work_of(product)
    grouped = OperatorKey("grouped_gemm", "forward", dtype, (4, size, size, size))
    yield "grouped_product_flops", grouped, work_of(grouped)
    passes: tuple[tuple[Pass, float], ...] = (("forward", 1.0), ("backward", BACKWARD_PRODUCTS))
    for direction, products in passes:
        key = OperatorKey("attention", direction, dtype, (2, 8, 8, size, size, 64, 64, 0))
        yield f"attention_{direction}_flops", key, work_of(key) / 2 * products
    element_bytes = getattr(torch, dtype).itemsize
    yield (
        "copy_bytes_per_second",
        OperatorKey("clone", "forward", dtype, (copied // element_bytes, 2 * copied)),
        2.0 * copied,
    )
    yield "kernel_seconds", OperatorKey("mul", "forward", dtype, (16, 3 * 16 * element_bytes)), 0.0


def _memory_bytes(device: str) -> float:
    if device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point")
COPIES = ("to_device", "to_host")
BATCHES = 8


def collective_seconds(key: LinkKey, group: dist.ProcessGroup, device: str, budget_seconds: float) -> float:
    """Seconds of one collective: the least of several batches of calls in a row, of the slowest rank.

    All ranks of the group call this together, with the same key.
    """
    call = _collective(key, group, device)
    call()
    call()
    repeats = max(1, int(budget_seconds / BATCHES / max(1e-6, _agreed(_timed(call, 2, device), group, device))))
    times = []
    for _ in range(BATCHES):
        times.append(_timed(call, repeats, device))
    return _agreed(min(times), group, device)


def copy_seconds(key: LinkKey, budget_seconds: float) -> float:
    """Seconds of a copy between a GPU and pinned memory of its host. Not run on hardware."""
    host = torch.empty(key.held_bytes, dtype=torch.int8, pin_memory=True)
    device = torch.empty(key.held_bytes, dtype=torch.int8, device="cuda")
    source, target = (host, device) if key.kind == "to_device" else (device, host)
    return call_seconds(lambda: target.copy_(source, non_blocking=True), "cuda", budget_seconds)


def slowdown_of_both(group: dist.ProcessGroup, device: str, held_bytes: int, product: int) -> float:
    """Share of the shorter one that is lost when an all-to-all and products run at the same time: 0 to 1.

    Args:
        held_bytes: largest size of the all-to-all.
        product: rows and columns of the square products; their number is chosen so that they take about as long as the
            all-to-all.
    """
    # Every rank gets an equal part.
    sent = torch.ones(held_bytes - held_bytes % group.size(), dtype=torch.int8, device=device)
    received = torch.empty_like(sent)
    square = torch.rand(product, product, device=device)

    def all_to_all() -> None:
        dist.all_to_all_single(received, sent, group=group)

    def multiply() -> None:
        torch.mm(square, square)

    shares = []
    all_to_all_seconds = _agreed(_timed(all_to_all, 4, device), group, device)
    count = max(1, round(all_to_all_seconds / max(1e-6, _agreed(_timed(multiply, 4, device), group, device))))

    def products() -> None:
        for _ in range(count):
            multiply()

    def both() -> None:
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        products()
        work.wait()

    for _ in range(BATCHES):
        exchanged, multiplied, together = (
            _agreed(_timed(call, 4, device), group, device) for call in (all_to_all, products, both)
        )
        shares.append((together - max(exchanged, multiplied)) / min(exchanged, multiplied))
    return min(1.0, max(0.0, median(shares)))


def _collective(key: LinkKey, group: dist.ProcessGroup, device: str) -> Call:
    ranks = dist.get_process_group_ranks(group)
    tensor = torch.ones(key.held_bytes // 4, dtype=torch.float32, device=device)
    part = torch.ones(key.held_bytes // 4 // len(ranks), dtype=torch.float32, device=device)
    other = torch.empty_like(tensor)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(tensor, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(tensor, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, tensor, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, tensor, group=group),
        "point_to_point": lambda: _pass_on(tensor, other, ranks, group),
    }
    return calls[key.kind]


def _pass_on(sent: Tensor, received: Tensor, ranks: list[int], group: dist.ProcessGroup) -> None:
    """Send to the next rank and receive from the previous one at once, as pipeline stages do."""
    rank = ranks.index(dist.get_rank())
    after, before = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]
    operations = [
        dist.P2POp(dist.isend, sent, after, group=group),
        dist.P2POp(dist.irecv, received, before, group=group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _timed(call: Call, repeats: int, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(repeats):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (perf_counter() - start) / repeats


def _agreed(seconds: float, group: dist.ProcessGroup, device: str) -> float:
    """The largest value of all ranks."""
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return float(value.item())
