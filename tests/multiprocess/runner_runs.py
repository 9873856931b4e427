"""The ranks of test_runner_bits.py: jobs by megatron-core's schedule and by the executor, with norms as a GPU computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.multiprocess.graph_runs import curve_and_weights
from tests.multiprocess.partition_runs import Curve


class OneKernel(torch.autograd.Function):
    """An RMSNorm that is one node of autograd's graph, as torch's for CUDA; torch's for a CPU is composed of many."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        with torch.enable_grad():
            ctx.leaves = [part.detach().requires_grad_() for part in (x, weight)]
            ctx.output = COMPOSED(ctx.leaves[0], shape, ctx.leaves[1], eps)
        output: Tensor = ctx.output.detach()
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        dx, dweight = torch.autograd.grad(ctx.output, ctx.leaves, gradients)
        return dx, None, dweight, None


COMPOSED = torch.nn.functional.rms_norm


def curves_and_weights(variants: dict[str, str], in_one_kernel: bool) -> dict[str, tuple[Curve, str]]:
    """Losses, norms and a hash of the last weights of every variant. Collective."""
    torch.nn.functional.rms_norm = OneKernel.apply if in_one_kernel else COMPOSED
    return {name: curve_and_weights(flags, steps=3) for name, flags in variants.items()}
