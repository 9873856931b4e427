"""The finalists of a search: plans that were written as flags and predicted; some are also simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.problem import Problem

APART = 0.01
"""Largest difference between simulation and prediction that is not reported, as a share of the predicted step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finalist:
    """A plan that was written as flags, parsed again and predicted.

    Attributes:
        problem: the run with this plan, as parsed from the flags.
        arguments: all flags of the run.
        plan_arguments: the flags among them that express the plan.
        in_file: flags whose decisions are in the plan's file instead: no flag expresses the recomputation of single stages.
        is_staged: whether layers and recomputation were chosen separately for each stage.
        refusal: why pretrain_moe.py refuses the plan; None if it, or the target, executes it.
        simulated: simulated over predicted seconds of the step; None if the plan was not simulated.
        lacks_lists: whether the prediction is still the closed form, which ignores tile waits (unlike meshes) and moved states
            (tuner/cost/prediction.py); such a plan should be simulated.
    """

    name: str
    problem: Problem
    prediction: Prediction
    arguments: tuple[str, ...]
    plan_arguments: tuple[str, ...]
    in_file: tuple[str, ...] = ()
    is_staged: bool = False
    refusal: str | None = None
    simulated: float | None = None
    lacks_lists: bool = False

    @property
    def plan(self) -> Plan:
        """The plan of the flags."""
        return self.problem.plan

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.prediction.predicted.step_seconds

    @property
    def simulated_seconds(self) -> float:
        """Simulated seconds of a step, which rank the finalists; the predicted ones if it was not simulated."""
        return self.seconds * (1.0 if self.simulated is None else self.simulated)

    @property
    def is_apart(self) -> bool:
        """Whether simulation and prediction differ by more than `APART`."""
        return self.simulated is not None and abs(self.simulated - 1.0) > APART


def is_paired(finalist: Finalist) -> bool:
    """Whether its layers use Megatron-LM's overlap, so that only Megatron-LM runs it."""
    return finalist.problem.features.overlap_experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Screened:
    """A layout that was evaluated for the all-to-alls that it can hide.

    Attributes:
        way: the mechanism of overlap.
        least_seconds: lower bound of its step: all communication that can be hidden is hidden.
        seconds: simulated seconds of the simplest plan with this mechanism; None if it does not fit or a rule refuses it.
        refused: why there is no such plan.
    """

    name: str
    way: str
    least_seconds: float
    seconds: float | None
    refused: str = ""

    @property
    def order(self) -> tuple[float, float]:
        """Sort key: the fastest first, then those without a plan."""
        return math.inf if self.seconds is None else self.seconds, self.least_seconds
