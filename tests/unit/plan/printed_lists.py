"""Printed instruction lists, read back: the inverse of `format_list`, for golden lists and hand-written ones."""

from __future__ import annotations

from typing import get_args

from moe_overlap.plan.instructions import KINDS, Instruction, Kind


def parse_line(line: str) -> Instruction:
    """The instruction a printed line stands for, padded or not.

    Raises:
        ValueError: the line was not printed from an instruction.
    """
    cells = line.split()
    if len(cells) != 15 or cells[9] != "->" or cells[13] != "after" or cells[1] not in KINDS:
        raise ValueError(f"not an instruction: {line!r}")
    number, kind, name, stage, chunk, micro_batch, partition, channel, reads, _, writes, sent, ends, _, after = cells
    peers, _, region = ends.removesuffix("]").partition("[")

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
        region=tuple(map(int, region.replace(":", ",").split(","))) if region else (),
    )


def parse_list(text: str) -> tuple[Instruction, ...]:
    """The inverse of `format_list`; empty lines are skipped."""
    return tuple(parse_line(line) for line in text.splitlines() if line.strip())
