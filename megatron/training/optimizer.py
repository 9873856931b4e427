"""DDP, distributed optimizer and learning-rate schedule of a configuration, by megatron-core."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron.training.cli.config import Config
from megatron.training.cli.config import OptimizerConfig as OptimizerFlags
from megatron.training.cli.fused_gradients import gradient_fusion, sums_in_fp32
from megatron.training.cli.start import StartMachine, this_machine
from megatron.training.model.fused_gradients import fuse_weight_gradients
from megatron.training.model.stage_config import weight_type
from megatron.training.row_optimizer import allocate_moments, row_optimizer
from moe_overlap.plan.plan import Plan


def wrap_chunks(
    config: Config,
    plan: Plan,
    chunks: Sequence[torch.nn.Module],
    groups: ProcessGroupCollection,
    bucket_marks: Sequence[torch.nn.Parameter] = (),
    weight_gradients_come_later: bool = False,
    wrapper: Any = DistributedDataParallel,
) -> list[DistributedDataParallel]:
    """Wrap every chunk in DDP: gradient buffers that the data-parallel ranks reduce, and the sums of fused products.

    Args:
        plan: gives the precision.
        bucket_marks: parameters that begin a new bucket each; the instruction list then starts reductions and gathers, not DDP.
        weight_gradients_come_later: whether modules announce their weights' gradients themselves, after their backward pass.
        wrapper: DDP, or what takes its place with the arguments of its constructor.
    """
    parallel = config.parallel
    # With marks the instruction list starts every reduction and every gather. DDP's hooks would start them again, in the
    # order of its modules.
    bucket_by_bucket = parallel.overlap_grad_reduce and not bucket_marks
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=sums_in_fp32(config, plan),
        overlap_grad_reduce=bucket_by_bucket,
        overlap_param_gather=parallel.overlap_param_gather and not bucket_marks,
        use_distributed_optimizer=True,
        delay_wgrad_compute=weight_gradients_come_later,
        bucket_size=parallel.ddp_bucket_size if bucket_by_bucket else None,
        fp8_param_gather=config.precision.fp8_param_gather,
        reuse_grad_buf_for_mxfp8_param_ag=config.precision.reuse_grad_buf_for_mxfp8_param_ag,
        gradient_reduce_div_fusion=torch.cuda.is_available(),
    )
    with _alone_in_their_buckets(bucket_marks):
        wrapped = [
            wrapper(
                config=get_model_config(chunk),
                ddp_config=ddp_config,
                module=chunk,
                # As upstream: only the chunk that is needed first overlaps its buckets one by one.
                disable_bucketing=index > 0 and not bucket_marks,
                pg_collection=groups,
            )
            for index, chunk in enumerate(chunks)
        ]
    fuse_weight_gradients(wrapped, gradient_fusion(config, plan, machine_of_process()))
    return wrapped


def machine_of_process() -> StartMachine:
    """This machine, with a GPU if this process sees one."""
    return dataclasses.replace(this_machine(), cuda=torch.cuda.is_available())


@contextmanager
def _alone_in_their_buckets(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Make DDP close the bucket before and after each of these, as it does for tied embeddings (param_and_grad_buffer.py)."""
    unmarked = [parameter for parameter in parameters if not getattr(parameter, "shared_embedding", False)]
    for parameter in unmarked:
        parameter.shared_embedding = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter in unmarked:
            # Elsewhere the mark means tied embeddings, whose gradients are summed over stages: only DDP's constructor
            # may see it.
            del parameter.shared_embedding


def make_optimizer(
    config: Config, plan: Plan, chunks: Sequence[DistributedDataParallel], groups: ProcessGroupCollection
) -> Any:
    """megatron-core's distributed optimizer (ZeRO-1, also at one data-parallel rank), or that of parameter stores."""
    flags, dtype = config.optimizer, weight_type(config, plan)
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=flags.lr,
        min_lr=flags.min_lr,
        weight_decay=flags.weight_decay,
        adam_beta1=flags.adam_beta1,
        adam_beta2=flags.adam_beta2,
        adam_eps=flags.adam_eps,
        clip_grad=flags.clip_grad,
        decoupled_lr=flags.decoupled_lr,
        decoupled_min_lr=flags.decoupled_min_lr,
        apply_wd_to_qk_layernorm=flags.apply_wd_to_qk_layernorm,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
        log_num_zeros_in_grad=config.logging.log_num_zeros_in_grad,
        **(_loss_scale_fields(config) if dtype == torch.float16 else {}),
        **_gpu_fields(config),
    )
    if not isinstance(chunks[0], DistributedDataParallel):
        optimizer: Any = row_optimizer(optimizer_config, chunks, groups)
    else:
        optimizer = get_megatron_optimizer(
            optimizer_config,
            list(chunks),
            config_overrides=get_standard_config_overrides(optimizer_config),
            use_gloo_process_groups=False,
            pg_collection=groups,
        )
        for sharded in optimizer.chained_optimizers:
            if not sharded.is_stub_optimizer and any(g["is_expert_parallel"] for g in sharded.optimizer.param_groups):
                # The norm counts parameters once per rank of this group; megatron-core gives experts the dense layers' group.
                sharded.tp_group = groups.expt_tp
    if flags.optimizer == "sgd":
        _step_by_sgd(optimizer, flags, next(chunks[0].parameters()).device)
    elif not isinstance(chunks[0], DistributedDataParallel):
        allocate_moments(chunks, optimizer.chained_optimizers)
    return optimizer


def _loss_scale_fields(config: Config) -> dict[str, Any]:
    """The fields of megatron-core's loss scale; only fp16 has one."""
    precision = config.precision
    names = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    return {"fp16": True} | {name: getattr(precision, name) for name in names}


def _gpu_fields(config: Config) -> dict[str, Any]:
    """Settings of Transformer Engine's Adam and of the optimizer on the host. Not executed on a GPU so far."""
    precision, device = config.precision, config.device
    fields: dict[str, Any] = {}
    if precision.fp8 is not None:
        fields["fp8_recipe"] = precision.fp8_recipe
        fields["reuse_grad_buf_for_mxfp8_param_ag"] = precision.reuse_grad_buf_for_mxfp8_param_ag
    if precision.use_precision_aware_optimizer:
        types = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}
        fields["use_precision_aware_optimizer"] = True
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            fields[name] = types[getattr(precision, name)]
    if device.optimizer_cpu_offload:
        names = (
            "optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload "
            "overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params"
        )
        fields |= {name: getattr(device, name) for name in names.split()}
    return fields


def _step_by_sgd(optimizer: Any, flags: OptimizerFlags, device: torch.device) -> None:
    """Replace the inner optimizers: megatron-core 0.16.1 builds its distributed optimizer around an Adam only.

    It uses the inner optimizer's parameter groups and steps, which every optimizer of torch has.

    Args:
        device: device of the parameters. A fused SGD allocates a flag for its kernel on the device of the parameters in its
            constructor; with a flag on the host, the first step would be an illegal memory access.
    """
    for sharded in optimizer.chained_optimizers:
        if sharded.is_stub_optimizer:
            continue
        sgd = sgd_class()([torch.empty(0, device=device)], lr=flags.lr or 0.0, momentum=flags.sgd_momentum)
        # Set from outside, as megatron-core does: torch's constructors refuse shards, which are views.
        sgd.param_groups = sharded.optimizer.param_groups
        for group in sgd.param_groups:
            for name, value in sgd.defaults.items():
                # The groups were made for Adam: they lack momentum, nesterov and the like, but have rates and decay.
                group.setdefault(name, value)
        sharded.optimizer = sgd


def sgd_class() -> Any:
    """Transformer Engine's or apex's SGD if megatron-core found one and there is a GPU, else torch's."""
    return megatron_optimizer.SGD if torch.cuda.is_available() else torch.optim.SGD


def make_scheduler(config: Config, optimizer: Any, global_batch_size: int, train_steps: int) -> OptimizerParamScheduler:
    """Learning rate and weight decay by consumed samples, as upstream counts them.

    Args:
        train_steps: steps of the whole run; the default length of the decay.
    """
    flags = config.optimizer

    def samples(by_samples: int | None, by_iterations: int | None, default: int) -> int:
        if by_samples is not None:
            return by_samples
        return default if by_iterations is None else by_iterations * global_batch_size

    # By default the decay lasts as long as the run: all requested samples, even if they do not fill the last step.
    run_samples = config.training.train_samples or train_steps * global_batch_size
    decay = samples(flags.lr_decay_samples, flags.lr_decay_iters, run_samples)
    warmup: float = flags.lr_warmup_samples or flags.lr_warmup_iters * global_batch_size
    if flags.lr_warmup_fraction is not None:
        # Not rounded to a sample: it is only a divisor, and short runs have few samples.
        warmup = flags.lr_warmup_fraction * decay
    wsd_decay = samples(flags.lr_wsd_decay_samples, flags.lr_wsd_decay_iters, 0)
    constant = flags.weight_decay_incr_style == "constant"
    return OptimizerParamScheduler(
        optimizer,
        init_lr=flags.lr_warmup_init,
        max_lr=flags.lr,
        min_lr=flags.min_lr,
        lr_warmup_steps=warmup,  # type: ignore[arg-type]
        lr_decay_steps=decay,
        lr_decay_style=flags.lr_decay_style,
        start_wd=flags.weight_decay if constant else flags.start_weight_decay,
        end_wd=flags.weight_decay if constant else flags.end_weight_decay,
        wd_incr_steps=run_samples,
        wd_incr_style=flags.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=flags.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=flags.override_opt_param_scheduler,
        wsd_decay_steps=wsd_decay or None,
        lr_wsd_decay_style=flags.lr_wsd_decay_style if flags.lr_decay_style == "WSD" else None,
    )
