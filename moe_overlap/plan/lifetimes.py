"""How long the buffers of a list must be kept."""

from __future__ import annotations

from collections.abc import Sequence

from moe_overlap.plan.instructions import Instruction


def last_uses(instructions: Sequence[Instruction]) -> dict[int, tuple[str, ...]]:
    """Instruction id -> buffers whose content nobody reads after it.

    A buffer that is written anew before it is read again, as a recomputation does it, is not kept in between.
    """
    ends: dict[int, tuple[str, ...]] = {}
    needed: set[str] = set()
    for i in reversed(instructions):
        ends[i.id] = tuple(name for name in dict.fromkeys((*i.reads, *i.writes)) if name not in needed)
        needed.difference_update(i.writes)
        needed.update(i.reads)
    return ends
