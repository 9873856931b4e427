"""The plan that flags describe: all stages alike, the same overlap on every layer. Flags and `--plan` take one path from here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from megatron.training.config import Config
from megatron.training.describe import ParallelLayout, parallel_layout
from megatron.training.stages import chunk_sizes, stage_chunks
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.plan.overlap_from_words import OverlapWords, overlap_from_words
from moe_overlap.plan.payload import GRADIENT_BYTES
from moe_overlap.plan.plan import Devices, Named, Offload, Plan, Precision, Recompute, StagePlan


def plan_from_flags(config: Config, model: ModelDescription, world_size: int) -> Plan:
    """The plan of a validated configuration.

    Args:
        model: what `describe_model` made of the same configuration.
        world_size: processes of the run; stage s owns the s-th of PP equal ranges of ranks, as in megatron-core.
            With --use-tp-pp-dp-mapping it owns the s-th of PP equal parts of each replica's range instead.
    """
    layout = parallel_layout(config, world_size)
    assert config.model.seq_length is not None
    chunks = stage_chunks(chunk_sizes(config))
    alike = [_stage(config, layout, index, ranges) for index, ranges in enumerate(chunks)]
    stages = tuple(_overlapped(config, model, layout, stage, index) for index, stage in enumerate(alike))
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
    """The same plan for another number of micro-batches per step."""
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


def content_sha256(content: Any) -> str:
    """Hash of a JSON value, independent of the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
    part = layout.tensor * layout.context
    firsts = range(index * part, layout.world_size, part * layout.pipeline)
    return tuple(first + place for first in firsts for place in range(part))


def _gradient_chunk_bytes(config: Config, layout: ParallelLayout) -> int:
    """Of the executor's reductions between exchanges: --ddp-bucket-size, or upstream's default for it."""
    if not config.parallel.overlap_grad_reduce:
        return 0
    parameters = config.parallel.ddp_bucket_size or max(40_000_000, 1_000_000 * layout.data * layout.context)
    return parameters * GRADIENT_BYTES


def _overlapped(
    config: Config, model: ModelDescription, layout: ParallelLayout, stage: StagePlan, index: int
) -> StagePlan:
    overlap = config.overlap
    words = OverlapWords(
        partitions=1 if overlap.moe_overlap_partitions is None else overlap.moe_overlap_partitions,
        range_word=overlap.moe_overlap_range,
        capacity_chunks=1 if overlap.moe_overlap_capacity_chunks is None else overlap.moe_overlap_capacity_chunks,
        gate=overlap.moe_gate,
        dispatcher="irregular",
        defer=overlap.defer_weight_gradients,
        max_deferred_bytes=overlap.max_deferred_bytes,
        micro_batches=overlap.moe_overlap_micro_batches,
    )
    if words.partitions == words.capacity_chunks == words.micro_batches == 1 and not words.defer:
        return stage
    chunked = StageOverlap(gradient_chunk_bytes=_gradient_chunk_bytes(config, layout))
    stage, ends = dataclasses.replace(stage, overlap=chunked), (index == 0, index == layout.pipeline - 1)
    decided = overlap_from_words(words, stage, model, holds_embedding=ends[0], holds_head=ends[1])
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
