"""Measurements that ranks take of themselves and of their links for predictions: operators and all-to-alls as in training.

Operators are timed in the ranks themselves: on their processors, with their memory allocator, all ranks at once. All-to-alls go
through the run's own wire, so that receives stand before sends and an emulated link counts; other collectives through torch.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_overlap.runtime.dispatch.wire import AllToAll
from moe_overlap.tuner.profile.database import Database, Device, LinkKey, OperatorKey
from moe_overlap.tuner.profile.measure.links import collective_seconds, measure_rates
from moe_overlap.tuner.profile.measure.operators import measure_operators
from tools.bench.profile import ORDER_COUNTS, ORDER_LINKS, ORDER_OPERATORS, TRANSFERS

IN_A_ROW = 4
"""All-to-alls in a row, so that the burst that a limited link grants after a pause does not count."""
REPEATS = 5
FILLING_SECONDS = 0.01
"""Seconds after which an all-to-all fills the link's queue."""
PRODUCT = 256
"""Rows and columns of the products during an all-to-all."""


@dataclass(frozen=True, slots=True)
class RankWires:
    """The wires of a rank's messages.

    Attributes:
        rows, counts: join the ranks that share its experts.
        stages: joins the ranks of equal place in all stages.
    """

    rows: AllToAll
    counts: AllToAll
    stages: AllToAll


def answer(order: dict[str, Any], wires: RankWires) -> Any:
    """Execute the measurements of an order; all ranks get the same one."""
    if order["do"] == ORDER_OPERATORS:
        return measure_into(order["path"], order["device"], order["operators"], order["seconds_each"])
    if order["do"] == ORDER_LINKS:
        if order["kind"] == TRANSFERS:
            return transfer_seconds(order["held_bytes"], wires.stages), 0.0
        return link_seconds(order["kind"], order["held_bytes"], wires.rows)
    if order["do"] == ORDER_COUNTS:
        return count_seconds(order["held_bytes"], wires)
    return overlap_slowdown(order["held_bytes"], wires.rows)


def measure_into(path: str, device: dict[str, Any], operators: list[list[Any]], seconds_each: float) -> None:
    """Time this rank's share of the operators, and on the first rank the rates, into the database that stands there.

    Args:
        operators: kind, direction, format and shape of those it lacks.
    """
    database = Database.open(Path(path), Device(**device))
    keys = [OperatorKey(kind, direction, dtype, tuple(shape)) for kind, direction, dtype, shape in operators]
    rank = dist.get_rank()
    measure_operators(database, keys[rank :: dist.get_world_size()], seconds_each)
    if rank == 0:
        measure_rates(database, "float32", 10 * seconds_each)
    dist.barrier()


def link_seconds(kind: str, held_bytes: int, exchange: AllToAll) -> tuple[float, float]:
    """Seconds of one collective of all ranks, and of its start, which keeps the processor. All ranks call this together."""
    if kind != "all_to_all":
        key = LinkKey(kind, "network", exchange.size, held_bytes)
        return collective_seconds(key, dist.group.WORLD, "cpu", 0.0), 0.0
    rows, counts = torch.zeros(exchange.size, held_bytes // exchange.size, dtype=torch.uint8), [1] * exchange.size

    def once() -> tuple[float, float]:
        before = time.perf_counter()
        pending = exchange.start(rows, counts, counts, tag=exchange.take_tags(1), name="all-to-all")
        started = time.perf_counter()
        pending.wait()
        return time.perf_counter() - before, started - before

    dist.barrier()
    once()
    times = [once() for _ in range(IN_A_ROW * REPEATS)]
    return statistics.median(total for total, _ in times), statistics.median(start for _, start in times)


def transfer_seconds(held_bytes: int, stages: AllToAll) -> float:
    """Seconds between the arrivals of transfers that a stage sends to the next one; 0 on a rank that receives none."""
    sends, receives = [0] * stages.size, [0] * stages.size
    if stages.rank + 1 < stages.size:
        sends[stages.rank + 1] = 1
    if stages.rank > 0:
        receives[stages.rank - 1] = 1
    rows = torch.zeros(sum(sends), held_bytes, dtype=torch.uint8)
    dist.barrier()
    ends = []
    for _ in range(IN_A_ROW * REPEATS):
        stages.start(rows, sends, receives, tag=stages.take_tags(1), name="transfer").wait()
        ends.append(time.perf_counter())
    return statistics.median(b - a for a, b in itertools.pairwise(ends)) if sum(receives) else 0.0


def count_seconds(held_bytes: int, wires: RankWires) -> tuple[float, float]:
    """Seconds of an all-to-all of counts: on an idle link, and after rows of this many bytes that fill its queue."""
    numbers, ones = torch.zeros(wires.counts.size, 1, dtype=torch.int64), [1] * wires.counts.size
    rows = torch.zeros(wires.rows.size, held_bytes // wires.rows.size, dtype=torch.uint8)
    row_counts = [1] * wires.rows.size

    def count() -> float:
        before = time.perf_counter()
        wires.counts.start(numbers, ones, ones, tag=wires.counts.take_tags(1), name="counts").wait()
        return time.perf_counter() - before

    idle_link, queued = [], []
    for _ in range(REPEATS):
        dist.barrier()
        count()  # the ranks leave the barrier one after the other
        idle_link.append(count())
        pending = wires.rows.start(rows, row_counts, row_counts, tag=wires.rows.take_tags(1), name="all-to-all")
        time.sleep(FILLING_SECONDS)
        queued.append(count())
        pending.wait()
    return statistics.median(idle_link), statistics.median(queued)


def overlap_slowdown(held_bytes: int, exchange: AllToAll) -> float:
    """Share of the shorter of two that is lost when an all-to-all and products that take as long run together."""
    square = torch.rand(PRODUCT, PRODUCT)

    def products(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            torch.mm(square, square)
        return time.perf_counter() - start

    lost = []
    for _ in range(REPEATS):
        exchanged = _exchange_seconds(exchange, held_bytes, lambda: None)
        count = max(1, round(exchanged / products(100) * 100))
        multiplied = products(count)
        both = _exchange_seconds(exchange, held_bytes, lambda count=count: products(count))  # type: ignore[misc]
        lost.append((both - max(exchanged, multiplied)) / min(exchanged, multiplied))
    return min(1.0, max(0.0, statistics.median(lost)))


def _exchange_seconds(exchange: AllToAll, held_bytes: int, compute: Callable[[], object]) -> float:
    size = exchange.size
    rows = torch.zeros(size, held_bytes // size, dtype=torch.uint8)
    dist.barrier()
    start = time.perf_counter()
    pending = exchange.start(rows, [1] * size, [1] * size, tag=exchange.take_tags(1), name="all-to-all")
    compute()
    pending.wait()
    return time.perf_counter() - start
