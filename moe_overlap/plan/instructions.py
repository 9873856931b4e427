"""Instructions: what one rank does in one step, as printable data.

A list is in issue order. Instructions of one channel start in list order, the next when the one before has finished;
different channels run at the same time. An instruction starts when all of `after` have finished and its channel is
free.

Channels: `compute`; `optimizer`, where parts step by themselves; one per process group (`ep`, `dp`); one per direction of a stage
boundary (`pp.S0>S1`, `pp.S0>S1.backward`: on a single one, two stages that both wait to send would block each other); one per
copy direction (`h2d`, `d2h`).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from moe_overlap.plan.serialize import as_values, read_record

Kind = Literal["compute", "weight-gradient", "collective", "point-to-point", "copy", "optimizer"]
KINDS: tuple[str, ...] = get_args(Kind)
COMPUTE, OPTIMIZER, TO_DEVICE, TO_HOST = "compute", "optimizer", "h2d", "d2h"


class ScheduleError(Exception):
    """A list or an order that must not be run: our own mistake, never a user's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One entry of a list.

    Attributes:
        id: place in the list, from 0.
        name: operator name, see operators.py.
        stage: pipeline stage of the rank.
        chunk: virtual stage, None where it does not apply, as below.
        micro_batch: micro-batch of the step.
        partition: pieces of the micro-batch or of its routed rows, or the chunk of a gradient reduction; empty: not cut.
        channel: what it occupies while it runs.
        reads, writes: buffers.
        bytes: planned bytes that leave the rank; 0 where nothing does.
        peers: ranks at the other end of a point-to-point transfer.
        after: ids that must have finished.
    """

    id: int
    kind: Kind
    name: str
    stage: int
    chunk: int | None = None
    micro_batch: int | None = None
    partition: tuple[int, ...] = ()
    channel: str = COMPUTE
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    bytes: int = 0
    peers: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def __str__(self) -> str:
        return " ".join(_cells(self))


def _cells(instruction: Instruction) -> tuple[str, ...]:
    """The columns of a printed line."""

    def one(letter: str, number: int | None) -> str:
        return "-" if number is None else f"{letter}{number}"

    def many(values: Iterable[object]) -> str:
        return ",".join(map(str, values)) or "-"

    i = instruction
    place = (one("S", i.stage), one("c", i.chunk), one("m", i.micro_batch), "p" + many(i.partition))
    buffers = (many(i.reads), "->", many(i.writes))
    ends = (f"{i.bytes}B", "@" + many(i.peers), "after", many(i.after))
    return (str(i.id), i.kind, i.name, *place, i.channel, *buffers, *ends)


def parse_line(line: str) -> Instruction:
    """The instruction a printed line stands for, padded or not.

    Raises:
        ValueError: the line was not printed from an instruction.
    """
    cells = line.split()
    if len(cells) != 15 or cells[9] != "->" or cells[13] != "after" or cells[1] not in KINDS:
        raise ValueError(f"not an instruction: {line!r}")
    number, kind, name, stage, chunk, micro_batch, partition, channel, reads, _, writes, sent, peers, _, after = cells

    def one(cell: str) -> int | None:
        return None if cell == "-" else int(cell[1:])

    def words(cell: str) -> tuple[str, ...]:
        return () if cell == "-" else tuple(cell.split(","))

    return Instruction(
        id=int(number),
        kind=next(known for known in get_args(Kind) if known == kind),
        name=name,
        stage=int(stage.removeprefix("S")),
        chunk=one(chunk),
        micro_batch=one(micro_batch),
        partition=tuple(map(int, words(partition[1:]))),
        channel=channel,
        reads=words(reads),
        writes=words(writes),
        bytes=int(sent.removesuffix("B")),
        peers=tuple(map(int, words(peers[1:]))),
        after=tuple(map(int, words(after))),
    )


def format_list(instructions: Sequence[Instruction]) -> str:
    """A list as aligned lines, each readable by `parse_line`."""
    rows = [_cells(instruction) for instruction in instructions]
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = {0, 11}  # id and bytes
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        lines.append(" ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(cells)).rstrip())
    return "".join(line + "\n" for line in lines)


def parse_list(text: str) -> tuple[Instruction, ...]:
    """The inverse of `format_list`; empty lines are skipped."""
    return tuple(parse_line(line) for line in text.splitlines() if line.strip())


def to_json(instructions: Iterable[Instruction]) -> list[Any]:
    """A list as plain JSON values."""
    return [as_values(instruction) for instruction in instructions]


def from_json(values: Iterable[Any]) -> tuple[Instruction, ...]:
    """The inverse of `to_json`; ConfigError where an entry has another form."""
    entries = enumerate(values)
    return tuple(read_record(Instruction, value, "instructions", f"[{index}]") for index, value in entries)


# What ran when, under the names of the instruction list: measured by the runtime's recorder or simulated by the tuner.

COMPUTING = (COMPUTE, OPTIMIZER)
"""Channels that keep the device busy; the others move bytes."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work on one channel; times in seconds since the start of the step."""

    name: str
    channel: str
    chunk: int
    micro_batch: int
    start: float
    end: float


def communication_seconds(spans: Sequence[Span]) -> tuple[float, float]:
    """Communication of a step.

    Returns:
        Seconds in which communication ran, and those of them in which no compute span covered it (exposed).
    """
    communication = _union((s.start, s.end) for s in spans if s.channel not in COMPUTING)
    compute = _union((s.start, s.end) for s in spans if s.channel in COMPUTING)
    covered = sum(max(0.0, min(e1, e2) - max(s1, s2)) for s1, e1 in communication for s2, e2 in _near(compute, s1, e1))
    total = sum(end - start for start, end in communication)
    return total, total - covered


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _near(intervals: list[tuple[float, float]], start: float, end: float) -> list[tuple[float, float]]:
    first = bisect.bisect_left(intervals, (start, start))
    last = bisect.bisect_right(intervals, (end, end))
    return intervals[max(0, first - 1) : last]
