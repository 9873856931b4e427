"""Streams by channel: what each instruction of a list runs on where the device queues, and which stream waits for which.

Contract. Compute and update run on the stream that is current when the step begins; every channel of communication (rows, counts,
gradients, each direction of a boundary) has a stream of its own.
1. The stream of an instruction waits for the events of what its `after` names, and for nothing else: an all-to-all neither waits
   for what computes behind the operator whose rows it sends, nor passes through the stream that computes.
2. Behind an instruction that another stream waits for an event is recorded. Events are kept for the next step. Behind a transfer
   between stages that is done when the executor ends it (`ending`): NCCL runs it on a stream of its own, and right behind the
   transfer the wait for that one would hold up whatever shares the hardware queue (plan/lowering/residency.py).
3. The allocator is told of the uses that plan/lowering/lifetimes.py names, before the host can drop their tensors.
4. When the list ends, the stream that computes waits for all others.

Where the host computes (`HostOrder`) the order of the list is all there is. Not yet run on hardware: tests run it on stand-ins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_overlap.plan.instructions import COMPUTE, DATA, EXPERT, PIPELINE, Instruction, channel_group
from moe_overlap.plan.lowering.lifetimes import Uses, awaited_elsewhere, stream_of, uses_to_record

PRIORITIES = {EXPERT: -1, PIPELINE: -1, DATA: 0}
"""Priorities of streams by the kind of their channel, the lower the sooner; computation has 0. What other ranks wait for comes
first; gradients are waited for at the end of the step only."""


class Streams(Protocol):
    """The streams of one rank.

    Attributes:
        queues: whether they run later than the host issues.
    """

    queues: bool

    def begin(self, instructions: Sequence[Instruction]) -> None:
        """A list is about to be executed."""

    def running(self, instruction: Instruction) -> contextlib.AbstractContextManager[None]:
        """Issue an instruction inside: on its stream, behind what it waits for."""

    def ending(self, instruction: Instruction) -> contextlib.AbstractContextManager[None]:
        """Wait for a communication inside, in front of whatever waits for it."""

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
        """The host runs it where it stands."""
        return contextlib.nullcontext()

    def ending(self, instruction: Instruction) -> contextlib.AbstractContextManager[None]:
        """The host waits."""
        return contextlib.nullcontext()

    def uses(self, instruction: Instruction, tensors_of: Callable[[Iterable[str]], Iterable[Tensor]]) -> None:
        """Host memory is free when the last reference goes."""

    def finish(self) -> None:
        """Nothing runs beside the host."""


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
        # By identity; the list is kept with what it tells.
        self._lists: dict[int, tuple[Sequence[Instruction], frozenset[int], Uses]] = {}

    def begin(self, instructions: Sequence[Instruction]) -> None:
        """Learn who is waited for, and let every stream begin behind what the step before has left on the computing one."""
        if id(instructions) not in self._lists:
            told = awaited_elsewhere(instructions), uses_to_record(instructions)
            self._lists[id(instructions)] = instructions, *told
        _, self._awaited, self._recorded = self._lists[id(instructions)]
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
        channel = stream_of(instruction)
        stream = self._streams[channel]
        for number in instruction.after:
            if number in self._events and self._events[number][0] != channel:
                stream.wait_event(self._events[number][1])
        if channel == COMPUTE and instruction.channel in self._streams and instruction.channel != COMPUTE:
            # An update works on what its channel has carried, in order.
            stream.wait_stream(self._streams[instruction.channel])
        with self._library.stream(stream):
            yield
        if not _ends_late(instruction):
            self._record(instruction, channel)

    @contextlib.contextmanager
    def ending(self, instruction: Instruction) -> Iterator[None]:
        """Let the stream of a transfer wait for NCCL's; of other communication it has done so since the start."""
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
        """Tell the allocator: it must not hand the memory out again before this stream has come so far."""
        names = self._recorded.get(instruction.id, ())
        for tensor in tensors_of(names) if names else ():
            tensor.record_stream(self._streams[stream_of(instruction)])

    def finish(self) -> None:
        """Make computation that is not in the list, such as the next step's data or a checkpoint, wait for all streams."""
        for channel, stream in self._streams.items():
            if channel != COMPUTE:
                self._streams[COMPUTE].wait_stream(stream)


def _ends_late(instruction: Instruction) -> bool:
    """Whether an instruction is waited for where it is needed: the other side of a transfer follows another list."""
    return instruction.kind == "point-to-point"
