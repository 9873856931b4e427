"""Floating-point operations of a model, as throughput is counted in the field: matrix products only, causal half of attention."""

from __future__ import annotations

from moe_overlap.describe.model import ModelDescription
from moe_overlap.describe.parameters import model_parameters


def training_flops_per_token(model: ModelDescription, sequence_length: int) -> float:
    """Operations of forward and backward per token; recomputation does not count.

    6 per active matrix parameter (the embedding's lookup is none, the output layer is one, also where tied), and for attention
    scores and weighted values 6 · keys · (query width + value width) per layer, where a query has S/2 keys on average, with a
    window of W keys W - W² / 2S. Prediction layers are layers too, and each passes the output layer once more.
    """
    words = model.vocab_size * model.hidden_size
    lookups = words if not model.tied_embeddings else 0
    if model.learned_positions:
        lookups += model.max_position_embeddings * model.hidden_size
    matrices = model_parameters(model).active - lookups + model.mtp_layers * words
    latent = model.latent_attention
    if latent is None:
        widths = 2 * model.num_attention_heads * model.kv_channels
    else:
        widths = model.num_attention_heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim + latent.v_head_dim)
    seen = (min(window or sequence_length, sequence_length) for window in model.windows)
    keys = sum(window - window**2 / (2 * sequence_length) for window in seen)
    return 6.0 * matrices + 6.0 * keys * widths
