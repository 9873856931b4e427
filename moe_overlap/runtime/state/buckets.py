"""Reduces gradients of one parameter group over its replicas, in buckets that an instruction list places.

Terms: a *parameter group* is the embedding, a layer, a prediction layer or the head; a *DDP bucket* is megatron-core's stretch of
a gradient buffer; a *bucket* is the part that one instruction of the list reduces.

megatron-core's distributed optimizer cuts every DDP bucket into D equal shards, one per replica. A DDP bucket of only one
parameter group (`bucket_marks`) can be reduced separately: bucket p of n takes columns [p·w/n, (p+1)·w/n), both rounded down to
CUT_ELEMENTS, of the DDP bucket seen as [D, w]. This rank's shard then equals the result of a reduce-scatter of the whole DDP
bucket. Scaling is DDP's. A parameter without replicas has nothing to send; DDP scales its gradients at the end.

- CPU (gloo): an all-to-all of columns and a sum in order of rank; gloo's own reduce-scatter sends twice the bytes.
- CUDA (NCCL): a reduce-scatter. All ranks of a group start their buckets in the order of the list, as NCCL demands. Not yet run
  on hardware.

D replicas of a parameter, w elements of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch import Tensor

from moe_overlap.runtime.dispatch.wire import AllToAll
from moe_overlap.runtime.state.optimizer import named_parts

CUT_ELEMENTS = 32
"""Buckets begin at multiples of so many elements: NCCL copies 16 bytes at a time only at aligned addresses, like DDP's."""


def bucket_marks(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """The parameters that must begin a DDP bucket, so that each DDP bucket holds one parameter group only.

    They are the first, in the order in which DDP fills its buckets (last registered first), of every group in every buffer.
    """
    last_registered = {
        (group, parameter.dtype, getattr(parameter, "allreduce", True)): parameter
        for group, parameter in named_parts(modules)
        if parameter.requires_grad
    }
    return list(last_registered.values())


@dataclass(frozen=True, slots=True)
class _DdpBucket:
    """A DDP bucket of one parameter group with D > 1.

    Attributes:
        gradient_Dw: the gradients; row r belongs to rank r of the replicas.
        scale: DDP's factor, applied before the sum.
        replicas: the wire among the replicas.
    """

    gradient_Dw: Tensor
    scale: float
    replicas: AllToAll


class GradientBuckets:
    """The reductions of one rank that the list places between its passes (context.BucketReduction).

    Args:
        chunks: DDP-wrapped model chunks whose DDP buckets hold one parameter group each.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        group_of = {id(parameter): group for group, parameter in named_parts(chunks)}
        self._wires: list[AllToAll] = []
        self._ddp_buckets: dict[str, list[_DdpBucket]] = {}
        self._unreplicated: list[_ParamAndGradBucketGroup] = []
        self._outstanding: dict[str, set[int]] = {}
        for chunk in chunks:
            # DDP must not reduce itself: it would send the same gradients a second time.
            assert not chunk.ddp_config.overlap_grad_reduce and not chunk.ddp_config.average_in_collective
            for ddp_group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                if ddp_group.intra_distributed_optimizer_instance_size == 1:
                    self._unreplicated.append(ddp_group)
                else:
                    self._add(ddp_group, group_of)

    def start(self, parameter_group: str, bucket: int, buckets: int) -> Callable[[], None]:
        """Start the reduction of one bucket of a parameter group whose backward passes are over.

        Returns:
            A function that waits until this rank's share of the bucket is summed.
        """
        name = f"gradients.{parameter_group}"
        outstanding = self._outstanding.setdefault(parameter_group, set(range(buckets)))
        assert bucket in outstanding, f"{name}: bucket {bucket} was reduced before"
        outstanding.remove(bucket)
        waits = [_start(ddp_bucket, bucket, buckets, name) for ddp_bucket in self._ddp_buckets[parameter_group]]

        def wait() -> None:
            for finish in waits:
                finish()

        return wait

    def finish(self) -> None:
        """End the step's reductions, after the list has waited for every bucket; scale gradients without replicas."""
        # A group that was never started counts as outstanding.
        missing = [group for group in self._ddp_buckets if self._outstanding.get(group, {0})]
        assert not missing, f"gradients that were not reduced: {missing}"
        self._outstanding.clear()
        for ddp_group in self._unreplicated:
            ddp_group.finish_grad_sync()

    def _add(self, ddp_group: _ParamAndGradBucketGroup, group_of: dict[int, str]) -> None:
        """Add the DDP buckets of one of DDP's groups; wires are shared by process group, so that tags stay unique on each."""
        process_group = ddp_group.intra_distributed_optimizer_instance_group
        wire = next((candidate for candidate in self._wires if candidate.group is process_group), None)
        if wire is None:
            wire = AllToAll(process_group)
            self._wires.append(wire)
        for bucket in ddp_group.buckets:
            (group,) = {group_of[id(parameter)] for parameter in bucket.params_list}
            # The optimizer's shards are equal consecutive stretches: rank r steps row r.
            gradient_Dw = bucket.grad_data.view(wire.size, -1)
            ddp_bucket = _DdpBucket(gradient_Dw, bucket.gradient_scaling_factor, wire)
            self._ddp_buckets.setdefault(group, []).append(ddp_bucket)


def _start(ddp_bucket: _DdpBucket, bucket: int, buckets: int, name: str) -> Callable[[], None]:
    wire, width = ddp_bucket.replicas, ddp_bucket.gradient_Dw.shape[1]
    columns = slice(_cut(width, bucket, buckets), _cut(width, bucket + 1, buckets))
    own_share = ddp_bucket.gradient_Dw[wire.rank, columns]
    # A copy, because the columns are not contiguous; scaling it costs nothing more.
    sent_Dw = ddp_bucket.gradient_Dw[:, columns] * ddp_bucket.scale
    if sent_Dw.is_cuda:
        work = dist.reduce_scatter_tensor(own_share, sent_Dw, group=wire.group, async_op=True)
        assert work is not None
        # The channel's stream waits for NCCL's, the host does not; a reader of the sum waits for the channel's stream.
        work.wait()
        return _nothing
    one_each = [1] * wire.size
    pending = wire.start(sent_Dw, one_each, one_each, tag=wire.take_tags(1), name=name)

    def add() -> None:
        torch.sum(pending.wait(), dim=0, out=own_share)

    return add


def _cut(width: int, bucket: int, buckets: int) -> int:
    """The first column of the bucket of this number."""
    unit = CUT_ELEMENTS if width >= CUT_ELEMENTS * buckets else 1  # no bucket is empty
    return width if bucket == buckets else width * bucket // buckets // unit * unit


def _nothing() -> None:
    """The sum is on the device's streams already."""
