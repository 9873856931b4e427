"""Bytes of one part of a model on one rank: activations saved for its backward pass, and the peak inside a pass. Numpy only.

Counted: inputs (hidden states, and the gradient of the output), activations, temporaries, results. Not counted: parameters,
gradient buffers and tables, which a stage adds once. Graphs are captured in bf16, without a fused loss; `part_bytes` corrects for
the features of the run: attention's scores without a fused kernel, rows that grow with the load, inputs that products save in fp8
or fp4, a loss that is written over its logits, and the output that an all-to-all of attention's heads copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe_overlap.plan.operators import HEAD_LOSS, LOSS
from moe_overlap.tuner.capture.expression import Values, evaluate
from moe_overlap.tuner.capture.graph import PHASES, CapturedPart, Op, Phase
from moe_overlap.tuner.cost.hardware import Features
from moe_overlap.tuner.cost.operators import OpTable


def lifetimes(part: CapturedPart) -> dict[int, tuple[int, int]]:
    """First and last operator during which each counted storage is alive.

    Inputs are alive from the start of their pass. Inputs that are not saved are freed at the end of the forward pass; so are its
    outputs, which then count as inputs of the next part. The gradient of the part's input lives to the end, and so does a saved
    input whose end was not captured, such as that of a recomputed layer.

    Returns:
        storage -> (first operator, last operator), both included.
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


def alive_bytes(part: CapturedPart, phase: Phase, spans: Mapping[int, tuple[int, int]], sizes: Values) -> Values:
    """Bytes alive at each operator of a pass; a result counts from the operator that writes it.

    Args:
        spans: result of `lifetimes`.
        sizes: [storages, *shape].
    Returns:
        [operators of the pass, *shape]. Storages that the forward pass leaves are alive at the start of the backward pass.
    """
    ids = [op.id for op in part.ops if op.phase == phase]
    # The cumulative sum of allocated minus freed storages, by operator, is the number of live ones.
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
    """Saved by the forward pass for the backward pass, including the input of the part if it is saved."""
    working: float
    """Peak bytes inside a pass minus the saved ones."""
    dense_parameters: float
    expert_parameters: float
    placeholders: Mapping[tuple[float, float], float] = field(default_factory=dict)
    """Shape -> bytes of placeholder tensors of weight gradients (`_placeholders`)."""


def part_bytes(
    table: OpTable, b: int, s: int, parameter_bytes: float, features: Features, load: float = 1.0
) -> PartBytes:
    """Bytes of a part.

    Args:
        parameter_bytes: bytes of one parameter in the captured graph.
        load: rows of the busiest rank over the mean; outputs of the experts' operators grow with it.
    """
    # 1. Sizes of the captured storages.
    part = table.part
    numbers = {"dp": 0.0, "edp": 0.0}
    sizes: Floats = np.asarray(evaluate([storage.bytes for storage in part.storages], b, s), dtype=np.float64)
    for storage in part.storages:
        if storage.role == "parameter":
            numbers[storage.replicas or "dp"] += float(sizes[storage.id]) / parameter_bytes
    if features.fused_loss:
        sizes = _loss_in_place(part, sizes)
    # 2. Saved bytes, and the peak of live bytes in either pass.
    saved = float(sizes[list(part.saved)].sum())
    alive = lifetimes(part)
    most = max(float(alive_bytes(part, phase, alive, sizes).max()) for phase in PHASES)
    # 3. Corrections for features of the run that the captured graph does not have.
    grown = _grows(part, sizes) * (load - 1.0)
    scores, kept_scores = _scores(table, features)
    return PartBytes(
        saved=saved
        + grown
        + kept_scores
        + _quantized(table, sizes, features)
        + _copied_outputs(table, sizes, features),
        # Saved bytes are subtracted, because the stage multiplies them by the micro-batches in flight.
        working=max(0.0, most - saved) + scores,
        dense_parameters=numbers["dp"],
        expert_parameters=numbers["edp"],
        placeholders=_placeholders(table, parameter_bytes) if features.fused_gradients else {},
    )


def _scores(table: OpTable, features: Features) -> tuple[float, float]:
    """(working, saved) bytes of attention's scores without a fused kernel; nothing is saved if they are recomputed."""
    if features.flash:
        return 0.0, 0.0
    scores = float(table.scores[~table.backward].sum())
    # bf16 probabilities; dropout adds its mask of one byte and its result.
    stored = scores * (5.0 if features.dropped_scores else 2.0)
    recomputed = table.part.variant == "full" or "core_attn" in table.part.variant
    return (4.0 * scores + stored, 0.0) if recomputed else (4.0 * scores, stored)


def _grows(part: CapturedPart, sizes: Floats) -> float:
    """Saved bytes that grow with the rows routed to a rank."""
    loaded = {index for op in part.ops if op.scales_with_load for index in op.writes}
    saved = [index for index in part.saved if index in loaded and part.storages[index].role == "activation"]
    return float(sizes[saved].sum())


CAPTURED_ELEMENT = 2.0
"""Bytes of an element in the captured graph, before quantization."""
QUANTIZED_ELEMENT = {"fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Bytes of an element of a product's saved input, with the scales of its blocks. Transformer Engine saves the columnwise copy
only (`update_usage(rowwise_usage=False)` in Linear, LayerNormLinear and GroupedLinear), for the weight's gradient."""


def _quantized(table: OpTable, sizes: Floats, features: Features) -> float:
    """Change of the saved bytes if products are computed below bf16; mostly negative.

    Every product quantizes its input and saves the quantized copy. The input in bf16 is freed, unless another operator reads it
    in the backward pass: attention reads its output, the router its tokens.
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
        """For each backward reader of a storage, whether it is a quantized product, or gathers the storage for one."""
        return [
            op.id in gradients or (op.collective is not None and all(all(products(gathered)) for gathered in op.writes))
            for op in readers.get(index, ())
        ]

    change = 0.0
    for index in part.saved:
        reads = products(index)
        copies = sum(reads) * float(sizes[index]) * element / CAPTURED_ELEMENT
        change += copies - (float(sizes[index]) if reads and all(reads) else 0.0)
    return change


def _copied_outputs(table: OpTable, sizes: Floats, features: Features) -> float:
    """Bytes of attention's outputs that are saved twice.

    With an all-to-all of heads over context-parallel ranks, attention saves its output as computed, and the next projection saves
    it again after the all-to-all.
    """
    part = table.part
    attention = [op for op in part.ops if op.cost_class == "attention" and op.phase == "forward"]
    if features.context_exchange != "a2a" or not any(
        op.collective is not None and op.collective.axis == "cp" for op in part.ops
    ):
        return 0.0
    saved_outputs = ([sizes[index] for index in op.writes if index in part.saved] for op in attention)
    return sum(float(max(outputs, default=0.0)) for outputs in saved_outputs)


def _loss_in_place(part: CapturedPart, sizes: Floats) -> Floats:
    """The sizes with a fused loss: Transformer Engine's cross entropy writes the logits' gradient over the logits.

    Among the storages as large as the logits, only the one that the unfused loss saves remains, in the logits' format.
    """
    result, saved = sizes.copy(), set(part.saved)
    for product in part.ops:
        if product.cost_class != "gemm" or product.phase != "forward" or product.operator not in (HEAD_LOSS, LOSS):
            continue
        logits = product.writes[0]
        for op in part.ops:
            for index in op.writes:
                if op.operator == product.operator and op.cost_class == "memory" and sizes[index] >= sizes[logits]:
                    result[index] = sizes[logits] if index in saved else 0.0
        if any(index in saved and result[index] == sizes[logits] for index in range(len(sizes))):
            result[logits] = 0.0
    return result


def _placeholders(table: OpTable, parameter_bytes: float) -> dict[tuple[float, float], float]:
    """Shape -> bytes of the placeholder tensors that Transformer Engine returns instead of weight gradients.

    A fused product adds its weight's gradient to the gradient buffer, but autograd needs a tensor to call its hooks with.
    `get_dummy_wgrad` holds one per shape of weight during the complete run; megatron-core's output layer uses the same ones.
    """
    shapes = set()
    for op, shape in zip(table.ops, table.shapes, strict=True):
        if op.is_weight_gradient and op.name in FUSED_WEIGHT_GRADIENTS:
            shapes.add((shape[0], shape[1]) if op.cost_class == "gemm" else (shape[2], shape[3]))
    return {shape: shape[0] * shape[1] * parameter_bytes for shape in shapes}


FUSED_WEIGHT_GRADIENTS = ("te.weight_gradient", "te.grouped_weight_gradient")


def stage_sizes(sizes: Sequence[PartBytes], is_head: Sequence[bool], two_at_work: bool) -> tuple[Floats, Floats]:
    """Bytes of the kinds of parts of a stage: [K] for each micro-batch in flight, and [K] while the part computes.

    The head computes while all layers hold their activations, and frees its own before a layer's backward pass. So all its saved
    bytes count as working bytes, except its placeholder, which stays. Placeholders of layers are always allocated.

    Args:
        two_at_work: the forward pass of one micro-batch is paired with the backward pass of another, layer by layer
            (--overlap-moe-expert-parallel-comm, --moe-overlap-micro-batches 2). Both layers then have working bytes, and the
            forward layer saves its activations before the backward layer frees its own.
    """
    of_layers: dict[tuple[float, float], float] = {}
    for size, head in zip(sizes, is_head, strict=True):
        if not head:
            of_layers |= size.placeholders
    standing = sum(of_layers.values())
    saved, working = [], []
    for size, head in zip(sizes, is_head, strict=True):
        placeholder = sum(bytes_ for shape, bytes_ in size.placeholders.items() if shape not in of_layers)
        saved.append(placeholder if head else size.saved)
        held = size.saved if head else (size.working + size.saved) * two_at_work
        working.append(size.working + standing + held)
    return np.array(saved), np.array(working)
