"""The problem that the tuner is given: everything about a run but the plan that is priced.

A plan decides layout and overlap; a problem says of which model, on which machine and under which settings. Every function that
prices, simulates or searches takes a plan and a problem. A problem is made once (`moe_overlap/api.py`) and never changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.capabilities import ListedRun
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.hardware import Features, Refined
from moe_overlap.tuner.cost.machine import Machine

OURS = ListedRun(gate="topk")
"""Settings that go with every overlap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A run whose plans are priced.

    Attributes:
        plan: the baseline, as the flags decide; candidates keep its parallel layout.
        graphs: the captured model of every stage.
        features: what of the flags changes speed or memory beside the plan.
        machine: the cluster with its constants, measurements and refined prices.
        extrapolating: why predictions go beyond what the constants were fitted to.
        listed: the settings on which overlap depends beside the plan.
    """

    model: ModelDescription
    plan: Plan
    graphs: Mapping[int, CapturedModel]
    features: Features
    machine: Machine
    extrapolating: tuple[str, ...] = ()
    listed: ListedRun = OURS

    @property
    def cluster(self) -> Cluster:
        """The machines; all of their GPUs run."""
        return self.machine.cluster

    def run_by(self, plan: Plan) -> Problem:
        """The same problem as a run of a plan meets it.

        A run that follows instruction lists gathers weights under its first passes only where they say so.
        """
        if not plan.follows_lists:
            return self
        gathers = all(stage.overlap.overlap_param_gather for stage in plan.stages)
        return replace(self, features=replace(self.features, overlap_param_gather=gathers))

    def replaying(self, is_on: bool) -> Problem:
        """The same problem whose instruction lists are replayed as CUDA graphs, or are not."""
        return replace(self, features=replace(self.features, listed_graphs=is_on))

    def refined_by(self, refined: Refined) -> Problem:
        """The same problem at prices that traces refine."""
        return replace(self, machine=replace(self.machine, refined=refined))
