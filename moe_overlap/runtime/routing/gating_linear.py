"""The gate's linear layer, in the precision of the routing.

megatron-core's needs Transformer Engine's GEMM (it ends in a NameError without). Both save the input in its own precision: a
float32 copy of every token would outweigh the rest of the gate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import HAVE_TE, router_gating_linear
from torch import Tensor

GatingLinear = Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Tensor]


def gating_linear(hidden: Tensor, weight_EH: Tensor, bias_E: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Logits [..., E] of the hidden states [..., H], in `dtype`. Transformer Engine's GEMM where it is installed."""
    if HAVE_TE:
        return router_gating_linear(hidden, weight_EH, bias_E, dtype)
    return _GatingLinear.apply(hidden, weight_EH, bias_E, dtype)


class _GatingLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_EH: Tensor, bias_E: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight_EH)
        ctx.dtype, ctx.bias_dtype = dtype, None if bias_E is None else bias_E.dtype
        bias_E = None if bias_E is None else bias_E.to(dtype)
        return torch.nn.functional.linear(hidden.to(dtype), weight_EH.to(dtype), bias_E)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        hidden, weight_EH = ctx.saved_tensors
        (grad,) = gradients
        grad_TE = grad.flatten(0, -2)
        grad_hidden = (grad @ weight_EH.to(ctx.dtype)).to(hidden.dtype)
        grad_weight_EH = (grad_TE.t() @ hidden.flatten(0, -2).to(ctx.dtype)).to(weight_EH.dtype)
        grad_bias_E = None if ctx.bias_dtype is None else grad_TE.sum(0).to(ctx.bias_dtype)
        return grad_hidden, grad_weight_EH, grad_bias_E, None
