"""A cluster as numbers: GPU types, their memory, and the links that join them, by tier. Standard library only.

Tiers, from the nearest: `domain` (NVLink or the like; may span nodes), `node` (PCIe between the GPUs of a node that share no
domain), `network` (between nodes), `host` (a GPU and its host's memory). Rates are per GPU and direction, as peak rates.

A cluster file (examples/clusters/*.json) has the fields that stand here; a GPU is a name of gpus.json or an object of its own.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_json

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A type of GPU. Peak rates of dense matrix products; None where it has no such units."""

    name: str
    architecture: str
    """Generation of the chip (`Hopper`): types of one generation reach similar shares of their peak rates."""
    bf16_tflops: float
    """Peak rate of bf16 and of fp16."""
    fp8_tflops: float | None
    fp4_tflops: float | None
    memory_gib: float
    memory_gb_per_s: float
    multiprocessors: int | None = None
    """Streaming multiprocessors; each executes one thread block of a fused kernel. None where it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroup:
    """Nodes of one kind."""

    gpu: Gpu
    nodes: int
    gpus_per_node: int
    domain_gpus: int
    """GPUs of one NVLink domain; 1 where there is none. May exceed the GPUs of a node."""
    domain_gb_per_s: float | None
    node_gb_per_s: float
    network_gb_per_s: float
    host_gb_per_s: float

    @property
    def gpus(self) -> int:
        """All GPUs of the group."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurements that tools/profile_cluster.py adds to a description; rates and constants are then this very machine's."""

    database: str
    """File of measured operators; a path in a cluster file is relative to that file."""
    device: str
    """cpu or cuda."""
    latency_seconds: float
    """Latency of one collective inside a node."""
    constants: Mapping[str, float]
    """Constants of the time model, by their names in tuner/cost/hardware.py."""
    latencies: Mapping[str, float] = field(default_factory=dict)
    """Kind of a collective -> its latency, where it was measured; all others have `latency_seconds`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Groups of nodes; ranks go through them in order, node by node."""

    name: str
    groups: tuple[NodeGroup, ...]
    measured: Measured | None = None

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return sum(group.gpus for group in self.groups)

    @property
    def queues(self) -> bool:
        """Whether its devices queue what the host gives them, as GPUs do; a CPU that was measured computes at once."""
        return self.measured is None or self.measured.device != "cpu"

    @property
    def domain_gpus(self) -> int:
        """GPUs of the smallest NVLink domain, whose all-to-alls stay off the network; 1 on CPUs, whose ranks share all links."""
        return min(group.domain_gpus for group in self.groups) if self.queues else 1

    def group_of(self, rank: int) -> NodeGroup:
        """The group of nodes that holds a rank."""
        first = 0
        for group in self.groups:
            if rank < first + group.gpus:
                return group
            first += group.gpus
        raise ValueError(f"{self.name} has no GPU {rank}")


def start_flags(ranks: int, per_node: int) -> str:
    """The flags by which pretrain_moe.py starts so many ranks, with a space behind them; none for a single one.

    Where several nodes meet is known to whoever starts them.
    """
    if per_node < ranks:
        return f"--nproc-per-node {per_node} --nnodes {-(-ranks // per_node)} --rdzv-endpoint HOST:PORT "
    return f"--nproc-per-node {ranks} " if ranks > 1 else ""


def known_gpus() -> dict[str, dict[str, Any]]:
    """Rows of gpus.json by name and by alias."""
    text = resources.files(__package__).joinpath("gpus.json").read_text(encoding="utf-8")
    rows = json.loads(text)
    return {alias: {"name": name, **row} for name, row in rows.items() for alias in (name, *row["aliases"])}


def shipped_cluster(gpu: str, num_gpus: int, subject: str = "--gpu") -> Cluster:
    """A cluster of one GPU type in its usual nodes, as `--gpu H100 --num-gpus 64` asks for.

    Raises:
        ConfigError: an unknown GPU (the known ones are listed), or a number that does not fill its nodes.
    """
    row = known_gpu(gpu, subject)
    per_node = row["gpus_per_node"]
    if num_gpus < 1 or (num_gpus > per_node and num_gpus % per_node):
        fix = f"use up to {per_node}, or a multiple of {per_node}"
        raise ConfigError("--num-gpus", num_gpus, f"nodes of {row['name']} have {per_node} GPUs", fix)
    nodes = max(1, num_gpus // per_node)
    return cluster_of(
        {"name": f"{row['alias']}-{num_gpus}", "groups": [node_group(row, nodes, num_gpus // nodes)]}, subject
    )


def node_group(row: Mapping[str, Any], nodes: int, gpus_per_node: int) -> dict[str, Any]:
    """A group of nodes as a cluster file has it, from a row of gpus.json."""
    links = ("domain_gpus", "domain_gb_per_s", "node_gb_per_s", "network_gb_per_s", "host_gb_per_s")
    return {
        "gpu": row["name"],
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        **{field: row[field] for field in links},
    }


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file.

    Raises:
        ConfigError: the file cannot be read, or a field is unknown, missing or of the wrong kind; it names the field.
    """
    try:
        content = bounded_json(path, finite=False)
    except Unreadable as error:
        raise ConfigError("--cluster", path, str(error), error.fix) from None
    cluster = cluster_of(content, str(path))
    if cluster.measured is None:
        return cluster
    database = str(Path(path).parent / cluster.measured.database)
    return dataclasses.replace(cluster, measured=dataclasses.replace(cluster.measured, database=database))


def cluster_of(content: Any, subject: str) -> Cluster:
    """A cluster from the content of a file.

    Args:
        subject: the file or flag, for errors.
    """
    fields: dict[str, Any] = {"name": str, "groups": list}
    if isinstance(content, dict) and "measured" in content:
        fields["measured"] = dict
    _require_fields(content, fields, subject)
    if not content["groups"]:
        raise ConfigError(f"{subject} groups", "[]", "a cluster has nodes", "add a group of nodes")
    groups = tuple(_group(row, f"{subject} groups[{index}]") for index, row in enumerate(content["groups"]))
    measured = _measured(content["measured"], f"{subject} measured") if "measured" in content else None
    return Cluster(name=content["name"], groups=groups, measured=measured)


_MEASURED_FIELDS = {"database": str, "device": str, "latency_seconds": (int, float), "constants": dict}


_MEASURED_KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "point_to_point")
"""Collectives that tools/profile_cluster.py measures."""


def _measured(row: Any, subject: str) -> Measured:
    # Files of releases that fitted one latency for all kinds lack the field.
    known = {"latencies": dict} if isinstance(row, dict) and "latencies" in row else {}
    _require_fields(row, _MEASURED_FIELDS | known, subject)
    for kind in row.get("latencies", {}):
        if kind not in _MEASURED_KINDS:
            rule = f"the kinds are {', '.join(_MEASURED_KINDS)}"
            raise ConfigError(f"{subject}.latencies.{kind}", "", "unknown kind of collective", rule)
    for field_name in ("constants", "latencies"):
        for name, value in row.get(field_name, {}).items():
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
                rule = "must be a number from 0"
                raise ConfigError(f"{subject}.{field_name}.{name}", json.dumps(value)[:40], rule, "correct the value")
    return Measured(**row)


_GROUP_FIELDS = {
    "gpu": (str, dict),
    "nodes": int,
    "gpus_per_node": int,
    "domain_gpus": int,
    "domain_gb_per_s": (int, float, type(None)),
    "node_gb_per_s": (int, float),
    "network_gb_per_s": (int, float),
    "host_gb_per_s": (int, float),
}
_GPU_FIELDS = {
    "name": str,
    "architecture": str,
    "bf16_tflops": (int, float),
    "fp8_tflops": (int, float, type(None)),
    "fp4_tflops": (int, float, type(None)),
    "memory_gib": (int, float),
    "memory_gb_per_s": (int, float),
}


_RANGES = {"tflops": (1e-6, 100_000, "TFLOP/s"), "gib": (1e-6, 50_000, "GiB"), "gb_per_s": (1e-6, 100_000, "GB/s")}
"""Unit at the end of a field's name -> the least and the most that is read, and how the unit is written.

Far from what any device has, so that a rate in FLOP/s or in bytes/s, which every prediction would believe, is refused, and one
with which seconds are beyond all numbers.
"""


def _require_units(row: Mapping[str, Any], subject: str) -> None:
    """Refuse values that no device of today comes near: they are in another unit."""
    for name, value in row.items():
        for ending, (least, most, unit) in _RANGES.items():
            if name.endswith(f"_{ending}") and value is not None and (0 < value < least or value > most):
                is_more = value > most
                rule = f"is {'more' if is_more else 'less'} than {most if is_more else least:,} {unit}, which no device has"
                raise ConfigError(f"{subject}.{name}", f"{value:g}", rule, f"write it in {unit}")


def _group(row: Any, subject: str) -> NodeGroup:
    _require_fields(row, _GROUP_FIELDS, subject)
    _require_units(row, subject)
    if isinstance(row["gpu"], dict):
        known_blocks: dict[str, Any] = {"multiprocessors": int} if "multiprocessors" in row["gpu"] else {}
        _require_fields(row["gpu"], _GPU_FIELDS | known_blocks, f"{subject}.gpu")
        _require_units(row["gpu"], f"{subject}.gpu")
        gpu = Gpu(**row["gpu"])
    else:
        known = known_gpu(row["gpu"], f"{subject}.gpu")
        gpu = Gpu(**{field.name: known[field.name] for field in dataclasses.fields(Gpu)})
    if row["domain_gpus"] > 1 and row["domain_gb_per_s"] is None:
        rule = f"{row['domain_gpus']} GPUs share a domain"
        raise ConfigError(f"{subject}.domain_gb_per_s", "null", rule, "give the domain's rate")
    domain, node = row["domain_gpus"], row["gpus_per_node"]
    # A part of one node has the links of the whole.
    if node % domain if domain < node else row["nodes"] > 1 and domain % node:
        rule = f"domains of {domain} neither divide nodes of {node} GPUs nor consist of whole ones"
        raise ConfigError(f"{subject}.domain_gpus", domain, rule, "correct one of the two")
    return NodeGroup(**{**row, "gpu": gpu})


def known_gpu(name: str, subject: str) -> dict[str, Any]:
    """The row of gpus.json with this name or alias, in upper or lower case; `alias` is the name as the file writes it.

    Raises:
        ConfigError: there is none; the nearest names are suggested.
    """
    gpus = known_gpus()
    by_case = {alias.lower(): alias for alias in gpus}
    if name.lower() in by_case:
        alias = by_case[name.lower()]
        return {"alias": alias, **gpus[alias]}
    near = [by_case[alias] for alias in difflib.get_close_matches(name.lower(), by_case, 3)]
    # Aliases of one GPU are one suggestion.
    names = list(dict.fromkeys(gpus[alias]["name"] for alias in near))
    hint = f"did you mean {names[0]}? " if names else ""
    hint += f"near it: {', '.join(names[1:])}; " if names[1:] else ""
    fix = f"{hint}known: {', '.join(gpus)}; others stand in a cluster file, with their rates"
    raise ConfigError(subject, name, "unknown GPU", fix)


def _require_fields(row: Any, fields: Mapping[str, Any], subject: str) -> None:
    if not isinstance(row, dict):
        raise ConfigError(subject, json.dumps(row)[:40], "must be an object", f"give {', '.join(fields)}")
    for name in row:
        if name not in fields:
            raise ConfigError(f"{subject}.{name}", "", "unknown field", f"the fields are {', '.join(fields)}")
    for name, kind in fields.items():
        if name not in row:
            raise ConfigError(f"{subject}.{name}", "", "is missing", f"the fields are {', '.join(fields)}")
        value = row[name]
        numeric = kind is int or (isinstance(kind, tuple) and int in kind)
        wrong = not isinstance(value, kind) or isinstance(value, bool)
        # Not `value <= 0`: JSON readers take NaN, of which every comparison is false.
        if wrong or (numeric and value is not None and not 0 < value <= sys.float_info.max):
            number = "whole number" if kind is int else "number"
            rule = f"must be a positive {number}" if numeric else "is of the wrong kind"
            raise ConfigError(f"{subject}.{name}", json.dumps(value)[:40], rule, "correct the value")
        if isinstance(value, str) and not value.isprintable():
            raise ConfigError(f"{subject}.{name}", json.dumps(value)[:40], "holds control characters", "remove them")
