"""What the flags of attention and activation variants say in megatron-core's configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.training.config import Config
from moe_overlap.describe.model import ModelDescription

_tanh_gelu = partial(F.gelu, approximate="tanh")


def activation_fields(config: Config, model: ModelDescription, has_cuda: bool) -> dict[str, Any]:
    """What stands between an MLP's two products."""
    flags = config.model
    function: Callable[..., Tensor] = F.gelu
    if flags.squared_relu:
        function = squared_relu
    elif flags.openai_gelu:
        function = _tanh_gelu
    elif flags.quick_geglu:
        function = quick_gelu
    elif flags.swiglu:
        function = F.silu
    # megatron-core fuses GELU with a bias only, squared ReLU and GELU by tanh not at all, and quick GELU in routed experts only;
    # its fused SiLU forgets clamp and offset.
    only_experts = all(model.moe_layers) and not model.shared_expert_hidden_size
    changed = flags.activation_func_clamp_value is not None or flags.glu_linear_offset != 0
    fusible: dict[Callable[..., Tensor], bool] = {
        squared_relu: False,
        _tanh_gelu: False,
        quick_gelu: only_experts,
        F.silu: not changed,
        F.gelu: flags.add_bias_linear,
    }
    return {
        "gated_linear_unit": model.gated,
        "activation_func": function,
        "activation_func_clamp_value": flags.activation_func_clamp_value,
        "glu_linear_offset": flags.glu_linear_offset,
        "bias_activation_fusion": has_cuda and fusible[function],
    }


def attention_fields(config: Config) -> dict[str, Any]:
    """Windows and sinks."""
    frequency = config.attention.window_attn_skip_freq
    return {
        "window_size": config.attention.window_size,
        "window_attn_skip_freq": list(frequency) if isinstance(frequency, tuple) else frequency,
        "softmax_type": config.attention.softmax_type,
    }


def set_yarn(tc: TransformerConfig, config: Config) -> None:
    """Add the settings of YaRN, which megatron-core's GPTModel reads from attributes that its configuration does not declare."""
    attention = config.attention
    values = {
        "rotary_scaling_factor": config.model.rotary_scaling_factor,
        "original_max_position_embeddings": attention.yarn_original_max_position_embeddings or 4096,
        "beta_fast": 32.0 if attention.yarn_beta_fast is None else attention.yarn_beta_fast,
        "beta_slow": 1.0 if attention.yarn_beta_slow is None else attention.yarn_beta_slow,
        "mscale": config.model.mscale,
        "mscale_all_dim": config.model.mscale_all_dim,
        "correction_range_round_to_int": attention.yarn_correction_range_round_to_int,
    }
    for name, value in values.items():
        setattr(tc, f"yarn_{name}", value)
