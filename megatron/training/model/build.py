"""The megatron-core model of a configuration, given process groups. No globals: training and the tuner's capture both call it.

The layer specs are megatron-core's; `adapt_layer` lets the caller replace parts of them (gate, dispatcher, the whole MoE
layer) before they are built.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron.training.cli.config import Config
from megatron.training.cli.sizes import uses_sequence_parallel, virtual_stages
from megatron.training.model.layers.attention import FewGroupsAttention, SdpaAttention
from megatron.training.model.layers.local_modules import (
    ExpertOutput,
    GroupedExperts,
    LatentSelfAttention,
    TorchNorm,
    parallel_spec,
    repair_imports,
    transformer_engine_is_installed,
)
from megatron.training.model.layers.output import LanguageModel, PredictingModel, prediction_spec
from megatron.training.model.stage_config import StageLayout, activation_fields, attention_fields, set_yarn
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan

AdaptLayer = Callable[[ModuleSpec], ModuleSpec]


def transformer_config(config: Config, model: ModelDescription, layout: StageLayout | None = None) -> TransformerConfig:
    """megatron-core's configuration of a run.

    Args:
        config: validated flags.
        model: the derived sizes (`describe_model`).
        layout: what the stages of a pipeline hold; None without one.
    """
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
        "params_dtype": weight_type(config),
        "bf16": config.optimizer.bf16,
        "fp16": config.precision.fp16,
        "autocast_dtype": weight_type(config),
        "pipeline_dtype": weight_type(config),
        "calculate_per_token_loss": config.training.calculate_per_token_loss,
        "bias_dropout_fusion": has_cuda,
        "gradient_accumulation_fusion": False,
        # gloo sends from the output's own memory and does not keep it alive: freed under an overlapped send, garbage arrives.
        "deallocate_pipeline_outputs": has_cuda,
        "pipeline_model_parallel_layout": layout,
        "mtp_num_layers": model.mtp_layers or None,
        "mtp_loss_scaling_factor": config.model.mtp_loss_scaling_factor,
    }
    fields = sizes | _parallel_fields(config) | _precision_fields(config) | _offload_fields(config)
    if model.num_experts:
        fields |= _moe_fields(config, model)
    if model.latent_attention is None:
        plain = TransformerConfig(**fields)
        if config.model.position_embedding_type == "yarn":
            set_yarn(plain, config)
        return plain
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


def weight_type(config: Config) -> torch.dtype:
    """Of weights and activations; master weights are fp32."""
    if config.precision.fp16:
        return torch.float16
    return torch.bfloat16 if config.optimizer.bf16 else torch.float32


def _precision_fields(config: Config) -> dict[str, Any]:
    """fp8 and fp4 by Transformer Engine. Not run on a GPU so far."""
    precision = config.precision
    fields: dict[str, Any] = {
        "moe_router_padding_for_quantization": precision.moe_router_padding_for_quantization
        or precision.moe_router_padding_for_fp8,
    }
    if precision.fp8 is not None:
        names = (
            "fp8 fp8_recipe fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad "
            "fp8_quantizer_factory first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"
        )
        fields |= {name: getattr(precision, name) for name in names.split()}
        fields["fp8_param"] = precision.fp8_param_gather
    if precision.fp4 is not None:
        fields |= {name: getattr(precision, name) for name in ("fp4", "fp4_recipe", "fp4_quantizer_factory")}
        fields["fp4_param"] = precision.fp4_param_gather
    return fields


def _offload_fields(config: Config) -> dict[str, Any]:
    """Activations on the host and the flex dispatcher's backend. Not run on a GPU so far."""
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


def _parallel_fields(config: Config) -> dict[str, Any]:
    parallel = config.parallel
    chunks = virtual_stages(config)
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "sequence_parallel": uses_sequence_parallel(config),
        "recompute_granularity": parallel.recompute_granularity,
        "recompute_method": parallel.recompute_method,
        "recompute_num_layers": parallel.recompute_num_layers,
        # Two stages are each other's next and previous rank: batched transfers would pair up wrongly.
        "overlap_p2p_comm": chunks > 1,
        "batch_p2p_comm": chunks == 1,
    }
    if parallel.recompute_modules is not None:
        fields["recompute_modules"] = list(parallel.recompute_modules)
    if parallel.microbatch_group_size_per_vp_stage is not None:
        fields["microbatch_group_size_per_vp_stage"] = parallel.microbatch_group_size_per_vp_stage
    return fields


def _moe_fields(config: Config, model: ModelDescription) -> dict[str, Any]:
    moe = config.moe
    kinds, coefficients = list(moe.moe_router_load_balancing_type), list(moe.moe_aux_loss_coeff)
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
        # megatron-core knows three names; ours takes the place of its all-to-all dispatcher.
        "moe_token_dispatcher_type": "alltoall"
        if moe.moe_token_dispatcher_type == "irregular"
        else moe.moe_token_dispatcher_type,
        "moe_grouped_gemm": transformer_engine_is_installed() and torch.cuda.is_available(),
    }


def layer_spec(tc: TransformerConfig, is_moe: bool) -> ModuleSpec:
    """The spec of one decoder layer: Transformer Engine's modules on a GPU that has them, else torch's."""
    arguments: dict[str, Any] = {
        "num_experts": tc.num_moe_experts if is_moe else None,
        "moe_grouped_gemm": is_moe and tc.moe_grouped_gemm,
        "qk_layernorm": tc.qk_layernorm,
        "multi_latent_attention": tc.multi_latent_attention,
    }
    if uses_transformer_engine():
        spec = copy.deepcopy(get_gpt_layer_with_transformer_engine_spec(**arguments))
        if tc.context_parallel_size > 1 and (tc.window_size is not None or tc.softmax_type != "vanilla"):
            # Transformer Engine sends keys and values around the context ranks only for attention without windows and sinks.
            spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    else:
        spec = copy.deepcopy(get_gpt_layer_local_spec(**arguments))
        parts = spec.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = TorchNorm
        attention = parts.self_attention.submodules
        attention.core_attention = SdpaAttention
        if tc.multi_latent_attention:
            parts.self_attention.module = LatentSelfAttention
        norms = ("q_layernorm", "kv_layernorm") if tc.multi_latent_attention else ("q_layernorm", "k_layernorm")
        if tc.qk_layernorm:
            for name in norms:
                setattr(attention, name, TorchNorm)
        if is_moe:
            experts = parts.mlp.submodules.experts
            experts.submodules.linear_fc2 = ExpertOutput
            if torch.cuda.is_available() and tc.bf16:
                experts.module = GroupedExperts
    if not tc.multi_latent_attention and (tc.num_query_groups or 1) < tc.tensor_model_parallel_size:
        spec.submodules.self_attention.module = FewGroupsAttention
    return spec


def decoder_layer(tc: TransformerConfig, model: ModelDescription, layer: int) -> ModuleSpec:
    """The spec of the decoder's layer of that number, counted from 0."""
    spec = layer_spec(tc, model.moe_layers[layer])
    return (
        spec if model.parallel_block is None else parallel_spec(spec, model.parallel_block, uses_transformer_engine())
    )


def uses_transformer_engine() -> bool:
    """Whether layers are built from Transformer Engine: it is installed and there is a GPU."""
    return torch.cuda.is_available() and transformer_engine_is_installed()


def build_model(
    config: Config,
    model: ModelDescription,
    plan: Plan,
    groups: ProcessGroupCollection,
    stage: int,
    adapt_layer: AdaptLayer | None = None,
) -> list[torch.nn.Module]:
    """This rank's part of the model.

    Args:
        plan: says which layers each chunk of `stage` holds.
        groups: the stage's process groups.
        adapt_layer: replaces parts of a layer's spec before it is built.
    Returns:
        One module per chunk (virtual stage), in megatron-core's order, wrapped for bf16 or fp16 where asked, without DDP.
    """
    if not transformer_engine_is_installed():
        repair_imports()
    layout = StageLayout(plan, stage, model.mtp_layers) if len(plan.stages) > 1 else None
    tc = transformer_config(config, model, layout)
    chunks = plan.stages[stage].chunks
    last_stage, last_chunk = len(plan.stages) - 1, len(chunks) - 1
    adapt = adapt_layer or (lambda spec: spec)
    modules: list[torch.nn.Module] = []
    for index, (first, last) in enumerate(chunks):
        specs = [adapt(decoder_layer(tc, model, layer)) for layer in range(first, last)]
        arguments: dict[str, Any] = {
            "config": tc,
            "transformer_layer_spec": TransformerBlockSubmodules(layer_specs=specs, layer_norm=_block_norm()),
            "vocab_size": model.vocab_size,
            "max_sequence_length": model.max_position_embeddings,
            "pre_process": stage == 0 and index == 0,
            "post_process": stage == last_stage and index == last_chunk,
            "parallel_output": True,
            "share_embeddings_and_output_weights": model.tied_embeddings,
            "position_embedding_type": config.model.position_embedding_type,
            "rotary_percent": config.model.rotary_percent,
            "rotary_base": config.model.rotary_base,
            "rope_scaling": config.attention.use_rope_scaling,
            "rope_scaling_factor": config.attention.rope_scaling_factor,
            "seq_len_interpolation_factor": config.model.rotary_seq_len_interpolation_factor,
            "pg_collection": groups,
            "vp_stage": index if last_chunk > 0 else None,
        }
        if model.mtp_layers and arguments["post_process"]:
            inside = adapt(decoder_layer(tc, model, model.num_layers - 1))
            predictions = prediction_spec(inside, _block_norm(), _column_linear(), model.mtp_layers)
            module: torch.nn.Module = PredictingModel(predictions=predictions, **arguments)
        else:
            module = LanguageModel(**arguments)
            if not arguments["post_process"]:
                module.decoder.final_layernorm = (
                    None  # with prediction layers megatron-core puts it behind the last layer
                )
        if config.model.position_embedding_type == "yarn":
            # megatron-core hands the context ranks to plain rotary positions only.
            module.rotary_pos_emb.cp_group = groups.cp
        for name, parameter in module.named_parameters():
            if name.endswith(".softmax_offset"):
                # Sinks are split by heads, which neither megatron-core nor Transformer Engine says of them.
                parameter.tensor_model_parallel, parameter.partition_dim = True, 0  # type: ignore[attr-defined]
            _default_parallel_attributes(parameter)
            if ".mlp.experts." in name and tc.expert_tensor_parallel_size != tc.tensor_model_parallel_size:
                # Experts that fewer ranks share have more replicas than the dense layers have; megatron-core reduces them
                # as experts under expert parallelism only (tensor_parallel/layers.py, `allreduce`).
                parameter.allreduce = False  # type: ignore[attr-defined]
        modules.append(module if weight_type(config) == torch.float32 else Float16Module(tc, module))
    return modules


def _block_norm() -> Any:
    if not uses_transformer_engine():
        return TorchNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _column_linear() -> Any:
    if not uses_transformer_engine():
        return ColumnParallelLinear
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    return TEColumnParallelLinear


def _default_parallel_attributes(parameter: torch.nn.Parameter) -> None:
    """Optimizer and checkpoints read these from every parameter; layers that are not split leave them unset."""
    for name, value in (("tensor_model_parallel", False), ("partition_dim", -1), ("partition_stride", 1)):
        if not hasattr(parameter, name):
            setattr(parameter, name, value)


def unwrap(module: torch.nn.Module) -> GPTModel:
    """The GPTModel inside DDP and precision wrappers."""
    while not isinstance(module, GPTModel):
        module = module.module
    return module
