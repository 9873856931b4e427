"""Calls of Python that launch the operators of a part: calls cost the host more than kernels do.

1. A module of Transformer Engine is one call, forward and backward, for all its kernels: they are consecutive operators with the
   module's name, and the call launches those after the first without returning to Python.
2. A function with its own backward pass (compiled by torch, or a kernel of Transformer Engine or of a dispatcher that is called
   outside of its modules) is one call in each direction, and so is a collective.
3. An operator of torch is a call in the forward pass. Autograd's engine launches its gradient without Python.
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
"""Operators whose products stay in bf16 in fp8 and fp4 training; megatron-core implements them."""
MODULE_KERNELS = ("norm", "norm_backward", "weight_gradient", "grouped_gemm", "grouped_weight_gradient") + (
    "attention",
    "attention_backward",
    "bias_gradients",
)
"""Kernels of Transformer Engine that its modules launch; its other kernels are functions."""
PRODUCTS = ("gemm", "grouped_gemm")
NODES = (ATTENTION, DISPATCH, EXPERTS, COMBINE)
"""First operators of the nodes into which megatron-core cuts a layer to overlap it with another micro-batch."""


class CallCode(IntEnum):
    """The kind of call that launches an operator, which decides its price."""

    TORCH = 0
    FUNCTION = 1
    MODULE = 2
    EXTRA_KERNEL = 3
    """No separate call: launched within another call, or by autograd's engine."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of N operators.

    Attributes:
        codes: [N] CallCode of each operator.
        waits: [N] whether the host waits for the counts of rows before it.
        nodes: [N] whether it is the first of a node of a layer with experts, if micro-batches are paired.
    """

    codes: NDArray[np.int64]
    waits: NDArray[np.bool_]
    nodes: NDArray[np.bool_]


def calls_of(ops: Sequence[Op]) -> Calls:
    """The calls of a part's operators, in the order of the graph."""
    codes = np.full(len(ops), CallCode.EXTRA_KERNEL, dtype=np.int64)
    by_library = any(op.library == "te" for op in ops)
    launched = [index for index, op in enumerate(ops) if op.cost_class != "free"]

    def run_of(index: int) -> tuple[str | int, str, bool]:
        # An operator outside of all modules forms a run by itself.
        return ops[index].module or index, ops[index].phase, ops[index].is_recomputed

    # Consecutive operators of one module, pass and recomputation may be one call (rule 1); others are calls by themselves.
    for _, run in groupby(launched, run_of):
        places = list(run)
        if any(_is_of_module(ops[index], by_library) for index in places):
            codes[places[0]] = CallCode.MODULE
            continue
        for index in places:
            codes[index] = _code(ops[index])
    return Calls(codes, _waits(ops), _nodes(ops))


def _waits(ops: Sequence[Op]) -> NDArray[np.bool_]:
    """[N] true for the first operator that sends or multiplies rows of experts, in the forward pass and in its recomputation."""
    waits = np.zeros(len(ops), dtype=np.bool_)
    for recomputed in (False, True):
        rows = (index for index, op in enumerate(ops) if op.is_recomputed == recomputed and _needs_counts(op))
        if (first := next(rows, None)) is not None:
            waits[first] = True
    return waits


def _nodes(ops: Sequence[Op]) -> NDArray[np.bool_]:
    """[N] true for the first operator of each kind of NODES, in each pass with experts."""
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
    # Names of torch's operators have no dot.
    if "." in op.name or op.cost_class == "collective":
        return CallCode.FUNCTION
    return CallCode.TORCH if op.phase == "forward" or op.is_recomputed else CallCode.EXTRA_KERNEL
