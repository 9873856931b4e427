"""Launches and copies of a list's captured graphs, and the memory that they keep: runtime/executor/graphs.py, counted.

1. A replay is one launch. A deferred weight gradient of a captured operator is a graph of its own for every partition.
2. An input that a graph of the same slot has left is read where it lies. Anything else is copied to where the capture read it:
   what an all-to-all, a transfer or an uncaptured operator has brought, partitions that were joined, and the sum that the gate's
   backward pass adds up outside of its graph. An uncaptured merge hands its gradient on to the shared experts as it is.
3. What a transfer sends is copied out of the slot.
4. A slot keeps all that its graphs leave and what was copied to them until the end of the run, and a pool for what they need
   inside. What autograd saves is counted with the activations, and here for slots beyond the micro-batches in flight.
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
"""Buffers that operators of layers hand to each other; capacity stays where the gates keep it, counts are read by the host."""
SAVED = (BufferRole.HIDDEN, BufferRole.ATTENDED)
"""Outputs that the next operator saves for its backward pass anyway."""


@dataclass(slots=True)
class Replayed:
    """One captured instruction, or one deferred weight gradient of a captured operator.

    Attributes:
        slot: of its memory.
        launches: by the host, the replay among them.
        copies: bytes of each copy, into the slot or out of it.
        left: bytes of what its graph leaves and no later operator saves.
    """

    slot: Slot
    launches: int = 1
    copies: list[float] = field(default_factory=list)
    left: float = 0.0


Size = Callable[[Instruction, BufferRole, int], float]
"""Bytes of the buffers of a role that an instruction reads or writes: given the instruction, the role, and how many they are."""


def replayed_in(made: Sequence[Instruction], has_static_rows: bool, size: Size) -> dict[int, Replayed]:
    """Instruction id -> what its graph costs, of everything in a list that is replayed.

    Args:
        has_static_rows: whether every expert's input is padded to its capacity.
    """
    listed = captured_list(made, has_static_rows)
    slot_of = {(i.name, i.micro_batch): listed.slots[i.id] for i in made if i.id in listed.slots}
    owner: dict[str, Slot] = {}
    found: dict[int, Replayed] = {}
    for i in made:
        slot = listed.slots.get(i.id)
        if slot is not None:
            found[i.id] = _replayed(i, slot, listed, owner, size)
        elif i.kind == "weight-gradient" and (of_backward := slot_of.get((backward_of(i.name), i.micro_batch))):
            found[i.id] = Replayed(of_backward, launches=len(i.partition) or 1)
        handed = _handed_on(i, owner) if slot is None else {}
        for name in _left(i, listed) if slot is not None else i.writes:
            owner.pop(name, None)
            if slot is not None:
                owner[name] = slot
        owner |= handed
        if _sums(i):  # the sum is a tensor of its own, outside of the graph
            for name in _named(i.writes, BufferRole.D_ATTENDED):
                owner.pop(name, None)
    return found


def _replayed(i: Instruction, slot: Slot, listed: CapturedList, owner: Mapping[str, Slot], size: Size) -> Replayed:
    replayed = Replayed(slot)
    for role, names in _inputs(i):
        if len(names) > 1 and role in ROWS:  # rows are handed over part by part, hidden states joined
            replayed.copies += [size(i, role, 1) for name in names if owner.get(name) != slot]
        elif len(names) > 1 or owner.get(names[0]) != slot:
            replayed.copies.append(size(i, role, len(names)))
    for role, names in _by_role(_left(i, listed)):
        replayed.left += size(i, role, len(names)) if role not in SAVED else 0.0
    sent = listed.sent.get(i.id, ())
    replayed.copies += [size(i, parse_buffer(name).role, 1) for name in sent]
    sums = len(_named(i.writes, BufferRole.D_ATTENDED)) if _sums(i) else 0
    joined = sum(len(names) > 1 and role in HIDDEN for role, names in _inputs(i))
    replayed.launches += len(replayed.copies) + sums + joined
    return replayed


def _handed_on(i: Instruction, owner: Mapping[str, Slot]) -> dict[str, Slot]:
    """Buffers that an uncaptured merge leaves in a slot's memory going backward: the terms of its sum share one gradient."""
    given = _named(i.reads, BufferRole.D_HIDDEN)
    if i.operator.kind is not MERGE or i.operator.phase is not BACKWARD or len(given) != 1 or given[0] not in owner:
        return {}
    return dict.fromkeys(_named(i.writes, BufferRole.D_SHARED), owner[given[0]])


def _sums(i: Instruction) -> bool:
    """Whether an instruction adds its input's gradient to a sum: the gate, which adds that of the shared experts with its own."""
    return i.operator.kind is GATE and i.operator.phase is BACKWARD


def _inputs(i: Instruction) -> Iterator[tuple[BufferRole, list[str]]]:
    """The tensors that a graph is given, by role; a sum that it adds to is none of them."""
    added = i.operator.phase is BACKWARD and i.operator.kind in (GATE, SHARED)
    for role, names in _by_role(i.reads):
        if not (added and role is BufferRole.D_ATTENDED):
            yield role, names


def _left(i: Instruction, listed: CapturedList) -> list[str]:
    """The buffers whose tensors a graph leaves in its slot. The shared experts hand their gradient to the gate, which adds it."""
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


def beside_replays(
    made: Sequence[Instruction], replayed: Mapping[int, Replayed], row_of: Callable[[str], int]
) -> dict[int, dict[tuple[OperatorKind, bool], float]]:
    """Row of a part -> launches beside a replay, by operator and whether it is its backward pass: the mean over the list.

    A deferred weight gradient counts with the backward pass of its operator.

    Args:
        row_of: the row of `L3`.
    """
    launches: dict[tuple[int, OperatorKind, bool], float] = defaultdict(float)
    replays: Counter[tuple[int, OperatorKind, bool]] = Counter()
    for i in made:
        if i.id not in replayed:
            continue
        is_gradient = i.kind == "weight-gradient"
        key = row_of(i.operator.group), i.operator.kind, is_gradient or i.operator.phase is BACKWARD
        launches[key] += replayed[i.id].launches - (not is_gradient)
        replays[key] += not is_gradient
    found: dict[int, dict[tuple[OperatorKind, bool], float]] = defaultdict(dict)
    for (row, kind, backward), number in launches.items():
        found[row][kind, backward] = number / replays[row, kind, backward]
    return found


def kept_bytes(
    made: Sequence[Instruction],
    replayed: Mapping[int, Replayed],
    saved_of: Callable[[str], float],
    working: float,
    in_flight: float,
) -> float:
    """Bytes that the graphs of a list keep beyond what a step without them needs at its peak.

    Args:
        made: with as many micro-batches as may be under way at a time.
        saved_of: bytes that the forward pass of a micro-batch through `L3` saves.
        working: bytes that operators of a layer need inside.
        in_flight: micro-batches whose saved activations are counted already, each of all chunks.
    """
    kept = 0.0
    layers: dict[Slot, set[str]] = defaultdict(set)
    seen: set[tuple[Slot, str, tuple[int, ...]]] = set()
    for i in made:
        if i.id not in replayed:
            continue
        each = replayed[i.id]
        key = each.slot, i.name, i.partition
        # Later holders of a slot replay the same graphs; what is sent is copied to memory that is free again behind it.
        if key not in seen:
            seen.add(key)
            kept += sum(each.copies) + each.left
        layers[each.slot].add(i.operator.group)
    held = sum(saved_of(layer) for of_slot in layers.values() for layer in of_slot)
    counted = in_flight * sum(saved_of(layer) for layer in set().union(*layers.values()))
    return kept + len(layers) * working + max(0.0, held - counted)
