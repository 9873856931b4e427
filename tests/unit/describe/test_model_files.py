"""Example models: the argument files say what the model files say, and every one of them can be planned."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.dry_run import dry_run
from tools.write_examples import argument_file

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MIST_SIZES = ("1.3b", "2.7b", "7b", "13b", "22b")
NAMES = sorted(path.stem for path in (EXAMPLES / "models").glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_argument_file_is_generated_from_the_model_file(name: str) -> None:
    description = json.loads((EXAMPLES / "models" / f"{name}.json").read_text(encoding="utf-8"))
    assert description["name"] == name
    assert (EXAMPLES / f"{name}.args").read_text(encoding="utf-8") == argument_file(description)


@pytest.mark.parametrize("name", NAMES)
def test_model_files_describe_complete_jobs(name: str) -> None:
    parsed = parse([f"@{EXAMPLES}/{name}.args"])
    out = io.StringIO()
    dry_run(parsed, None, out)
    assert out.getvalue().startswith(f"model         {name}: ")


SHARED_SIBLINGS = {
    "qwen3-235b-a22b": "tiny-qwen3-30b-a3b",
    "gpt2-s-moe": "tiny-gpt2-moe",
    "gpt2-l-moe": "tiny-gpt2-moe",
}
SHARED_SIBLINGS |= {
    f"mist-{family}-{size}": f"tiny-{family}" for family in ("gpt", "llama", "falcon") for size in MIST_SIZES
}
SHARED_SIBLINGS |= {name: f"tiny-{name.rpartition('-')[0]}" for name in NAMES if name.startswith("alpa-")}
"""Models of one family share a small one; the others have one of their own name."""


def test_every_family_has_a_small_sibling() -> None:
    large = [name for name in NAMES if not name.startswith("tiny-")]
    siblings = {SHARED_SIBLINGS.get(name, f"tiny-{name}") for name in large}
    assert {*large, *siblings} == set(NAMES)
    assert set(SHARED_SIBLINGS) <= set(large)


def shape(name: str) -> tuple[object, ...]:
    """The traits that a family's models have in common, sizes left out."""
    config = parse([f"@{EXAMPLES}/{name}.args"]).config
    model, moe = config.model, config.moe
    some_layers = isinstance(moe.moe_layer_freq, tuple) and len(set(moe.moe_layer_freq)) > 1
    kinds = (model.position_embedding_type, model.normalization, model.add_bias_linear, config.attention.softmax_type)
    activation = (model.swiglu, model.openai_gelu, model.quick_geglu, model.activation_func_clamp_value)
    attention = (
        config.attention.window_attn_skip_freq,
        model.add_qkv_bias,
        model.qk_layernorm,
        model.multi_latent_attention,
        model.q_lora_rank is None,
    )
    shared = (moe.moe_shared_expert_intermediate_size is None, moe.moe_shared_expert_gate)
    router = (moe.moe_router_score_function, moe.moe_router_pre_softmax, moe.moe_router_enable_expert_bias)
    block = (model.mtp_num_layers, model.parallel_attention_mlp)
    tied = not model.untie_embeddings_and_output_weights
    return (
        *kinds,
        *activation,
        *attention,
        *block,
        tied,
        moe.num_experts is None,
        some_layers,
        *shared,
        *router,
        config.overlap.moe_gate,
    )


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("tiny-")])
def test_small_siblings_are_of_the_same_shape(name: str) -> None:
    assert shape(SHARED_SIBLINGS.get(name, f"tiny-{name}")) == shape(name)
