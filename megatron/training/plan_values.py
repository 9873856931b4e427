"""The flags of a plan, as values of configuration fields.

layout_values     plan -> fields of its layout, batch, recomputation and precision
config_of_stage   one stage of different shape as a run of its own
arguments_of      fields -> a command line
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.training.cli.config import Config
from megatron.training.cli.flags.table import config_flags, flag_texts
from moe_overlap.plan.plan import Plan, Precision, Recompute

Values = dict[str, Any]
"""`group.field` of the configuration -> value."""
CHUNK_FIELDS = (
    "parallel.pipeline_model_parallel_layout",
    "parallel.num_layers_per_virtual_pipeline_stage",
    "parallel.num_virtual_stages_per_pipeline_rank",
    "parallel.decoder_first_pipeline_num_layers",
    "parallel.decoder_last_pipeline_num_layers",
    "parallel.account_for_embedding_in_pipeline_split",
    "parallel.account_for_loss_in_pipeline_split",
)
"""Fields that together give the layers of each chunk; none of them is meaningful without the others."""
_PRECISIONS: dict[Precision, Values] = {
    "fp32": {},
    "bf16": {"optimizer.bf16": True},
    "fp16": {"precision.fp16": True},
    "fp8": {"optimizer.bf16": True, "precision.fp8": "hybrid"},
    "mxfp8": {"optimizer.bf16": True, "precision.fp8": "hybrid", "precision.fp8_recipe": "mxfp8"},
    "nvfp4": {"optimizer.bf16": True, "precision.fp4": "e2m1"},
}
"""Flags of a precision. A plan distinguishes mxfp8 from the other recipes of fp8, of which `delayed` is the default."""
RECOMPUTE_FIELDS = tuple(f"parallel.recompute_{name}" for name in ("granularity", "method", "num_layers", "modules"))
"""Fields of the recomputation flags."""
_PRECISION_GROUPS = ("precision.", "optimizer.", "parallel.recompute_")
"""Fields that all stages share, and those that flags leave to the plan's file."""


def arguments_of(values: Mapping[str, Any]) -> list[str]:
    """The command line of configuration fields; a value that is the default needs no argument."""
    arguments: list[str] = []
    for flag in config_flags():
        value = values.get(f"{flag.group}.{flag.field}", flag.default)
        if value != flag.default:
            arguments += flag_texts(flag, value)
    return arguments


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """A configuration with other values of some fields."""
    groups: dict[str, Values] = {}
    for path, value in values.items():
        group, field = path.split(".")
        groups.setdefault(group, {})[field] = value
    changed = {group: dataclasses.replace(getattr(config, group), **fields) for group, fields in groups.items()}
    return dataclasses.replace(config, **changed)


def layout_values(plan: Plan, predictions: int) -> Values:
    """The fields of a plan whose stages have one shape, without its overlap.

    Args:
        predictions: multi-token-prediction layers of the model.
    """
    stage, parallel = plan.stages[0], "parallel."
    neighbours = stage.devices.ranks == tuple(range(len(stage.devices.ranks)))
    return {
        "model.seq_length": plan.sequence_length,
        "training.micro_batch_size": stage.micro_batch_size,
        "training.global_batch_size": plan.global_batch_size,
        f"{parallel}tensor_model_parallel_size": stage.tensor,
        f"{parallel}sequence_parallel": stage.tensor > 1,
        f"{parallel}context_parallel_size": stage.context,
        f"{parallel}expert_model_parallel_size": stage.expert,
        f"{parallel}expert_tensor_parallel_size": None if stage.expert_tensor == stage.tensor else stage.expert_tensor,
        f"{parallel}pipeline_model_parallel_size": len(plan.stages),
        f"{parallel}use_tp_pp_dp_mapping": not neighbours,
        **_chunk_values(plan, predictions),
        **(recompute_values(stage.recompute) if says_recomputation(plan) else dict.fromkeys(RECOMPUTE_FIELDS)),
        "optimizer.bf16": False,
        "precision.fp16": False,
        "precision.fp8": None,
        "precision.fp4": None,
        **_PRECISIONS[plan.precision],
    }


def single_stage_plan(plan: Plan, index: int) -> Plan:
    """One stage as the plan of a separate run, with all layers: flags can describe stages of different shape only one by one."""
    stage = plan.stages[index]
    layers = (0, max(last for other in plan.stages for _, last in other.chunks))
    ranks = tuple(range(len(stage.devices.ranks)))
    only_stage = dataclasses.replace(stage, chunks=(layers,), devices=dataclasses.replace(stage.devices, ranks=ranks))
    mtp = None if plan.mtp_stage is None else 0
    return dataclasses.replace(plan, stages=(only_stage,), transfers=(), embedding_stage=0, mtp_stage=mtp, loss_stage=0)


def config_of_stage(config: Config, plan: Plan, index: int) -> Config:
    """The configuration of one stage of different shape: the run's, with the sizes of this stage only."""
    values = layout_values(single_stage_plan(plan, index), config.model.mtp_num_layers or 0)
    return with_values(
        config, {path: value for path, value in values.items() if not path.startswith(_PRECISION_GROUPS)}
    )


def _chunk_values(plan: Plan, predictions: int) -> Values:
    """The layers of each chunk, by the shortest flags that describe them."""
    values: Values = dict.fromkeys(CHUNK_FIELDS) | {path: False for path in CHUNK_FIELDS if ".account_" in path}
    sizes = [[last - first for first, last in stage.chunks] for stage in plan.stages]
    virtual, depths = len(sizes[0]), [sum(chunks) for chunks in sizes]
    # Upstream's flags give the first and the last stage a depth of their own, and one depth to all others.
    middle = set(depths[1:-1]) or {depths[-1]}
    if all(len(set(chunks)) == 1 and chunks[0] > 0 for chunks in sizes) and len(middle) == 1:
        (depth,) = middle
        if virtual > 1:
            values["parallel.num_virtual_stages_per_pipeline_rank"] = virtual
        if depths[0] != depth:
            values["parallel.decoder_first_pipeline_num_layers"] = depths[0]
        if depths[-1] != depth:
            values["parallel.decoder_last_pipeline_num_layers"] = depths[-1]
        return values
    # Chunk by chunk over all stages, as the layout flag lists virtual stages.
    parts = ["t" * chunks[chunk] for chunk in range(virtual) for chunks in sizes]
    parts[0], parts[-1] = "E" + parts[0], parts[-1] + "m" * predictions + "L"
    return values | {"parallel.pipeline_model_parallel_layout": "|".join(parts)}


def says_recomputation(plan: Plan) -> bool:
    """Whether flags can express a plan's recomputation: it is the same on every stage."""
    first, *others = (recompute_values(stage.recompute) for stage in plan.stages)
    return all(values == first for values in others)


def recompute_values(recompute: Recompute) -> Values:
    """The recomputation flags' fields for one stage of a plan."""
    granularity, method, layers, modules = {
        "none": (None, None, None, None),
        "selective": ("selective", None, None, recompute.modules),
        "full": ("full", "block", recompute.layers, None),
        "uniform": ("full", "uniform", recompute.layers, None),
    }[recompute.granularity]
    return dict(zip(RECOMPUTE_FIELDS, (granularity, method, layers, modules), strict=True))
