"""Spans of the collectives inside operators (tensor, context and expert-tensor ranks), which no instruction names.

megatron-core's modules import functions of torch.distributed under names of their own, so the functions cannot be wrapped. All
of them call methods of `ProcessGroup`: these are wrapped while a step runs, for the groups of this rank that have a second rank.

1. A collective that its caller waits for at once splits the span of the operator in which it stands (`asyncOp` of its options).
2. One that is waited for later runs beside the operator; the operator is split by the wait.
3. A collective that starts while a communication is recorded belongs to that: the gradients of norms, which tensor ranks share,
   are summed as a part of the step's end, and the irregular dispatcher completes the rows of expert-tensor ranks as a part of
   its all-to-all.

Not yet run on hardware: on CUDA a span of 2. ends after the wait on the compute stream, so that the exposed time is exact and
the span includes the computation until the wait. Ring attention of Transformer Engine, which sends from rank to rank, has no
span.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from moe_overlap.plan.instructions import CONTEXT, EXPERT_TENSOR, TENSOR
from moe_overlap.runtime.spans import SpanRecorder

METHODS = (
    *("allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall"),
    *("_allgather_base", "_reduce_scatter_base", "alltoall_base"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single"),
)
"""Collectives of a process group; the last three are the names of the three before them from torch 2.13 on."""


def channels_inside(groups: ProcessGroupCollection) -> dict[ProcessGroup, str]:
    """Groups of this rank whose collectives run inside operators, with their channels; groups of one rank are left out.

    The group of all ranks that share a sample (`tp_cp`) counts with the tensor ranks where there are any.
    """
    channels = {groups.tp: TENSOR, groups.cp: CONTEXT, groups.expt_tp: EXPERT_TENSOR}
    channels[groups.tp_cp] = TENSOR if groups.tp.size() > 1 else CONTEXT
    return {group: channel for group, channel in channels.items() if group.size() > 1}


class LayerCollectives:
    """Records the collectives inside operators while a step runs.

    Args:
        recorder: takes the spans.
        channels: process groups of this rank and their channels, from `channels_inside`.
    """

    def __init__(self, recorder: SpanRecorder, channels: dict[ProcessGroup, str]) -> None:
        self._recorder, self._channels = recorder, channels

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record them inside the block."""
        # Entries of the class's dictionary: attribute access returns other objects, which could not be put back.
        methods = {name: vars(ProcessGroup)[name] for name in METHODS if name in vars(ProcessGroup)}
        methods = methods if self._channels else {}
        try:
            for name in methods:
                setattr(ProcessGroup, name, self._recording(getattr(ProcessGroup, name)))
            yield
        finally:
            for name, method in methods.items():
                setattr(ProcessGroup, name, method)

    def _recording(self, method: Callable[..., Any]) -> Callable[..., Any]:
        channels, recorder = self._channels, self._recorder

        def start(group: ProcessGroup, *arguments: Any, **options: Any) -> Any:
            channel = channels.get(group)
            opened = None
            if channel is not None:
                # Options without `asyncOp` do not say whether the caller waits at once: the wait then splits the operator.
                asynchronous = getattr(arguments[-1], "asyncOp", True) if arguments else True
                opened = recorder.start_inside(channel, blocks=not asynchronous)
            work = method(group, *arguments, **options)
            if opened is None:
                return work
            if work is None:
                # NCCL queues a synchronous collective on the caller's own stream and returns no work object.
                recorder.wait_inside(opened, lambda: None)
                return None
            return _RecordedWork(work, recorder, opened)

        return start


class _RecordedWork:
    """A collective in flight; waiting for it ends its span."""

    __slots__ = ("_opened", "_recorder", "_work")

    def __init__(self, work: Any, recorder: SpanRecorder, opened: Any) -> None:
        self._work, self._recorder, self._opened = work, recorder, opened

    def wait(self, *timeout: Any) -> Any:
        return self._recorder.wait_inside(self._opened, self._work.wait, *timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
