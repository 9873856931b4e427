"""Bytes that are copied where a micro-batch is cut into parts and joined again, by the instruction that copies them.

What the runtime does (runtime/buffers.py, bind.py): parts of hidden states are joined by whoever reads several of them; a part of
whole hidden states is a view and costs nothing. A gate that leaves its rows in parts copies the hidden states of each part, and
joins their gradients. Where rows travel in chunks of capacity, an exchange picks its rows, and who needs all of them puts them
into their places. Parts that go to another stage are joined behind the computation that made the last of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from moe_overlap.plan.instructions import COMPUTE, Instruction

HIDDEN = ("h", "a", "shared", "dh", "da", "dshared")
"""First words of buffers of hidden states and their gradients."""
ROWS = ("rows", "returned", "drows", "dreturned")
"""Of routed rows where their tokens are."""
Place = tuple[str, int | None, tuple[int, ...]]


def place_in_list(i: Instruction) -> Place:
    """Name, micro-batch and partition: what tells an instruction of a pass, on every rank of a stage."""
    return i.name, i.micro_batch, i.partition


def copied_bytes(made: Sequence[Instruction], hidden_bytes: float, rows_bytes: float) -> dict[Place, float]:
    """What is copied beside the operators of a list, by the instruction that it lengthens.

    Args:
        hidden_bytes: of the hidden states of a micro-batch.
        rows_bytes: of all rows that a micro-batch sends.
    """
    pieces = Counter((i.name, i.micro_batch) for i in made)
    makers = {name: i for i in made if i.channel == COMPUTE for name in i.writes}
    left_in_parts = {
        _stem(name) for i in made if _is_whole_gate(i) for name in i.writes if _parts(i.writes)["rows"] > 1
    }
    copied: dict[Place, float] = defaultdict(float)
    for i in made:
        read = _parts(name for name in i.reads if name not in i.writes)
        size = hidden_bytes * sum(read[word] > 1 for word in HIDDEN)
        if i.channel == COMPUTE:
            of_parts = any(_stem(name).removeprefix("d") in left_in_parts for name in (*i.reads, *i.writes))
            size += hidden_bytes * (_is_whole_gate(i) and _parts(i.writes)["rows"] > 1)
            size += (hidden_bytes if of_parts else rows_bytes) * sum(read[word] > 1 for word in ROWS)
        elif i.partition and any(_word(name) in ROWS and ".p" not in name for name in i.reads):
            size += rows_bytes / pieces[i.name, i.micro_batch]
        if size:
            copied[place_in_list(makers[i.reads[-1]] if i.kind == "point-to-point" else i)] += size
    return copied


def _is_whole_gate(i: Instruction) -> bool:
    return not i.partition and i.channel == COMPUTE and any(_word(name) == "rows" for name in i.writes)


def _parts(names: Iterable[str]) -> Counter[str]:
    """First word -> buffers of it."""
    return Counter(map(_word, names))


def _word(name: str) -> str:
    return name.partition(".")[0]


def _stem(name: str) -> str:
    """`rows.L3.m0.p1` -> `rows.L3.m0`."""
    return name.partition(".p")[0]
