"""Weight gradients that a library puts aside itself: Transformer Engine's linears, built with `delay_wgrad_compute`.

Such a module keeps what its weights' gradient is computed from in a store of its own (`wgrad_store`, first in, first out), and
`backward_dw()` computes the oldest. What holds here:

1. Every backward pass of the module puts one entry into our queue, at the moment its output's gradient is there; the entry calls
   `backward_dw()` once. The list never runs it before the operator's backward pass has ended, so the store is filled by then.
2. `backward_dw()` leaves a gradient in `.grad`, in place of an older one, or adds to the main gradient itself
   (`fuse_wgrad_accumulation`). The former is moved to where DDP sums, at once: a second partition would overwrite it.
   What the backward pass itself leaves in a weight's `.grad`, in grouped and in fused products, has no values and is dropped.
3. The hooks that DDP hands over are kept from the module, whose `backward_dw()` would call them for every partition.

The store's tensors are the library's: the queue counts the output gradient's bytes, and not the input that is kept beside it.
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
    """Return the parameters whose gradients the module computes late, which it has marked; a norm inside it is not among them."""
    return [parameter for parameter in module.parameters() if getattr(parameter, "skip_backward_post_hook", False)]


def drive_by_queue(
    name: str,
    module: Any,
    queue: WeightGradQueue,
    add: Callable[[Iterable[Tensor | None]], None],
    announce: Callable[[], None],
) -> None:
    """Have the queue call a module's `backward_dw()`.

    Args:
        add: sums gradients of `delayed_parameters`, in their order, where DDP does.
        announce: tells DDP that they are there.
    """
    parameters = delayed_parameters(module)
    biases = [parameter for parameter in parameters if parameter.dim() == 1]
    weights = [parameter for parameter in parameters if parameter.dim() > 1]
    for weight in weights:
        weight.register_post_accumulate_grad_hook(_drop)

    def compute() -> None:
        # In 8 bits, and where it is added elsewhere, a bias's gradient comes from the backward pass itself. `backward_dw()` wants
        # one in `.grad`, or up to release 2.19 fails; an entry before this one may have taken it, with those of all partitions.
        by_autograd = getattr(module, "fp8", False) or not getattr(module, "apply_bias", True)
        for bias in biases if by_autograd else ():
            bias.grad = torch.zeros_like(bias) if bias.grad is None else bias.grad
        sums = dict(zip(weights, _taken(weights), strict=True))
        module.backward_dw()
        add([sums.get(parameter) for parameter in parameters])
        add(_taken(parameters))

    def at_output(_module: Any, _inputs: Any, output: Any) -> None:
        product = output[0] if isinstance(output, tuple) else output
        if product.requires_grad:
            product.register_hook(put)

    def put(gradient: Tensor) -> None:
        queue.put(name, compute, (gradient.detach(),), announce=announce)

    module.register_forward_hook(at_output)


def _drop(parameter: Tensor) -> None:
    """Drop what a backward pass has left for a weight whose gradient is put aside."""
    parameter.grad = None


def _taken(parameters: Iterable[torch.nn.Parameter]) -> list[Tensor | None]:
    """Take the gradients that stand in `.grad`."""
    taken = []
    for parameter in parameters:
        taken.append(parameter.grad)
        parameter.grad = None
    return taken


def compute_at_once(chunk: torch.nn.Module, deferred: set[int]) -> None:
    """Switch the library's split off in every module but some: nobody would call their `backward_dw()`.

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
