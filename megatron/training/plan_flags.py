"""The plan of a run: described by its flags, or read from --plan and held against them.

Flags describe a plan whose stages have equal sizes and whose layers have equal overlap (`plan_from_flags`). A plan that is read
must agree with the flags in everything they decide, because the flags build the model; flags that decide no overlap leave it to
the plan (`plan_of_run`). Both take one path from here on.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.training.cli.config import Config
from megatron.training.cli.rules.moe import listed_run, overlap_flag, require_executable, unnamed_gate
from megatron.training.cli.sizes import ParallelLayout, batch_sizes, chunk_sizes, parallel_layout, stage_chunks
from moe_overlap.describe.errors import ConfigError, require
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.capabilities import refuse_unsupported, require_cuttable
from moe_overlap.plan.gates import check_gate
from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.plan.plan import Devices, Named, Offload, Plan, Precision, Recompute, StagePlan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import content_sha256, load_plan
from moe_overlap.plan.sizes import GRADIENT_BYTES
from moe_overlap.plan.uniform_overlap import OverlapWords, overlap_from_words


def plan_from_flags(config: Config, model: ModelDescription, world_size: int) -> Plan:
    """The plan that the flags of a validated configuration describe.

    Args:
        model: `describe_model` of the same configuration.
        world_size: processes of the run; stage s owns the s-th of PP equal ranges of ranks, as in megatron-core.
            With --use-tp-pp-dp-mapping it owns the s-th of PP equal shares of each replica's range instead.
    """
    layout = parallel_layout(config, world_size)
    assert config.model.seq_length is not None
    chunks = stage_chunks(chunk_sizes(config))
    plain = [_stage(config, layout, index, ranges) for index, ranges in enumerate(chunks)]
    stages = tuple(_overlapped(config, model, layout, stage, index) for index, stage in enumerate(plain))
    return Plan(
        model=Named(name=model.name, sha256=content_sha256(dataclasses.asdict(model))),
        cluster=Named(name=f"{world_size}-processes", sha256=content_sha256({"processes": world_size})),
        sequence_length=config.model.seq_length,
        global_batch_size=layout.global_batch_size,
        precision=_precision(config),
        pipeline_schedule="interleaved-1f1b" if layout.virtual > 1 else "1f1b",
        embedding_stage=0,
        mtp_stage=layout.pipeline - 1 if model.mtp_layers else None,
        loss_stage=layout.pipeline - 1,
        stages=stages,
        transfers=(),
        predicted=None,
    )


def with_global_batch(plan: Plan, global_batch_size: int) -> Plan:
    """A copy of the plan with the number of micro-batches per step that this global batch needs."""
    stages = (
        dataclasses.replace(
            stage, gradient_accumulation_steps=global_batch_size // (stage.micro_batch_size * stage.data)
        )
        for stage in plan.stages
    )
    return dataclasses.replace(plan, global_batch_size=global_batch_size, stages=tuple(stages))


def _precision(config: Config) -> Precision:
    precision = config.precision
    if precision.fp4 is not None:
        return "nvfp4"
    if precision.fp8 is not None:
        return "mxfp8" if precision.fp8_recipe == "mxfp8" else "fp8"
    return "fp16" if precision.fp16 else "bf16" if config.optimizer.bf16 else "fp32"


def _stage(config: Config, layout: ParallelLayout, index: int, chunks: tuple[tuple[int, int], ...]) -> StagePlan:
    ranks = _stage_ranks(layout, index, by_replica=config.parallel.use_tp_pp_dp_mapping)
    return StagePlan(
        chunks=chunks,
        devices=Devices(mesh=(1, len(ranks)), ranks=ranks),
        micro_batch_size=layout.micro_batch_size,
        gradient_accumulation_steps=layout.micro_batches,
        tensor=layout.tensor,
        context=layout.context,
        data=layout.data,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        zero_level=1,
        recompute=_recompute(config, chunks),
        offload=Offload(),
    )


def _stage_ranks(layout: ParallelLayout, index: int, by_replica: bool) -> tuple[int, ...]:
    size = layout.world_size // layout.pipeline
    if not by_replica:
        return tuple(range(index * size, (index + 1) * size))
    per_replica = layout.tensor * layout.context
    firsts = range(index * per_replica, layout.world_size, per_replica * layout.pipeline)
    return tuple(first + place for first in firsts for place in range(per_replica))


def gradient_chunk_bytes(config: Config, layout: ParallelLayout) -> int:
    """Bucket size of the executor's gradient reductions: --ddp-bucket-size, or upstream's default for it; 0 without them."""
    if not config.parallel.overlap_grad_reduce:
        return 0
    parameters = config.parallel.ddp_bucket_size or max(40_000_000, 1_000_000 * layout.data * layout.context)
    return parameters * GRADIENT_BYTES


def _overlapped(
    config: Config, model: ModelDescription, layout: ParallelLayout, stage: StagePlan, index: int
) -> StagePlan:
    overlap = config.overlap
    partitions = 1 if overlap.moe_overlap_partitions is None else overlap.moe_overlap_partitions
    asked = OverlapWords(
        partitions=partitions,
        range_word=overlap.moe_overlap_range,
        capacity_chunks=1 if overlap.moe_overlap_capacity_chunks is None else overlap.moe_overlap_capacity_chunks,
        gate=overlap.moe_gate or (unnamed_gate(config) if partitions > 1 else None),
        dispatcher="irregular",
        defer=overlap.defer_weight_gradients,
        max_deferred_bytes=overlap.max_deferred_bytes,
        micro_batches=overlap.moe_overlap_micro_batches,
    )
    if asked.partitions == asked.capacity_chunks == asked.micro_batches == 1 and not asked.defer:
        return stage
    chunked = StageOverlap(gradient_chunk_bytes=gradient_chunk_bytes(config, layout))
    stage, ends = dataclasses.replace(stage, overlap=chunked), (index == 0, index == layout.pipeline - 1)
    decided = overlap_from_words(asked, stage, model, holds_embedding=ends[0], holds_head=ends[1])
    return dataclasses.replace(stage, overlap=decided)


def _recompute(config: Config, chunks: tuple[tuple[int, int], ...]) -> Recompute:
    parallel = config.parallel
    if parallel.recompute_granularity is None:
        return Recompute()
    if parallel.recompute_granularity == "selective":
        longest = max(1, *(last - first for first, last in chunks))
        return Recompute(layers=longest, granularity="selective", modules=parallel.recompute_modules or ("core_attn",))
    assert parallel.recompute_num_layers is not None
    uniform = parallel.recompute_method == "uniform"
    return Recompute(layers=parallel.recompute_num_layers, granularity="uniform" if uniform else "full")


_DESCRIPTIVE = frozenset({"model", "cluster", "predicted", "mesh", "search_limits"})
"""Fields of a plan that say where it comes from, not what runs."""


def plan_of_run(config: Config, model: ModelDescription, world_size: int) -> Plan:
    """The plan that a validated configuration runs: that of --plan, else that of the flags.

    Raises:
        ConfigError: the file is no valid plan of this model, asks for what the runtime cannot do yet, or disagrees with the
            flags, from which the model and its layout are built.
    """
    from_flags = plan_from_flags(config, model, world_size)
    if config.overlap.plan is None:
        _require_pairs_in_every_step(config, from_flags, "--moe-overlap-micro-batches")
        return from_flags
    source = config.overlap.plan
    plan = load_plan(source)
    validate_plan(plan, model, source)
    refuse_unsupported(plan, source)
    if overlap_flag(config) is None:
        _require_gate(source, plan, config)
        from_flags = _with_overlap_of(plan, from_flags)
    _require_flags_of_overlap(source, plan, config)
    _require_equal(source, dataclasses.asdict(plan), dataclasses.asdict(from_flags))
    _require_pairs_in_every_step(config, plan, f"{source} micro_batches_in_flight")
    return plan


def _require_pairs_in_every_step(config: Config, plan: Plan, subject: str) -> None:
    """Require every batch, the smallest and an evaluation's too, to hold the micro-batches that the plan interleaves."""
    evaluated = config.training.eval_global_batch_size
    for stage in plan.stages:
        sizes, in_flight = batch_sizes(config, stage.data).sizes, stage.overlap.micro_batches_in_flight
        smallest = min(sizes if evaluated is None else (*sizes, evaluated))
        count = smallest // (stage.micro_batch_size * stage.data)
        rule = f"a step of {smallest} samples has {count} micro-batch on each data-parallel rank"
        fix = f"use batches of {in_flight * stage.micro_batch_size * stage.data} samples or more"
        require(in_flight <= count, subject, in_flight, rule, fix)


def _require_flags_of_overlap(source: str, plan: Plan, config: Config) -> None:
    """Require the flags that the executor of an overlapping plan needs, as they build the model."""
    overlaps = [stage.overlap for stage in plan.stages]
    layers = [layer for overlap in overlaps for layer in overlap.layers]
    if any(overlap.is_listed for overlap in overlaps):
        require_executable(config, source)
        at_the_end = not any(overlap.gradient_chunk_bytes for overlap in overlaps)
        rule = f"{source} reduces gradients at the end of the step (gradient_chunk_bytes 0)"
        require(not (config.parallel.overlap_grad_reduce and at_the_end), "--overlap-grad-reduce", "", rule, "drop it")
    if any(layer.mechanism == "partitioned" for layer in layers):
        require_cuttable(listed_run(config))


def gate_of_run(config: Config, plan: Plan) -> str | None:
    """The gate of every MoE layer: the named one, else the one that a layer of the plan needs; None is megatron-core's router."""
    planned = [layer.gate for stage in plan.stages for layer in stage.overlap.layers if layer.gate is not None]
    return config.overlap.moe_gate or next(iter(planned), None)


def _require_gate(source: str, plan: Plan, config: Config) -> None:
    """Hold the gates of a plan's layers against --moe-gate, or against the gate that needs no name."""
    named = config.overlap.moe_gate
    for s, stage in enumerate(plan.stages):
        for n, layer in enumerate(stage.overlap.layers):
            if named is None and layer.gate is not None and layer.gate == unnamed_gate(config):
                check_gate(layer.gate, config.moe)
            else:
                _require_equal(f"{source} stages[{s}].overlap.layers[{n}].gate", layer.gate, named)


def _with_overlap_of(plan: Plan, flagged: Plan) -> Plan:
    """The plan of flags that decide no overlap, with the overlap of another plan."""

    def overlapped(stage: StagePlan, planned: StagePlan) -> StagePlan:
        return dataclasses.replace(stage, overlap=planned.overlap)

    if len(plan.stages) != len(flagged.stages):
        return flagged
    return dataclasses.replace(flagged, stages=tuple(map(overlapped, flagged.stages, plan.stages)))


def _require_equal(place: str, planned: Any, flagged: Any) -> None:
    if isinstance(planned, dict):
        for name, value in planned.items():
            if name not in _DESCRIPTIVE:
                _require_equal(f"{place} {name}" if " " not in place else f"{place}.{name}", value, flagged[name])
    elif isinstance(planned, (list, tuple)) and len(planned) == len(flagged):
        for index, (entry, expected) in enumerate(zip(planned, flagged, strict=True)):
            _require_equal(f"{place}[{index}]", entry, expected)
    elif planned != flagged:
        raise ConfigError(place, planned, f"the flags say {flagged}", "make the flags and the plan agree")
