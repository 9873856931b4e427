"""Makes the matrix products of a DDP-wrapped model add their weight gradients to DDP's sums themselves.

Not set through megatron-core's configuration: there a linear refuses to be built without apex's kernel, though Transformer
Engine's modules have one of their own; and products need a sum that only DDP makes, so a model measured without DDP would fail.

The contract is DDP's (distributed_data_parallel.py, `_make_backward_post_hook`): a product that has added its gradient sets
`grad_added_to_main_grad` and returns a dummy gradient, and DDP then adds none for this parameter until the next step. So
products must add all gradients of a parameter, or none; `zero_out_wgrad` marks a parameter with both kinds, whose products
return zeros.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, layers

from megatron.training.cli.fused_gradients import KERNEL, OFF, GradientFusion
from moe_overlap.describe.errors import ConfigError


def fuse_weight_gradients(chunks: Iterable[torch.nn.Module], fusion: GradientFusion) -> int:
    """Switch on fused accumulation in the products that `fusion` names.

    Args:
        chunks: this rank's model chunks, wrapped in DDP.
    Returns:
        Number of modules that add their gradients themselves.
    Raises:
        ConfigError: apex's kernel is installed and cannot be imported.
    """
    if fusion.by_apex and not hasattr(layers, KERNEL):
        rule = "is installed and cannot be imported"
        raise ConfigError(KERNEL, "", rule, f"install NVIDIA apex for this torch, or add {OFF}")
    switched = 0
    for chunk in chunks:
        modules = list(chunk.modules())
        grouped = {id(inner) for module in modules if hasattr(module, "grouped_product") for inner in module.modules()}
        for module in modules:
            if fusion.by_transformer_engine and hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True  # type: ignore[assignment]
                switched += 1
            # Grouped experts use torch's grouped product, and single products if no row came: both would add to one sum.
            elif (
                fusion.by_apex
                and isinstance(module, ColumnParallelLinear | RowParallelLinear)
                and id(module) not in grouped
            ):
                module.gradient_accumulation_fusion = True
                switched += 1
        if switched:
            for module in modules:
                if isinstance(module, VocabParallelEmbedding):
                    # A head that shares this weight adds to its sum; the look-up does not. megatron-core sets the mark only
                    # where both are on the only stage.
                    module.weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    return switched
