"""A measured machine in the cost model.

Its constants stand in the cluster description; seconds of operators and refined factors of jobs stand in the database that the
description names. A cluster that was not measured answers None or nothing everywhere here.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

from moe_overlap.describe.cluster import Cluster, Measured
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.analytic import prepare
from moe_overlap.tuner.cost.hardware import (
    NOT_REFINED,
    Constants,
    Features,
    GpuConstants,
    MeasuredConstants,
    Refined,
    ReleaseConstants,
)
from moe_overlap.tuner.cost.operators import Lookup
from moe_overlap.tuner.profile.database import Database, OperatorKey, distinct, key_of
from moe_overlap.tuner.profile.lookup import MeasuredOperators, fill

RELEASE = "0.0"
"""The release of a measured machine: the software that was measured is the one that runs, so its scales are 1."""


def constants_of(measured: Measured, gpu: str) -> Constants:
    """The constants of a measured machine.

    Raises:
        ConfigError: a constant is missing or unknown.
    """
    names = {field.name for field in dataclasses.fields(GpuConstants)}
    for name in names ^ set(measured.constants):
        rule = "is missing" if name in names else "is unknown"
        raise ConfigError(f"measured.constants.{name}", "", rule, "run tools/profile_cluster.py again")
    constants = MeasuredConstants(**measured.constants, latency_seconds=measured.latency_seconds)
    return Constants({gpu: constants}, {RELEASE: ReleaseConstants()})


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
    """The measured operators of a cluster; those its database lacks are measured and kept if this machine has the device.

    Raises:
        ConfigError: the database cannot be read.
    """
    if cluster.measured is None:
        return None
    ranks = cluster.group_of(0).gpus_per_node
    return MeasuredOperators(fill(Database.load(Path(cluster.measured.database)), keys, ranks))


def refined_of(cluster: Cluster, key: str) -> Refined:
    """The refined factors of a job that the database of a measured cluster has from traces.

    Args:
        key: of the job (`tuner/calibrate/refine.py`).
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
