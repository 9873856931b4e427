"""The description of a language model: its layers, their parameters and operations. Standard library only.

Parameter counts (total, active per token, per rank) are analytic and equal those of the modules that megatron-core builds.
Operations follow the usual convention for throughput: matrix products only, and the causal half of attention.

Legend: H hidden size, L latent width of routed experts, F width of an MLP, G 2 with a gated activation and 1 without, D head
width, N heads, K query groups. The expert bias of a router is a buffer and not counted as a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_overlap.describe.errors import ConfigError

TOKEN_COUNT = "token_count"
"""Additional entry of a micro-batch if several ranks share the sequences: a scalar, the number of tokens of the full sequences
that count in the loss."""

MOST_LAYERS = 10_000
"""Most layers of a model: a hundred times more than any trained model; it bounds tables with one entry per layer."""


def require_bounded_layers(flag: str, count: int | None) -> None:
    """Raise ConfigError if a flag asks for more than MOST_LAYERS layers; call it before building a table of layers."""
    if count is not None and count > MOST_LAYERS:
        raise ConfigError(flag, count, f"is more than {MOST_LAYERS}", "correct the value")


ParallelBlock = Literal["one-norm", "two-norms"]
"""Layers x + attention(norm(x)) + mlp(norm(x)), with a shared norm or two separate ones."""


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
    """A decoder-only transformer with all derived sizes resolved. Widths in elements, names as in Megatron."""

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
    """One entry per layer, prediction layers after the decoder's: most keys that a query attends to, its own included; None for
    full causal attention."""
    attention_sinks: bool
    """A learnt term per head in the softmax's denominator."""
    moe_layers: tuple[bool, ...]
    """One entry per layer: whether its MLP is a mixture of experts."""
    num_experts: int
    router_topk: int
    moe_ffn_hidden_size: int
    moe_latent_size: int
    """Width of the routed experts' input and output; 0: the hidden size."""
    shared_expert_hidden_size: int
    """Total width of the shared experts; 0 without shared experts."""
    shared_expert_gate: bool
    expert_bias: bool
    latent_attention: LatentAttention | None
    mtp_layers: int = 0
    """Multi-token-prediction layers after the decoder; each contains a layer of the form of the decoder's last one."""
    parallel_block: ParallelBlock | None = None


# Parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCount:
    """Numbers of parameters."""

    total: int
    active: int
    """Parameters used for one token: top-k routed experts of each MoE layer instead of all."""
    embedding: int
    """Word and position embeddings and the output layer; included in both other numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A rank's share of the model: its layers, and the number of ranks that split each kind of matrix."""

    chunks: tuple[tuple[int, int], ...]
    """Layer ranges, [first, last)."""
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    first_stage: bool = True
    """Whether the rank holds the embedding."""
    last_stage: bool = True
    """Whether the rank holds the last norm and the output layer."""
    split_latents: bool = True
    """Whether down projections of latent attention are split over TP: true without Transformer Engine, false with it."""


def model_parameters(model: ModelDescription) -> ParameterCount:
    """Parameters of the full model; tied embeddings count once."""
    return rank_parameters(model, Share(chunks=((0, model.num_layers),)))


def rank_parameters(model: ModelDescription, share: Share) -> ParameterCount:
    """Parameters on a rank.

    `active` counts top-k / EP of the routed experts on this rank, the balanced share of a token's top-k.
    If two stages need the embedding (tied to the output layer, or read by prediction layers), each holds a copy.
    """
    layers = [layer for first, last in share.chunks for layer in range(first, last)]
    both = sum(layer_parameters(model, layer, share) for layer in layers)
    if share.last_stage:
        both += model.mtp_layers * prediction_parameters(model, share)
        layers += [model.num_layers - 1] * model.mtp_layers
    idle = sum(_idle_expert_parameters(model, share) for layer in layers if model.moe_layers[layer])
    embedding = embedding_parameters(model, share)
    total = both + embedding + (norm_parameters(model, model.hidden_size) if share.last_stage else 0)
    return ParameterCount(total=total, active=total - idle, embedding=embedding)


def embedding_parameters(model: ModelDescription, share: Share) -> int:
    """Word embedding [V/TP, H], learned positions [S, H], output layer [V/TP, H] unless it is tied to the embedding.

    Prediction layers are on the last stage and read a copy of the word embedding there.
    """
    word_embedding = model.vocab_size // share.tensor * model.hidden_size
    positions = model.max_position_embeddings * model.hidden_size if model.learned_positions else 0
    total = word_embedding + positions if share.first_stage else 0
    if share.last_stage:
        copied = model.mtp_layers > 0 and not share.first_stage
        total += word_embedding * (copied + (not model.tied_embeddings or not (share.first_stage or copied)))
    return total


def layer_parameters(model: ModelDescription, layer: int, share: Share) -> int:
    """Parameters of one layer on a rank: norms, attention, MLP or mixture of experts."""
    norms = (1 if model.parallel_block == "one-norm" else 2) * norm_parameters(model, model.hidden_size)
    attention = attention_parameters(model, share.tensor, share.split_latents)
    if model.moe_layers[layer]:
        return norms + attention + moe_parameters(model, share)
    return norms + attention + mlp_parameters(model, model.ffn_hidden_size, share.tensor)


def prediction_parameters(model: ModelDescription, share: Share) -> int:
    """Parameters of one multi-token-prediction layer on a rank: a projection [H/TP, 2H] and a layer of the form of the last one.

    There are two norms before the projection and one after the layer; embedding and output layer are shared with the model.
    """
    projection = 2 * model.hidden_size * model.hidden_size // share.tensor
    norms = 3 * norm_parameters(model, model.hidden_size)
    return norms + projection + layer_parameters(model, model.num_layers - 1, share)


def norm_parameters(model: ModelDescription, width: int) -> int:
    """Parameters of a norm: RMSNorm has a weight, LayerNorm also a bias."""
    return width if model.rms_norm else 2 * width


def attention_parameters(model: ModelDescription, tensor: int, split_latents: bool = True) -> int:
    """QKV [(N + 2K)·D/TP, H], output [H, N·D/TP] with a bias that is not split, and norms of width D on queries and keys."""
    if model.latent_attention is not None:
        return _latent_attention_parameters(model, model.latent_attention, tensor, tensor if split_latents else 1)
    hidden, queries = model.hidden_size, model.num_attention_heads * model.kv_channels
    qkv = queries + 2 * model.num_query_groups * model.kv_channels
    sinks = model.num_attention_heads if model.attention_sinks else 0
    count = (qkv * hidden + queries * hidden + sinks) // tensor
    count += qkv // tensor if model.qkv_bias else 0
    count += hidden if model.linear_bias else 0
    return count + (2 * norm_parameters(model, model.kv_channels) if model.qk_layernorm else 0)


def _latent_attention_parameters(model: ModelDescription, latent: LatentAttention, tensor: int, down: int) -> int:
    """Parameters of latent attention: up projections and output are split over TP, down projections by `down`.

    Only the output has a bias. With qk_layernorm there is a norm on the latent of keys and values, and on that of queries if they
    have one. Source: DeepSeek-V2, section 2.1.2.
    """
    hidden, heads = model.hidden_size, model.num_attention_heads
    query_width = heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim)
    if latent.q_lora_rank is None:
        count = hidden * query_width // tensor
    else:
        count = hidden * latent.q_lora_rank // down + latent.q_lora_rank * query_width // tensor
    count += hidden * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim) // down
    count += latent.kv_lora_rank * heads * (latent.qk_head_dim + latent.v_head_dim) // tensor
    count += heads * latent.v_head_dim * hidden // tensor
    count += heads // tensor if model.attention_sinks else 0
    count += hidden if model.linear_bias else 0
    if model.qk_layernorm:
        count += norm_parameters(model, latent.q_lora_rank) if latent.q_lora_rank is not None else 0
        count += norm_parameters(model, latent.kv_lora_rank)
    return count


def mlp_parameters(model: ModelDescription, width: int, split: int, hidden: int | None = None) -> int:
    """First linear [G·F/split, H], second [H, F/split]; the first's bias is split, the second's is not.

    Args:
        hidden: H; None: the model's hidden size.
    """
    first, hidden = width * (2 if model.gated else 1), hidden or model.hidden_size
    count = (first + width) * hidden // split
    return count + (first // split + hidden if model.linear_bias else 0)


def expert_parameters(model: ModelDescription, split: int) -> int:
    """Parameters of one routed expert on one of the `split` ranks that share it."""
    return mlp_parameters(model, model.moe_ffn_hidden_size, split, model.moe_latent_size or None)


def moe_parameters(model: ModelDescription, share: Share) -> int:
    """Router [E, H] and its bias, E/EP experts split over ETP, shared experts split over TP, and their gate [1, H].

    With latent experts also projections [L, H] and [H, L] on every rank, with biases if linears have them.
    """
    router = model.num_experts * (model.hidden_size + (1 if model.linear_bias else 0))
    experts = model.num_experts // share.expert * expert_parameters(model, share.expert_tensor)
    latent = model.moe_latent_size
    if latent:
        router += 2 * latent * model.hidden_size + (latent + model.hidden_size if model.linear_bias else 0)
    shared = 0
    if model.shared_expert_hidden_size:
        shared = mlp_parameters(model, model.shared_expert_hidden_size, share.tensor)
    return router + experts + shared + (model.hidden_size if model.shared_expert_gate else 0)


def _idle_expert_parameters(model: ModelDescription, share: Share) -> int:
    """Parameters of routed experts on this rank that a token does not use, under balanced routing."""
    idle = model.num_experts - model.router_topk
    return idle * expert_parameters(model, share.expert_tensor) // share.expert


# Operations and routed copies


def training_flops_per_token(model: ModelDescription, sequence_length: int) -> float:
    """Floating-point operations of forward and backward pass per token; recomputation does not count.

    6 per active matrix parameter (the output layer counts even if tied; the embedding's lookup does not), and for attention
    scores and weighted values 6 · keys · (query width + value width) per layer. A query has S/2 keys on average, with a window of
    W keys W - W² / 2S. Prediction layers count as layers, each with another pass through the output layer.
    """
    word_embedding = model.vocab_size * model.hidden_size
    lookups = word_embedding if not model.tied_embeddings else 0
    if model.learned_positions:
        lookups += model.max_position_embeddings * model.hidden_size
    matrices = model_parameters(model).active - lookups + model.mtp_layers * word_embedding
    latent = model.latent_attention
    if latent is None:
        widths = 2 * model.num_attention_heads * model.kv_channels
    else:
        widths = model.num_attention_heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim + latent.v_head_dim)
    seen = (min(window or sequence_length, sequence_length) for window in model.windows)
    keys = sum(window - window**2 / (2 * sequence_length) for window in seen)
    return 6.0 * matrices + 6.0 * keys * widths


def expected_places(choices: int, places: int) -> float:
    """Expected number of distinct places among the experts of a token: the copies that travel if each place gets one.

    Args:
        choices: experts of a token, drawn independently and uniformly over the places.
        places: ranks or nodes with experts.
    """
    return places * (1.0 - (1.0 - 1.0 / places) ** choices)
