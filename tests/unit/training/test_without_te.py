"""Norms without Transformer Engine against obvious ones; experts with biases."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.training.model.layers.local_modules import ExpertOutput, TorchNorm, transformer_engine_is_installed
from tests.unit.runtime.one_process import SIZES, loss_of, small


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
