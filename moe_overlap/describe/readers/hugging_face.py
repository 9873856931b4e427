"""A Hugging Face config.json as flags of this fork. Standard library only.

A family with peculiarities is a function here; any other is read by its fields (`hugging_face_decoder.py`). Every field that
changes the model's mathematics is translated, or refused with its name and value; so are all fields that nothing here reads,
unless they are switched off or known to change nothing (`hugging_face_fields.py`). An absent field has the default of the
family's class in transformers 4.57.

Source: configuration_*.py and modeling_*.py of transformers 4.57.6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.readers.hugging_face_decoder import decoder_of_fields, renamed
from moe_overlap.describe.readers.hugging_face_fields import (
    PREDICT,
    Fields,
    is_whole,
    longest_training_sequence,
    rotary_flags,
)
from moe_overlap.describe.readers.hugging_face_layers import require_attention
from moe_overlap.describe.readers.hugging_face_parts import (
    Flags,
    balancing_flags,
    balancing_flags_by,
    bias_flags,
    decoder_flags,
    expert_flags,
    latent_attention_flags,
    require_bits,
    untied_flags,
    window_flags,
)

NOT_MODELLED = "not modelled: "
"""Beginning of a note on a property that no figure of a prediction includes."""


def flags_of_config(values: Mapping[str, Any], where: str, is_predicted: bool = False) -> tuple[Flags, tuple[str, ...]]:
    """The flags for the model of a config.json.

    Args:
        values: the parsed file.
        where: the file, for errors.
        is_predicted: whether the model is only predicted, not trained: errors in `Fields.unbuilt` then become notes.
    Returns:
        The flags, and a note on each difference between megatron-core and Hugging Face's code.
    Raises:
        ConfigError: an unknown family or field, a missing field, or a value that this fork cannot train.
    """
    notes: list[str] = []
    fields = Fields(values, where)
    flags = _flags_of(fields, notes)
    if fields.unbuilt and not is_predicted:
        raise _joined(fields.unbuilt, where)
    notes += [f"{NOT_MODELLED}{f'{error.subject} {error.value}'.strip()}: {error.rule}" for error in fields.unbuilt]
    return flags, tuple(notes)


def _flags_of(fields: Fields, notes: list[str]) -> Flags:
    """The flags of a model or of the language model inside it; every field is read."""
    family = fields.get("model_type", None)
    require_attention(fields)
    if isinstance(family, str) and family in FAMILIES:
        flags = FAMILIES[family](fields, notes)
        _finish(fields)
        return flags
    for name in TEXT_MODELS:
        if isinstance(fields.values.get(name), dict):
            rule = "only the language model inside is described, no encoder of images or sounds"
            fields.unbuilt.append(fields.error("model_type", family, rule, f"give {name} alone"))
            text = fields.inner(name)
            assert text is not None
            return _flags_of(text, notes)
    usual = renamed(fields)
    flags = decoder_of_fields(usual, notes)
    _finish(usual)
    return flags


def _joined(errors: Sequence[ConfigError], where: str) -> ConfigError:
    """The first of several errors about a file; its fix names the fields of the others."""
    first, others = errors[0], [error.subject.removeprefix(f"{where} ") for error in errors[1:]]
    fix = f"{first.fix} (likewise: {', '.join(dict.fromkeys(others))})" if others else first.fix
    return ConfigError(first.subject, first.value, first.rule, fix)


def _finish(fields: Fields) -> None:
    """Check the fields of every (also nested) class of transformers, and that every field has been read."""
    fields.only("add_cross_attention", False, (False,), "the model reads an encoder")
    fields.only("pruned_heads", {}, ({},), "the heads are of unlike number")
    fields.finish()


def _llama(fields: Fields, notes: list[str]) -> Flags:
    flags = decoder_flags(fields, key_value_heads=None)
    attention, mlp = fields.switch("attention_bias", False), fields.switch("mlp_bias", False)
    if attention != mlp:
        rule = f"mlp_bias is {str(mlp).lower()}: megatron-core has biases in all linear layers or in none"
        raise fields.error("attention_bias", str(attention).lower(), rule, "give both the same value")
    return flags | rotary_flags(fields, 10000.0) | bias_flags(everywhere=attention)


def _mixtral(fields: Fields, notes: list[str]) -> Flags:
    flags = decoder_flags(fields, norm_epsilon=1e-5) | rotary_flags(fields, 1e6) | bias_flags(everywhere=False)
    window = fields.integer("sliding_window", None)
    flags |= {} if window is None else {"window-size": f"{window - 1},0"}
    rule = "Hugging Face also applies the jitter to the input of the experts"
    fields.only("router_jitter_noise", 0.0, (0.0,), rule)
    flags |= expert_flags(fields.integer("num_local_experts", 8), fields.integer("num_experts_per_tok", 2), None)
    return flags | balancing_flags(fields, 0.001, notes)


def _qwen2_moe(fields: Fields, notes: list[str]) -> Flags:
    flags = decoder_flags(fields) | rotary_flags(fields, 10000.0) | bias_flags(everywhere=False)
    flags |= {"add-qkv-bias": True} if fields.switch("qkv_bias", True) else {}
    flags |= _qwen_experts(fields, notes)
    return flags | {
        "moe-shared-expert-intermediate-size": fields.integer("shared_expert_intermediate_size"),
        "moe-shared-expert-gate": True,
    }


def _qwen3_moe(fields: Fields, notes: list[str]) -> Flags:
    flags = decoder_flags(fields) | rotary_flags(fields, 10000.0) | bias_flags(everywhere=False)
    rule = "megatron-core has biases in all linear layers or in none"
    fields.only("attention_bias", False, (False,), rule)
    return flags | {"qk-layernorm": True} | _qwen_experts(fields, notes)


def _qwen_experts(fields: Fields, notes: list[str]) -> Flags:
    layers, step = fields.layers(), fields.integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise fields.error("mlp_only_layers", dense, "must be a list of layers", "correct the file")
    rule = "windows of some layers are not translated for this family"
    fields.only("use_sliding_window", False, (False,), rule)
    for unused in ("sliding_window", "max_window_layers"):
        fields.get(unused, None)
    are_moe = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    flags = expert_flags(fields.integer("num_experts"), fields.integer("num_experts_per_tok"), are_moe)
    flags["moe-ffn-hidden-size"] = fields.integer("moe_intermediate_size")
    flags |= {} if fields.switch("norm_topk_prob", False) else {"moe-router-pre-softmax": True}
    return flags | balancing_flags(fields, 0.001, notes)


def _gpt_oss(fields: Fields, notes: list[str]) -> Flags:
    default = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    flags = decoder_flags(fields, norm_epsilon=1e-5, head_width=64) | rotary_flags(fields, 150000.0, default)
    rule = "megatron-core has biases in all linear layers or in none"
    fields.only("attention_bias", True, (True,), rule)
    del flags["swiglu"]
    flags |= {"quick-geglu": True, "activation-func-clamp-value": fields.number("swiglu_limit", 7.0)}
    flags |= {"glu-linear-offset": 1.0, "softmax-type": "learnable"}
    layers = fields.layers()
    usual = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    kinds = fields.get("layer_types", usual)
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(kind not in ("sliding_attention", "full_attention") for kind in kinds)
    ):
        rule = f"must name {layers} layers as sliding_attention or full_attention"
        raise fields.error("layer_types", kinds, rule, "correct the file")
    flags |= window_flags([kind == "sliding_attention" for kind in kinds], fields.integer("sliding_window", 128))
    flags |= expert_flags(fields.integer("num_local_experts", 128), fields.integer("num_experts_per_tok", 4), None)
    return flags | balancing_flags(fields, 0.9, notes)


def _deepseek_v2(fields: Fields, notes: list[str]) -> Flags:
    flags = latent_attention_flags(fields, notes) | _deepseek_experts(fields, 0, notes)
    fields.only("scoring_func", "softmax", ("softmax",), "DeepSeek-V2 scores by softmax")
    fields.only("norm_topk_prob", False, (False,), "Hugging Face's code for DeepSeek-V2 does not read it")
    flags |= {"moe-router-pre-softmax": True}
    flags["moe-router-topk-scaling-factor"] = fields.number("routed_scaling_factor", 1.0)
    method = fields.only("topk_method", "greedy", ("greedy", "group_limited_greedy"), "another choice of experts")
    groups, reached = fields.integer("n_group", None), fields.integer("topk_group", None)
    if method == "greedy" or groups in (None, 1):
        return flags
    best = flags["moe-router-topk"] // (reached or 1)
    if best != 1:
        notes.append(f"megatron-core scores a group of experts by its {best} best ones, DeepSeek-V2 by its best one")
    return flags | {"moe-router-num-groups": groups, "moe-router-group-topk": fields.integer("topk_group")}


def _deepseek_v3(fields: Fields, notes: list[str]) -> Flags:
    flags = latent_attention_flags(fields, notes) | _deepseek_experts(fields, 3, notes)
    fields.only("scoring_func", "sigmoid", ("sigmoid",), "DeepSeek-V3 scores by sigmoid")
    fields.only("topk_method", "noaux_tc", ("noaux_tc",), "DeepSeek-V3 balances by bias")
    fields.only("rope_interleave", True, (True,), "megatron-core rotates neighbours of latent attention")
    return flags | _balanced_by_bias(fields, flags["moe-router-topk"], scale=2.5, groups=8, reached=4)


def _balanced_by_bias(fields: Fields, chosen: int, *, scale: float, groups: int, reached: int) -> Flags:
    """DeepSeek-V3's router, and its prediction layers.

    Args:
        chosen: experts of a token.
        scale, groups, reached: defaults of routed_scaling_factor, n_group and topk_group.
    """
    fields.only("norm_topk_prob", True, (True,), "megatron-core normalises sigmoid scores")
    flags: Flags = {"moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": True}
    flags["moe-router-topk-scaling-factor"] = fields.number("routed_scaling_factor", scale)
    groups, reached = fields.integer("n_group", groups), fields.integer("topk_group", reached)
    if groups > 1:
        best = chosen // reached
        rule = f"megatron-core scores a group by its {best} best experts, DeepSeek-V3 by two"
        if best != 2:
            raise fields.error("topk_group", reached, rule, "use half of num_experts_per_tok, or n_group 1")
        flags |= {"moe-router-num-groups": groups, "moe-router-group-topk": reached}
    predicted = fields.integer("num_nextn_predict_layers", 0, least=0)
    return flags | ({"mtp-num-layers": predicted} if predicted else {})


def _glm4_moe(fields: Fields, notes: list[str]) -> Flags:
    """GLM-4.5: attention over key/value groups with DeepSeek-V3's experts."""
    flags = decoder_flags(fields, norm_epsilon=1e-5) | rotary_flags(fields, 10000.0) | bias_flags(everywhere=False)
    flags |= {"add-qkv-bias": True} if fields.switch("attention_bias", False) else {}
    flags |= {"qk-layernorm": True} if fields.switch("use_qk_norm", False) else {}
    rotated = fields.number("partial_rotary_factor", 0.5)
    flags |= {} if rotated == 1 else {"rotary-percent": rotated}
    flags |= _deepseek_experts(fields, 1, notes)
    return flags | _balanced_by_bias(fields, flags["moe-router-topk"], scale=1.0, groups=1, reached=1)


def _olmoe(fields: Fields, notes: list[str]) -> Flags:
    flags = decoder_flags(fields, key_value_heads=None, norm_epsilon=1e-5) | rotary_flags(fields, 10000.0)
    rule = "megatron-core has biases in all linear layers or in none"
    fields.only("attention_bias", False, (False,), rule)
    fields.built("clip_qkv", None, (None,), "megatron-core does not clip queries, keys and values")
    rule = "its q_norm and k_norm are over all heads together, megatron-core's over each head"
    fields.unbuilt.append(
        fields.error("model_type", "olmoe", rule, "tools/predict.py answers with a norm of each head")
    )
    flags |= bias_flags(everywhere=False) | {"qk-layernorm": True}
    flags |= expert_flags(fields.integer("num_experts", 64), fields.integer("num_experts_per_tok", 8), None)
    flags |= {} if fields.switch("norm_topk_prob", False) else {"moe-router-pre-softmax": True}
    return flags | balancing_flags(fields, 0.01, notes)


def _dbrx(fields: Fields, notes: list[str]) -> Flags:
    attention, mlp = fields.inner("attn_config"), fields.inner("ffn_config")
    if attention is None or mlp is None:
        absent = "attn_config" if attention is None else "ffn_config"
        raise fields.error(absent, "", "the field is missing", "take the config.json of the published model")
    heads, positions, dropout = (
        fields.integer("n_heads"),
        fields.integer("max_seq_len"),
        fields.number("resid_pdrop", 0.0),
    )
    groups, theta = attention.integer("kv_n_heads", 1), attention.number("rope_theta", 10000.0)
    if not is_whole(theta):
        raise attention.error("rope_theta", theta, "megatron-core has whole bases", "round it")
    attention.built("clip_qkv", None, (None,), "megatron-core does not clip queries, keys and values")
    rule = "its norms have no bias, megatron-core's LayerNorm has one"
    fields.unbuilt.append(fields.error("model_type", "dbrx", rule, "tools/predict.py answers with a bias"))
    fields.only("emb_pdrop", 0.0, (dropout,), "megatron-core has one dropout for embedding and residual stream")
    fields.only("num_key_value_heads", groups, (groups,), "attn_config kv_n_heads is another number")
    activation = mlp.get("ffn_act_fn", None)
    if activation not in (None, {"name": "silu"}):
        raise mlp.error("ffn_act_fn", activation, "another activation", "only silu can be trained here")
    mlp.built("moe_jitter_eps", None, (None, 0.0), "Hugging Face also applies the jitter to the input of the experts")
    normalized = mlp.only("moe_normalize_expert_weights", 1.0, (1.0, None), "another norm of an expert's weights")
    flags: Flags = {
        "num-layers": fields.layers("n_layers"),
        "hidden-size": fields.integer("d_model"),
        "ffn-hidden-size": mlp.integer("ffn_hidden_size", 3584),
        "num-attention-heads": heads,
        "seq-length": longest_training_sequence(positions),
        "max-position-embeddings": positions,
        "position-embedding-type": "rope",
        "rotary-base": int(theta),
        "swiglu": True,
        "attention-dropout": attention.number("attn_pdrop", 0.0),
        "hidden-dropout": dropout,
        "init-method-std": fields.number("initializer_range", 0.02),
        "vocab-size": fields.integer("vocab_size"),
    }
    flags |= {} if groups == heads else {"group-query-attention": True, "num-query-groups": groups}
    flags |= bias_flags(everywhere=False) | untied_flags(fields, False)
    flags |= expert_flags(mlp.integer("moe_num_experts", 4), mlp.integer("moe_top_k", 1), None)
    flags |= {} if normalized else {"moe-router-pre-softmax": True}
    balancing = balancing_flags(mlp, 0.01, notes, "moe_loss_weight")
    for inner in (attention, mlp):
        inner.get("tie_word_embeddings", None)  # Every class of transformers writes it, also without embeddings.
        _finish(inner)
    return flags | balancing


def _llama4(fields: Fields, notes: list[str]) -> Flags:
    """The text model (`text_config`) of a multi-modal Llama 4."""
    text = fields.inner("text_config")
    if text is None:
        raise fields.error("text_config", "", "the field is missing", "take the config.json of the published model")
    if fields.get("vision_config", None) is not None:
        rule = "the encoder of images is not modelled"
        fields.unbuilt.append(fields.error("vision_config", "", rule, "give the text model alone, as llama4_text"))
    tied = fields.switch("tie_word_embeddings", False)
    text.only("tie_word_embeddings", tied, (tied,), "tie_word_embeddings stands outside text_config with another value")
    for token in ("boi_token_index", "eoi_token_index", "image_token_index"):
        fields.get(token, None)
    flags = _llama4_text(text, notes)
    _finish(text)
    return flags


def _llama4_text(fields: Fields, notes: list[str]) -> Flags:
    """Llama 4: scores scale the experts' input, and every fourth layer has no rotary positions.

    In the published models a sequence of up to 8191 tokens is one chunk of attention, whose temperature is 1.
    """
    flags = decoder_flags(fields, norm_epsilon=1e-5, head_width=128) | rotary_flags(fields, 500000.0)
    fields.only("attention_bias", False, (False,), "megatron-core has biases in all linear layers or in none")
    flags |= bias_flags(everywhere=False) | {"rotary-interleaved": True}
    layers = fields.layers()
    rule = "megatron-core's norm of queries and keys by their length is not executed here"
    fields.built("use_qk_norm", True, (False,), rule)
    interval = fields.integer("no_rope_layer_interval", 4)
    rotated = fields.get("no_rope_layers", None) or [int((layer + 1) % interval != 0) for layer in range(layers)]
    require_bits(fields, "no_rope_layers", rotated, layers)
    if not all(rotated):
        rule = "layers without rotation of queries and keys are not executed here"
        fields.unbuilt.append(fields.error("no_rope_layers", f"{layers - sum(rotated)} layers", rule, PREDICT))
    _note_longest(fields, rotated, flags["seq-length"], notes)
    step = fields.integer("interleave_moe_layer_step", 1)
    held = fields.get("moe_layers", None)
    held = list(range(step - 1, layers, step)) if held is None else held
    if not isinstance(held, list) or not all(is_whole(layer) for layer in held):
        raise fields.error("moe_layers", held, "must be a list of layers", "correct the file")
    flags |= expert_flags(
        fields.integer("num_local_experts", 16),
        fields.integer("num_experts_per_tok", 1),
        [layer in held for layer in range(layers)],
    )
    width = flags["ffn-hidden-size"]
    flags |= {"ffn-hidden-size": fields.integer("intermediate_size_mlp", 16384), "moe-ffn-hidden-size": width}
    flags |= {"moe-shared-expert-intermediate-size": width, "moe-router-score-function": "sigmoid"}
    fields.only("router_jitter_noise", 0.0, (0.0,), "Hugging Face's code does not read it")
    if flags["moe-router-topk"] > 1:
        rule = "megatron-core scales what an expert reads for one expert of a token only"
        raise fields.error("num_experts_per_tok", flags["moe-router-topk"], rule, "use 1")
    return flags | {"moe-apply-probs-on-input": True} | balancing_flags(fields, 0.001, notes)


def _note_longest(fields: Fields, rotated: Sequence[int], tokens: int, notes: list[str]) -> None:
    """Note the sequence length up to which chunked attention and its temperature equal plain attention, which runs here."""
    chunk, floor = fields.integer("attention_chunk_size", 8192), fields.integer("floor_scale", 8192)
    kinds = ["chunked_attention" if bit else "full_attention" for bit in rotated]
    rule = "chunks in other layers than those that rotate are not modelled"
    fields.only("layer_types", kinds, (kinds, None), rule)
    fields.number("attn_scale", 0.1)
    longest = chunk
    if fields.switch("attn_temperature_tuning", True) and not all(rotated):
        longest = min(chunk, floor - 1)
    if longest < tokens:
        rule = f"attention is plain only up to {longest} tokens, and samples have {tokens}"
        fields.unbuilt.append(fields.error("attention_chunk_size", chunk, rule, PREDICT))
    notes.append(f"attention in chunks and its temperature are not modelled: the same up to --seq-length {longest}")


def _deepseek_experts(fields: Fields, dense: int, notes: list[str]) -> Flags:
    """Routed and shared experts; `dense` is the default of first_k_dense_replace."""
    first, step = fields.integer("first_k_dense_replace", dense, least=0), fields.integer("moe_layer_freq", 1)
    are_moe = [layer >= first and layer % step == 0 for layer in range(fields.layers())]
    flags = expert_flags(fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok"), are_moe)
    width = fields.integer("moe_intermediate_size")
    flags |= {"moe-ffn-hidden-size": width, "moe-router-dtype": "fp32"}
    shared = fields.get("n_shared_experts") and fields.integer("n_shared_experts")
    flags |= {"moe-shared-expert-intermediate-size": shared * width} if shared else {}
    coefficient = fields.number("aux_loss_alpha", 0.0)
    kind = "seq_aux_loss" if fields.switch("seq_aux", True) else "aux_loss"
    return flags | balancing_flags_by(kind, coefficient)


def _gpt2(fields: Fields, notes: list[str]) -> Flags:
    forms = {"gelu_new": True, "gelu_pytorch_tanh": True, "gelu_fast": True, "gelu": False}
    form = fields.only("activation_function", "gelu_new", tuple(forms), "another activation")
    fields.only("scale_attn_weights", True, (True,), "attention scores are scaled")
    fields.only("scale_attn_by_inverse_layer_idx", False, (False,), "attention scores are scaled alike in all layers")
    positions, hidden, dropout = (
        fields.integer("n_positions"),
        fields.integer("n_embd"),
        fields.number("resid_pdrop", 0.1),
    )
    fields.only("embd_pdrop", 0.1, (dropout,), "megatron-core has one dropout for embedding and residual stream")
    flags = {
        "num-layers": fields.integer("n_layer"),
        "hidden-size": hidden,
        "ffn-hidden-size": fields.integer("n_inner", None) or 4 * hidden,
        "num-attention-heads": fields.integer("n_head"),
        "seq-length": longest_training_sequence(positions),
        "max-position-embeddings": positions,
        "norm-epsilon": fields.number("layer_norm_epsilon", 1e-5),
        "attention-dropout": fields.number("attn_pdrop", 0.1),
        "hidden-dropout": dropout,
        "init-method-std": fields.number("initializer_range", 0.02),
        "vocab-size": fields.integer("vocab_size"),
    }
    flags |= {"openai-gelu": True} if forms[form] else {}
    return flags | untied_flags(fields, True)


FAMILIES: Mapping[str, Callable[[Fields, list[str]], Flags]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "olmoe": _olmoe,
    "dbrx": _dbrx,
    "llama4": _llama4,
    "llama4_text": _llama4_text,
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "gpt2": _gpt2,
}
"""model_type -> the function that translates it."""
TEXT_MODELS = ("text_config", "llm_config", "language_config")
"""Fields that hold the language model of a multi-modal one."""
