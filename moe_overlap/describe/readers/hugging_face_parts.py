"""Parts of a decoder that families of Hugging Face share, as flags: sizes, attention, experts, balancing, windows.

Standard library only.

Source: configuration_*.py and modeling_*.py of transformers 4.57.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_overlap.describe.readers.hugging_face_fields import (
    REQUIRED,
    Fields,
    longest_training_sequence,
    rotary_flags,
)

Flags = dict[str, Any]
"""Flag names without dashes -> a value, or true for a switch, as in examples/models/*.json."""


def decoder_flags(
    fields: Fields,
    *,
    key_value_heads: Any = REQUIRED,
    norm_epsilon: float = 1e-6,
    head_width: int | None = None,
    latent: bool = False,
) -> Flags:
    """Flags that the families with rotary positions share: sizes, heads, RMSNorm, SwiGLU.

    Args:
        key_value_heads: default of that field; None stands for as many as heads.
        norm_epsilon: default of rms_norm_eps.
        head_width: default of head_dim; None stands for hidden size / heads.
        latent: heads are described elsewhere.
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    positions = fields.integer("max_position_embeddings")
    flags: Flags = {
        "num-layers": fields.layers(),
        "hidden-size": hidden,
        "ffn-hidden-size": fields.integer("intermediate_size"),
        "num-attention-heads": heads,
    }
    if not latent:
        width = fields.integer("head_dim", head_width)
        flags |= {"kv-channels": width} if width not in (None, hidden / heads) else {}
        groups = fields.integer("num_key_value_heads", key_value_heads)
        flags |= {"group-query-attention": True, "num-query-groups": groups} if groups not in (None, heads) else {}
    fields.only("hidden_act", "silu", ("silu",), "another activation")
    flags |= {
        "seq-length": longest_training_sequence(positions),
        "max-position-embeddings": positions,
        "normalization": "RMSNorm",
        "norm-epsilon": fields.number("rms_norm_eps", norm_epsilon),
        "swiglu": True,
        "attention-dropout": fields.number("attention_dropout", 0.0),
        "hidden-dropout": 0.0,
        "init-method-std": fields.number("initializer_range", 0.02),
        "vocab-size": fields.integer("vocab_size"),
    }
    return flags | untied_flags(fields, False)


def bias_flags(everywhere: bool) -> Flags:
    return {} if everywhere else {"disable-bias-linear": True}


def untied_flags(fields: Fields, tied: bool) -> Flags:
    return {} if fields.switch("tie_word_embeddings", tied) else {"untie-embeddings-and-output-weights": True}


def expert_flags(number: int, chosen: int, are_moe: Sequence[bool] | None) -> Flags:
    """The flags for the number of experts, experts per token, and the MoE layers; None: all layers."""
    flags: Flags = {"num-experts": number, "moe-router-topk": chosen}
    return flags if are_moe is None or all(are_moe) else flags | {"moe-layer-freq": layer_list(are_moe)}


def balancing_flags(fields: Fields, default: float, notes: list[str], name: str = "router_aux_loss_coef") -> Flags:
    flags = balancing_flags_by("aux_loss", fields.number(name, default))
    if flags["moe-router-load-balancing-type"] != "none":
        notes.append(
            "megatron-core has a balancing loss per layer, Hugging Face's code one over the tokens of all layers"
        )
    return flags


def balancing_flags_by(kind: str, coefficient: float) -> Flags:
    if coefficient == 0:
        return {"moe-router-load-balancing-type": "none"}
    return {"moe-router-load-balancing-type": kind, "moe-aux-loss-coeff": coefficient}


def window_flags(are_windowed: Sequence[bool], window: int) -> Flags:
    """The flags for a causal window of `window` tokens, the query's own included, in these layers."""
    if not any(are_windowed):
        return {}
    flags: Flags = {"window-size": f"{window - 1},0"}
    if all(are_windowed):
        return flags
    layers = range(1, len(are_windowed) + 1)
    periods = [n for n in layers if list(are_windowed) == [layer % n != 0 for layer in layers]]
    return flags | {"window-attn-skip-freq": periods[0] if periods else layer_list(are_windowed)}


def layer_list(bits: Sequence[bool]) -> str:
    """`([0]*3+[1]*58)`: the form of a list of 0 and 1 in flags."""
    runs: list[tuple[bool, int]] = []
    for bit in bits:
        if runs and runs[-1][0] == bit:
            runs[-1] = (bit, runs[-1][1] + 1)
        else:
            runs.append((bit, 1))
    return "(" + "+".join(f"[{int(bit)}]*{length}" for bit, length in runs) + ")"


def latent_attention_flags(fields: Fields, notes: list[str]) -> Flags:
    """DeepSeek's decoder with latent attention, without its experts."""
    flags = decoder_flags(fields, latent=True) | bias_flags(everywhere=False)
    for name in ("attention_bias", "mlp_bias"):
        fields.only(name, False, (False,), "megatron-core has biases in all linear layers or in none")
    content, position = fields.integer("qk_nope_head_dim", 128), fields.integer("qk_rope_head_dim", 64)
    for name, width in (("qk_head_dim", content + position), ("head_dim", position)):
        fields.only(name, width, (width,), "the widths of a head contradict each other")
    heads = fields.integer("num_attention_heads")
    fields.only("num_key_value_heads", heads, (heads,), "latent attention has no key/value groups")
    rank = fields.integer("q_lora_rank", None)
    flags |= {"multi-latent-attention": True, "qk-layernorm": True} | ({} if rank is None else {"q-lora-rank": rank})
    flags |= {"kv-lora-rank": fields.integer("kv_lora_rank", 512), "v-head-dim": fields.integer("v_head_dim", 128)}
    flags |= {"qk-head-dim": content, "qk-pos-emb-head-dim": position}
    return flags | rotary_flags(fields, 10000.0, latent=notes)


def require_bits(fields: Fields, name: str, bits: Any, layers: int) -> None:
    if not isinstance(bits, list) or len(bits) != layers or not all(bit in (0, 1) for bit in bits):
        raise fields.error(name, bits, f"must be a list of {layers} times 0 or 1", "correct the file")
