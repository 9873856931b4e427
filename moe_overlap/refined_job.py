"""What a trace and a prediction have to share for the one to refine the other: the model and the layout, overlap apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron.training.plan_flags import content_sha256
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.serialize import as_values

FREE_OF_PLAN = ("model", "cluster", "stages", "predicted")
FREE_OF_STAGE = ("overlap", "zero_level")
"""What may differ between a measured plan and the job's; what sharding the runtime does is in both the flags'."""


def model_fields(model: ModelDescription) -> dict[str, Any]:
    """What a model is, whatever it is called, as plain JSON values."""
    fields: dict[str, Any] = as_values(model)
    return {name: value for name, value in fields.items() if name != "name"}


def layout_fields(record: Plan | StagePlan) -> dict[str, Any]:
    """What has to be the same of a plan, or of a stage, as plain JSON values."""
    free: Sequence[str] = FREE_OF_PLAN if isinstance(record, Plan) else FREE_OF_STAGE
    return {f.name: as_values(getattr(record, f.name)) for f in dataclasses.fields(record) if f.name not in free}


def job_key(model: ModelDescription, plan: Plan) -> str:
    """Hash of all of it."""
    stages = [layout_fields(stage) for stage in plan.stages]
    return content_sha256({"model": model_fields(model), "plan": layout_fields(plan), "stages": stages})
