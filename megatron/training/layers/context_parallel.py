"""Context parallelism without Transformer Engine: each sample's sequence is shared by the ranks of a group.

The sequence is cut into 2 · C pieces, and rank r of C holds pieces r and 2C - 1 - r ("zig-zag"): under a causal mask every rank
then has the same work. Queries stay; keys and values are gathered (as in Llama 3, section 3.3.2, and megatron-core's
`cp_comm_type="all_gather"`), which for grouped-query attention is the smaller part.

Legend: S whole sequence, C ranks of the group, B batch, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_overlap.describe.batch import TOKEN_COUNT

_SEQUENCE_AXIS = {"tokens": 1, "labels": 1, "loss_mask": 1, "position_ids": 1, "attention_mask": 2}


def positions(sequence_length: int, size: int, rank: int, device: torch.device | None = None) -> Tensor:
    """[S / C] places in the sample of what a rank holds, ascending."""
    pieces = torch.arange(sequence_length, device=device).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def part_of_batch(batch: Mapping[str, Any], size: int, rank: int) -> dict[str, Any]:
    """This rank's part of a micro-batch [B, S]; of an attention mask [B, 1, S, S] the rows of its queries."""
    if size == 1:
        return dict(batch)
    mine = positions(batch["tokens"].shape[1], size, rank, batch["tokens"].device)
    cut = {
        name: value.index_select(_SEQUENCE_AXIS[name], mine) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }
    return cut | {TOKEN_COUNT: batch["loss_mask"].float().sum()}


class GatherSequence(torch.autograd.Function):
    """[S / C, B, …] of every rank -> [S, B, …] in the order of the sample; backward sums what all ranks found for a part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        """Gather over the group."""
        ctx.group = group
        size, length = group.size(), part.shape[0]
        gathered = part.new_empty((size * length, *part.shape[1:]))
        dist.all_gather_into_tensor(gathered, part.contiguous(), group=group)
        return gathered.index_select(0, _order(size * length, size, part.device).argsort())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sum over the group, this rank's part."""
        size = ctx.group.size()
        by_rank = gradient.index_select(0, _order(gradient.shape[0], size, gradient.device)).contiguous()
        mine = by_rank.new_empty((by_rank.shape[0] // size, *by_rank.shape[1:]))
        dist.reduce_scatter_tensor(mine, by_rank, group=ctx.group)
        return mine, None


def _order(sequence_length: int, size: int, device: torch.device) -> Tensor:
    """[S] places in the sample, rank after rank."""
    return torch.cat([positions(sequence_length, size, rank, device) for rank in range(size)])
