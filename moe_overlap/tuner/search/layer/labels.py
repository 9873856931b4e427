"""Which weight gradients may run under which exchange: labelling by reachability.

Terms. An instruction depends on an earlier one
- that wrote what it reads, or wrote or read what it writes (RAW, WAW, WAR),
- that stands in its `after`, or in front of it on a channel other than `compute`: collectives start in one order on all ranks.
Additions to one sum of gradients commute, so that they do not depend on each other; what reads the sum (its reduction, the
optimizer) depends on all of them.
Label. A weight gradient may run under an exchange if no path of dependencies joins the two.
Beyond the paper: it is issued right behind the exchange, so that what it depends on must stand in front of the exchange, and
what depends on it, such as the reduction of its sum, behind it.

Ancestors are bit sets, a bit per place in the list. Time: dependencies × places / 64.

Source: Lancet, section 4.1 and algorithm 1, lines 1-9; edges of writes after reads and writes are added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moe_overlap.plan.instructions import COMPUTE, Instruction

SUMMED = ("gradient", "dweights")
"""First words of buffers that computation only adds to."""


def may_run_under(
    instructions: Sequence[Instruction], exchanges: Iterable[int], gradients: Iterable[int]
) -> dict[int, tuple[int, ...]]:
    """The label of every exchange, as far as issue order allows.

    Args:
        instructions: one rank's list or a part of it; dependencies on what is left out are ignored.
        exchanges, gradients: places in it.
    Returns:
        Place of an exchange -> places of the weight gradients, ascending.
    """
    before = ancestors(dependencies(instructions))
    wanted = list(gradients)
    first_dependent = {place: len(before) for place in wanted}
    for place in wanted:
        bit = 1 << place
        first_dependent[place] = next((n for n in range(place, len(before)) if before[n] & bit), len(before))
    return {
        a: tuple(w for w in wanted if not related(before, a, w) and before[w] < 1 << a < 1 << first_dependent[w])
        for a in exchanges
    }


def related(before: Sequence[int], one: int, other: int) -> bool:
    """Whether a path joins two places."""
    return bool(before[one] >> other & 1 or before[other] >> one & 1)


def ancestors(dependencies_of: Sequence[Iterable[int]]) -> list[int]:
    """Bit sets of everything that must end before each place starts.

    Args:
        dependencies_of: by place, earlier places.
    """
    before: list[int] = []
    for needed in dependencies_of:
        bits = 0
        for place in needed:
            bits |= before[place] | 1 << place
        before.append(bits)
    return before


@dataclass(slots=True)
class _Accesses:
    """Accesses of a buffer since its last write, and that write."""

    writer: tuple[int, ...] = ()
    readers: list[int] = field(default_factory=list)
    additions: list[int] = field(default_factory=list)


def dependencies(instructions: Sequence[Instruction]) -> list[set[int]]:
    """By place, the earlier places that an instruction depends on."""
    places = {i.id: place for place, i in enumerate(instructions)}
    buffers: dict[str, _Accesses] = defaultdict(_Accesses)
    last_on: dict[str, int] = {}
    found: list[set[int]] = []
    for place, i in enumerate(instructions):
        needed = {places[number] for number in i.after if number in places}
        if i.channel != COMPUTE:
            if i.channel in last_on:
                needed.add(last_on[i.channel])
            last_on[i.channel] = place
        for name in dict.fromkeys((*i.reads, *i.writes)):
            accesses = buffers[name]
            if name in i.writes and _adds(i, name):
                needed.update(accesses.writer, accesses.readers)
                accesses.additions.append(place)
            elif name in i.writes:
                needed.update(accesses.writer, accesses.readers, accesses.additions)
                buffers[name] = _Accesses((place,))
            else:
                needed.update(accesses.writer, accesses.additions)
                accesses.readers.append(place)
        found.append(needed)
    return found


def _adds(i: Instruction, name: str) -> bool:
    return i.kind in ("compute", "weight-gradient") and name.partition(".")[0] in SUMMED
