"""Operators for which the executor of lists differs from megatron-core's passes, which the captured graphs have.

Rotation. Without Transformer Engine megatron-core computes cosines and sines in every layer and rotates queries and keys by ten
operators each. The executor rotates both together by one product with a table and one sum; backward it rotates each by one
product and one sum, and copies the values' gradient (runtime/executor/rotary.py). That is 7 kernels per layer instead of 39. It
applies to models whose captured operators match those of `as_listed`.

Quantization. Transformer Engine quantizes a weight once per step, in the first call of its module. A module that runs in
partitions quantizes it in every call: read in two bytes, written in one byte twice, by rows and by columns.

There are no other differences in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from moe_overlap.plan.operators import ATTENTION
from moe_overlap.tuner.capture.expression import Expression
from moe_overlap.tuner.capture.graph import CapturedPart, Op
from moe_overlap.tuner.cost.layer import Setting
from moe_overlap.tuner.cost.operators import (
    GEMM,
    GROUPED_GEMM,
    LOW_PRECISIONS,
    QUANTIZED_BYTES,
    Floats,
    OpTable,
)

ATTENTION_MODULE = "self_attention"
ROTATION = frozenset({"cos", "sin", "mul", "neg", "cat", "add", "_to_copy", "slice_backward"})
"""Operators of megatron-core's rotation of halves. A rotation of interleaved pairs has other operators and does not match."""
OTHER_ROTATIONS = (f"{ATTENTION_MODULE}.q_layernorm", f"{ATTENTION_MODULE}.k_layernorm")


def as_listed(part: CapturedPart) -> CapturedPart:
    """A part with the executor's rotation instead of megatron-core's; operators that it does not execute become free."""
    if not any(op.name == "cos" and _rotates(op) for op in part.ops):
        return part
    if any(op.module in OTHER_ROTATIONS for op in part.ops):
        return part
    changed: dict[int, Op] = {}
    for recomputed in (False, True):
        forward = [
            op for op in part.ops if _rotates(op) and (op.is_recomputed if recomputed else op.phase == "forward")
        ]
        changed |= _forward(forward)
    backward = [op for op in part.ops if _rotates(op) and op.phase == "backward" and not op.is_recomputed]
    changed |= _backward(backward)
    return replace(part, ops=tuple(changed.get(op.id, op) for op in part.ops))


def _rotates(op: Op) -> bool:
    return op.operator == ATTENTION and op.module == ATTENTION_MODULE and op.name in ROTATION


def _forward(ops: Sequence[Op]) -> Mapping[int, Op]:
    """Queries and keys together: a product with the table, of twice the size; the sum of both halves; a copy of the rest."""
    negated = [place for place, op in enumerate(ops) if op.name == "neg"]
    if len(negated) != 2:
        return {}
    # After `neg`: join the halves, times sine, add, join with the rest that is not rotated.
    tails = [ops[place + 1 : place + 5] for place in negated]
    if [[op.name for op in tail] for tail in tails] != [["cat", "mul", "add", "cat"]] * 2:
        return {}
    (_, times, added, joined), (_, _, key_added, key_joined) = tails
    rotated = added.shape[0] + key_added.shape[0]
    total = joined.shape[0] + key_joined.shape[0]
    element = _element_bytes(added)
    table = _table_bytes(times, element)
    executed = [
        _writes(times, 2 * rotated, 3 * element * rotated + table),
        _writes(added, rotated, 3 * element * rotated),
        *_copied(joined, total - rotated, element),
    ]
    return {op.id: _free(op) for op in ops} | {op.id: op for op in executed}


def _backward(ops: Sequence[Op]) -> Mapping[int, Op]:
    """Queries and keys each by a product and a sum, into the projection's gradient; the values' gradient is copied to it."""
    negated = [place for place, op in enumerate(ops) if op.name == "neg"]
    if len(negated) != 2 or ops[-1].name != "cat":
        return {}
    groups = [ops[negated[0] - 1 : negated[1] - 1], ops[negated[1] - 1 : -1]]
    executed, rotated = list[Op](), Expression()
    for group in groups:
        if [op.name for op in group[:6]] != ["mul", "neg", "cat", "mul", "add", "slice_backward"]:
            return {}
        times, added, sliced = group[0], group[4], group[5]
        element, heads, total = _element_bytes(added), added.shape[0], sliced.shape[0]
        executed += [
            _writes(times, 2 * heads, 3 * element * heads + _table_bytes(times, element)),
            _writes(added, heads, 3 * element * heads),
            *_copied(sliced, total - heads, element),
        ]
        rotated = rotated + total
    joined = ops[-1]
    executed += _copied(joined, joined.shape[0] - rotated, _element_bytes(joined, 2))
    return {op.id: _free(op) for op in ops} | {op.id: op for op in executed}


def _element_bytes(op: Op, times: int = 3) -> Fraction:
    """Bytes of an element, for an operator that moves `times` as many elements as it writes."""
    (_, moved), (_, written) = op.bytes.terms[0], op.shape[0].terms[0]
    return moved / written / times


def _table_bytes(times: Op, element: Fraction) -> Expression:
    """Bytes of the executor's table of cosines and sines; the captured product reads only one of the two."""
    return 2 * (times.bytes - 2 * element * times.shape[0])


def _copied(op: Op, elements: Expression, element: Fraction) -> list[Op]:
    return [replace(_writes(op, elements, 2 * element * elements), name="copy_")] if elements.terms else []


def _writes(op: Op, elements: Expression, moved: Expression) -> Op:
    return replace(op, shape=(elements,), bytes=moved)


def _free(op: Op) -> Op:
    return replace(op, cost_class="free", shape=(), bytes=Expression(), flops=Expression())


def quantizing_seconds(table: OpTable, setting: Setting) -> Floats:
    """[ops] seconds in which one call of a partitioned module quantizes its weights; 0 in 16 and 32 bits."""
    seconds = np.zeros(len(table.ops))
    if setting.features.precision not in LOW_PRECISIONS:
        return seconds
    rate = setting.gpu.memory_gb_per_s * 1e9 * setting.constants.memory
    for index, (op, shape) in enumerate(zip(table.ops, table.shapes, strict=True)):
        # Backward products read the weight that the forward pass has quantized in both layouts.
        calls = op.phase == "forward" or op.is_recomputed
        if not calls or not table.quantizable[index] or op.is_weight_gradient:
            continue
        assert table.classes[index] in (GEMM, GROUPED_GEMM), op.name
        groups, (columns, width) = (1.0, shape[1:3]) if len(shape) == 3 else (shape[0], shape[2:4])
        seconds[index] = groups * (QUANTIZED_BYTES * columns * width / rate + setting.constants.kernel_seconds)
    return seconds
