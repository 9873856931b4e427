"""The backward pass of one micro-batch and the forward pass of another, interleaved: each computes while the other communicates.

Terms. A turn of a pass is a run of computation with the exchanges that follow it (the stage of chunk_order.py); the weight
gradients that stand behind an exchange or a transfer are its filling.
Order. The backward pass takes a turn, then the forward pass, then the filling of the former, and so on: behind a backward
exchange there is the forward turn and the filling, behind a forward exchange the filling and the next backward turn. Where one
pass has more turns, they are spread evenly over those of the other. What the forward pass receives from the stage before is
asked for at once.

Beyond Lancet, whose two tricks know one micro-batch; the two passes do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from moe_overlap.plan.lowering.dependencies import Draft


@dataclass(slots=True)
class Turn:
    """Computation, exchanges, and what fills the time of the last of them."""

    work: list[Draft] = field(default_factory=list)
    filling: list[Draft] = field(default_factory=list)

    @property
    def has_exchanged(self) -> bool:
        """Whether the next computation begins another turn."""
        return bool(self.work) and self.work[-1].kind == "collective"

    @property
    def communicates(self) -> bool:
        """Whether it ends in an exchange or a transfer."""
        return self.has_exchanged or (bool(self.work) and self.work[-1].kind == "point-to-point")


def turns_of(drafts: Sequence[Draft]) -> list[Turn]:
    """Cut a pass where computation follows an exchange."""
    turns = [Turn()]
    for draft in drafts:
        if draft.kind == "weight-gradient" and turns[-1].communicates:
            turns[-1].filling.append(draft)
            continue
        if draft.kind == "compute" and turns[-1].has_exchanged:
            turns.append(Turn())
        turns[-1].work.append(draft)
    return turns


def interleave(backward: Sequence[Draft], forward: Sequence[Draft]) -> Iterator[Draft]:
    """Two passes of different micro-batches in the order above; each keeps its own."""
    received = list(takewhile(lambda draft: draft.receives, forward))
    yield from received
    mine = turns_of(backward)
    theirs = turns_of(forward[len(received) :])
    for number, turn in enumerate(mine):
        yield from turn.work
        first, last = (len(theirs) * n // len(mine) for n in (number, number + 1))
        for other in theirs[first:last]:
            yield from other.work
        yield from turn.filling
