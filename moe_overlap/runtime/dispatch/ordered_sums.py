"""Sums over the rows of a token in a fixed order, for --deterministic-mode: no operator of the dispatcher adds by atomics.

    select    row n = token tokens_N[n]                       backward: the sum of a token's rows
    sum       token t = the sum of its rows, first row first   backward: row n = token tokens_N[n]

`index_add`, and `index_select` backward, add in the order in which the threads of a GPU arrive, so that a repeated run gives
other bits. Here a stable sort puts the rows of a token together in order of their experts, and one thread adds each element of a
segment. Sums are in fp32 at least, and rounded once. On a CPU `index_add` does the same: the bits are equal (a test). Not run on
hardware.

N rows, T tokens, X elements of a row. tokens_N holds T for a row without token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sum_by_token(rows_NX: Tensor, tokens_N: Tensor, tokens: int) -> Tensor:
    """[T, X] the sum of each token's rows, first row first; zero where a token has none. No autograd."""
    order_N = tokens_N.argsort(stable=True)
    tokens_T = torch.arange(tokens + 1, device=tokens_N.device)
    # Where each token's rows begin, and the end of the last one's: rows without token are sorted last.
    begins = torch.searchsorted(tokens_N.index_select(0, order_N), tokens_T)
    # segment_reduce adds in the type of its rows: in bf16 it would round at every row.
    sorted_NX = rows_NX.index_select(0, order_N).to(torch.promote_types(rows_NX.dtype, torch.float32))
    # `unsafe`: to check the lengths the host would have to read them.
    sums_TX = torch.segment_reduce(sorted_NX, "sum", lengths=begins.diff(), axis=0, unsafe=True, initial=0)
    return sums_TX.to(rows_NX.dtype)


class SelectInOrder(torch.autograd.Function):
    """SelectInOrder.apply(hidden_TX, places_N, tokens_N) -> rows [N, X].

    Args:
        places_N: the token of every row; any token for a row without token.
        tokens_N: the same, T for a row without token: its gradient is discarded.
    """

    @staticmethod
    def forward(ctx: Any, hidden_TX: Tensor, places_N: Tensor, tokens_N: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_N)
        ctx.tokens = hidden_TX.shape[0]
        return hidden_TX.index_select(0, places_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (tokens_N,) = ctx.saved_tensors
        return sum_by_token(gradients[0], tokens_N, ctx.tokens), None, None


class SumInOrder(torch.autograd.Function):
    """SumInOrder.apply(rows_NX, tokens_N, tokens) -> [T, X]."""

    @staticmethod
    def forward(ctx: Any, rows_NX: Tensor, tokens_N: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(tokens_N)
        return sum_by_token(rows_NX, tokens_N, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (tokens_N,) = ctx.saved_tensors
        gradient_TX = gradients[0]
        ended = torch.cat([gradient_TX, gradient_TX.new_zeros((1, *gradient_TX.shape[1:]))])
        return ended.index_select(0, tokens_N), None, None
