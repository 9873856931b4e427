"""Experts drawn by index: the same token gets the same experts however a micro-batch is cut, and in every recompute.

A generator's draws depend on the order of the calls. Here each (token, expert) gets a 64-bit number that is a function of its
indices alone; a token's k experts are those with the smallest numbers, a uniform subset. Mixing is SplitMix64's finalizer
(Steele, Lea and Flood 2014, with Stafford's constants).

Legend: S positions, B samples, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = 0xFFFFFFFFFFFFFFFF
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_GOLDEN = 0x9E3779B97F4A7C15


_STEP = 1 << 16
"""More micro-batches than any step has."""


@dataclass(slots=True)
class DrawClock:
    """Which draws a plain forward pass makes; whoever starts one, or its recompute, sets the micro-batch first."""

    seed: int = 0
    micro_batch: int = 0
    """Number in the run, from `first_micro_batch`."""


def first_micro_batch(step: int) -> int:
    """Number of a step's first micro-batch: no two of a run are equal, also where steps hold unlike numbers of them."""
    return step * _STEP


def fold(key: int, value: int) -> int:
    """Mix one more index into an unsigned 64-bit key."""
    key = (key + (value + 1) * _GOLDEN) & _BITS
    for shift, factor in _ROUNDS:
        key = ((key ^ (key >> shift)) * factor) & _BITS
    return key ^ (key >> _LAST_SHIFT)


def fold_tensor(key: Tensor, value: Tensor) -> Tensor:
    """`fold` on int64 tensors, which wrap as unsigned numbers do; broadcasts."""
    key = key + (value + 1) * _signed(_GOLDEN)
    for shift, factor in _ROUNDS:
        key = (key ^ _shift_right(key, shift)) * _signed(factor)
    return key ^ _shift_right(key, _LAST_SHIFT)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Tensor, shift: int) -> Tensor:
    """Logical shift: torch's fills with the sign."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def draw_experts(key: int, positions_S: Tensor, samples_B: Tensor, topk: int, experts: int) -> Tensor:
    """k different experts for every token.

    Args:
        key: folded from seed, layer and whatever else is common to the tokens.
        positions_S: int64, positions in the whole sequence.
        samples_B: int64, numbers of the samples; a single zero gives every sample the same draws.
    Returns:
        [S, B or 1, K] int64.
    """
    start = torch.full((), _signed(key), dtype=torch.int64, device=positions_S.device)
    key_SB = fold_tensor(fold_tensor(start, samples_B)[None, :], positions_S[:, None])
    numbers_SBE = fold_tensor(key_SB[:, :, None], torch.arange(experts, device=positions_S.device))
    return numbers_SBE.topk(topk, dim=-1, largest=False).indices
