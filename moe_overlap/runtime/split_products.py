"""Matrix products whose two gradients are separate functions: of the input (needed at once) and of the weights (can wait).

Each repeats megatron-core's operations in the same order on the same shapes, so that both gradients are bitwise those of the
undivided backward pass (tensor_parallel/layers.py LinearWithGradAccumulationAndAsyncCommunication,
transformer/moe/moe_utils.py RouterGatingLinearFunction).

Legend: S sequence (X: this rank's part of it), B batch, I input width, O output width, T rows, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import layers
from torch import Tensor


class Product(Protocol):
    """One product of an input with the parameters of one or several modules."""

    @property
    def communicates(self) -> bool:
        """Whether `weight_gradients` contains a collective."""

    def output(self, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """The product."""

    def input_gradient(self, gradient: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Gradient of x, in its shape, with the communication that belongs to it."""

    def weight_gradients(self, x: Tensor, gradient: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the parameters, in their order; None where it was added to the main gradient here."""


@dataclass(frozen=True, slots=True)
class LinearProduct:
    """y = x · Wᵀ + b of a column- or row-parallel linear; parameters: W[O, I], then b[O] where the product adds one.

    Attributes:
        group: tensor-parallel group; used by the other two only.
        reduces_input_gradient: the input is the same on all ranks of the group, its gradient is a sum over them.
        gathers_input: the input is a part of the sequence (x[X, B, I]).
        into_main_gradient: W's gradient is added to its main gradient by the product itself (APEX's kernel).
    """

    group: Any = None
    reduces_input_gradient: bool = False
    gathers_input: bool = False
    into_main_gradient: bool = False

    @property
    def communicates(self) -> bool:
        """Only the part of the sequence is kept, the rest is gathered again."""
        return self.gathers_input

    def output(self, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """[…, I] -> […, O]; the sequence is whole in the result."""
        y = torch.matmul(self._whole_sequence(x), parameters[0].t())
        return y + parameters[1] if len(parameters) > 1 else y

    def input_gradient(self, gradient: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """[…, O] -> […, I]."""
        dx = gradient.matmul(parameters[0])
        if self.gathers_input:
            part = dx.new_empty((dx.shape[0] // self.group.size(), *dx.shape[1:]))
            dist.reduce_scatter_tensor(part, dx, group=self.group)
            return part
        if self.reduces_input_gradient:
            dist.all_reduce(dx, group=self.group)
        return dx

    def weight_gradients(self, x: Tensor, gradient: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """[O, I], and [O] where there is a bias."""
        x_TI = self._whole_sequence(x).contiguous().view(-1, x.shape[-1])
        dy_TO = gradient.contiguous().view(-1, gradient.shape[-1])
        gradients: list[Tensor | None] = [self._weight_gradient(x_TI, dy_TO, parameters[0])]
        return gradients if len(parameters) == 1 else [*gradients, dy_TO.sum(dim=0)]

    def _weight_gradient(self, x_TI: Tensor, dy_TO: Tensor, weight: Any) -> Tensor | None:
        if not self.into_main_gradient:
            return dy_TO.t().matmul(x_TI)
        kernel, in_fp32 = layers.fused_weight_gradient_mlp_cuda, weight.main_grad.dtype == torch.float32
        add = kernel.wgrad_gemm_accum_fp32 if in_fp32 else kernel.wgrad_gemm_accum_fp16
        add(x_TI, dy_TO, weight.main_grad)
        return None

    def _whole_sequence(self, x: Tensor) -> Tensor:
        if not self.gathers_input:
            return x
        # Not megatron-core's process-wide buffer: another layer gathers into that before a deferred product has read it.
        whole = x.new_empty((x.shape[0] * self.group.size(), *x.shape[1:]))
        dist.all_gather_into_tensor(whole, x.contiguous(), group=self.group)
        return whole


@dataclass(frozen=True, slots=True)
class GatingProduct:
    """Logits of a gate in the router's precision; parameters: W[E, I], then b[E] where there is one."""

    router_dtype: torch.dtype
    input_dtype: torch.dtype
    communicates = False

    def output(self, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """[…, I] -> […, E]."""
        weight_EI, *bias = (parameter.to(self.router_dtype) for parameter in parameters)
        x_TI = x.reshape(-1, x.shape[-1]).to(self.router_dtype)
        logits = torch.addmm(bias[0], x_TI, weight_EI.t()) if bias else torch.mm(x_TI, weight_EI.t())
        return logits.view(*x.shape[:-1], -1)

    def input_gradient(self, gradient: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """[…, E] -> […, I]."""
        dx_TI = torch.mm(gradient.reshape(-1, gradient.shape[-1]), parameters[0].to(self.router_dtype))
        return dx_TI.to(self.input_dtype).view(*gradient.shape[:-1], -1)

    def weight_gradients(self, x: Tensor, gradient: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """[E, I], and [E] where there is a bias."""
        dtype = parameters[0].dtype
        dy_TE = gradient.reshape(-1, gradient.shape[-1])
        dw_EI = torch.mm(dy_TE.t(), x.reshape(-1, x.shape[-1]).to(self.router_dtype)).to(dtype)
        return [dw_EI] if len(parameters) == 1 else [dw_EI, dy_TE.sum(dim=0).to(dtype)]


@dataclass(frozen=True, slots=True)
class GroupedProduct:
    """The products of all experts of a rank as one; parameters: E matrices [O, I].

    Attributes:
        ends_E: int32, where the rows of each expert end.
    """

    ends_E: Tensor
    communicates = False

    def output(self, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """[T, I] -> [T, O]."""
        return F.grouped_mm(x, torch.stack(list(parameters)).transpose(1, 2), offs=self.ends_E)

    def input_gradient(self, gradient: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """[T, O] -> [T, I]."""
        return F.grouped_mm(gradient, torch.stack(list(parameters)), offs=self.ends_E)

    def weight_gradients(self, x: Tensor, gradient: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """[O, I] for each expert."""
        return list(F.grouped_mm(gradient.t(), x, offs=self.ends_E).unbind())
