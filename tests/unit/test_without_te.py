"""Attention and norms without Transformer Engine against obvious ones; experts with biases; dropout and its generators."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from one_process import MOE, SIZES, loss_of, small
from torch import Tensor

from megatron.training.without_te import ExpertOutput, SdpaAttention, TorchNorm, transformer_engine_is_installed

S, B = 7, 2


def attention(scale: float | None = None, dropout: float = 0.0, sequence_parallel: bool = False) -> SdpaAttention:
    config = SimpleNamespace(attention_dropout=dropout, sequence_parallel=sequence_parallel, context_parallel_size=1)
    return SdpaAttention(config, 1, None, "self", softmax_scale=scale)


def slow_attention(query: Tensor, key: Tensor, value: Tensor, forbidden: Tensor, scale: float) -> Tensor:
    """One sample, head and position after the other. `forbidden`: [B, S, S]."""
    heads, groups = query.shape[2], key.shape[2]
    out = torch.zeros(query.shape[0], query.shape[1], heads, value.shape[3], dtype=query.dtype)
    for sample in range(query.shape[1]):
        for head in range(heads):
            group = head // (heads // groups)
            for place in range(query.shape[0]):
                allowed = [other for other in range(key.shape[0]) if not forbidden[sample, place, other]]
                scores = torch.stack([query[place, sample, head] @ key[other, sample, group] for other in allowed])
                weights = torch.softmax(scores * scale, 0)
                out[place, sample, head] = sum(
                    weight * value[other, sample, group] for weight, other in zip(weights, allowed, strict=True)
                )
    return out.flatten(2)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("value_width", [6, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_equals_the_slow_one(groups: int, value_width: int, scale: float | None, masked: bool) -> None:
    torch.manual_seed(groups + value_width)
    query, key = torch.randn(S, B, 4, 6).double(), torch.randn(S, B, groups, 6).double()
    value = torch.randn(S, B, groups, value_width).double()
    forbidden = torch.ones(S, S).triu(1).bool().expand(B, S, S).clone()
    if masked:
        forbidden[1, 4:, :4] = True  # a document ends inside the second sample
    mask = forbidden.unsqueeze(1) if masked else None
    fast = [x.clone().requires_grad_() for x in (query, key, value)]
    slow = [x.clone().requires_grad_() for x in (query, key, value)]
    out = attention(scale)(*fast, mask)
    expected = slow_attention(*slow, forbidden, 6**-0.5 if scale is None else scale)
    assert out.shape == (S, B, 4 * value_width)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def uses(random: Any) -> tuple[bool, bool]:
    """Whether running this moves the tracked generator state, and whether it moves the default one."""
    tracker = get_cuda_rng_tracker()
    tracked, default = tracker.get_states()["model-parallel-rng"].clone(), torch.get_rng_state()
    random()
    moved = tracker.get_states()["model-parallel-rng"]
    return not torch.equal(tracked, moved), not torch.equal(default, torch.get_rng_state())


def test_dropout_draws_from_the_tracked_generator() -> None:
    small(MOE).stock()
    q = torch.randn(S, B, 4, 6)
    module = attention(dropout=0.5)
    assert uses(lambda: module(q, q, q, None)) == (True, False)
    with_sequence_parallel = attention(dropout=0.5, sequence_parallel=True)
    # There the layer's caller has forked the tracker already: a second fork would draw the same mask again.
    assert uses(lambda: with_sequence_parallel(q, q, q, None)) == (False, True)
    assert not torch.equal(module(q, q, q, None), module(q, q, q, None))
    module.eval()
    assert uses(lambda: module(q, q, q, None)) == (False, False)
    assert torch.equal(module(q, q, q, None), attention()(q, q, q, None))


def norm(kind: str, width: int = 5, **changes: Any) -> TorchNorm:
    values = {
        "normalization": kind,
        "layernorm_zero_centered_gamma": False,
        "params_dtype": torch.float64,
        "sequence_parallel": False,
    } | changes
    return TorchNorm(SimpleNamespace(**values), width, eps=1e-3)


def test_layer_norm_is_the_formula() -> None:
    module, x = norm("LayerNorm"), torch.randn(3, 2, 5).double()
    torch.nn.init.normal_(module.weight)
    torch.nn.init.normal_(module.bias)
    variance = ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True)
    expected = (x - x.mean(-1, keepdim=True)) / (variance + 1e-3).sqrt() * module.weight + module.bias
    torch.testing.assert_close(module(x), expected)


def test_rms_norm_is_the_formula() -> None:
    module, x = norm("RMSNorm"), torch.randn(3, 2, 5).double()
    torch.nn.init.normal_(module.weight)
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    torch.testing.assert_close(module(x), x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * module.weight)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms_say_whether_the_sequence_is_split(kind: str, sequence_parallel: bool) -> None:
    module = norm(kind, sequence_parallel=sequence_parallel, params_dtype=torch.bfloat16)
    assert all(parameter.sequence_parallel is sequence_parallel for parameter in module.parameters())
    assert all(parameter.dtype == torch.bfloat16 for parameter in module.parameters())


def test_biases_of_experts_that_nobody_shares() -> None:
    model = small(f"{SIZES} --num-experts 4 --attention-dropout 0 --hidden-dropout 0").stock()
    outputs = [module for module in model.modules() if isinstance(module, ExpertOutput)]
    assert len(outputs) == 2 * 4
    with torch.no_grad():
        for module in outputs:
            module.bias.normal_()
    loss_of(model).backward()
    # A small step along the gradient of a bias changes the loss by what the gradient says.
    bias = max((module.bias for module in outputs), key=lambda parameter: parameter.grad.norm())
    step = 1e-2 * bias.grad / bias.grad.norm()
    with torch.no_grad():
        bias.add_(step)
        above = loss_of(model).item()
        bias.sub_(2 * step)
        below = loss_of(model).item()
    assert (above - below) / 2e-2 == pytest.approx(float(bias.grad.norm()), rel=0.05)


def test_transformer_engine_is_only_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert transformer_engine_is_installed()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not transformer_engine_is_installed()
