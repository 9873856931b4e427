"""A stage of a plan in megatron-core's form: its TransformerConfig, and the layout by which megatron-core numbers its layers.

Layout, recomputation and precision come from the plan; the flags give facts of the model and settings of training.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megatron.training.cli.config import Config
from megatron.training.cli.fused_gradients import weight_kind
from megatron.training.model.layers.local_modules import transformer_engine_is_installed
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan, Recompute

_tanh_gelu = partial(F.gelu, approximate="tanh")


def transformer_config(
    config: Config, model: ModelDescription, plan: Plan, stage: int, layout: StageLayout | None = None
) -> TransformerConfig:
    """megatron-core's configuration of one stage.

    Args:
        config: validated flags.
        model: the derived sizes (`describe_model`).
        plan: the plan of the run.
        stage: index of the stage.
        layout: the layers of the stages of a pipeline; None without a pipeline.
    """
    dtype = weight_type(config, plan)
    has_cuda = torch.cuda.is_available()
    sizes: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "normalization": config.model.normalization,
        "layernorm_epsilon": config.model.norm_epsilon,
        "layernorm_zero_centered_gamma": config.model.layernorm_zero_centered_gamma,
        **activation_fields(config, model, has_cuda),
        **attention_fields(config),
        "add_bias_linear": config.model.add_bias_linear,
        "add_qkv_bias": config.model.add_qkv_bias,
        "qk_layernorm": config.model.qk_layernorm,
        "rotary_interleaved": config.model.rotary_interleaved,
        "attention_dropout": config.model.attention_dropout,
        "hidden_dropout": config.model.hidden_dropout,
        "init_method_std": config.model.init_method_std,
        "embedding_init_method_std": config.model.embedding_init_method_std,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "autocast_dtype": dtype,
        "pipeline_dtype": dtype,
        "calculate_per_token_loss": config.training.calculate_per_token_loss,
        # Experts add their biases themselves: megatron-core's grouped ones refuse the fusion.
        "bias_dropout_fusion": has_cuda and not (model.num_experts and config.model.add_bias_linear),
        # `fused_gradients.py` sets it on the products that have a kernel, once DDP has made the sums.
        "gradient_accumulation_fusion": False,
        # gloo sends from the output's own memory and does not keep it alive: freed under an overlapped send, garbage arrives.
        "deallocate_pipeline_outputs": has_cuda,
        "pipeline_model_parallel_layout": layout,
        "mtp_num_layers": model.mtp_layers or None,
        "mtp_loss_scaling_factor": config.model.mtp_loss_scaling_factor,
    }
    fields = sizes | _parallel_fields(config, plan, stage) | _precision_fields(config, plan) | _offload_fields(config)
    if model.num_experts:
        fields |= _moe_fields(config, model, plan.stages[stage].data)
    if model.latent_attention is None:
        tc = TransformerConfig(**fields)
        if config.model.position_embedding_type == "yarn":
            set_yarn(tc, config)
        return tc
    latent = {
        "multi_latent_attention": True,
        "q_lora_rank": model.latent_attention.q_lora_rank,
        "kv_lora_rank": model.latent_attention.kv_lora_rank,
        "qk_head_dim": model.latent_attention.qk_head_dim,
        "qk_pos_emb_head_dim": model.latent_attention.qk_pos_emb_head_dim,
        "v_head_dim": model.latent_attention.v_head_dim,
        "rope_type": config.model.rope_type or "yarn",
        "rotary_base": config.model.rotary_base,
        "rotary_percent": config.model.rotary_percent,
        "rotary_scaling_factor": config.model.rotary_scaling_factor,
        "mscale": config.model.mscale,
        "mscale_all_dim": config.model.mscale_all_dim,
    }
    return MLATransformerConfig(**fields, **latent)


def weight_type(config: Config, plan: Plan) -> torch.dtype:
    """The type of weights and activations; master weights are fp32."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[weight_kind(config, plan)]


def _precision_fields(config: Config, plan: Plan) -> dict[str, Any]:
    """fp8 and fp4 by Transformer Engine: the plan switches them on, the flags choose the recipe. Not run on a GPU so far."""
    precision = config.precision
    fields: dict[str, Any] = {
        "deterministic_mode": config.training.deterministic_mode,
        "moe_router_padding_for_quantization": precision.moe_router_padding_for_quantization
        or precision.moe_router_padding_for_fp8,
    }
    if plan.precision in ("fp8", "mxfp8"):
        names = (
            "fp8 fp8_recipe fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad "
            "fp8_quantizer_factory first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"
        )
        fields |= {name: getattr(precision, name) for name in names.split()}
        fields["fp8_param"] = precision.fp8_param_gather
    if plan.precision == "nvfp4":
        fields |= {name: getattr(precision, name) for name in ("fp4", "fp4_recipe", "fp4_quantizer_factory")}
        fields["fp4_param"] = precision.fp4_param_gather
    return fields


def _offload_fields(config: Config) -> dict[str, Any]:
    """Fields for offloaded activations and for the backend of the flex dispatcher."""
    device = config.device
    fields: dict[str, Any] = {}
    if device.fine_grained_activation_offloading:
        fields |= {
            "fine_grained_activation_offloading": True,
            "offload_modules": list(device.offload_modules),
            "min_offloaded_tensor_size": device.min_offloaded_tensor_size,
        }
    if device.cpu_offloading_num_layers:
        fields |= {"cpu_offloading": True, "cpu_offloading_num_layers": device.cpu_offloading_num_layers}
    if config.moe.moe_token_dispatcher_type == "flex":
        fields |= {
            "moe_enable_deepep": device.moe_enable_deepep,
            "moe_flex_dispatcher_backend": device.moe_flex_dispatcher_backend,
        }
        for name in ("moe_deepep_num_sms", "moe_hybridep_num_sms"):
            if getattr(device, name) is not None:
                fields[name] = getattr(device, name)
    return fields


def _parallel_fields(config: Config, plan: Plan, stage: int) -> dict[str, Any]:
    planned = plan.stages[stage]
    chunks = len(planned.chunks)
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": planned.tensor,
        "pipeline_model_parallel_size": len(plan.stages),
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "expert_model_parallel_size": planned.expert,
        "expert_tensor_parallel_size": planned.expert_tensor,
        "context_parallel_size": planned.context,
        # Dense models may leave it out, and a plan does not record it: --plan completes the flags with the plan's meaning.
        "sequence_parallel": planned.tensor > 1 and config.parallel.sequence_parallel,
        **_recompute_fields(planned.recompute),
        # With two stages, the next and the previous rank are the same: batched transfers would pair up wrongly.
        "overlap_p2p_comm": chunks > 1,
        "batch_p2p_comm": chunks == 1,
    }
    if config.parallel.microbatch_group_size_per_vp_stage is not None:
        fields["microbatch_group_size_per_vp_stage"] = config.parallel.microbatch_group_size_per_vp_stage
    return fields


def _recompute_fields(recompute: Recompute) -> dict[str, Any]:
    """Recomputation in megatron-core's terms, which are those of the flags."""
    if recompute.granularity == "none":
        return {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
    if recompute.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
    method = "uniform" if recompute.granularity == "uniform" else "block"
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": recompute.layers,
    }


def _moe_fields(config: Config, model: ModelDescription, replicas: int) -> dict[str, Any]:
    moe = config.moe
    kinds = list(moe.moe_router_load_balancing_type)
    # megatron-core divides this loss by the tokens of all replicas, over which its gradient is a mean a second time.
    coefficients = [
        coefficient * (replicas if kind == "global_aux_loss" else 1)
        for kind, coefficient in zip(kinds, moe.moe_aux_loss_coeff, strict=True)
    ]
    return {
        "num_moe_experts": model.num_experts,
        "moe_layer_freq": [int(is_moe) for is_moe in model.moe_layers],
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "moe_latent_size": model.moe_latent_size or None,
        "moe_shared_expert_intermediate_size": model.shared_expert_hidden_size or None,
        "moe_shared_expert_gate": model.shared_expert_gate,
        "moe_router_topk": model.router_topk,
        "moe_router_load_balancing_type": kinds[0] if len(kinds) == 1 else kinds,
        "moe_aux_loss_coeff": coefficients[0] if len(coefficients) == 1 else coefficients,
        "moe_z_loss_coeff": moe.moe_z_loss_coeff,
        "moe_router_score_function": moe.moe_router_score_function,
        "moe_router_pre_softmax": moe.moe_router_pre_softmax,
        "moe_router_num_groups": moe.moe_router_num_groups,
        "moe_router_group_topk": moe.moe_router_group_topk,
        "moe_router_topk_scaling_factor": moe.moe_router_topk_scaling_factor,
        "moe_router_dtype": moe.moe_router_dtype,
        "moe_router_enable_expert_bias": moe.moe_router_enable_expert_bias,
        "moe_router_bias_update_rate": moe.moe_router_bias_update_rate,
        "moe_router_force_load_balancing": moe.moe_router_force_load_balancing,
        "moe_input_jitter_eps": moe.moe_input_jitter_eps,
        "moe_expert_capacity_factor": moe.moe_expert_capacity_factor,
        "moe_pad_expert_input_to_capacity": moe.moe_pad_expert_input_to_capacity,
        "moe_token_drop_policy": moe.moe_token_drop_policy,
        "moe_apply_probs_on_input": moe.moe_apply_probs_on_input,
        # megatron-core knows three names; the irregular dispatcher replaces its all-to-all dispatcher.
        "moe_token_dispatcher_type": "alltoall"
        if moe.moe_token_dispatcher_type == "irregular"
        else moe.moe_token_dispatcher_type,
        "moe_grouped_gemm": transformer_engine_is_installed() and torch.cuda.is_available(),
    }


def activation_fields(config: Config, model: ModelDescription, has_cuda: bool) -> dict[str, Any]:
    """Fields for the activation between an MLP's two products."""
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
    # megatron-core does not fuse: GELU without bias or in experts, squared ReLU, tanh GELU, quick GELU outside routed experts;
    # its fused SiLU ignores clamp and offset.
    only_experts = all(model.moe_layers) and not model.shared_expert_hidden_size
    changed = flags.activation_func_clamp_value is not None or flags.glu_linear_offset != 0
    fusible: dict[Callable[..., Tensor], bool] = {
        squared_relu: False,
        _tanh_gelu: False,
        quick_gelu: only_experts,
        F.silu: not changed,
        F.gelu: flags.add_bias_linear and not model.num_experts,
    }
    return {
        "gated_linear_unit": model.gated,
        "activation_func": function,
        "activation_func_clamp_value": flags.activation_func_clamp_value,
        "glu_linear_offset": flags.glu_linear_offset,
        "bias_activation_fusion": has_cuda and fusible[function],
    }


def attention_fields(config: Config) -> dict[str, Any]:
    """Fields for attention windows and sinks."""
    frequency = config.attention.window_attn_skip_freq
    return {
        "window_size": config.attention.window_size,
        "window_attn_skip_freq": list(frequency) if isinstance(frequency, tuple) else frequency,
        "softmax_type": config.attention.softmax_type,
    }


def set_yarn(tc: TransformerConfig, config: Config) -> None:
    """Add YaRN's settings, which megatron-core's GPTModel reads from attributes that its configuration does not declare."""
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
    """The layers of every stage, and the first layer of this rank's stage.

    megatron-core asks for the number of layers before a stage without naming it, and reads `parallel_state` for the answer.

    Args:
        predictions: number of multi-token-prediction layers, which are on the stage of the loss.
    """

    def __init__(self, plan: Plan, stage: int, predictions: int) -> None:
        held = [
            ["decoder"] * (last - first)
            for chunk in range(len(plan.stages[0].chunks))
            for first, last in (other.chunks[chunk] for other in plan.stages)
        ]
        held[0].insert(0, "embedding")
        held[-1] += ["mtp"] * predictions + ["loss"]
        super().__init__(held, len(plan.stages))
        self._chunks = plan.stages[stage].chunks

    def get_layer_offset(
        self, layer_type: Any = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Layers of this type before a chunk of this rank; all prediction layers are in one chunk."""
        return self._chunks[vp_stage or 0][0] if layer_type == LayerType.decoder else 0
