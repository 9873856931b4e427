"""Seconds of an operator from the database: measured at exactly this size, else interpolated between neighbours, else None.

Interpolation: the rate (work per second) of the measured neighbours, weighted by the inverse square of their distance; distances
are those of the logarithms of the sizes. There is no answer if the nearest size is more than FARTHEST away. An elementwise kind
without measurements takes the seconds of others that move the same bytes.

An operator is timed alone, in a loop. In a step its operands are colder, and the host delays the next one: if a database has the
rates of a step, the cost model gets IN_STEP times the measured seconds, plus CALL_SECONDS for each call.

`operator_grid` and `link_grid` are measured ahead: a coarse grid of sizes, between which other sizes are interpolated. `fill`
adds the keys that a prediction needs and the database lacks, if this machine has its device; another process measures them.

A prediction for a measured cluster reads the database that the cluster names: `lookup_of` the operators of a plan
(`operator_keys`), `refined_of` the factors from traces of the same job.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.graph import CapturedModel, Op
from moe_overlap.tuner.cost.analytic import prepare
from moe_overlap.tuner.cost.hardware import NOT_REFINED, Features, Refined
from moe_overlap.tuner.cost.operators import Lookup
from moe_overlap.tuner.profile.cluster_file import this_device
from moe_overlap.tuner.profile.database import (
    BOUND_BY_BYTES,
    PRODUCTS,
    Database,
    LinkKey,
    OperatorKey,
    Origin,
    Pass,
    can_be_measured,
    distinct,
    key_of,
    work_of,
)

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DIRECTIONS: tuple[Pass, ...] = ("forward", "backward", "weight_gradient")
ROW = 128
REDUCTIONS = ("sum", "mean", "max")
OF_TWO = ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_", "copy_", "silu_backward")
MOST_WORK = {"cpu": 2e9, "cuda": 2e13}
"""Multiplications and additions of the largest product measured."""


def operator_grid(dtype: str, device: str, quick: bool) -> list[OperatorKey]:
    """Keys to measure, sorted."""
    keys = [*_products(dtype, quick, device), *_attention(dtype, quick, device), *_bound_by_bytes(dtype, quick, device)]
    return distinct(key for key in keys if can_be_measured(key))


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
    element_bytes = DTYPE_BYTES[dtype]
    for name in BOUND_BY_BYTES:
        for power in powers:
            elements = 1 << (power if device == "cpu" else power + 5)
            written = elements // ROW if name in REDUCTIONS else elements
            moved = (elements + written) * element_bytes
            if name in OF_TWO:
                moved += elements * element_bytes
            elif name not in REDUCTIONS:
                moved += 8 * elements // ROW
            for direction in DIRECTIONS[:1]:
                yield OperatorKey(name, direction, dtype, (written, moved))


Floats = NDArray[np.float64]
NEIGHBOURS = 4
FARTHEST = np.log(8.0)
"""Largest distance of the nearest measured size, in the logarithm of any one dimension."""
STAND_IN = "mul"
"""The kind whose seconds a memory-bound operator gets if it was not measured itself."""
IN_STEP, CALL_SECONDS = "in_step", "call_seconds"
"""Rates of a database, see above; absent: 1 and 0."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """Sizes of one kind. [N, D] logarithms of the shapes, [N] seconds per work, [N] seconds."""

    logs: Floats
    paces: Floats


class MeasuredOperators:
    """Answers from the present content of a database; later measurements need a new object."""

    def __init__(self, database: Database) -> None:
        self._exact = dict(database.operators)
        self._in_step = database.rates.get(IN_STEP, 1.0)
        self._call_seconds = database.rates.get(CALL_SECONDS, 0.0)
        groups: dict[tuple[str, str, str], list[tuple[OperatorKey, float]]] = {}
        for key, seconds in self._exact.items():
            groups.setdefault((key.kind, key.direction, key.dtype), []).append((key, seconds))
        self._groups = {
            name: _Measured(
                np.array([_logs(key) for key, _ in rows]),
                np.array([seconds / work_of(key) for key, seconds in rows]),
            )
            for name, rows in groups.items()
        }

    def seconds(self, key: OperatorKey) -> tuple[float, Origin] | None:
        """Measured seconds and their origin (`measured`, `interpolated`); None if nothing measured is near."""
        if key in self._exact:
            return self._exact[key], "measured"
        kinds = [key.kind] if key.kind in PRODUCTS else [key.kind, STAND_IN]
        for kind in kinds:
            for direction in (key.direction, "forward"):
                group = self._groups.get((kind, direction, key.dtype))
                pace = _pace(group, _logs(key)) if group is not None else None
                if pace is not None:
                    return pace * work_of(key), "interpolated"
                if key.kind in PRODUCTS:
                    break
        return None

    def __call__(self, op: Op, shape: tuple[float, ...], moved_bytes: float) -> tuple[float, Origin] | None:
        """Seconds of a captured operator in a step, and their origin: a `Lookup` of the cost model."""
        key = key_of(op, shape, moved_bytes)
        measured = self.seconds(key) if key is not None else None
        return None if measured is None else (self._in_step * measured[0] + self._call_seconds, measured[1])


def _logs(key: OperatorKey) -> Floats:
    """Logarithms of every size of a product, and only of the bytes of any other kind."""
    sizes = key.shape if key.kind in PRODUCTS else key.shape[1:]
    return np.log(np.maximum(np.array(sizes, dtype=np.float64), 1.0))


def _pace(group: _Measured, logs: Floats) -> float | None:
    """Seconds per work at a size between measured ones."""
    distances_ND = np.abs(group.logs - logs)
    near = distances_ND.max(axis=1) <= FARTHEST
    if not near.any():
        return None
    distances = np.sqrt((distances_ND[near] ** 2).sum(axis=1))
    chosen = np.argsort(distances, kind="stable")[:NEIGHBOURS]
    weights = 1.0 / np.maximum(distances[chosen], 1e-9) ** 2
    return float(np.exp(np.average(np.log(group.paces[near][chosen]), weights=weights)))


SECONDS_EACH = 0.02


def is_here(database: Database) -> bool:
    """Whether this machine has the device, and the version, that the database was measured on."""
    try:
        present = this_device(database.device.kind)
    except ConfigError:
        return False
    return dataclasses.replace(present, threads=database.device.threads) == database.device


def fill(database: Database, keys: Sequence[OperatorKey], ranks: int) -> Database:
    """The database with every key that can be measured here; each is measured once and stored.

    Args:
        ranks: ranks of a node. On a CPU as many processes measure at once, since training loads caches and memory likewise.
    Returns:
        The database, read again. A measuring process that fails leaves a gap, with a warning: its keys are interpolated.
    """
    missing = [key for key in keys if key not in database.operators and can_be_measured(key)]
    if not missing or not is_here(database):
        return database
    print(f"measuring {len(missing)} operators on {database.device}", file=sys.stderr)
    count = min(ranks, len(missing)) if database.device.kind == "cpu" else 1
    processes = [_start(database, missing[first::count]) for first in range(count)]
    for process in processes:
        _, errors = process.communicate()
        if process.returncode:
            reason = errors.strip().splitlines()[-1] if errors.strip() else "it was killed"
            print(f"warning: measuring operators failed ({reason}); they are interpolated", file=sys.stderr)
    return Database.load(database.path)


def _start(database: Database, keys: Sequence[OperatorKey]) -> subprocess.Popen[str]:
    """A process that measures, with its request written to it."""
    request = {
        "path": str(database.path.resolve()),
        "device": dataclasses.asdict(database.device),
        "operators": [[key.kind, key.direction, key.dtype, list(key.shape)] for key in keys],
        "seconds_each": SECONDS_EACH,
    }
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(database.device.threads),
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    process = subprocess.Popen(
        # -P: a torch.py in the folder that the user works in is not torch.
        [sys.executable, "-P", "-m", "moe_overlap.tuner.profile.measure"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(request))
    process.stdin.close()
    process.stdin = None
    return process


def operator_keys(
    plan: Plan,
    model: ModelDescription,
    graphs: Mapping[int, CapturedModel],
    features: Features,
    load: float = 1.0,
) -> list[OperatorKey]:
    """Keys of the operators that a plan runs, each once. Arguments as in `prepare`."""
    families = prepare(plan, model, graphs, features, load)
    return distinct(
        key_of(op, table.shapes[index], float(table.bytes[index]))
        for family in families
        for table in family.tables
        for index, op in enumerate(table.ops)
    )


def lookup_of(cluster: Cluster, keys: list[OperatorKey]) -> Lookup | None:
    """The measured operators of a cluster; missing ones are measured and stored if this machine has the device.

    Raises:
        ConfigError: the database cannot be read.
    """
    if cluster.measured is None:
        return None
    ranks = cluster.group_of(0).gpus_per_node
    return MeasuredOperators(fill(Database.load(Path(cluster.measured.database)), keys, ranks))


def refined_of(cluster: Cluster, key: str) -> Refined:
    """The refined factors of a job from traces, out of a measured cluster's database.

    Args:
        key: key of the job (`tuner/calibrate/refine.py`).
    Raises:
        ConfigError: the database cannot be read.
    """
    if cluster.measured is None:
        return NOT_REFINED
    path = Path(cluster.measured.database)
    refined = Database.load(path).jobs.get(key, NOT_REFINED)
    if refined is not NOT_REFINED:
        print(f"prices refined by traces of this job, as {path} has them", file=sys.stderr)
    return refined
