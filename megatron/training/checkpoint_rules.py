"""What a checkpoint must share with the run that loads it; each rule raises the user's error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.training.checkpoint_folder import Stored
from megatron.training.config import Config, OptimizerConfig
from megatron.training.describe import describe_model
from moe_overlap.describe.errors import ConfigError

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
"""Field of megatron-core's scheduler -> how a user knows it."""


def model_fingerprint(config: Config) -> dict[str, Any]:
    """The flags under which weights mean the same function: a difference that no tensor shape shows is found by them.

    Sizes are the derived ones, so that a default equals its value written out; the vocabulary, which is padded by layout, is
    left to the tensor shapes.
    """
    model = describe_model(config, vocab_size=1)
    return {
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
        "--window-attn-skip-freq": [int(window is not None) for window in model.windows],
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
    """Every flag that both sides know has one value."""
    saved = stored.mark["fingerprint"]
    differing = [flag for flag, value in fingerprint.items() if flag in saved and saved[flag] != value]
    if differing:
        flag, others = differing[0], differing[1:]
        more = f" (also different: {_some(others)})" if others else ""
        rule = f"step {stored.step} was saved with {flag} {saved[flag]}, this run has {fingerprint[flag]}{more}"
        raise ConfigError("--load", load, rule, SAME_MODEL)


def require_fit(stored: Stored, load: str, differences: Sequence[str]) -> None:
    """The tensors asked for are there, in their shapes."""
    if differences:
        rule = f"step {stored.step} is of another model ({_some(differences)})"
        raise ConfigError("--load", load, rule, SAME_MODEL)


def require_parts(stored: Stored, load: str, optimizer: Mapping[str, Any] | None, with_random_states: bool) -> None:
    """The checkpoint holds what is to be loaded.

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


def schedule_to_load(stored: Stored, load: str, mine: Mapping[str, Any], flags: OptimizerConfig) -> dict[str, Any]:
    """The saved state of the learning-rate schedule, fit for megatron-core's scheduler, which asserts that it equals the run's.

    Args:
        mine: the run's schedule.
    Raises:
        ConfigError: they differ, and no flag says which one holds.
    """
    saved = dict(stored.mark["scheduler"])
    # Lengths that a constant schedule carries without using them: a longer run has other ones.
    for style, length in (("wd_incr_style", "wd_incr_steps"), ("lr_decay_style", "lr_decay_steps")):
        if mine[style] == saved[style] == "constant":
            saved[length] = mine[length]
    differing = [key for key in SCHEDULE_FLAGS if saved[key] != mine[key]]
    if differing and not (flags.override_opt_param_scheduler or flags.use_checkpoint_opt_param_scheduler):
        key = differing[0]
        rule = f"step {stored.step} was saved with {SCHEDULE_FLAGS[key]} {saved[key]}, this run has {mine[key]}"
        fix = "add --override-opt-param-scheduler for this run's, or --use-checkpoint-opt-param-scheduler for the saved one"
        raise ConfigError("--load", load, rule, fix)
    return saved


def _some(phrases: Sequence[str]) -> str:
    more = f"; and {len(phrases) - 3} more" if len(phrases) > 3 else ""
    return "; ".join(phrases[:3]) + more
