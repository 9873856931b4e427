"""Streams of a device, as a list implies them: who runs where, who waits for whom, and which memory must not be reused too early.

Terms. Every channel of communication has a *stream* of its own; what computes, the update included, shares one. A stream runs in
list order; an instruction also waits for the events of its `after`. The host runs ahead of all of them: it drops a buffer behind
its last use in the list, long before that use has run.

The hazard. An allocator that keeps a pool for each stream hands the memory of a dropped buffer out again to the next instruction
of the stream on which the buffer was allocated. Another stream may still read it then. A *foreign use* is harmless only if

1. that next instruction is ordered behind the use (over `after` and the order of streams), or
2. the allocator has been told of it (torch's `record_stream`): it then waits, at the price of an event per use.

`uses_to_record` names the foreign uses to which 1 does not apply. Computation that uses what another stream has allocated is
always among them: autograd may keep such a tensor beyond the buffer's last use in the list.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moe_overlap.plan.instructions import COMPUTE, Instruction, parse_buffer
from moe_overlap.plan.lowering.dependencies import COMMUNICATION, INPUTS, last_uses

Uses = Mapping[int, frozenset[str]]
"""Instruction id -> buffers that it uses."""


def stream_of(instruction: Instruction) -> str:
    """The stream of an instruction, by the name of its channel; the update works on the stream that computes."""
    communicates = instruction.kind in COMMUNICATION and not instruction.operator.is_update
    return instruction.channel if communicates else COMPUTE


def awaited_elsewhere(instructions: Sequence[Instruction]) -> frozenset[int]:
    """Ids of the instructions that another stream waits for: only these need an event."""
    stream = {i.id: stream_of(i) for i in instructions}
    # An evaluation runs the forward part of a list: what it leaves out has nobody waiting.
    waits = ((number, i) for i in instructions for number in i.after if number in stream)
    return frozenset(number for number, i in waits if stream[number] != stream[i.id])


@dataclass(slots=True)
class _Live:
    """A buffer that has been allocated and not been dropped."""

    stream: str
    foreign: list[int] = field(default_factory=list)
    """Places of the instructions of other streams that use it."""


def uses_to_record(instructions: Sequence[Instruction]) -> Uses:
    """The foreign uses that the allocator must be told of: those that are not harmless by themselves."""
    order = StreamOrder(instructions)
    ends = last_uses(instructions)
    live: dict[str, _Live] = {}
    uses: dict[int, set[str]] = defaultdict(set)

    def drop(name: str, place: int) -> None:
        buffer = live.pop(name, None)
        if buffer is None:
            return
        following = order.next_on(buffer.stream, place)
        for use in buffer.foreign:
            computes = order.streams[use] == COMPUTE
            # Without a next instruction the memory waits for the next step, of which this list says nothing.
            if computes or following is None or not order.knows(following, use):
                uses[instructions[use].id].add(name)

    for place, i in enumerate(instructions):
        touched = [name for name in dict.fromkeys((*i.reads, *i.writes)) if parse_buffer(name).word not in INPUTS]
        for name in touched:
            if name in live and order.streams[place] != live[name].stream:
                live[name].foreign.append(place)
            if name in i.writes:
                # What is added to is a new tensor; the old one goes, and what else the instruction writes may take its memory.
                drop(name, place - 1)
                live[name] = _Live(order.streams[place])
        for name in ends[i.id]:
            drop(name, place)
    return {number: frozenset(names) for number, names in uses.items()}


class StreamOrder:
    """Which instructions have ended when another one starts: a clock per instruction counts those of every stream."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.streams = [stream_of(i) for i in instructions]
        self._numbers: list[int] = []
        self._places: dict[str, list[int]] = defaultdict(list)
        self._clocks: list[dict[str, int]] = []
        place_of: dict[int, int] = {}
        for place, i in enumerate(instructions):
            mine = self._places[self.streams[place]]
            clock: dict[str, int] = {}
            for earlier in (*(mine[-1:]), *(place_of[number] for number in i.after if number in place_of)):
                for stream, ended in (*self._clocks[earlier].items(), (self.streams[earlier], self._numbers[earlier])):
                    clock[stream] = max(clock.get(stream, -1), ended)
            self._numbers.append(len(mine))
            mine.append(place)
            self._clocks.append(clock)
            place_of[i.id] = place

    def knows(self, later: int, earlier: int) -> bool:
        """Whether the instruction at one place has ended when that at another starts."""
        return self._clocks[later].get(self.streams[earlier], -1) >= self._numbers[earlier]

    def next_on(self, stream: str, place: int) -> int | None:
        """The place of the first instruction of a stream behind a place."""
        places = self._places[stream]
        index = bisect.bisect_right(places, place)
        return places[index] if index < len(places) else None
