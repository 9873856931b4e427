"""Bytes of one part of a model on one rank: those it keeps for its backward pass, and the peak inside a pass. Numpy only.

Counted: inputs (hidden states, and the gradient of the output), activations, temporaries, results. Parameters, gradient buffers
and tables are the caller's: a stage adds them once. Graphs are captured in bf16, without a fused loss; `part_bytes` adds what a
run does otherwise: attention's scores without a fused kernel, rows that grow with the load, inputs that products keep in fp8 or
fp4, the loss in its logits' place, and the output that an all-to-all of attention's heads copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe_overlap.plan.operators import HEAD_LOSS, LOSS
from moe_overlap.tuner.capture.expression import Values, evaluate
from moe_overlap.tuner.capture.graph import PHASES, Op, Part, Phase
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


def alive_bytes(part: Part, phase: Phase, spans: Mapping[int, tuple[int, int]], sizes: Values) -> Values:
    """Bytes alive at each operator of a pass; a result counts from the operator that makes it.

    Args:
        spans: as `lifetimes` has them.
        sizes: [storages, *shape].
    Returns:
        [operators of the pass, *shape]. In the backward pass what the forward pass left is alive at the start.
    """
    ids = [op.id for op in part.ops if op.phase == phase]
    # Ordered by operator, memory taken and given back adds up to what is alive.
    change = np.zeros((len(part.ops) + 1, len(spans)))
    for column, (first, last) in enumerate(spans.values()):
        change[first, column] += 1
        change[last + 1, column] -= 1
    alive: Values = np.tensordot(np.cumsum(change, axis=0)[ids], sizes[list(spans)], axes=1)
    return alive


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
    placeholders: Mapping[tuple[float, float], float] = field(default_factory=dict)
    """Shape -> bytes of the tensors that stand for weights' gradients."""


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
    if features.fused_loss:
        sizes = _loss_in_place(part, sizes)
    kept = float(sizes[list(part.saved)].sum())
    alive = lifetimes(part)
    most = max(float(alive_bytes(part, phase, alive, sizes).max()) for phase in PHASES)
    grown = _grows(part, sizes) * (load - 1.0)
    scores, kept_scores = _scores(table, features)
    return PartBytes(
        saved=kept + grown + kept_scores + _quantized(table, sizes, features) + _copied_outputs(table, sizes, features),
        # Without what is kept, which the stage multiplies by the micro-batches in flight.
        working=max(0.0, most - kept) + scores,
        dense_parameters=numbers["dp"],
        expert_parameters=numbers["edp"],
        placeholders=_placeholders(table, parameter_bytes) if features.fused_gradients else {},
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


CAPTURED_ELEMENT = 2.0
"""Bytes of an element that is quantized, as captured."""
QUANTIZED_ELEMENT = {"fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Bytes of an element of a product's kept input, scales of its blocks included. Transformer Engine keeps the columnwise copy
alone (`update_usage(rowwise_usage=False)` in Linear, LayerNormLinear and GroupedLinear): the weight's gradient reads it."""


def _quantized(table: OpTable, sizes: Floats, features: Features) -> float:
    """Bytes by which what a part keeps changes where products run below bf16; mostly negative.

    Every product quantizes its own input and keeps that. The input in bf16 goes, unless an operator that is no such product reads
    it in the backward pass, too: attention reads its output, the router its tokens.
    """
    element = QUANTIZED_ELEMENT.get(features.precision)
    if element is None:
        return 0.0
    part = table.part
    gradients = {op.id for op, low in zip(part.ops, table.quantizable, strict=True) if low and op.is_weight_gradient}
    readers: dict[int, list[Op]] = {}
    for op in part.ops:
        if op.phase == "backward":
            for index in op.reads:
                readers.setdefault(index, []).append(op)

    def products(index: int) -> list[bool]:
        """One entry per backward reader of a storage: whether it is a quantized product, or gathers the storage for one."""
        return [
            op.id in gradients or (op.collective is not None and all(all(products(made)) for made in op.writes))
            for op in readers.get(index, ())
        ]

    change = 0.0
    for index in part.saved:
        reads = products(index)
        copies = sum(reads) * float(sizes[index]) * element / CAPTURED_ELEMENT
        change += copies - (float(sizes[index]) if reads and all(reads) else 0.0)
    return change


def _copied_outputs(table: OpTable, sizes: Floats, features: Features) -> float:
    """Bytes of attention's outputs that are kept twice.

    Where heads are exchanged by an all-to-all over the context-parallel ranks, attention keeps its output as it made it, and the
    projection behind it keeps it as it was sent.
    """
    part = table.part
    attention = [op for op in part.ops if op.cost_class == "attention" and op.phase == "forward"]
    if features.context_exchange != "a2a" or not any(
        op.collective is not None and op.collective.axis == "cp" for op in part.ops
    ):
        return 0.0
    kept = ([sizes[index] for index in op.writes if index in part.saved] for op in attention)
    return sum(float(max(outputs, default=0.0)) for outputs in kept)


def _loss_in_place(part: Part, sizes: Floats) -> Floats:
    """The sizes with a fused loss: Transformer Engine's cross entropy writes the logits' gradient over the logits.

    Of the storages as large as the logits one remains, in the logits' format: the one that the unfused loss keeps.
    """
    result, kept = sizes.copy(), set(part.saved)
    for product in part.ops:
        if product.cost_class != "gemm" or product.phase != "forward" or product.operator not in (HEAD_LOSS, LOSS):
            continue
        logits = product.writes[0]
        for op in part.ops:
            for index in op.writes:
                if op.operator == product.operator and op.cost_class == "memory" and sizes[index] >= sizes[logits]:
                    result[index] = sizes[logits] if index in kept else 0.0
        if any(index in kept and result[index] == sizes[logits] for index in range(len(sizes))):
            result[logits] = 0.0
    return result


def _placeholders(table: OpTable, parameter_bytes: float) -> dict[tuple[float, float], float]:
    """Shape -> bytes of the tensors that Transformer Engine returns in place of weights' gradients.

    A product adds its weight's gradient to the gradient buffer itself, yet autograd needs a tensor for its hooks to run on.
    `get_dummy_wgrad` keeps one for every shape of weight for the whole run; megatron-core's output layer takes the same.
    """
    shapes = set()
    for op, shape in zip(table.ops, table.shapes, strict=True):
        if op.is_weight_gradient and op.name in FUSED_WEIGHT_GRADIENTS:
            shapes.add((shape[0], shape[1]) if op.cost_class == "gemm" else (shape[2], shape[3]))
    return {shape: shape[0] * shape[1] * parameter_bytes for shape in shapes}


FUSED_WEIGHT_GRADIENTS = ("te.weight_gradient", "te.grouped_weight_gradient")


def stage_sizes(sizes: Sequence[PartBytes], is_head: Sequence[bool], two_at_work: bool) -> tuple[Floats, Floats]:
    """Bytes of the kinds of layer of a stage: [K] those of each micro-batch in flight, and [K] those of the one at work.

    Args:
        two_at_work: the forward pass of one micro-batch runs beside the backward pass of another, layer by layer
            (--overlap-moe-expert-parallel-comm, --moe-overlap-micro-batches 2): both work, and the layer that is done forward
            keeps its activations while the layer beside it has not given back its own.

    The head works while every layer holds its activations, and what it keeps is gone when a layer works: all of it counts as work
    of the head, except its placeholder, which stays. Placeholders of the layers are there whatever works.
    """
    of_layers: dict[tuple[float, float], float] = {}
    for size, head in zip(sizes, is_head, strict=True):
        if not head:
            of_layers |= size.placeholders
    standing = sum(of_layers.values())
    saved, working = [], []
    for size, head in zip(sizes, is_head, strict=True):
        own = sum(bytes_ for shape, bytes_ in size.placeholders.items() if shape not in of_layers)
        saved.append(own if head else size.saved)
        beside = size.saved if head else (size.working + size.saved) * two_at_work
        working.append(size.working + standing + beside)
    return np.array(saved), np.array(working)
