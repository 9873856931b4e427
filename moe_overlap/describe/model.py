"""A language model as numbers: what its layers are and how many parameters they hold. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ParallelBlock = Literal["one-norm", "two-norms"]
"""Layers x + attention(norm(x)) + mlp(norm(x)), with a norm for both or one each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1). Widths in elements."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """A decoder-only transformer, every derived size resolved. Widths in elements, names as in Megatron."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    """Rows of the embedding, padding included."""
    max_position_embeddings: int
    learned_positions: bool
    tied_embeddings: bool
    rms_norm: bool
    gated: bool
    """Gated activation (SwiGLU, GeGLU): the first linear is twice as wide."""
    linear_bias: bool
    qkv_bias: bool
    qk_layernorm: bool
    windows: tuple[int | None, ...]
    """One entry per layer, prediction layers behind the decoder's: the keys that a query attends to at most, its own included;
    None for all before it."""
    attention_sinks: bool
    """A learnt term per head in the softmax's denominator."""
    moe_layers: tuple[bool, ...]
    """One entry per layer: true where the MLP is a mixture of experts."""
    num_experts: int
    router_topk: int
    moe_ffn_hidden_size: int
    moe_latent_size: int
    """Width of what routed experts read and write; 0 where that is the hidden size."""
    shared_expert_hidden_size: int
    """Total width of the shared experts; 0 without."""
    shared_expert_gate: bool
    expert_bias: bool
    latent_attention: LatentAttention | None
    mtp_layers: int = 0
    """Multi-token-prediction layers behind the decoder; each has a layer of the form of the last one."""
    parallel_block: ParallelBlock | None = None
