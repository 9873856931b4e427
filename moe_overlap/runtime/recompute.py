"""What an operator that runs twice needs, so that both passes do the same.

The first pass keeps no graph: what it was given waits in the buffers. The second stands in the list (`.recompute`), makes the
island that the backward pass needs, and draws what the first has drawn. Gates repeat their decision from the routing state of
the micro-batch (routing/state.py); megatron-core's router counts and logs in passes with gradients only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

from megatron.core.tensor_parallel.random import (
    _fork_rng,
    _get_all_rng_states,
    _set_all_rng_states,
    get_cuda_rng_tracker,
)


class LayerDraws:
    """The random draws of a chunk's layers, as megatron-core's block and its checkpoints make them.

    Args:
        config: the chunk's TransformerConfig; a model that draws nothing costs nothing.
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
        """Around an operator's forward pass; `repeated`: it will run again."""
        if self._draws and repeated:
            self._states[place] = _get_all_rng_states()
        with self._own_part():
            yield

    @contextlib.contextmanager
    def again(self, place: Hashable) -> Iterator[None]:
        """Around the second pass: the same draws, and none of the later ones moved."""
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
    """Have a layer run its MLP and its shared expert once per call: what runs twice stands in the list.

    What a module recomputes inside an operator (`core_attn`) stays as it is.
    """
    layer.recompute_mlp = False
    if layer.is_moe_layer:
        layer.mlp.moe_layer_recompute = layer.mlp.shared_experts_recompute = False
