"""The problem of the tuner: everything about a run except the plan to price.

A plan decides layout and overlap; a problem has the model, the machine and the settings. Every function that prices, simulates or
searches takes a plan and a problem. A problem is created once (`moe_overlap/api.py`) and never changes.
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
"""Settings that allow every overlap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A run whose plans are priced.

    Attributes:
        plan: the baseline, from the flags; candidates keep its parallel layout.
        graphs: stage -> its captured model.
        features: the flags outside of the plan that change speed or memory.
        machine: the cluster with its constants, measurements and refined prices.
        extrapolating: reasons why predictions extrapolate beyond the calibration.
        listed: the settings outside of the plan on which overlap depends.
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
        """The problem with the features of a run of a plan.

        A run that follows instruction lists gathers weights under its first passes only if the lists contain the gathers.
        """
        if not plan.follows_lists:
            return self
        gathers = all(stage.overlap.overlap_param_gather for stage in plan.stages)
        return replace(self, features=replace(self.features, overlap_param_gather=gathers))

    def replaying(self, is_on: bool) -> Problem:
        """The problem with the replay of instruction lists as CUDA graphs switched on or off."""
        return replace(self, features=replace(self.features, listed_graphs=is_on))

    def refined_by(self, refined: Refined) -> Problem:
        """The problem with refined prices."""
        return replace(self, machine=replace(self.machine, refined=refined))
