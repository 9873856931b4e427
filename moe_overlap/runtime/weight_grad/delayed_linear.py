"""Weight gradients that a library defers itself: Transformer Engine's linears, built with `delay_wgrad_compute`.

Such a module stores the operands of its weights' gradient in a store of its own (`wgrad_store`, first in, first out), and
`backward_dw()` computes the oldest gradient. Contract:

1. Every backward pass of the module puts one entry into our queue when its output's gradient arrives; the entry calls
   `backward_dw()` once. The list never runs it before the operator's backward pass has ended, so the store is filled by then.
2. `backward_dw()` either puts a gradient into `.grad`, replacing an older one, or adds to the main gradient itself
   (`fuse_wgrad_accumulation`). A gradient in `.grad` is added to DDP's sum at once: a second partition would overwrite it. The
   backward pass of grouped and fused products puts a tensor without values into a weight's `.grad`; it is dropped.
3. DDP's hooks are kept from the module, whose `backward_dw()` would call them for every partition.

The library owns the stored tensors: the queue counts the bytes of the output's gradient, but not of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from moe_overlap.runtime.weight_grad.queue import WeightGradQueue


def can_delay(module: Any) -> bool:
    """Whether a module has the library's split of weight gradients, switched on when it was built."""
    store = getattr(module, "wgrad_store", None)
    return hasattr(module, "backward_dw") and store is not None and bool(store.delay_wgrad_compute())


def delayed_parameters(module: Any) -> list[torch.nn.Parameter]:
    """The parameters whose gradients the module computes late, by its own marks; those of a norm inside it have none."""
    return [parameter for parameter in module.parameters() if getattr(parameter, "skip_backward_post_hook", False)]


def drive_by_queue(
    name: str,
    module: Any,
    queue: WeightGradQueue,
    add: Callable[[Iterable[Tensor | None]], None],
    announce: Callable[[], None],
) -> None:
    """Make the queue call a module's `backward_dw()`.

    Args:
        add: adds gradients of `delayed_parameters`, in their order, to DDP's sums.
        announce: tells DDP that they are complete.
    """
    parameters = delayed_parameters(module)
    biases = [parameter for parameter in parameters if parameter.dim() == 1]
    weights = [parameter for parameter in parameters if parameter.dim() > 1]
    for weight in weights:
        weight.register_post_accumulate_grad_hook(_drop)

    def compute() -> None:
        # In 8 bits, and where the bias is added elsewhere, the backward pass itself computes its gradient. Up to release
        # 2.19 `backward_dw()` fails without one in `.grad`; an earlier entry may have taken it, with those of all partitions.
        by_autograd = getattr(module, "fp8", False) or not getattr(module, "apply_bias", True)
        for bias in biases if by_autograd else ():
            bias.grad = torch.zeros_like(bias) if bias.grad is None else bias.grad
        sums = dict(zip(weights, _take_gradients(weights), strict=True))
        module.backward_dw()
        add([sums.get(parameter) for parameter in parameters])
        add(_take_gradients(parameters))

    def at_output(_module: Any, _inputs: Any, output: Any) -> None:
        product = output[0] if isinstance(output, tuple) else output
        if product.requires_grad:
            product.register_hook(put)

    def put(gradient: Tensor) -> None:
        queue.put(name, compute, (gradient.detach(),), announce=announce)

    module.register_forward_hook(at_output)


def _drop(parameter: Tensor) -> None:
    """Drop the tensor that a backward pass has put into the `.grad` of a deferred weight."""
    parameter.grad = None


def _take_gradients(parameters: Iterable[torch.nn.Parameter]) -> list[Tensor | None]:
    """Remove and return the gradients in `.grad`."""
    gradients = []
    for parameter in parameters:
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients


def compute_at_once(chunk: torch.nn.Module, deferred: set[int]) -> None:
    """Switch off the library's split in all other modules: nobody would call their `backward_dw()`.

    Args:
        deferred: `id` of the modules that the queue drives.
    """
    for module in chunk.modules():
        if id(module) in deferred or not can_delay(module):
            continue
        store: Any = module.wgrad_store
        store.disable_delay_wgrad_compute()
        for parameter in delayed_parameters(module):
            del parameter.skip_backward_post_hook  # type: ignore[attr-defined]
