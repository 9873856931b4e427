"""Autograd segments, and the state that lets an operator run twice with the same result.

A segment is a stretch of computation whose backward runs when the instruction list says so. It cuts the autograd graph at its
inputs and outputs: the computation between two communications is one segment, so no collective ever runs inside a backward pass
that autograd schedules.

Recomputation. The first pass keeps no graph; its inputs stay in the buffers. The second pass is an instruction of the list
(`.recompute`): it makes the segment that the backward pass needs, and repeats the random draws of the first. Gates repeat their
decision from the routing state of the micro-batch (routing/state.py); megatron-core's router counts and logs in passes with
gradients only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.random import (
    _fork_rng,
    _get_all_rng_states,
    _set_all_rng_states,
    get_cuda_rng_tracker,
)
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


class _Entry(torch.autograd.Function):
    """Hands a tensor into a segment, and its gradient out of it. A leaf would keep the tensor until the backward pass."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, x: tuple[Tensor], gradients: list[Tensor | None], place: int) -> Tensor:
        """Return the tensor; its gradient will be stored at `place`. The tuple hides the tensor's history from autograd."""
        ctx.gradients, ctx.place = gradients, place
        ctx.set_materialize_grads(False)
        return x[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        """Store the gradient, as a leaf would; a part is copied, since a view would keep the whole micro-batch's gradient."""
        (gradient,) = gradients
        ctx.gradients[ctx.place] = None if gradient is None else gradient.contiguous()
        return (None,) * 4


class Segment:
    """One call of a function under autograd, with its graph cut at both ends; without gradients, no graph at all.

    A segment keeps no input or output but what autograd has saved for the backward pass. Routed rows would otherwise stay in
    memory four times until then: permuted, received, computed and returned.

    Args:
        aside: results of the function besides its outputs, which the segment only stores.
    """

    def __init__(
        self, function: Callable[..., Any], inputs: Sequence[Tensor | None], aside: dict[Any, Any] | None = None
    ) -> None:
        with_graph = torch.is_grad_enabled()
        self.aside = {} if aside is None else aside
        self._gradients: list[Tensor | None] = [None] * len(inputs)
        anchor: Tensor | None = None
        entered: list[Tensor | None] = []
        for place, x in enumerate(inputs):
            if x is not None and with_graph and x.is_floating_point():
                # Autograd records nothing of a call without an input that needs a gradient.
                anchor = x.new_empty(0).requires_grad_() if anchor is None else anchor
                entered.append(_Entry.apply(anchor, (x,), self._gradients, place))
            else:
                entered.append(None if x is None else x.detach())
        returned = function(*entered)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        # megatron-core adds the residual with gradients enabled: the result would keep its input alive.
        self._outputs: tuple[Any, ...] = outputs if with_graph else tuple(map(_detached, outputs))
        self._roots = [get_gradient_edge(x) if with_graph and _is_differentiable(x) else None for x in outputs]

    def take(self) -> tuple[Any, ...]:
        """Return the outputs once: the segment no longer keeps them. Consumers cut them at their own inputs."""
        outputs, self._outputs = self._outputs, ()
        return outputs

    def backward(self, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the backward of this stretch once; parameters accumulate, the graph is freed.

        Args:
            gradients: one per output, None for an output that nothing uses.
        Returns:
            One gradient per input, None for an input that no output depends on.
        """
        pairs = [
            (root, gradient)
            for root, gradient in zip(self._roots, gradients, strict=True)
            if gradient is not None and root is not None
        ]
        if pairs:
            # Not torch.autograd.grad: DDP's hooks stand on the accumulation of parameters, which only this call runs.
            torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        input_gradients = tuple(self._gradients)
        self._gradients, self._roots = [], []
        return input_gradients


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


class LayerDraws:
    """The random draws of a chunk's layers, as megatron-core's block and its checkpoints make them.

    Args:
        config: the chunk's TransformerConfig; a model without random draws costs nothing.
    """

    def __init__(self, config: Any) -> None:
        self._draws = bool(
            config.hidden_dropout
            or config.attention_dropout
            or config.moe_input_jitter_eps
            or config.moe_router_force_load_balancing
        )
        self._split = config.sequence_parallel
        self._states: dict[Hashable, Any] = {}

    @contextlib.contextmanager
    def first(self, place: Hashable, repeated: bool) -> Iterator[None]:
        """The context of an operator's forward pass; `repeated`: the operator is recomputed later."""
        if self._draws and repeated:
            self._states[place] = _get_all_rng_states()
        with self._own_part():
            yield

    @contextlib.contextmanager
    def again(self, place: Hashable) -> Iterator[None]:
        """The context of the recomputation: it repeats the draws of the first pass and leaves later draws unchanged."""
        if not self._draws:
            yield
            return
        with _fork_rng():
            _set_all_rng_states(*self._states.pop(place))
            with self._own_part():
                yield

    def _own_part(self) -> contextlib.AbstractContextManager[None]:
        """With the sequence split, every tensor-parallel rank draws for its own part of it."""
        fork: contextlib.AbstractContextManager[None] = (
            get_cuda_rng_tracker().fork() if self._draws and self._split else contextlib.nullcontext()
        )
        return fork


def recompute_by_the_list(layer: Any) -> None:
    """Make a layer run its MLP and its shared expert once per call: the list holds their recomputation.

    A recomputation inside an operator (`core_attn`) stays as it is.
    """
    layer.recompute_mlp = False
    if layer.is_moe_layer:
        layer.mlp.moe_layer_recompute = layer.mlp.shared_experts_recompute = False
