"""`--plan FILE` on a command line: the plan's values apply, and written flags must agree with them.

A plan holds the parallel layout, the batch, the precision, recomputation and overlap of a run. The flags give the rest: the
model (its gate and router included) and the settings of training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron.training.cli.arguments import ParsedArguments
from megatron.training.cli.config import Config
from megatron.training.cli.flags.table import spelling
from megatron.training.plan_flags import precision_of, refuse_flag, require_world
from megatron.training.plan_model import require_model_of_flags
from megatron.training.plan_values import (
    CHUNK_FIELDS,
    layout_values,
    recompute_values,
    says_recomputation,
    single_stage_plan,
    with_values,
)
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.capabilities import refuse_unsupported
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import load_plan

SHAPE_FLAGS = (
    ("training.micro_batch_size", "micro_batch_size"),
    ("parallel.tensor_model_parallel_size", "tensor"),
    ("parallel.context_parallel_size", "context"),
    ("parallel.expert_model_parallel_size", "expert"),
    ("parallel.expert_tensor_parallel_size", "expert_tensor"),
)
"""Configuration fields whose flags set a field of the stages."""


def with_plan(parsed: ParsedArguments, world_size: int | None = None) -> ParsedArguments:
    """A command line completed by its --plan: layout, batch, precision and recomputation of flags that were not written.

    The gate stays a fact of the model that only flags set, because it changes the mathematics.

    Args:
        world_size: number of processes of a run; a dry run takes its own --world-size, or the plan's.
    Raises:
        ConfigError: the plan cannot be read or executed, is of another model or for another number of processes, or disagrees
            with a written flag.
    """
    source = parsed.config.overlap.plan
    if source is None:
        return parsed
    plan = plan_of_flag(source)
    validate_plan(plan, source=source)
    refuse_unsupported(plan, source)
    if parsed.dry_run:
        require_world(plan, source, parsed.world_size, "--world-size", "use")
    else:
        require_world(plan, source, world_size, "world size", "start")
    written = parsed.written_fields()
    # Flags can describe one shape only: with stages of different shape, that of the first as if it were the only stage.
    said_by_flags = single_stage_plan(plan, 0) if plan.transfers else plan
    values = layout_values(said_by_flags, parsed.config.model.mtp_num_layers or 0)
    if plan.transfers:
        _require_no_layout_flags(plan, source, parsed, written)
    for path, field, planned, expected in _written_as_flags(said_by_flags):
        written_value = _value_at(parsed.config, path)
        if path in written and written_value != expected:
            refuse_flag(f"{source} {field}", planned, spelling(path), written_value)
    _require_precision(plan, source, parsed.config, written)
    if not written.isdisjoint(CHUNK_FIELDS):  # `plan_of_run` compares the chunks that these flags make together.
        values = {path: value for path, value in values.items() if path not in CHUNK_FIELDS}
    if "parallel.tensor_model_parallel_size" in written:  # --sequence-parallel belongs to it, and has no off switch.
        del values["parallel.sequence_parallel"]
    if parsed.config.training.step_batch_size_schedule is not None:
        del values["training.global_batch_size"]
    lists = (plan.transfers or plan.has_stores) and parsed.config.moe.num_experts
    if lists or any(layer.dispatcher == "irregular" for stage in plan.stages for layer in stage.overlap.layers):
        values["moe.moe_token_dispatcher_type"] = "irregular"
    config = with_values(parsed.config, {path: value for path, value in values.items() if path not in written})
    require_model_of_flags(plan, source, config, parsed.name)
    return dataclasses.replace(
        parsed,
        config=config,
        world_size=plan.world_size if parsed.dry_run else parsed.world_size,
        layout_world=len(plan.stages[0].devices.ranks) if plan.transfers else None,
    )


def _require_no_layout_flags(plan: Plan, source: str, parsed: ParsedArguments, written: frozenset[str]) -> None:
    """Refuse a flag that gives all stages one value of a field in which they differ."""
    for path, field in SHAPE_FLAGS:
        values = [getattr(stage, field) for stage in plan.stages]
        if path in written and len(set(values)) > 1:
            shown = ", ".join(map(str, values))
            rule = f"{source} says {shown} for its stages, and a flag one value for all"
            raise ConfigError(spelling(path), _value_at(parsed.config, path), rule, "drop the flag")
    for path in ("parallel.pipeline_model_parallel_size", *CHUNK_FIELDS, "parallel.use_tp_pp_dp_mapping"):
        if path in written:
            rule = f"{source} has stages of unlike shape, which flags cannot say"
            raise ConfigError(spelling(path), _value_at(parsed.config, path), rule, "drop the flag")


def plan_of_flag(source: str) -> Plan:
    """The plan of --plan FILE; a file that is no plan is refused under the name of the flag."""
    try:
        return load_plan(source)
    except ConfigError as error:
        if error.subject != source or error.value != "":  # The user must correct a field of the plan, not the flag.
            raise
        raise ConfigError("--plan", source, error.rule, error.fix) from error


def _written_as_flags(plan: Plan) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield configuration field, plan field, its value, and the value that the flag must have if it is written."""
    stage, values = plan.stages[0], layout_values(plan, 0)
    yield "model.seq_length", "sequence_length", plan.sequence_length, plan.sequence_length
    yield "training.global_batch_size", "global_batch_size", plan.global_batch_size, plan.global_batch_size
    stages = len(plan.stages)
    yield "parallel.pipeline_model_parallel_size", "stages", f"({stages} entries)", stages
    for path, field in SHAPE_FLAGS:
        yield path, f"stages[0].{field}", getattr(stage, field), getattr(stage, field)
    if stages > 1 and stage.data > 1:
        path, ranks = "parallel.use_tp_pp_dp_mapping", f"({len(stage.devices.ranks)} ranks)"
        yield path, "stages[0].devices.ranks", ranks, values[path]
    for index, stage in enumerate(plan.stages):
        if index and says_recomputation(plan):
            break
        recompute, flag_values = stage.recompute, recompute_values(stage.recompute)
        for name, field, planned in (
            ("granularity", "granularity", recompute.granularity),
            ("method", "granularity", recompute.granularity),
            ("num_layers", "layers", recompute.layers),
            ("modules", "modules", " ".join(recompute.modules)),
        ):
            path = f"parallel.recompute_{name}"
            if (
                name == "granularity" or flag_values[path] is not None
            ):  # With another granularity the flag is reported as one without effect.
                yield path, f"stages[{index}].recompute.{field}", planned, flag_values[path]


def _require_precision(plan: Plan, source: str, config: Config, written: frozenset[str]) -> None:
    """Compare the plan's precision with those of --bf16, --fp16, --fp8-format and --fp4-format that are written."""
    for path in ("precision.fp4", "precision.fp8", "precision.fp16", "optimizer.bf16"):
        written_value = precision_of(config)
        if path in written and _value_at(config, path) and written_value != plan.precision:
            refuse_flag(f"{source} precision", plan.precision, spelling(path), written_value)


def _value_at(config: Config, path: str) -> Any:
    group, field = path.split(".")
    return getattr(getattr(config, group), field)
