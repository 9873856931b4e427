"""CUDA streams of a list: the stream of each instruction, their order, and the buffers whose memory must not be reused too early.

Terms. Every channel of communication and copies has its own *stream*; all computation, the update included, shares one. A stream
runs in list order, and an instruction also waits for the events of its `after`. The host runs ahead of all streams: it drops
a buffer after issuing its last use, long before that use has executed.

The hazard. An allocator with a pool per stream gives the memory of a dropped buffer to the next instruction on the stream that
allocated it, while another stream may still read it. Such a *foreign use* is safe only if

1. that next instruction is ordered after the use (over `after` and the order of streams), or
2. the use is registered with the allocator (torch's `record_stream`), which then waits for it, at the cost of an event.

`uses_to_record` returns the foreign uses that need 2. They include every computation that reads a buffer of another stream:
autograd may keep that tensor longer than its last use in the list.

The bound. Registered memory comes back when the device has passed its use, so a host that never waits allocates the buffers of
all layers it is ahead by. `host_waits` bounds that: a host that waits for no counts is LAYERS_AHEAD passes through a layer ahead
at most, and of what is freed after use (weights and gradients with ZeRO 2 and 3, offloaded shares) no more than GROUPS_AHEAD
parameter groups are allocated ahead of the device. Each wait is for an earlier instruction of the same list, so a list that ends
on one hardware queue (residency.py) ends with it.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moe_overlap.plan.instructions import COMPUTE, BufferRole, Home, Instruction, parse_buffer
from moe_overlap.plan.lowering.dependencies import COMMUNICATION, INPUTS, last_uses
from moe_overlap.plan.operators import COUNT

Uses = Mapping[int, frozenset[str]]
"""Instruction id -> buffers to register."""
LAYERS_AHEAD, GROUPS_AHEAD = 2, 2
"""Passes through a layer, and parameter groups, whose memory the host allocates at most before the device frees that of earlier
ones. With one the device would run empty while the host launches the next."""

FREED = (
    (Home.DEVICE, BufferRole.WEIGHTS),
    (Home.DEVICE, BufferRole.D_WEIGHTS),
    (Home.MOVED, BufferRole.WEIGHTS),
    (Home.MOVED, BufferRole.STATE),
    (Home.MOVED, BufferRole.ACTIVATIONS),
)
"""Buffers whose memory is given back within a step."""


def stream_of(instruction: Instruction) -> str:
    """The stream of an instruction, named by its channel; the update runs on the compute stream."""
    has_own = instruction.kind in (*COMMUNICATION, "copy") and not instruction.operator.is_update
    return instruction.channel if has_own else COMPUTE


def awaited_elsewhere(instructions: Sequence[Instruction]) -> frozenset[int]:
    """Ids of instructions that another stream waits for; only these need an event."""
    stream = {i.id: stream_of(i) for i in instructions}
    # An evaluation executes only the forward part of a list, so some ids in `after` are absent.
    waits = ((number, i) for i in instructions for number in i.after if number in stream)
    return frozenset(number for number, i in waits if stream[number] != stream[i.id])


@dataclass(slots=True)
class _Live:
    """A buffer between its allocation and its last use."""

    stream: str
    foreign: list[int] = field(default_factory=list)
    """Places of instructions on other streams that use it."""


def uses_to_record(instructions: Sequence[Instruction]) -> Uses:
    """The foreign uses to register with the allocator, because no order makes them safe."""
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
            # Without a next instruction the memory is reused in the next step, whose order is unknown here.
            if computes or following is None or not order.knows(following, use):
                uses[instructions[use].id].add(name)

    for place, i in enumerate(instructions):
        touched = [name for name in dict.fromkeys((*i.reads, *i.writes)) if parse_buffer(name).word not in INPUTS]
        for name in touched:
            if name in live and order.streams[place] != live[name].stream:
                live[name].foreign.append(place)
            if name in i.writes:
                # An accumulation writes a new tensor and drops the old one, whose memory the instruction's outputs may reuse.
                drop(name, place - 1)
                live[name] = _Live(order.streams[place])
        for name in ends[i.id]:
            drop(name, place)
    return {number: frozenset(names) for number, names in uses.items()}


def host_waits(instructions: Sequence[Instruction]) -> Mapping[int, tuple[int, ...]]:
    """Instruction id -> earlier instructions that the device has executed before the host issues it, to bound memory."""
    waits: dict[int, list[int]] = defaultdict(list)
    # 1. Passes through a layer, each from its first computation on. Where counts travel the host waits for them in every layer.
    if not any(i.operator.kind is COUNT for i in instructions):
        firsts = list(layer_passes(instructions).values())
        for earlier, first in zip(firsts, firsts[LAYERS_AHEAD:], strict=False):
            waits[first[0].id].append(earlier[0].id)
    # 2. Parameter groups: memory for one more is allocated when the one GROUPS_AHEAD before the last is free.
    ends = last_uses(instructions)
    for home, role in FREED:
        live: set[str] = set()
        freed: list[int] = []
        for i in instructions:
            opened = {name for name in i.writes if _is_kind(name, home, role)} - live
            if opened and len(freed) >= GROUPS_AHEAD:
                waits[i.id].append(freed[-GROUPS_AHEAD])
            live |= opened
            closed = live.intersection(ends[i.id])
            freed += [i.id] * bool(closed)
            live -= closed
    return {number: tuple(earlier) for number, earlier in waits.items()}


def layer_passes(instructions: Sequence[Instruction]) -> dict[tuple[int, int, bool], list[Instruction]]:
    """(layer, micro-batch, whether backward) -> the computations of a pass through a layer; passes in order of their start."""
    passes: dict[tuple[int, int, bool], list[Instruction]] = defaultdict(list)
    for i in instructions:
        if i.kind == "compute" and i.operator.layer is not None and i.micro_batch is not None:
            passes[i.operator.layer, i.micro_batch, i.in_backward_pass].append(i)
    return passes


def _is_kind(name: str, home: Home, role: BufferRole) -> bool:
    buffer = parse_buffer(name)
    return buffer.role is role and buffer.home is home


class StreamOrder:
    """Which instructions have ended when another one starts, by a vector clock over the streams."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.streams = [stream_of(i) for i in instructions]
        self._numbers: list[int] = []
        self._places: dict[str, list[int]] = defaultdict(list)
        self._clocks: list[dict[str, int]] = []
        place_of: dict[int, int] = {}
        for place, i in enumerate(instructions):
            places = self._places[self.streams[place]]
            clock: dict[str, int] = {}
            for earlier in (*(places[-1:]), *(place_of[number] for number in i.after if number in place_of)):
                for stream, ended in (*self._clocks[earlier].items(), (self.streams[earlier], self._numbers[earlier])):
                    clock[stream] = max(clock.get(stream, -1), ended)
            self._numbers.append(len(places))
            places.append(place)
            self._clocks.append(clock)
            place_of[i.id] = place

    def knows(self, later: int, earlier: int) -> bool:
        """Whether the instruction at place `earlier` has ended when the one at place `later` starts."""
        return self._clocks[later].get(self.streams[earlier], -1) >= self._numbers[earlier]

    def next_on(self, stream: str, place: int) -> int | None:
        """The place of the first instruction of a stream after `place`; None if there is none."""
        places = self._places[stream]
        index = bisect.bisect_right(places, place)
        return places[index] if index < len(places) else None
