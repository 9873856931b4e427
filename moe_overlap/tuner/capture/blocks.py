"""Parts of a model cut into blocks, and put together from blocks of several captures. No torch.

A block is what of a layer depends on the same ranks: attention (TP, CP), the router, the routed experts with their all-to-alls
(EP, ETP), shared experts, a dense MLP, embedding, head. `block_class` says under which layouts the operators of a block are the
same; a layer under any layout is then its attention from one capture and its experts from another.

1. `named` gives every operator and storage of a captured part a name that does not depend on its place in the lists, and
   folds what is there once for every expert of a rank (weights, their gradients) into one.
2. `arranged` lays the blocks of several named parts out in the order of one of them.
3. `numbered` turns names into places again, for a number of experts, with sizes from the caller. Of a single part it gives
   back exactly that part, which `named` checks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.operators import ATTENTION, COMBINE, COUNT, DISPATCH, EXPERTS, GATE, MERGE, MLP, SHARED
from moe_overlap.tuner.capture.dependencies import finished
from moe_overlap.tuner.capture.expression import Expression
from moe_overlap.tuner.capture.graph import Layout, Op, Part, Storage, world_size
from moe_overlap.tuner.capture.kernels import flops

OpName = tuple[str, str, str, str, int]
"""Phase, operator, module, kernel, and how many of the same four ran before."""
StorageName = tuple[Any, ...]
"""How a storage comes to be: its role and name, its place among the inputs, or the operator that first writes or reads it."""
Field = Literal["bytes", "payload", "shape"]
Size = tuple[OpName | StorageName, Field, int]
"""Operator or storage, which of its sizes, and the axis of a shape."""
ROUTER, ROUTED, CORE, OUTSIDE = "router", "routed experts", "core attention", ""
"""Blocks of several operators, and what belongs to no operator; the others have the name of their operator."""
_OF_EXPERT = re.compile(r"(.*\bexperts\..*\.)(weight|bias)(\d+)")
"""Name of a weight of one expert: module, weight or bias, expert."""
_OF_OPERATORS = ("written", "read", "handed over")
"""Names of storages that operators bring, by their first words; the others are there from outside."""
_FOR_EACH_EXPERT = ("te.bias_gradients",)
"""Kernels that write one storage for each expert."""


class NotComposableError(LookupError):
    """A part is outside of what blocks express: it must be captured under its own layout."""


def block_of(op: Op) -> str:
    """The block of an operator."""
    if op.operator in (COUNT, DISPATCH, EXPERTS, COMBINE):
        return ROUTED
    if op.operator in (GATE, MERGE):
        # Permutations run in the MoE layer itself and depend on its dispatcher; the router's operators do not.
        return ROUTED if op.module.rpartition(".")[2] == "mlp" else ROUTER
    return CORE if op.operator == ATTENTION and op.module.rpartition(".")[2] == "core_attention" else op.operator


def block_class(block: str, layout: Layout, model: ModelDescription, of_copies: bool = False) -> tuple[Any, ...]:
    """Layouts with equal classes run the same operators of a block.

    A collective is there where its group has several ranks. One key/value head on a rank needs no copies to stand side by side,
    fewer heads than ranks need more; one expert on a rank needs no sorting.

    Args:
        of_copies: a library dispatches tokens, and sends each once to every rank that needs it.
    """
    if block == ROUTED and of_copies:
        # Rows, tables of places and copies of tokens add up to sizes of more terms than a few captures tell apart.
        return (layout.expert, layout.expert_tensor)
    if block == ROUTED:
        local = model.num_experts // layout.expert
        # Biases of experts are added, and their gradients, in an order of their own for every number of experts.
        return (layout.expert > 1, layout.expert_tensor > 1, local if model.linear_bias else local == 1)
    dense: tuple[Any, ...] = (layout.tensor > 1, layout.context > 1, layout.sequence_parallel)
    if block == ROUTER and of_copies:
        # Gradients of the probabilities come to the gate from the library's dispatch, or from the sum that stands in for it.
        dense += (layout.expert > 1, layout.expert_tensor > 1)
    if block == CORE and model.attention_sinks:
        # Without a kernel of their own, sinks are masked by the places of tokens, which are cut for every rank.
        dense = (layout.context,)
    if block in (ATTENTION, CORE) and model.latent_attention is None:
        heads = model.num_query_groups / layout.tensor
        dense += (heads > 1, heads < 1, layout.tensor == model.num_attention_heads)
    return dense


def shares_sizes(block: str, layout: Layout, other: Layout, model: ModelDescription) -> bool:
    """Whether sizes of a block under two layouts may follow one sum: key/value heads are not split further than to one."""
    if block not in (ATTENTION, CORE, OUTSIDE) or model.latent_attention is not None:
        return True
    return (layout.tensor > model.num_query_groups) == (other.tensor > model.num_query_groups)


def has_vocabulary(block: str) -> bool:
    """Whether sizes of a block may depend on the rows of the embedding."""
    return block not in (ROUTED, ROUTER, ATTENTION, CORE, MLP, SHARED)


def group_size(layout: Layout, axis: str) -> int:
    """Ranks of a collective's group, in the smallest world that holds the layout."""
    dense, experts = layout.tensor * layout.context, layout.expert * layout.expert_tensor
    world = world_size(layout)
    sizes = {"tp": layout.tensor, "cp": layout.context, "ep": layout.expert, "etp": layout.expert_tensor}
    sizes |= {"tp_cp": dense, "tp_ep": experts, "dp": world // dense, "dp_cp": world // layout.tensor}
    sizes |= {"tp_dp_cp": world, "edp": world // experts}
    return sizes[axis]


def is_of_expert(storage: Storage) -> bool:
    """Whether a storage is a weight or gradient of one of the routed experts."""
    return bool(storage.name) and _OF_EXPERT.fullmatch(storage.name) is not None


def expert_replicas(layout: Layout) -> Literal["dp", "edp"]:
    """The axis over which gradients of experts are reduced: their own one only where it is another than the dense weights'."""
    return "dp" if layout.expert == 1 and layout.expert_tensor == layout.tensor else "edp"


@dataclass(frozen=True, slots=True)
class NamedStorage:
    """A storage by name; of a storage for each expert, the one of the first expert.

    Attributes:
        freed: the operator after which it is freed; of operators for each expert, its own, or the last one's.
        per_expert: there is one for each expert of the rank.
    """

    storage: Storage
    freed: OpName | None
    saved: bool
    per_expert: bool


@dataclass(frozen=True, slots=True)
class NamedOp:
    """An operator by name; of an operator for each expert, the one of the first expert."""

    name: OpName
    op: Op
    reads: tuple[StorageName, ...]
    writes: tuple[StorageName, ...]
    per_expert: bool

    @property
    def structure(self) -> tuple[Any, ...]:
        """Everything but sizes."""
        collective = self.op.collective
        kind = (collective.kind, collective.axis) if collective is not None else None
        return (
            *(self.name, self.reads, self.writes, self.per_expert, kind),
            *(self.op.cost_class, len(self.op.shape), self.op.dtype, self.op.is_recomputed),
        )


@dataclass(frozen=True, slots=True)
class NamedPart:
    """A part whose operators and storages have names.

    Attributes:
        part: kind, variant, inputs and outputs; its lists are not read.
        held: storages that are there before the first operator, in order; those of one expert stand for all.
        emptied: what the forward pass empties and the backward pass fills again, as recomputed modules' outputs are: it counts
            as new memory, noted between the passes; in order.
        returned: gradients of the outputs, which appear behind those; behind: storages noted at the end.
    """

    part: Part
    ops: tuple[NamedOp, ...]
    storages: Mapping[StorageName, NamedStorage]
    held: tuple[StorageName, ...]
    emptied: tuple[StorageName, ...]
    returned: tuple[StorageName, ...]
    behind: tuple[StorageName, ...]
    outputs: tuple[StorageName, ...]
    gradient_outputs: tuple[StorageName, ...]
    homes: Mapping[StorageName, str] = field(default_factory=dict)
    """Storage -> the block that makes it; empty for those that come from outside."""

    @property
    def runs(self) -> list[tuple[str, str]]:
        """Phase and block of every stretch of operators of one block."""
        return [key for key, _ in groupby((named.op.phase, block_of(named.op)) for named in self.ops)]

    def blocks(self) -> dict[str, list[tuple[Any, ...]]]:
        """Block -> the structure of its operators."""
        blocks: dict[str, list[tuple[Any, ...]]] = {}
        for named_op in self.ops:
            blocks.setdefault(block_of(named_op.op), []).append(named_op.structure)
        return blocks

    def home(self, name: OpName | StorageName) -> str:
        """The block of an operator, or the one that a storage belongs to; that of parameters is told by their names."""
        if name in self.storages:
            return ROUTED if is_of_expert(self.storages[name].storage) else self.homes.get(name, OUTSIDE)
        return next(block_of(named_op.op) for named_op in self.ops if named_op.name == name)

    def sizes(self) -> Iterator[tuple[Size, Expression]]:
        """Every size, storages' among them."""
        for name, storage in self.storages.items():
            yield (name, "bytes", 0), storage.storage.bytes
        for named_op in self.ops:
            op, moved = named_op.op, named_op.op.bytes
            if op.collective is not None:
                # The bytes of a collective are those of two buffers, of which one is the payload: each alone is one product.
                yield (named_op.name, "payload", 0), op.collective.payload_bytes
                moved = moved - op.collective.payload_bytes
            yield (named_op.name, "bytes", 0), moved
            for axis, size in enumerate(op.shape):
                yield (named_op.name, "shape", axis), size


def named(part: Part, layout: Layout, model: ModelDescription) -> NamedPart:
    """A captured part by names.

    Raises:
        NotComposableError: something is there for each expert that is not known to be.
    """
    # Where every expert has operators of its own, so has every number of experts (`block_class`).
    result = _Names(part, folds=not model.linear_bias).result()
    if numbered(result, layout, model.num_experts // layout.expert, dict(result.sizes())) != part:
        raise NotComposableError(f"{part.kind}: operators for each expert follow no known order")
    return result


class _Names:
    """Names of one part's operators and storages."""

    def __init__(self, part: Part, folds: bool) -> None:
        self._part, self._folds = part, folds
        self._of: dict[int, tuple[StorageName, int | None]] = {}
        """Storage -> name and, of a storage for each expert, which one."""
        for storage in part.storages:
            expert = _OF_EXPERT.fullmatch(storage.name)
            if expert is not None and folds:
                self._of[storage.id] = ((storage.role, expert[1], expert[2]), int(expert[3]))
            elif storage.name:
                self._of[storage.id] = ((storage.role, storage.name), None)
        for role, ids in (("input", part.inputs), ("gradient", part.gradient_inputs)):
            for place, index in enumerate(ids):
                self._of[index] = ((role, place), None)
        self._name_handed_over()
        self._ops, self._name_of_op = self._operators()

    def _name_handed_over(self) -> None:
        """Name what shared experts make for others by its place: which of their operators makes it depends on TP."""
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
        for op in self._part.ops:
            per_expert = len(op.writes) == 1 and self._of.get(op.writes[0], ((), None))[1] is not None
            expert = self._of[op.writes[0]][1] if per_expert else None
            kind = (op.phase, op.operator, op.module, op.name)
            # Operators of the experts behind the first have the name of the first one's.
            if not expert:
                counts[kind] = counts.get(kind, 0) + 1
            name = (*kind, counts[kind] - 1) if kind in counts else (*kind, 0)
            names[op.id] = name
            self._name_new(op, name)
            if not expert:
                reads, writes = (tuple(dict.fromkeys(self._of[i][0] for i in ids)) for ids in (op.reads, op.writes))
                ops.append(NamedOp(name, op, reads, writes, per_expert))
        return ops, names

    def _name_new(self, op: Op, name: OpName) -> None:
        for how, ids in (("read", op.reads), ("written", op.writes)):
            for place, index in enumerate(ids):
                if index not in self._of and self._folds and op.name in _FOR_EACH_EXPERT and how == "written":
                    self._of[index] = ((how, name), place)
                elif index not in self._of:
                    self._of[index] = ((how, name, place), None)

    def result(self) -> NamedPart:
        """The part by names."""
        part = self._part
        if len(self._of) != len(part.storages):
            raise NotComposableError(f"{part.kind}: a storage belongs to no operator")
        storages: dict[StorageName, NamedStorage] = {}
        saved = set(part.saved)
        for storage in part.storages:
            name, expert = self._of[storage.id]
            freed = None if storage.freed_after is None else self._name_of_op[storage.freed_after]
            if not expert:
                storages[name] = NamedStorage(storage, freed, storage.id in saved, expert is not None)
        touched = {index for op in part.ops for index in (*op.reads, *op.writes)} - set(part.gradient_inputs)
        first = min((i for i in touched if part.storages[i].name == "" and i not in part.inputs), default=0)
        # In the order of their ids: what is held from the start stands in front of what the operators bring.
        outside = [storage.id for storage in part.storages if self._of[storage.id][0][0] not in _OF_OPERATORS]
        start = [i for i in outside if i < first and i not in part.gradient_inputs]
        behind = [i for i in outside if i > first and i not in (*part.gradient_inputs, *touched)]
        emptied = [i for i in range(min(part.gradient_inputs, default=0)) if self._is_met_in_backward(i)]

        def by_name(ids: Sequence[int]) -> tuple[StorageName, ...]:
            return tuple(dict.fromkeys(self._of[index][0] for index in ids))

        homes: dict[StorageName, str] = {}
        for named_op in self._ops:
            for name in named_op.writes:
                if name[0] in _OF_OPERATORS:
                    homes.setdefault(name, block_of(named_op.op))
        return NamedPart(
            part=part,
            ops=tuple(self._ops),
            storages=storages,
            held=by_name(start),
            emptied=by_name(emptied),
            returned=by_name(part.gradient_inputs),
            behind=by_name(behind),
            outputs=by_name(part.outputs),
            gradient_outputs=by_name(part.gradient_outputs),
            homes=homes,
        )

    def _is_met_in_backward(self, index: int) -> bool:
        """Whether the first operator that uses a storage is one of the backward pass."""
        name = self._of[index][0]
        return name[0] in _OF_OPERATORS and name[1][0] == "backward"


def arranged(backbone: NamedPart, of_block: Mapping[str, NamedPart]) -> NamedPart:
    """A part with the operators of each block from another part.

    Args:
        backbone: gives the order of the blocks.
        of_block: block -> the part that gives its operators and the storages they make.
    Raises:
        NotComposableError: the parts order their blocks differently, or an operator needs a storage that no block makes.
    """
    runs = backbone.runs
    if any(source.runs != runs for source in of_block.values()):
        raise NotComposableError(f"{backbone.part.kind}: blocks in another order")
    stretches = {id(source): _stretches(source) for source in of_block.values()}
    ops = tuple(op for place, (_, block) in enumerate(runs) for op in stretches[id(of_block[block])][place])
    block_of_op = {named_op.name: block_of(named_op.op) for named_op in ops}
    storages: dict[StorageName, NamedStorage] = {}
    homes: dict[StorageName, str] = {}
    outside = (*backbone.held, *backbone.returned, *backbone.behind)
    used = dict.fromkeys((*outside, *(name for op in ops for name in (*op.reads, *op.writes))))
    for name in used:
        block = _home(name, block_of_op)
        # What comes from outside is the same in all of them; some of it, such as a buffer that a block shares, not in all.
        sources = (backbone, *of_block.values()) if block is None else (of_block[block],)
        storage = next((source.storages[name] for source in sources if name in source.storages), None)
        if storage is None:
            raise NotComposableError(f"{backbone.part.kind}: no block makes {name}")
        if storage.freed is not None and storage.freed not in block_of_op:
            storage = _freed_elsewhere(name, of_block, block_of_op)
        storages[name] = storage
        if block is not None:
            homes[name] = block
    emptied = _emptied(backbone, of_block, block_of_op)
    return dataclasses.replace(backbone, ops=ops, storages=storages, homes=homes, emptied=emptied)


def _emptied(
    backbone: NamedPart, of_block: Mapping[str, NamedPart], block_of_op: Mapping[OpName, str]
) -> tuple[StorageName, ...]:
    """The storages that the backward pass fills again, in the order of the backbone's blocks."""
    own = {
        block: [name for name in source.emptied if _home(name, block_of_op) == block]
        for block, source in of_block.items()
    }
    order = [backbone.home(name) for name in backbone.emptied]
    if any(len(names) != order.count(block) for block, names in own.items()):
        raise NotComposableError(f"{backbone.part.kind}: blocks empty different numbers of storages")
    left = {block: iter(names) for block, names in own.items()}
    return tuple(next(left[block]) for block in order)


def _home(name: StorageName, block_of_op: Mapping[OpName, str]) -> str | None:
    if name[0] not in _OF_OPERATORS:
        return None
    return SHARED if name[1] == SHARED else block_of_op.get(name[1])


def _freed_elsewhere(
    name: StorageName, of_block: Mapping[str, NamedPart], block_of_op: Mapping[OpName, str]
) -> NamedStorage:
    """The storage as the block has it that frees it: another block's operators hold it."""
    for block, source in of_block.items():
        storage = source.storages.get(name)
        if storage is not None and storage.freed is not None and block_of_op.get(storage.freed) == block:
            return storage
    raise NotComposableError(f"no block frees {name}")


def _stretches(source: NamedPart) -> list[list[NamedOp]]:
    return [list(ops) for _, ops in groupby(source.ops, key=lambda op: (op.op.phase, block_of(op.op)))]


def numbered(source: NamedPart, layout: Layout, experts: int, sizes: Mapping[Size, Expression]) -> Part:
    """The part of a layout, by places.

    Args:
        experts: on this rank.
        sizes: of every operator and storage.
    """
    places, order = _places(source, experts)
    ops, last_of = _operators(source, layout, experts, sizes, places)
    replicas = {name: _replicas(name, entry, layout) for name, entry in source.storages.items()}
    storages = []
    for index, (name, expert) in enumerate(order):
        entry = source.storages[name]
        freed = None
        if entry.freed is not None:
            own = ops.get((entry.freed, expert))
            freed = last_of[entry.freed] if own is None else own.id
        # There may be hundreds of experts, and `dataclasses.replace` takes several times as long.
        storages.append(
            Storage(
                id=index,
                bytes=sizes[(name, "bytes", 0)],
                role=entry.storage.role,
                name=_label(name, entry, expert),
                replicas=replicas[name],
                freed_after=freed,
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
    """The axis over which the copies of a storage are reduced, whichever expert it is of."""
    if not entry.storage.replicas:
        return ""
    one = dataclasses.replace(entry.storage, name=_label(name, entry, 0))
    return expert_replicas(layout) if is_of_expert(one) else entry.storage.replicas


def storage_order(source: NamedPart, experts: int) -> list[Place]:
    """The storages of `numbered`, in order."""
    return _places(source, experts)[1]


Place = tuple[StorageName, int | None]
"""A storage, and of storages for each expert, which one."""


def _places(source: NamedPart, experts: int) -> tuple[dict[Place, int], list[Place]]:
    """The place of every storage: what is held first, then in the order in which operators meet them."""
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
    for named_op in source.ops:
        if not returned and named_op.op.phase == "backward":
            add(source.emptied)
            add(source.returned)
            returned = True
        add(named_op.reads)
        add(named_op.writes)
    add(source.returned)
    add(source.behind)
    return {place: index for index, place in enumerate(order)}, list(order)


def _module_of_expert(source: NamedPart, name: StorageName) -> Any:
    return name[1] if source.storages[name].per_expert else None


def _operators(
    source: NamedPart, layout: Layout, experts: int, sizes: Mapping[Size, Expression], places: Mapping[Place, int]
) -> tuple[dict[tuple[OpName, int | None], Op], dict[OpName, int]]:
    """Operators by name and expert, and the last one of each name."""
    ops: dict[tuple[OpName, int | None], Op] = {}
    last: dict[OpName, int] = {}
    for is_each, group in groupby(source.ops, key=lambda named_op: named_op.per_expert):
        members = list(group)
        for expert in range(experts) if is_each else (None,):
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
        found: list[int] = []
        for name in names:
            if not source.storages[name].per_expert:
                found.append(places[name, None])
            else:
                found += [places[name, e] for e in (range(experts) if expert is None else (expert,))]
        return tuple(found)

    op = member.op
    collective, moved = None, sizes[(member.name, "bytes", 0)]
    if op.collective is not None:
        payload = sizes[(member.name, "payload", 0)]
        moved = moved + payload
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
        bytes=moved,
        reads=ids(member.reads),
        writes=ids(member.writes),
        after=(),
        collective=collective,
        is_recomputed=op.is_recomputed,
    )
