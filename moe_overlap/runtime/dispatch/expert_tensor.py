"""Expert-tensor parallelism: every rank of the group holds a slice of the same experts and works on everybody's rows.

Before the experts the rows are gathered, behind them the partial outputs are summed and each rank keeps its own rows. Both go
over the same wire as the dispatch, so uneven parts need no padding; sums run in order of rank, in fp32 at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_overlap.runtime.dispatch.exchange import Exchange
from moe_overlap.runtime.dispatch.packing import cut, join


@dataclass(frozen=True, slots=True)
class TensorRanks:
    """One layer's exchanges among the expert-tensor ranks.

    Attributes:
        exchange: the wire among them.
        rows: rows each of them brings.
        tag: first of two tags, for gather and sum.
        name: the layer's operator.
    """

    exchange: Exchange
    rows: Sequence[int]
    tag: int
    name: str

    def everyones(self, rows: Tensor, suffix: str = "") -> Tensor:
        """[sum of rows, ...] the rows of all ranks, in order of rank."""
        size = self.exchange.size
        mine = [rows.shape[0]] * size
        repeated = rows.repeat(size, *[1] * (rows.dim() - 1))
        return self.exchange.start(repeated, mine, self.rows, tag=self.tag, name=f"{self.name}.gather{suffix}").wait()

    def for_me(self, rows: Tensor, suffix: str = "") -> tuple[Tensor, ...]:
        """What every rank has for this rank's rows: one [own rows, ...] tensor per rank."""
        mine = [self.rows[self.exchange.rank]] * self.exchange.size
        name = f"{self.name}.sum{suffix}"
        return self.exchange.start(rows, self.rows, mine, tag=self.tag + 1, name=name).wait().split(mine)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


class GatherUnpack(torch.autograd.Function):
    """GatherUnpack.apply(packed, probs_dtype, ranks) -> everyone's rows [N, H] and probabilities [N].

    The backward pass sums everyone's gradients of this rank's rows.
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, probs_dtype: torch.dtype, ranks: TensorRanks) -> tuple[Tensor, Tensor]:
        ctx.probs_dtype, ctx.ranks = probs_dtype, ranks
        return cut(ranks.everyones(packed), probs_dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        parts = [cut(part, ctx.probs_dtype) for part in ctx.ranks.for_me(join(*gradients), ".backward")]
        return join(_sum([rows for rows, _ in parts]), _sum([probs for _, probs in parts])), None, None


class SumOwnRows(torch.autograd.Function):
    """SumOwnRows.apply(partial, ranks) -> this rank's rows [N, H] of the sum over ranks; backward gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _sum(ranks.for_me(partial))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.everyones(gradients[0], ".backward"), None
