"""Linears with the interface of Transformer Engine 2.20, computed by torch on the CPU.

Signatures, and what `backward_dw` does with gradients, are those that Transformer Engine's Python sources state; an argument that
they do not know is a TypeError. The numbers are torch's: nothing here shows what a kernel computes.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class WeightGradStore:
    """Weight gradients that backward passes leave for `backward_dw`, first in, first out."""

    def __init__(self, delay_wgrad_compute: bool = False, ub_bulk_wgrad: bool = False) -> None:
        assert not (delay_wgrad_compute and ub_bulk_wgrad)
        self.context: queue.Queue[Callable[[], Any]] | None = queue.Queue() if delay_wgrad_compute else None
        self.enabled = delay_wgrad_compute

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def disable_delay_wgrad_compute(self) -> None:
        self.enabled = False


class _Module(torch.nn.Module):
    """Weights [O, I], one per product; the gradient of each is computed in the backward pass or by `backward_dw`."""

    def __init__(
        self, count: int, in_features: int, out_features: int, fuse: bool, bias: bool, delay: bool, dtype: Any
    ) -> None:
        super().__init__()
        self.fp8 = True
        self.fuse_wgrad_accumulation = fuse
        self.wgrad_store = WeightGradStore(delay)
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []
        names = ["weight"] if count == 0 else [f"weight{index}" for index in range(count)]
        for name in names:
            parameter = torch.nn.Parameter(torch.zeros(out_features, in_features, dtype=dtype))
            if delay:
                parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)
        self.weights = [getattr(self, name) for name in names]
        assert not (bias and count), "the stand-in's grouped products have no biases"
        self.register_parameter("bias", torch.nn.Parameter(torch.zeros(out_features, dtype=dtype)) if bias else None)
        if bias and delay:
            self.bias.skip_backward_post_hook = True

    def register_wgrad_accumulation_and_reduce_hooks(self, wgrad_accumulation_and_reduce_hook: Any) -> None:
        self.wgrad_accumulation_and_reduce_hooks.append(wgrad_accumulation_and_reduce_hook)

    def backward_dw(self) -> None:
        if not self.wgrad_store.delay_wgrad_compute():
            return
        assert self.wgrad_store.context is not None
        if self.wgrad_store.context.empty():
            raise RuntimeError("Pop empty queue.")
        for weight, gradient in zip(self.weights, self.wgrad_store.context.get()(), strict=True):
            if not self.fuse_wgrad_accumulation:
                weight.grad = gradient.to(weight.dtype)
        if self.bias is not None and self.bias.grad is None:
            # Up to release 2.19: in 8 bits a product of weights' gradients has none of biases.
            raise AttributeError("'NoneType' object has no attribute 'to'")
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: _Module, splits: list[int], x: Tensor, *weights: Tensor) -> Tensor:
        ctx.module, ctx.splits = module, splits
        ctx.save_for_backward(x, *weights)
        parts = x.split(splits) if len(weights) > 1 else (x,)
        return torch.cat([part.matmul(weight.t()) for part, weight in zip(parts, weights, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        module, grouped = ctx.module, len(weights) > 1
        dys, xs = (gradient.split(ctx.splits), x.split(ctx.splits)) if grouped else ((gradient,), (x,))
        dx = torch.cat([dy.matmul(weight) for dy, weight in zip(dys, weights, strict=True)])

        def weight_gradients() -> list[Tensor | None]:
            found = []
            for dy, part, weight in zip(dys, xs, module.weights, strict=True):
                rows = dy.reshape(-1, dy.shape[-1])
                dw = rows.t().matmul(part.reshape(-1, part.shape[-1]))
                if module.fuse_wgrad_accumulation:
                    weight.main_grad.add_(dw)
                found.append(dw)
            return found

        if module.wgrad_store.delay_wgrad_compute():
            module.wgrad_store.context.put(weight_gradients)
            # Grouped products hand out the memory that `backward_dw` will write.
            found: list[Tensor | None] = [torch.full_like(weight, torch.nan) if grouped else None for weight in weights]
        else:
            found = weight_gradients()
        if module.fuse_wgrad_accumulation:
            found = [left_in_place_of_a_sum(weight) for weight in module.weights]
        return (None, None, dx, *found)


def left_in_place_of_a_sum(weight: Any) -> Tensor | None:
    """What a backward pass returns for a weight whose gradient is, or will be, in its main gradient.

    megatron-core's DDP gives parameters the mark; autograd then gets memory that nobody has written, here NaN, so that the
    parameter's hooks run.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.full_like(weight, torch.nan)


class Linear(_Module):
    """transformer_engine.pytorch.Linear, with megatron-core's answer: (output, no bias)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(0, in_features, out_features, fuse_wgrad_accumulation, bias, delay_wgrad_compute, params_dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        y = _Product.apply(self, [], x, *self.weights)
        # As in 8 bits: the bias's gradient comes from the backward pass, whatever is put aside.
        return (y if self.bias is None else y + self.bias), None


class GroupedLinear(_Module):
    """transformer_engine.pytorch.GroupedLinear, with megatron-core's answer: (output, no bias)."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        super().__init__(
            num_gemms, in_features, out_features, fuse_wgrad_accumulation, bias, delay_wgrad_compute, params_dtype
        )

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        return _Product.apply(self, m_splits, x, *self.weights), None
