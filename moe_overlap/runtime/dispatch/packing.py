"""Tokens and probabilities as one row, so that one exchange carries both.

A packed row is a row of H elements followed by its probability: its bits read as elements of the rows' type (an fp32 probability
behind bf16 rows takes two), or its value where the rows' type is the wider one. Both ways are exact. A packed tensor is only ever
moved and cut: its last columns are bits, and adding two of them means nothing. The gradient of a packed tensor is packed the same
way, so the exchange in the backward pass carries both gradients.

N rows, H elements per row, X = `extra_columns`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def extra_columns(rows_dtype: torch.dtype, probs_dtype: torch.dtype) -> int:
    """Columns one probability takes behind a row."""
    return max(1, probs_dtype.itemsize // rows_dtype.itemsize)


def join(rows_NH: Tensor, probs_N: Tensor) -> Tensor:
    """Packed rows [N, H + X], outside autograd."""
    extra = extra_columns(rows_NH.dtype, probs_N.dtype)
    packed = rows_NH.new_empty((rows_NH.shape[0], rows_NH.shape[1] + extra))
    packed[:, :-extra] = rows_NH
    if probs_N.dtype.itemsize >= rows_NH.dtype.itemsize:
        packed[:, -extra:] = probs_N.contiguous().view(rows_NH.dtype).view(-1, extra)
    else:
        packed[:, -1] = probs_N
    return packed


def cut(packed_NX: Tensor, probs_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [N, H] and probabilities [N] of packed rows, outside autograd."""
    extra = extra_columns(packed_NX.dtype, probs_dtype)
    bits = packed_NX[:, -extra:].contiguous()
    wide = probs_dtype.itemsize >= packed_NX.dtype.itemsize
    probs_N = bits.view(-1).view(probs_dtype) if wide else bits.view(-1).to(probs_dtype)
    return packed_NX[:, :-extra].contiguous(), probs_N


class Pack(torch.autograd.Function):
    """`join` under autograd: Pack.apply(rows_NH, probs_N) -> packed."""

    @staticmethod
    def forward(ctx: Any, rows_NH: Tensor, probs_N: Tensor) -> Tensor:
        ctx.probs_dtype = probs_N.dtype
        return join(rows_NH, probs_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return cut(gradients[0], ctx.probs_dtype)


class Unpack(torch.autograd.Function):
    """`cut` under autograd: Unpack.apply(packed, probs_dtype) -> rows_NH, probs_N."""

    @staticmethod
    def forward(ctx: Any, packed_NX: Tensor, probs_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return cut(packed_NX, probs_dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return join(*gradients), None
