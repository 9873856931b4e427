"""The plans that are left at the end of a search: written as flags, predicted, and some of them simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.problem import Problem

APART = 0.01
"""Share of a predicted step by which its simulation may differ without being told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finalist:
    """A plan that was written as flags, read again and predicted.

    Attributes:
        problem: the run under its plan, as read from the flags.
        arguments: the flags of the whole run; `said` are those that say the plan, but for those that its file says in their place
            (`in_file`): flags cannot say what single stages recompute.
        is_staged: whether its stages decided for themselves about layers and recomputation.
        refusal: why pretrain_moe.py refuses the plan; None where it, or the target, executes it.
        simulated: simulated seconds of the step over the predicted ones; None where the plan was not simulated.
        lacks_lists: whether it is predicted by a closed form as yet, though lists know more: on unlike meshes, in whose closed
            form nothing waits for tiles, and where states move (tuner/cost/prediction.py).
    """

    name: str
    problem: Problem
    prediction: Prediction
    arguments: tuple[str, ...]
    said: tuple[str, ...]
    in_file: tuple[str, ...] = ()
    is_staged: bool = False
    refusal: str | None = None
    simulated: float | None = None
    lacks_lists: bool = False

    @property
    def plan(self) -> Plan:
        """The plan that the flags say."""
        return self.problem.plan

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.prediction.predicted.step_seconds

    @property
    def simulated_seconds(self) -> float:
        """Simulated seconds of a step, by which finalists are ordered; the predicted ones where it was not simulated."""
        return self.seconds * (1.0 if self.simulated is None else self.simulated)

    @property
    def is_apart(self) -> bool:
        """Whether simulation and prediction differ by more than `APART`."""
        return self.simulated is not None and abs(self.simulated - 1.0) > APART


def is_paired(finalist: Finalist) -> bool:
    """Whether its layers overlap as Megatron-LM overlaps them; only Megatron-LM runs it then."""
    return finalist.problem.features.overlap_experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Screened:
    """A layout that was looked at for the all-to-alls that it may hide.

    Attributes:
        way: to overlap.
        least_seconds: of its step, if all that can be hidden were.
        seconds: simulated, of the simplest plan of that way; None where it does not fit or a rule refuses it.
        refused: why there is none.
    """

    name: str
    way: str
    least_seconds: float
    seconds: float | None
    refused: str = ""

    @property
    def order(self) -> tuple[float, float]:
        """The fastest first; those without a plan behind them."""
        return math.inf if self.seconds is None else self.seconds, self.least_seconds
