"""Which instructions of a list are replayed as captured CUDA graphs, and which memory each graph uses.

A captured graph reads and writes the same addresses at every replay, so two micro-batches in flight cannot share a graph. A
*slot* is a set of graphs with separate memory, for one micro-batch of one model chunk at a time.

1. Captured instructions are compute instructions inside layers with the same shapes in every micro-batch: attention, dense MLP,
   gate and shared experts (a gate's rows are bounded, never counted), and, with a static capacity, experts and merge.
2. A micro-batch holds its slot until its passes, all-to-alls and deferred weight gradients have ended. When its first captured
   instruction starts, it takes the first slot whose last holder has ended on every stream.
3. All holders of a slot run the same captured instructions in the same order, so its graphs can share temporary memory
   (runtime/executor/graphs.py). The order is part of a slot's key: lists with other numbers of micro-batches reuse the slots.
4. Transfers between stages do not count for step 2, because nothing on this rank waits for a send. Their data is copied out of
   the slot.

No list is refused: the fewer of its micro-batches are provably ordered, the more slots it takes, at most one per micro-batch.
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
    """A slot of one model chunk; slots with the same order are numbered from 0."""

    chunk: int
    order: Order
    number: int


@dataclass(frozen=True, slots=True)
class CapturedList:
    """The captured instructions of a list.

    Attributes:
        slots: instruction id -> slot.
        sent: instruction id -> buffers that it writes for a transfer to another stage.
    """

    slots: Mapping[int, Slot]
    sent: Mapping[int, tuple[str, ...]]


def captured_kinds(has_static_rows: bool) -> frozenset[OperatorKind]:
    """Captured operators of layers: their forward, backward and deferred weight-gradient instructions."""
    return ALWAYS | WITH_STATIC_ROWS if has_static_rows else ALWAYS


def captured_list(instructions: Sequence[Instruction], has_static_rows: bool) -> CapturedList:
    """Find the captured instructions of a list and give each micro-batch of a chunk its slot.

    Args:
        has_static_rows: whether every expert's input is padded to its capacity.
    """
    kinds = captured_kinds(has_static_rows)
    streams = StreamOrder(instructions)
    # (chunk, micro-batch) -> places of all its instructions, and of its captured ones.
    held: dict[tuple[int, int], list[int]] = defaultdict(list)
    captured: dict[tuple[int, int], list[int]] = defaultdict(list)
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
        last_holders = holders[holder[0], order]
        free = (n for n, last in enumerate(last_holders) if all(streams.knows(places[0], use) for use in held[last]))
        number = next(free, len(last_holders))
        last_holders[number : number + 1] = [holder]
        slot = Slot(holder[0], order, number)
        slots |= {instructions[place].id: slot for place in places}
    outgoing = {name for i in instructions if i.sends for name in i.reads}
    sent = {i.id: tuple(name for name in i.writes if name in outgoing) for i in instructions if i.id in slots}
    return CapturedList(slots, {number: names for number, names in sent.items() if names})
