"""Rules between a checkpoint and the run that loads it; each raises the user's error. No torch.

In order: the checkpoint that a run starts from; whether it is of the same model (flags, then tensors); whether it holds the
parts that the run loads; the learning-rate schedule that holds if both differ.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.training.checkpoint.folder import Stored, choose, non_persistent_folder
from megatron.training.cli.config import CheckpointConfig, Config, OptimizerConfig
from megatron.training.cli.sizes import describe_model
from moe_overlap.describe.errors import ConfigError

PRETRAINED = "--pretrained-checkpoint"
SAME_MODEL = "give the flags of the saved model"
SCHEDULE_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "a warm-up (in samples) of",
    "lr_decay_steps": "a learning-rate decay (in samples; by default the length of the run) of",
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "a starting weight decay of",
    "end_wd": "a final weight decay of",
    "wd_incr_steps": "a weight-decay ramp (in samples; the length of the run) of",
    "wd_incr_style": "--weight-decay-incr-style",
}
"""Field of megatron-core's scheduler -> its name for the user."""


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences between a checkpoint and the state that a run loads; each a phrase with key and shape, equal on every rank.

    Attributes:
        shapes: keys of both with different shapes.
        absent: keys that the checkpoint lacks ("unexpected" in --dist-ckpt-strictness).
        extra: keys that the run does not load ("missing" in the load).
        absent_keys: the keys of `absent`.
        rows: rows of the vocabulary in the checkpoint and here, if their padding differs.
    """

    shapes: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    absent_keys: frozenset[str] = frozenset()
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint that a run starts from.

    Attributes:
        flag: the flag that named the folder.
        folder: the folder as the user wrote it.
        weights_alone: whether the run begins at step 0 with only these weights.
    """

    stored: Stored
    flag: str
    folder: str
    weights_alone: bool


RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
"""Variable in which torch's agent gives its ranks the number of allowed restarts."""


def falls_back(flags: CheckpointConfig) -> bool:
    """Whether an older checkpoint of --load replaces a damaged one: ranks restart by themselves, without a user to choose."""
    return os.environ.get(RESTARTS, "0") != "0" and flags.ckpt_step is None


def start_of(flags: CheckpointConfig, damaged: Collection[Path] = ()) -> Start | None:
    """The checkpoint of --load, or else that of --pretrained-checkpoint; None if there is nothing to load.

    Args:
        damaged: checkpoints of --load to skip if the run falls back.
    Raises:
        ConfigError: the checkpoint is incomplete or of another format, or is missing although the flags require it.
    """
    passed_over = damaged if falls_back(flags) else None
    if flags.load is not None:
        must_exist = flags.exit_on_missing_checkpoint and flags.pretrained_checkpoint is None
        non_persistent = None
        if flags.non_persistent_ckpt_type is not None and flags.ckpt_step is None:
            folder = non_persistent_folder(flags.load, flags.non_persistent_global_ckpt_dir)
            non_persistent = choose(str(folder), None, False, passed_over)
        stored = choose(flags.load, flags.ckpt_step, must_exist and non_persistent is None, passed_over)
        if non_persistent is not None and (stored is None or non_persistent.step > stored.step):
            stored = non_persistent
        if stored is not None:
            return Start(stored, "--load", flags.load, flags.finetune)
    if flags.pretrained_checkpoint is None:
        return None
    with told_of(PRETRAINED):
        stored = choose(flags.pretrained_checkpoint, None, exit_on_missing=False)
    if stored is None:
        raise ConfigError(PRETRAINED, flags.pretrained_checkpoint, "holds no checkpoint", "correct the path")
    return Start(stored, PRETRAINED, flags.pretrained_checkpoint, weights_alone=True)


def missing_note(flags: CheckpointConfig, start: Start | None) -> str | None:
    """A sentence on a --load without a checkpoint, and where the run begins instead; None if there is a checkpoint."""
    if flags.load is None or (start is not None and start.flag == "--load"):
        return None
    instead = "the run begins at step 0" if start is None else f"{start.flag} {start.folder} is loaded"
    return f"nothing from --load {flags.load}, which holds no checkpoint: {instead}"


@contextlib.contextmanager
def told_of(flag: str) -> Iterator[None]:
    """Make errors about --load name this flag instead."""
    try:
        yield
    except ConfigError as error:
        if error.subject != "--load":
            raise
        raise ConfigError(flag, error.value, error.rule, error.fix) from error


def model_fingerprint(config: Config, vocab_size: int) -> dict[str, Any]:
    """The flags that decide which function the weights compute: they show differences that no tensor shape shows.

    Sizes are the derived ones, so that a default equals its value written out.

    Args:
        vocab_size: that of the tokenizer: the tensors' is padded, by a multiple that depends on the layout.
    """
    model = describe_model(config, vocab_size)
    windowed = [int(window is not None) for window in model.windows[: model.num_layers]]
    return {
        "--vocab-size": vocab_size,
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "--num-attention-heads": model.num_attention_heads,
        "--num-query-groups": model.num_query_groups,
        "--kv-channels": model.kv_channels,
        "--position-embedding-type": config.model.position_embedding_type,
        "--rotary-percent": config.model.rotary_percent,
        "--rotary-interleaved": config.model.rotary_interleaved,
        "--normalization": config.model.normalization,
        "--rotary-scaling-factor": config.model.rotary_scaling_factor,
        "--use-rope-scaling": config.attention.use_rope_scaling,
        "--window-size": list(config.attention.window_size or ()),
        "--window-attn-skip-freq": windowed if any(windowed) else [],
        "--softmax-type": config.attention.softmax_type,
        "--swiglu": config.model.swiglu,
        "--squared-relu": config.model.squared_relu,
        "--openai-gelu": config.model.openai_gelu,
        "--quick-geglu": config.model.quick_geglu,
        "--activation-func-clamp-value": config.model.activation_func_clamp_value,
        "--glu-linear-offset": config.model.glu_linear_offset,
        "--parallel-attention-mlp": model.parallel_block,
        "--apply-layernorm-1p": config.model.layernorm_zero_centered_gamma,
        "--qk-layernorm": model.qk_layernorm,
        "--multi-latent-attention": config.model.multi_latent_attention,
        "--untie-embeddings-and-output-weights": not model.tied_embeddings,
        "--num-experts": model.num_experts,
        "--moe-layer-freq": [int(is_moe) for is_moe in model.moe_layers],
        "--moe-router-score-function": config.moe.moe_router_score_function,
        "--moe-shared-expert-gate": model.shared_expert_gate,
    }


def require_same_fingerprint(stored: Stored, load: str, fingerprint: Mapping[str, Any]) -> None:
    """Require equal values of every flag that both sides have."""
    saved = stored.mark["fingerprint"]
    differing = [flag for flag, value in fingerprint.items() if flag in saved and saved[flag] != value]
    if differing:
        flag, others = differing[0], differing[1:]
        more = f" (also different: {_some(others)})" if others else ""
        rule = f"step {stored.step} was saved with {flag} {saved[flag]}, this run has {fingerprint[flag]}{more}"
        raise ConfigError("--load", load, rule, SAME_MODEL)


def require_fit(stored: Stored, load: str, differing: Differences, strictness: str | None) -> tuple[str, ...]:
    """Require the tensors to load, in their shapes, as strictly as --dist-ckpt-strictness says.

    Returns:
        Lines for the user about keys that one side lacks.
    Raises:
        ConfigError: different shapes; keys that one side lacks, if the strictness makes them an error.
    """
    if strictness in (None, "raise_all"):
        wrong = (*differing.absent, *differing.extra)
    else:
        wrong = differing.absent if strictness in ("assume_ok_unexpected", "raise_unexpected") else ()
    if differing.shapes or wrong:
        rule = f"step {stored.step} is of another model ({_some((*differing.shapes, *wrong))})"
        fix = SAME_MODEL if differing.shapes else f"{SAME_MODEL}, or load what fits with --dist-ckpt-strictness log_all"
        raise ConfigError("--load", load, rule, fix)
    reported = {"log_unexpected": differing.absent, "log_all": (*differing.absent, *differing.extra)}.get(
        strictness or "", ()
    )
    return (f"{_some(reported)} (--dist-ckpt-strictness {strictness})",) if reported else ()


def require_parts(stored: Stored, load: str, optimizer: Mapping[str, Any] | None, with_random_states: bool) -> None:
    """Require the optimizer state and random-number states that are to be loaded.

    Args:
        optimizer: name and precision of this run's optimizer; None when its state is not loaded.
    """
    saved = stored.mark["optimizer"]
    if optimizer is not None and saved is None:
        rule = f"step {stored.step} holds no optimizer state (saved with --no-save-optim)"
        raise ConfigError("--load", load, rule, "add --no-load-optim or --finetune")
    if optimizer is not None:
        half = "--fp16" if "fp16" in (saved["precision"], optimizer["precision"]) else "--bf16"
        for key, flag in (("name", "--optimizer"), ("precision", half)):
            if saved[key] != optimizer[key]:
                rule = f"the optimizer state of step {stored.step} is of {saved[key]}, this run uses {optimizer[key]}"
                raise ConfigError("--load", load, rule, f"correct {flag} or add --no-load-optim")
    if with_random_states and not stored.mark["random_states"]:
        rule = f"step {stored.step} holds no random-number states (saved with --no-save-rng)"
        raise ConfigError("--load", load, rule, "add --no-load-rng")


def schedule_to_load(stored: Stored, load: str, of_run: Mapping[str, Any], flags: OptimizerConfig) -> dict[str, Any]:
    """The saved state of the learning-rate schedule, adjusted where megatron-core's scheduler would refuse it.

    Args:
        of_run: the run's schedule.
    Raises:
        ConfigError: they differ, and no flag chooses one.
    """
    saved = dict(stored.mark["scheduler"])
    # Lengths that a constant schedule carries without using them: a longer run has others.
    for style, length in (("wd_incr_style", "wd_incr_steps"), ("lr_decay_style", "lr_decay_steps")):
        if of_run[style] == saved[style] == "constant":
            saved[length] = of_run[length]
    differing = [key for key in SCHEDULE_FLAGS if saved[key] != of_run[key]]
    if differing and not (flags.override_opt_param_scheduler or flags.use_checkpoint_opt_param_scheduler):
        key = differing[0]
        rule = f"step {stored.step} was saved with {SCHEDULE_FLAGS[key]} {saved[key]}, this run has {of_run[key]}"
        fix = "add --override-opt-param-scheduler for this run's, or --use-checkpoint-opt-param-scheduler for the saved one"
        raise ConfigError("--load", load, rule, fix)
    return saved


def _some(phrases: Sequence[str]) -> str:
    more = f"; and {len(phrases) - 3} more" if len(phrases) > 3 else ""
    return "; ".join(phrases[:3]) + more
