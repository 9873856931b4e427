"""A queue of weight gradients that runs empty behind every backward pass, for tests of what is put into it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_overlap.runtime.weight_grad.queue import WeightGradQueue


def drain_after_backward(chunk: torch.nn.Module, queue: WeightGradQueue) -> None:
    """Have the queue run empty at the end of every backward pass of a chunk.

    Gradients are then put aside without an instruction list that says when to compute them. The closures run inside the backward
    call of the schedule, hence under the same `no_sync` as the gradients that were not put aside, and before the gradients are
    reduced.

    Args:
        chunk: a model chunk, wrapped or not; its output is where a backward pass begins.
    """
    engine: Any = torch.autograd.Variable._execution_engine

    def at_output(_module: Any, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            # At the output, not in a layer: inside a recomputed layer the callback would belong to its nested backward pass.
            output.register_hook(lambda _gradient: engine.queue_callback(queue.run_all))

    chunk.register_forward_hook(at_output)
