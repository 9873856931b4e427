"""Products in 8 bits inside the operators of a list: megatron-core's contexts of Transformer Engine, one for each operator.

megatron-core opens them around each layer in its transformer block, which the executor does not call. Here each forward operator
of a layer runs in one, and so does its recomputation. Backward operators and deferred weight gradients run outside: they use the
precision that the forward pass has saved. Embedding and head run outside, too, as in megatron-core.

A recipe must not depend on the number of contexts in a pass: capabilities.py lists the recipes that scale a tensor by its own
values alone. Which layers stay in bf16 (--first-last-layers-bf16) is megatron-core's decision.
"""

from __future__ import annotations

import contextlib
from typing import Any

from megatron.core.fp8_utils import get_fp8_context
from megatron.core.tensor_parallel import random


class LayerPrecision:
    """The contexts of a chunk's layers.

    Args:
        config: the chunk's TransformerConfig; without an 8-bit format there are no contexts.
    """

    def __init__(self, config: Any) -> None:
        self._config, self._is_narrow = config, bool(config.fp8)

    def first(self, layer: int | None, repeated: bool) -> contextlib.AbstractContextManager[Any]:
        """The context of an operator's forward pass.

        Args:
            layer: number in the whole model; None outside of layers.
            repeated: whether the operator is recomputed later; Transformer Engine then quantizes its weights in both layouts at
                once.
        """
        if not self._is_narrow or layer is None:
            return contextlib.nullcontext()
        return self._quantized(layer, first_of_two=True) if repeated else get_fp8_context(self._config, layer)

    def again(self, layer: int | None) -> contextlib.AbstractContextManager[Any]:
        """The context of its recomputation, with gradients."""
        if not self._is_narrow or layer is None:
            return contextlib.nullcontext()
        return self._quantized(layer, first_of_two=False)

    @contextlib.contextmanager
    def _quantized(self, layer: int, first_of_two: bool) -> Any:
        # As Transformer Engine's own checkpoints do.
        passes = random.activation_recompute_forward(activation_recompute=True, recompute_phase=not first_of_two)
        with passes, get_fp8_context(self._config, layer):
            yield
