"""Lists that reduce one gradient in other ways than `gradient_gaps` places it, to measure what its places are worth.

as listed     every part, as the plan says
none          nothing is reduced
in gaps       the head alone, as the plan says
at once       the head alone, in one collective that starts when its gradient is complete
at the end    the head alone, in one collective behind the last backward pass
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from moe_overlap.plan.instructions import Instruction

Reduction = Literal["as listed", "none", "in gaps", "at once", "at the end"]
HEAD = "gradients.head"


def with_reduction(instructions: Sequence[Instruction], reduction: Reduction) -> tuple[Instruction, ...]:
    """A list with its reductions as described above; nothing but the executor's order is kept sound.

    Args:
        instructions: a list with reductions in pieces; the last two ways need the head in one piece.
    """
    if reduction == "as listed":
        return tuple(instructions)
    head = [i for i in instructions if i.name == HEAD]
    others = [i for i in instructions if not i.name.startswith("gradients.")]
    if reduction == "none":
        return tuple(others)
    if reduction == "in gaps":
        return tuple(i for i in instructions if i.name == HEAD or i in others)
    (piece,) = head
    free = [dataclasses.replace(i, after=tuple(number for number in i.after if number != piece.id)) for i in others]
    passes = [i for i in free if i.micro_batch is not None]
    complete = max(place for place, i in enumerate(passes) if piece.reads[0] in i.writes)
    place = complete + 1 if reduction == "at once" else len(passes)
    return (*passes[:place], dataclasses.replace(piece, after=()), *passes[place:], *free[len(passes) :])
