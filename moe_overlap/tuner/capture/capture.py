"""Captures a model: every part under one layout, in one process, on tensors without data. Needs torch and megatron-core.

1. `instrumented` builds one layer of every kind with a recorder attached.
2. Each part runs at several batches (`sample_points`), which gives graphs whose numbers are constants.
3. `fit` makes one graph in b and s of them: every number is interpolated exactly, then checked at a further batch.

All sizes in a transformer layer are polynomials: of degree at most 1 in the samples b and at most 2 in the tokens s (masks and
unfused attention scores). Most models have no such scores: four batches determine degree 1 in both, in rational arithmetic, and
a fifth one detects sizes that are no such polynomial. Then two more determine degree 2 in s, which the fifth one checks again.
The sample sequences are multiples of every divisor of a sequence (ranks, experts, capacity), so a ceiling in the model, such as
the capacity of an expert, appears as its exact quotient.
model, such as the capacity of an expert, shows as its exact quotient.

A transformer's operators are the same for every b but 1, where a transposition to contiguous memory copies nothing: that graph
is captured separately, as polynomials in s only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

from megatron.core.utils import GlobalMemoryBuffer
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.training.cli.config import Config
from moe_overlap.describe.model import ModelDescription
from moe_overlap.tuner.capture.build import World, build_one_of_each, config_for, pretended_world, stock_layer
from moe_overlap.tuner.capture.expression import B, Expression, S, evaluate
from moe_overlap.tuner.capture.fused_modules import accumulate_in_products, fused_kernels
from moe_overlap.tuner.capture.graph import (
    COPIES_PER,
    CapturedModel,
    CapturedPart,
    Collective,
    Layout,
    Op,
    Storage,
    check,
)
from moe_overlap.tuner.capture.kernels import flops
from moe_overlap.tuner.capture.parts import PartRecorder, RunnablePart, keep_gradients_apart, prediction_layers
from moe_overlap.tuner.capture.record import Recorder
from moe_overlap.tuner.capture.request import NO_RECOMPUTATION, Request, layer_kinds, prediction_kinds, versions
from moe_overlap.tuner.capture.stand_ins import Balance, recomputation_announced, without_data
from moe_overlap.tuner.capture.without_gradients import marked

Point = tuple[int, int]
"""Samples, tokens."""
MOST_FROZEN = 2_000_000
"""Number of objects that are hidden from the garbage collector at most."""


class NotOneGraphError(RuntimeError):
    """Batches that should differ only in sizes run different operators, or a size is no polynomial."""


class NoPolynomialError(NotOneGraphError):
    """A size is no polynomial of the degrees that its recordings determine."""


def sample_points(unit: int, one_sample: bool) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """The batches to record, the last one for the check, and the additional ones for degree 2 in s.

    Args:
        unit: tokens of the shortest sample sequence.
    """
    if one_sample:
        return ((1, unit), (1, 2 * unit), (1, 4 * unit)), ((1, 3 * unit),)
    # Two values of each determine degree 1; the last batch lies outside of all ranges, so that it detects sizes that are no such
    # polynomial.
    return (
        ((2, unit), (2, 2 * unit), (3, unit), (3, 2 * unit), (5, 4 * unit)),
        ((2, 3 * unit), (3, 3 * unit)),
    )


def fit(parts: Sequence[CapturedPart], points: Sequence[Point]) -> CapturedPart:
    """Fit the numbers of one part by expressions in b and s.

    Args:
        parts: the same model part, with constant expressions, recorded at `points`; the last one is for the check.
    Raises:
        NotOneGraphError: the graphs differ in more than sizes.
    """
    base = parts[0]
    for part, point in zip(parts[1:], points[1:], strict=True):
        _compare(base, part, points[0], point)
    ops = tuple(_fit_op([part.ops[index] for part in parts], tuple(points)) for index in range(len(base.ops)))
    storages = tuple(
        _fit_storage([part.storages[index] for part in parts], tuple(points)) for index in range(len(base.storages))
    )
    return dataclasses.replace(base, ops=ops, storages=storages)


def gives(part: CapturedPart, recorded: CapturedPart, point: Point) -> bool:
    """Whether a fitted part, evaluated at a point, has the operators and every number of the part recorded there."""
    try:
        _compare(part, recorded, (0, 0), point)
    except NotOneGraphError:
        return False
    numbers = evaluate(_expressions(part), *point)
    return bool((numbers == evaluate(_expressions(recorded), *point)).all())


def _expressions(part: CapturedPart) -> list[Expression]:
    expressions = [storage.bytes for storage in part.storages]
    for op in part.ops:
        expressions += [*op.shape, op.bytes, *([op.collective.payload_bytes] if op.collective else [])]
    return expressions


def _compare(base: CapturedPart, other: CapturedPart, point: Point, other_point: Point) -> None:
    """Raise NotOneGraphError unless two graphs are equal in everything but sizes."""
    for op, other_op in zip(base.ops, other.ops, strict=False):
        if _structure(op) != _structure(other_op):
            raise NotOneGraphError(
                f"{base.kind}, operator {op.id}: {op.name} ({op.module}) with {point[0]} samples of {point[1]}, "
                f"{other_op.name} ({other_op.module}) with {other_point[0]} of {other_point[1]}"
            )
    names = [f.name for f in dataclasses.fields(CapturedPart) if f.name not in ("ops", "storages", "one_sample")]
    if len(base.ops) != len(other.ops) or any(getattr(base, name) != getattr(other, name) for name in names):
        raise NotOneGraphError(f"{base.kind}: {len(base.ops)} operators at {point}, {len(other.ops)} at {other_point}")
    for storage, same in zip(base.storages, other.storages, strict=True):
        if dataclasses.replace(storage, bytes=same.bytes) != same:
            raise NotOneGraphError(f"{base.kind}, storage {storage.id}: {storage} at {point}, {same} at {other_point}")


def _structure(op: Op) -> Any:
    kind = (op.collective.kind, op.collective.axis, op.collective.size) if op.collective else None
    return (op.name, op.phase, op.operator, op.cost_class, len(op.shape), op.reads, op.writes, op.after, kind, op.dtype)


def _fit_op(ops: Sequence[Op], points: tuple[Point, ...]) -> Op:
    base = ops[0]
    place = f"{base.name} in {base.module or base.operator}"
    shape = tuple(_polynomial([op.shape[axis] for op in ops], points, place) for axis in range(len(base.shape)))
    moved = _polynomial([op.bytes for op in ops], points, place)
    touched, elements = (
        tuple(_polynomial(list(numbers), points, place) for numbers in zip(*of_ops, strict=True))
        for of_ops in ([op.touched for op in ops], [op.elements for op in ops])
    )
    collective: Collective | None = None
    if base.collective is not None:
        payload = _polynomial([op.collective.payload_bytes for op in ops if op.collective], points, place)
        collective = dataclasses.replace(base.collective, payload_bytes=payload)
    return dataclasses.replace(
        base,
        shape=shape,
        bytes=moved,
        touched=touched,
        elements=elements,
        flops=flops(base.name, shape),
        collective=collective,
    )


def _fit_storage(storages: Sequence[Storage], points: tuple[Point, ...]) -> Storage:
    base = storages[0]
    return dataclasses.replace(base, bytes=_polynomial([s.bytes for s in storages], points, base.name or "a storage"))


def _polynomial(constants: Sequence[Expression], points: tuple[Point, ...], place: str) -> Expression:
    numbers = tuple(int(constant.terms[0][1]) if constant.terms else 0 for constant in constants)
    polynomial = _through(numbers, points)
    if polynomial is None:
        raise NoPolynomialError(f"a size of {place} is no polynomial in b and s: {numbers} at {points}")
    return polynomial


@cache
def _through(numbers: tuple[int, ...], points: tuple[Point, ...]) -> Expression | None:
    """The polynomial through all numbers but the last, if the last one fits, too; of degree 2 in s with enough points."""
    # Weights and most shapes do not depend on the batch.
    if len(set(numbers)) == 1:
        return Expression.of(numbers[0])
    samples = {b for b, _ in points}
    batches = 1 if len(samples) == 1 else 2
    monomials = [(i, j) for i in range(batches) for j in range((len(points) - 1) // batches)]
    # In fractions: coefficients must be exact, since sizes are compared with `==`.
    inverse = _inverse(points[:-1], tuple(monomials))
    polynomial = Expression()
    for row, (i, j) in zip(inverse, monomials, strict=True):
        coefficient = sum((a * n for a, n in zip(row, numbers[:-1], strict=True)), Fraction(0))
        term = Expression.of(coefficient)
        for factor, power in ((B, i), (S, j)):
            for _ in range(power):
                term = term * factor
        polynomial = polynomial + term
    return polynomial if float(polynomial.value(*points[-1])) == numbers[-1] else None


@cache
def _inverse(points: tuple[Point, ...], monomials: tuple[tuple[int, int], ...]) -> tuple[tuple[Fraction, ...], ...]:
    """Rows that turn the numbers at `points` into the coefficients of `monomials`; by elimination."""
    size = len(points)
    rows = [
        [Fraction(b**i * s**j) for i, j in monomials] + [Fraction(int(k == r)) for k in range(size)]
        for r, (b, s) in enumerate(points)
    ]
    for column in range(size):
        pivot = next(r for r in range(column, size) if rows[r][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for other in range(size):
            if other != column and rows[other][column]:
                factor = rows[other][column]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[column], strict=True)]
    return tuple(tuple(row[size:]) for row in rows)


def capture(request: Request) -> CapturedModel:
    """Capture every part of a request.

    Embedding and head are captured without recomputation only: they are never recomputed.

    Raises:
        UnregisteredKernelError: the model runs a kernel that the table of kernels does not list.
    """
    with pretended_world(request.layout) as world:
        parts = _capture_parts(request, world)
    return CapturedModel(
        parts=parts,
        layer_kinds=layer_kinds(request.model),
        mtp_kinds=prediction_kinds(request.model),
        layout=request.layout,
        implementation=request.implementation,
        versions=versions(),
        sha256=request.sha256(),
    )


def _capture_parts(request: Request, world: World) -> tuple[CapturedPart, ...]:
    with instrumented(request, world) as runner:
        recomputed = request.variant != NO_RECOMPUTATION
        runnable_parts = [
            runnable for runnable in runner.runnable_parts.values() if runnable.is_layer or not recomputed
        ]
        unit = sequence_unit(request.config, request.model, request.layout)
        return tuple(
            _with_marks(runner, runnable, part, unit)
            for runnable in runnable_parts
            for part in _capture_part(runner, runnable, unit)
        )


@contextlib.contextmanager
def instrumented(request: Request, world: World, without_values: bool = True) -> Iterator[PartRecorder]:
    """Build a model with one layer of every kind whose parts can be recorded.

    Args:
        without_values: whether to use fake tensors. With real ones it executes; only the torch implementation can.
    """
    config = config_for(request.config, request.layout, request.variant)
    buffer, recorder = GlobalMemoryBuffer(), Recorder(world.axis_of)
    fused = request.implementation == "te"
    with contextlib.ExitStack() as stack:
        # Undoes the `gc.freeze` of the recordings.
        stack.callback(_unfreeze_many)
        # Frees the last recording.
        stack.callback(recorder.begin)
        if without_values:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(without_data(buffer))
        stack.enter_context(recomputation_announced(recorder))
        if fused:
            stack.enter_context(fused_kernels(recorder, world.groups.tp))
        gpt, kinds = build_one_of_each(config, request.model, world, stock_layer)
        if fused:
            accumulate_in_products(gpt)
        balance(gpt, recorder)
        keep_gradients_apart(gpt, in_fp32=gradients_in_fp32(config))
        yield PartRecorder(gpt, kinds, request.layout, recorder, buffer, request.variant)


def _unfreeze_many() -> None:
    """Return the models of earlier captures to the garbage collector when there are many.

    The following walk through all objects takes as long as some recordings: torch alone has half a million.
    """
    if gc.get_freeze_count() > MOST_FROZEN:
        gc.unfreeze()


def balance(gpt: Any, recorder: Recorder) -> None:
    """Balanced routing in every MoE layer."""
    layers = [*gpt.decoder.layers, *(layer.transformer_layer for layer in prediction_layers(gpt))]
    balances = [Balance(layer.mlp) for layer in layers if layer.is_moe_layer]
    # All layers route the same number of tokens to the same number of experts, so one layer's answer holds for all.
    if balances:
        recorder.rows_of_map = balances[0].rows_of_map


def gradients_in_fp32(config: Config) -> bool:
    """Whether gradients are added up in fp32 (megatron/training/optimizer.py)."""
    optimizer = config.optimizer
    return optimizer.accumulate_allreduce_grads_in_fp32 or (optimizer.bf16 and not optimizer.grad_reduce_in_bf16)


def _capture_part(runner: PartRecorder, runnable: RunnablePart, unit: int) -> list[CapturedPart]:
    recorded: dict[Point, CapturedPart] = {}

    def record(point: Point) -> CapturedPart:
        if point not in recorded:
            recorded[point] = _checked(runner.record(runnable, *point))
        return recorded[point]

    def fitted(one_sample: bool) -> CapturedPart:
        points, extra_points = sample_points(unit, one_sample)
        graphs = [record(point) for point in points]
        try:
            return _checked(fit(graphs, points))
        except NoPolynomialError:
            return _checked(fit([*map(record, extra_points), *graphs], (*extra_points, *points)))

    many, single = fitted(one_sample=False), sample_points(unit, one_sample=True)[0][0]
    # If a single sample runs the same operators, one recording shows it and replaces the others.
    return [many] if gives(many, record(single), single) else [many, fitted(one_sample=True)]


def _with_marks(runner: PartRecorder, runnable: RunnablePart, part: CapturedPart, unit: int) -> CapturedPart:
    """Mark a layer with its pass without gradients; a variant of recomputation runs both kinds of passes, and gets no marks."""
    if part.variant != NO_RECOMPUTATION or not runnable.is_layer:
        return part
    point = sample_points(unit, part.one_sample)[0][0]
    return _checked(marked(part, *runner.record_without_gradients(runnable, *point)))


def _checked(part: CapturedPart) -> CapturedPart:
    check(part)
    return part


def sequence_unit(config: Config, model: ModelDescription, layout: Layout) -> int:
    """Number of tokens that every rank, expert and capacity divides, for any number of samples."""
    ranks = 2 * layout.context * layout.tensor
    if not model.num_experts:
        return 16 * ranks
    experts = model.num_experts // math.gcd(model.num_experts, model.router_topk)
    factor = config.moe.moe_expert_capacity_factor
    of_capacity = Fraction(factor).limit_denominator(1000).denominator if factor is not None else 1
    unit = ranks * experts * of_capacity
    if config.moe.moe_token_dispatcher_type == "flex":
        return math.lcm(unit, ranks * COPIES_PER)
    return unit * -(-16 // unit)
