"""Rows sorted by expert and back: one gather each way, by row numbers that the device computes.

Rows arrive in pieces: by expert-tensor rank and expert rank (together the source), then by expert, then by token. Sorted, the
pieces of an expert follow one another by source. A gather by row number moves all of them at once: cutting and joining them would
cost the host time for every piece, and a rank with many sources and experts has thousands.

The device computes the numbers from its copy of the counts. The host gives the number of rows, so it waits for nothing.

S sources, L experts per rank, M rows, H elements per row, X columns of a packed row, N stretches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_overlap.runtime.dispatch.wire import cut, join


def numbers_of_stretches(ends: Tensor, sizes: Tensor, places_M: Tensor) -> Tensor:
    """[M] int64 the row numbers of stretches, one stretch after the other.

    Args:
        ends: [N] int64, in any shape, the row number after the last one of each stretch.
        sizes: in the same shape, the rows of each stretch; zeros are allowed.
        places_M: 0, 1, … M - 1, where M is the sum of the sizes.
    """
    ends_here = sizes.flatten().cumsum(0)
    behind_N = (ends_here.view_as(ends) - ends).view(-1)
    # `right`: a stretch without rows is passed over. Cheaper than repeat_interleave, which also needs the sums of the sizes.
    return places_M - behind_N.index_select(0, torch.searchsorted(ends_here, places_M, right=True))


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """Row numbers that sort the rows of all sources by expert, and that put them back in order of arrival.

    Attributes:
        by_expert: [M] the number on arrival of every sorted row; None: both orders are the same.
        by_arrival: [M] the number among the sorted rows of every row that arrived.
    """

    by_expert: Tensor | None = None
    by_arrival: Tensor | None = None

    @staticmethod
    def of(sizes_SL: Tensor, rows: int) -> ExpertOrder:
        """The order of pieces of these sizes, on their device.

        Args:
            rows: M, the sum of the sizes.
        """
        if 1 in sizes_SL.shape:
            return ExpertOrder()
        ends_LS = sizes_SL.t().flatten().cumsum(0).view(sizes_SL.shape[::-1])
        places_M = torch.arange(rows, device=sizes_SL.device)
        by_arrival = numbers_of_stretches(ends_LS.t(), sizes_SL, places_M)
        return ExpertOrder(torch.empty_like(by_arrival).scatter_(0, by_arrival, places_M), by_arrival)

    @staticmethod
    def of_equal(sources: int, experts: int, size: int, device: torch.device) -> ExpertOrder:
        """The order of S · L pieces of one size."""
        if 1 in (sources, experts):
            return ExpertOrder()
        numbers = torch.arange(sources * experts * size, device=device)
        return ExpertOrder(
            numbers.view(sources, experts, size).transpose(0, 1).flatten(),
            numbers.view(experts, sources, size).transpose(0, 1).flatten(),
        )

    @property
    def back(self) -> ExpertOrder:
        """The inverse."""
        return ExpertOrder(self.by_arrival, self.by_expert)


def _moved(rows: Tensor, numbers_M: Tensor | None) -> Tensor:
    return rows if numbers_M is None else rows.index_select(0, numbers_M)


class Reorder(torch.autograd.Function):
    """Reorder.apply(rows, order): rows [M, ...] by expert. Backward gathers, too: that of a gather would add to zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: ExpertOrder) -> Tensor:
        ctx.order = order
        moved = _moved(rows, order.by_expert)
        return moved.view_as(rows) if moved is rows else moved

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _moved(gradients[0], ctx.order.by_arrival), None


class SortUnpack(torch.autograd.Function):
    """SortUnpack.apply(packed, probs_dtype, order) -> rows [M, H], probabilities [M]: packed rows unpacked by expert."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, probs_dtype: torch.dtype, order: ExpertOrder) -> tuple[Tensor, Tensor]:
        ctx.order = order
        return cut(packed, probs_dtype, order.by_expert)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        rows_MH, probs_M = gradients
        numbers_M = ctx.order.by_arrival
        return join(rows_MH, probs_M, numbers_M, numbers_M), None, None
