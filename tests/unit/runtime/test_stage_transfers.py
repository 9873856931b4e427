"""Transfers between stages: they are waited for where they are needed, on their own stream, and hold their tensor until then."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_overlap.plan.instructions import Instruction, stem_of
from moe_overlap.plan.lowering.lifetimes import stream_of
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.runtime.executor import execute
from moe_overlap.runtime.executor import streams as streams_module
from moe_overlap.runtime.executor.buffers import Buffers
from moe_overlap.runtime.executor.execute import StageTransfers
from moe_overlap.runtime.executor.streams import ChannelStreams
from moe_overlap.runtime.spans import SpanRecorder
from tests.unit.plan import plan_samples
from tests.unit.runtime.fake_ranks import executor_of, first_rank_of
from tests.unit.runtime.test_streams import Library, Stream

RUN = "--pipeline-model-parallel-size 2 --defer-weight-gradients"


@pytest.fixture(scope="module", autouse=True)
def four_ranks() -> Iterator[None]:
    with first_rank_of(4):
        yield


class Ticks:
    """A clock of a device that queues."""

    queues = True

    def mark(self) -> int:
        return 0


def test_a_send_holds_its_tensor_until_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's transfer reads it until then, and so does NCCL's stream, of which the allocator knows nothing."""
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
    buffers.write(writer, stem_of(send.reads[0]), tensor)
    finish = transfers.start(send, buffers)
    assert not waited
    buffers.drop(send.reads[0])
    del tensor, memory
    assert held() is not None
    finish()
    del finish
    assert waited == ["wait"] and held() is None


class Recorded(ChannelStreams):
    """Streams that note what has ended where an instruction starts, and transfers that NCCL's streams run."""

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self.issued: Instruction | None = None
        self.ended: dict[int, frozenset[int]] = {}
        self.under_way: Counter[str] = Counter()
        self.most = 0
        self.waited: list[tuple[str, Stream]] = []

    @contextlib.contextmanager
    def running(self, instruction: Instruction) -> Iterator[None]:
        with super().running(instruction):
            self.issued = instruction
            known = self._library.current.known
            self.ended[instruction.id] = frozenset(known)
            yield
            if instruction.kind != "point-to-point":
                known.add(instruction.id)

    def transfer(self, tensor: torch.Tensor, **_: Any) -> Any:
        """Start one, as `isend` and `irecv` do."""
        assert self.issued is not None
        number, channel = self.issued.id, stream_of(self.issued)
        self.under_way[channel] += 1
        self.most = max(self.most, self.under_way[channel])
        tensor.zero_()

        def wait() -> None:
            self._library.current.known.add(number)
            self.waited.append((channel, self._library.current))
            self.under_way[channel] -= 1

        return SimpleNamespace(wait=wait)


Run = tuple[Any, tuple[Instruction, ...], Any, Recorded]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The executor of a pipeline's first rank on recorded streams, its list, and its micro-batches."""
    runner, instructions, feed = executor_of(RUN)
    runner._streams = streams = Recorded(Library())
    for name in ("isend", "irecv"):
        monkeypatch.setattr(dist, name, streams.transfer)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return runner, instructions, feed, streams


def test_the_executor_waits_for_a_transfer_where_it_is_needed(run: Run) -> None:
    runner, instructions, feed, streams = run
    for step in range(2):
        runner.run(instructions, feed, step)
        assert all(streams.ended[i.id].issuperset(i.after) for i in instructions)
    transfers = [i for i in instructions if i.kind == "point-to-point"]
    assert len(streams.waited) == 2 * len(transfers) > 0
    # On the transfer's own stream, never on the computing one, and one of a channel at a time.
    assert all(stream is streams._streams[channel] for channel, stream in streams.waited)
    assert streams.most == 1 and not +streams.under_way


def test_no_wait_stands_right_behind_its_transfer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where streams share a hardware queue it would hold up all that is issued behind it (plan/lowering/residency.py)."""
    runner, instructions, feed, streams = run
    started: list[int] = []
    running = streams.running

    @contextlib.contextmanager
    def noted(instruction: Instruction) -> Iterator[None]:
        before = +streams.under_way
        with running(instruction):
            yield
        if instruction.kind == "point-to-point":
            started.append(instruction.id)
            assert streams.under_way - before == Counter({stream_of(instruction): 1})

    monkeypatch.setattr(streams, "running", noted)
    runner.run(instructions, feed, 0)
    assert started == [i.id for i in instructions if i.kind == "point-to-point"]


def test_a_list_is_read_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the host works out what a list tells, a device has nothing to do: not in every step, and not behind an evaluation."""
    runner, instructions, feed, _ = run
    asked: Counter[str] = Counter()

    def counted(function: Any) -> Any:
        def asks(made: Any) -> Any:
            asked[function.__name__] += 1
            return function(made)

        return asks

    for module, name in ((streams_module, "uses_to_record"), (execute, "last_uses"), (execute, "early_gradients")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    for step in range(2):
        runner.run(instructions, feed, step)
        runner.evaluate(instructions, feed, step)
    # The list, and its forward part.
    assert asked == {"uses_to_record": 2, "last_uses": 2, "early_gradients": 2}
