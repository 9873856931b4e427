"""The megatron-core model of a configuration, given process groups. No globals: training and the tuner's capture both call it.

Steps of `build_model`:
    1. the TransformerConfig of the stage (`stage_config.py`);
    2. a spec for every layer of each model chunk: megatron-core's, with modules of `layers/` where Transformer Engine is missing
       or megatron-core has none; `adapt_layer` lets the caller replace parts of it (gate, dispatcher, the whole MoE layer);
    3. the modules, in megatron-core's order, their parameters marked for optimizer and checkpoints.
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
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.training.cli.config import Config
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
from megatron.training.model.library_kernels import run_fused
from megatron.training.model.stage_config import StageLayout, transformer_config
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan

AdaptLayer = Callable[[ModuleSpec], ModuleSpec]
GROUPED_KERNELS = (9, 10)
"""Major compute capabilities with a kernel behind `torch.nn.functional.grouped_mm`."""
ALIGNED_ELEMENTS = 8
"""bf16 elements in the 16 bytes to which the kernel's strides are aligned."""


def layer_spec(tc: TransformerConfig, is_moe: bool, has_masks: bool = False) -> ModuleSpec:
    """The spec of one decoder layer: Transformer Engine's modules on a GPU that has them, else torch's.

    Args:
        has_masks: whether micro-batches bring an attention mask that separates documents (--reset-attention-mask).
    """
    arguments: dict[str, Any] = {
        "num_experts": tc.num_moe_experts if is_moe else None,
        "moe_grouped_gemm": is_moe and tc.moe_grouped_gemm,
        "qk_layernorm": tc.qk_layernorm,
        "multi_latent_attention": tc.multi_latent_attention,
    }
    if uses_transformer_engine():
        spec = copy.deepcopy(get_gpt_layer_with_transformer_engine_spec(**arguments))
        # Transformer Engine passes keys and values between context ranks only for attention without windows and sinks.
        # Its causal attention reads no mask (`attention_mask` of its DotProductAttention): documents would see each other.
        is_special = tc.window_size is not None or tc.softmax_type != "vanilla"
        if has_masks or (tc.context_parallel_size > 1 and is_special):
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
            if multiplies_grouped(tc):
                experts.module = GroupedExperts
    if not tc.multi_latent_attention and (tc.num_query_groups or 1) < tc.tensor_model_parallel_size:
        spec.submodules.self_attention.module = FewGroupsAttention
    return spec


def multiplies_grouped(tc: TransformerConfig) -> bool:
    """Whether torch multiplies all experts of a rank at once: in bf16, on GPUs with a kernel for it.

    Other GPUs (Ampere, Ada) would get torch's fallback, which waits for the device and multiplies expert by expert; the
    sequential experts know their rows on the host. Source: `_grouped_mm_cuda` in torch 2.11 and 2.13. Not run on hardware.

    Raises:
        ConfigError: the kernel refuses the width of the experts, which it would do in the first backward pass only.
    """
    if not (torch.cuda.is_available() and tc.bf16 and torch.cuda.get_device_capability()[0] in GROUPED_KERNELS):
        return False
    width = (tc.moe_ffn_hidden_size or tc.ffn_hidden_size) // (tc.expert_tensor_parallel_size or 1)
    inner, hidden = (
        ("--moe-latent-size", tc.moe_latent_size) if tc.moe_latent_size else ("--hidden-size", tc.hidden_size)
    )
    for flag, size, change in (
        ("--moe-ffn-hidden-size", width, "another --expert-tensor-parallel-size"),
        (inner, hidden, f"a multiple of {ALIGNED_ELEMENTS}"),
    ):
        if size % ALIGNED_ELEMENTS:
            rule = f"torch's grouped products on GPUs need experts whose width on a rank is a multiple of {ALIGNED_ELEMENTS}"
            raise ConfigError(flag, size, rule, f"use {change}, or install Transformer Engine")
    return True


def decoder_layer(tc: TransformerConfig, model: ModelDescription, layer: int, has_masks: bool = False) -> ModuleSpec:
    """The spec of the decoder's layer of this number, counted from 0; `has_masks`: see `layer_spec`."""
    spec = layer_spec(tc, model.moe_layers[layer], has_masks)
    return (
        spec if model.parallel_block is None else parallel_spec(spec, model.parallel_block, uses_transformer_engine())
    )


def uses_transformer_engine() -> bool:
    """Whether layers are built from Transformer Engine: it is installed and there is a GPU."""
    return torch.cuda.is_available() and transformer_engine_is_installed()


def _configured(
    config: Config, model: ModelDescription, plan: Plan, stage: int, layout: StageLayout | None
) -> TransformerConfig:
    """The configuration of a stage, with Transformer Engine's settings where it is used; arguments of `transformer_config`."""
    tc = transformer_config(config, model, plan, stage, layout)
    if uses_transformer_engine():
        run_fused(tc, plan.runs_lists)
        overlap = plan.stages[stage].overlap
        # Set after the constructor, which accepts it for megatron-core's own schedule of all-to-alls only.
        tc.delay_wgrad_compute = any(layer.weight_gradient_slots for layer in overlap.layers)
        # With copies of the weights, the library overwrites the gradient sum in the backward pass of a module's first call in a
        # step. Partitions run backward from last to first: the gradients of the others would be lost.
        tc.disable_parameter_transpose_cache = overlap.cuts_layers
    return tc


def build_model(
    config: Config,
    model: ModelDescription,
    plan: Plan,
    groups: ProcessGroupCollection,
    stage: int,
    adapt_layer: AdaptLayer | None = None,
) -> list[torch.nn.Module]:
    """Build this rank's share of the model.

    Args:
        plan: gives the layers of each chunk of `stage`, the ranks that share them, recomputation and precision.
        groups: the stage's process groups.
        adapt_layer: replaces parts of a layer's spec before it is built.
    Returns:
        One module per chunk (virtual stage), in megatron-core's order, wrapped for bf16 or fp16 where asked, without DDP.
    """
    if not transformer_engine_is_installed():
        repair_imports()
    layout = StageLayout(plan, stage, model.mtp_layers) if len(plan.stages) > 1 else None
    tc = _configured(config, model, plan, stage, layout)
    chunks = plan.stages[stage].chunks
    last_stage, last_chunk = len(plan.stages) - 1, len(chunks) - 1
    adapt, has_masks = adapt_layer or (lambda spec: spec), config.data.reset_attention_mask
    modules: list[torch.nn.Module] = []
    for index, (first, last) in enumerate(chunks):
        specs = [adapt(decoder_layer(tc, model, layer, has_masks)) for layer in range(first, last)]
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
            inside = adapt(decoder_layer(tc, model, model.num_layers - 1, has_masks))
            predictions = prediction_spec(inside, _block_norm(), _column_linear(), model.mtp_layers)
            module: torch.nn.Module = PredictingModel(predictions=predictions, **arguments)
        else:
            module = LanguageModel(**arguments)
            if not arguments["post_process"]:
                module.decoder.final_layernorm = (
                    None  # with prediction layers megatron-core puts it after the last layer
                )
        if config.model.position_embedding_type == "yarn":
            # megatron-core passes the context ranks only to rotary positions without scaling.
            module.rotary_pos_emb.cp_group = groups.cp
        for name, parameter in module.named_parameters():
            if name.endswith(".softmax_offset"):
                # Sinks are split by heads, but neither megatron-core nor Transformer Engine marks them so.
                parameter.tensor_model_parallel, parameter.partition_dim = True, 0  # type: ignore[attr-defined]
            _default_parallel_attributes(parameter)
            if ".mlp.experts." in name and tc.expert_tensor_parallel_size != tc.tensor_model_parallel_size:
                # Experts that fewer ranks share have more replicas than the dense layers; megatron-core reduces them as experts
                # under expert parallelism only (tensor_parallel/layers.py, `allreduce`).
                parameter.allreduce = False  # type: ignore[attr-defined]
        modules.append(module if tc.params_dtype == torch.float32 else Float16Module(tc, module))
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
    """Set the attributes that optimizer and checkpoints read; layers that are not split leave them unset."""
    for name, value in (("tensor_model_parallel", False), ("partition_dim", -1), ("partition_stride", 1)):
        if not hasattr(parameter, name):
            setattr(parameter, name, value)


def unwrap(module: torch.nn.Module) -> GPTModel:
    """The GPTModel inside DDP and precision wrappers."""
    while not isinstance(module, GPTModel):
        module = module.module
    return module
