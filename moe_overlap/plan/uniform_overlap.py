"""Uniform overlap: one mechanism for every mixture-of-experts layer of a plan, from flags or as a candidate of the tuner.

1. `OverlapWords` selects the mechanism: partitions and a range word, capacity chunks, or interleaved micro-batches; it can be
   combined with deferred weight gradients.
2. `overlap_from_words` builds the overlap of one stage; `with_uniform_overlap` applies it to all stages of a plan.
3. Both refuse mechanisms that the stage, the model or the settings of the run exclude; errors name the flags.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.capabilities import (
    ListedRun,
    refuse_cut_blocks,
    require_cuttable,
    require_listable,
)
from moe_overlap.plan.gates import require_partitionable
from moe_overlap.plan.lowering.deferral import default_slots
from moe_overlap.plan.overlap import (
    NO_OVERLAP,
    TUTEL_DEGREES,
    Dispatcher,
    Gate,
    LayerOverlap,
    RangeWord,
    StageOverlap,
    range_of_word,
)
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.rules.overlap import indivisible

PARTITIONS_FLAG, CHUNKS_FLAG = "--moe-overlap-partitions", "--moe-overlap-capacity-chunks"
MICRO_BATCHES_FLAG = "--moe-overlap-micro-batches"
DEFER_FLAG, BYTES_FLAG = "--defer-weight-gradients", "--max-deferred-bytes"


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapWords:
    """The overlap that flags request.

    Attributes:
        partitions: of every micro-batch; 1: not cut.
        range_word: the operators that run in partitions; ignored with 1 partition.
        capacity_chunks: of dispatch, experts and combine (the Tutel-style pipeline); 1: none.
        gate, dispatcher: of every mixture-of-experts layer; None: the router's and the dispatcher's flags decide.
        defer: whether weight gradients run under backward all-to-alls, in program order.
        max_deferred_bytes: most bytes that deferred weight gradients may keep alive; ignored without `defer`.
        micro_batches: number of interleaved micro-batches; 1: one after the other.
        sends_late: as in `StageOverlap`; ignored with 1 micro-batch.
    """

    partitions: int = 1
    range_word: RangeWord = "experts"
    capacity_chunks: int = 1
    gate: Gate | None = None
    dispatcher: Dispatcher | None = None
    defer: bool = False
    max_deferred_bytes: int = 0
    micro_batches: int = 1
    sends_late: bool = False

    @property
    def flag(self) -> str:
        """The flag that errors name: the first of the flags that request this overlap."""
        if self.partitions != 1:
            return PARTITIONS_FLAG
        if self.micro_batches != 1:
            return MICRO_BATCHES_FLAG
        return CHUNKS_FLAG if self.capacity_chunks != 1 else DEFER_FLAG


def with_uniform_overlap(plan: Plan, model: ModelDescription, request: OverlapWords, run: ListedRun) -> Plan:
    """The plan with the same overlap on every layer. Replaces the overlap it has, and drops its prediction.

    Args:
        request: an overlap that changes something. `sends_late` is derived from the links of the all-to-alls.
        run: the settings that no plan holds; its bucket bytes apply to every stage.
    Raises:
        ConfigError: the settings exclude the overlap, or `overlap_from_words` refuses it.
    """
    if run.refusal is not None:
        raise run.refusal
    require_listable(run, request.flag, request.capacity_chunks)
    if request.micro_batches > 1 and len(plan.stages) > 1:
        request = replace(request, sends_late=not all(all_to_alls_inside(stage, run.domain) for stage in plan.stages))
    if request.partitions > 1:
        assert request.gate is not None, "capacity passes from partition to partition in our gates only"
        require_partitionable(request.gate, request.range_word)
        require_cuttable(run)
    stages = []
    for index, stage in enumerate(plan.stages):
        reductions = StageOverlap(
            gradient_chunk_bytes=run.gradient_bucket_bytes,
            reduce_at_once=run.gradient_bucket_bytes > 0 and share_no_link(stage, run.domain),
            overlap_param_gather=run.overlap_param_gather,
        )
        bucketed = replace(stage, overlap=reductions)
        ends = {"holds_embedding": index == plan.embedding_stage, "holds_head": index == plan.loss_stage}
        stages.append(replace(stage, overlap=overlap_from_words(request, bucketed, model, **ends)))
    overlapped = replace(plan, stages=tuple(stages), predicted=None)
    refuse_cut_blocks(overlapped, None)
    return overlapped


def share_no_link(stage: StagePlan, domain: int) -> bool:
    """Whether all-to-alls stay inside domains of `domain` neighbouring ranks while reductions cross the network between them.

    Then neither slows the other down, and reductions need no gap between all-to-alls.
    """
    return all_to_alls_inside(stage, domain) and len({rank // domain for rank in stage.devices.ranks}) > 1


def all_to_alls_inside(stage: StagePlan, domain: int) -> bool:
    """Whether all-to-alls stay inside domains of `domain` neighbouring ranks."""
    size, ranks = stage.expert * stage.expert_tensor, stage.devices.ranks
    groups = (ranks[first : first + size] for first in range(0, len(ranks), size))
    return all(len({rank // domain for rank in group}) == 1 for group in groups)


def overlap_from_words(
    request: OverlapWords,
    stage: StagePlan,
    model: ModelDescription,
    *,
    holds_embedding: bool = True,
    holds_head: bool = True,
) -> StageOverlap:
    """The overlap of one stage.

    Args:
        stage: its chunks and sizes. Of its overlap, the fields on reductions and gathers are kept, all others are replaced.
        holds_embedding, holds_head: whether the stage begins the model, and ends it.
    Raises:
        ConfigError: partitions do not divide the micro-batch, the gate excludes the range, partitions are combined with capacity
            chunks, or there is no all-to-all to hide.
    """
    _check(request, stage, model)
    exchanges = stage.expert * stage.expert_tensor > 1
    head_apart = holds_head and not (model.tied_embeddings and holds_embedding)
    layers: list[LayerOverlap] = []
    for chunk in stage.chunks:
        last = head_apart and chunk == stage.chunks[-1]
        slots = default_slots(range(*chunk), model, exchanges, last) if request.defer else {}
        layers += [_layer(request, n, chunk, slots.get(n, {})) for n in range(*chunk) if model.moe_layers[n]]
    decided = tuple(layer for layer in layers if layer != LayerOverlap(layer=layer.layer))
    deferred = any(layer.weight_gradient_slots for layer in decided)
    return StageOverlap(
        gradient_chunk_bytes=stage.overlap.gradient_chunk_bytes,
        reduce_at_once=stage.overlap.reduce_at_once,
        overlap_param_gather=stage.overlap.overlap_param_gather,
        max_deferred_bytes=request.max_deferred_bytes if deferred else NO_OVERLAP.max_deferred_bytes,
        micro_batches_in_flight=request.micro_batches,
        sends_late=request.sends_late,
        layers=decided,
    )


def _layer(
    request: OverlapWords, layer: int, chunk: tuple[int, int], slots: dict[str, tuple[str, ...]]
) -> LayerOverlap:
    overlap = LayerOverlap(layer=layer, gate=request.gate, dispatcher=request.dispatcher, weight_gradient_slots=slots)
    if request.capacity_chunks > 1:
        return replace(overlap, mechanism="tutel", tutel_degree=request.capacity_chunks)
    if request.partitions == 1:
        return replace(overlap, mechanism="cross_micro_batch") if request.micro_batches > 1 else overlap
    first, last = range_of_word(request.range_word, layer, chunk)
    return replace(
        overlap,
        mechanism="partitioned",
        partitions=request.partitions,
        first_operator=first,
        last_operator=last,
        axis="batch",
    )


def _check(request: OverlapWords, stage: StagePlan, model: ModelDescription) -> None:
    if request.partitions < 1:
        raise ConfigError(PARTITIONS_FLAG, request.partitions, "must be at least 1", "use 1 to cut nothing")
    if request.micro_batches not in (1, 2):
        rule = "one backward and one forward pass are interleaved"
        raise ConfigError(MICRO_BATCHES_FLAG, request.micro_batches, rule, "use 2, or 1 to interleave nothing")
    if request.micro_batches > stage.gradient_accumulation_steps:
        rule = f"a step has {stage.gradient_accumulation_steps} micro-batch"
        raise ConfigError(MICRO_BATCHES_FLAG, request.micro_batches, rule, "raise --global-batch-size or drop the flag")
    chunks = request.capacity_chunks
    if chunks not in TUTEL_DEGREES:
        raise ConfigError(CHUNKS_FLAG, chunks, "must be 1, 2, 4 or 8", "choose one of them")
    if chunks > 1 and request.partitions > 1:
        rule = f"{PARTITIONS_FLAG} cuts the same all-to-alls another way"
        raise ConfigError(CHUNKS_FLAG, chunks, rule, "drop one of them")
    settings = [(PARTITIONS_FLAG, str(request.partitions))] if request.partitions > 1 else []
    settings += [(CHUNKS_FLAG, str(chunks))] if chunks > 1 else []
    settings += [(MICRO_BATCHES_FLAG, str(request.micro_batches))] if request.micro_batches > 1 else []
    settings += [(DEFER_FLAG, "")] if request.defer else []
    for flag, value in settings:
        if not any(model.moe_layers):
            raise ConfigError(flag, value, f"{model.name} has no mixture-of-experts layer", "drop the flag")
        if stage.expert * stage.expert_tensor == 1:
            rule = "nothing to hide: one expert rank exchanges no tokens"
            raise ConfigError(flag, value, rule, "drop the flag or use --expert-model-parallel-size 2 or more")
    if request.partitions > 1 and stage.micro_batch_size % request.partitions != 0:
        rule, fix = indivisible(stage.micro_batch_size)
        raise ConfigError(PARTITIONS_FLAG, request.partitions, rule, fix)
    if request.partitions > 1 and request.gate is not None:
        require_partitionable(request.gate, request.range_word)
    if request.defer and request.max_deferred_bytes < 1:
        rule = "deferred weight gradients hold their inputs"
        raise ConfigError(BYTES_FLAG, request.max_deferred_bytes, rule, "allow at least 1 byte")
