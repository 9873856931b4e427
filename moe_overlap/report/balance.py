"""Imbalance of pipeline stages: how much longer the slowest ones take, and whether moving layers would help.

Waiting for the slowest stage is not counted as bubble (fill and drain only); the breakdown counts it as that stage's compute, so
no term shows it. The usual cause is the last stage, with the head and prediction layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.cost.analytic import Prediction

ALIKE = 0.99
"""Stages that take at least this share of the slowest stage's seconds count as slowest, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBalance:
    """The stages of a plan by their seconds in the stable part of a step.

    Attributes:
        slowest: the slowest stages.
        longer: excess of their seconds over the mean of all stages, as a share of the mean.
        waiting_seconds: seconds of a step for which an average stage waits for the slowest.
        may_move: whether the other stages can take over one layer from each of the slowest ones.
    """

    slowest: tuple[int, ...]
    longer: float
    waiting_seconds: float
    may_move: bool

    @property
    def advice(self) -> str:
        """The advice to move layers away from the slowest stages; valid if `may_move`."""
        single = len(self.slowest) == 1
        names = f"stage{'' if single else 's'} {', '.join(map(str, self.slowest))}"
        return f"{'a layer' if single else 'a layer each'} fewer on {names} (--pipeline-model-parallel-layout)"

    @property
    def sentence(self) -> str:
        """The imbalance as text."""
        count = len(self.slowest)
        slow = f"{count} stages are" if count > 1 else f"stage {self.slowest[0]} is"
        return f"uneven stages: {slow} {100 * self.longer:.1f} % slower than the average, and the others wait"


def balance_of(plan: Plan, prediction: Prediction) -> StageBalance:
    """Compare the stages of a predicted plan.

    The seconds of a layer are estimated as the largest seconds per layer among the faster stages, including their embedding or
    head.
    """
    counts = [stage.gradient_accumulation_steps for stage in plan.stages]
    work = [
        predicted.stable_seconds * count for predicted, count in zip(prediction.predicted.stages, counts, strict=True)
    ]
    most, mean = max(work), sum(work) / len(work)
    slow = [index for index, seconds in enumerate(work) if seconds >= ALIKE * most]
    others = [index for index in range(len(work)) if index not in slow]
    layer = max((work[index] / max(1, len(plan.stages[index].layers)) for index in others), default=0.0)
    room = sum(int((most - work[index]) / layer) for index in others) if layer > 0 else 0
    return StageBalance(
        slowest=tuple(slow),
        longer=most / mean - 1.0 if mean > 0 else 0.0,
        waiting_seconds=most - mean,
        may_move=room >= len(slow) and all(len(plan.stages[index].layers) > 1 for index in slow),
    )
