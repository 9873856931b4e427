"""Stages of a pipeline that take longer than the others: by how much, and whether other cuts between layers would help.

What the others wait for the slowest one is no bubble, which is of filling and draining: the breakdown has it as the slowest
stage's own work, so that no term shows it. Prediction layers and the head on the last stage are the usual cause.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.cost.analytic import Prediction

ALIKE = 0.99
"""Stages that take this share of the slowest one's seconds are as slow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """The stages of a plan by their seconds in the stable part of a step.

    Attributes:
        slowest: the slowest ones.
        longer: by which share they take longer than the mean of all stages; 0 where all are alike.
        waiting_seconds: seconds of a step that the mean stage waits for the slowest one.
        may_move: whether the other stages have room for a layer of each of the slowest ones.
    """

    slowest: tuple[int, ...]
    longer: float
    waiting_seconds: float
    may_move: bool

    @property
    def advice(self) -> str:
        """The change that would help where a layer of each of the slowest stages may move."""
        one = len(self.slowest) == 1
        names = f"stage{'' if one else 's'} {', '.join(map(str, self.slowest))}"
        return f"{'a layer' if one else 'a layer each'} fewer on {names} (--pipeline-model-parallel-layout)"

    @property
    def sentence(self) -> str:
        """By how much the slowest stages are slower."""
        several = len(self.slowest) > 1
        who = f"{len(self.slowest)} stages take" if several else f"stage {self.slowest[0]} takes"
        return f"{who} {100 * self.longer:.1f} % longer than the mean of all"


def balance_of(plan: Plan, prediction: Prediction) -> Balance:
    """Compare the stages of a predicted plan.

    A layer is taken to be as long as the longest of the faster stages' layers, what these have beside layers included.
    """
    counts = [stage.gradient_accumulation_steps for stage in plan.stages]
    work = [each.stable_seconds * count for each, count in zip(prediction.predicted.stages, counts, strict=True)]
    most, mean = max(work), sum(work) / len(work)
    slow = [index for index, seconds in enumerate(work) if seconds >= ALIKE * most]
    others = [index for index in range(len(work)) if index not in slow]
    layer = max((work[index] / max(1, len(plan.stages[index].layers)) for index in others), default=0.0)
    room = sum(int((most - work[index]) / layer) for index in others) if layer > 0 else 0
    return Balance(
        slowest=tuple(slow),
        longer=most / mean - 1.0 if mean > 0 else 0.0,
        waiting_seconds=most - mean,
        may_move=room >= len(slow) and all(len(plan.stages[index].layers) > 1 for index in slow),
    )
