"""Which instructions of a list are replayed as captured graphs, and in whose memory.

A captured graph reads and writes the same addresses at every replay, so that two micro-batches that are under way together cannot
share one. A *slot* is a set of graphs, with memory of its own, for one micro-batch of one model chunk at a time.

1. Captured are compute instructions inside layers whose shapes are the same in every micro-batch: attention, dense MLP, gate and
   shared experts (a gate's rows are bounded, never counted), and with a static capacity experts and merge.
2. A micro-batch holds its slot until everything of it has ended: passes, all-to-alls, weight gradients that were put off.
   It takes the first slot whose last holder has ended, on every stream, when its own first captured instruction starts.
3. All holders of a slot run the same captured instructions in the same order: graphs may then share what memory each needs for
   itself (runtime/executor/graphs.py). A slot's name says the order; lists of other batch sizes find their slots again.
4. Transfers between stages are left out of that: nothing on this rank waits for a send. What they send is copied out of the slot.

So no list is refused: one that proves less takes more slots, at most as many as it has micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.lifetimes import StreamOrder
from moe_overlap.plan.operators import ATTENTION, EXPERTS, GATE, MERGE, MLP, SHARED, OperatorKind

ALWAYS = frozenset({ATTENTION, MLP, GATE, SHARED})
WITH_STATIC_ROWS = frozenset({EXPERTS, MERGE})


Order = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and partitions of the captured instructions of a micro-batch, in the order of the list."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot of one model chunk; those of one order are numbered from 0."""

    chunk: int
    order: Order
    number: int


@dataclass(frozen=True, slots=True)
class CapturedList:
    """The captured instructions of a list.

    Attributes:
        slots: instruction id -> slot.
        sent: instruction id -> buffers that it writes and a transfer to another stage reads.
    """

    slots: Mapping[int, Slot]
    sent: Mapping[int, tuple[str, ...]]


def captured_kinds(has_static_rows: bool) -> frozenset[OperatorKind]:
    """Operators of layers that are captured, each forward, backward, and as deferred weight gradients."""
    return ALWAYS | WITH_STATIC_ROWS if has_static_rows else ALWAYS


def captured_list(instructions: Sequence[Instruction], has_static_rows: bool) -> CapturedList:
    """Find the captured instructions of a list and give each micro-batch of a chunk its slot.

    Args:
        has_static_rows: whether every expert's input is padded to its capacity.
    """
    kinds = captured_kinds(has_static_rows)
    streams = StreamOrder(instructions)
    held: dict[tuple[int, int], list[int]] = defaultdict(list)  # places of all that is of a micro-batch of a chunk
    captured: dict[tuple[int, int], list[int]] = defaultdict(list)  # places of what is captured
    for place, i in enumerate(instructions):
        if i.chunk is None or i.micro_batch is None or i.kind == "point-to-point":
            continue
        held[i.chunk, i.micro_batch].append(place)
        if i.kind == "compute" and i.operator.layer is not None and i.operator.kind in kinds:
            captured[i.chunk, i.micro_batch].append(place)
    slots: dict[int, Slot] = {}
    holders: dict[tuple[int, Order], list[tuple[int, int]]] = defaultdict(list)  # last holder of each slot
    for holder, places in sorted(captured.items(), key=lambda item: item[1][0]):
        order = tuple((instructions[place].name, instructions[place].partition) for place in places)
        taken = holders[holder[0], order]
        free = (n for n, last in enumerate(taken) if all(streams.knows(places[0], use) for use in held[last]))
        number = next(free, len(taken))
        taken[number : number + 1] = [holder]
        slot = Slot(holder[0], order, number)
        slots |= {instructions[place].id: slot for place in places}
    outgoing = {name for i in instructions if i.sends for name in i.reads}
    sent = {i.id: tuple(name for name in i.writes if name in outgoing) for i in instructions if i.id in slots}
    return CapturedList(slots, {number: names for number, names in sent.items() if names})
