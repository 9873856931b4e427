"""Dependencies of a part's operators, and marks that depend on an operator's position among the others. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import groupby

from moe_overlap.plan.operators import COMBINE, DISPATCH, EXPERTS
from moe_overlap.tuner.capture.graph import OF_EXPERT, Op, Storage

_WITH_LOAD = (DISPATCH, EXPERTS, COMBINE)


def finished(ops: Sequence[Op], roles: Sequence[str]) -> tuple[Op, ...]:
    """Add dependencies to operators, and mark weight gradients and operators whose work grows with the experts' load.

    Args:
        roles: roles of the storages.
    """
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    after: list[tuple[int, ...]] = []
    for op in ops:
        # Read after write and write after write.
        needed = {writer[index] for index in (*op.reads, *op.writes) if index in writer}
        # Write after read: an operator in place must not run before those that read the old values.
        needed |= {reader for index in op.writes for reader in readers.get(index, ())}
        after.append(tuple(sorted(needed - {op.id})))
        for index in op.writes:
            writer[index], readers[index] = op.id, []
        for index in op.reads:
            readers.setdefault(index, []).append(op.id)
    weights = _weight_gradients(ops, roles)
    return tuple(
        # A search creates tens of thousands, and `dataclasses.replace` takes several times as long.
        Op(
            id=op.id,
            name=op.name,
            phase=op.phase,
            operator=op.operator,
            module=op.module,
            cost_class=op.cost_class,
            shape=op.shape,
            dtype=op.dtype,
            flops=op.flops,
            bytes=op.bytes,
            reads=op.reads,
            writes=op.writes,
            after=after[op.id],
            collective=op.collective,
            is_weight_gradient=op.id in weights,
            is_recomputed=op.is_recomputed,
            needs_gradients=op.needs_gradients,
            # Accumulating gradients does not grow; their products, which may write to the gradient itself, do.
            scales_with_load=op.operator in _WITH_LOAD
            and (op.id in weights or not all(roles[index] == "gradient" for index in op.writes)),
            touched=op.touched,
            elements=op.elements,
        )
        for op in ops
    )


def in_order_of_experts(ops: Sequence[Op], storages: Sequence[Storage]) -> tuple[list[Op], tuple[Storage, ...]]:
    """Sort the operators that accumulate experts' gradients into consecutive ones, in the order of the experts.

    Autograd's queue is a heap, whose order of equal entries depends on the number of experts. Nothing depends on that order.
    """

    def expert(op: Op) -> int | None:
        names = [OF_EXPERT.fullmatch(storages[index].name) for index in op.writes]
        return int(names[0][3]) if len(names) == 1 and names[0] is not None else None

    def stretch(op: Op) -> object:
        if expert(op) is None or op.phase == "forward":
            return op.id
        return op.name, op.operator, op.module, len(op.reads), storages[op.writes[0]].bytes

    ordered: list[Op] = []
    for _, group in groupby(ops, key=stretch):
        members = list(group)
        ordered += sorted(members, key=lambda op: expert(op) or 0) if len(members) > 1 else members
    place = {op.id: index for index, op in enumerate(ordered)}
    users = {(op.id, index) for op in ops for index in (*op.reads, *op.writes)}
    freed = tuple(
        dataclasses.replace(storage, freed_after=place[storage.freed_after])
        if storage.freed_after is not None and (storage.freed_after, storage.id) in users
        else storage
        for storage in storages
    )
    return [dataclasses.replace(op, id=index) for index, op in enumerate(ordered)], freed


def _weight_gradients(ops: Sequence[Op], roles: Sequence[str]) -> set[int]:
    """Products of the backward pass whose results end in gradients of parameters and nowhere else."""
    leads = {index: True for index, role in enumerate(roles) if role == "gradient"}
    gradients = set()
    # In reverse, so that all readers of a storage are known before its writer: a product counts only if nothing else,
    # such as the next layer's gradient, depends on it.
    for op in reversed(ops):
        only = all(leads.get(index, False) for index in op.writes)
        if only and op.phase == "backward" and op.cost_class in ("gemm", "grouped_gemm"):
            gradients.add(op.id)
        for index in op.reads:
            if roles[index] != "gradient":
                leads[index] = leads.get(index, True) and only
    return gradients
