"""The seconds of a part of the model, operator by operator of the plan's vocabulary: what instructions take.

They add up to the part's cost (`layer.py`): where the host sets the pace of a pass all its operators are stretched alike, and
collectives of a kind that run beside computation count with the share that is exposed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from moe_overlap.plan.operators import (
    BACKWARD,
    COMBINE,
    COUNT,
    DISPATCH,
    EXCHANGE_PARTS,
    GATE,
    MERGE,
    RECOMPUTE,
    WEIGHT_GRADIENT,
    WEIGHTS,
)
from moe_overlap.tuner.capture.graph import Op, Part
from moe_overlap.tuner.cost.layer import Floats, PartCost, PassCost, Setting, alone_seconds, kernel_seconds, kind_of
from moe_overlap.tuner.cost.operators import OpTable

Key = tuple[str, str, str]
"""Operator, weight and suffix, as in `operators.Operator`."""
BESIDE = {COUNT: GATE, DISPATCH: GATE, COMBINE: MERGE}
"""Computation around an exchange belongs to these."""


def operator_seconds(table: OpTable, setting: Setting, cost: PartCost) -> dict[Key, float]:
    """Seconds of every operator of a part.

    Args:
        cost: of the part in this setting.
    """
    seconds = computing_seconds(table, setting, cost)
    found: dict[Key, float] = defaultdict(float)
    for is_backward, one in ((False, cost.forward), (True, cost.backward)):
        here = table.backward == is_backward
        for op in table.ops:
            if here[op.id]:
                found[_key(table.part, op)] += float(seconds[op.id])
        taken = [
            (table.ops[index], kind_of(collective), alone_seconds(table, setting, index, collective, payload))
            for index, collective, payload in table.collectives
            if here[index]
        ]
        for op, kind, alone in taken:
            key = (op.operator, "", suffix_of(op)) if op.operator in EXCHANGE_PARTS else _key(table.part, op)
            found[key] += alone * _exposed_share(one, kind, (a for _, k, a in taken if k == kind))
    return dict(found)


def computing_seconds(table: OpTable, setting: Setting, cost: PartCost) -> Floats:
    """[ops] seconds of what a part computes, stretched to the pace of the host; 0 for collectives."""
    seconds, _ = kernel_seconds(table, setting)
    for is_backward, one in ((False, cost.forward), (True, cost.backward)):
        here = table.backward == is_backward
        on_device = float(seconds[here].sum())
        seconds = np.where(here, seconds * (one.compute_seconds / on_device if on_device else 0.0), seconds)
    return seconds


def held_bytes(table: OpTable, element_bytes: int, load: float) -> dict[Key, float]:
    """What weight gradients of a part are computed from: the inputs of their products, and the gradients of the outputs.

    Args:
        element_bytes: of an activation.
        load: rows of the busiest rank of an expert group over the mean.
    """
    found: dict[Key, float] = defaultdict(float)
    for op, shape in zip(table.ops, table.shapes, strict=True):
        if op.is_weight_gradient:
            rows, widths = (shape[1], shape[2:]) if op.cost_class == "grouped_gemm" else (shape[2], shape[:2])
            found[_key(table.part, op)] += rows * sum(widths) * element_bytes * (load if op.scales_with_load else 1.0)
    return dict(found)


def _exposed_share(cost: PassCost, kind: str, alone: Iterable[float]) -> float:
    total = sum(alone)
    return cost.exposed.get(kind, 0.0) / total if total else 0.0


def _key(part: Part, op: Op) -> Key:
    operator = BESIDE.get(op.operator, op.operator)
    if op.is_weight_gradient:
        return operator, weight_of(part, op), WEIGHT_GRADIENT
    return operator, "", suffix_of(op)


def suffix_of(op: Op) -> str:
    """The pass that an operator runs in, as instructions name it."""
    if op.phase == "forward":
        return ""
    return RECOMPUTE if op.is_recomputed else BACKWARD


def weight_of(part: Part, op: Op) -> str:
    """The weight whose gradient an operator makes, as plans name it; empty where the capture does not tell.

    A fused kernel writes to the gradient itself; elsewhere the product's result is unnamed, but its module is known.
    """
    if op.operator == GATE:
        return "router"
    paths = [op.module, *(part.storages[index].name for index in op.writes)]
    names = [word for path in paths for word in path.split(".")]
    words = {word.removeprefix("linear_").removesuffix("_proj") for word in names}
    words |= {"output"} if "output_layer" in words else set()
    return next((weight for weight in WEIGHTS.get(op.operator, ()) if weight in words), "")
