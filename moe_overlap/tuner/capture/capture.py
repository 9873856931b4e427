"""Captures a model: every part under one layout, in one process, on tensors without data. Needs torch and megatron-core."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from megatron.core.utils import GlobalMemoryBuffer
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.training.config import Config
from moe_overlap.describe.model import ModelDescription
from moe_overlap.tuner.capture.build import (
    World,
    build_one_of_each,
    config_for,
    pretended_world,
    stock_layer,
)
from moe_overlap.tuner.capture.fit import fit, gives, sample_points
from moe_overlap.tuner.capture.fused_exchange import COPIES_PER
from moe_overlap.tuner.capture.graph import CapturedModel, Layout, Part
from moe_overlap.tuner.capture.layer_kinds import layer_kinds, prediction_kinds
from moe_overlap.tuner.capture.parts import PartRecorder, Piece, keep_gradients_apart, prediction_layers
from moe_overlap.tuner.capture.record import Recorder
from moe_overlap.tuner.capture.request import NO_RECOMPUTATION, Request, versions
from moe_overlap.tuner.capture.spec import check
from moe_overlap.tuner.capture.stand_ins import Balance, recomputation_announced, without_data
from moe_overlap.tuner.capture.with_fused_kernels import accumulate_in_products, fused_kernels


def capture(request: Request) -> CapturedModel:
    """Every part of a request.

    Embedding and head are captured without recomputation only: nothing of them is recomputed.

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


def _capture_parts(request: Request, world: World) -> tuple[Part, ...]:
    with instrumented(request, world) as runner:
        recomputed = request.variant != NO_RECOMPUTATION
        pieces = [piece for piece in runner.pieces.values() if piece.is_layer or not recomputed]
        unit = sequence_unit(request.config, request.model, request.layout)
        return tuple(part for piece in pieces for part in _capture_piece(runner, piece, unit))


@contextlib.contextmanager
def instrumented(request: Request, world: World, without_values: bool = True) -> Iterator[PartRecorder]:
    """A model with one layer of every kind, its parts ready to be recorded.

    Args:
        without_values: on fake tensors. Otherwise it really runs; the torch implementation alone can.
    """
    config = config_for(request.config, request.layout, request.variant)
    buffer, recorder = GlobalMemoryBuffer(), Recorder(world.axis_of)
    fused = request.implementation == "te"
    with contextlib.ExitStack() as stack:
        stack.callback(gc.unfreeze)
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


def balance(gpt: Any, recorder: Recorder) -> None:
    """Balanced routing in every MoE layer."""
    layers = [*gpt.decoder.layers, *(layer.transformer_layer for layer in prediction_layers(gpt))]
    balances = [Balance(layer.mlp) for layer in layers if layer.is_moe_layer]
    if balances:
        recorder.rows_of_map = balances[0].rows_of_map


def gradients_in_fp32(config: Config) -> bool:
    """Whether gradients are added up in fp32 (megatron/training/optimizer.py)."""
    optimizer = config.optimizer
    return optimizer.accumulate_allreduce_grads_in_fp32 or (optimizer.bf16 and not optimizer.grad_reduce_in_bf16)


def _capture_piece(runner: PartRecorder, piece: Piece, unit: int) -> list[Part]:
    points = sample_points(unit, one_sample=False)
    many = _checked(fit([_checked(runner.record(piece, *point)) for point in points], points))
    points = sample_points(unit, one_sample=True)
    one = [_checked(runner.record(piece, *points[0]))]
    if gives(many, one[0], points[0]):
        return [many]
    one += [_checked(runner.record(piece, *point)) for point in points[1:]]
    return [many, _checked(fit(one, points))]


def _checked(part: Part) -> Part:
    check(part)
    return part


def sequence_unit(config: Config, model: ModelDescription, layout: Layout) -> int:
    """Tokens of a sequence that every rank, expert and capacity divides for any number of samples."""
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
