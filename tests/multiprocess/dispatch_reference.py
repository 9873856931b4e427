"""The slow truth: dispatch, experts and combine of all ranks in one process, one token at a time.

Ranks are numbered as in the expert group: expert-tensor rank fastest. An expert is a list of its expert-tensor slices; its output
is the sum over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Expert = Callable[[Tensor, Tensor], Tensor]
"""(rows [M, H], probabilities [M]) -> output [M, H]."""


def expert_rows(maps_TE: Sequence[Tensor], expert_ranks: int, tensor_ranks: int, expert: int) -> list[tuple[int, int]]:
    """(rank, token) of the rows an expert works on, in the order it gets them.

    The order is by expert-tensor rank, then expert rank, then token; the rows come from all ranks of the expert group.
    """
    rows = []
    for tensor in range(tensor_ranks):
        for place in range(expert_ranks):
            rank = place * tensor_ranks + tensor
            rows += [(rank, token) for token in range(maps_TE[rank].shape[0]) if maps_TE[rank][token, expert]]
    return rows


def moe_layer(
    hidden_TH: Sequence[Tensor],
    probs_TE: Sequence[Tensor],
    maps_TE: Sequence[Tensor],
    experts: Sequence[Sequence[Expert]],
    expert_ranks: int,
    tensor_ranks: int = 1,
) -> list[Tensor]:
    """The routed part of a MoE layer.

    Args:
        hidden_TH, probs_TE, maps_TE: per rank, its tokens, probabilities and map.
        experts: per expert, its expert-tensor slices.
    Returns:
        Per rank, the sum of each token's results.
    """
    outputs = [[torch.zeros_like(row) for row in hidden] for hidden in hidden_TH]
    for expert, slices in enumerate(experts):
        for rank, token in expert_rows(maps_TE, expert_ranks, tensor_ranks, expert):
            row = hidden_TH[rank][token].unsqueeze(0)
            probability = probs_TE[rank][token, expert].unsqueeze(0)
            for expert_slice in slices:
                outputs[rank][token] = outputs[rank][token] + expert_slice(row, probability)[0]
    return [torch.stack(rows) if rows else hidden for rows, hidden in zip(outputs, hidden_TH, strict=True)]
