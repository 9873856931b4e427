"""Falcon's layer: attention and MLP side by side, against Hugging Face's Falcon with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import describe_model
from megatron.training.cli.validation import validate
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import model_parameters, training_flops_per_token
from tests.unit.runtime.one_process import SIZES, VOCABULARY, batch, loss_of, small

FALCON = (
    f"{SIZES} --position-embedding-type rope --disable-bias-linear --group-query-attention --attention-dropout 0 "
    "--hidden-dropout 0 --init-method-std 0.3"
)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "7B": (
        f"{FALCON} --num-query-groups 1 --parallel-attention-mlp one-norm",
        {"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True},
    ),
    "40B": (
        f"{FALCON} --num-query-groups 2 --parallel-attention-mlp two-norms",
        {"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "11B": (
        f"{FALCON} --num-query-groups 2 --parallel-attention-mlp one-norm",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
}
NAMES = (
    ("transformer.word_embeddings.", "embedding.word_embeddings."),
    ("transformer.h.", "decoder.layers."),
    ("transformer.ln_f.", "decoder.final_layernorm."),
    ("self_attention.query_key_value.", "self_attention.linear_qkv."),
    ("self_attention.dense.", "self_attention.linear_proj."),
    ("mlp.dense_h_to_4h.", "mlp.linear_fc1."),
    ("mlp.dense_4h_to_h.", "mlp.linear_fc2."),
    ("ln_attn.", "input_layernorm."),
    ("ln_mlp.", "pre_mlp_layernorm."),
)
"""Beginnings and middles of Hugging Face's names -> ours. The rows of a group's queries, key and value stand alike."""


def twin_of(model: Any, settings: dict[str, Any]) -> Any:
    """Hugging Face's Falcon in random weights, which the model takes over."""
    from transformers import FalconConfig, FalconForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(7)
    config = FalconConfig(**sizes, **settings, bias=False, alibi=False, ffn_hidden_size=128, initializer_range=0.3)
    twin = FalconForCausalLM(config)
    mine, taken = dict(model.named_parameters()), set()
    with torch.no_grad():
        for name, weight in twin.named_parameters():
            if "norm" in name or "ln_" in name:
                weight.add_(torch.randn_like(weight) * 0.3)
            for theirs, ours in NAMES:
                name = name.replace(theirs, ours)
            mine[name].copy_(weight)
            taken.add(name)
    assert taken == set(mine)
    return twin


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_gradients_equal_hugging_faces(name: str) -> None:
    pytest.importorskip("transformers")
    flags, settings = VARIANTS[name]
    model: Any = small(flags).stock()
    twin = twin_of(model, settings)
    tokens, positions, labels = batch()
    logits_BSV = model(tokens, positions, None)
    theirs_BSV = twin(tokens).logits
    assert theirs_BSV.abs().max() > 1
    assert (logits_BSV - theirs_BSV).abs().max() < 1e-5 * theirs_BSV.abs().max()
    model(tokens, positions, None, labels=labels).mean().backward()
    torch.nn.functional.cross_entropy(theirs_BSV.flatten(0, 1), labels.flatten()).backward()
    for mine, other in (
        (model.decoder.layers[0].input_layernorm.weight, getattr(twin.transformer.h[0], _norm(settings)).weight),
        (model.embedding.word_embeddings.weight, twin.transformer.word_embeddings.weight),
    ):
        assert (mine.grad - other.grad).abs().max() < 1e-5 * other.grad.abs().max()


def _norm(settings: dict[str, Any]) -> str:
    two = settings["new_decoder_architecture"] and "num_ln_in_parallel_attn" not in settings
    return "ln_attn" if two else "input_layernorm"


@pytest.mark.parametrize("name", VARIANTS)
def test_counts_equal_the_built_model(name: str) -> None:
    made = small(VARIANTS[name][0])
    built = sum(parameter.numel() for parameter in made.stock().parameters())
    assert model_parameters(made.model).total == built
    # A norm is counted like a matrix row.
    serial = describe_model(small(VARIANTS[name][0].rpartition(" --parallel")[0]).config, VOCABULARY)
    fewer = 2 * 2 * 32 if made.model.parallel_block == "one-norm" else 0
    assert training_flops_per_token(made.model, 16) == training_flops_per_token(serial, 16) - 6 * fewer


@pytest.mark.parametrize("again", ["full --recompute-method uniform --recompute-num-layers 1", "selective"])
def test_recomputation_changes_nothing(again: str) -> None:
    flags = VARIANTS["7B"][0]
    plain, repeated = small(flags).stock(), small(f"{flags} --recompute-granularity {again}").stock()
    for model in (plain, repeated):
        loss_of(model).backward()
    for one, other in zip(plain.parameters(), repeated.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            "--num-experts 4",
            "--parallel-attention-mlp one-norm: joins attention with a dense MLP; drop --num-experts or it",
        ),
        (
            "--recompute-granularity selective --recompute-modules core_attn mlp",
            "--recompute-modules mlp: --parallel-attention-mlp recomputes core_attn or whole layers; "
            "use core_attn or --recompute-granularity full",
        ),
        (
            "--defer-weight-gradients --moe-token-dispatcher-type irregular",
            "--parallel-attention-mlp one-norm: --defer-weight-gradients runs attention and MLP one after the other; "
            "drop it or --defer-weight-gradients",
        ),
    ],
)
def test_what_does_not_go_with_it(flags: str, line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(parse(f"{VARIANTS['7B'][0]} {flags}".split()).config, 1)
    assert str(refused.value) == line
