"""A cluster description from a database: rates as measured, so that every efficiency is one or a ratio of two measurements."""

from __future__ import annotations

from math import log2
from typing import Any

from moe_overlap.tuner.profile.database import Database
from moe_overlap.tuner.profile.links import Fitted, fit_links

GIGA = 1e9
GATHERS = ("all_gather", "reduce_scatter", "all_reduce")
COPIES = ("to_device", "to_host")


def measured_cluster(database: Database, name: str, nodes: int, ranks_per_node: int) -> dict[str, Any]:
    """The content of a cluster file.

    With one node, `network_gb_per_s` is what transfers between its ranks reach: pipelines read it. A tier without two ranks
    takes the rate of copies.
    """
    rates, device = database.rates, database.device
    peak, copied = rates["product_flops"], rates["copy_bytes_per_second"]
    unlinked = Fitted(rates["kernel_seconds"], copied / 2, 0.0)
    gathers = fit_links(database.links, GATHERS, "node") or unlinked
    exchange = fit_links(database.links, ("all_to_all",), "node") or gathers
    passed = fit_links(database.links, ("point_to_point",), "node") or gathers
    outer = fit_links(database.links, GATHERS, "network") or passed
    outer_exchange = fit_links(database.links, ("all_to_all",), "network") or outer
    host = fit_links(database.links, COPIES, "host")
    if ranks_per_node > 1:
        latency = min(gathers.latency_seconds, exchange.latency_seconds)
    else:  # all that was measured between nodes; the cost model adds one latency for each doubling of them
        latency = min(outer.latency_seconds, outer_exchange.latency_seconds) / (1.0 + log2(nodes))
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
    }
    measured = {
        "database": database.path.name,
        "device": device.kind,
        "latency_seconds": latency,
        "constants": constants,
    }
    return {"name": name, "groups": [group], "measured": measured}
