"""A stretch of computation whose backward runs when the instruction list says so.

An island cuts the autograd graph at its inputs and outputs: what lies between two communications is one island, so no
collective ever stands inside a backward pass that autograd schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Island:
    """One call of a function under autograd, with its graph cut at both ends; without gradients, no graph at all.

    Attributes:
        outputs: what the function returned, detached from nothing: consumers cut it at their own inputs.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Tensor | None]) -> None:
        with_graph = torch.is_grad_enabled()
        self._inputs = [
            x.detach().requires_grad_(with_graph and x.is_floating_point()) if x is not None else None for x in inputs
        ]
        returned = function(*self._inputs)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        # megatron-core adds the residual with gradients enabled; what it returns would keep its input alive.
        self.outputs: tuple[Any, ...] = outputs if with_graph else tuple(map(_detached, outputs))

    def backward(self, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the backward of this stretch once; parameters accumulate, the graph is freed.

        Args:
            gradients: of each output, None where nothing depends on it.
        Returns:
            Gradients of each input, None where the output does not depend on it.
        """
        pairs = [
            (output, gradient)
            for output, gradient in zip(self.outputs, gradients, strict=True)
            if gradient is not None and isinstance(output, Tensor) and output.requires_grad
        ]
        if pairs:
            # Not torch.autograd.grad: DDP's hooks stand on the accumulation of parameters, which only this call runs.
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        found = tuple(x.grad if x is not None else None for x in self._inputs)
        self._inputs, self.outputs = [], ()
        return found


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
