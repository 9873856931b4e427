"""CUDA streams by channel: on which stream each instruction of a list runs, and which stream waits for which.

Contract. Compute and update run on the stream that is current when the step begins; every channel of communication (rows, counts,
gradients, each direction of a boundary) has a stream of its own.
1. The stream of an instruction waits for the events of the instructions in its `after`, and for nothing else: an all-to-all does
   not wait for compute that is queued after the operator whose rows it sends, and never passes through the compute stream.
2. An event is recorded after every instruction that another stream waits for; the next step uses the events again. After a
   transfer between stages the event is recorded when the executor ends the transfer (`ending`): NCCL runs it on a stream of its
   own, and an earlier wait for that stream would hold up all work in the same hardware queue (plan/lowering/residency.py).
3. The allocator learns the uses that plan/lowering/lifetimes.py names before the host can drop their tensors.
4. When the list ends, the compute stream waits for all others.
5. The host waits for the events that plan/lowering/lifetimes.py names, so that memory is bounded however far it could run ahead.

On a CPU (`HostOrder`) instructions run in the order of the list. Not yet run on hardware: tests run it on stand-ins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_overlap.plan.instructions import COMPUTE, DATA, EXPERT, PIPELINE, Instruction, channel_group
from moe_overlap.plan.lowering.lifetimes import Uses, awaited_elsewhere, host_waits, stream_of, uses_to_record

PRIORITIES = {EXPERT: -1, PIPELINE: -1, DATA: 0}
"""Stream priorities by the kind of channel; the lowest runs first, compute has 0. Channels that other ranks wait for come first;
gradients are needed at the end of the step only."""


class Streams(Protocol):
    """The streams of one rank.

    Attributes:
        queues: whether work runs later than the host issues it.
    """

    queues: bool

    def begin(self, instructions: Sequence[Instruction]) -> None:
        """A list is about to be executed."""

    def running(self, instruction: Instruction) -> contextlib.AbstractContextManager[None]:
        """The context that issues an instruction: on its stream, after the instructions that it waits for."""

    def ending(self, instruction: Instruction) -> contextlib.AbstractContextManager[None]:
        """The context of the wait for a communication, before the first instruction that depends on it."""

    def uses(self, instruction: Instruction, tensors_of: Callable[[Iterable[str]], Iterable[Tensor]]) -> None:
        """Tell the allocator of the buffers of an instruction that another stream has allocated."""

    def finish(self) -> None:
        """The list has been issued."""


class HostOrder:
    """No streams: the host computes, in the order of the list."""

    queues = False

    def begin(self, instructions: Sequence[Instruction]) -> None:
        """Nothing to prepare."""

    def running(self, instruction: Instruction) -> contextlib.AbstractContextManager[None]:
        """The host runs it in the order of the list."""
        return contextlib.nullcontext()

    def ending(self, instruction: Instruction) -> contextlib.AbstractContextManager[None]:
        """The host waits."""
        return contextlib.nullcontext()

    def uses(self, instruction: Instruction, tensors_of: Callable[[Iterable[str]], Iterable[Tensor]]) -> None:
        """Host memory is free when the last reference goes."""

    def finish(self) -> None:
        """No work runs outside the host."""


class ChannelStreams:
    """A stream for every channel of a list.

    Args:
        library: torch.cuda, or a stand-in with its `Stream`, `Event`, `stream` and `current_stream`.
    """

    queues = True

    def __init__(self, library: Any = torch.cuda) -> None:
        self._library = library
        self._streams: dict[str, Any] = {}
        self._idle_events: list[Any] = []
        self._events: dict[int, tuple[str, Any]] = {}
        self._awaited: frozenset[int] = frozenset()
        self._recorded: Uses = {}
        self._host_waits: Mapping[int, tuple[int, ...]] = {}
        # By identity; an entry keeps its list alive, so that no other list gets its identity.
        self._lists: dict[int, tuple[Sequence[Instruction], frozenset[int], Uses, Mapping[int, tuple[int, ...]]]] = {}

    def begin(self, instructions: Sequence[Instruction]) -> None:
        """Find the instructions that need an event, and let every stream wait for the earlier work of the compute stream."""
        if id(instructions) not in self._lists:
            waits = host_waits(instructions)
            awaited = awaited_elsewhere(instructions).union(*waits.values())
            self._lists[id(instructions)] = instructions, awaited, uses_to_record(instructions), waits
        _, self._awaited, self._recorded, self._host_waits = self._lists[id(instructions)]
        self._idle_events += [event for _, event in self._events.values()]
        self._events.clear()
        computing = self._library.current_stream()
        self._streams[COMPUTE] = computing
        for channel in dict.fromkeys(map(stream_of, instructions)):
            if channel not in self._streams:
                priority = PRIORITIES.get(channel_group(channel), 0)
                self._streams[channel] = self._library.Stream(priority=priority)
            if channel != COMPUTE:
                self._streams[channel].wait_stream(computing)

    @contextlib.contextmanager
    def running(self, instruction: Instruction) -> Iterator[None]:
        """Issue an instruction on its stream."""
        for number in self._host_waits.get(instruction.id, ()):
            self._events[number][1].synchronize()
        channel = stream_of(instruction)
        stream = self._streams[channel]
        for number in instruction.after:
            if number in self._events and self._events[number][0] != channel:
                stream.wait_event(self._events[number][1])
        if channel == COMPUTE and instruction.channel in self._streams and instruction.channel != COMPUTE:
            # An update reads the results of its channel.
            stream.wait_stream(self._streams[instruction.channel])
        with self._library.stream(stream):
            yield
        if not _ends_late(instruction):
            self._record(instruction, channel)

    @contextlib.contextmanager
    def ending(self, instruction: Instruction) -> Iterator[None]:
        """Let the stream of a transfer wait for NCCL's; that of other communication has done so since the start."""
        if not _ends_late(instruction):
            yield
            return
        channel = stream_of(instruction)
        with self._library.stream(self._streams[channel]):
            yield
        self._record(instruction, channel)

    def _record(self, instruction: Instruction, channel: str) -> None:
        if instruction.id in self._awaited:
            event = self._idle_events.pop() if self._idle_events else self._library.Event()
            event.record(self._streams[channel])
            self._events[instruction.id] = (channel, event)

    def uses(self, instruction: Instruction, tensors_of: Callable[[Iterable[str]], Iterable[Tensor]]) -> None:
        """Tell the allocator not to reuse the memory before this stream has reached this instruction."""
        names = self._recorded.get(instruction.id, ())
        for tensor in tensors_of(names) if names else ():
            tensor.record_stream(self._streams[stream_of(instruction)])

    def finish(self) -> None:
        """Make computation outside the list, such as the next step's data or a checkpoint, wait for all streams."""
        for channel, stream in self._streams.items():
            if channel != COMPUTE:
                self._streams[COMPUTE].wait_stream(stream)


def _ends_late(instruction: Instruction) -> bool:
    """Whether the stream waits only where the result is needed: for a transfer, since its peer follows another list."""
    return instruction.kind == "point-to-point"
