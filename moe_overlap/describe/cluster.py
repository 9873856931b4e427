"""The description of a cluster: GPU types, their memory, and the links between them, by tier. Standard library only.

Tiers, from the nearest: `domain` (NVLink or similar; may span nodes), `node` (PCIe between GPUs of a node in different domains),
`network` (between nodes), `host` (a GPU and its host's memory). Rates are peak rates per GPU and direction.

A cluster file (examples/clusters/*.json) has the fields of these classes; a GPU is a name from gpus.json or an object.
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

from moe_overlap.describe.errors import ConfigError, one_of
from moe_overlap.describe.files import Unreadable, bounded_json

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A type of GPU. Peak rates are for dense matrix products; None for a precision without matrix units."""

    name: str
    architecture: str
    """Generation of the chip (`Hopper`): types of one generation reach similar shares of their peak rates."""
    bf16_tflops: float
    """Peak rate of bf16 and of fp16."""
    fp8_tflops: float | None
    fp4_tflops: float | None
    memory_gib: float
    memory_gb_per_s: float
    usable_gib: float | None = None
    """Memory that CUDA reports; None if nobody has read it."""
    multiprocessors: int | None = None
    """Streaming multiprocessors; each executes one thread block of a fused kernel. None if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroup:
    """Nodes of one kind."""

    gpu: Gpu
    nodes: int
    gpus_per_node: int
    domain_gpus: int
    """GPUs of one NVLink domain; 1 without NVLink. May exceed the GPUs of a node."""
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
    """Measurements that tools/profile_cluster.py adds to a description: rates and constants of one particular machine."""

    database: str
    """File of measured operators; a path in a cluster file is relative to that file."""
    device: str
    """cpu or cuda."""
    latency_seconds: float
    """Latency of one collective inside a node."""
    constants: Mapping[str, float]
    """Constants of the time model, by their names in tuner/cost/hardware.py."""
    latencies: Mapping[str, float] = field(default_factory=dict)
    """Kind of a collective -> measured latency; other kinds have `latency_seconds`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Groups of nodes; ranks are numbered through them in order, node by node."""

    name: str
    groups: tuple[NodeGroup, ...]
    measured: Measured | None = None

    @property
    def gpus(self) -> int:
        """All GPUs of the cluster."""
        return sum(group.gpus for group in self.groups)

    @property
    def queues(self) -> bool:
        """Whether its devices execute asynchronously, as GPUs do; a measured CPU executes synchronously."""
        return self.measured is None or self.measured.device != "cpu"

    @property
    def domain_gpus(self) -> int:
        """GPUs of the smallest NVLink domain, whose all-to-alls do not use the network; 1 on CPUs, where ranks share all
        links."""
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
    """The flags with which pretrain_moe.py starts `ranks` ranks, with a trailing space; empty for a single rank.

    The rendezvous endpoint of several nodes is the placeholder HOST:PORT, for the user to fill in.
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
    """A cluster of one GPU type in its usual nodes, for `--gpu H100 --num-gpus 64`.

    Raises:
        ConfigError: an unknown GPU (the error lists the known ones), or a number of GPUs that does not fill the nodes.
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
    """A group of nodes in the form of a cluster file, from a row of gpus.json."""
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
        ConfigError: the file cannot be read, or a field is unknown, missing or of the wrong kind; the error names the field.
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
    # Files of older releases, with one latency for all kinds, lack the field.
    optional = {"latencies": dict} if isinstance(row, dict) and "latencies" in row else {}
    _require_fields(row, _MEASURED_FIELDS | optional, subject)
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
_OPTIONAL_GPU_FIELDS: dict[str, Any] = {"usable_gib": (int, float, type(None)), "multiprocessors": int}


_RANGES = {"tflops": (1e-6, 100_000, "TFLOP/s"), "gib": (1e-6, 50_000, "GiB"), "gb_per_s": (1e-6, 100_000, "GB/s")}
"""Unit suffix of a field's name -> smallest and largest accepted value, and the unit's print form.

The limits are far beyond any device. They refuse rates in FLOP/s or bytes/s, which would make every prediction wrong, and rates
so small that seconds overflow.
"""


def _require_units(row: Mapping[str, Any], subject: str) -> None:
    """Refuse values outside _RANGES: they must be in another unit."""
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
        optional = {name: kind for name, kind in _OPTIONAL_GPU_FIELDS.items() if name in row["gpu"]}
        _require_fields(row["gpu"], _GPU_FIELDS | optional, f"{subject}.gpu")
        _require_units(row["gpu"], f"{subject}.gpu")
        gpu = Gpu(**row["gpu"])
    else:
        row_of_gpu = known_gpu(row["gpu"], f"{subject}.gpu")
        gpu = Gpu(**{field.name: row_of_gpu[field.name] for field in dataclasses.fields(Gpu)})
    if row["domain_gpus"] > 1 and row["domain_gb_per_s"] is None:
        rule = f"{row['domain_gpus']} GPUs share a domain"
        raise ConfigError(f"{subject}.domain_gb_per_s", "null", rule, "give the domain's rate")
    domain, node = row["domain_gpus"], row["gpus_per_node"]
    # GPUs of a partly used node have the links of the full node.
    if node % domain if domain < node else row["nodes"] > 1 and domain % node:
        rule = f"domains of {domain} neither divide nodes of {node} GPUs nor consist of whole ones"
        raise ConfigError(f"{subject}.domain_gpus", domain, rule, "correct one of the two")
    return NodeGroup(**{**row, "gpu": gpu})


def known_gpu(name: str, subject: str) -> dict[str, Any]:
    """The row of gpus.json with this name or alias, case-insensitive; `alias` is the matched name as gpus.json spells it.

    Raises:
        ConfigError: an unknown GPU; the error suggests the nearest names.
    """
    gpus = known_gpus()
    by_case = {alias.lower(): alias for alias in gpus}
    if name.lower() in by_case:
        alias = by_case[name.lower()]
        return {"alias": alias, **gpus[alias]}
    variants = [alias for alias in by_case if name and alias.startswith(name.lower())]
    near = variants or difflib.get_close_matches(name.lower(), by_case, 3)
    # Several aliases of one GPU give one suggestion, the one that is easier to type.
    names: dict[str, str] = {}
    for alias in (by_case[lower] for lower in near):
        names[gpus[alias]["name"]] = min(names.get(gpus[alias]["name"], alias), alias, key=len)
    hint = f"did you mean {one_of(tuple(names.values()))}? " if names else ""
    fix = f"{hint}--list-gpus prints the known ones; others stand in a cluster file, with their rates"
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
        # Not `value <= 0`: Python's JSON accepts NaN, for which every comparison is false.
        if wrong or (numeric and value is not None and not 0 < value <= sys.float_info.max):
            number = "whole number" if kind is int else "number"
            rule = f"must be a positive {number}" if numeric else "is of the wrong kind"
            raise ConfigError(f"{subject}.{name}", json.dumps(value)[:40], rule, "correct the value")
        if isinstance(value, str) and not value.isprintable():
            raise ConfigError(f"{subject}.{name}", json.dumps(value)[:40], "holds control characters", "remove them")
