"""Calls of Python that launch the operators of a part: what the host pays for is calls, and kernels only besides.

1. A module of Transformer Engine is one call, forward and backward, whatever it launches: its kernels and collectives follow one
   another under the module's name, and those behind the first are launched by the call itself.
2. A function with a backward pass of its own (compiled by torch, or a kernel of Transformer Engine or a dispatcher that is called
   outside of its modules) is a call of its own in both directions, and so is a collective.
3. An operator of torch is a call in the forward pass. Its gradient is launched by autograd's engine, without Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from moe_overlap.plan.operators import ATTENTION, COMBINE, DISPATCH, EXPERTS, GATE, HEAD_LOSS, LOSS
from moe_overlap.tuner.capture.graph import Op

FULL_PRECISION_OPERATORS = (HEAD_LOSS, LOSS, GATE)
"""Products that stay in bf16 in fp8 and fp4 training, and are megatron-core's own."""
MODULE_KERNELS = ("norm", "norm_backward", "weight_gradient", "grouped_gemm", "grouped_weight_gradient") + (
    "attention",
    "attention_backward",
    "bias_gradients",
)
"""Kernels of Transformer Engine that its modules launch; the others are functions."""
PRODUCTS = ("gemm", "grouped_gemm")
NODES = (ATTENTION, DISPATCH, EXPERTS, COMBINE)
"""First operators of the nodes into which megatron-core cuts a layer whose all-to-alls run beside another micro-batch, on streams
that wait for each other."""


class CallCode(IntEnum):
    """Who launches an operator, by what its launch costs."""

    TORCH = 0
    FUNCTION = 1
    MODULE = 2
    FURTHER = 3
    """No call of its own: launched within another one, or by autograd's engine."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of N operators.

    Attributes:
        codes: [N] CallCode of each.
        waits: [N] whether the host waits for the counts of rows ahead of it.
        nodes: [N] whether a node of a layer with experts begins with it, where two micro-batches run at a time.
    """

    codes: NDArray[np.int64]
    waits: NDArray[np.bool_]
    nodes: NDArray[np.bool_]


def calls_of(ops: Sequence[Op]) -> Calls:
    """The calls of a part's operators, in the order of the graph."""
    codes = np.full(len(ops), CallCode.FURTHER, dtype=np.int64)
    by_library = any(op.library == "te" for op in ops)
    launched = [index for index, op in enumerate(ops) if op.cost_class != "free"]

    def run_of(index: int) -> tuple[str | int, str, bool]:
        # An operator outside of all modules is none's kernel.
        return ops[index].module or index, ops[index].phase, ops[index].is_recomputed

    for _, run in groupby(launched, run_of):
        places = list(run)
        if any(_is_of_module(ops[index], by_library) for index in places):
            codes[places[0]] = CallCode.MODULE
            continue
        for index in places:
            codes[index] = _code(ops[index])
    return Calls(codes, _waits(ops), _nodes(ops))


def _waits(ops: Sequence[Op]) -> NDArray[np.bool_]:
    """The first operator that sends or multiplies rows of experts, in the forward pass and where it is computed again."""
    waits = np.zeros(len(ops), dtype=np.bool_)
    for recomputed in (False, True):
        rows = (index for index, op in enumerate(ops) if op.is_recomputed == recomputed and _needs_counts(op))
        if (first := next(rows, None)) is not None:
            waits[first] = True
    return waits


def _nodes(ops: Sequence[Op]) -> NDArray[np.bool_]:
    """The first operator of each kind of NODES in either pass that has experts."""
    nodes = np.zeros(len(ops), dtype=np.bool_)
    for backward in (False, True):
        first: dict[str, int] = {}
        for index, op in enumerate(ops):
            if (op.phase == "backward") == backward:
                first.setdefault(op.operator, index)
        if EXPERTS in first:
            nodes[[first[operator] for operator in NODES if operator in first]] = True
    return nodes


def _needs_counts(op: Op) -> bool:
    if op.phase != "forward" and not op.is_recomputed:
        return False
    return (op.operator == DISPATCH and op.cost_class == "collective") or (
        op.operator == EXPERTS and op.cost_class in PRODUCTS
    )


def _is_of_module(op: Op, by_library: bool) -> bool:
    if op.library == "te":
        return op.kernel in MODULE_KERNELS
    return by_library and _multiplies(op)


def _multiplies(op: Op) -> bool:
    return op.cost_class in PRODUCTS and op.operator not in FULL_PRECISION_OPERATORS


def _code(op: Op) -> CallCode:
    # Torch's operators are plain words.
    if "." in op.name or op.cost_class == "collective":
        return CallCode.FUNCTION
    return CallCode.TORCH if op.phase == "forward" or op.is_recomputed else CallCode.FURTHER
