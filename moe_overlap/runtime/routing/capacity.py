"""Expert capacity and the positional drop, exact under partitions.

Legend: T tokens, E experts, S positions of a sequence on this rank, B samples.

Two orders of tokens: megatron-core flattens [S, B] position by position (token s·B + b); the drop counts sample by sample
(token b·S + s). A partition of the samples is a prefix of what is left in the second order only, and only then does handing
on the used capacity give the drops of the whole micro-batch.

What holds: routing partitions p = 0, 1, … one after the other, each with the capacity that the ones before have used, keeps the
tokens and fills the slots that routing them at once does. Source: Lancet, sections 2.3 and 6 (capacity passing).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def expert_capacity(tokens: int, topk: int, experts: int, factor: float) -> int:
    """Tokens an expert takes of one micro-batch on one rank: ceil(T · k / E · factor), in megatron-core's order of rounding.

    Args:
        tokens: of the whole micro-batch on this rank, never of a partition.
    """
    return math.ceil((tokens * topk / experts) * factor)


def expert_slots(map_TE: Tensor, used_E: Tensor) -> Tensor:
    """Slot of every routed token at its expert, when capacity has no end.

    Args:
        map_TE: bool, tokens in the order of the drop. A token chooses an expert once, so the order of its choices is free.
        used_E: int64, slots taken by earlier partitions.
    Returns:
        [T, E] int64; -1 where a token does not go.
    """
    slots_TE = map_TE.cumsum(0) - 1 + used_E
    return slots_TE.masked_fill(~map_TE, -1)


def drop_beyond_capacity(map_TE: Tensor, used_E: Tensor, capacity: int | None) -> tuple[Tensor, Tensor]:
    """Keep the first tokens of each expert, as many as its capacity has left.

    Args:
        map_TE: bool, tokens in the order of the drop.
        used_E: int64, slots taken by earlier partitions of the micro-batch.
        capacity: of the whole micro-batch; None keeps every token.
    Returns:
        (kept_TE, used_E after these tokens). Without a capacity, used_E is the count.
    """
    if capacity is None:
        return map_TE, used_E + map_TE.sum(0)
    slots_TE = expert_slots(map_TE, used_E)
    kept_TE = (slots_TE >= 0) & (slots_TE < capacity)
    return kept_TE, (used_E + map_TE.sum(0)).clamp(max=capacity)


def drop_by_priority(map_TE: Tensor, priority_T: Tensor, used_E: Tensor, capacity: int | None) -> tuple[Tensor, Tensor]:
    """The same, with the tokens of highest priority first; equal ones stay in order.

    Needs the whole micro-batch: a later token of high priority displaces an earlier one.

    Source: Riquelme et al. 2021 (batch prioritized routing), with a token's choices together as in Lancet; the original fills
    all first choices before all second ones.
    """
    order_T = torch.argsort(priority_T, descending=True, stable=True)
    sorted_kept_TE, used_E = drop_beyond_capacity(map_TE[order_T], used_E, capacity)
    kept_TE = torch.empty_like(map_TE)
    kept_TE[order_T] = sorted_kept_TE
    return kept_TE, used_E


def sample_major(x_TE: Tensor, samples: int) -> Tensor:
    """From megatron-core's order of tokens to the order of the drop.

    Args:
        x_TE: [T, …], token s·B + b.
        samples: B.
    Returns:
        [T, …], token b·S + s.
    """
    return _swap(x_TE, x_TE.shape[0] // max(samples, 1), samples)


def position_major(x_TE: Tensor, samples: int) -> Tensor:
    """From the order of the drop back to megatron-core's."""
    return _swap(x_TE, samples, x_TE.shape[0] // max(samples, 1))


def _swap(x_TE: Tensor, outer: int, inner: int) -> Tensor:
    return x_TE.unflatten(0, (outer, inner)).transpose(0, 1).flatten(0, 1) if x_TE.shape[0] else x_TE
