"""Activations and their gradients between equal stages: rank i of a stage to rank i of the next, each with a tag of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moe_overlap.plan.instructions import Instruction
from moe_overlap.runtime.buffers import Buffers, stem_of
from moe_overlap.runtime.groups import StageGroups

GRADIENT_TAG = 1 << 28
MOST_BOUNDARIES = 1 << 12


class StageTransfers:
    """Point-to-point transfers of one rank's boundary tensors [sequence, batch, hidden].

    Args:
        config: the chunks' TransformerConfig; gives width, precision and whether the sequence is split over tensor ranks.
    """

    def __init__(self, groups: StageGroups, config: Any, sequence_length: int, micro_batch_size: int) -> None:
        self._group = groups.collection.pp
        split = config.tensor_model_parallel_size if config.sequence_parallel else 1
        split *= config.context_parallel_size
        self._shape = (sequence_length // split, micro_batch_size, config.hidden_size)
        self._dtype = config.pipeline_dtype

    def start(self, i: Instruction, buffers: Buffers) -> Callable[[], None]:
        """Start one transfer; the answer waits for it and, for a receive, stores what arrived."""
        stage, stages = self._group.rank(), self._group.size()
        forward = not i.name.endswith(".backward")
        sends = i.name.startswith("send")
        peer = (stage + (1 if forward == sends else -1)) % stages
        assert i.micro_batch is not None
        # Both ends know a boundary by the virtual stage before it; the chunk differs between them where the pipeline wraps.
        boundary = (i.chunk or 0) * stages + stage - (0 if forward == sends else 1)
        tag = (0 if forward else GRADIENT_TAG) + i.micro_batch * MOST_BOUNDARIES + boundary
        if sends:
            tensor = buffers.read(i, stem_of(i.reads[0]))
            assert tensor is not None
            outgoing = tensor.detach().contiguous()
            request = dist.isend(outgoing, group=self._group, group_dst=peer, tag=tag)
            assert request is not None
            return lambda: _wait_and_release(request, outgoing)
        arriving = torch.empty(self._shape, dtype=self._dtype, device=torch.cuda.current_device())
        request = dist.irecv(arriving, group=self._group, group_src=peer, tag=tag)
        assert request is not None

        def finish() -> None:
            request.wait()
            buffers.write(i, stem_of(i.writes[0]), arriving)

        return finish


def _wait_and_release(request: Any, outgoing: torch.Tensor) -> None:
    request.wait()
    del outgoing
