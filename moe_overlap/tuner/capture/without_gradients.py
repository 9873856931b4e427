"""Marks the operators and storages of a captured part's forward pass without gradients. Standard library only.

A checkpoint runs a stretch of the forward pass twice: first without gradients, where it keeps only its inputs and omits
operators that only gradients need (auxiliary losses), then with gradients, as a part without recomputation runs it. Storages
that autograd keeps do not show how long the model's own code would hold them, so `marked` takes both marks from a forward pass
recorded without gradients: `Op.needs_gradients` and `Storage.released_after`. `recomputation.py` uses them to rewrite graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from moe_overlap.tuner.capture.graph import CapturedPart, Op, Storage


def marked(part: CapturedPart, ops: Sequence[Op], storages: Sequence[Storage]) -> CapturedPart:
    """A part with the marks of its forward pass without gradients; without marks, if that is no shorter version of it.

    Args:
        ops, storages: of a pass without gradients and one with gradients behind it, recorded at any batch: sizes are not
            compared.
    """
    count = sum(op.phase == "forward" for op in part.ops)
    passes = ops[: len(ops) - count], ops[len(ops) - count :]
    same: dict[int, int] = {}
    """Storage of the pass without gradients -> the same storage of the part."""
    place = {op.id: index for index, op in enumerate(passes[1])}
    """Operator of one of the passes -> the same operator of the part."""
    remaining = iter(passes[0])
    expected = next(remaining, None)
    for op in part.ops[:count]:
        if expected is not None and _is_same(op, expected, same):
            same |= dict(zip((*expected.reads, *expected.writes), (*op.reads, *op.writes), strict=True))
            place[expected.id] = op.id
            expected = next(remaining, None)
    if expected is not None or any(_kind(op) != _kind(ours) for op, ours in zip(passes[1], part.ops, strict=False)):
        return part
    in_both = {place[op.id] for op in passes[0]}
    ends: tuple[dict[int, int], dict[int, int]] = {}, {}
    for storage in storages:
        if storage.id in same and storage.role in ("activation", "constant") and storage.freed_after is not None:
            ends[storage.freed_after >= len(passes[0])][same[storage.id]] = place[storage.freed_after]
    return dataclasses.replace(
        part,
        ops=tuple(
            dataclasses.replace(op, needs_gradients=op.phase == "forward" and op.id not in in_both) for op in part.ops
        ),
        storages=tuple(
            dataclasses.replace(storage, released_after=ends[0].get(storage.id), replaced_after=ends[1].get(storage.id))
            for storage in part.storages
        ),
    )


def _is_same(op: Op, other: Op, same: dict[int, int]) -> bool:
    """Whether an operator equals one of the pass without gradients, on the same storages."""
    if _kind(op) != _kind(other) or (len(op.reads), len(op.writes)) != (len(other.reads), len(other.writes)):
        return False
    pairs = zip((*op.reads, *op.writes), (*other.reads, *other.writes), strict=True)
    return all(same.get(theirs, ours) == ours for ours, theirs in pairs)


def _kind(op: Op) -> tuple[object, ...]:
    collective = (op.collective.kind, op.collective.axis) if op.collective is not None else None
    return op.name, op.operator, op.module, op.dtype, len(op.shape), collective
