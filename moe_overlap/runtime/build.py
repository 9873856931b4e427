"""The parts that a run's flags and plan ask for. What overlaps is imported only where it runs: a plain run holds none of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_overlap.describe.expert_load import ExpertLoad
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.plan.plan import Plan
from moe_overlap.runtime.groups import StageGroups
from moe_overlap.runtime.megatron_core.runner import MegatronStepRunner
from moe_overlap.runtime.routing.state import DrawClock
from moe_overlap.runtime.spans import SpanRecorder
from moe_overlap.runtime.state.optimizer import LayerwiseOptimizer
from moe_overlap.runtime.step import StepRunner
from moe_overlap.runtime.weight_grad.queue import WeightGradQueue

Make = Callable[..., Any] | None


def gate_and_dispatcher(gate: str | None, dispatcher: str, clock: DrawClock) -> tuple[Make, Make]:
    """What builds the gate and the dispatcher of a MoE layer; None where megatron-core's stay.

    Args:
        gate: value of --moe-gate.
        dispatcher: value of --moe-token-dispatcher-type.
        clock: tells gates that draw which micro-batch they see.
    """
    make_gate = make_dispatcher = None
    if gate is not None:
        from moe_overlap.runtime.routing.gates import gate_maker

        make_gate = gate_maker(gate, clock)
    if dispatcher == "irregular":
        from moe_overlap.runtime.dispatch.plug_in import IrregularTokenDispatcher

        make_dispatcher = IrregularTokenDispatcher
    return make_gate, make_dispatcher


def defer_planned_gradients(modules: Sequence[torch.nn.Module], overlap: StageOverlap, queue: WeightGradQueue) -> bool:
    """Split the products whose weight gradients the plan has computed under an exchange; whether there are any."""
    if not any(layer.weight_gradient_slots for layer in overlap.layers):
        return False
    from moe_overlap.runtime.weight_grad.split_linear import defer_planned

    return defer_planned(modules, overlap, queue)


def gradient_marks(modules: Sequence[torch.nn.Module], overlap: StageOverlap) -> list[torch.nn.Parameter]:
    """Parameters that must begin a gradient bucket so that a plan's pieces can be reduced part by part."""
    if overlap.gradient_chunk_bytes == 0:
        return []
    from moe_overlap.runtime.state.buckets import bucket_marks

    return bucket_marks(modules)


def count_expert_loads(models: Sequence[Any], model: ModelDescription) -> Callable[[int, int], list[ExpertLoad]]:
    """Have the routers count what they decide; the answer sums it over all ranks, for a range of steps (a collective).

    Args:
        models: the GPTModel of each of this rank's chunks.
    """
    from moe_overlap.runtime.routing.meter import RouterMeters

    device = next(models[0].parameters()).device
    assert model.num_experts is not None
    return RouterMeters(models, model.num_layers + model.mtp_layers, model.num_experts, device).collect


def make_runner(
    plan: Plan,
    chunks: Sequence[Any],
    models: Sequence[Any],
    optimizer: LayerwiseOptimizer,
    groups: StageGroups,
    recorder: SpanRecorder,
    *,
    queue: WeightGradQueue,
    clock: DrawClock,
    sequence_length: int,
    micro_batch_size: int,
) -> StepRunner:
    """megatron-core's schedule for a plan without overlap, the executor for one with it, on every stage alike: the two do not
    understand each other's transfers.

    Args:
        chunks: this rank's DDP-wrapped model chunks.
        models: the GPTModel inside each of them.
    """
    if not any(stage.overlap.is_listed for stage in plan.stages):
        sizes = {"sequence_length": sequence_length, "micro_batch_size": micro_batch_size}
        return MegatronStepRunner(chunks, optimizer, groups, recorder, clock=clock, **sizes)
    from moe_overlap.runtime.executor.execute import PlanExecutor
    from moe_overlap.runtime.state.buckets import GradientPieces

    in_pieces = any(stage.overlap.gradient_chunk_bytes for stage in plan.stages)
    return PlanExecutor(
        chunks,
        models,
        optimizer,
        groups,
        recorder,
        queue=queue,
        clock=clock,
        pieces=GradientPieces(chunks) if in_pieces else None,
        sequence_length=sequence_length,
        micro_batch_size=micro_batch_size,
    )
