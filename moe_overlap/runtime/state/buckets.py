"""Gradients of one optimizer part reduced over its replicas, in pieces that an instruction list places.

megatron-core's distributed optimizer cuts every DDP bucket into D equal shards, one per replica. A bucket that holds one part
only can be reduced by itself: piece p of n takes columns [p·w/n, (p+1)·w/n) of the bucket seen as [D, w], and leaves in this
rank's shard what a reduce-scatter of the whole bucket would. Scaling is DDP's. Where a parameter has no copy there is nothing to
send, and DDP scales its bucket at the end.

CPU: an exchange of columns and a sum in order of rank: gloo's own reduce-scatter sends twice the bytes.
CUDA (NCCL): a reduce-scatter. Not yet run on hardware.

D replicas of a parameter, w elements of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_overlap.runtime.dispatch.wire import Exchange
from moe_overlap.runtime.state.optimizer import named_parts


def bucket_marks(modules: Iterable[Any]) -> list[torch.nn.Parameter]:
    """The first parameter, in the order in which DDP fills its buckets, of every part in every buffer.

    A bucket that begins with each of them holds one part only.
    """
    last = {
        (part, parameter.dtype, getattr(parameter, "allreduce", True)): parameter
        for part, parameter in named_parts(modules)
        if parameter.requires_grad
    }
    return list(last.values())


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A DDP bucket of one part with D > 1.

    Attributes:
        gradient_Dw: its gradients; row r belongs to rank r of the group.
        exchange: among its replicas.
    """

    gradient_Dw: Tensor
    scale: float
    exchange: Exchange


class GradientPieces:
    """The pieces of one rank.

    Args:
        chunks: DDP-wrapped model chunks whose buckets hold one part each.
    Attributes:
        exchanges: one per group of replicas.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        part_of = {id(parameter): part for part, parameter in named_parts(chunks)}
        self.exchanges: list[Exchange] = []
        self._buckets: dict[str, list[_Bucket]] = {}
        self._alone: list[Any] = []
        self._left: dict[str, set[int]] = {}
        for chunk in chunks:
            assert not chunk.ddp_config.overlap_grad_reduce and not chunk.ddp_config.average_in_collective
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                if group.intra_distributed_optimizer_instance_size == 1:
                    self._alone.append(group)
                else:
                    self._take(group, part_of)

    def start(self, part: str, piece: int, pieces: int) -> Callable[[], None]:
        """Start the reduction of one piece of a part whose backward passes are over.

        Returns:
            What waits until this rank's share of it is summed.
        """
        left = self._left.setdefault(part, set(range(pieces)))
        assert piece in left, f"gradients.{part}: piece {piece} was reduced before"
        left.remove(piece)
        waits = [_start(bucket, piece, pieces, f"gradients.{part}") for bucket in self._buckets[part]]

        def wait() -> None:
            for finish in waits:
                finish()

        return wait

    def finish(self) -> None:
        """The end of the step's reductions: every piece has been waited for; buckets without replicas are scaled."""
        missing = [part for part in self._buckets if self._left.get(part, {0})]
        assert not missing, f"gradients that were not reduced: {missing}"
        self._left.clear()
        for group in self._alone:
            group.finish_grad_sync()

    def _take(self, group: Any, part_of: dict[int, str]) -> None:
        process_group = group.intra_distributed_optimizer_instance_group
        exchange = next((known for known in self.exchanges if known.group is process_group), None)
        if exchange is None:
            exchange = Exchange(process_group)
            self.exchanges.append(exchange)
        for bucket in group.buckets:
            (part,) = {part_of[id(parameter)] for parameter in bucket.params_list}
            gradient_Dw = bucket.grad_data.view(exchange.size, -1)
            kept = _Bucket(gradient_Dw, bucket.gradient_scaling_factor, exchange)
            self._buckets.setdefault(part, []).append(kept)


def _start(bucket: _Bucket, piece: int, pieces: int, name: str) -> Callable[[], None]:
    width = bucket.gradient_Dw.shape[1]
    columns = slice(width * piece // pieces, width * (piece + 1) // pieces)
    mine = bucket.gradient_Dw[bucket.exchange.rank, columns]
    sent_Dw = bucket.gradient_Dw[:, columns] * bucket.scale
    if sent_Dw.is_cuda:
        work = dist.reduce_scatter_tensor(mine, sent_Dw, group=bucket.exchange.group, async_op=True)
        assert work is not None
        return work.wait
    one_each = [1] * bucket.exchange.size
    pending = bucket.exchange.start(sent_Dw, one_each, one_each, tag=bucket.exchange.take_tags(1), name=name)

    def add() -> None:
        torch.sum(pending.wait(), dim=0, out=mine)

    return add
