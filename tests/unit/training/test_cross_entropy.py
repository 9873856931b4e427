"""Losses and gradients of logits in one process, against torch's cross entropy in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.training.model.layers.output import cross_entropy
from tests.unit.runtime.one_process import SIZES, VOCABULARY, batch, small

DENSE = f"{SIZES} --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
ROUNDING = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Relative, of one rounding to the type; of a few operations in fp32."""


def exact(logits_SBV: Tensor, labels_SB: Tensor, weights_SB: Tensor) -> tuple[Tensor, Tensor]:
    """Losses, and the logits' gradient of their weighted sum."""
    wide = logits_SBV.detach().double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(wide.flatten(0, 1), labels_SB.flatten(), reduction="none")
    (gradient,) = torch.autograd.grad((losses * weights_SB.flatten()).sum(), wide)
    return losses.view_as(labels_SB), gradient


@pytest.mark.parametrize("kind", ROUNDING)
def test_losses_and_gradients_are_rounded_once(kind: torch.dtype) -> None:
    small(DENSE)  # makes the group
    torch.manual_seed(0)
    values = (20 * torch.randn(5, 3, 40)).to(kind)
    labels, weights = torch.randint(40, (5, 3)), torch.rand(5, 3) + 0.1
    expected, gradient = exact(values, labels, weights)
    logits = values.requires_grad_()
    losses = cross_entropy(logits * 1, labels, dist.group.WORLD)
    (losses * weights).sum().backward()
    assert losses.dtype == torch.float32 and logits.grad.dtype == kind
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    # The smallest gradients are lost in fp16, which has none below 2⁻²⁴.
    torch.testing.assert_close(logits.grad.double(), gradient, rtol=ROUNDING[kind], atol=2.0**-25)


def test_models_train_by_it() -> None:
    model = small(DENSE).stock()
    tokens, positions, labels = batch()
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(0))
    (model(tokens, positions, None, labels=labels) * weights).sum().backward()
    found = model.output_layer.weight.grad.clone()
    model.zero_grad()
    logits = model(tokens, positions, None)
    assert logits.shape == (*labels.shape, VOCABULARY)
    logits.backward(exact(logits, labels, weights)[1].float())
    assert (found - model.output_layer.weight.grad).abs().max() <= 1e-6 * found.abs().max()
