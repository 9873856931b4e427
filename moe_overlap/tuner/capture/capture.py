"""Captures a model: every part under one layout, in one process, on tensors without data. Needs torch and megatron-core."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import megatron.core
import torch
from megatron.core.utils import GlobalMemoryBuffer
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.training.config import Config
from moe_overlap.describe.model import ModelDescription
from moe_overlap.tuner.capture.build import (
    World,
    build_one_of_each,
    config_for,
    layer_kinds,
    pretended_world,
    stock_layer,
)
from moe_overlap.tuner.capture.fit import fit, same_graph, sample_points
from moe_overlap.tuner.capture.graph import CapturedModel, Implementation, Layout, Part
from moe_overlap.tuner.capture.parts import PartRecorder, Piece, keep_gradients_apart
from moe_overlap.tuner.capture.record import Recorder
from moe_overlap.tuner.capture.request import NO_RECOMPUTATION
from moe_overlap.tuner.capture.spec import check
from moe_overlap.tuner.capture.stand_ins import Balance, recomputation_announced, selected, without_data


def capture_model(
    config: Config,
    model: ModelDescription,
    layout: Layout,
    implementation: Implementation,
    variants: Sequence[str] = (NO_RECOMPUTATION,),
    sha256: str = "",
) -> CapturedModel:
    """The graphs of a model under a layout.

    Args:
        config: validated flags; their pipeline, data parallelism and overlap do not matter.
        model: what `describe_model` made of them.
        variants: of recomputation, each as in `Part.variant`; embedding and head are captured without.
        sha256: of the request, kept in the result.
    Raises:
        UnregisteredKernelError: the model runs a kernel that the table of kernels does not list.
    """
    parts: list[Part] = []
    with pretended_world(layout) as world:
        for variant in variants:
            parts += _capture_variant(config, model, layout, implementation, variant, world)
    return CapturedModel(
        parts=tuple(parts),
        layer_kinds=layer_kinds(model),
        mtp_kinds=(),
        layout=layout,
        implementation=implementation,
        versions=(("torch", torch.__version__), ("megatron-core", megatron.core.__version__)),
        sha256=sha256,
    )


def _capture_variant(
    config: Config,
    model: ModelDescription,
    layout: Layout,
    implementation: Implementation,
    variant: str,
    world: World,
) -> list[Part]:
    config = config_for(config, layout, variant)
    buffer = GlobalMemoryBuffer()
    with FakeTensorMode(allow_non_fake_inputs=True), without_data(buffer):
        gpt, kinds = build_one_of_each(config, model, world, stock_layer)
        recorder, runner = instrument(config, model, layout, variant, world, gpt, kinds, buffer)
        with recomputation_announced(recorder):
            runner.warm_up(2, sequence_unit(config, model, layout))
            pieces = [piece for kind, piece in runner.pieces.items() if variant == NO_RECOMPUTATION or kind in kinds]
            return [part for piece in pieces for part in _capture_piece(runner, piece, config, model, layout)]


def instrument(
    config: Config,
    model: ModelDescription,
    layout: Layout,
    variant: str,
    world: World,
    gpt: Any,
    kinds: Sequence[str],
    buffer: GlobalMemoryBuffer,
) -> tuple[Recorder, PartRecorder]:
    """Recorder and hooks on a built model, balanced routing in its MoE layers."""
    keep_gradients_apart(gpt, in_fp32=gradients_in_fp32(config))
    balances = [Balance(layer.mlp) for layer in gpt.decoder.layers if layer.is_moe_layer]
    stand_in = selected(balances[0].rows_per_expert) if balances else None
    recorder = Recorder(world.axis_of, stand_in)
    return recorder, PartRecorder(gpt, kinds, layout, recorder, buffer, variant)


def gradients_in_fp32(config: Config) -> bool:
    """Whether gradients are added up in fp32 (megatron/training/optimizer.py)."""
    optimizer = config.optimizer
    return optimizer.accumulate_allreduce_grads_in_fp32 or (optimizer.bf16 and not optimizer.grad_reduce_in_bf16)


def _capture_piece(
    runner: PartRecorder, piece: Piece, config: Config, model: ModelDescription, layout: Layout
) -> list[Part]:
    unit = sequence_unit(config, model, layout)
    found = []
    for one_sample in (False, True):
        points = sample_points(unit, one_sample)
        recorded = [runner.record(piece, *point) for point in points]
        for part in recorded:
            check(part)
        found.append(fit(recorded, points))
        check(found[-1])
    many, one = found
    return [many] if same_graph(many, one) else [many, one]


def sequence_unit(config: Config, model: ModelDescription, layout: Layout) -> int:
    """Tokens of a sequence that every rank, expert and capacity divides for any number of samples."""
    ranks = 2 * layout.context * layout.tensor
    if not model.num_experts:
        return 16 * ranks
    experts = model.num_experts // math.gcd(model.num_experts, model.router_topk)
    factor = config.moe.moe_expert_capacity_factor
    of_capacity = Fraction(factor).limit_denominator(1000).denominator if factor is not None else 1
    unit = ranks * experts * of_capacity
    return unit * -(-16 // unit)
