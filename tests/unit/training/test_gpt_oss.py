"""GPT-OSS as Hugging Face's transformers computes it: the same weights give the same logits and gradients here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.runtime.one_process import batch, small

LAYERS, HIDDEN, HEADS, GROUPS, WIDTH, EXPERTS, INNER, CLAMP = 2, 32, 4, 2, 8, 4, 24, 0.5
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --group-query-attention "
    f"--num-query-groups {GROUPS} --kv-channels {WIDTH} --seq-length 16 --max-position-embeddings 16 --mock-data "
    "--position-embedding-type yarn --rotary-base 150000 --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 4096 "
    "--no-yarn-correction-range-round-to-int --window-size 3,0 --window-attn-skip-freq 2 --softmax-type learnable "
    f"--normalization RMSNorm --quick-geglu --activation-func-clamp-value {CLAMP} --glu-linear-offset 1.0 "
    f"--num-experts {EXPERTS} --moe-router-topk 2 --moe-ffn-hidden-size {INNER} --moe-token-dispatcher-type alltoall "
    "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 64 --attention-dropout 0 --hidden-dropout 0 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-3"
)


def theirs() -> Any:
    """A random GptOssForCausalLM of these sizes."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=WIDTH,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        intermediate_size=INNER,
        vocab_size=64,
        sliding_window=4,
        rope_theta=150000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        max_position_embeddings=4 * 4096,
        rms_norm_eps=1e-5,
        attention_dropout=0.0,
        attn_implementation="eager",
    )
    model = transformers.GptOssForCausalLM(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    for layer in model.model.layers:
        layer.mlp.experts.limit = CLAMP  # 7 there; small enough to be met
    return model.train()


def in_our_layout(name: str, weights: dict[str, Tensor]) -> Tensor:
    """Our parameter of that name, from theirs."""
    whole = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    if name in whole:
        return weights[whole[name]]
    number, _, rest = name.removeprefix("decoder.layers.").partition(".")
    layer = {key.split(".", 3)[3]: value for key, value in weights.items() if key.startswith(f"model.layers.{number}.")}
    same = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attention.core_attention.softmax_offset": "self_attn.sinks",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
        "mlp.router.weight": "mlp.router.weight",
        "mlp.router.bias": "mlp.router.bias",
    }
    if rest in same:
        return layer[same[rest]]
    kind = rest.rpartition(".")[2]
    if rest.startswith("self_attention.linear_qkv"):
        # Ours: for each group its queries, then its key, then its value.
        q, k, v = (layer[f"self_attn.{part}_proj.{kind}"].unflatten(0, (GROUPS, -1)) for part in "qkv")
        return torch.cat([q, k, v], dim=1).flatten(0, 1)
    expert = int(rest.split(".")[3])
    projection = "gate_up_proj" if "linear_fc1" in rest else "down_proj"
    found = layer[f"mlp.experts.{projection}" + ("_bias" if kind == "bias" else "")][expert].t()
    # Theirs: gate and linear half in turn; ours: one after the other.
    return torch.cat([found[::2], found[1::2]]) if projection == "gate_up_proj" else found


def test_logits_and_gradients_equal_those_of_transformers() -> None:
    other, model = theirs(), small(FLAGS).stock()
    weights = dict(other.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(in_our_layout(name, weights))
    tokens, positions, labels = batch()
    logits, expected = model(tokens, positions, None), other(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    model(tokens, positions, None, labels=labels).sum().backward()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    gradients = {name: parameter.grad for name, parameter in weights.items()}
    compared = 0
    for name, parameter in model.named_parameters():
        wanted = in_our_layout(name, gradients)
        assert (parameter.grad - wanted).abs().max() <= 1e-5 * wanted.abs().max() > 0, name
        compared += 1
    assert compared == 3 + LAYERS * (9 + 4 * EXPERTS)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in other.parameters())
