"""Bytes of one part of a model on one rank: those it keeps for its backward pass, and the peak inside a pass. Numpy only.

Counted: inputs (hidden states, and the gradient of the output), activations, temporaries, results. Parameters, gradient buffers
and tables are the caller's: a stage adds them once. Without a fused kernel attention adds its scores, and rows grow with the
load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.capture.expression import Values, evaluate
from moe_overlap.tuner.capture.graph import Part, Phase
from moe_overlap.tuner.cost.hardware import Features
from moe_overlap.tuner.cost.operators import OpTable


def lifetimes(part: Part) -> dict[int, tuple[int, int]]:
    """First and last operator during which each counted storage is alive.

    Inputs are alive when their pass starts. Inputs that are not saved go when the forward pass ends; so do its outputs,
    which are the next part's input from then on. The gradient of the part's input stays to the end, and so does a saved input
    that nobody was seen to free: a layer that is recomputed holds its own.

    Returns:
        storage -> operators, both included.
    """
    backward = sum(op.phase == "forward" for op in part.ops)
    counted = {storage.id for storage in part.storages if storage.role in ("activation", "input")}
    first = dict.fromkeys(part.inputs, 0) | dict.fromkeys(part.gradient_inputs, backward)
    last = dict.fromkeys(part.inputs, backward - 1) | dict.fromkeys(part.gradient_inputs, backward)
    for op in part.ops:
        for index in counted & {*op.reads, *op.writes}:
            first.setdefault(index, op.id)
            last[index] = max(op.id, last.get(index, 0))
    for index in last:
        held = part.storages[index].freed_after
        if index in part.outputs and index not in part.saved:
            last[index] = backward - 1
        elif held is not None:
            last[index] = max(last[index], held)
        elif index in part.saved or (part.storages[index].role == "activation" and index not in part.outputs):
            last[index] = len(part.ops) - 1
    return {index: (first[index], last[index]) for index in first}


def live_bytes(part: Part, phase: Phase, b: Any, s: Any) -> Values:
    """Bytes alive at each operator of a pass; a result counts from the operator that makes it.

    Args:
        b, s: samples and tokens; arrays broadcast.
    Returns:
        [operators of the pass, *shape]. In the backward pass what the forward pass left is alive at the start.
    """
    spans = lifetimes(part)
    ids = [op.id for op in part.ops if op.phase == phase]
    # Ordered by operator, memory taken and given back adds up to what is alive.
    change = np.zeros((len(part.ops) + 1, len(spans)))
    for column, (first, last) in enumerate(spans.values()):
        change[first, column] += 1
        change[last + 1, column] -= 1
    sizes = evaluate([part.storages[index].bytes for index in spans], b, s)
    alive: Values = np.tensordot(np.cumsum(change, axis=0)[ids], sizes, axes=1)
    return alive


def peak_bytes(part: Part, phase: Phase, b: Any, s: Any) -> Values:
    """Peak of the bytes alive in a pass."""
    alive: Values = live_bytes(part, phase, b, s).max(axis=0)
    return alive


def kept_bytes(part: Part, b: Any, s: Any) -> Values:
    """Bytes that one micro-batch keeps between the passes, its input hidden states included where they are kept."""
    sizes = evaluate([part.storages[index].bytes for index in part.saved], b, s)
    total: Values = sizes.sum(axis=0)
    return total


def peak_of_sequence(parts: Sequence[Part], b: int, s: int) -> float:
    """Peak bytes of parts run one after another, all forward, then all backward, with one micro-batch in flight.

    The slow twin of a stage's sums: beside the bytes alive in a part, it counts those that the other parts keep at that time.
    """
    kept, peak = 0.0, 0.0
    for part in parts:
        peak = max(peak, kept + float(peak_bytes(part, "forward", b, s)))
        kept += float(kept_bytes(part, b, s))
    for part in reversed(parts):
        kept -= float(kept_bytes(part, b, s))
        peak = max(peak, kept + float(peak_bytes(part, "backward", b, s)))
    return peak


Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartBytes:
    """Bytes of one micro-batch through a part; parameters are numbers, not bytes."""

    saved: float
    """Kept from the forward to the backward pass, the input of the part among it where it is kept."""
    working: float
    """Peak bytes inside a pass beyond the kept ones."""
    dense_parameters: float
    expert_parameters: float


def part_bytes(
    table: OpTable, b: int, s: int, parameter_bytes: float, features: Features, load: float = 1.0
) -> PartBytes:
    """Bytes of a part.

    Args:
        parameter_bytes: of one parameter, as captured.
        load: rows of the busiest rank over the mean: what the experts' operators make grows with them.
    """
    part = table.part
    numbers = {"dp": 0.0, "edp": 0.0}
    sizes: Floats = np.asarray(evaluate([storage.bytes for storage in part.storages], b, s), dtype=np.float64)
    for storage in part.storages:
        if storage.role == "parameter":
            numbers[storage.replicas or "dp"] += float(sizes[storage.id]) / parameter_bytes
    kept = float(kept_bytes(part, b, s))
    most = max(float(peak_bytes(part, "forward", b, s)), float(peak_bytes(part, "backward", b, s)))
    grown = _grows(part, sizes) * (load - 1.0)
    scores, kept_scores = _scores(table, features)
    return PartBytes(
        saved=kept + grown + kept_scores,
        # Without what is kept, which the stage multiplies by the micro-batches in flight.
        working=max(0.0, most - kept) + scores,
        dense_parameters=numbers["dp"],
        expert_parameters=numbers["edp"],
    )


def _scores(table: OpTable, features: Features) -> tuple[float, float]:
    """Bytes of attention's scores without a fused kernel: while it works, and kept where they are not computed again."""
    if features.flash:
        return 0.0, 0.0
    scores = float(table.scores[~table.backward].sum())
    # bf16 probabilities; dropout adds its mask of one byte and its result.
    kept = scores * (5.0 if features.dropped_scores else 2.0)
    again = table.part.variant == "full" or "core_attn" in table.part.variant
    return (4.0 * scores + kept, 0.0) if again else (4.0 * scores, kept)


def _grows(part: Part, sizes: Floats) -> float:
    """Kept bytes that grow with the rows routed to a rank."""
    loaded = {index for op in part.ops if op.scales_with_load for index in op.writes}
    kept = [index for index in part.saved if index in loaded and part.storages[index].role == "activation"]
    return float(sizes[kept].sum())
