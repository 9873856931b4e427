"""Seconds of single operators on a device: from the measured database, else from a roofline with efficiencies.

A product takes the time of its operations at the efficiency of its kind plus the time of its operands' bytes, so small products
are slower per operation than large ones. Other operators take the time of their bytes. Every kernel has a least time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moe_overlap.describe.cluster import Gpu
from moe_overlap.plan.operators import EXPERTS, GATE, HEAD_LOSS, LOSS
from moe_overlap.tuner.capture.expression import Expression, evaluate
from moe_overlap.tuner.capture.graph import CapturedPart, Collective, Op
from moe_overlap.tuner.cost.calls import FULL_PRECISION_OPERATORS, calls_of
from moe_overlap.tuner.cost.hardware import CommonConstants, Features, GpuConstants

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Shapes = tuple[tuple[float, ...], ...]
"""Sizes along every axis, for each operator."""
Provenance = Literal["measured", "interpolated", "roofline"]
Lookup = Callable[[Op, tuple[float, ...], float], tuple[float, Provenance] | None]
"""The measured database (tuner/profile/lookup.py): an operator, its numeric shape and bytes -> seconds and their origin; None if
it has no entry."""


class CostClassCode(IntEnum):
    """Codes of cost classes in arrays; the name in lower case is the class of a captured operator (`graph.CostClass`)."""

    GEMM = 0
    GROUPED_GEMM = 1
    ATTENTION = 2
    MEMORY = 3
    COLLECTIVE = 4
    FREE = 5


CODES = {code.name.lower(): code for code in CostClassCode}
# Integers, because comparing an array with an enum member is slow: numpy looks up protocols in the enum's class.
GEMM, GROUPED_GEMM = int(CostClassCode.GEMM), int(CostClassCode.GROUPED_GEMM)
FUSED_ATTENTION, MEMORY = int(CostClassCode.ATTENTION), int(CostClassCode.MEMORY)
COLLECTIVE, FREE = int(CostClassCode.COLLECTIVE), int(CostClassCode.FREE)
LOW_PRECISIONS = ("fp8", "mxfp8", "nvfp4")
SCORE_BYTES, DROPPED_BYTES = (7.0, 12.0), (5.0, 5.0)
"""Bytes per score of attention without a fused kernel, forward and backward: those of product, softmax (which reads half of them
with a causal mask) and product; and the additional ones of dropout, its mask included."""
EXPONENTIALS: Mapping[str, float] = {"GB300": 8.8e12, "B300": 8.8e12}
"""Exponentials per second of GPUs whose special-function units are doubled (Blackwell Ultra)."""
USUAL_EXPONENTIALS = 3.9e12
"""Exponentials per second of all other GPUs: 16 per multiprocessor and clock, 132 · 1.83 GHz · 16 on H100. Unlike tensor cores,
these units did not get faster in later GPUs."""
USUAL_WIDTH = 128.0
"""Head width for which efficiencies of attention were fitted; narrower heads have more exponentials per operation of products."""
WAVE_OUTPUTS = 132 * 128 * 256.0
"""Outputs of one wave: multiprocessors of an H100 times the largest tile of its products; other GPUs are within a fifth of it."""
LOSS_BYTES = 6.0
"""Bytes per logit: Transformer Engine's cross entropy reads bf16 logits twice and writes their gradient over them."""
ROUTER = "router"
"""Name of the router's module in a layer."""
ROUTER_KERNELS = 4.0
"""Kernels of a pass of the fused router: scores and choice, losses, and the map of tokens."""
QUANTIZED_BYTES = 4.0
"""Bytes per element of a product's first operand: read as bf16, written as fp8 twice, by rows and by columns."""
QUANTIZED_KERNELS = 2.0
"""Kernels that quantize one group of a grouped product's first operand: scale and cast, or cast and reordering of scales.
Transformer Engine launches them group by group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpTable:
    """The operators of a part as numbers, at one b and s; [N] each."""

    part: CapturedPart
    ops: tuple[Op, ...]
    operators: NDArray[np.str_]
    """Names in the plan's vocabulary of operators."""
    classes: NDArray[np.int64]
    """CostClassCode"""
    flops: Floats
    bytes: Floats
    operand: Floats
    """Elements of a product's first operand; 0 elsewhere."""
    scores: Floats
    """Pairs of query and key of an attention kernel, all heads; 0 elsewhere."""
    widths: Floats
    """Operations of an attention kernel's products per score; 1 elsewhere."""
    usual_widths: Floats
    """The same for heads of the usual width; 1 elsewhere."""
    shapes: Shapes
    backward: Bools
    weight_gradient: Bools
    loaded: Bools
    """The work grows with the rows routed to this rank."""
    launches: Floats
    """Kernels that the host launches: one per group of a grouped product, none for views and bookkeeping."""
    called: NDArray[np.int64]
    """CallCode"""
    waits: Bools
    """The host waits for counts before it."""
    nodes: Bools
    """First operators of nodes, as in `Calls`."""
    routing: Bools
    """Part of the router: scores, choice and map of tokens, but not the norm before or the permutation after."""
    wave_flops: Floats
    """Operations of one wave of tiles of every product of an operator; 0 elsewhere."""
    logits: float
    """Elements of the logits of a head or of a prediction layer; 0 for other parts."""
    quantizable: Bools
    collectives: tuple[tuple[int, Collective, float], ...]
    """Index, collective and payload bytes."""


def tabulate(part: CapturedPart, b: int, s: int) -> OpTable:
    """Evaluate every expression of a part's operators."""
    ops = part.ops
    shapes = _shapes(ops, b, s)
    payloads = [(i, op.collective) for i, op in enumerate(ops) if op.collective is not None]
    values: Floats = np.asarray(evaluate([op.flops for op in ops] + [op.bytes for op in ops], b, s), dtype=np.float64)
    moved = evaluate([collective.payload_bytes for _, collective in payloads] or [Expression.of(0)], b, s)
    classes = np.array([CODES[op.cost_class] for op in ops], dtype=np.int64)
    products = (classes == GEMM) | (classes == GROUPED_GEMM)
    calls = calls_of(ops)
    return OpTable(
        part=part,
        ops=ops,
        operators=np.array([op.operator for op in ops], dtype=np.str_),
        classes=classes,
        flops=values[: len(ops)],
        bytes=values[len(ops) :],
        backward=np.array([op.phase == "backward" for op in ops], dtype=np.bool_),
        weight_gradient=np.array([op.is_weight_gradient for op in ops], dtype=np.bool_),
        loaded=np.array([op.scales_with_load for op in ops], dtype=np.bool_),
        called=calls.codes,
        waits=calls.waits,
        nodes=calls.nodes,
        routing=np.array([op.operator == GATE and ROUTER in op.module.split(".") for op in ops], dtype=np.bool_),
        quantizable=products & np.array([op.operator not in FULL_PRECISION_OPERATORS for op in ops], dtype=np.bool_),
        collectives=tuple((i, c, float(payload)) for (i, c), payload in zip(payloads, moved, strict=False)),
        **_of_shapes(ops, shapes),
    )


def resized(table: OpTable, shapes: Shapes, flops: Floats, moved: Floats, payloads: Sequence[float]) -> OpTable:
    """The same operators with other sizes; `part` is not changed.

    Args:
        shapes, flops, moved: sizes, operations and bytes of every operator.
        payloads: bytes of every collective, in order.
    """
    collectives = tuple((i, c, payload) for (i, c, _), payload in zip(table.collectives, payloads, strict=True))
    sizes = _of_shapes(table.ops, shapes)
    return replace(table, flops=flops, bytes=moved, collectives=collectives, **sizes)


def _of_shapes(ops: Sequence[Op], shapes: Shapes) -> dict[str, Any]:
    """The columns of a table that depend on the operators' shapes."""
    pairs = list(zip(ops, shapes, strict=True))
    return {
        "shapes": shapes,
        "operand": np.array([_first_operand(op, shape) for op, shape in pairs]),
        "scores": np.array([_scores(op, shape) for op, shape in pairs]),
        "widths": np.array([_score_operations(op, shape[5:7]) for op, shape in pairs]),
        "usual_widths": np.array([_score_operations(op, (USUAL_WIDTH, USUAL_WIDTH)) for op, _ in pairs]),
        "launches": np.array([_launches(op, shape) for op, shape in pairs]),
        "wave_flops": np.array([_wave_flops(op, shape) for op, shape in pairs]),
        "logits": sum(
            shape[0] * shape[1]
            for op, shape in pairs
            if op.operator in (HEAD_LOSS, LOSS) and op.cost_class == "gemm" and op.phase == "forward"
        ),
    }


def device_seconds(
    table: OpTable,
    gpu: Gpu,
    features: Features,
    constants: GpuConstants,
    common: CommonConstants,
    lookup: Lookup | None = None,
) -> tuple[Floats, list[Provenance]]:
    """[ops] seconds of every operator without interference, 0 for collectives, and the origin of each."""
    seconds = _roofline(table, gpu, features, constants, common)
    origins: list[Provenance] = ["roofline"] * len(table.ops)
    if lookup is not None:
        for index, op in enumerate(table.ops):
            measured = lookup(op, table.shapes[index], float(table.bytes[index]))
            if measured is not None:
                seconds[index], origins[index] = measured
    return seconds, origins


def _roofline(table: OpTable, gpu: Gpu, features: Features, constants: GpuConstants, common: CommonConstants) -> Floats:
    precision = features.precision
    # 1. Rates of products. A GPU without units for the precision computes them in bf16, without quantization.
    low = table.quantizable & has_narrow_units(gpu, precision)
    forward = ~table.backward
    efficiency = np.select(
        [
            table.classes == GEMM,
            table.classes == GROUPED_GEMM,
            (table.classes == FUSED_ATTENTION) & forward,
            table.classes == FUSED_ATTENTION,
        ],
        [constants.gemm, constants.grouped_gemm, constants.attention_forward, constants.attention_backward],
        1.0,
    )
    rate = gpu.bf16_tflops * 1e12 * efficiency
    grouped = np.where(table.classes == GROUPED_GEMM, common.grouped_low, 1.0)
    rate = np.where(low, low_precision_rate(gpu, precision, constants) * grouped, rate)
    # 2. Products. Without a fused kernel attention also computes the masked half, and writes every score to memory.
    attends = table.classes == FUSED_ATTENTION
    work_factor = _exponential_slowdown(table, gpu) if features.flash else np.where(attends, 2.0, 1.0)
    read, back = (
        0.0 if features.flash else stored + dropped * features.dropped_scores
        for stored, dropped in zip(SCORE_BYTES, DROPPED_BYTES, strict=True)
    )
    multiplies = (table.classes == GEMM) | (table.classes == GROUPED_GEMM) | (table.classes == FUSED_ATTENTION)
    scores = np.where(forward, read, back) * table.scores
    product = np.where(multiplies, (work_factor * table.flops + common.tail * table.wave_flops) / rate, 0.0)
    # 3. Bytes. Weight gradients read operands that other products have quantized, so they do not quantize. A fused kernel of
    # both products of the experts quantizes inside.
    quantized = low & ~table.weight_gradient & ~((table.classes == GROUPED_GEMM) & features.fused_experts)
    moved = table.bytes * np.where(low, 0.5, 1.0) + np.where(quantized, QUANTIZED_BYTES * table.operand, 0.0)
    share = fused_share(table, features)
    streamed = (moved * share + scores) / (gpu.memory_gb_per_s * 1e9 * constants.memory)
    kernels = np.minimum(share, 1.0)
    kernels = kernels + np.where(quantized & (table.classes == GROUPED_GEMM), QUANTIZED_KERNELS * table.launches, 0.0)
    # 4. A fused attention kernel reads keys and values while it multiplies; other products also load and store when they begin
    # and end, so their times add.
    together = np.where(attends & features.flash, np.maximum(product, streamed), product + streamed)
    seconds = together + constants.kernel_seconds * kernels
    runs = (table.classes != COLLECTIVE) & (table.classes != FREE)
    return np.where(runs, seconds, 0.0)


def fused_share(table: OpTable, features: Features) -> Floats:
    """[ops] share of bytes and launches that remain when fused kernels replace the captured operators of torch."""
    share, moves = np.ones(len(table.ops)), table.classes == MEMORY
    if features.fused_loss and table.logits:
        loss = moves & np.isin(table.operators, (HEAD_LOSS, LOSS))
        total = float(table.bytes[loss].sum())
        share[loss] = min(1.0, LOSS_BYTES * table.logits / total) if total else 1.0
    if features.fused_router:
        gate = moves & table.routing
        for in_pass in (gate & table.backward, gate & ~table.backward):
            share[in_pass] = min(1.0, ROUTER_KERNELS / max(1, int(in_pass.sum())))
    if features.fused_experts:
        share[moves & (table.operators == EXPERTS)] = 0.0
    return share


def has_narrow_units(gpu: Gpu, precision: str) -> bool:
    """Whether products of this precision are computed below bf16 on a GPU: in its units for it, or in those for fp8."""
    if precision not in LOW_PRECISIONS:
        return False
    return bool(gpu.fp8_tflops or (precision == "nvfp4" and gpu.fp4_tflops))


def low_precision_rate(gpu: Gpu, precision: str, constants: GpuConstants) -> float:
    """Operations per second of products below bf16; a GPU without such units uses its next wider format."""
    if precision == "nvfp4" and gpu.fp4_tflops:
        return gpu.fp4_tflops * 1e12 * constants.fp4
    if gpu.fp8_tflops:
        return gpu.fp8_tflops * 1e12 * constants.fp8
    return gpu.bf16_tflops * 1e12 * constants.gemm


def _shapes(ops: Sequence[Op], b: int, s: int) -> Shapes:
    flat = [size for op in ops for size in op.shape]
    values = iter(evaluate(flat, b, s).tolist() if flat else [])
    return tuple(tuple(next(values) for _ in op.shape) for op in ops)


def _launches(op: Op, shape: tuple[float, ...]) -> float:
    """Kernels of an operator; Transformer Engine launches a grouped product as one product per group."""
    if op.cost_class == "free":
        return 0.0
    return shape[0] if op.cost_class == "grouped_gemm" else 1.0


def _wave_flops(op: Op, shape: tuple[float, ...]) -> float:
    """Operations of one wave, in which every multiprocessor computes one tile; for a grouped product one wave per group."""
    if op.cost_class == "gemm":
        return 2.0 * WAVE_OUTPUTS * shape[2]
    if op.cost_class != "grouped_gemm":
        return 0.0
    groups, rows, _, inner = shape
    return 2.0 * WAVE_OUTPUTS * (rows if op.is_weight_gradient else groups * inner)


def _first_operand(op: Op, shape: tuple[float, ...]) -> float:
    """m · k of a product, rows · k of a grouped one."""
    if op.cost_class == "gemm":
        return shape[0] * shape[2]
    return shape[1] * shape[3] if op.cost_class == "grouped_gemm" else 0.0


def _scores(op: Op, shape: tuple[float, ...]) -> float:
    """Samples · heads · query length · key length."""
    return shape[0] * shape[1] * shape[3] * shape[4] if op.cost_class == "attention" else 0.0


def _score_operations(op: Op, widths: Sequence[float]) -> float:
    """Operations per score: forward one product of the keys' width and one of the values'; backward three and two."""
    if op.cost_class != "attention":
        return 1.0
    backward = op.phase == "backward" and not op.is_recomputed
    keys, values = widths
    return 2.0 * (3.0 * keys + 2.0 * values if backward else keys + values)


def _exponential_slowdown(table: OpTable, gpu: Gpu) -> Floats:
    """[N] slowdown of an attention kernel by its exponentials, relative to heads of the usual width; 1 elsewhere."""
    exponential = gpu.bf16_tflops * 1e12 / EXPONENTIALS.get(gpu.name, USUAL_EXPONENTIALS)
    return (1.0 + exponential / table.widths) / (1.0 + exponential / table.usual_widths)


def peak_tflops(gpu: Gpu, precision: str) -> float:
    """Peak rate of the products' precision; that of bf16 if the GPU has no units for it."""
    if precision == "nvfp4" and gpu.fp4_tflops:
        return gpu.fp4_tflops
    return gpu.fp8_tflops if precision in LOW_PRECISIONS and gpu.fp8_tflops else gpu.bf16_tflops
