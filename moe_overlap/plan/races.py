"""The race check: instructions that touch one buffer on different channels must be ordered.

Terms. `i` happens before `j` where a path leads from i to j over `after` and over the order of a channel (an earlier
instruction of a channel finishes before a later one starts). Two accesses of a buffer, at least one of them writing,
race unless one happens before the other.

Method. Each instruction carries a vector clock: per channel, how many of its instructions have finished when it starts.
1. The clock is the maximum over the predecessor on the channel and everything in `after`, each counted as finished.
2. A read must know the last write of its buffer; a write the last write and, per channel, the last read since.
3. Older accesses need no look: the accesses of step 2 already know them.
Time: instructions × (dependencies + buffers) × channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_overlap.plan.instructions import Instruction, ScheduleError

INPUTS = frozenset({"tokens", "labels", "gradient", "state", "parameters", "host"})
"""First words of buffers that are there when a step starts."""


@dataclass(slots=True)
class _Buffer:
    """Accesses so far that a later one can still race with."""

    writer: int | None = None
    readers: dict[int, int] = field(default_factory=dict)
    """Channel -> its last reading instruction since the last write."""


def check_races(instructions: Sequence[Instruction], inputs: frozenset[str] = INPUTS) -> None:
    """Check one rank's list.

    Args:
        inputs: first words of buffers that may be read before anything wrote them.
    Raises:
        ScheduleError: an id that stands twice, a dependency on what is not earlier in the list, a buffer read before it
            was written, or a race; the message shows the lines.
    """
    places = _places(instructions)
    channels = {name: n for n, name in enumerate(dict.fromkeys(i.channel for i in instructions))}
    channel_of = [channels[i.channel] for i in instructions]
    position: list[int] = []
    clocks: list[list[int]] = []
    last_on: list[int | None] = [None] * len(channels)
    buffers: dict[str, _Buffer] = {}

    def knows(here: int, earlier: int) -> bool:
        return clocks[here][channel_of[earlier]] >= position[earlier]

    for here, instruction in enumerate(instructions):
        mine = channel_of[here]
        previous = last_on[mine]
        before = [places[number] for number in instruction.after]
        clock = [0] * len(channels)
        for place in before if previous is None else (previous, *before):
            clock = list(map(max, clock, clocks[place]))
            clock[channel_of[place]] = max(clock[channel_of[place]], position[place])
        clocks.append(clock)
        position.append(1 if previous is None else position[previous] + 1)
        last_on[mine] = here
        for name in instruction.reads:
            buffer = buffers.setdefault(name, _Buffer())
            if buffer.writer is None:
                if name.split(".")[0] not in inputs:
                    raise ScheduleError(f"{name} is read before anything wrote it\n{_marked(instructions, here)}")
            elif not knows(here, buffer.writer):
                raise _race(instructions, name, buffer.writer, here)
        for name in instruction.writes:
            buffer = buffers.setdefault(name, _Buffer())
            for earlier in (*buffer.readers.values(), *(() if buffer.writer is None else (buffer.writer,))):
                if not knows(here, earlier):
                    raise _race(instructions, name, earlier, here)
            buffer.writer, buffer.readers = here, {}
        for name in instruction.reads:
            if name not in instruction.writes:
                buffers[name].readers[mine] = here


def _places(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Id -> place in the list, once ids and dependencies have been found sound."""
    places: dict[int, int] = {}
    known = {instruction.id for instruction in instructions}
    for place, instruction in enumerate(instructions):
        if instruction.id in places:
            raise ScheduleError(f"id {instruction.id} stands twice\n{_marked(instructions, place)}")
        for number in instruction.after:
            if number not in places:
                why = "does not stand before it" if number in known else "does not exist"
                raise ScheduleError(f"dependency {number} {why}\n{_marked(instructions, place)}")
        places[instruction.id] = place
    return places


def _race(instructions: Sequence[Instruction], buffer: str, first: int, second: int) -> ScheduleError:
    names = f"{instructions[first].name} and {instructions[second].name}"
    lines = _marked(instructions, first, second)
    return ScheduleError(f"{names} race for {buffer}: no dependency path from the first to the second\n{lines}")


def _marked(instructions: Sequence[Instruction], *places: int) -> str:
    """The lines at these places, with their neighbours, marked."""
    shown = sorted({n for place in places for n in (place - 1, place, place + 1) if 0 <= n < len(instructions)})
    return "\n".join(f"{'>' if n in places else ' '} {instructions[n]}" for n in shown)
