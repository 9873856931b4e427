"""A measured machine in the cost model: its constants from the cluster description, its operators from the database it names."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_overlap.describe.cluster import Cluster, Measured
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.analytic import prepare
from moe_overlap.tuner.cost.hardware import NOT_REFINED, Constants, Features, GpuConstants, Refined, ReleaseConstants
from moe_overlap.tuner.cost.links import LinkRates
from moe_overlap.tuner.cost.operators import Lookup
from moe_overlap.tuner.profile.database import Database, OperatorKey, distinct, key_of
from moe_overlap.tuner.profile.lookup import MeasuredOperators, fill

RELEASE = "0.0"
"""Of a measured machine: what was measured is what runs, so its scales are 1."""


@dataclass(frozen=True, kw_only=True)
class MeasuredConstants(GpuConstants):
    """Constants of a machine that was measured, not fitted; its collectives have a latency of their own."""

    latency_seconds: float

    @property
    def link_rates(self) -> LinkRates:
        """Efficiencies and latency of the links."""
        return LinkRates(
            domain=self.domain,
            network=self.network,
            all_to_all_domain=self.all_to_all_domain,
            all_to_all_network=self.all_to_all_network,
            host=1.0,
            latency_seconds=self.latency_seconds,
        )


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
    """The operators that a plan runs, each once. Arguments as in `prepare`."""
    families = prepare(plan, model, graphs, features, load)
    return distinct(
        key_of(op, table.shapes[index], float(table.bytes[index]))
        for family in families
        for table in family.tables
        for index, op in enumerate(table.ops)
    )


def lookup_of(cluster: Cluster, keys: list[OperatorKey]) -> Lookup | None:
    """What the database of a measured cluster answers; operators it lacks are measured and kept if this machine has the device.

    Raises:
        ConfigError: the database cannot be read.
    """
    if cluster.measured is None:
        return None
    ranks = cluster.group_of(0).gpus_per_node
    return MeasuredOperators(fill(Database.load(Path(cluster.measured.database)), keys, ranks))


def refined_of(cluster: Cluster, key: str) -> Refined:
    """What the database of a measured cluster has from traces of a job.

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
