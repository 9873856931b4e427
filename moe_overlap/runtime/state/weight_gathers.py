"""Gathers updated weights from their shards, one parameter group at a time, where an instruction list says so.

megatron-core's distributed optimizer steps this rank's shard of every DDP bucket and leaves the other shards outdated. A DDP
bucket of only one parameter group (buckets.py, `bucket_marks`) is gathered separately, in place: rank r of D replicas sends row
r of the bucket seen as [D, w], and has all rows when the gather has ended. Parameters without replicas have nothing to gather.

Gathers are idempotent: an evaluation gathers, and the next step gathers again. Code that reads weights between two steps, such
as a checkpoint, must gather them first (`MegatronLayerwiseOptimizer.gather`); all ranks do that together.

NCCL matches collectives of a communicator by their order, which is that of the instruction list on every rank; the stream that is
current when a gather starts waits for it, not the host. Not yet run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from moe_overlap.runtime.state.optimizer import named_parts


@dataclass(frozen=True, slots=True)
class _Shards:
    """The weights of a DDP bucket with D > 1: row r of them belongs to rank r of the group."""

    weights_Dw: Tensor
    group: dist.ProcessGroup

    def start(self) -> dist.Work:
        own_w = self.weights_Dw[dist.get_rank(self.group)]
        work = dist.all_gather_into_tensor(self.weights_Dw.view(-1), own_w, group=self.group, async_op=True)
        assert work is not None
        return work


class WeightGathers:
    """The gathers of one rank that the list places between its passes (context.WeightGathering).

    Args:
        chunks: DDP-wrapped model chunks whose DDP buckets hold one parameter group each.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        group_of = {id(parameter): group for group, parameter in named_parts(chunks)}
        self._shards: dict[str, list[_Shards]] = {}
        for chunk in chunks:
            # DDP must not gather itself: its hooks would send the same weights a second time.
            assert not chunk.ddp_config.overlap_param_gather
            for ddp_group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                size = ddp_group.intra_distributed_optimizer_instance_size
                for bucket in ddp_group.buckets if size > 1 else ():
                    (part,) = {group_of[id(parameter)] for parameter in bucket.params_list}
                    weights_Dw = bucket.param_data.view(size, -1)
                    shards = _Shards(weights_Dw, ddp_group.intra_distributed_optimizer_instance_group)
                    self._shards.setdefault(part, []).append(shards)

    @torch.no_grad()
    def start(self, parameter_group: str) -> Callable[[], None]:
        """Start the gather of a parameter group; the returned function waits until this rank has all of its weights."""
        held = self._shards.get(parameter_group, ())
        works = [shards.start() for shards in held]

        def wait() -> None:
            for work in works:
                work.wait()

        if held and held[0].weights_Dw.is_cuda:
            # The channel's stream waits for NCCL's, the host does not; a reader of the weights waits for the channel's stream.
            wait()
            return _nothing
        return wait


def _nothing() -> None:
    """The weights are on the device's streams already."""
