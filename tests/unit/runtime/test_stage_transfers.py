"""Transfers between stages: where the device queues, a send holds its tensor no longer than the device needs it."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_overlap.plan.instructions import stem_of
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.runtime.executor.buffers import Buffers
from moe_overlap.runtime.executor.execute import StageTransfers
from moe_overlap.runtime.spans import SpanRecorder
from tests.unit.plan import plan_samples


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class Ticks:
    """A clock of a device that queues."""

    queues = True

    def mark(self) -> int:
        return 0


@pytest.mark.parametrize("on_device", [True, False])
def test_a_started_send_holds_its_tensor_on_the_host_alone(monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
    """gloo's transfer reads it until it is waited for; NCCL's is ordered by its stream, and nothing waits till the step ends."""
    waited: list[str] = []
    work = SimpleNamespace(wait=lambda: waited.append("wait"))
    monkeypatch.setattr(dist, "isend", lambda tensor, dst, group: work)
    send = next(i for i in lower(plan_samples.plan(4, 2), plan_samples.model("mmmm"), 0) if i.sends)
    groups: Any = SimpleNamespace(transfers={(send.channel, send.peers[0]): None})
    config = SimpleNamespace(
        sequence_parallel=False, context_parallel_size=1, hidden_size=2, pipeline_dtype=torch.float32
    )
    clock: Any = Ticks()
    transfers = StageTransfers(groups, SpanRecorder(clock), config, 4, 1)
    memory, buffers = np.ones((4, 1, 2), dtype=np.float32), Buffers(lambda _: 1)
    held, tensor = weakref.ref(memory), torch.from_numpy(memory)
    writer: Any = SimpleNamespace(writes=send.reads)
    buffers.write(writer, stem_of(send.reads[0]), tensor.as_subclass(OnDevice) if on_device else tensor)
    finish = transfers.start(send, buffers)
    assert waited == (["wait"] if on_device else [])
    buffers.drop(send.reads[0])
    del tensor, memory
    assert (held() is None) == on_device
    finish()
    del finish
    assert waited == ["wait"] and held() is None
