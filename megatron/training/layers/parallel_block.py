"""Falcon's transformer layer: attention and MLP side by side, x + attention(norm(x)) + mlp(norm(x)), as a layer spec.

One norm for both (Falcon-7B, GPT-J), or one each (Falcon-40B). megatron-core has no such layer; this one is its TransformerLayer
with the two halves joined in another way. Source: The Falcon Series of Open Language Models, section 4.3.3.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from moe_overlap.describe.model import ParallelBlock

# Legend: S sequence (this rank's part), B batch, H hidden.


class ParallelLayer(TransformerLayer):
    """A layer whose MLP reads what the attention reads. The sum of both passes one dropout, as in Hugging Face's Falcon."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """[S, B, H] to [S, B, H]; arguments as megatron-core's layer takes them. The second value is its unused context."""
        attention_SBH, normed_SBH = self._forward_attention(hidden_states, *args, **kwargs)
        return self._forward_mlp(hidden_states, attention_SBH, normed_SBH), None

    def _forward_attention(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, rotary_pos_emb: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """What attention adds to the residual stream, and the normed input."""
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

    Transformer Engine's specs hold the norms inside the linears, one each; a norm for both is taken out of them. Not run on a
    GPU so far.
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
