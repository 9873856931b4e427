"""Blocks of a model's parts: the operators of a layer that depend on the same ranks. No torch.

A block is a group of operators that depend on the same ranks: attention (TP, CP), the router, the routed experts with their
all-to-alls (EP, ETP), shared experts, a dense MLP, embedding, head. `block_class` says under which layouts the operators of a
block are equal; a layer under any layout is then composed of its attention from one capture and its experts from another
(`composition.py`).
"""

from __future__ import annotations

from typing import Any, Literal

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.operators import ATTENTION, COMBINE, COUNT, DISPATCH, EXPERTS, GATE, MERGE, MLP, SHARED
from moe_overlap.tuner.capture.graph import OF_EXPERT, Layout, Op, Storage, world_size

ROUTER, ROUTED, CORE, OUTSIDE = "router", "routed experts", "core attention", ""
"""Blocks of several operators, and the block of storages without operator; other blocks are named after their operator."""


class NotComposableError(LookupError):
    """A part cannot be composed of blocks: it must be captured under its own layout."""


def block_of(op: Op) -> str:
    """The block of an operator."""
    if op.operator in (COUNT, DISPATCH, EXPERTS, COMBINE):
        return ROUTED
    if op.operator in (GATE, MERGE):
        # Permutations run in the MoE layer itself and depend on its dispatcher; the router's operators do not.
        return ROUTED if op.module.rpartition(".")[2] == "mlp" else ROUTER
    return CORE if op.operator == ATTENTION and op.module.rpartition(".")[2] == "core_attention" else op.operator


def block_class(block: str, layout: Layout, model: ModelDescription, of_copies: bool = False) -> tuple[Any, ...]:
    """Layouts with equal classes run the same operators of a block.

    A collective exists if its group has several ranks. A single key/value head on a rank needs no copies to be contiguous; fewer
    heads than ranks need more copies; a single expert on a rank needs no sorting.

    Args:
        of_copies: whether a library dispatches tokens, sending each once to every rank that needs it.
    """
    if block == ROUTED:
        one_per_rank = layout.expert == model.num_experts
        # A library runs the same kernels for expert ranks, for ranks that share an expert, and for both.
        return (
            (layout.expert_tensor > 1, one_per_rank)
            if of_copies
            else (layout.expert > 1, layout.expert_tensor > 1, one_per_rank)
        )
    dense: tuple[Any, ...] = (layout.tensor > 1, layout.context > 1, layout.sequence_parallel)
    if block == ROUTER and of_copies:
        # The gate gets the gradients of the probabilities from the library's dispatch, or from the sum over an expert's shards.
        dense += (layout.expert_tensor > 1,)
    if block in (ATTENTION, CORE) and model.latent_attention is None:
        heads = model.num_query_groups / layout.tensor
        dense += (heads > 1, heads < 1, layout.tensor == model.num_attention_heads)
    return dense


def has_heads(block: str, model: ModelDescription) -> bool:
    """Whether sizes of a block may depend on a rank's key/value heads, which are never split beyond one."""
    return block in (ATTENTION, CORE, OUTSIDE) and model.latent_attention is None


def has_vocabulary(block: str) -> bool:
    """Whether sizes of a block may depend on the rows of the embedding."""
    return block not in (ROUTED, ROUTER, ATTENTION, CORE, MLP, SHARED)


def group_size(layout: Layout, axis: str) -> int:
    """Number of ranks in a collective's group, in the smallest world that holds the layout."""
    dense, experts = layout.tensor * layout.context, layout.expert * layout.expert_tensor
    world = world_size(layout)
    sizes = {"tp": layout.tensor, "cp": layout.context, "ep": layout.expert, "etp": layout.expert_tensor}
    sizes |= {"tp_cp": dense, "tp_ep": experts, "dp": world // dense, "dp_cp": world // layout.tensor}
    sizes |= {"tp_dp_cp": world, "edp": world // experts}
    return sizes[axis]


def is_of_expert(storage: Storage) -> bool:
    """Whether a storage is a weight or gradient of one of the routed experts."""
    return bool(storage.name) and OF_EXPERT.fullmatch(storage.name) is not None


def expert_replicas(layout: Layout) -> Literal["dp", "edp"]:
    """The axis over which gradients of experts are reduced: `edp` only if it differs from that of the dense weights."""
    return "dp" if layout.expert == 1 and layout.expert_tensor == layout.tensor else "edp"
