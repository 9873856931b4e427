"""config.json of any family, read by its fields: published numbers, what transformers builds, refusals by field and by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import describe_model
from megatron.training.cli.validation import validate
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription, model_parameters
from moe_overlap.describe.readers.hugging_face import flags_of_config
from moe_overlap.describe.readers.model_file import ModelFile, read_model

ROOT = Path(__file__).resolve().parents[3]
CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "tests/golden/decoder_configs.json").read_text(encoding="utf-8")
)
"""Sizes of published models under the names of fields that their families use."""
PUBLISHED = {
    "dots.llm1": ("142", "14", 0),  # its report, abstract
    "phi-3.5-moe": ("41.9", "6.6", 0),  # its model card
    "granite-3.0-3b-a800m": ("3.3", "0.8", 1),  # its model card, which counts no lookup
    "kimi-k2.5": ("1026", "32.6", 0),  # the weights of Kimi-K2, whose shape it has; Kimi K2, table 2
    "ling-mini-2.0": ("16.26", "1.43", 0),  # its model card
    "ling-1t": ("1000", "50", 1),  # its model card
    "ernie-4.5-21b-a3b": ("21.8", "3", 1),  # its weights; the name
    "ernie-4.5-300b-a47b": ("300", "47", 1),  # its model card
    "minimax-m2": ("229", "10", 2),  # its weights; its model card
    "qwen3-vl-30b-a3b": ("30.5", "3", 0),  # Qwen3-30B-A3B, whose shape it has; the name
    "hunyuan-a13b": ("80", "13", 0),  # its model card
    "glm-4.7-flash": ("30", "3", 2),  # its model card
    "deepseek-v3.2": ("671", "37", 1),  # DeepSeek-V3, whose shape it has but for the indexer
}
"""Billions of parameters, total and active, as published; and how many embedding matrices the active number leaves out."""


def described(values: dict[str, Any], is_predicted: bool = True) -> tuple[ModelDescription, tuple[str, ...]]:
    flags, notes = flags_of_config(values, "config.json", is_predicted)
    words = [
        *ModelFile(name="model", flags=flags, notes=()).arguments,
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "8",
    ]
    parsed = parse(words)
    validate(parsed.config, 1)
    assert parsed.config.data.vocab_size is not None
    return describe_model(parsed.config, parsed.config.data.vocab_size), notes


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_published_numbers(name: str) -> None:
    total, active, without = PUBLISHED[name]
    model, _ = described(CONFIGS[name])
    counted = model_parameters(model)
    used = counted.active - without * model.vocab_size * model.hidden_size
    for ours, text in ((counted.total, total), (used, active)):
        # One per cent, or what the published number is rounded by.
        rounding = 0.5 * 10.0 ** -len(text.partition(".")[2])
        assert abs(ours / 1e9 - float(text)) <= max(0.01 * float(text), rounding), (ours, text)


SIZES = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
BUILT: list[tuple[str, dict[str, Any], int]] = [
    ("dots1", ROUTED | {"n_routed_experts": 8, "first_k_dense_replace": 1, "n_shared_experts": 2, "head_dim": 16}, 0),
    # Without the biases of four outputs of attention and of the head.
    ("phimoe", {"num_local_experts": 8, "attention_bias": True, "lm_head_bias": True, "head_dim": 16}, -4 * 64 - 384),
    ("granitemoe", {"num_local_experts": 8, "num_experts_per_tok": 2}, 0),
    ("granitemoeshared", {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 48}, 0),
    # Without the bias of the router in three layers.
    (
        "ernie4_5_moe",
        {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
        -3 * 8,
    ),
    ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": 2, "head_dim": 16}, 0),
    ("qwen3", {"head_dim": 32}, 0),
    ("qwen2", {}, 0),
    ("mistral", {"sliding_window": None}, 0),
]


@pytest.mark.parametrize(("family", "changes", "more"), BUILT, ids=[family for family, *_ in BUILT])
def test_parameters_are_those_that_transformers_builds(family: str, changes: dict[str, Any], more: int) -> None:
    config = transformers.AutoConfig.for_model(family, **SIZES, **changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert model_parameters(described(config.to_dict())[0]).total - built == more


DOTS = CONFIGS["dots.llm1"]


def test_a_family_that_only_has_other_names_trains() -> None:
    for name in ("dots.llm1", "ling-1t", "glm-4.7-flash"):
        assert described(CONFIGS[name], is_predicted=False)[1] == ()
    flags, _ = flags_of_config(CONFIGS["ling-1t"], "")
    assert flags["moe-layer-freq"] == "([0]*4+[1]*76)" and flags["rotary-percent"] == 0.5 and flags["qk-layernorm"]
    assert (flags["moe-router-num-groups"], flags["moe-router-group-topk"]) == (8, 4)
    granite = CONFIGS["granite-3.0-3b-a800m"]
    neutral = {
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1,
        "logits_scaling": 1.0,
        "attention_multiplier": 64**-0.5,
    }
    assert flags_of_config(granite | neutral, "")[0]["num-experts"] == 40
    ernie, _ = flags_of_config(CONFIGS["ernie-4.5-21b-a3b"], "", True)
    assert ernie["rotary-interleaved"] and ernie["moe-shared-expert-intermediate-size"] == 3072


def test_a_list_and_a_period_say_which_layers_have_experts() -> None:
    def layers(**values: Any) -> Any:
        return flags_of_config(DOTS | {"num_hidden_layers": 4, "first_k_dense_replace": 0} | values, "")[0].get(
            "moe-layer-freq"
        )

    assert layers() is None and layers(moe_layer_freq=[0, 1, 1, 0]) == "([0]*1+[1]*2+[0]*1)"
    assert layers(moe_layer_freq=2) == layers(mlp_only_layers=[1, 3]) == "([1]*1+[0]*1+[1]*1+[0]*1)"
    assert (
        layers(moe_layer_interval=2) == "([0]*1+[1]*1+[0]*1+[1]*1)" and layers(moe_layer_end_index=1) == "([1]*2+[0]*2)"
    )
    windows = {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2}
    flags, _ = flags_of_config(DOTS | {"num_hidden_layers": 4} | windows, "")
    assert (flags["window-size"], flags["window-attn-skip-freq"]) == ("127,0", "([0]*2+[1]*2)")
    flags, _ = flags_of_config(
        DOTS | {"num_hidden_layers": 2, "sliding_window": 8, "layer_types": ["attention"] * 2}, ""
    )
    assert "window-size" not in flags


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"alpha": 2, "beta_gate": True, "gamma": 0}, "config.json alpha, beta_gate: unknown fields, which may change the model"),
    ({"beta_gate": True}, "config.json beta_gate true: unknown field, which may change the model; remove it if it does not"),
    ({"n_experts": 4, "num_local_experts": 4}, "config.json n_routed_experts 128: contradicts num_local_experts"),
    ({"n_routed_experts": 0.5}, "config.json n_routed_experts 0.5: must be a whole number"),
    ({"moe_topk": [2, 3], "num_experts_per_tok": None}, "config.json moe_topk [2, 3]: must be a whole number"),
    ({"embedding_multiplier": 12.0}, "config.json embedding_multiplier 12.0: megatron-core does not scale there"),
    ({"model_type": "falcon_mamba", "time_step_limit": [0.0, float("inf")]}, "time_step_limit: these fields are of state-space"),
    ({"attn_layer_period": 31, "attn_layer_offset": 4}, "layers 0-3, 5-34, 36-61 are state-space, no attention: not modelled"),
    ({"full_attention_interval": 31}, "layers 0-29, 31-60 are linear attention, no attention: not modelled"),
    ({"linear_attn_config": {"kda_layers": [1, 2, 5]}}, "linear_attn_config: layers 0-1, 4 are linear attention, no"),
    ({"layer_types": ["mamba"] + ["attention"] * 61}, "layer_types: layers 0 are mamba, no attention: not modelled"),
    ({"attn_type_list": [0, 1]}, "attn_type_list: layers 0 are linear attention, no attention"),
    ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern: layers 0, 2 are state-space, no attention"),
    ({"index_topk": 64, "index_n_heads": 2}, "index_topk, index_n_heads: its sparse attention is not modelled; tools/predict.py"),
    ({"model_type": "unheard_of"}, "unknown family, read by its fields"),
    ({"n_group": 8, "topk_group": 2}, "topk_group 2: megatron-core scores a group by its 3 best experts, this router by two"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "line"), REFUSED)
def test_what_cannot_be_trained_is_refused_at_once(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        flags_of_config(DOTS | changes, "config.json")
    assert line in str(caught.value)


def test_an_unknown_field_is_named_as_the_file_spells_it() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    dense = {"model_type": "mistral", "max_position_embeddings": 64, "vocab_size": 512, **sizes}
    with pytest.raises(ConfigError, match=r"^config.json moe_topk 2: unknown field, which may change the model"):
        flags_of_config(dense | {"moe_topk": 2}, "config.json")


def test_a_prediction_names_what_it_leaves_out() -> None:
    _, notes = described(
        DOTS | {"alpha": 2, "beta_gate": True, "index_topk": 64, "model_type": "unheard_of", "off": False}
    )
    assert [note.removeprefix("not modelled: config.json ").partition(":")[0] for note in notes] == [
        "index_topk", "model_type unheard_of", "alpha, beta_gate",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="are linear attention, no attention"):
        described(DOTS | {"full_attention_interval": 31})


def test_all_that_stands_in_the_way_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        flags_of_config(DOTS | {"embedding_multiplier": 2.0, "clip_qkv": 8.0, "alpha": 1}, "config.json")
    assert str(caught.value).endswith("(likewise: embedding_multiplier, alpha)")
    with pytest.raises(ConfigError) as caught:
        flags_of_config(DOTS | {"clip_qkv": 8.0, "alpha": 1, "beta": 2}, "of a user/config.json")
    assert str(caught.value).endswith("(likewise: alpha, beta)")


def test_a_file_that_transformers_wrote_is_judged_by_its_layers(tmp_path: Path) -> None:
    """Infinity is what transformers writes for a limit that there is not."""
    path = tmp_path / "config.json"
    path.write_text(
        '{"model_type": "some_hybrid", "hidden_size": 128, "num_hidden_layers": 4, "time_step_limit": [0.0, Infinity]}'
    )
    with pytest.raises(ConfigError, match="time_step_limit: these fields are of state-space"):
        read_model(str(path), is_predicted=True)
    path.write_text(json.dumps(DOTS | {"rope_theta": float("nan")}))
    with pytest.raises(ConfigError, match="rope_theta nan: must be a number"):
        read_model(str(path), is_predicted=True)


def test_a_dbrx_file_as_published_is_read() -> None:
    """Its switch of a benchmark is off."""
    feed = {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 96, "uniform_expert_assignment": False}
    sizes = {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "vocab_size": 384}
    values = {"model_type": "dbrx", **sizes, "attn_config": {"kv_n_heads": 2}, "ffn_config": feed}
    assert described(values)[0].num_experts == 4
    forced = values | {"ffn_config": feed | {"uniform_expert_assignment": True}}
    assert any("uniform_expert_assignment true: unknown field" in note for note in described(forced)[1])
