"""The plan's layers in megatron-core's form, which numbers the layers of a stage by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.training.cli.config import Config
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan

# What the flags of attention and activation variants say in megatron-core's configuration.

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


class StageLayout(PipelineParallelLayerLayout):
    """What every stage holds, and where this rank's stage begins.

    megatron-core asks for the layers before a stage without naming it, and reads `parallel_state` for the answer.

    Args:
        predictions: multi-token-prediction layers, which stand with the loss.
    """

    def __init__(self, plan: Plan, stage: int, predictions: int) -> None:
        parts = [
            ["decoder"] * (last - first)
            for chunk in range(len(plan.stages[0].chunks))
            for first, last in (other.chunks[chunk] for other in plan.stages)
        ]
        parts[0].insert(0, "embedding")
        parts[-1] += ["mtp"] * predictions + ["loss"]
        super().__init__(parts, len(plan.stages))
        self._chunks = plan.stages[stage].chunks

    def get_layer_offset(
        self, layer_type: Any = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Layers of that type before a chunk of this rank; all prediction layers stand in one."""
        return self._chunks[vp_stage or 0][0] if layer_type == LayerType.decoder else 0
