"""Dependencies of a part's operators, and the marks that follow from the place of an operator among the others. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from moe_overlap.plan.operators import COMBINE, DISPATCH, EXPERTS
from moe_overlap.tuner.capture.graph import Op

_WITH_LOAD = (DISPATCH, EXPERTS, COMBINE)


def finished(ops: Sequence[Op], roles: Sequence[str]) -> tuple[Op, ...]:
    """Operators with their dependencies, and with weight gradients and what grows with the experts' load marked.

    Args:
        roles: of the storages.
    """
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    after: list[tuple[int, ...]] = []
    for op in ops:
        # Read after write and write after write.
        needed = {writer[index] for index in (*op.reads, *op.writes) if index in writer}
        # Write after read: an operator in place must not overtake those that read the old values.
        needed |= {reader for index in op.writes for reader in readers.get(index, ())}
        after.append(tuple(sorted(needed - {op.id})))
        for index in op.writes:
            writer[index], readers[index] = op.id, []
        for index in op.reads:
            readers.setdefault(index, []).append(op.id)
    weights = _weight_gradients(ops, roles)
    return tuple(
        # A search makes tens of thousands, and `dataclasses.replace` takes several times as long.
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
            scales_with_load=op.operator in _WITH_LOAD and not all(roles[index] == "gradient" for index in op.writes),
        )
        for op in ops
    )


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
