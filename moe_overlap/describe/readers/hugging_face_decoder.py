"""Any decoder of a config.json, read by its fields whatever its family is called. Standard library only.

New families appear monthly, and most of them are the same layers with other names of fields: attention over key/value groups or
latent attention, dense layers or experts. Steps:
    1. `renamed` gives every field the spelling that most families use (`SPELLINGS`), and adds what a family's class has built in
       (`BUILT_IN`);
    2. `decoder_of_fields` translates attention, experts and router;
    3. what no layer here computes goes to `Fields.unbuilt`: training refuses it, a prediction names it.
A family that is not in `BUILT_IN` may differ in something that no field tells: it is predicted, and not trained.

Source: configuration_*.py and modeling_*.py of transformers 4.57.6; for families that bring their own code, the configuration and
the model beside their published weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moe_overlap.describe.readers.hugging_face_fields import PREDICT, Fields, rotary_flags
from moe_overlap.describe.readers.hugging_face_parts import (
    Flags,
    balancing_flags,
    bias_flags,
    decoder_flags,
    expert_flags,
    latent_attention_flags,
    require_bits,
    window_flags,
)

SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layers", "n_layer", "num_layers"),
    "hidden_size": ("d_model", "n_embd"),
    "intermediate_size": ("ffn_hidden_size", "ffn_dim"),
    "num_attention_heads": ("n_heads", "n_head"),
    "num_key_value_heads": ("n_kv_heads", "num_kv_heads", "multi_query_group_num"),
    "head_dim": ("attention_head_dim", "kv_channels"),
    "max_position_embeddings": ("max_seq_len", "max_sequence_length", "n_positions", "seq_length"),
    "hidden_act": ("hidden_activation", "activation_function"),
    "rms_norm_eps": ("norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon"),
    "attention_dropout": ("attn_dropout", "attn_pdrop"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts"),
    "num_experts_per_tok": ("moe_topk", "moe_k", "moe_top_k", "num_experts_per_token", "num_selected_experts"),
    "moe_intermediate_size": ("moe_ffn_hidden_size", "expert_ffn_hidden_size", "expert_intermediate_size"),
    "n_shared_experts": ("num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "shared_expert_intermediate_size": ("moe_shared_expert_intermediate_size", "shared_intermediate_size"),
    "first_k_dense_replace": ("num_dense_layers", "moe_layer_start_index", "moe_layer_num_skipped"),
    "decoder_sparse_step": ("moe_layer_interval", "interleave_moe_layer_step"),
    "scoring_func": ("score_func", "score_function", "moe_router_activation_func"),
    "use_routing_bias": ("moe_router_enable_expert_bias", "use_expert_bias", "moe_use_aux_free"),
    "norm_topk_prob": ("route_norm", "moe_renormalize", "norm_expert_weight"),
    "routed_scaling_factor": ("route_scale", "router_scaling_factor", "moe_router_topk_scaling_factor"),
    "use_qk_norm": ("qk_norm", "qk_layernorm"),
    "use_qkv_bias": ("qkv_bias", "add_qkv_bias"),
    "router_aux_loss_coef": ("aux_loss_alpha", "load_balance_coeff", "moe_aux_loss_coeff"),
    "num_nextn_predict_layers": ("mtp_num_layers", "num_mtp_layers"),
    "partial_rotary_factor": ("rotary_pct", "rope_pct"),
}
"""The usual name of a field -> other spellings of it."""
_BY_BIAS = {"scoring_func": "sigmoid", "use_routing_bias": True}
BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    "bailing_moe": {},
    "bailing_moe_v2": _BY_BIAS | {"use_qk_norm": True},
    "deepseek_v32": _BY_BIAS,
    "dots1": _BY_BIAS | {"use_qk_norm": True},
    "ernie4_5_moe": {"use_routing_bias": True, "tie_word_embeddings": True, "interleaves_rotation": True},
    "glm4_moe_lite": _BY_BIAS,
    "glm_moe_dsa": _BY_BIAS,
    "granitemoe": {"rms_norm_eps": 1e-6},
    "granitemoehybrid": {"rms_norm_eps": 1e-6},
    "granitemoeshared": {"rms_norm_eps": 1e-6},
    "hunyuan_v1_moe": {"use_qk_norm": True, "n_shared_experts": 1, "rms_norm_eps": 1e-5},
    "minimax_m2": _BY_BIAS | {"use_qk_norm": True, "qk_norm_type": "per_layer"},
    "mistral": {},
    "phimoe": {"norm_type": "layernorm", "rms_norm_eps": 1e-5},
    "qwen2": {"use_qkv_bias": True},
    "qwen3": {"use_qk_norm": True},
    "qwen3_vl_moe_text": {"use_qk_norm": True},
}
"""model_type -> fields with the values that the class of the family has built in; a file may say otherwise."""
LACKING: Mapping[str, str] = {
    "ernie4_5_moe": "it adds its bias to softmax scores, megatron-core to sigmoid scores alone",
    "hunyuan_v1_moe": "it norms queries and keys behind the rotation, megatron-core before it",
    "phimoe": "its sparse mixer and the biases of attention output and output layer are not in megatron-core",
}
"""model_type -> what no field tells and megatron-core lacks; sizes and speed hardly differ."""
_COVERED: Mapping[str, tuple[str, ...]] = {
    "ernie4_5_moe": ("moe_norm_min",),
    "minimax_m2": ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    "phimoe": ("lm_head_bias", "original_max_position_embeddings"),
}
"""model_type -> fields without an effect of their own: a bound of rounding, prediction layers that the published weights lack, or
what `LACKING` names."""
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
_JITTERS = ("router_jitter_noise", "input_jitter_noise", "moe_jitter_eps")


def renamed(fields: Fields) -> Fields:
    """The same fields under their usual names, with what the family's class has built in.

    Raises:
        ConfigError: two spellings of a field contradict each other.
    """
    values, spelled = dict(fields.values), dict[str, str]()
    for usual, others in SPELLINGS.items():
        for other in (name for name in others if name in values):
            value = values.pop(other)
            if values.get(usual) is not None and value is not None and values[usual] != value:
                raise fields.error(other, value, f"contradicts {spelled.get(usual, usual)}", "correct the file")
            if values.get(usual) is None:
                values[usual], spelled[usual] = value, other
        by_layer = values.get(usual)
        if isinstance(by_layer, list) and by_layer and all(entry == by_layer[0] for entry in by_layer):
            values[usual] = by_layer[0]
    family = fields.get("model_type", None)
    built_in = BUILT_IN.get(family, {}) if isinstance(family, str) else {}
    return fields.with_values({**built_in, **values}, spelled)


def decoder_of_fields(fields: Fields, notes: list[str]) -> Flags:
    """The flags of a decoder with `renamed` fields.

    Raises:
        ConfigError: a size is missing or wrong, or the activation is another.
    """
    family = fields.get("model_type", None)
    if not isinstance(family, str) or family not in BUILT_IN:
        rule = "unknown family, read by its fields: norms, biases and gates that no field tells are not described"
        fields.unbuilt.append(fields.error("model_type", family, rule, "tools/predict.py answers"))
    elif family in LACKING:
        fields.unbuilt.append(fields.error("model_type", family, LACKING[family], PREDICT))
    if fields.get("kv_lora_rank", None) is not None:
        flags = latent_attention_flags(fields, notes)
    else:
        flags = _grouped_attention(fields)
    fields.only("use_rmsnorm", True, (True,), "another norm")
    if fields.only("norm_type", "rms", ("rms", "rmsnorm", "layernorm"), "another norm") == "layernorm":
        flags["normalization"] = "LayerNorm"
    fields.only("position_embedding_type", "rope", ("rope",), "another kind of positions")
    for name in _COVERED.get(family, ()) if isinstance(family, str) else ():
        fields.get(name, None)
    for name in _MULTIPLIERS:
        fields.built(name, 1.0, (1.0,), "megatron-core does not scale there")
    for name in _JITTERS:
        fields.built(name, 0.0, (0.0, None), "Hugging Face also applies the jitter to the input of the experts")
    if fields.get("num_experts", None) not in (None, 0):
        flags |= _mixture(fields, flags["ffn-hidden-size"]) | _router(fields)
        flags |= balancing_flags(fields, 0.0, notes)
    predicted = fields.integer("num_nextn_predict_layers", 0, least=0)
    return flags | ({"mtp-num-layers": predicted} if predicted else {})


def _grouped_attention(fields: Fields) -> Flags:
    """Sizes, and attention over key/value groups with its biases, norms, rotation and windows."""
    flags = decoder_flags(fields, key_value_heads=None) | rotary_flags(fields, 10000.0)
    in_attention = fields.switch("attention_bias", False) or fields.switch("use_qkv_bias", False)
    flags |= bias_flags(everywhere=fields.switch("use_bias", False))
    flags |= {"add-qkv-bias": True} if in_attention and "disable-bias-linear" in flags else {}
    if fields.switch("use_qk_norm", False):
        flags |= {"qk-layernorm": True}
        rule = "its norm of queries and keys is over all heads together, megatron-core's over each head"
        fields.built("qk_norm_type", "per_head", ("per_head",), rule)
    width = flags.get("kv-channels", flags["hidden-size"] // flags["num-attention-heads"])
    rotated_width = fields.integer("rotary_dim", width)
    rotated = fields.number("partial_rotary_factor", None) or rotated_width / width
    flags |= {} if rotated == 1 else {"rotary-percent": rotated}
    flags |= {"rotary-interleaved": True} if fields.switch("interleaves_rotation", False) else {}
    scale = fields.number("attention_multiplier", None)
    if scale is not None and not math.isclose(scale, width**-0.5, rel_tol=1e-6):
        rule = "megatron-core scales scores by the root of a head's width"
        fields.unbuilt.append(fields.error("attention_multiplier", scale, rule, PREDICT))
    fields.built("clip_qkv", None, (None,), "megatron-core does not clip queries, keys and values")
    return flags | _sliding_windows(fields, flags)


def _sliding_windows(fields: Fields, flags: Flags) -> Flags:
    """The causal windows: of the layers that a list names, else of all behind the first `max_window_layers`."""
    layers, window = flags["num-layers"], fields.integer("sliding_window", None)
    first, is_on = fields.integer("max_window_layers", 0, least=0), fields.get("use_sliding_window", True)
    kinds = fields.get("layer_types", None)
    if isinstance(kinds, list):
        kinds = ["full_attention" if kind == "attention" else kind for kind in kinds]
    else:
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        rule = f"must name {layers} layers as sliding_attention or full_attention"
        raise fields.error("layer_types", kinds, rule, "correct the file")
    if window is None or not is_on or window >= flags["max-position-embeddings"]:
        return {}
    return window_flags([kind == "sliding_attention" for kind in kinds], window)


def _mixture(fields: Fields, dense_width: int) -> Flags:
    """The experts, their width, the layers that have them, and the experts that all tokens share.

    Args:
        dense_width: of the MLP in dense layers, and of the experts where no field says theirs.
    """
    layers = fields.layers()
    first = fields.integer("first_k_dense_replace", 0, least=0)
    last = fields.get("moe_layer_end_index", None)
    last = layers - 1 if last in (None, -1) else fields.integer("moe_layer_end_index", least=0)
    step, frequency = fields.integer("decoder_sparse_step", 1), fields.get("moe_layer_freq", 1)
    dense = fields.get("mlp_only_layers", None) or []
    if not isinstance(dense, list):
        raise fields.error("mlp_only_layers", dense, "must be a list of layers", "correct the file")
    if isinstance(frequency, list):
        require_bits(fields, "moe_layer_freq", frequency, layers)
        follows = [bool(bit) for bit in frequency]
    else:
        follows = [layer % fields.integer("moe_layer_freq", 1) == 0 for layer in range(layers)]
    are_moe = [
        first <= layer <= last and (layer + 1) % step == 0 and follows[layer] and layer not in dense
        for layer in range(layers)
    ]
    flags = expert_flags(fields.integer("num_experts"), fields.integer("num_experts_per_tok"), are_moe)
    width = fields.integer("moe_intermediate_size", dense_width)
    flags |= {} if width == dense_width else {"moe-ffn-hidden-size": width}
    shared_width = fields.get("shared_expert_intermediate_size", None) or 0
    number = fields.get("n_shared_experts", None)
    if number is None:
        number = 1 if shared_width else 0
    total = (shared_width or width) * number
    return flags | ({"moe-shared-expert-intermediate-size": total} if total else {})


def _router(fields: Fields) -> Flags:
    """Scores, their bias and scale, and the groups that limit the choice."""
    scores = ("softmax", "sigmoid", "noaux_tc")
    score = fields.only("scoring_func", "softmax", scores, "another score of the experts")
    by_bias = fields.switch("use_routing_bias", False)
    is_biased = "noaux_tc" in (score, fields.get("topk_method", None)) or by_bias
    flags: Flags = {"moe-router-dtype": "fp32"} if fields.get("router_dtype", None) == "fp32" else {}
    if score != "softmax":  # noaux_tc is DeepSeek-V3's choice by bias, whose scores are sigmoids.
        flags |= {"moe-router-score-function": "sigmoid", "moe-router-dtype": "fp32"}
        flags |= {"moe-router-enable-expert-bias": True} if is_biased else {}
        fields.built("norm_topk_prob", True, (True,), "megatron-core normalises sigmoid scores")
    else:
        flags |= {} if fields.switch("norm_topk_prob", True) else {"moe-router-pre-softmax": True}
    scale = fields.number("routed_scaling_factor", None)
    flags |= {} if scale in (None, 1) else {"moe-router-topk-scaling-factor": scale}
    groups, reached = fields.integer("n_group", 1) or 1, fields.integer("topk_group", 1) or 1
    if groups > 1:
        flags |= {"moe-router-num-groups": groups, "moe-router-group-topk": reached}
        best = fields.integer("num_experts_per_tok") // reached
        if best != 2:
            rule = f"megatron-core scores a group by its {best} best experts, this router by two"
            fields.unbuilt.append(fields.error("topk_group", reached, rule, PREDICT))
    return flags
