"""Products in 8 bits inside the operators of a list: megatron-core's contexts of Transformer Engine, one for each operator.

megatron-core opens them around each layer in its block of layers, which the executor does not call. Here each forward operator of
a layer runs in one, and so does its recomputation. Nothing else does: backward operators and deferred weight gradients take the
precision that the forward pass has kept for them, and megatron-core leaves the embedding and the head out, too.

A recipe must not care how many contexts a pass is cut into: capabilities.py names those that scale a tensor by its own values
alone. Which layers stay in bf16 (--first-last-layers-bf16) is megatron-core's decision.
"""

from __future__ import annotations

import contextlib
from typing import Any

from megatron.core.fp8_utils import get_fp8_context
from megatron.core.tensor_parallel import random


class LayerPrecision:
    """The contexts of a chunk's layers.

    Args:
        config: the chunk's TransformerConfig; without an 8-bit format in it there are none.
    """

    def __init__(self, config: Any) -> None:
        self._config, self._is_narrow = config, bool(config.fp8)

    def first(self, layer: int | None, repeated: bool) -> contextlib.AbstractContextManager[Any]:
        """Around an operator's forward pass.

        Args:
            layer: number in the whole model; None outside of layers.
            repeated: whether it will run again, for which weights are then quantized in both layouts at once.
        """
        if not self._is_narrow or layer is None:
            return contextlib.nullcontext()
        return self._quantized(layer, first_of_two=True) if repeated else get_fp8_context(self._config, layer)

    def again(self, layer: int | None) -> contextlib.AbstractContextManager[Any]:
        """Around its recomputation, with gradients."""
        if not self._is_narrow or layer is None:
            return contextlib.nullcontext()
        return self._quantized(layer, first_of_two=False)

    @contextlib.contextmanager
    def _quantized(self, layer: int, first_of_two: bool) -> Any:
        # As Transformer Engine's own checkpoints do.
        passes = random.activation_recompute_forward(activation_recompute=True, recompute_phase=not first_of_two)
        with passes, get_fp8_context(self._config, layer):
            yield
