"""Launches, copies and memory of the captured graphs of a list, as executed by runtime/executor/graphs.py.

1. A replay is one launch. A deferred weight gradient of a captured operator is a separate graph for every partition.
2. A graph reads an input in place if a graph of the same slot wrote it. Other inputs are copied to the address of the capture:
   outputs of all-to-alls, transfers and uncaptured operators, joined partitions, and the sum that the gate's backward pass
   computes outside of its graph. An uncaptured merge passes its gradient to the shared experts without a copy.
3. Buffers that a transfer sends are copied out of the slot.
4. A slot holds the outputs of its graphs and the copies of their inputs until the end of the run, and a pool for temporaries.
   Tensors saved by autograd are counted with the activations; here only for slots beyond the micro-batches in flight.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moe_overlap.plan.instructions import BufferRole, Instruction, parse_buffer
from moe_overlap.plan.lowering.captured import CapturedList, Slot, captured_list
from moe_overlap.plan.lowering.deferral import backward_of
from moe_overlap.plan.operators import BACKWARD, GATE, MERGE, SHARED, OperatorKind
from moe_overlap.tuner.cost.copied_bytes import HIDDEN, ROWS

TENSORS = frozenset(
    (*HIDDEN, *ROWS, BufferRole.RECEIVED, BufferRole.COMPUTED, BufferRole.D_RECEIVED, BufferRole.D_COMPUTED)
)
"""Roles of buffers that operators of layers pass to each other as tensors of graphs; capacity and counts are not among them."""
SAVED = (BufferRole.HIDDEN, BufferRole.ATTENDED)
"""Roles of outputs that the next operator saves for its backward pass in any case."""


@dataclass(slots=True)
class Replayed:
    """One captured instruction, or one deferred weight gradient of a captured operator.

    Attributes:
        slot: the slot of its memory.
        launches: launches by the host, the replay included.
        copies: bytes of each copy, into the slot or out of it.
        output_bytes: bytes of the outputs that no later operator saves.
    """

    slot: Slot
    launches: int = 1
    copies: list[float] = field(default_factory=list)
    output_bytes: float = 0.0


Size = Callable[[Instruction, BufferRole, int], float]
"""(instruction, role, number of buffers) -> bytes of the buffers of a role that an instruction reads or writes."""


def replayed_in(instructions: Sequence[Instruction], has_static_rows: bool, size: Size) -> dict[int, Replayed]:
    """Instruction id -> launches and memory of its graph, for all replayed instructions of a list.

    Args:
        has_static_rows: whether every expert's input is padded to its capacity.
    """
    listed = captured_list(instructions, has_static_rows)
    slot_of = {(i.name, i.micro_batch): listed.slots[i.id] for i in instructions if i.id in listed.slots}
    owner: dict[str, Slot] = {}
    replayed: dict[int, Replayed] = {}
    for i in instructions:
        slot = listed.slots.get(i.id)
        if slot is not None:
            replayed[i.id] = _replayed(i, slot, listed, owner, size)
        elif i.kind == "weight-gradient" and (of_backward := slot_of.get((backward_of(i.name), i.micro_batch))):
            replayed[i.id] = Replayed(of_backward, launches=len(i.partition) or 1)
        handed = _handed_on(i, owner) if slot is None else {}
        for name in _slot_outputs(i, listed) if slot is not None else i.writes:
            owner.pop(name, None)
            if slot is not None:
                owner[name] = slot
        owner |= handed
        # The sum is a separate tensor, outside of the graph.
        if _sums(i):
            for name in _named(i.writes, BufferRole.D_ATTENDED):
                owner.pop(name, None)
    return replayed


def _replayed(i: Instruction, slot: Slot, listed: CapturedList, owner: Mapping[str, Slot], size: Size) -> Replayed:
    replayed = Replayed(slot)
    for role, names in _inputs(i):
        # Partitions of rows are passed one by one, partitions of hidden states joined.
        if len(names) > 1 and role in ROWS:
            replayed.copies += [size(i, role, 1) for name in names if owner.get(name) != slot]
        elif len(names) > 1 or owner.get(names[0]) != slot:
            replayed.copies.append(size(i, role, len(names)))
    for role, names in _by_role(_slot_outputs(i, listed)):
        replayed.output_bytes += size(i, role, len(names)) if role not in SAVED else 0.0
    sent = listed.sent.get(i.id, ())
    replayed.copies += [size(i, parse_buffer(name).role, 1) for name in sent]
    sums = len(_named(i.writes, BufferRole.D_ATTENDED)) if _sums(i) else 0
    joined = sum(len(names) > 1 and role in HIDDEN for role, names in _inputs(i))
    replayed.launches += len(replayed.copies) + sums + joined
    return replayed


def _handed_on(i: Instruction, owner: Mapping[str, Slot]) -> dict[str, Slot]:
    """Buffers that the backward pass of an uncaptured merge passes on in a slot: the terms of its sum share one gradient."""
    gradients = _named(i.reads, BufferRole.D_HIDDEN)
    if (
        i.operator.kind is not MERGE
        or i.operator.phase is not BACKWARD
        or len(gradients) != 1
        or gradients[0] not in owner
    ):
        return {}
    return dict.fromkeys(_named(i.writes, BufferRole.D_SHARED), owner[gradients[0]])


def _sums(i: Instruction) -> bool:
    """Whether an instruction adds its input's gradient to a sum: the gate does, with that of the shared experts."""
    return i.operator.kind is GATE and i.operator.phase is BACKWARD


def _inputs(i: Instruction) -> Iterator[tuple[BufferRole, list[str]]]:
    """The input tensors of a graph, by role; without a sum that it adds to."""
    added = i.operator.phase is BACKWARD and i.operator.kind in (GATE, SHARED)
    for role, names in _by_role(i.reads):
        if not (added and role is BufferRole.D_ATTENDED):
            yield role, names


def _slot_outputs(i: Instruction, listed: CapturedList) -> list[str]:
    """The buffers that a graph writes in its slot; none for the shared experts' gradient, which the gate adds to its own."""
    sent = listed.sent.get(i.id, ())
    of_shared = i.operator.kind is SHARED and i.operator.phase is BACKWARD
    return [] if of_shared else [name for name in i.writes if name not in sent]


def _by_role(names: Sequence[str]) -> Iterator[tuple[BufferRole, list[str]]]:
    by_role: dict[BufferRole, list[str]] = defaultdict(list)
    for name in names:
        role = parse_buffer(name).role
        if role in TENSORS:
            by_role[role].append(name)
    yield from by_role.items()


def _named(names: Sequence[str], role: BufferRole) -> list[str]:
    return [name for name in names if parse_buffer(name).role is role]


def more_launches_by_row(
    instructions: Sequence[Instruction], replayed: Mapping[int, Replayed], row_of: Callable[[str], int]
) -> dict[int, dict[tuple[OperatorKind, bool], float]]:
    """Row of a part -> `Replays.more_launches`, averaged over the list.

    A deferred weight gradient counts with the backward pass of its operator.

    Args:
        row_of: layer, such as `L3` -> its row.
    """
    launches: dict[tuple[int, OperatorKind, bool], float] = defaultdict(float)
    replays: Counter[tuple[int, OperatorKind, bool]] = Counter()
    for i in instructions:
        if i.id not in replayed:
            continue
        is_gradient = i.kind == "weight-gradient"
        key = row_of(i.operator.group), i.operator.kind, is_gradient or i.operator.phase is BACKWARD
        launches[key] += replayed[i.id].launches - (not is_gradient)
        replays[key] += not is_gradient
    by_row: dict[int, dict[tuple[OperatorKind, bool], float]] = defaultdict(dict)
    for (row, kind, backward), number in launches.items():
        by_row[row][kind, backward] = number / replays[row, kind, backward]
    return by_row


def kept_bytes(
    instructions: Sequence[Instruction],
    replayed: Mapping[int, Replayed],
    saved_of: Callable[[str], float],
    working: float,
    in_flight: float,
) -> float:
    """Bytes that the graphs of a list hold in addition to the peak of a step without graphs.

    Args:
        instructions: a list with as many micro-batches as can be in flight.
        saved_of: layer, such as `L3` -> bytes that the forward pass of a micro-batch saves.
        working: bytes of temporaries of a layer's operators.
        in_flight: micro-batches, each of all chunks, whose saved activations are counted already.
    """
    graph_bytes = 0.0
    layers: dict[Slot, set[str]] = defaultdict(set)
    seen: set[tuple[Slot, str, tuple[int, ...]]] = set()
    for i in instructions:
        if i.id not in replayed:
            continue
        graph = replayed[i.id]
        key = graph.slot, i.name, i.partition
        # Later micro-batches in the slot replay the same graphs, so each graph counts once.
        if key not in seen:
            seen.add(key)
            graph_bytes += sum(graph.copies) + graph.output_bytes
        layers[graph.slot].add(i.operator.group)
    held = sum(saved_of(layer) for of_slot in layers.values() for layer in of_slot)
    counted = in_flight * sum(saved_of(layer) for layer in set().union(*layers.values()))
    return graph_bytes + len(layers) * working + max(0.0, held - counted)
