"""Measurements of one device as a file: JSON lines, one measurement each, the device in the first line.

An operator is stored under its kind, pass, format and sizes. Some lines belong to whole jobs: the price factors from traces, one
line per refinement of a job, of which the last counts.

A line is appended in one write, so a killed measuring run loses at most the line that it was writing. Unreadable lines are
dropped with a warning, and the rest is rewritten. Several processes may append to one file.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_bytes, new_file, plain_json
from moe_overlap.tuner.capture.graph import Op
from moe_overlap.tuner.cost.hardware import Refined

Pass = Literal["forward", "backward", "weight_gradient"]
"""The products of the three passes transpose different operands."""
Origin = Literal["measured", "interpolated"]
"""The source of seconds: a measurement of exactly this size, or of neighbouring sizes."""
PRODUCTS = ("gemm", "grouped_gemm", "attention")
"""Kinds whose seconds depend on their shape. Every other kind is torch's operator (`mul`) and depends on the bytes it moves."""


@dataclass(frozen=True, slots=True, order=True)
class OperatorKey:
    """One operator at one size, as a rank runs it: a partitioned shape is another key.

    Attributes:
        kind: one of PRODUCTS, or the name of torch's operator.
        dtype: torch's name of the result's format (`float32`).
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
    """The work to which a kind's seconds are proportional: multiplications and additions of products, bytes of other kinds."""
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


# Names of torch's memory-bound operators that `measure/operators.py` can time; a test holds it to this list.

_MAKING = ("zeros", "zeros_like", "new_zeros", "ones_like", "arange")
_COMPARING = ("bitwise_or", "ge", "lt")
_COPYING = ("clone", "cat", "_to_copy", "copy_")
_INDEXING = ("index_select", "index", "index_put_", "gather", "scatter", "masked_select")
_ADDING = ("add", "sub", "mul", "add_", "sub_", "mul_", "sum")
_FLOATING = (
    *("neg", "exp", "cos", "sin", "rsqrt", "log", "silu", "gelu", "pow", "rsub", "slice_backward"),
    *("div", "div_", "silu_backward", "mean", "max", "_softmax", "_softmax_backward_data", "topk"),
    *("masked_scatter", "embedding", "index_add", "scatter_add_", "embedding_dense_backward"),
)
_ANY_FORMAT = (*_MAKING, *_COPYING, *_INDEXING)
BOUND_BY_BYTES = (*_ANY_FORMAT, *_COMPARING, *_ADDING, *_FLOATING)
FORMATS = ("float32", "bfloat16", "float16")
INTEGERS = ("int64", "int32")


def can_be_measured(key: OperatorKey) -> bool:
    """Whether `measure/operators.py` has a call for a key."""
    if key.kind in PRODUCTS:
        return key.dtype in FORMATS
    if key.dtype in FORMATS:
        return key.kind in (*_ANY_FORMAT, *_ADDING, *_FLOATING)
    return key.kind in (*_ANY_FORMAT, *_COMPARING) or (key.kind in _ADDING and key.dtype in INTEGERS)


FORMAT = 1
MOST_DATABASE_BYTES = 1 << 26
"""Largest size of a database that is read: half a million measurements."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device that measurements belong to.

    Attributes:
        kind: cpu or cuda.
        name: the name that the processor or GPU reports.
        threads: threads of one rank on a CPU; 1 on a GPU.
        torch: version of torch.
    """

    kind: str
    name: str
    threads: int
    torch: str

    def __str__(self) -> str:
        threads = f", {self.threads} threads" if self.threads > 1 else ""
        return f"{self.name}{threads}, torch {self.torch}"


@dataclass(frozen=True, slots=True, order=True)
class LinkKey:
    """One collective, transfer or copy.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, point_to_point, to_device, to_host.
        tier: node or network; host for copies.
        ranks: size of the group.
        held_bytes: bytes of the whole tensor, as in `Collective.payload_bytes`.
    """

    kind: str
    tier: str
    ranks: int
    held_bytes: int


class Database:
    """The measurements of a device.

    Attributes:
        operators, links: seconds by key.
        rates: single figures by name: `product_flops`, `copy_bytes_per_second`, …
        jobs: refined prices by job (`tuner/calibrate/refine.py`).
        is_kept: whether additions are appended to the file. Several processes of one machine may append; processes of several
            machines would overwrite each other on a shared file system, whose clients do not append to the same end.
    """

    def __init__(self, path: Path, device: Device, is_kept: bool = True) -> None:
        self.path, self.device, self.is_kept = path, device, is_kept
        self.operators: dict[OperatorKey, float] = {}
        self.links: dict[LinkKey, float] = {}
        self.rates: dict[str, float] = {}
        self.jobs: dict[str, Refined] = {}

    @staticmethod
    def open(path: Path, device: Device) -> Database:
        """The database of a device, for measuring; created if there is none.

        Measurements of another device or version in the file are dropped, with a warning.

        Raises:
            ConfigError: the file cannot be written.
        """
        database = Database(path, device)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                stored, damaged = _read(path)
                if stored is not None and stored.device == device:
                    database.operators, database.links, database.rates = stored.operators, stored.links, stored.rates
                    database.jobs = stored.jobs
                elif stored is not None:
                    print(
                        f"warning: {path} was measured on {stored.device}; this is {device}: measured anew",
                        file=sys.stderr,
                    )
                    damaged = 0
                if not damaged and stored is not None and stored.device == device:
                    return database
            database._rewrite()
        except OSError as error:
            rule = f"cannot be written: {error.strerror}"
            raise ConfigError("database", path, rule, "choose another place") from None
        return database

    @staticmethod
    def load(path: Path) -> Database:
        """A database, for reading.

        Raises:
            ConfigError: there is no file, or none of it can be read.
        """
        try:
            stored, _ = _read(path)
        except OSError as error:
            rule = f"cannot be read: {error.strerror}"
            raise ConfigError("database", path, rule, "run tools/profile_cluster.py again") from None
        if stored is None:
            raise ConfigError("database", path, "is no database of measurements", "run tools/profile_cluster.py again")
        return stored

    def add_operator(self, key: OperatorKey, seconds: float) -> None:
        """Store a measurement."""
        self.operators[key] = seconds
        self._append({"operator": [key.kind, key.direction, key.dtype, list(key.shape)], "seconds": seconds})

    def add_link(self, key: LinkKey, seconds: float) -> None:
        """Store a measurement."""
        self.links[key] = seconds
        self._append({"link": [key.kind, key.tier, key.ranks, key.held_bytes], "seconds": seconds})

    def add_rate(self, name: str, value: float) -> None:
        """Store a single figure."""
        self.rates[name] = value
        self._append({"rate": name, "value": value})

    def add_job(self, key: str, refined: Refined) -> None:
        """Store the price factors of a job, replacing earlier ones."""
        self.jobs[key] = refined
        self._append(_job_row(key, refined))

    def _append(self, row: dict[str, Any]) -> None:
        if not self.is_kept:
            return
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, (json.dumps(row) + "\n").encode())
        finally:
            os.close(descriptor)

    def _rewrite(self) -> None:
        rows: list[dict[str, Any]] = [{"format": FORMAT, "device": asdict(self.device)}]
        for operator, seconds in self.operators.items():
            rows.append(
                {
                    "operator": [operator.kind, operator.direction, operator.dtype, list(operator.shape)],
                    "seconds": seconds,
                }
            )
        for link, seconds in self.links.items():
            rows.append({"link": [link.kind, link.tier, link.ranks, link.held_bytes], "seconds": seconds})
        rows += [{"rate": name, "value": value} for name, value in self.rates.items()]
        rows += [_job_row(key, refined) for key, refined in self.jobs.items()]
        with new_file(self.path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _read(path: Path) -> tuple[Database | None, int]:
    """The readable part of a file, and the number of unreadable lines; None if the first line names no device."""
    try:
        lines = bounded_bytes(path, MOST_DATABASE_BYTES).splitlines()
    except Unreadable as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        print(f"warning: {path}: {error}", file=sys.stderr)
        return None, 0
    try:
        first = plain_json(lines[0])
        if first["format"] != FORMAT:
            raise ValueError(first["format"])
        device = _device(first["device"])
    except (Unreadable, ValueError, KeyError, TypeError, IndexError):
        print(f"warning: {path} is no database of measurements", file=sys.stderr)
        return None, len(lines)
    database, damaged = Database(path, device), 0
    for line in lines[1:]:
        try:
            _take(database, plain_json(line))
        except (Unreadable, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            damaged += 1
    if damaged:
        print(f"warning: {path}: {damaged} damaged lines are dropped", file=sys.stderr)
    return database, damaged


def _job_row(key: str, refined: Refined) -> dict[str, Any]:
    factors = [[kind, is_cut, factor] for (kind, is_cut), factor in refined.factors.items()]
    return {"job": key, "factors": factors, "unpriced": dict(refined.unpriced)}


def _take(database: Database, row: dict[str, Any]) -> None:
    if "job" in row:
        factors = {(str(kind), bool(is_cut)): _positive(factor) for kind, is_cut, factor in row["factors"]}
        unpriced = {str(kind): _positive(seconds) for kind, seconds in row["unpriced"].items()}
        database.jobs[str(row["job"])] = Refined(factors, unpriced)
    elif "rate" in row:
        database.rates[str(row["rate"])] = _positive(row["value"])
    elif "link" in row:
        kind, tier, ranks, held = row["link"]
        database.links[LinkKey(_text(kind), _text(tier), _size(ranks), _size(held))] = _positive(row["seconds"])
    else:
        kind, direction, dtype, shape = row["operator"]
        if direction not in get_args(Pass) or len(shape) != _DIMENSIONS.get(kind, 2):
            raise ValueError(row)
        key = OperatorKey(_text(kind), direction, _text(dtype), tuple(map(_size, shape)))
        database.operators[key] = _positive(row["seconds"])


_DIMENSIONS = {"gemm": 3, "grouped_gemm": 4, "attention": 8}
"""Number of sizes of a product (`OperatorKey.shape`)."""
_LARGEST_SIZE = 1 << 62


def _device(row: Any) -> Device:
    device = Device(**{**row, "kind": _text(row["kind"]), "name": _text(row["name"]), "torch": _text(row["torch"])})
    if _size(device.threads) < 1:
        raise ValueError(row)
    return device


def _text(value: Any) -> str:
    if type(value) is not str or not value.isprintable():
        raise ValueError(value)
    return value


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST_SIZE:
        raise ValueError(value)
    return value


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < math.inf or isinstance(value, str | bool):
        raise ValueError(value)
    return number
