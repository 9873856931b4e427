"""Bytes copied when a micro-batch is cut into partitions and joined again, by the instruction that copies them.

Copies of the runtime (runtime/executor/buffers.py, bindings.py):
- An operator that reads several partitions of hidden states joins them; a partition of uncut hidden states is a view, at no cost.
- A gate that writes its rows in partitions copies the hidden states of each, and joins their gradients.
- With capacity chunks an all-to-all selects its rows, and the reader of all rows puts them into their places.
- Partitions that are sent to another stage are joined after the computation that writes the last of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

from moe_overlap.plan.instructions import COMPUTE, BufferId, BufferRole, Home, Instruction, parse_buffer

HIDDEN = frozenset(
    (
        *(BufferRole.HIDDEN, BufferRole.ATTENDED, BufferRole.SHARED),
        *(BufferRole.D_HIDDEN, BufferRole.D_ATTENDED, BufferRole.D_SHARED),
    )
)
"""Buffers of hidden states and their gradients."""
ROWS = frozenset((BufferRole.ROWS, BufferRole.RETURNED, BufferRole.D_ROWS, BufferRole.D_RETURNED))
"""Buffers of routed rows on the ranks of their tokens."""
Place = tuple[str, int | None, tuple[int, ...]]


def place_in_list(i: Instruction) -> Place:
    """Name, micro-batch and partition, which identify an instruction of a pass on every rank of a stage."""
    return i.name, i.micro_batch, i.partition


def copied_bytes(instructions: Sequence[Instruction], hidden_bytes: float, rows_bytes: float) -> dict[Place, float]:
    """Instruction -> bytes that it copies in addition to its operator.

    Args:
        hidden_bytes: bytes of the hidden states of a micro-batch.
        rows_bytes: bytes of all rows that a micro-batch sends.
    """
    pieces = Counter((i.name, i.micro_batch) for i in instructions)
    makers = {name: i for i in instructions if i.channel == COMPUTE for name in i.writes}
    left_in_parts = {
        _rows_of(name)
        for i in instructions
        if _is_whole_gate(i) and BufferRole.ROWS in _in_parts(i.writes)
        for name in i.writes
    }
    copied: dict[Place, float] = defaultdict(float)
    for i in instructions:
        read = _in_parts(name for name in i.reads if name not in i.writes)
        size = hidden_bytes * len(read & HIDDEN)
        if i.channel == COMPUTE:
            of_parts = (
                any(_rows_of(name) in left_in_parts for name in (*i.reads, *i.writes)) if left_in_parts else False
            )
            size += hidden_bytes * (_is_whole_gate(i) and BufferRole.ROWS in _in_parts(i.writes))
            size += (hidden_bytes if of_parts else rows_bytes) * len(read & ROWS)
        elif i.partition and any(_is_whole_rows(parse_buffer(name)) for name in i.reads):
            size += rows_bytes / pieces[i.name, i.micro_batch]
        if size:
            copied[place_in_list(makers[i.reads[-1]] if i.kind == "point-to-point" else i)] += size
    return copied


def _is_whole_gate(i: Instruction) -> bool:
    return (
        not i.partition
        and i.channel == COMPUTE
        and any(parse_buffer(name).role is BufferRole.ROWS for name in i.writes)
    )


def _is_whole_rows(buffer: BufferId) -> bool:
    return buffer.role in ROWS and buffer.partition is None


def _in_parts(names: Iterable[str]) -> set[BufferRole]:
    """Roles that several of the buffers on the device have."""
    seen: set[BufferRole] = set()
    several: set[BufferRole] = set()
    for name in names:
        buffer = parse_buffer(name)
        if buffer.home is Home.DEVICE:
            (several if buffer.role in seen else seen).add(buffer.role)
    return several


@cache
def _rows_of(name: str) -> BufferId:
    """`drows.L3.m0.p1` -> `rows.L3.m0`: the uncut buffer of a partition, or of a partition of its gradient."""
    buffer = parse_buffer(name)
    return replace(buffer, role=buffer.role.differentiated, partition=None)
