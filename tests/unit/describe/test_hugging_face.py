"""Hugging Face configurations: as many parameters as transformers builds, the model files of the same models, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron.training.cli.arguments import ParsedArguments, parse
from megatron.training.cli.sizes import describe_model
from megatron.training.cli.validation import validate
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ParameterCount, model_parameters
from moe_overlap.describe.readers.hugging_face import FAMILIES, flags_of_config
from moe_overlap.describe.readers.hugging_face_fields import _NO_MATHEMATICS
from moe_overlap.describe.readers.hugging_face_parts import layer_list
from moe_overlap.describe.readers.model_file import ModelFile, read_model

ROOT = Path(__file__).resolve().parents[3]
CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "tests" / "golden" / "hugging_face_configs.json").read_text(encoding="utf-8")
)
"""config.json of published models."""
SIZES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LATENT = SIZES | {"num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12} | {
    "kv_lora_rank": 24, "q_lora_rank": 40, "head_dim": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 4,
    "n_routed_experts": 16, "n_group": 4, "topk_group": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GLM = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
SMALL: list[tuple[str, dict[str, Any]]] = [
    ("llama", SIZES),
    ("llama", SIZES | {"head_dim": 24, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("mixtral", SIZES | {"num_local_experts": 8}),
    ("qwen2_moe", SIZES | EXPERTS | {"shared_expert_intermediate_size": 80, "decoder_sparse_step": 2}),
    ("qwen2_moe", SIZES | EXPERTS | {"shared_expert_intermediate_size": 80, "qkv_bias": False, "mlp_only_layers": [1]}),
    ("qwen3_moe", SIZES | EXPERTS | {"head_dim": 32}),
    ("deepseek_v2", LATENT | {"first_k_dense_replace": 1, "n_shared_experts": 2}),
    ("deepseek_v2", LATENT | {"q_lora_rank": None}),
    ("deepseek_v3", LATENT | {"first_k_dense_replace": 2}),
    ("gpt_oss", SIZES | {"num_local_experts": 8, "head_dim": 16}),
    ("glm4_moe", SIZES | GLM),
    ("glm4_moe", SIZES | GLM | {"attention_bias": True, "use_qk_norm": True, "n_shared_experts": 2, "head_dim": 16}),
    ("gpt2", {"vocab_size": 384, "n_positions": 96, "n_embd": 48, "n_layer": 3, "n_head": 4}),
    ("gpt2", {"vocab_size": 384, "n_positions": 96, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_inner": 100}),
]
"""Sizes in which no two widths are equal by accident."""
OTHER_FORMS = ("kimi_k2", "llama4")
"""Families without a class of their own in transformers, and files with a model inside."""
LLAMA_4 = SIZES | {"num_local_experts": 8, "head_dim": 16, "intermediate_size_mlp": 160, "interleave_moe_layer_step": 2}
DBRX = {"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 128, "vocab_size": 384}
ONLY_PREDICTED: dict[str, dict[str, Any]] = {
    "olmoe": SIZES | {"num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "dbrx": DBRX
    | {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 8, "moe_top_k": 2, "ffn_hidden_size": 96},
    },
    "llama4_text": LLAMA_4,
}
"""Small models of families of which megatron-core lacks a layer that changes neither size nor speed much."""
UNLIKE = {"olmoe": -4 * 2 * (64 - 16), "dbrx": 9 * 64, "llama4_text": 0}
"""Parameters that the description has more than the model: a norm of heads of 16 in place of one of 64, twice in four layers; the
biases of nine norms."""


def library_config(family: str, changes: dict[str, Any]) -> Any:
    return transformers.AutoConfig.for_model(family, **changes)


def read(values: dict[str, Any], tmp_path: Path, *more: str) -> ParsedArguments:
    """The command line of a config.json, checked as a dry run checks it."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    parsed = parse(["--model", str(path), "--micro-batch-size", "1", "--global-batch-size", "8", *more])
    validate(parsed.config, 1)
    return parsed


def count(parsed: ParsedArguments) -> ParameterCount:
    assert parsed.config.data.vocab_size is not None
    return model_parameters(describe_model(parsed.config, parsed.config.data.vocab_size))


@pytest.mark.parametrize(("family", "changes"), SMALL)
def test_parameters_are_those_that_transformers_builds(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = library_config(family, changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert count(read(json.loads(config.to_json_string()), tmp_path)).total == built
    assert count(read(config.to_dict(), tmp_path)).total == built  # with the fields that equal their defaults


@pytest.mark.parametrize("family", ONLY_PREDICTED)
def test_a_model_that_lacks_a_layer_is_refused_for_training_and_described_for_a_prediction(
    family: str, tmp_path: Path
) -> None:
    config = library_config(family, ONLY_PREDICTED[family])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    path = tmp_path / "config.json"
    path.write_text(config.to_json_string(), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read_model(str(path))
    described = read_model(str(path), is_predicted=True)
    lacking = f"not modelled: {' '.join(filter(None, (refused.value.subject, str(refused.value.value))))}: "
    assert any(note.startswith(lacking) and note.endswith(refused.value.rule) for note in described.notes)
    parsed = parse([*described.arguments, "--micro-batch-size", "1", "--global-batch-size", "8"])
    validate(parsed.config, 1)
    assert count(parsed).total - built == UNLIKE[family]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in OTHER_FORMS])
def test_every_field_of_the_class_counts(family: str) -> None:
    """Another value of any field gives other flags or is refused, unless the field is known to change nothing."""
    lacks = family in ONLY_PREDICTED
    changes = ONLY_PREDICTED[family] if lacks else next(small for name, small in SMALL if name == family)
    values = library_config(family, changes).to_dict()
    flags, notes = flags_of_config(values, "config.json", lacks)
    without_effect = set()
    for name, value in values.items():
        other = "other" if value is None or isinstance(value, str | list | dict) else not value
        for changed in [other] if isinstance(value, bool | str | list | dict | None) else [value + 1, value * 2 + 2]:
            try:
                other_flags, other_notes = flags_of_config(values | {name: changed}, "config.json", lacks)
                same = other_flags == flags and (not lacks or other_notes == notes)
            except ConfigError:
                same = False
            if same:
                without_effect.add(name)
    # Windows are off for Qwen's models, whatever their width, and greedy choice knows no groups.
    idle = {"qwen2_moe": {"sliding_window", "max_window_layers"}, "qwen3_moe": {"sliding_window"}}
    idle["deepseek_v2"] = {"topk_group", "n_group"}
    idle["glm4_moe"] = {"topk_group"}
    # The temperature of attention is 1 up to the sequence that a note names; layers are named one by one.
    idle["llama4_text"] = {"attn_scale", "floor_scale", "attention_chunk_size"}
    idle["llama4_text"] |= {"no_rope_layer_interval", "interleave_moe_layer_step"}
    assert without_effect - _NO_MATHEMATICS <= idle.get(family, set())


PUBLISHED = {
    "mixtral-8x7b": (46.7e9, 12.9e9),  # Mixtral of Experts, section 1
    "qwen1.5-moe-a2.7b": (14.3e9, 2.7e9),  # Qwen's model card
    "qwen3-30b-a3b": (30.5e9, 3.3e9),  # Qwen's model card
    "qwen3-235b-a22b": (235e9, 22e9),  # Qwen's model card
    "deepseek-v2": (236e9, 21e9),  # DeepSeek-V2, abstract
    "deepseek-v2-lite": (
        15.7e9,
        2.4e9 + 102400 * 2048,
    ),  # DeepSeek-V2, appendix B; its active number leaves the lookup out
    "deepseek-v3": (671e9 + 11.5e9, 37e9 + 0.6e9),  # DeepSeek-V3, README_WEIGHTS.md: prediction module beside the model
    "gpt-oss-120b": (
        116.83e9,
        5.13e9 + 201088 * 2880,
    ),  # its model card, table 1, which leaves the lookup out of active
    "llama-3.1-8b": (8.03e9, 8.03e9),  # Meta's model card
    "gpt2": (124.4e6, 124.4e6),  # its model card
    "glm-4.5": (
        355e9 + 2 * 151552 * 5120,
        32e9 + 2 * 151552 * 5120,
    ),  # GLM-4.5, table 1, which leaves embedding and head out
    "kimi-k2": (1.026e12, 32.6e9),  # the safetensors' total; Kimi K2, table 2
}
PREDICTED = {
    "olmoe-1b-7b": (6.92e9, 1.28e9),  # OLMoE, table 1
    "dbrx": (132e9, 36e9),  # its model card
    "llama-4-scout": (109e9 - 0.87e9, 17e9),  # its model card, less the encoder of images, which is not described
    "llama-4-maverick": (400e9, 17e9),  # its model card
}
"""Models that are predicted only."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_published_numbers(name: str, tmp_path: Path) -> None:
    counted = count(read(CONFIGS[name], tmp_path))
    total, active = PUBLISHED[name]
    assert counted.total == pytest.approx(total, rel=0.003)
    assert counted.active == pytest.approx(active, rel=0.04)


@pytest.mark.parametrize("name", PREDICTED)
def test_predicted_models_have_the_published_numbers(name: str, tmp_path: Path) -> None:
    flags = ModelFile(name=name, flags=flags_of_config(CONFIGS[name], name, True)[0], notes=()).arguments
    counted = count(parse([*flags, "--micro-batch-size", "1", "--global-batch-size", "8"]))
    total, active = PREDICTED[name]
    assert counted.total == pytest.approx(total, rel=0.005)
    assert counted.active == pytest.approx(active, rel=0.04)


SAME = {
    "mixtral-8x7b": "mixtral-8x7b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen3-235b-a22b": "qwen3-235b-a22b",
    "qwen2-moe-2.7b": "qwen1.5-moe-a2.7b",
    "deepseek-v3-mtp": "deepseek-v3",
    "gpt-oss-120b": "gpt-oss-120b",
}
"""Model file -> config.json of the same model."""
ADDED = {
    "qwen2-moe-2.7b": ("--num-experts", "64"),  # COMET's number
    "deepseek-v3-mtp": ("--mtp-loss-scaling-factor", "0.3"),  # DeepSeek-V3, section 4.2, for the first 10 T tokens
}
HOW_IT_IS_TRAINED = (
    "moe_aux_loss_coeff",
    "moe_router_load_balancing_type",
    "moe_token_dispatcher_type",
    "moe_router_dtype",
)


@pytest.mark.parametrize("name", SAME)
def test_model_files_say_what_the_published_configurations_say(name: str, tmp_path: Path) -> None:
    theirs = read(CONFIGS[SAME[name]], tmp_path, *ADDED.get(name, ())).config
    ours = parse([f"@{ROOT}/examples/{name}.args"]).config
    assert theirs.model == ours.model
    assert theirs.data.vocab_size == ours.data.vocab_size
    for field in type(ours.moe).__slots__:
        if field not in HOW_IT_IS_TRAINED:
            assert getattr(theirs.moe, field) == getattr(ours.moe, field), field


def test_meanings_beyond_the_number_of_parameters(tmp_path: Path) -> None:
    qwen = read(CONFIGS["qwen1.5-moe-a2.7b"], tmp_path).config
    assert qwen.moe.moe_router_pre_softmax and qwen.moe.moe_shared_expert_gate and qwen.model.add_qkv_bias
    llama = read(CONFIGS["llama-3.1-8b"], tmp_path)
    assert (llama.config.model.rotary_base, llama.config.model.seq_length) == (500000, 4096)
    latent = read(CONFIGS["deepseek-v2"], tmp_path)
    assert (latent.config.moe.moe_router_pre_softmax, latent.config.moe.moe_router_topk_scaling_factor) == (True, 16.0)
    assert latent.model_notes == (
        "megatron-core scores a group of experts by its 2 best ones, DeepSeek-V2 by its best one",
    )
    assert read(CONFIGS["deepseek-v3"] | {"rope_scaling": None}, tmp_path).config.model.rope_type == "rope"
    linear = CONFIGS["llama-3.1-8b"] | {"rope_scaling": {"type": "linear", "factor": 4.0}}
    assert read(linear, tmp_path).config.model.rotary_seq_len_interpolation_factor == 4
    glm, kimi = read(CONFIGS["glm-4.5"], tmp_path).config, read(CONFIGS["kimi-k2"], tmp_path)
    assert (glm.model.rotary_percent, glm.model.qk_layernorm, glm.model.add_qkv_bias) == (0.5, True, True)
    assert (glm.model.add_bias_linear, glm.model.mtp_num_layers) == (False, 1)
    assert (glm.moe.moe_router_score_function, glm.moe.moe_router_topk_scaling_factor) == ("sigmoid", 2.5)
    assert kimi.config.moe.moe_router_num_groups is None and kimi.config.model.rotary_scaling_factor == 32
    assert kimi.model_notes[0].startswith("megatron-core's latent attention has beta_fast 32 built in")
    newer = {k: v for k, v in CONFIGS["mixtral-8x7b"].items() if k != "rope_theta"}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert read(newer, tmp_path).config.model.rotary_base == 500000


def test_lists_of_layers() -> None:
    assert layer_list([False] * 3 + [True] * 2) == "([0]*3+[1]*2)"
    config = CONFIGS["qwen3-30b-a3b"] | {"num_hidden_layers": 4, "decoder_sparse_step": 2}
    assert flags_of_config(config, "")[0]["moe-layer-freq"] == "([0]*1+[1]*1+[0]*1+[1]*1)"
    oss = CONFIGS["gpt-oss-120b"] | {"num_hidden_layers": 4}
    for kinds, expected in (("sfsf", 2), ("fsfs", "([0]*1+[1]*1+[0]*1+[1]*1)"), ("sssf", 4), ("ssss", None)):
        names = [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds]
        flags, _ = flags_of_config(oss | {"layer_types": names}, "")
        assert (flags["window-size"], flags.get("window-attn-skip-freq")) == ("127,0", expected)
    flags, _ = flags_of_config(oss | {"layer_types": ["full_attention"] * 4}, "")
    assert "window-size" not in flags


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("llama-3.1-8b", {"model_type": "falcon"}, "model_type falcon: unknown family, read by its fields: norms, biases and"),
    ("llama-3.1-8b", {"model_type": 3}, "model_type 3: unknown family"),
    ("llama-3.1-8b", {"hidden_size": None}, "hidden_size null: must be a whole number; correct the file"),
    ("llama-3.1-8b", {"hidden_size": 0}, "hidden_size 0: must be at least 1; correct the file"),
    ("llama-3.1-8b", {"hidden_size": "4096"}, 'hidden_size "4096": must be a whole number; correct the file'),
    ("llama-3.1-8b", {"rms_norm_eps": "1e-5"}, 'rms_norm_eps "1e-5": must be a number; correct the file'),
    ("llama-3.1-8b", {"tie_word_embeddings": 1}, "tie_word_embeddings 1: must be true or false; correct the file"),
    ("llama-3.1-8b", {"hidden_act": "gelu"}, "hidden_act gelu: another activation; only silu can be trained here"),
    ("llama-3.1-8b", {"attention_bias": True}, "attention_bias true: mlp_bias is false: megatron-core has biases in all"),
    ("llama-3.1-8b", {"embedding_multiplier": 12.0}, "embedding_multiplier 12.0: unknown field, which may change the model"),
    ("llama-3.1-8b", {"rope_theta": 0.5}, "rope_theta 0.5: megatron-core has whole bases; round it"),
    ("llama-3.1-8b", {"rope_scaling": 8}, "rope_scaling 8: must be an object; correct the file"),
    ("llama-3.1-8b", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling rope_type dynamic: this scaling of"),
    ("llama-3.1-8b", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor: the field is missing"),
    ("llama-3.1-8b", {"rope_scaling": {"type": "linear", "factor": 1.5}}, "factor 1.5: megatron-core interpolates by whole"),
    ("llama-3.1-8b", {"rope_scaling": {"type": "linear", "factor": 2.0, "x": 1}}, "rope_scaling x 1: unknown field"),
    ("mixtral-8x7b", {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1: Hugging Face also applies the jitter to the input"),
    ("qwen1.5-moe-a2.7b", {"use_sliding_window": True}, "use_sliding_window true: windows of some layers are not translated"),
    ("qwen3-30b-a3b", {"mlp_only_layers": "none"}, "mlp_only_layers none: must be a list of layers"),
    ("qwen3-30b-a3b", {"attention_bias": True}, "attention_bias true: megatron-core has biases in all linear layers"),
    ("gpt-oss-120b", {"layer_types": ["linear"] * 36}, "layer_types: layers 0-35 are linear, no attention: not"),
    ("gpt-oss-120b", {"layer_types": ["other"] * 36}, "must name 36 layers as sliding_attention or full"),
    ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob true: Hugging Face's code for DeepSeek-V2 does not read it"),
    ("deepseek-v3", {"topk_group": 2}, "topk_group 2: megatron-core scores a group by its 4 best experts, DeepSeek-V3 by two"),
    ("deepseek-v3", {"num_key_value_heads": 8}, "num_key_value_heads 8: latent attention has no key/value groups"),
    ("deepseek-v3", {"head_dim": 56}, "head_dim 56: the widths of a head contradict each other; only 64"),
    ("glm-4.5", {"norm_topk_prob": False}, "norm_topk_prob false: megatron-core normalises sigmoid scores"),
    ("kimi-k2", {"index_topk": 2048}, "index_topk: its sparse attention is not modelled; tools/predict.py answers"),
    ("olmoe-1b-7b", {}, "olmoe: its q_norm and k_norm are over all heads together, megatron-core's over each head; tools"),
    ("olmoe-1b-7b", {"clip_qkv": 8.0}, "clip_qkv 8.0: megatron-core does not clip queries, keys and values; tools/predict.py"),
    ("dbrx", {}, "attn_config clip_qkv 8: megatron-core does not clip queries, keys and values; tools/predict.py answers"),
    ("dbrx", {"ffn_config": None}, "ffn_config: the field is missing"),
    ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "relu"}}}, "ffn_act_fn {'name': 'relu'}: another activation"),
    ("dbrx", {"attn_config": {"rope_theta": 0.5}}, "attn_config rope_theta 0.5: megatron-core has whole bases"),
    ("llama-4-scout", {}, "vision_config: the encoder of images is not modelled"),
    ("llama-4-scout", {"text_config": None}, "text_config: the field is missing"),
    ("qwen3-next-80b-a3b", {}, "layers 0-2, 4-6, 8-10, 12-14, 16-18, … 44-46 are linear attention, no"),
    ("gpt2", {"embd_pdrop": 0.0}, "embd_pdrop 0.0: megatron-core has one dropout for embedding and residual stream"),
    ("gpt2", {"activation_function": "relu"}, "activation_function relu: another activation; only gelu_new or"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "attention scores are scaled alike in all layers"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention true: the model reads an encoder"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "line"), WRONG)
def test_what_cannot_be_trained_is_refused(name: str, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        flags_of_config(CONFIGS[name] | changes, "config.json")
    assert str(caught.value).startswith("config.json ") and line in str(caught.value)


def test_llama_4_is_described_layer_by_layer() -> None:
    text = CONFIGS["llama-4-maverick"]["text_config"]
    short = text | {"num_hidden_layers": 4, "moe_layers": [3], "no_rope_layers": [1, 1, 1, 0]}
    assert flags_of_config(short, "", True)[0]["moe-layer-freq"] == "([0]*3+[1]*1)"
    for changes, line in (
        ({"layer_types": ["full_attention"] * 4}, "chunks in other layers than those that rotate"),
        ({"no_rope_layers": [1, 2, 1, 0]}, "must be a list of 4 times 0 or 1"),
        ({"moe_layers": 3}, "must be a list of layers"),
        ({"num_experts_per_tok": 2}, "scales what an expert reads for one expert of a token only"),
    ):
        with pytest.raises(ConfigError, match=line):
            flags_of_config(short | changes, "config.json", True)
    rotated = short | {"no_rope_layers": [1] * 4}
    flags, notes = flags_of_config(rotated, "config.json")  # Nothing is left that a layer here does not compute.
    assert flags["moe-apply-probs-on-input"] and notes[0].endswith("the same up to --seq-length 8192")
    with pytest.raises(ConfigError, match="attention is plain only up to 1024 tokens, and samples have 4096"):
        flags_of_config(rotated | {"attention_chunk_size": 1024}, "config.json")


@pytest.mark.parametrize("name", CONFIGS)
def test_missing_fields_are_named_or_have_a_default(name: str) -> None:
    for field in CONFIGS[name]:
        less = {key: value for key, value in CONFIGS[name].items() if key != field}
        try:
            flags_of_config(less, "config.json")
        except ConfigError as error:
            assert error.subject.startswith("config.json ") and error.rule != "", field
