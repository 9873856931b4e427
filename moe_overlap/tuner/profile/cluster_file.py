"""A cluster description from a database: measured rates, so that every efficiency is one or a ratio of two measurements.

1. `this_device` names the device of this machine as measurements do. No torch: a GPU's driver tool gives its name.
2. `fit_links` fits latency and bandwidth of a tier to its measured collectives: seconds = latency + moved bytes / bandwidth. Of
   a tensor of H bytes over n ranks, H (n - 1) / n bytes move, in an all-reduce twice as many. The fit minimises relative errors
   and gives less weight to outliers, so that a disturbed measurement does not bend it. Kinds of collectives that share a
   bandwidth have a latency each (`fit_latency`): an all-reduce passes its ranks more often than a transfer.
3. `measured_cluster` writes both as the content of a cluster file.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

import numpy as np

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import whole_number
from moe_overlap.describe.host import usable_cores
from moe_overlap.tuner.profile.database import Database, Device, LinkKey

KINDS = ("cpu", "cuda")


def this_device(kind: str | None = None) -> Device:
    """The device on which ranks of this machine compute.

    Args:
        kind: cpu or cuda; default cuda where there is a GPU.
    Raises:
        ConfigError: no such device here.
    """
    if kind not in (None, *KINDS):
        raise ConfigError("--device", kind, "is no kind of device", f"use {' or '.join(KINDS)}")
    version = importlib.metadata.version("torch")
    gpu = _gpu_name() if kind != "cpu" else None
    if kind == "cuda" and gpu is None:
        raise ConfigError("--device", "cuda", "this machine has no GPU that nvidia-smi lists", "use --device cpu")
    if gpu is not None:
        return Device("cuda", gpu, 1, version)
    thread_count = os.environ.get("OMP_NUM_THREADS") or str(usable_cores())
    threads = whole_number(thread_count)
    if not threads:
        raise ConfigError(
            "OMP_NUM_THREADS", thread_count, "must be a whole number from 1", "set it to the cores of one rank"
        )
    return Device("cpu", _cpu_name(), threads, version)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu_name() -> str | None:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    names = done.stdout.strip().splitlines()
    return names[0].strip() if done.returncode == 0 and names else None


LEAST_LATENCY_SECONDS = 1e-7
LEAST_PACED_SHARE = 0.02
"""Smallest share of the seconds that counts as growing with the size if none does: no link is infinitely fast."""


@dataclass(frozen=True, slots=True)
class FittedLinks:
    """A line through measurements.

    Attributes:
        error: median relative error on them.
    """

    latency_seconds: float
    bytes_per_second: float
    error: float


def moved_bytes(key: LinkKey) -> float:
    """Bytes that cross a rank's links."""
    if key.kind in ("point_to_point", "to_device", "to_host"):
        return float(key.held_bytes)
    return key.held_bytes * (key.ranks - 1) / key.ranks * (2.0 if key.kind == "all_reduce" else 1.0)


def fit_links(links: Mapping[LinkKey, float], kinds: Iterable[str], tier: str) -> FittedLinks | None:
    """One line through the measured collectives of a tier; None if they have fewer than two sizes."""
    chosen = [(moved_bytes(key), seconds) for key, seconds in links.items() if key.kind in kinds and key.tier == tier]
    if len({moved for moved, _ in chosen}) < 2:
        return None
    return fit_line([moved for moved, _ in chosen], [seconds for _, seconds in chosen])


def fit_line(moved: Sequence[float], seconds: Sequence[float]) -> FittedLinks:
    """The line through two of the measurements with the least sum of |log(line / measured)| over all of them.

    Not least squares of relative errors: a line that is too low errs by at most 100 %, one that is too high without limit. Links
    with burst credits (token buckets, as in clouds) pass small messages at once, and such a fit followed those: 1 ms for an
    all-to-all of 30 ms.
    """
    x, y = np.asarray(moved, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    first, second = np.triu_indices(len(x), 1)
    differ = x[first] != x[second]
    first, second = first[differ], second[differ]
    paces = (y[second] - y[first]) / (x[second] - x[first])
    latencies = y[first] - paces * x[first]
    through = (paces > 0) & (latencies >= LEAST_LATENCY_SECONDS)
    # Further candidates: the smallest latency; and, for seconds that do not grow with the size, only a latency.
    flat, per_byte = float(np.median(y)), y / np.maximum(x, 1.0)
    latencies = np.concatenate([latencies[through], np.full(len(y), LEAST_LATENCY_SECONDS), [flat]])
    hardly = float(np.median(np.maximum(y - flat, LEAST_PACED_SHARE * y) / np.maximum(x, 1.0)))
    paces = np.concatenate([paces[through], per_byte, [hardly]])
    lines = latencies[:, None] + paces[:, None] * x
    best = int(np.argmin(np.abs(np.log(lines / y)).sum(axis=1)))
    return FittedLinks(
        float(latencies[best]), 1.0 / float(paces[best]), float(np.median(np.abs(lines[best] / y - 1.0)))
    )


def fit_latency(links: Mapping[LinkKey, float], kind: str, tier: str, bytes_per_second: float) -> float | None:
    """The latency of a kind at a given bandwidth, with the least sum of |log(line / measured)|; None if it was not measured."""
    chosen = [(moved_bytes(key), seconds) for key, seconds in links.items() if key.kind == kind and key.tier == tier]
    if not chosen:
        return None
    x, y = np.asarray(chosen, dtype=np.float64).T
    paced = x / bytes_per_second
    latencies = np.maximum(LEAST_LATENCY_SECONDS, y - paced)
    return float(latencies[int(np.argmin(np.abs(np.log((latencies[:, None] + paced) / y)).sum(axis=1)))])


GIGA = 1e9
GATHERS, SCATTERS = ("all_gather", "all_reduce"), ("reduce_scatter",)
COPIES = ("to_device", "to_host")


def measured_cluster(database: Database, name: str, nodes: int, ranks_per_node: int) -> dict[str, Any]:
    """The content of a cluster file.

    With one node, `network_gb_per_s` is the rate of transfers between its ranks, which pipelines read. A tier without two ranks
    gets the rate of copies.
    """
    rates, device = database.rates, database.device
    peak, copied = rates["product_flops"], rates["copy_bytes_per_second"]
    unlinked = FittedLinks(rates["kernel_seconds"], copied / 2, 0.0)
    gathers = fit_links(database.links, GATHERS, "node") or unlinked
    exchange = fit_links(database.links, ("all_to_all",), "node") or gathers
    passed = fit_links(database.links, ("point_to_point",), "node") or gathers
    outer = fit_links(database.links, GATHERS, "network") or passed
    tier, gathered = ("node", gathers) if ranks_per_node > 1 else ("network", outer)
    scattered = fit_links(database.links, SCATTERS, tier) or gathered
    outer_exchange = fit_links(database.links, ("all_to_all",), "network") or outer
    host = fit_links(database.links, COPIES, "host")
    # Between nodes the cost model adds one latency of a collective for each doubling of them.
    doublings = 1.0 if ranks_per_node > 1 else 1.0 + log2(nodes)
    exchanged = exchange if ranks_per_node > 1 else outer_exchange
    paces = dict.fromkeys((*GATHERS, "point_to_point"), gathered.bytes_per_second)
    paces |= {"reduce_scatter": scattered.bytes_per_second, "all_to_all": exchanged.bytes_per_second}
    latencies = {}
    for kind, pace in paces.items():
        latency = fit_latency(database.links, kind, tier, pace)
        if latency is not None:
            latencies[kind] = latency if kind == "point_to_point" else latency / doublings
    shares_domain = device.kind == "cuda" and ranks_per_node > 1
    gpu = {
        "name": device.name,
        "architecture": device.kind,
        "bf16_tflops": peak / 1e12,
        "fp8_tflops": None,
        "fp4_tflops": None,
        "memory_gib": rates["memory_bytes"] / (1 << 30) / (ranks_per_node if device.kind == "cpu" else 1),
        "memory_gb_per_s": copied / GIGA,
    }
    group = {
        "gpu": gpu,
        "nodes": nodes,
        "gpus_per_node": ranks_per_node,
        "domain_gpus": ranks_per_node if shares_domain else 1,
        "domain_gb_per_s": gathers.bytes_per_second / GIGA if shares_domain else None,
        "node_gb_per_s": gathers.bytes_per_second / GIGA,
        "network_gb_per_s": outer.bytes_per_second / GIGA,
        "host_gb_per_s": (host.bytes_per_second if host else copied / 2) / GIGA,
    }
    constants = {
        "gemm": 1.0,
        "grouped_gemm": rates["grouped_product_flops"] / peak,
        "attention_forward": rates["attention_forward_flops"] / peak,
        "attention_backward": rates["attention_backward_flops"] / peak,
        "fp8": 1.0,
        "fp4": 1.0,
        "memory": 1.0,
        "domain": 1.0,
        "network": 1.0,
        "all_to_all_domain": exchange.bytes_per_second / gathers.bytes_per_second,
        "all_to_all_network": outer_exchange.bytes_per_second / outer.bytes_per_second,
        "kernel_seconds": rates["kernel_seconds"],
        "host_seconds": 0.0,
        "overlap_slowdown": rates.get("overlap_slowdown", 1.0),
        "step_seconds": 0.0,
        "reduce_scatter": gathered.bytes_per_second / scattered.bytes_per_second,
    }
    measured = {
        "database": database.path.name,
        "device": device.kind,
        "latency_seconds": min(gathered.latency_seconds, exchanged.latency_seconds) / doublings,
        "latencies": latencies,
        "constants": constants,
    }
    return {"name": name, "groups": [group], "measured": measured}
