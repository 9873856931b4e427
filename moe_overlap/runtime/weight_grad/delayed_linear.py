"""Weight gradients that a library puts aside itself: Transformer Engine's linears, built with `delay_wgrad_compute`.

Such a module keeps what its weights' gradient is computed from in a store of its own (`wgrad_store`, first in, first out), and
`backward_dw()` computes the oldest. What holds here:

1. Every backward pass of the module puts one entry into our queue, at the moment its output's gradient is there; the entry calls
   `backward_dw()` once. The list never runs it before the operator's backward pass has ended, so the store is filled by then.
2. `backward_dw()` leaves a gradient in `.grad`, in place of an older one, or adds to the main gradient itself
   (`fuse_wgrad_accumulation`). The former is moved to where DDP sums, at once: a second partition would overwrite it. For the
   latter the backward pass leaves a tensor without values in `.grad`, and marks the parameter by `grad_added_to_main_grad`.
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

    def compute() -> None:
        # In 8 bits a bias's gradient comes from the backward pass itself, and autograd has left it here. What it has left for a
        # weight that the library adds to the main gradient is memory that nobody has written.
        earlier = [
            None if getattr(parameter, "grad_added_to_main_grad", False) else gradient
            for parameter, gradient in zip(parameters, _taken(parameters), strict=True)
        ]
        module.backward_dw()
        late = _taken(parameters)
        add(earlier)
        add(late)

    def at_output(_module: Any, _inputs: Any, output: Any) -> None:
        product = output[0] if isinstance(output, tuple) else output
        if product.requires_grad:
            product.register_hook(put)

    def put(gradient: Tensor) -> None:
        queue.put(name, compute, (gradient.detach(),), announce=announce)

    module.register_forward_hook(at_output)


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
