"""Rules for the parallel sizes, the pipeline, recompute, and the world they need."""

from __future__ import annotations

import math

from megatron.training.cli.config import Config, Rule
from megatron.training.cli.sizes import (
    batch_sizes,
    chunk_sizes,
    counted_layers,
    expert_tensor_size,
    layout_parts,
    smallest_world,
    stage_counts,
    virtual_stages,
)
from moe_overlap.describe.errors import ConfigError, at_least, divisors, one_of, require

MOST_PROCESSES = 1_000_000
"""Limit of processes, since a plan names every rank."""


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
        step = math.lcm(2 * context, context * tensor)
        require(sequence % step == 0, "--seq-length", sequence, rule, f"use a multiple of {step}")
    rule = f"--sequence-parallel splits it over {tensor} ranks"
    require(sequence % tensor == 0, "--seq-length", sequence, rule, f"use a multiple of {tensor}")


def layers_divide_by_stages(config: Config) -> None:
    parallel, layers = config.parallel, counted_layers(config)
    stages = parallel.pipeline_model_parallel_size
    if parallel.pipeline_model_parallel_layout is not None:
        return
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
        if layers % stages:
            fix = f"use {divisors(layers)}{_unequal_stages(config, layers)}"
            raise ConfigError("--pipeline-model-parallel-size", stages, rule, fix)
        return
    flag, value = (
        ("--decoder-first-pipeline-num-layers", first)
        if first is not None
        else ("--decoder-last-pipeline-num-layers", last)
    )
    rule = f"{rest} of {layers} layers remain for {middle} other stages"
    fits = rest >= middle and (rest == 0 if middle == 0 else rest % middle == 0)
    assert value is not None
    others = layers - (sum(uneven) - value)
    near = [
        depth for depth in range(1, others) if middle and (others - depth) % middle == 0 and others - depth >= middle
    ]
    near = sorted(sorted(near, key=lambda depth: abs(depth - value))[:2])
    fix = f"use {one_of(tuple(map(str, near)))}" if near else "let the rest be a multiple of the other stages"
    require(fits, flag, value, rule, fix)


def _unequal_stages(config: Config, layers: int) -> str:
    """The flags under which the pipeline has as many stages as it should, although they do not divide the layers."""
    parallel, stages, virtual = config.parallel, config.parallel.pipeline_model_parallel_size, virtual_stages(config)
    accounts = {
        "--account-for-embedding-in-pipeline-split": parallel.account_for_embedding_in_pipeline_split,
        "--account-for-loss-in-pipeline-split": parallel.account_for_loss_in_pipeline_split,
    }
    ways = []
    if layers >= stages and not any(accounts.values()):
        # All stages but the last are equally deep; the last one has the head, so that fewer layers balance it.
        depths = [
            (depth, layers - (stages - 1) * depth)
            for depth in range(layers // (stages - 1), 0, -1)
            if depth % virtual == 0 and layers > (stages - 1) * depth and (layers - (stages - 1) * depth) % virtual == 0
        ]
        if depths:
            _, last = min(depths, key=lambda pair: (abs(pair[0] - pair[1]), pair[1]))
            ways.append(f"--decoder-last-pipeline-num-layers {last}")
    unset = [flag for flag, on in accounts.items() if not on]
    if unset and (layers + len(unset)) % (stages * virtual) == 0:
        ways.append(" ".join(unset))
    elif unset and (layers + 1) % (stages * virtual) == 0:
        ways.append(unset[-1])
    return f", or keep {stages} by {one_of((*ways, '--pipeline-model-parallel-layout'))}" if layers >= stages else ""


def layout_holds_the_model(config: Config) -> None:
    parallel, text = config.parallel, config.parallel.pipeline_model_parallel_layout
    accounts = (
        ("--account-for-embedding-in-pipeline-split", parallel.account_for_embedding_in_pipeline_split),
        ("--account-for-loss-in-pipeline-split", parallel.account_for_loss_in_pipeline_split),
    )
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    for other, on in accounts:
        rule, fix = "--decoder-*-pipeline-num-layers says what the stages hold", "give one of the two"
        require(not on or (first is None and last is None), other, "", rule, fix)
    if text is None:
        return
    flag = "--pipeline-model-parallel-layout"
    other_flags = (
        *accounts,
        ("--num-layers-per-virtual-pipeline-stage", parallel.num_layers_per_virtual_pipeline_stage is not None),
        ("--num-virtual-stages-per-pipeline-rank", parallel.num_virtual_stages_per_pipeline_rank is not None),
        ("--decoder-first-pipeline-num-layers", first is not None),
        ("--decoder-last-pipeline-num-layers", last is not None),
    )
    for other, on in other_flags:
        require(not on, other, "", f"{flag} says what the stages hold", "give one of the two")
    parts, stages = layout_parts(text), parallel.pipeline_model_parallel_size
    rule = f"names {len(parts)} stages for --pipeline-model-parallel-size {stages}"
    require(len(parts) % stages == 0, flag, text, rule, f"name a multiple of {stages}")
    rule, fix = "interleaving needs a pipeline", "add --pipeline-model-parallel-size or name one part"
    require(stages > 1 or len(parts) == 1, flag, text, rule, fix)
    letters, layers = "".join(parts), config.model.num_layers
    ends = letters.startswith("E") and letters.endswith("L") and letters.count("E") == letters.count("L") == 1
    require(ends, flag, text, "must begin with the one embedding E and end with the one loss L", "correct it")
    rule = f"holds {letters.count('t')} layers of --num-layers {layers}"
    require(letters.count("t") == layers, flag, text, rule, f"name {layers} layers t")
    require("mt" not in letters, flag, text, "prediction layers m come after the layers t", "correct it")
    predictions, named = config.model.mtp_num_layers or 0, letters.count("m")
    rule = f"holds {named} prediction layers of --mtp-num-layers {predictions}"
    require(named == predictions, flag, text, rule, f"name {predictions} layers m")
    rule = "prediction layers m stand in one part, the last of its rank"
    together = any(part.count("m") == named for part in parts[-stages:])
    require(together, flag, text, rule, f'end with "{"m" * named}L"')
    require(all(parts), flag, text, "names a part that holds nothing", "give every part a layer t")


def virtual_stages_fit(config: Config) -> None:
    parallel = config.parallel
    if parallel.pipeline_model_parallel_layout is not None:
        return
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
    layers = stage_counts(config)
    even = len(set(layers)) == 1
    rule = "stages of unequal depth take the number of virtual stages"
    require(even or per_stage is None, flag, value, rule, "use --num-virtual-stages-per-pipeline-rank")
    for depth in layers:
        rule = f"the {depth} layers of a stage are not divisible by {value}"
        fix = f"use {divisors(math.gcd(*layers))}, or say the chunks by --pipeline-model-parallel-layout"
        require(depth % value == 0, flag, value, rule, fix)
    if virtual_stages(config) > 1 and stages == 2:
        rule = "interleaved stages train wrongly with transfers in batches (2 stages)"
        require(parallel.overlap_p2p_comm, "--no-overlap-p2p-communication", "", rule, "drop the flag")


def recomputed_modules_are_there(config: Config) -> None:
    modules = config.parallel.recompute_modules or ()
    if config.parallel.recompute_granularity == "selective":
        shown, latent = " ".join(modules), config.model.multi_latent_attention
        rule = "mla_up_proj belongs to --multi-latent-attention"
        require(latent or "mla_up_proj" not in modules, "--recompute-modules", shown, rule, "drop mla_up_proj")


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
    depths = [layers for sizes in chunk_sizes(config) for layers in sizes if layers]
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
    fits = parallel.overlap_grad_reduce or not parallel.overlap_param_gather
    require(
        fits, "--overlap-param-gather", "", "works on the buckets of --overlap-grad-reduce", "add --overlap-grad-reduce"
    )


def check_world(config: Config, world_size: int) -> None:
    """The rules that need the number of processes: parallel sizes, global batch, interleaving's micro-batches."""
    parallel, training = config.parallel, config.training
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context = parallel.context_parallel_size
    smallest = smallest_world(config)
    rule = f"is more than {MOST_PROCESSES} processes"
    require(world_size <= MOST_PROCESSES, "world size", world_size, rule, "use fewer processes")
    fix = f"use a multiple of {smallest} ranks"
    rule = f"not a multiple of TP × PP × CP = {tensor} × {stages} × {context}"
    require(world_size % (tensor * stages * context) == 0, "world size", world_size, rule, fix)
    expert, sharing = parallel.expert_model_parallel_size, expert_tensor_size(config)
    rule = f"not a multiple of ETP × EP × PP = {sharing} × {expert} × {stages}"
    require(world_size % (sharing * expert * stages) == 0, "world size", world_size, rule, fix)
    by_replica, shared = parallel.use_tp_pp_dp_mapping and stages > 1, tensor * context
    rule = f"a replica's stages are neighbours only if TP × CP = {shared} equals ETP × EP = {sharing * expert}"
    fits = not by_replica or config.moe.num_experts is None or shared == sharing * expert
    require(fits, "--use-tp-pp-dp-mapping", "", rule, "drop the flag or change the sizes")
    micro = training.micro_batch_size
    assert micro is not None
    data = world_size // (tensor * stages * context)
    for total in batch_sizes(config, data).sizes:
        _batches_divide(config, micro, total, data)
        _micro_batches_interleave(config, total, total // (micro * data))
    group = (parallel.microbatch_group_size_per_vp_stage or stages) if virtual_stages(config) > 1 else 1
    _evaluations_divide(training.eval_global_batch_size, micro, data, group)


def _evaluations_divide(total: int | None, micro: int, data: int, group: int) -> None:
    """Evaluations have equally many micro-batches on each rank, in full groups if stages are interleaved."""
    fills = f" × {group}, the micro-batches that interleaved stages take at once" if group > 1 else ""
    rule = f"not a multiple of micro-batch × data-parallel = {micro} × {data}{fills}"
    multiple = micro * data * group
    fits = total is None or total % multiple == 0
    require(fits, "--eval-global-batch-size", total, rule, f"use a multiple of {multiple}")


def _batches_divide(config: Config, micro: int, total: int, data: int) -> None:
    flag, value = _batch_flag(config, total)
    rule = f"global batch {total} is not a multiple of micro-batch × data-parallel = {micro} × {data}"
    if total % data:
        raise ConfigError(flag, value, rule, f"use a multiple of {data * micro}")
    step = micro * data
    nearest = dict.fromkeys((total // step * step or step, (total // step + 1) * step))
    other = f", or {flag} {' or '.join(map(str, nearest))}" if flag == "--global-batch-size" else ""
    fix = f"use {divisors(total // data)}{other}"
    require(total % (micro * data) == 0, "--micro-batch-size", micro, rule, fix)


def _batch_flag(config: Config, total: int) -> tuple[str, str]:
    """The flag that sets a global batch, and its value."""
    training = config.training
    if training.step_batch_size_schedule is not None:
        return "--step-batch-size-schedule", " ".join(training.step_batch_size_schedule)
    if training.rampup_batch_size is not None and total != training.global_batch_size:
        return "--rampup-batch-size", " ".join(map(str, training.rampup_batch_size))
    return "--global-batch-size", str(total)


def _micro_batches_interleave(config: Config, total: int, micro_batches: int) -> None:
    """megatron-core's interleaved schedule takes micro-batches in groups; an incomplete group holds at least one per stage."""
    if virtual_stages(config) == 1:
        return
    stages = config.parallel.pipeline_model_parallel_size
    group = config.parallel.microbatch_group_size_per_vp_stage or stages
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    fits, rule = stages <= group <= micro_batches, f"lies outside {stages} stages to {micro_batches} micro-batches"
    require(group == stages or fits, flag, group, rule, f"use {stages}")
    rule = f"{micro_batches} micro-batches do not fill groups of {group}, as interleaved stages take them"
    subject, value = _batch_flag(config, total)
    if subject == "--global-batch-size" and config.training.global_batch_size is None:
        subject, value = "--pipeline-model-parallel-size", str(stages)
    fix = f"choose --global-batch-size for a multiple of {group} micro-batches"
    rest = micro_batches % group
    require(rest == 0 or (rest >= stages and micro_batches > group), subject, value, rule, fix)


PARALLEL_RULES: tuple[Rule, ...] = (
    sequence_divides,
    layers_divide_by_stages,
    layout_holds_the_model,
    virtual_stages_fit,
    recomputed_modules_are_there,
    full_recompute_fits_the_stages,
    gradient_overlap_fits,
)
