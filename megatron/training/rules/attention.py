"""Rules for windows, sinks and scaled rotary positions."""

from __future__ import annotations

from megatron.training.config import Config
from megatron.training.rules.rule import Rule, at_least, require


def windows_fit(config: Config) -> None:
    size, frequency = config.attention.window_size, config.attention.window_attn_skip_freq
    layers, ahead = config.model.num_layers, config.model.mtp_num_layers or 0
    if size is None:
        return
    shown, (left, right) = ",".join(map(str, size)), size
    require(left >= -1, "--window-size", shown, "the first number counts tokens, or is -1 for all", "use -1 or more")
    rule = "attention is causal: nothing after a token is seen"
    require(right == 0, "--window-size", shown, rule, f"use {left},0")
    if isinstance(frequency, int):
        at_least(1, (("--window-attn-skip-freq", frequency),))
    elif frequency is not None:
        listed = "[" + ",".join(map(str, frequency)) + "]"
        assert layers is not None
        behind = f" and {ahead} behind them (--mtp-num-layers)" if ahead else ""
        rule = f"the list has {len(frequency)} entries for {layers} layers{behind}"
        require(len(frequency) == layers + ahead, "--window-attn-skip-freq", listed, rule, "give one entry per layer")


def yarn_fits(config: Config) -> None:
    model, attention, flag = config.model, config.attention, "--position-embedding-type"
    at_least(1, (("--rotary-scaling-factor", model.rotary_scaling_factor),))
    if model.position_embedding_type != "yarn":
        return
    rule, fix = "latent attention has rotary positions of its own", "use rope, and --rope-type yarn"
    require(not model.multi_latent_attention, flag, "yarn", rule, fix)
    rule = "YaRN rotates halves"
    require(not model.rotary_interleaved, "--rotary-interleaved", "", rule, "drop one of the two flags")
    rule = "YaRN rotates whole heads"
    require(model.rotary_percent == 1, "--rotary-percent", model.rotary_percent, rule, "use 1.0")
    original = attention.yarn_original_max_position_embeddings
    at_least(1, (("--yarn-original-max-position-embeddings", original),))
    fast, slow = attention.yarn_beta_fast, attention.yarn_beta_slow
    for name, value in (("--yarn-beta-fast", fast), ("--yarn-beta-slow", slow)):
        require(value is None or value > 0, name, value, "must be positive", "correct the value")
    fast, slow = fast or 32.0, slow or 1.0
    rule = f"--yarn-beta-fast {fast:g} is not above it"
    require(slow < fast, "--yarn-beta-slow", slow, rule, "correct one of them")


def llama_scaling_fits(config: Config) -> None:
    factor = config.attention.rope_scaling_factor
    at_least(1, (("--rope-scaling-factor", factor),))


ATTENTION_RULES: tuple[Rule, ...] = (windows_fit, yarn_fits, llama_scaling_fits)
