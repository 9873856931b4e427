"""Names for a captured part's operators and storages, the same in captures of different layouts. No torch.

1. `named` gives every operator and storage of a part a name that does not depend on its index, and folds repetitions for every
   expert of a rank into one: weights and their gradients, and stretches of operators that run for one expert after the other,
   such as those that add an expert's bias to its rows.
2. `numbered` turns names into indices again, for a number of experts, with sizes from the caller. Applied to a single part it
   returns exactly that part, which `named` checks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.operators import SHARED
from moe_overlap.tuner.capture.blocks import (
    OUTSIDE,
    ROUTED,
    NotComposableError,
    block_of,
    expert_replicas,
    group_size,
    is_of_expert,
)
from moe_overlap.tuner.capture.dependencies import finished
from moe_overlap.tuner.capture.expression import Expression
from moe_overlap.tuner.capture.graph import OF_EXPERT, CapturedPart, Layout, Op, Storage
from moe_overlap.tuner.capture.kernels import flops

OpName = tuple[str, str, str, str, int]
"""Phase, operator, module, kernel, and the number of earlier operators with the same four."""
StorageName = tuple[Any, ...]
"""The origin of a storage: its role and name, its index among the inputs, or the operator that first writes or reads it."""
Field = Literal["bytes", "shape", "payload", "touched", "elements"]
SUMS: Mapping[str, Field] = {"touched": "bytes", "elements": "shape"}
"""Sizes of an operator in each of its storages, and the size that is their sum."""
Size = tuple[OpName | StorageName, Field, int]
"""Operator or storage, the kind of size, and the axis of a shape or the index of a storage."""
OF_OPERATORS = ("written", "read", "handed over")
"""First words of the names of storages that operators introduce; other storages exist from the start."""
_FOR_EACH_EXPERT = ("te.bias_gradients",)
"""Kernels that write one storage for each expert."""
LONGEST = 64
"""Largest number of operators of one expert in a stretch."""


@dataclass(frozen=True, slots=True)
class NamedStorage:
    """A storage by name; if there is one for each expert, that of the first expert.

    Attributes:
        freed, released, replaced: the operators of `Storage.freed_after`, `released_after` and `replaced_after`; for operators
            of each expert, the storage's own, or the last expert's.
        per_expert: whether there is one for each expert of the rank.
    """

    storage: Storage
    freed: OpName | None
    released: OpName | None
    replaced: OpName | None
    saved: bool
    per_expert: bool


@dataclass(frozen=True, slots=True)
class NamedOp:
    """An operator by name; if there is one for each expert, that of the first expert.

    Attributes:
        stretch: number of its stretch of operators, if they run for one expert after the other; 0 for none, negative if the last
            expert comes first.
    """

    name: OpName
    op: Op
    reads: tuple[StorageName, ...]
    writes: tuple[StorageName, ...]
    stretch: int

    @property
    def per_expert(self) -> bool:
        """Whether it runs once per expert."""
        return self.stretch != 0

    @property
    def structure(self) -> tuple[Any, ...]:
        """Everything but sizes."""
        collective = self.op.collective
        kind = (collective.kind, collective.axis) if collective is not None else None
        return (
            *(self.name, self.reads, self.writes, self.stretch, kind),
            *(self.op.cost_class, len(self.op.shape), self.op.dtype, self.op.is_recomputed, self.op.needs_gradients),
        )


@dataclass(frozen=True, slots=True)
class NamedPart:
    """A part whose operators and storages have names.

    Attributes:
        part: kind, variant, inputs and outputs; its lists are not read.
        held: storages that exist before the first operator, in order; those of one expert represent all.
        emptied: storages that the forward pass empties and the backward pass refills, such as recomputed modules' outputs: they
            count as new memory between the passes; in order.
        returned: gradients of the outputs, whose storages follow those; appended: storages that appear at the end.
    """

    part: CapturedPart
    ops: tuple[NamedOp, ...]
    storages: Mapping[StorageName, NamedStorage]
    held: tuple[StorageName, ...]
    emptied: tuple[StorageName, ...]
    returned: tuple[StorageName, ...]
    appended: tuple[StorageName, ...]
    outputs: tuple[StorageName, ...]
    gradient_outputs: tuple[StorageName, ...]
    homes: Mapping[StorageName, str] = field(default_factory=dict)
    """Storage -> the block that makes it; empty for storages from outside."""
    shares: Mapping[OpName, tuple[tuple[Expression, ...], tuple[Expression, ...]]] = field(default_factory=dict)
    """Operator -> the bytes it moves and the elements it writes in each storage; all experts' storages count as one."""

    @property
    def runs(self) -> list[tuple[str, str]]:
        """Phase and block of every stretch of consecutive operators of one block."""
        return [key for key, _ in groupby((named.op.phase, block_of(named.op)) for named in self.ops)]

    def blocks(self) -> dict[str, list[tuple[Any, ...]]]:
        """Block -> the structure of its operators."""
        blocks: dict[str, list[tuple[Any, ...]]] = {}
        for named_op in self.ops:
            blocks.setdefault(block_of(named_op.op), []).append(named_op.structure)
        return blocks

    def home(self, name: OpName | StorageName) -> str:
        """The block of an operator or storage; names of parameters determine theirs."""
        if name in self.storages:
            return ROUTED if is_of_expert(self.storages[name].storage) else self.homes.get(name, OUTSIDE)
        return next(block_of(named_op.op) for named_op in self.ops if named_op.name == name)

    def sizes(self) -> Iterator[tuple[Size, Expression]]:
        """Yield every size, storages' included; for bytes and elements of operators, those in each storage."""
        for name, storage in self.storages.items():
            yield (name, "bytes", 0), storage.storage.bytes
        for named_op in self.ops:
            op = named_op.op
            touched, elements = self.shares[named_op.name]
            for place, moved in enumerate(touched or _lump(op)):
                yield (named_op.name, "touched", place), moved
            if op.collective is not None:
                yield (named_op.name, "payload", 0), op.collective.payload_bytes
            for place, count in enumerate(elements):
                yield (named_op.name, "elements", place), count
            for axis, size in enumerate(() if elements else op.shape):
                yield (named_op.name, "shape", axis), size


def _lump(op: Op) -> tuple[Expression, ...]:
    """The bytes of an operator whose storages are not distinguished: of a collective, those of one buffer are its payload."""
    if op.collective is None:
        return (op.bytes,)
    return op.collective.payload_bytes, op.bytes - op.collective.payload_bytes


def _by_use(uses: Sequence[tuple[bool, StorageName]], sizes: Sequence[Expression]) -> tuple[Expression, ...]:
    """The sizes of all uses, equal uses summed; none if none were recorded."""
    total: dict[tuple[bool, StorageName], Expression] = {}
    for use, size in zip(uses, sizes, strict=bool(sizes)):
        total[use] = total[use] + size if use in total else size
    return tuple(total.values())


def with_totals(sizes: Mapping[Size, Expression]) -> dict[Size, Expression]:
    """The sizes that `numbered` takes: those of all storages of an operator are summed."""
    totals: dict[Size, Expression] = {}
    for size, value in sizes.items():
        name, which, _ = size
        if which in SUMS:
            of_all = name, SUMS[which], 0
            totals[of_all] = totals.get(of_all, Expression()) + value
        else:
            totals[size] = value
    return totals


def named(part: CapturedPart, layout: Layout, model: ModelDescription) -> NamedPart:
    """A captured part by names.

    Raises:
        NotComposableError: a repetition for each expert is not recognised.
    """
    experts = model.num_experts // layout.expert
    result = _Names(part, experts).result()
    if numbered(result, layout, experts, with_totals(dict(result.sizes()))) != part:
        raise NotComposableError(f"{part.kind}: operators for each expert follow no known order")
    return result


def _stretches(ops: Sequence[Op], expert_of: Mapping[int, int], experts: int) -> dict[int, tuple[int, int, int]]:
    """Find operators that run for one expert after the other: the same ones, as often as there are experts.

    Args:
        expert_of: storage -> its expert.
    Returns:
        Operator -> stretch (`NamedOp.stretch`), expert, and position among the operators of that expert.
    """
    kinds = [(op.phase, op.operator, op.module, op.name) for op in ops]
    owners = [{expert_of[index] for index in (*op.reads, *op.writes) if index in expert_of} for op in ops]
    stretches: dict[int, tuple[int, int, int]] = {}
    first, count = 0, 0
    while first < len(ops) and experts > 1:
        length, order = _repetition(kinds, owners, first, experts)
        if not length:
            first += 1
            continue
        count += 1
        for index in range(first, first + length * experts):
            place = index - first
            stretches[ops[index].id] = (count if order[0] == 0 else -count, order[place // length], place % length)
        first += length * experts
    return stretches


def _repetition(
    kinds: Sequence[tuple[str, ...]], owners: Sequence[set[int]], first: int, experts: int
) -> tuple[int, Sequence[int]]:
    """The operators of one expert in a stretch that starts at an operator, and the order of experts; 0 if none starts there."""
    upwards = range(experts)
    for length in range(1, min(LONGEST, (len(kinds) - first) // experts) + 1):
        if kinds[first : first + length] != kinds[first + length : first + 2 * length]:
            continue
        rounds = [slice(first + r * length, first + (r + 1) * length) for r in range(experts)]
        seen = [set().union(*owners[one_round]) for one_round in rounds]
        if any(len(of_round) != 1 for of_round in seen) or any(
            kinds[one_round] != kinds[rounds[0]] for one_round in rounds
        ):
            continue
        order = [of_round.pop() for of_round in seen]
        if order in (list(upwards), list(reversed(upwards))):
            return length, order
    return 0, ()


class _Names:
    """Names of one part's operators and storages.

    Args:
        experts: number of experts on this rank.
    """

    def __init__(self, part: CapturedPart, experts: int) -> None:
        self._part, self._experts = part, experts
        self._of: dict[int, tuple[StorageName, int | None]] = {}
        """Storage -> name and, if there is one for each expert, which expert."""
        for storage in part.storages:
            expert = OF_EXPERT.fullmatch(storage.name)
            if expert is not None:
                self._of[storage.id] = ((storage.role, expert[1], expert[2]), int(expert[3]))
            elif storage.name:
                self._of[storage.id] = ((storage.role, storage.name), None)
        for role, ids in (("input", part.inputs), ("gradient", part.gradient_inputs)):
            for place, index in enumerate(ids):
                self._of[index] = ((role, place), None)
        self._name_handed_over()
        self._ops, self._name_of_op = self._operators()

    def _name_handed_over(self) -> None:
        """Name storages that shared experts make for others by index: which of their operators makes them depends on TP."""
        maker: dict[int, Op] = {}
        for op in self._part.ops:
            for index in op.reads:
                if index in maker and index not in self._of and block_of(op) != SHARED:
                    count = sum(name[0] == "handed over" for name, _ in self._of.values())
                    self._of[index] = (("handed over", SHARED, count), None)
            for index in op.writes:
                if block_of(op) == SHARED and index not in self._of:
                    maker.setdefault(index, op)

    def _operators(self) -> tuple[list[NamedOp], dict[int, OpName]]:
        ops: list[NamedOp] = []
        names: dict[int, OpName] = {}
        counts: dict[tuple[str, str, str, str], int] = {}
        stretches = _stretches(self._part.ops, self._experts_of(), self._experts)
        of_stretch: dict[tuple[int, int], tuple[int, OpName]] = {}
        """By stretch and position among the operators of an expert: the index in `ops`, and the name."""
        for op in self._part.ops:
            kind = (op.phase, op.operator, op.module, op.name)
            stretch, expert, place = stretches.get(op.id, (0, None, 0))
            if (stretch, place) not in of_stretch:
                counts[kind] = counts.get(kind, 0) + 1
                name: OpName = (*kind, counts[kind] - 1)
            else:
                # Operators of further experts have the name of the first expert's.
                name = of_stretch[stretch, place][1]
            names[op.id] = name
            self._name_new(op, name, expert)
            reads, writes = (tuple(dict.fromkeys(self._of[i][0] for i in ids)) for ids in (op.reads, op.writes))
            named_op = NamedOp(name, op, reads, writes, stretch)
            if (stretch, place) not in of_stretch:
                ops.append(named_op)
            elif expert == 0:
                ops[of_stretch[stretch, place][0]] = named_op
            if stretch:
                of_stretch.setdefault((stretch, place), (len(ops) - 1, name))
        return ops, names

    def _experts_of(self) -> dict[int, int]:
        """Storages of one expert, by their names, and those of kernels that write one for each."""
        experts = {index: expert for index, (_, expert) in self._of.items() if expert is not None}
        for op in self._part.ops:
            if op.name in _FOR_EACH_EXPERT:
                experts |= {index: expert for expert, index in enumerate(op.writes)}
        return experts

    def _name_new(self, op: Op, name: OpName, expert: int | None) -> None:
        for how, ids in (("read", op.reads), ("written", op.writes)):
            for place, index in enumerate(ids):
                if index not in self._of and op.name in _FOR_EACH_EXPERT and how == "written":
                    self._of[index] = ((how, name), place)
                elif index not in self._of:
                    self._of[index] = ((how, name, place), expert)

    def result(self) -> NamedPart:
        """The part by names."""
        part = self._part
        if len(self._of) != len(part.storages):
            raise NotComposableError(f"{part.kind}: a storage belongs to no operator")
        storages: dict[StorageName, NamedStorage] = {}
        saved = set(part.saved)
        for storage in part.storages:
            name, expert = self._of[storage.id]
            ends = (storage.freed_after, storage.released_after, storage.replaced_after)
            freed, released, replaced = (None if op is None else self._name_of_op[op] for op in ends)
            if not expert:
                is_saved, is_each = storage.id in saved, expert is not None
                storages[name] = NamedStorage(storage, freed, released, replaced, is_saved, is_each)
        touched = {index for op in part.ops for index in (*op.reads, *op.writes)} - set(part.gradient_inputs)
        first = min((i for i in touched if part.storages[i].name == "" and i not in part.inputs), default=0)
        # In the order of their ids: storages that exist from the start come before those that operators introduce.
        outside = [storage.id for storage in part.storages if self._of[storage.id][0][0] not in OF_OPERATORS]
        start = [i for i in outside if i < first and i not in part.gradient_inputs]
        appended = [i for i in outside if i > first and i not in (*part.gradient_inputs, *touched)]
        emptied = [i for i in range(min(part.gradient_inputs, default=0)) if self._is_met_in_backward(i)]

        def by_name(ids: Sequence[int]) -> tuple[StorageName, ...]:
            return tuple(dict.fromkeys(self._of[index][0] for index in ids))

        homes: dict[StorageName, str] = {}
        for named_op in self._ops:
            for name in named_op.writes:
                if name[0] in OF_OPERATORS:
                    homes.setdefault(name, block_of(named_op.op))
        return NamedPart(
            part=part,
            ops=tuple(self._ops),
            storages=storages,
            held=by_name(start),
            emptied=by_name(emptied),
            returned=by_name(part.gradient_inputs),
            appended=by_name(appended),
            outputs=by_name(part.outputs),
            gradient_outputs=by_name(part.gradient_outputs),
            homes=homes,
            shares={named_op.name: self._shares(named_op.op) for named_op in self._ops},
        )

    def _shares(self, op: Op) -> tuple[tuple[Expression, ...], tuple[Expression, ...]]:
        """Bytes that an operator moves in each storage of `NamedOp.reads` and `writes`, and elements of the latter."""
        reads, writes = ([self._of[index][0] for index in ids] for ids in (op.reads, op.writes))
        uses = [*((False, name) for name in reads), *((True, name) for name in writes)]
        return _by_use(uses, op.touched), _by_use(uses[len(reads) :], op.elements)

    def _is_met_in_backward(self, index: int) -> bool:
        """Whether the first operator that uses a storage is one of the backward pass."""
        name = self._of[index][0]
        return name[0] in OF_OPERATORS and name[1][0] == "backward"


def numbered(source: NamedPart, layout: Layout, experts: int, sizes: Mapping[Size, Expression]) -> CapturedPart:
    """The part of a layout, by indices.

    Args:
        experts: number of experts on this rank.
        sizes: size of every operator and storage.
    """
    places, order = _places(source, experts)
    ops, last_of = _operators(source, layout, experts, sizes, places)
    replicas = {name: _replicas(name, entry, layout) for name, entry in source.storages.items()}
    storages = []
    for index, (name, expert) in enumerate(order):
        entry = source.storages[name]
        freed, released, replaced = (
            None if op is None else ops[op, expert].id if (op, expert) in ops else last_of[op]
            for op in (entry.freed, entry.released, entry.replaced)
        )
        # There may be hundreds of experts, and `dataclasses.replace` takes several times as long.
        storages.append(
            Storage(
                id=index,
                bytes=sizes[(name, "bytes", 0)],
                role=entry.storage.role,
                name=_label(name, entry, expert),
                replicas=replicas[name],
                freed_after=freed,
                released_after=released,
                replaced_after=replaced,
            )
        )
    roles = [storage.role for storage in storages]
    return dataclasses.replace(
        source.part,
        ops=finished(list(ops.values()), roles),
        storages=tuple(storages),
        saved=tuple(index for index, (name, _) in enumerate(order) if source.storages[name].saved),
        inputs=tuple(places[("input", place), None] for place in range(len(source.part.inputs))),
        outputs=tuple(places[name, None] for name in source.outputs),
        gradient_inputs=tuple(places[name, None] for name in source.returned),
        gradient_outputs=tuple(places[name, None] for name in source.gradient_outputs),
    )


def _label(name: StorageName, entry: NamedStorage, expert: int | None) -> str:
    return f"{name[1]}{name[2]}{expert}" if entry.per_expert and entry.storage.name else entry.storage.name


def _replicas(name: StorageName, entry: NamedStorage, layout: Layout) -> Literal["", "dp", "edp"]:
    """The axis over which the copies of a storage are reduced, for any expert."""
    if not entry.storage.replicas:
        return ""
    first_expert = dataclasses.replace(entry.storage, name=_label(name, entry, 0))
    return expert_replicas(layout) if is_of_expert(first_expert) else entry.storage.replicas


def operator_order(source: NamedPart, experts: int) -> list[OpName]:
    """The operators of `numbered`, in order."""
    order: list[OpName] = []
    for stretch, group in groupby(source.ops, key=lambda named_op: named_op.stretch):
        order += [named_op.name for named_op in group] * (experts if stretch else 1)
    return order


Place = tuple[StorageName, int | None]
"""A storage and, if there is one for each expert, which expert."""


def _places(source: NamedPart, experts: int) -> tuple[dict[Place, int], list[Place]]:
    """The index of every storage: initial ones first, then in the order in which operators use them."""
    order: dict[Place, None] = {}

    def add(names: Sequence[StorageName]) -> None:
        for is_each, group in groupby(names, key=lambda name: _module_of_expert(source, name)):
            members = list(group)
            if is_each is None:
                order.update(dict.fromkeys((name, None) for name in members))
            else:
                order.update(dict.fromkeys((name, expert) for expert in range(experts) for name in members))

    add(source.held)
    returned = False
    for (phase, stretch), group in groupby(source.ops, key=lambda named_op: (named_op.op.phase, named_op.stretch)):
        members = list(group)
        if not returned and phase == "backward":
            add(source.emptied)
            add(source.returned)
            returned = True
        if not stretch:
            for named_op in members:
                add(named_op.reads)
                add(named_op.writes)
            continue
        for expert in _order(stretch, experts):
            for name in (name for named_op in members for name in (*named_op.reads, *named_op.writes)):
                order.setdefault((name, expert if source.storages[name].per_expert else None))
    add(source.returned)
    add(source.appended)
    return {place: index for index, place in enumerate(order)}, list(order)


def _order(stretch: int, experts: int) -> Iterable[int]:
    """The experts in the order in which the operators of a stretch run."""
    return range(experts) if stretch > 0 else reversed(range(experts))


def _module_of_expert(source: NamedPart, name: StorageName) -> Any:
    return name[1] if source.storages[name].per_expert else None


def _operators(
    source: NamedPart, layout: Layout, experts: int, sizes: Mapping[Size, Expression], places: Mapping[Place, int]
) -> tuple[dict[tuple[OpName, int | None], Op], dict[OpName, int]]:
    """Operators by name and expert, and the last one of each name."""
    ops: dict[tuple[OpName, int | None], Op] = {}
    last: dict[OpName, int] = {}
    for stretch, group in groupby(source.ops, key=lambda named_op: named_op.stretch):
        members = list(group)
        for expert in _order(stretch, experts) if stretch else (None,):
            for member in members:
                index = len(ops)
                last[member.name] = index
                ops[member.name, expert] = _operator(source, member, index, expert, layout, experts, sizes, places)
    return ops, last


def _operator(
    source: NamedPart,
    member: NamedOp,
    index: int,
    expert: int | None,
    layout: Layout,
    experts: int,
    sizes: Mapping[Size, Expression],
    places: Mapping[Place, int],
) -> Op:
    def ids(names: Sequence[StorageName]) -> tuple[int, ...]:
        indices: list[int] = []
        for name in names:
            if not source.storages[name].per_expert:
                indices.append(places[name, None])
            else:
                indices += [places[name, e] for e in (range(experts) if expert is None else (expert,))]
        return tuple(indices)

    op, collective = member.op, None
    if op.collective is not None:
        payload = sizes[(member.name, "payload", 0)]
        size = group_size(layout, op.collective.axis)
        collective = dataclasses.replace(op.collective, size=size, payload_bytes=payload)
    shape = tuple(sizes[(member.name, "shape", axis)] for axis in range(len(op.shape)))
    work = Expression() if collective is not None else flops(op.name, shape)
    return Op(
        id=index,
        name=op.name,
        phase=op.phase,
        operator=op.operator,
        module=op.module,
        cost_class=op.cost_class,
        shape=shape,
        dtype=op.dtype,
        flops=work,
        bytes=sizes[(member.name, "bytes", 0)],
        reads=ids(member.reads),
        writes=ids(member.writes),
        after=(),
        collective=collective,
        is_recomputed=op.is_recomputed,
        needs_gradients=op.needs_gradients,
    )
