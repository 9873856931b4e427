"""Modules for a machine without Transformer Engine, CPU or GPU, and Falcon's layer; all plug into megatron-core's layer specs.

Norms with sequence parallelism, repaired linears and latent attention; experts as two grouped matrix products, for a GPU (their
parameters, and so the checkpoints, are those of megatron-core's SequentialMLP). `repair_imports()` mends the places where
megatron-core 0.16.1 takes Transformer Engine for granted. Core attention is in `attention.py`.

Falcon's transformer layer has attention and MLP side by side, x + attention(norm(x)) + mlp(norm(x)), with a norm for both
(Falcon-7B, GPT-J) or one each (Falcon-40B). megatron-core has no such layer; this one joins the two halves of its
TransformerLayer in another way. Source: The Falcon Series of Open Language Models, section 4.3.3.

Legend: S sequence (this rank's share), B batch, E and H hidden size, I and O input and output width of a linear; for the experts
T rows of this rank's experts, E its experts, I expert width (twice that for a gated first product).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron.training.model.layers.expert_weights import (
    AscendingExperts,
    expert_gradients,
    joined,
    joined_with_gradients,
)
from moe_overlap.describe.model import ParallelBlock


def transformer_engine_is_installed() -> bool:
    """Whether Transformer Engine can be imported, without importing it."""
    return importlib.util.find_spec("transformer_engine") is not None


def repair_imports() -> None:
    """Define the names that megatron-core leaves undefined without Transformer Engine, with the value that it tests for.

    moe/moe_utils.py:1192 reads `te_general_gemm` (router gating); multi_latent_attention.py:184 expects `TELinear`;
    tensor_parallel/random.py:588 asks Transformer Engine whether fp8 is on (recomputed norms), since it takes False for a
    recipe; moe/moe_layer.py:171 has only Transformer Engine's projection for experts in a latent space.
    """
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_layer, moe_utils

    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = lambda **_: contextlib.nullcontext()
    random.fp8_autocast = lambda **_: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False
    moe_layer.TELinear, moe_layer.HAVE_TE = LatentProjection, True


class TorchNorm(torch.nn.Module):
    """LayerNorm or RMSNorm by torch, marked so that megatron-core reduces its gradients under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.rms_norm = config.normalization == "RMSNorm"
        self.weight_offset = 1 if config.layernorm_zero_centered_gamma else 0
        names = ("weight",) if self.rms_norm else ("weight", "bias")
        for name in names:
            fill = torch.ones if name == "weight" and not self.weight_offset else torch.zeros
            parameter = torch.nn.Parameter(
                fill(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
            )
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    def forward(self, x_SBE: Tensor) -> Tensor:
        """Normalise the last axis; the shape stays."""
        shape = self.weight.shape
        weight = self.weight + self.weight_offset if self.weight_offset else self.weight
        if self.rms_norm:
            return F.rms_norm(x_SBE, shape, weight, self.eps)
        return F.layer_norm(x_SBE, shape, weight, self.bias, self.eps)


class ExpertOutput(RowParallelLinear):
    """An expert's second product, with two repairs of megatron-core's treatment of its bias.

    Where no other rank shares the expert, the result passes a no-op reduction, and autograd then forbids the in-place bias of
    mlp.py:247: that reduction is left out, as it is under expert parallelism. Under sequence parallelism megatron-core marks the
    bias for a sum over the tensor-parallel ranks, which hold other experts; here DDP sums its replicas.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = self.is_expert
        if self.bias is not None:
            self.bias.sequence_parallel = False


class LatentProjection(torch.nn.Module):
    """A linear that every tensor-parallel rank holds completely, between the tokens and experts in a latent space.

    The constructor takes the arguments of Transformer Engine's, as megatron-core calls it (`parallel_mode="duplicated"`).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], object],
        bias: bool,
        **fixed: Any,
    ) -> None:
        super().__init__()
        placed = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, **placed))
        self.register_parameter("bias", torch.nn.Parameter(torch.zeros(output_size, **placed)) if bias else None)
        with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
            init_method(self.weight)
        for parameter in self.parameters():
            # Each rank has its share of the sequence: megatron-core sums these gradients over the tensor-parallel ranks.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x_SBI: Tensor) -> tuple[Tensor, None]:
        """Project […, I] to […, O]; no bias is left to add."""
        return F.linear(x_SBI, self.weight, self.bias), None


class LatentSelfAttention(MLASelfAttention):
    """Latent attention whose down projections have Transformer Engine's outputs: full width, this rank's share of the sequence.

    megatron-core gathers split projections over `parallel_state`'s group, and drops the contribution of other ranks' heads to
    the gradient of the rotary key (multi_latent_attention.py:594, :607). With full width it takes a correct path, which needs
    sequence parallelism if there is more than one tensor-parallel rank. The direct projection of queries (no --q-lora-rank) gets
    the group that megatron-core does not pass (:393).
    """

    def __init__(
        self, config: Any, submodules: Any, *args: Any, pg_collection: ProcessGroupCollection, **kwargs: Any
    ) -> None:
        direct = ModuleSpec(module=submodules.linear_q_proj, params={"tp_group": pg_collection.tp})
        submodules = replace(submodules, linear_q_proj=direct)
        super().__init__(config, submodules, *args, pg_collection=pg_collection, **kwargs)
        if self.tp_group.size() > 1:
            for name in ("linear_q_down_proj", "linear_kv_down_proj"):
                if hasattr(self, name):
                    getattr(self, name).register_forward_hook(self._in_full_width)

    def _in_full_width(self, _module: Any, _inputs: Any, output: tuple[Tensor, None]) -> tuple[Tensor, None]:
        gathered = gather_from_tensor_model_parallel_region(output[0], group=self.tp_group)
        return scatter_to_sequence_parallel_region(gathered, group=self.tp_group), None


# Experts


class GroupedExperts(SequentialMLP):
    """SequentialMLP in two `torch.nn.functional.grouped_mm` calls instead of 2 · E products.

    With biases in the experts the sequential form runs: a grouped product has none. Not executed on a GPU so far.
    """

    joined = staticmethod(joined)
    """Joins weights into one tensor; a replacement of `grouped_product` joins them by it, too."""
    weight_gradients = staticmethod(expert_gradients)
    """The weight gradients of a product, for a replacement of `grouped_product`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        experts: Any = self._modules["local_experts"]
        self.local_experts = AscendingExperts(experts)
        self._ends: dict[tuple[int, ...], Tensor] = {}

    def forward(self, rows_TH: Tensor, tokens_per_expert: Tensor, probs_T: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run every expert on its rows.

        Args:
            rows_TH: rows sorted by expert.
            tokens_per_expert: [E] rows of each expert; zeros are allowed.
            probs_T: the router's score of each row.
        Returns:
            [T, H] weighted outputs, and no bias.
        """
        if self.config.add_bias_linear or self.config.moe_apply_probs_on_input or rows_TH.shape[0] == 0:
            return super().forward(rows_TH, tokens_per_expert, probs_T)
        ends_E = self._ends_of(tokens_per_expert, rows_TH.device)
        hidden_TI = self.grouped_product(rows_TH, [expert.linear_fc1 for expert in self.local_experts], ends_E)
        if self.config.gated_linear_unit:
            gate_TI, up_TI = hidden_TI.chunk(2, dim=-1)
            limit, offset = self.config.activation_func_clamp_value, self.config.glu_linear_offset
            if limit is not None:
                gate_TI, up_TI = gate_TI.clamp(max=limit), up_TI.clamp(min=-limit, max=limit)
            hidden_TI = self.config.activation_func(gate_TI) * (up_TI + offset if offset else up_TI)
        else:
            hidden_TI = self.config.activation_func(hidden_TI)
        hidden_TI = (hidden_TI * probs_T.unsqueeze(-1)).to(rows_TH.dtype)
        return self.grouped_product(hidden_TI, [expert.linear_fc2 for expert in self.local_experts], ends_E), None

    def _ends_of(self, tokens_per_expert: Tensor, device: torch.device) -> Tensor:
        """The end of each expert's rows, [E] int32, on the device of the rows."""
        if tokens_per_expert.is_cuda or not self.config.moe_pad_expert_input_to_capacity:
            return _without_waiting(tokens_per_expert.cumsum(0, dtype=torch.int32), device)
        # The same few numbers in every micro-batch: a captured graph must not copy them from memory that the host frees.
        key = tuple(tokens_per_expert.tolist())
        if key not in self._ends:
            self._ends[key] = _without_waiting(tokens_per_expert.cumsum(0, dtype=torch.int32), device)
        return self._ends[key]

    def grouped_product(self, rows: Tensor, linears: list[torch.nn.Module], ends_E: Tensor) -> Tensor:
        """Each expert's rows times its weight, transposed; a method, so that a split backward pass can replace it.

        Args:
            ends_E: int32, end of each expert's rows.
        """
        weights_EOI = joined_with_gradients([linear.weight for linear in linears], ends_E)
        return F.grouped_mm(rows, weights_EOI.transpose(1, 2), offs=ends_E)


def _without_waiting(numbers: Tensor, device: torch.device) -> Tensor:
    """Host numbers on a device. A copy from pageable memory would make the host wait for all work queued there."""
    if device.type == "cuda" and not numbers.is_cuda:
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


# Falcon's layer


class ParallelLayer(TransformerLayer):
    """A layer whose MLP has the input of its attention. One dropout follows the sum of both, as in Hugging Face's Falcon."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Map [S, B, H] to [S, B, H], with the arguments of megatron-core's layer; the second value is its unused context."""
        attention_SBH, normed_SBH = self._forward_attention(hidden_states, *args, **kwargs)
        return self._forward_mlp(hidden_states, attention_SBH, normed_SBH), None

    def _forward_attention(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, rotary_pos_emb: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The attention's output before it is added to the residual stream, and the normed input."""
        packed, bias = kwargs.get("packed_seq_params"), kwargs.get("attention_bias")
        assert packed is None and bias is None and kwargs.get("inference_context") is None, "training on whole samples"
        normed_SBH = self.input_layernorm(hidden_states)
        output_SBH, output_bias_H = self.self_attention(
            normed_SBH, attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb
        )
        return output_SBH if output_bias_H is None else output_SBH + output_bias_H, normed_SBH

    def _forward_mlp(self, hidden_states: Tensor, attention_SBH: Tensor, normed_SBH: Tensor) -> Tensor:
        shared = isinstance(self.pre_mlp_layernorm, IdentityOp) and not isinstance(self.input_layernorm, IdentityOp)
        output_SBH, bias_H = self.mlp(normed_SBH if shared else self.pre_mlp_layernorm(hidden_states))
        add = self.mlp_bda(self.training, self.config.bias_dropout_fusion)
        summed: Tensor = add((attention_SBH + output_SBH, bias_H), hidden_states, self.hidden_dropout)
        return summed


def parallel_spec(spec: ModuleSpec, block: ParallelBlock, uses_transformer_engine: bool) -> ModuleSpec:
    """A dense layer's spec with its two halves in parallel.

    Transformer Engine's specs hold the norms inside the linears, one each; a norm for both is removed from them. Not executed on
    a GPU so far.
    """
    parts = spec.submodules
    if block == "one-norm" and uses_transformer_engine:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

        attention, mlp = parts.self_attention, parts.mlp
        inner = dataclasses.replace(attention.submodules, linear_qkv=TEColumnParallelLinear)
        outer = dataclasses.replace(mlp.submodules, linear_fc1=TEColumnParallelLinear)
        parts = dataclasses.replace(
            parts,
            input_layernorm=TENorm,
            self_attention=dataclasses.replace(attention, submodules=inner),
            mlp=dataclasses.replace(mlp, submodules=outer),
        )
    if block == "one-norm":
        parts = dataclasses.replace(parts, pre_mlp_layernorm=IdentityOp)
    return dataclasses.replace(spec, module=ParallelLayer, submodules=parts)
