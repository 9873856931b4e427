"""Runs of test_cross_entropy_ranks.py on two ranks."""

from __future__ import annotations

from typing import Any

VOCABULARY = 40


def losses_and_gradients() -> dict[str, Any]:
    """Losses and gradients of whole logits on one rank and of halves on two; gradients are those of this rank's half."""
    import torch
    import torch.distributed as dist

    from megatron.training.model.layers.output import cross_entropy

    rank = dist.get_rank()
    alone = [dist.new_group([member]) for member in range(2)][rank]
    torch.manual_seed(0)
    logits_SBV, weights_SB = 20 * torch.randn(7, 3, VOCABULARY), torch.rand(7, 3) + 0.1
    labels_SB = torch.randint(VOCABULARY, (7, 3))
    half = slice(rank * VOCABULARY // 2, (rank + 1) * VOCABULARY // 2)
    found = {}
    for name, part, group in (("whole", slice(None), alone), ("halves", half, dist.group.WORLD)):
        leaf = logits_SBV[..., part].clone().requires_grad_()
        losses = cross_entropy(leaf * 1, labels_SB, group)
        (losses * weights_SB).sum().backward()
        gradient = leaf.grad[..., half] if name == "whole" else leaf.grad
        found[name] = losses.tolist(), gradient.tolist()
    return found
