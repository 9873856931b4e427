"""What is executed and lowered today, a line per field. A valid plan outside is data, but refused before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.plan import Plan, StagePlan


@dataclass(frozen=True, slots=True)
class Limit:
    """What a field may be.

    Attributes:
        field: dotted name, from the plan or from a stage.
        allows: whether a value is executed.
        rule, fix: the rest of the error.
    """

    field: str
    allows: Callable[[Any], bool]
    rule: str
    fix: str


def _only(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


@dataclass(frozen=True, slots=True)
class Limits:
    """What the fields of a plan, of its stages and of their overlapped layers may be."""

    plan: tuple[Limit, ...]
    stage: tuple[Limit, ...]
    layer: tuple[Limit, ...]


LOWERED = Limits(
    plan=(
        Limit("pipeline_schedule", _only("1f1b", "interleaved-1f1b"), "not lowered", "use 1f1b or interleaved-1f1b"),
        Limit("embedding_stage", _only(0), "the embedding runs on the first stage", "write 0"),
    ),
    stage=(
        Limit("overlap.micro_batches_in_flight", _only(1, 2), "two micro-batches are interleaved at most", "write 2"),
    ),
    layer=(Limit("axis", _only(None, "batch"), "only the batch is cut", "write batch"),),
)
"""What `lower` knows."""
EXECUTED = Limits(
    plan=(
        Limit("transfers", _only(()), "stages of unlike shape are not executed", "give all stages one shape, write []"),
        Limit("precision", _only("fp32", "bf16", "fp16"), "not executed", "use fp32, bf16 or fp16"),
    ),
    stage=(
        Limit("zero_level", _only(0, 1), "ZeRO 2 and 3 are not executed", "write 1"),
        Limit("offload.weights", _only(0), "offloading is not executed", "write 0.0"),
        Limit("offload.gradients", _only(0), "offloading is not executed", "write 0.0"),
        Limit("offload.optimizer", _only(0), "offloading is not executed", "write 0.0"),
        Limit("offload.activations", _only(0), "offloading is not executed", "write 0.0"),
        Limit("zero_level", _only(1), "the distributed optimizer (ZeRO-1) is always on", "write 1"),
    ),
    layer=(
        Limit(
            "mechanism",
            _only("none", "partitioned", "tutel", "cross_micro_batch"),
            "not executed",
            "use none, partitioned, tutel or cross_micro_batch",
        ),
        Limit("dispatcher", _only(None, "irregular"), "not executed", "write irregular"),
    ),
)
"""What the runtime executes of that."""
NOTHING_OVERLAPPED = (
    Limit("overlap.gradient_chunk_bytes", _only(0), "no layer of this plan overlaps anything", "write 0"),
)
"""What only the executor does, which follows plans with overlapped layers."""
NARROW = ("fp8", "mxfp8", "nvfp4")
"""Precisions whose matrix products have 8 or 4 bits."""
SHAPE_FIELDS = ("micro_batch_size", "gradient_accumulation_steps", "tensor", "context", "data")
"""Stages that differ here need transfers."""
UNIFORM_FIELDS = (
    *SHAPE_FIELDS,
    "expert",
    "expert_tensor",
    "zero_level",
    "recompute.granularity",
    "recompute.modules",
    "offload",
    "overlap.gradient_chunk_bytes",
    "overlap.micro_batches_in_flight",
)
"""A run of plain flags gives every stage the same."""


def refuse_what_cannot_be_lowered(plan: Plan, source: str = "plan.json") -> None:
    """ConfigError for the first field that `lower` does not know."""
    _refuse_limits(plan, LOWERED, source)
    if plan.loss_stage != len(plan.stages) - 1:
        last = len(plan.stages) - 1
        raise ConfigError(f"{source} loss_stage", plan.loss_stage, "the loss runs on the last stage", f"write {last}")
    if plan.mtp_stage not in (None, plan.loss_stage):
        rule = "prediction layers run on the stage of the loss"
        raise ConfigError(f"{source} mtp_stage", plan.mtp_stage, rule, f"write {plan.loss_stage}")
    if plan.mtp_stage is not None and any(stage.overlap.is_listed for stage in plan.stages):
        rule = "multi-token prediction is not overlapped, and here layers are"
        raise ConfigError(f"{source} mtp_stage", plan.mtp_stage, rule, "write null or overlap nothing")
    for path, stage in _stages(plan):
        if plan.pipeline_schedule == "interleaved-1f1b" and stage.overlap.micro_batches_in_flight > 1:
            rule = "micro-batches are not interleaved under interleaved-1f1b"
            raise ConfigError(
                f"{source} {path}.overlap.micro_batches_in_flight",
                stage.overlap.micro_batches_in_flight,
                rule,
                "use 1f1b or write 1",
            )
        if stage.is_decoupled and stage.overlap.gradient_chunk_bytes > 0:
            subject = f"{source} {path}.overlap.gradient_chunk_bytes"
            rule = "with ZeRO 2 and 3 and with offloading gradients are reduced part by part"
            raise ConfigError(subject, stage.overlap.gradient_chunk_bytes, rule, "write 0")
        if plan.transfers and (stage.overlap.micro_batches_in_flight > 1 or plan.pipeline_schedule != "1f1b"):
            rule = f"stages of unlike shape run 1f1b, one micro-batch at a time, and {path} does not"
            raise ConfigError(f"{source} transfers", f"({len(plan.transfers)} entries)", rule, "use 1f1b")
    if not plan.transfers:
        _refuse_differences(plan, SHAPE_FIELDS, source)


def refuse_narrow_precision(plan: Plan, subject: str, value: str, fix: str) -> None:
    """ConfigError for fp8 or fp4 where the executor runs the step: it calls the layers, and not megatron-core's block of layers,
    which opens the library's context of narrow products around them.

    Args:
        subject, value: the field or flag that asks for it.
        fix: the rest of the error.
    """
    if plan.precision in NARROW and any(stage.overlap.is_listed for stage in plan.stages):
        rule = "layers that overlap are not executed in 8 or 4 bits: their products would run in the weights' type"
        raise ConfigError(subject, value, rule, fix)


def refuse_unsupported(plan: Plan, source: str = "plan.json") -> None:
    """ConfigError for the first field of a valid plan that the runtime does not execute today.

    Args:
        source: what the plan was read from, for the error.
    """
    refuse_what_cannot_be_lowered(plan, source)
    refuse_narrow_precision(plan, f"{source} precision", plan.precision, "use bf16 or overlap nothing")
    _refuse_limits(plan, EXECUTED, source)
    for path, stage in _stages(plan):
        _refuse_partial_selection(stage, f"{source} {path}.recompute.layers")
        refuse_cuts_of(stage, f"{source} {path}")
    _refuse_differences(plan, UNIFORM_FIELDS, source)
    if plan.stages[0].recompute.granularity != "selective":  # which counts the layers of each stage
        _refuse_differences(plan, ("recompute.layers",), source)
    if not any(stage.overlap.is_listed for stage in plan.stages):
        _refuse_values(plan.stages[0], NOTHING_OVERLAPPED, f"{source} stages[0].")


def _stages(plan: Plan) -> Iterator[tuple[str, StagePlan]]:
    return ((f"stages[{index}]", stage) for index, stage in enumerate(plan.stages))


def _refuse_limits(plan: Plan, limits: Limits, source: str) -> None:
    _refuse_values(plan, limits.plan, source)
    for path, stage in _stages(plan):
        _refuse_values(stage, limits.stage, f"{source} {path}.")
        for index, layer in enumerate(stage.overlap.layers):
            _refuse_values(layer, limits.layer, f"{source} {path}.overlap.layers[{index}].")


def _refuse_values(owner: object, limits: tuple[Limit, ...], prefix: str) -> None:
    head = prefix if prefix.endswith(".") else prefix + " "
    for limit in limits:
        value = attrgetter(limit.field)(owner)
        if not limit.allows(value):
            raise ConfigError(head + limit.field, _shown(value), limit.rule, limit.fix)


def _refuse_partial_selection(stage: StagePlan, subject: str) -> None:
    """Megatron recomputes the selected modules of every layer."""
    longest = max(last - first for first, last in stage.chunks)
    if stage.recompute.granularity == "selective" and stage.recompute.layers < longest:
        rule = f"selective recomputation covers every layer of a chunk ({longest})"
        raise ConfigError(subject, stage.recompute.layers, rule, f"write {longest}")


def refuse_cuts_of(stage: StagePlan, subject: str) -> None:
    """ConfigError for what the executor does not cut into partitions or chunks of capacity, or not with them."""
    for index, layer in enumerate(stage.overlap.layers):
        if layer.mechanism not in ("partitioned", "tutel"):
            continue
        if layer.mechanism == "partitioned" and layer.gate is None:
            rule = "only a gate of ours hands capacity to the next partition"
            raise ConfigError(f"{subject}.overlap.layers[{index}].gate", "null", rule, "write topk")
        if layer.mechanism == "tutel" and stage.recompute.granularity != "none":
            rule = "capacity chunks that are recomputed are not executed"
            raise ConfigError(f"{subject}.recompute.granularity", stage.recompute.granularity, rule, "write none")


def _refuse_differences(plan: Plan, fields: tuple[str, ...], source: str) -> None:
    first = plan.stages[0]
    for path, stage in _stages(plan):
        for field in fields:
            read = attrgetter(field)
            if read(stage) != read(first):
                value = _shown(read(stage))
                raise ConfigError(
                    f"{source} {path}.{field}",
                    value,
                    "differs from stages[0]; unlike stages are not executed",
                    "make all stages equal",
                )


def _shown(value: object) -> str:
    """A value in a short form; a structure is not shown."""
    if isinstance(value, tuple | dict):
        return f"({len(value)} entries)"
    return "null" if value is None else str(value) if isinstance(value, str | int | float) else ""
