"""The step of a plan that the closed form prices, at refined prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.features import Features
from moe_overlap.tuner.cost.listed_step import step_of_many
from moe_overlap.tuner.cost.predict import Machine, Prediction
from moe_overlap.tuner.cost.refined import NOT_REFINED
from moe_overlap.tuner.cost.simulate_step import simulate_step


def with_refined(
    closed: Prediction,
    plan: Plan,
    model: ModelDescription,
    graphs: Mapping[int, CapturedModel],
    machine: Machine,
    features: Features,
) -> Prediction:
    """A prediction whose seconds are scaled as refined prices scale its simulated step, all alike.

    Args:
        closed: the closed form's, which knows no refined prices; so do bytes.
    """

    def played(on: Machine, micro_batches: int) -> float:
        stages = (replace(stage, gradient_accumulation_steps=micro_batches) for stage in plan.stages)
        few = replace(plan, stages=tuple(stages))
        return simulate_step(few, model, graphs, on, features).simulation.step_seconds

    def step(on: Machine) -> float:
        count = plan.stages[0].gradient_accumulation_steps
        return step_of_many(lambda micro_batches: played(on, micro_batches), count, len(plan.stages))

    scale = step(machine) / step(replace(machine, refined=NOT_REFINED))
    predicted = closed.predicted
    stages = (
        replace(
            stage,
            stable_seconds=stage.stable_seconds * scale,
            first_seconds=stage.first_seconds * scale,
            last_seconds=stage.last_seconds * scale,
            exposed_communication_seconds=stage.exposed_communication_seconds * scale,
        )
        for stage in predicted.stages
    )
    predicted = replace(
        predicted,
        step_seconds=predicted.step_seconds * scale,
        tokens_per_second_per_gpu=predicted.tokens_per_second_per_gpu / scale,
        model_tflops_per_gpu=predicted.model_tflops_per_gpu / scale,
        stages=tuple(stages),
    )
    breakdown = {name: seconds * scale for name, seconds in closed.breakdown.items()}
    return replace(closed, predicted=predicted, breakdown=breakdown, mfu=closed.mfu / scale)
