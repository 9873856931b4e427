"""The plan of a run, from its flags or from its plan file.

    plan_from_flags    flags -> plan: stages of one shape, the same overlap on every layer
    plan_of_run        the plan that a run builds and executes, from its flags or from --plan FILE, checked

`plan_argument.py` completes the flags of a command line by its --plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron.training.cli.config import Config, OverlapConfig
from megatron.training.cli.flags.table import spelling
from megatron.training.cli.rules.moe import (
    listed_run,
    overlap_flag,
    require_executable,
    static_capacity_factor,
    unnamed_gate,
)
from megatron.training.cli.sizes import ParallelLayout, batch_sizes, chunk_sizes, parallel_layout, stage_chunks
from megatron.training.cli.validation import validate
from megatron.training.plan_values import (
    config_of_stage,
    recompute_values,
    says_recomputation,
    single_stage_plan,
    with_values,
)
from moe_overlap.describe.errors import ConfigError, require
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.capabilities import (
    refuse_cut_blocks,
    refuse_narrow_precision,
    refuse_unsupported,
    require_cuttable,
)
from moe_overlap.plan.gates import check_gate
from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.plan.plan import Devices, Named, Offload, Plan, Precision, Recompute, StagePlan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import content_sha256, load_plan
from moe_overlap.plan.sizes import GRADIENT_BYTES
from moe_overlap.plan.uniform_overlap import BYTES_FLAG, OverlapWords, overlap_from_words

# From flags to a plan


def plan_from_flags(config: Config, model: ModelDescription, world_size: int) -> Plan:
    """The plan that the flags of a validated configuration describe.

    Args:
        model: `describe_model` of the same configuration.
        world_size: number of processes; stage s owns the s-th of PP equal ranges of ranks, as in megatron-core.
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
        precision=precision_of(config),
        pipeline_schedule="interleaved-1f1b" if layout.virtual > 1 else "1f1b",
        embedding_stage=0,
        mtp_stage=layout.pipeline - 1 if model.mtp_layers else None,
        loss_stage=layout.pipeline - 1,
        stages=stages,
        transfers=(),
        predicted=None,
        static_capacity_factor=static_capacity_factor(config),
    )


def precision_of(config: Config) -> Precision:
    """The precision of the flags, named after the narrowest products."""
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
    # The stages of a replica are neighbours; a stage has ranks of all replicas, with tensor and context ranks fastest.
    firsts = range(index * per_replica, layout.world_size, per_replica * layout.pipeline)
    return tuple(first + place for first in firsts for place in range(per_replica))


def gradient_chunk_bytes(config: Config, layout: ParallelLayout) -> int:
    """Bytes of a bucket of the executor's gradient reductions: --ddp-bucket-size or upstream's default; 0 without reductions."""
    if not config.parallel.overlap_grad_reduce:
        return 0
    parameters = config.parallel.ddp_bucket_size or max(40_000_000, 1_000_000 * layout.data * layout.context)
    return parameters * GRADIENT_BYTES


def _overlapped(
    config: Config, model: ModelDescription, layout: ParallelLayout, stage: StagePlan, index: int
) -> StagePlan:
    overlap = config.overlap
    partitions = 1 if overlap.moe_overlap_partitions is None else overlap.moe_overlap_partitions
    overlap_words = OverlapWords(
        partitions=partitions,
        range_word=overlap.moe_overlap_range,
        capacity_chunks=1 if overlap.moe_overlap_capacity_chunks is None else overlap.moe_overlap_capacity_chunks,
        gate=overlap.moe_gate or (unnamed_gate(config) if partitions > 1 else None),
        dispatcher="irregular",
        defer=overlap.defer_weight_gradients,
        max_deferred_bytes=overlap.max_deferred_bytes,
        micro_batches=overlap.moe_overlap_micro_batches,
        sends_late=overlap.moe_overlap_forward_send == "late",
    )
    if (
        overlap_words.partitions == overlap_words.capacity_chunks == overlap_words.micro_batches == 1
        and not overlap_words.defer
    ):
        return stage
    chunked = StageOverlap(
        gradient_chunk_bytes=gradient_chunk_bytes(config, layout),
        reduce_at_once=overlap.moe_overlap_grad_reduce == "at-once",
        overlap_param_gather=config.parallel.overlap_param_gather,
    )
    stage, ends = dataclasses.replace(stage, overlap=chunked), (index == 0, index == layout.pipeline - 1)
    decided = overlap_from_words(overlap_words, stage, model, holds_embedding=ends[0], holds_head=ends[1])
    return dataclasses.replace(stage, overlap=decided)


def _recompute(config: Config, chunks: tuple[tuple[int, int], ...]) -> Recompute:
    parallel = config.parallel
    if parallel.recompute_granularity is None:
        return Recompute()
    if parallel.recompute_granularity == "selective":
        # Selective recomputation covers every layer; a plan writes it as the number of layers of the longest chunk.
        longest = max(1, *(last - first for first, last in chunks))
        return Recompute(layers=longest, granularity="selective", modules=parallel.recompute_modules or ("core_attn",))
    assert parallel.recompute_num_layers is not None
    uniform = parallel.recompute_method == "uniform"
    return Recompute(layers=parallel.recompute_num_layers, granularity="uniform" if uniform else "full")


# The plan of a run

_DESCRIPTIVE = frozenset({"model", "cluster", "predicted", "mesh", "search_limits", "host_runs_ahead"})
"""Fields of a plan that describe its origin, not its execution."""


def plan_of_run(config: Config, model: ModelDescription, world_size: int) -> Plan:
    """The plan of a validated configuration, from which model, groups, optimizer and data are built.

    Raises:
        ConfigError: the file is no valid plan of this model, uses a field that the runtime does not execute, or disagrees with
            the flags (which `with_plan` completes by it).
    """
    source = config.overlap.plan
    if source is None:
        from_flags = plan_from_flags(config, model, world_size)
        _require_pairs_in_every_step(config, from_flags, "--moe-overlap-micro-batches")
        refuse_cut_blocks(from_flags, None)
        if config.precision.fp4 is not None:
            refuse_narrow_precision(
                from_flags, "--fp4-format", config.precision.fp4, f"drop it or {overlap_flag(config)}"
            )
        return from_flags
    plan = load_plan(source)
    validate_plan(plan, model, source)
    refuse_unsupported(plan, source)
    require_world(plan, source, world_size, "world size", "start")
    if plan.transfers:
        hold_unlike_stages(plan, source, config, model)
        return plan
    # No flag says another ZeRO level than 1, or what a stage offloads.
    from_flags = plan_from_flags(config, model, world_size)
    for field in ("zero_level", "offload"):
        from_flags = _with_fields_of(plan, from_flags, field)
    if not says_recomputation(plan):
        require_each_recomputation(plan, config, world_size)
        from_flags = _with_fields_of(plan, from_flags, "recompute")
    if overlap_flag(config) is None:
        _require_gate(source, plan, config)
        # Flags without overlap do not contradict the plan's overlap. All other fields must agree, and the overlap if flags name
        # one.
        from_flags = _with_fields_of(plan, from_flags, "overlap")
    _require_flags_of_overlap(source, plan, config)
    _require_equal(source, dataclasses.asdict(plan), dataclasses.asdict(from_flags))
    _require_pairs_in_every_step(config, plan, f"{source} micro_batches_in_flight")
    return plan


def hold_unlike_stages(plan: Plan, source: str, config: Config, model: ModelDescription) -> None:
    """Check stages of different shape one by one against the rules across flags, because flags describe one shape.

    Raises:
        ConfigError: a stage breaks a rule across flags, or the flags contradict a field that all stages share.
    """
    for index, stage in enumerate(plan.stages):
        of_stage, ranks = config_of_stage(config, plan, index), len(stage.devices.ranks)
        validate(of_stage, ranks)
        require_each_recomputation(single_stage_plan(plan, index), of_stage, ranks)
        from_flags = plan_from_flags(of_stage, model, ranks)
        for field in ("sequence_length", "global_batch_size", "precision", "static_capacity_factor"):
            _require_equal(f"{source} {field}", getattr(plan, field), getattr(from_flags, field))
    _require_alike_balance(plan, source, config)
    for index in (0, plan.loss_stage):
        tensor = plan.stages[index].tensor
        rule = f"the vocabulary, padded for stages[0] to {model.vocab_size} rows, is not divisible"
        fix = f"give --make-vocab-size-divisible-by a multiple of {tensor}"
        require(model.vocab_size % tensor == 0, f"{source} stages[{index}].tensor", tensor, rule, fix)
    if model.tied_embeddings:
        _require_exchangeable(plan, source)
    if overlap_flag(config) is None:
        _require_gate(source, plan, config)
    _require_flags_of_overlap(source, plan, config)


def _exchanging(config: Config) -> Config:
    """A dense model's configuration with the dispatcher of lists, which has no effect without experts."""
    return with_values(config, {"moe.moe_token_dispatcher_type": "irregular"})


def _require_exchangeable(plan: Plan, source: str) -> None:
    """Refuse first and last stages that cannot sum the gradients of a tied embedding."""
    for index in (0, plan.loss_stage):
        size = plan.stages[index].overlap.gradient_chunk_bytes
        if size:
            rule = "tied embeddings of stages of unlike shape are exchanged before replicas reduce"
            raise ConfigError(f"{source} stages[{index}].overlap.gradient_chunk_bytes", size, rule, "write 0")


def _require_alike_balance(plan: Plan, source: str, config: Config) -> None:
    """Refuse a balancing loss that averages over different numbers of samples on different stages.

    Losses of single sequences do not depend on the micro-batch.
    """
    if not config.moe.num_experts or not config.moe.moe_aux_loss_coeff:
        return
    kinds = config.moe.moe_router_load_balancing_type
    batch_level = [kind for kind in kinds if kind in ("aux_loss", "global_aux_loss")]
    first = plan.stages[0].micro_batch_size
    for index, stage in enumerate(plan.stages):
        if batch_level and stage.micro_batch_size != first:
            rule = (
                f"{batch_level[0]} is a mean over {stage.micro_batch_size} samples there and over {first} on stages[0]"
            )
            fix = "use seq_aux_loss or equal micro-batches"
            raise ConfigError(f"{source} stages[{index}].micro_batch_size", stage.micro_batch_size, rule, fix)


def require_world(plan: Plan, source: str, world_size: int | None, subject: str, verb: str) -> None:
    """Raise ConfigError if a plan is for another number of processes; None stands for any number."""
    processes = f"{plan.world_size} process{'es' if plan.world_size > 1 else ''}"
    fits = world_size in (None, plan.world_size)
    require(fits, subject, world_size, f"{source} is for {processes}", f"{verb} {plan.world_size}")


def _require_pairs_in_every_step(config: Config, plan: Plan, subject: str) -> None:
    """Require that every batch, also the smallest and the evaluation's, has the micro-batches that the plan interleaves."""
    evaluated = config.training.eval_global_batch_size
    for stage in plan.stages:
        sizes, in_flight = batch_sizes(config, stage.data).sizes, stage.overlap.micro_batches_in_flight
        # The smallest of the ramp-up's and the evaluation's batches: with fewer micro-batches than are in flight, one would have
        # no partner.
        smallest = min(sizes if evaluated is None else (*sizes, evaluated))
        count = smallest // (stage.micro_batch_size * stage.data)
        rule = f"a step of {smallest} samples has {count} micro-batch on each data-parallel rank"
        fix = f"use batches of {in_flight * stage.micro_batch_size * stage.data} samples or more"
        require(in_flight <= count, subject, in_flight, rule, fix)


def _require_flags_of_overlap(source: str, plan: Plan, config: Config) -> None:
    """Require the flags that the executor of an overlapping plan needs in the model."""
    overlaps = [stage.overlap for stage in plan.stages]
    layers = [layer for overlap in overlaps for layer in overlap.layers]
    if plan.runs_lists:
        why = f"{source} has stages of unlike shape, whose list" if plan.transfers else source
        require_executable(config if config.moe.num_experts else _exchanging(config), why)
        at_the_end = not any(overlap.gradient_chunk_bytes for overlap in overlaps)
        rule = f"{source} reduces gradients at the end of the step (gradient_chunk_bytes 0)"
        require(not (config.parallel.overlap_grad_reduce and at_the_end), "--overlap-grad-reduce", "", rule, "drop it")
        waits = not all(overlap.reduce_at_once for overlap in overlaps)
        value, rule = (
            config.overlap.moe_overlap_grad_reduce,
            f"{source} reduces gradients in gaps (reduce_at_once false)",
        )
        require(value == "gaps" or not waits, "--moe-overlap-grad-reduce", value, rule, "drop it")
        sent, rule = config.overlap.moe_overlap_forward_send, f"{source} sends early (sends_late false)"
        late = all(overlap.sends_late for overlap in overlaps)
        require(sent == "early" or late, "--moe-overlap-forward-send", sent, rule, "drop it")
        gathers_late = not all(overlap.overlap_param_gather for overlap in overlaps)
        rule = f"{source} gathers weights at the end of the step (overlap_param_gather false)"
        require(
            not (config.parallel.overlap_param_gather and gathers_late), "--overlap-param-gather", "", rule, "drop it"
        )
        _require_bytes(source, plan, config)
    if plan.has_stores:
        require_flags_of_stores(source, config)
        moves, rule = any(stage.offload.optimizer for stage in plan.stages), f"{source} offloads the moments of Adam"
        require(
            not moves or config.optimizer.optimizer == "adam",
            "--optimizer",
            config.optimizer.optimizer,
            rule,
            "use adam",
        )
    if any(layer.mechanism == "partitioned" for layer in layers):
        require_cuttable(listed_run(config))


def require_flags_of_stores(source: str, config: Config) -> None:
    """Refuse flags of megatron-core's DDP and distributed optimizer, whose place parameter stores take."""
    rule = f"{source} has another ZeRO level than 1 or offloads, and megatron-core's optimizer does not hold its states"
    for path in (
        "optimizer.grad_reduce_in_bf16",
        "precision.use_precision_aware_optimizer",
        "device.optimizer_cpu_offload",
        "overlap.moe_overlap_cuda_graphs",
    ):
        group, field = path.split(".")
        require(not getattr(getattr(config, group), field), spelling(path), "", rule, "drop it")


def refuse_flag(subject: str, planned: Any, flag: str, flag_value: Any) -> None:
    """Raise ConfigError for a flag that contradicts a plan's field."""
    shown = " ".join(map(str, flag_value)) if isinstance(flag_value, tuple) else flag_value
    rule = f"{flag} is written" if flag_value is True else f"{flag} says {shown}"
    raise ConfigError(subject, planned, rule, "drop the flag or correct the plan")


def _require_bytes(source: str, plan: Plan, config: Config) -> None:
    """Compare the bytes of gradient reductions and of deferred weight gradients with the flags that are set."""
    parameters, bound = config.parallel.ddp_bucket_size, config.overlap.max_deferred_bytes
    for s, stage in enumerate(plan.stages):
        subject, overlap = f"{source} stages[{s}].overlap", stage.overlap
        if parameters is not None and overlap.gradient_chunk_bytes not in (0, parameters * GRADIENT_BYTES):
            flag_value = f"{parameters} parameters of {GRADIENT_BYTES} bytes"
            refuse_flag(
                f"{subject}.gradient_chunk_bytes", overlap.gradient_chunk_bytes, "--ddp-bucket-size", flag_value
            )
        if bound != OverlapConfig().max_deferred_bytes and overlap.max_deferred_bytes not in (0, bound):
            refuse_flag(f"{subject}.max_deferred_bytes", overlap.max_deferred_bytes, BYTES_FLAG, bound)


def gate_of_run(config: Config, plan: Plan) -> str | None:
    """The gate of every MoE layer: that of --moe-gate, else that of the plan's layers; None is megatron-core's router."""
    planned = [layer.gate for stage in plan.stages for layer in stage.overlap.layers if layer.gate is not None]
    return config.overlap.moe_gate or next(iter(planned), None)


def _require_gate(source: str, plan: Plan, config: Config) -> None:
    """Compare the gates of a plan's layers with --moe-gate, or with the default gate if it is not set."""
    named = config.overlap.moe_gate
    for s, stage in enumerate(plan.stages):
        for n, layer in enumerate(stage.overlap.layers):
            if named is None and layer.gate is not None and layer.gate == unnamed_gate(config):
                check_gate(layer.gate, config.moe)
            else:
                _require_equal(f"{source} stages[{s}].overlap.layers[{n}].gate", layer.gate, named)


def _with_fields_of(plan: Plan, flagged: Plan, field: str) -> Plan:
    """The plan of flags that leave a field of the stages open, with that field from another plan."""
    # The caller's `_require_equal` names the difference.
    if len(plan.stages) != len(flagged.stages):
        return flagged
    pairs = zip(flagged.stages, plan.stages, strict=True)
    stages = (dataclasses.replace(stage, **{field: getattr(planned, field)}) for stage, planned in pairs)
    return dataclasses.replace(flagged, stages=tuple(stages))


def require_each_recomputation(plan: Plan, config: Config, world_size: int) -> None:
    """Check every stage's recomputation against the rules across flags.

    Raises:
        ConfigError: the first rule that a stage breaks.
    """
    for recompute in dict.fromkeys(stage.recompute for stage in plan.stages):
        # Flags limit one number of layers by the smallest stage; a plan's numbers were checked for each stage.
        one_layer = dataclasses.replace(recompute, layers=1) if recompute.granularity == "full" else recompute
        validate(with_values(config, recompute_values(one_layer)), world_size)


def _require_equal(place: str, planned: Any, flagged: Any) -> None:
    for where, value, flag_value in _differences(place, planned, flagged):
        raise ConfigError(where, value, f"the flags say {flag_value}", "make the flags and the plan agree")


def _differences(place: str, planned: Any, flagged: Any) -> Iterator[tuple[str, Any, Any]]:
    """The places where two plans, or two values of one field, differ, with both values."""
    both_are_dicts = isinstance(planned, dict) and isinstance(flagged, dict)
    if both_are_dicts and planned.keys() == flagged.keys():
        for name, value in planned.items():
            if name not in _DESCRIPTIVE:
                inside = f"{place} {name}" if " " not in place else f"{place}.{name}"
                yield from _differences(inside, value, flagged[name])
    elif isinstance(planned, (list, tuple)) and isinstance(flagged, (list, tuple)) and len(planned) == len(flagged):
        for index, (value, flag_value) in enumerate(zip(planned, flagged, strict=True)):
            yield from _differences(f"{place}[{index}]", value, flag_value)
    elif planned != flagged:
        yield place, planned, flagged
