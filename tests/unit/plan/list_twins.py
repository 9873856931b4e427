"""Obvious twins of what the plan code does cleverly, and broken lists."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from moe_overlap.plan.instructions import Instruction, ScheduleError
from moe_overlap.plan.lowering.dependencies import check_races

List = tuple[Instruction, ...]


def has_race(instructions: Sequence[Instruction]) -> bool:
    """The obvious twin: close the order, then look at every pair of accesses on different channels."""
    before: list[int] = []
    last: dict[str, int] = {}
    for place, instruction in enumerate(instructions):
        closed = 0
        for number in (*instruction.after, *([last[instruction.channel]] if instruction.channel in last else [])):
            closed |= before[number] | 1 << number
        before.append(closed)
        last[instruction.channel] = place
    touches = [({*i.reads, *i.writes}, {*i.writes}) for i in instructions]
    for second, later in enumerate(instructions):
        for first, earlier in enumerate(instructions[:second]):
            conflict = touches[first][1] & touches[second][0] or touches[first][0] & touches[second][1]
            if conflict and earlier.channel != later.channel and not before[second] >> first & 1:
                return True
    return False


def cuts(instructions: List) -> Iterator[List]:
    """The list with one dependency removed, for each of them."""
    for place, instruction in enumerate(instructions):
        for number in instruction.after:
            kept = tuple(other for other in instruction.after if other != number)
            yield (*instructions[:place], dataclasses.replace(instruction, after=kept), *instructions[place + 1 :])


def rejects(instructions: Sequence[Instruction]) -> bool:
    try:
        check_races(instructions)
    except ScheduleError:
        return True
    return False


def run_together(lists: dict[int, list[Instruction]]) -> bool:
    """Whether all ranks finish: a channel runs in order, a transfer ends when both ends have reached it."""
    done: dict[int, set[int]] = {rank: set() for rank in lists}
    queues = {
        (rank, channel): [i for i in made if i.channel == channel]
        for rank, made in lists.items()
        for channel in {i.channel for i in made}
    }

    def head(rank: int, channel: str) -> Instruction | None:
        queue = queues.get((rank, channel), [])
        return queue[0] if queue and done[rank].issuperset(queue[0].after) else None

    moved = True
    while moved:
        moved = False
        for rank, channel in queues:
            first = head(rank, channel)
            if first is None:
                continue
            ends = [(rank, first)]
            if first.kind == "point-to-point":
                (peer,) = first.peers
                other = head(peer, channel)
                opposite = first.name.replace("send", "?").replace("receive", "send").replace("?", "receive")
                if other is None or other.peers != (rank,) or other.name != opposite:
                    continue
                assert other.micro_batch == first.micro_batch
                assert whole(first.reads + other.reads) == whole(first.writes + other.writes)
                ends.append((peer, other))
            for place, instruction in ends:
                queues[place, instruction.channel].pop(0)
                done[place].add(instruction.id)
            moved = True
    return not any(queues.values())


def whole(names: tuple[str, ...]) -> set[str]:
    """Buffers, parts as the whole: one end of a transfer may hold what the other end cuts."""
    return {re.sub(r"\.p\d+$", "", name) for name in names}
