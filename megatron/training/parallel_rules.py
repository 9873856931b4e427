"""Rules for the parallel sizes, the pipeline, recompute, and the world they need."""

from __future__ import annotations

import math

from megatron.training.config import Config
from megatron.training.describe import expert_tensor_size, smallest_world, stage_layers, virtual_stages
from megatron.training.flags import one_of
from megatron.training.overlap_rules import overlap_flag
from megatron.training.rule import Rule, at_least, divisors, require
from moe_overlap.describe.errors import ConfigError


def sizes_are_positive(config: Config) -> None:
    parallel = config.parallel
    at_least(
        1,
        (
            ("--tensor-model-parallel-size", parallel.tensor_model_parallel_size),
            ("--pipeline-model-parallel-size", parallel.pipeline_model_parallel_size),
            ("--context-parallel-size", parallel.context_parallel_size),
            ("--expert-model-parallel-size", parallel.expert_model_parallel_size),
            ("--expert-tensor-parallel-size", parallel.expert_tensor_parallel_size),
            ("--num-layers-per-virtual-pipeline-stage", parallel.num_layers_per_virtual_pipeline_stage),
            ("--num-virtual-stages-per-pipeline-rank", parallel.num_virtual_stages_per_pipeline_rank),
            ("--microbatch-group-size-per-virtual-pipeline-stage", parallel.microbatch_group_size_per_vp_stage),
            ("--decoder-first-pipeline-num-layers", parallel.decoder_first_pipeline_num_layers),
            ("--decoder-last-pipeline-num-layers", parallel.decoder_last_pipeline_num_layers),
            ("--recompute-num-layers", parallel.recompute_num_layers),
            ("--ddp-bucket-size", parallel.ddp_bucket_size),
            ("--distributed-timeout-minutes", parallel.distributed_timeout_minutes),
        ),
    )


def sequence_divides(config: Config) -> None:
    parallel, sequence = config.parallel, config.model.seq_length
    assert sequence is not None
    tensor = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    context = parallel.context_parallel_size
    if context > 1:
        rule = f"--context-parallel-size {context} cuts it into {2 * context} pieces"
        rule += f" and --sequence-parallel each rank's part over {tensor} ranks" if tensor > 1 else ""
        pieces = math.lcm(2 * context, context * tensor)
        require(sequence % pieces == 0, "--seq-length", sequence, rule, f"use a multiple of {pieces}")
    rule = f"--sequence-parallel splits it over {tensor} ranks"
    require(sequence % tensor == 0, "--seq-length", sequence, rule, f"use a multiple of {tensor}")


def layers_divide_by_stages(config: Config) -> None:
    parallel, layers = config.parallel, config.model.num_layers
    assert layers is not None
    stages = parallel.pipeline_model_parallel_size
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    for flag, value in (("--decoder-first-pipeline-num-layers", first), ("--decoder-last-pipeline-num-layers", last)):
        require(
            value is None or stages > 1,
            flag,
            value,
            "there is one stage",
            "drop it or raise --pipeline-model-parallel-size",
        )
    uneven = [value for value in (first, last) if value is not None]
    rest, middle = layers - sum(uneven), stages - len(uneven)
    if not uneven:
        rule = f"{layers} layers are not divisible by {stages}"
        require(layers % stages == 0, "--pipeline-model-parallel-size", stages, rule, f"use {divisors(layers)}")
        return
    flag, value = (
        ("--decoder-first-pipeline-num-layers", first)
        if first is not None
        else ("--decoder-last-pipeline-num-layers", last)
    )
    rule = f"{rest} of {layers} layers remain for {middle} other stages"
    fits = rest >= middle and (rest == 0 if middle == 0 else rest % middle == 0)
    require(fits, flag, value, rule, "let the rest be a multiple of the other stages")


def virtual_stages_fit(config: Config) -> None:
    parallel = config.parallel
    per_stage, count = parallel.num_layers_per_virtual_pipeline_stage, parallel.num_virtual_stages_per_pipeline_rank
    flag, value = ("--num-layers-per-virtual-pipeline-stage", per_stage)
    if per_stage is None:
        flag, value = ("--num-virtual-stages-per-pipeline-rank", count)
    group = parallel.microbatch_group_size_per_vp_stage
    if value is None:
        rule, fix = "there are no virtual stages", "add --num-virtual-stages-per-pipeline-rank or drop it"
        require(group is None, "--microbatch-group-size-per-virtual-pipeline-stage", group, rule, fix)
        return
    rule = "--num-virtual-stages-per-pipeline-rank says the same"
    require(per_stage is None or count is None, flag, value, rule, "give one of the two")
    stages = parallel.pipeline_model_parallel_size
    require(stages > 1, flag, value, "interleaving needs a pipeline", "add --pipeline-model-parallel-size or drop it")
    layers = stage_layers(config)
    even = len(set(layers)) == 1
    rule = "stages of unequal depth take the number of virtual stages"
    require(even or per_stage is None, flag, value, rule, "use --num-virtual-stages-per-pipeline-rank")
    for depth in layers:
        rule = f"the {depth} layers of a stage are not divisible by {value}"
        require(depth % value == 0, flag, value, rule, f"use {divisors(math.gcd(*layers))}")
    if virtual_stages(config) > 1:
        rule = "interleaved stages train wrongly with transfers in batches (2 stages)"
        require(parallel.overlap_p2p_comm, "--no-overlap-p2p-communication", "", rule, "drop the flag")
    rule = f"not supported: a virtual stage gives way after --pipeline-model-parallel-size = {stages} micro-batches"
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    require(group in (None, stages), flag, group, rule, f"use {stages} or drop it")


def recompute_is_full_or_selective(config: Config) -> None:
    parallel = config.parallel
    granularity, modules = parallel.recompute_granularity, parallel.recompute_modules
    if granularity != "full":
        rule, fix = "belongs to --recompute-granularity full", "add that flag or drop this one"
        require(parallel.recompute_method is None, "--recompute-method", parallel.recompute_method, rule, fix)
        require(
            parallel.recompute_num_layers is None, "--recompute-num-layers", parallel.recompute_num_layers, rule, fix
        )
    shown = " ".join(modules or ())
    rule, fix = "belongs to --recompute-granularity selective", "add that flag or drop this one"
    require(modules is None or granularity == "selective", "--recompute-modules", shown, rule, fix)
    no_experts = config.moe.num_experts is None and "moe" in (modules or ())
    require(not no_experts, "--recompute-modules", shown, "the model has no experts", "drop moe")
    if granularity == "selective":
        rule = "not supported: stages of unequal depth recompute whole layers only"
        fix = "use --recompute-granularity full"
        require(len(set(stage_layers(config))) == 1, "--recompute-granularity", granularity, rule, fix)


def full_recompute_fits_the_stages(config: Config) -> None:
    parallel = config.parallel
    method, number = parallel.recompute_method, parallel.recompute_num_layers
    if parallel.recompute_granularity != "full":
        return
    require(
        method is not None,
        "--recompute-granularity",
        "full",
        "needs a method",
        "add --recompute-method uniform or block",
    )
    depths = [layers // virtual_stages(config) for layers in stage_layers(config)]
    most = min(depths)
    fix = f"add --recompute-num-layers with 1 to {most}"
    require(number is not None, "--recompute-granularity", "full", "needs the number of layers", fix)
    assert number is not None
    rule = f"the smallest part of the model on a rank has {most} layers"
    require(number <= most, "--recompute-num-layers", number, rule, f"use 1 to {most}")
    for depth in depths:
        rule = f"{depth} layers on a rank do not divide into groups of {number}"
        fix = f"use {divisors(math.gcd(*depths))}, or --recompute-method block"
        require(method == "block" or depth % number == 0, "--recompute-num-layers", number, rule, fix)


def gradient_overlap_fits(config: Config) -> None:
    parallel = config.parallel
    if overlap_flag(config) is not None:
        return  # overlap_rules.py refuses both
    fits = parallel.overlap_grad_reduce or not parallel.overlap_param_gather
    require(
        fits, "--overlap-param-gather", "", "works on the buckets of --overlap-grad-reduce", "add --overlap-grad-reduce"
    )


def check_world(config: Config, world_size: int) -> None:
    """The rules that need the number of processes: parallel sizes, global batch, interleaving's micro-batches."""
    parallel, training = config.parallel, config.training
    tensor, stages, context = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    smallest = smallest_world(config)
    fix = f"start a multiple of {smallest} processes"
    rule = f"not a multiple of TP × PP × CP = {tensor} × {stages} × {context}"
    require(world_size % (tensor * stages * context) == 0, "world size", world_size, rule, fix)
    expert, sharing = parallel.expert_model_parallel_size, expert_tensor_size(config)
    rule = f"not a multiple of ETP × EP × PP = {sharing} × {expert} × {stages}"
    require(world_size % (sharing * expert * stages) == 0, "world size", world_size, rule, fix)
    micro = training.micro_batch_size
    assert micro is not None
    data = world_size // (tensor * stages * context)
    total = training.global_batch_size or micro * data
    _batches_divide(micro, total, data)
    _micro_batches_interleave(config, total // (micro * data))


def _batches_divide(micro: int, total: int, data: int) -> None:
    rule = f"global batch {total} is not a multiple of micro-batch × data-parallel = {micro} × {data}"
    if total % data:
        raise ConfigError("--global-batch-size", total, rule, f"use a multiple of {data * micro}")
    fitting = tuple(str(size) for size in range(1, total // data + 1) if (total // data) % size == 0)
    require(total % (micro * data) == 0, "--micro-batch-size", micro, rule, f"use {one_of(fitting)}")


def _micro_batches_interleave(config: Config, micro_batches: int) -> None:
    """megatron-core's interleaved schedule takes groups of as many micro-batches as there are stages."""
    if virtual_stages(config) == 1:
        return
    stages, size = config.parallel.pipeline_model_parallel_size, config.training.global_batch_size
    rule = f"{micro_batches} micro-batches do not fill groups of {stages}, as interleaved stages take them"
    subject, value = ("--global-batch-size", size) if size is not None else ("--pipeline-model-parallel-size", stages)
    fix = f"choose --global-batch-size for a multiple of {stages} micro-batches"
    require(micro_batches % stages == 0, subject, value, rule, fix)


PARALLEL_RULES: tuple[Rule, ...] = (
    sizes_are_positive,
    sequence_divides,
    layers_divide_by_stages,
    virtual_stages_fit,
    recompute_is_full_or_selective,
    full_recompute_fits_the_stages,
    gradient_overlap_fits,
)
