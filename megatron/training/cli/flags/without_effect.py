"""Flags that are accepted and change nothing in this run, each with the reason.

A dry run and a start list them once, so that no user relies on a flag without effect. Most are settings of a feature that is
off: each function below yields pairs of flag and reason for one group of flags.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.cli.arguments import ParsedArguments
from megatron.training.cli.config import Config, DataConfig
from megatron.training.cli.flags.table import config_flags, spelling
from megatron.training.data.tokenizers import MODEL_TYPES
from moe_overlap.describe.errors import one_of

FLEX_FIELD, FLEX = "moe.moe_token_dispatcher_type", "flex"
"""The field whose settings have effect with only one of its choices."""
CURVES = (
    "log_memory_to_tensorboard",
    "log_world_size_to_tensorboard",
    "log_validation_ppl_to_tensorboard",
    "log_timers_to_tensorboard",
    "moe_per_layer_logging",
)
"""Fields of `logging` that draw curves on a board."""
YARN = (
    "model.rotary_scaling_factor",
    "model.mscale",
    "model.mscale_all_dim",
    "attention.yarn_original_max_position_embeddings",
    "attention.yarn_beta_fast",
    "attention.yarn_beta_slow",
    "attention.yarn_correction_range_round_to_int",
)
"""Settings of YaRN; latent attention reads those of `model`."""


def idle_flags(parsed: ParsedArguments) -> list[tuple[str, str]]:
    """Every flag without effect, with the reason."""
    config = parsed.config
    groups = (_settings(config), _parallel(config), _data(config.data), _files(config), _logging(config))
    return [*parsed.without_effect, *(pair for group in groups for pair in group)]


def is_active(config: Config, path: str) -> bool:
    """Whether a field ("group.field") has another value than its default, so that its settings count."""
    group, name = path.split(".")
    value = getattr(getattr(config, group), name)
    if path == FLEX_FIELD:
        return bool(value == FLEX)
    default = next(flag.default for flag in config_flags() if (flag.group, flag.field) == (group, name))
    return bool(value != default)


def _settings(config: Config) -> Iterator[tuple[str, str]]:
    """Settings of a feature that is off."""
    for flag in config_flags():
        value = getattr(getattr(config, flag.group), flag.field)
        owner = "moe.num_experts" if flag.group == "moe" else flag.of
        if owner is None or value == flag.default or is_active(config, owner):
            continue
        yield flag.off or flag.names[0], f"counts with {spelling(owner)}{' flex' if owner == FLEX_FIELD else ''} only"
    yield from _activation_and_positions(config)
    model = config.model
    if model.apply_query_key_layer_scaling:
        yield "--apply-query-key-layer-scaling", "attention scores are held in fp32, where they do not overflow"
    rotated = model.position_embedding_type == "rope" and not model.multi_latent_attention
    if model.rotary_seq_len_interpolation_factor is not None and not rotated:
        yield "--rotary-seq-len-interpolation-factor", "counts with --position-embedding-type rope only"
    if config.attention.use_rope_scaling and not rotated:
        yield "--use-rope-scaling", "counts with --position-embedding-type rope only"
    if config.optimizer.lr_decay_style != "WSD":
        for name in ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"):
            if is_active(config, f"optimizer.{name}"):
                yield spelling(f"optimizer.{name}"), "counts with --lr-decay-style WSD only"
    if config.optimizer.optimizer == "adam" and is_active(config, "optimizer.sgd_momentum"):
        yield "--sgd-momentum", "counts with --optimizer sgd only"
    yield from _scales(config)
    yield from _overlap(config)
    pairs = zip(config.moe.moe_router_load_balancing_type, config.moe.moe_aux_loss_coeff, strict=True)
    if config.moe.num_experts is not None and any(kind in ("sinkhorn", "none") and factor for kind, factor in pairs):
        yield "--moe-aux-loss-coeff", "this --moe-router-load-balancing-type has no auxiliary loss"


def _scales(config: Config) -> Iterator[tuple[str, str]]:
    """Settings of scales that megatron-core hands to no recipe, or to delayed scaling alone."""
    precision = config.precision
    if precision.fp8 is None:
        return
    if precision.fp8_interval != 1:
        yield "--fp8-interval", "Transformer Engine updates the scales in every step"
    if precision.fp8_recipe != "delayed":
        for name in ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo"):
            if is_active(config, f"precision.{name}"):
                yield spelling(f"precision.{name}"), "counts with --fp8-recipe delayed only"


def _overlap(config: Config) -> Iterator[tuple[str, str]]:
    """Settings of overlap that is off; with a plan they must agree with it, and are checked elsewhere."""
    overlap = config.overlap
    if overlap.plan is not None:
        return
    if (overlap.moe_overlap_partitions or 1) == 1 and is_active(config, "overlap.moe_overlap_range"):
        yield "--moe-overlap-range", "counts with --moe-overlap-partitions 2 or more only"
    if not overlap.defer_weight_gradients and is_active(config, "overlap.max_deferred_bytes"):
        yield "--max-deferred-bytes", "counts with --defer-weight-gradients only"


def _activation_and_positions(config: Config) -> Iterator[tuple[str, str]]:
    """Settings of gated activations, and of YaRN in either kind of attention."""
    model = config.model
    if not (model.swiglu or model.quick_geglu):
        for name in ("activation_func_clamp_value", "glu_linear_offset"):
            if is_active(config, f"model.{name}"):
                yield spelling(f"model.{name}"), "counts with --swiglu or --quick-geglu only"
    yarn, latent = model.position_embedding_type == "yarn", model.multi_latent_attention
    for flag in config_flags():
        path = f"{flag.group}.{flag.field}"
        of_latent = flag.group == "model"
        if path in YARN and is_active(config, path) and not yarn and not (latent and of_latent):
            also = " or --multi-latent-attention" if of_latent else ""
            yield flag.off or flag.names[0], f"counts with --position-embedding-type yarn{also} only"


def _parallel(config: Config) -> Iterator[tuple[str, str]]:
    parallel, moe = config.parallel, config.moe
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        yield "--sequence-parallel", "one tensor-parallel rank: there is nothing to split"
    if parallel.use_distributed_optimizer:
        yield "--use-distributed-optimizer", "always so here"
    if not parallel.overlap_p2p_comm:
        yield "--no-overlap-p2p-communication", "interleaved stages overlap their transfers, others do not"
    full = parallel.recompute_granularity == "full"
    for flag, value in (
        ("--recompute-method", parallel.recompute_method),
        ("--recompute-num-layers", parallel.recompute_num_layers),
    ):
        if value is not None and not full:
            yield flag, "counts with --recompute-granularity full only"
    if parallel.recompute_modules is not None and parallel.recompute_granularity != "selective":
        yield "--recompute-modules", "counts with --recompute-granularity selective only"
    if moe.num_experts is not None and moe.moe_expert_capacity_factor is None and moe.moe_token_drop_policy != "probs":
        yield "--moe-token-drop-policy", "nothing is dropped without --moe-expert-capacity-factor"


def reads_vocab_file(data: DataConfig) -> bool:
    """Whether --vocab-file counts: as a tokenizer's file, or as the number of ids of tokenized data."""
    return data.tokenizer_type == "GPT2BPETokenizer" or not (data.tokenizer_type or data.vocab_size)


def _data(data: DataConfig) -> Iterator[tuple[str, str]]:
    if data.tokenizer_model is not None and data.tokenizer_type not in MODEL_TYPES:
        yield "--tokenizer-model", f"read for --tokenizer-type {one_of(MODEL_TYPES)} only"
    if data.vocab_file is not None and not reads_vocab_file(data):
        yield "--vocab-file", "counts for GPT2BPETokenizer, and without --tokenizer-type and --vocab-size"
    if data.merge_file is not None and data.tokenizer_type != "GPT2BPETokenizer":
        yield "--merge-file", "read for --tokenizer-type GPT2BPETokenizer only"
    default = DataConfig()
    for name in ("tiktoken_pattern", "tiktoken_num_special_tokens"):
        if data.tokenizer_type != "TikTokenizer" and getattr(data, name) != getattr(default, name):
            yield spelling(f"data.{name}"), "counts for --tokenizer-type TikTokenizer only"


def _files(config: Config) -> Iterator[tuple[str, str]]:
    checkpoint = config.checkpoint
    if checkpoint.ckpt_format != "torch_dist":
        yield "--ckpt-format", "checkpoints are written as torch_dist"
    saving = (
        ("--save-interval", checkpoint.save_interval),
        ("--save-retain-interval", checkpoint.save_retain_interval),
        ("--keep-last-checkpoints", checkpoint.keep_last_checkpoints),
        ("--non-persistent-save-interval", checkpoint.non_persistent_save_interval),
        ("--async-save", checkpoint.async_save or None),
        ("--ckpt-assume-constant-structure", checkpoint.ckpt_assume_constant_structure or None),
    )
    for flag, value in saving:
        if value is not None and checkpoint.save is None:
            yield flag, "counts with --save only"
    loading = (
        ("--ckpt-step", checkpoint.ckpt_step),
        ("--finetune", checkpoint.finetune),
        ("--resume-with-changes", checkpoint.resume_with_changes),
        ("--exit-on-missing-checkpoint", checkpoint.exit_on_missing_checkpoint),
        ("--ckpt-fully-parallel-load", checkpoint.ckpt_fully_parallel_load),
        ("--dist-ckpt-strictness", checkpoint.dist_ckpt_strictness),
    )
    for flag, on in loading:
        if on and checkpoint.load is None and checkpoint.pretrained_checkpoint is None:
            yield flag, "counts with --load only"


def _logging(config: Config) -> Iterator[tuple[str, str]]:
    logging = config.logging
    for name in CURVES:
        if getattr(logging, name) and not (logging.tensorboard_dir or logging.wandb_project):
            yield spelling(f"logging.{name}"), "there is neither --tensorboard-dir nor --wandb-project"
    if logging.profile and not logging.use_pytorch_profiler:
        yield "--profile", "profiles with --use-pytorch-profiler only"
    if logging.use_pytorch_profiler and not logging.profile:
        yield "--use-pytorch-profiler", "counts with --profile only"
