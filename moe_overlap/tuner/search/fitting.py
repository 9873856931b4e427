"""The cheapest single change that makes a plan fit its GPUs.

1. `memory_changes` derives plans from the one that does not fit: modules or whole layers are recomputed, micro-batches halved,
   states sharded, the optimizer moved to host memory.
2. Each changed plan is predicted with the features of the job under the change's flags; a change that no flags express is
   skipped. The answer is the fastest plan that fits. The number of recomputed layers is the smallest that fits, by bisection:
   recomputing another layer never needs more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan, Recompute, StagePlan
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.feasibility import ChangeKind, MemoryChange, Remedy
from moe_overlap.tuner.cost.hardware import Features
from moe_overlap.tuner.cost.prediction import predict_plan
from moe_overlap.tuner.cost.stage_parts import stage_variants
from moe_overlap.tuner.problem import Problem

Capture = Callable[[Plan], Mapping[int, CapturedModel]]
"""Plan -> the captured models of its stages."""


FeaturesOf = Callable[[MemoryChange, Plan], Features | None]
"""Change and changed plan -> the features of the job under the change's flags; None if those flags give no such job."""


Degrees = Sequence[tuple[MemoryChange, Plan]]
"""A change by degrees, each of which needs no more memory than the degree before; often a single degree."""


def cheapest_change(
    failing: Prediction, problem: Problem, capture: Capture, features_of: FeaturesOf
) -> tuple[Remedy | None, tuple[MemoryChange, ...]]:
    """The change that fits with the shortest step.

    Args:
        failing: the prediction of the problem's plan.
        capture: called for every changed plan, since its recomputation may be missing from the problem's graphs.
        features_of: the features of the job under the flags of a change.
    Returns:
        The change, None if no single change fits; and all changes that were tried.
    """
    remedies, tried = [], []
    for degrees in memory_changes(problem.plan, problem.model, problem.features):
        change, prediction = _least_that_fits(degrees, problem, capture, features_of)
        if change is None:
            continue
        tried.append(change)
        if prediction is not None:
            seconds = prediction.predicted.step_seconds
            remedies.append(
                Remedy(
                    change=change,
                    step_seconds=seconds,
                    slower_by=seconds / failing.predicted.step_seconds - 1.0,
                    high_bytes=prediction.fullest.high_bytes,
                )
            )
    return min(remedies, key=lambda remedy: remedy.step_seconds, default=None), tuple(tried)


def _least_that_fits(
    degrees: Degrees, problem: Problem, capture: Capture, features_of: FeaturesOf
) -> tuple[MemoryChange | None, Prediction | None]:
    """The least degree of a change that fits, and its prediction.

    Returns:
        (last degree, None) if no degree fits; (None, None) if no flags express the change or it cannot be predicted.
    """
    most = degrees[-1][1]
    features = features_of(*degrees[-1])
    if features is None:
        return None, None
    graphs = dict(capture(most))
    if not all(_has_variants(stage, graphs[index]) for index, stage in enumerate(most.stages)):
        return None, None

    def predicted(degree: int) -> Prediction:
        plan = degrees[degree][1]
        return predict_plan(plan, replace(problem, plan=plan, graphs=graphs, features=features))

    try:
        first, last = 0, len(degrees) - 1
        best = predicted(last)
        if not best.fits:
            return degrees[last][0], None
        while first < last:
            middle = (first + last) // 2
            tried = predicted(middle)
            if tried.fits:
                best, last = tried, middle
            else:
                first = middle + 1
    except ConfigError:
        # The overlap that was decided for the unchanged plan may be refused for the changed one.
        return None, None
    return degrees[last][0], best


def _has_variants(stage: StagePlan, graph: CapturedModel) -> bool:
    captured = {part.variant for part in graph.parts}
    return stage_variants(stage) <= captured


def memory_changes(plan: Plan, model: ModelDescription, features: Features) -> Iterator[Degrees]:
    """The changes that may lower the memory of a plan, each by its degrees."""
    for modules in module_sets(plan, model, features):
        yield [(MemoryChange(ChangeKind.MODULES, modules), _with(plan, partial(_recomputing, modules=modules)))]
    # megatron-core refuses recomputation of whole layers together with its overlap of two micro-batches.
    if not features.overlap_experts and all(stage.recompute.granularity != "uniform" for stage in plan.stages):
        degrees = _recomputed_layers(plan)
        if degrees:
            yield degrees
    # Between unlike stages the tiles of transfers are cut for the samples of a micro-batch.
    if not plan.transfers and all(stage.micro_batch_size % 2 == 0 for stage in plan.stages):
        yield [
            (MemoryChange(ChangeKind.MICRO_BATCH, number=plan.stages[0].micro_batch_size // 2), _with(plan, _halved))
        ]
    levels = {stage.zero_level for stage in plan.stages}
    if 0 in levels:
        yield [(MemoryChange(ChangeKind.SHARD_OPTIMIZER), _with(plan, partial(_sharded, level=1)))]
    if min(levels) < 3 and len(plan.stages) == 1:
        yield [(MemoryChange(ChangeKind.SHARD_ALL), _with(plan, partial(_sharded, level=3)))]
    if any(stage.offload.optimizer < 1.0 for stage in plan.stages):
        yield [(MemoryChange(ChangeKind.HOST_OPTIMIZER), _with(plan, _host_optimizer))]


def _recomputed_layers(plan: Plan) -> Degrees:
    """One more recomputed layer of every chunk per degree, up to all of them.

    One flag gives one number for all chunks, at most the layers of the shortest; if chunks differ, EVERY_LAYER comes last.
    """
    now = max(stage.recompute.layers if stage.recompute.granularity == "full" else 0 for stage in plan.stages)
    sizes = {last - first for stage in plan.stages for first, last in stage.chunks if last > first}
    degrees = [
        (MemoryChange(ChangeKind.LAYERS, number=layers), _with(plan, partial(_whole_layers, layers=layers)))
        for layers in range(now + 1, min(sizes) + 1)
    ]
    if len(sizes) > 1:
        every = Recompute(layers=1, granularity="uniform")
        degrees.append(
            (MemoryChange(ChangeKind.EVERY_LAYER), _with(plan, lambda stage: replace(stage, recompute=every)))
        )
    return degrees


def _with(plan: Plan, changed: Callable[[StagePlan], StagePlan]) -> Plan:
    return replace(plan, stages=tuple(map(changed, plan.stages)), predicted=None)


def module_sets(plan: Plan, model: ModelDescription, features: Features) -> Iterator[tuple[str, ...]]:
    """Sets of modules to recompute, each including the plan's own: with the cheap modules, with the expensive ones, with both.

    Cheap modules discard nothing but their outputs; expensive ones (dense MLPs, experts) run all their products again.
    """
    if any(stage.recompute.granularity in ("full", "uniform") for stage in plan.stages):
        return
    now = {module for stage in plan.stages for module in stage.recompute.modules}
    cheap = {"layernorm"} | ({"moe_act"} if any(model.moe_layers) else set())
    cheap |= {"mla_up_proj"} if model.latent_attention is not None else set()
    cheap |= set() if features.flash else {"core_attn"}
    expensive = {"mlp"} if not all(model.moe_layers) else set()
    expensive |= {"moe"} if any(model.moe_layers) else set()
    # Recomputing the experts includes their activation function.
    sets = [now | cheap, now | expensive, (now | cheap | expensive) - {"moe_act"}]
    yield from dict.fromkeys(tuple(sorted(modules)) for modules in sets if modules != now)


def _recomputing(stage: StagePlan, modules: tuple[str, ...]) -> StagePlan:
    longest = max(last - first for first, last in stage.chunks)
    return replace(stage, recompute=Recompute(layers=longest, granularity="selective", modules=modules))


def _whole_layers(stage: StagePlan, layers: int) -> StagePlan:
    longest = max(last - first for first, last in stage.chunks)
    return replace(stage, recompute=Recompute(layers=min(layers, longest), granularity="full"))


def _halved(stage: StagePlan) -> StagePlan:
    steps = 2 * stage.gradient_accumulation_steps
    return replace(stage, micro_batch_size=stage.micro_batch_size // 2, gradient_accumulation_steps=steps)


def _sharded(stage: StagePlan, level: int) -> StagePlan:
    return replace(stage, zero_level=max(level, stage.zero_level))


def _host_optimizer(stage: StagePlan) -> StagePlan:
    return replace(stage, offload=replace(stage.offload, optimizer=1.0))
