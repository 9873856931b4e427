"""The prediction of a plan, and the choice among the ways to compute the seconds of a step.

Error: relative to the simulated complete list, the reference of all other ways (`expected_error.py` has the errors relative to
measured steps). Cost: CPU milliseconds of one step, GPT-7B in four stages with 64 micro-batches.

    way                                       error of a step                             cost    caller
    closed form of one plan                   states stay: none if stages are equal,         6    predict, if nothing overlaps
      analytic.py                             else 4 %; states move: 5 % in the                  or moves; all others for bytes
                                              mean, 15 % at most                                 and the breakdown
    closed form of many plans                 the same seconds                           <0.01    searches of uniform plans, and
      search/uniform_cost.py                                                                     of stages
    lower bounds                              never above the closed form                <0.01    searches, to prune
      search/bounds.py, part_tables.py
    optimistic form of overlap                may be above or below                      <0.01    searches, to select layouts
      search/hidden.py                                                                           for the search of overlap
    simulated range of operators              none within the range                         <1    searches of partitions
      search/layer/partition_pipeline.py
    simulated compressed list                 1e-6; compress.py names the losses            50    predict, if lists overlap;
      simulate/compress.py                                                                       searches, to rank finalists
    simulated complete list                   none                                         900    predict, if states move or
      simulate/step.py                                                                           stages differ in shape

1. A plan without overlap whose states do not move: the closed form.
2. Stages with overlap in their lists, or of different shape: the step of the simulated lists.
3. Parameter groups that step by themselves (ZeRO 2 and 3, offloading): step and bytes of the complete lists of few micro-batches,
   extrapolated to all of them. The closed form (moved_states.py) only ranks candidates; its bytes are 20 % below to 40 % above
   those of the lists (tests/unit/tuner/cost/test_cost_corners.py).
4. A machine with refined prices: the closed form, which has no refined prices, times the ratio of the simulated steps with and
   without them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, replace

import numpy as np
from numpy.typing import NDArray

from moe_overlap.plan.instructions import BufferRole, Home, parse_buffer
from moe_overlap.plan.operators import GroupKind
from moe_overlap.plan.plan import Plan, PredictedStage
from moe_overlap.tuner.cost.analytic import Prediction, prepare, price
from moe_overlap.tuner.cost.evaluate import edge_bytes
from moe_overlap.tuner.cost.hardware import NOT_REFINED
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.simulate.engine import Ran
from moe_overlap.tuner.cost.simulate.memory import STAYING, intervals
from moe_overlap.tuner.cost.simulate.step import (
    SimulatedStep,
    simulate_step,
    simulated_micro_batches,
    step_of_many,
    with_lists,
)
from moe_overlap.tuner.problem import Problem


def predict_plan(plan: Plan, problem: Problem) -> Prediction:
    """Seconds and bytes of a plan that has the problem's parallel layout.

    Raises:
        ConfigError: the plan uses a field that is not lowered yet.
    """
    problem = problem.run_by(plan)
    if moves_states(plan):
        return with_moved_states(closed_form(plan, problem), plan, problem)
    return estimate_plan(plan, problem)


def estimate_plan(plan: Plan, problem: Problem) -> Prediction:
    """Seconds and bytes of a plan for the comparison of many: as `predict_plan`, but by the closed form if states move, because a
    simulation of their lists takes seconds.

    Raises:
        ConfigError: as `predict_plan`.
    """
    problem = problem.run_by(plan)
    analytic = closed_form(plan, problem)
    if plan.follows_lists:
        return with_lists(analytic, plan, problem)
    return analytic if problem.machine.refined == NOT_REFINED else with_refined(analytic, plan, problem)


def closed_form(plan: Plan, problem: Problem) -> Prediction:
    """The prediction of a plan by the closed form, without instruction lists."""
    model, machine = problem.model, problem.machine
    families = prepare(plan, model, problem.graphs, problem.features, machine.load)
    return price(plan, model, families, machine, problem.features, problem.extrapolating)


def moves_states(plan: Plan) -> bool:
    """True if a plan must be simulated because its parameter groups step by themselves."""
    return not plan.follows_lists and any(stage.is_decoupled for stage in plan.stages)


def with_moved_states(analytic: Prediction, plan: Plan, problem: Problem) -> Prediction:
    """A prediction with all seconds scaled to the simulated step, and with the bytes that its lists hold.

    Raises:
        ConfigError: the plan uses a field that is not lowered yet.
    """
    simulated_steps: dict[int, SimulatedStep] = {}

    def step(micro_batches: int) -> float:
        simulated_steps[micro_batches] = simulate_step(plan.with_micro_batches(micro_batches), problem)
        return simulated_steps[micro_batches].simulation.step_seconds

    count, stages = plan.stages[0].gradient_accumulation_steps, len(plan.stages)
    scaled = _scaled(analytic, step_of_many(step, count, stages) / analytic.predicted.step_seconds)
    longest = simulated_steps[simulated_micro_batches(count, stages)]
    stages_with_bytes = (
        _with_kept(stage, longest, rank, problem)
        for stage, rank in zip(scaled.predicted.stages, longest.prices, strict=True)
    )
    return replace(scaled, predicted=replace(scaled.predicted, stages=tuple(stages_with_bytes)))


def with_refined(analytic: Prediction, plan: Plan, problem: Problem) -> Prediction:
    """A prediction with all seconds scaled by the effect of refined prices on its simulated step.

    Args:
        analytic: the closed-form prediction, without refined prices; its bytes are unchanged.
    """

    def step(at: Problem) -> float:
        count = plan.stages[0].gradient_accumulation_steps
        return step_of_many(
            lambda few: simulate_step(plan.with_micro_batches(few), at).simulation.step_seconds, count, len(plan.stages)
        )

    # In a ratio of two simulations differences between simulated and analytic steps cancel.
    return _scaled(analytic, step(problem) / step(problem.refined_by(NOT_REFINED)))


def _scaled(analytic: Prediction, scale: float) -> Prediction:
    """A prediction with all of its seconds multiplied by one factor."""
    predicted = analytic.predicted
    stages = (
        replace(
            stage,
            stable_seconds=stage.stable_seconds * scale,
            first_seconds=stage.first_seconds * scale,
            last_seconds=stage.last_seconds * scale,
            exposed_communication_seconds=stage.exposed_communication_seconds * scale,
        )
        for stage in predicted.stages
    )
    predicted = replace(
        predicted,
        step_seconds=predicted.step_seconds * scale,
        tokens_per_second_per_gpu=predicted.tokens_per_second_per_gpu / scale,
        model_tflops_per_gpu=predicted.model_tflops_per_gpu / scale,
        stages=tuple(stages),
    )
    breakdown = {name: seconds * scale for name, seconds in analytic.breakdown.items()}
    return replace(analytic, predicted=predicted, breakdown=breakdown, mfu=analytic.mfu / scale)


def _with_kept(analytic: PredictedStage, step: SimulatedStep, rank: int, problem: Problem) -> PredictedStage:
    """A stage with the bytes that its list holds. Temporaries of operators, and hidden states at its edges, are not in lists and
    remain those of the closed form."""
    prices, peaks = step.prices[rank], analytic.peak_bytes_by_category
    activations, passing = _kept_bytes(step.ran(rank), prices)
    fragmentation = problem.machine.fragmentation * (activations + peaks.temporaries)
    family, is_piped = prices.priced.family, len(prices.plan.stages) > 1
    edges = edge_bytes(family.boundary_bytes, family.in_flight[prices.column]) if is_piped else 0.0
    peaks = replace(
        peaks,
        activations=round(activations),
        communication=round(passing + float(edges)),
        fragmentation=round(fragmentation),
    )
    return replace(analytic, peak_bytes=sum(astuple(peaks)), peak_bytes_by_category=peaks)


def _kept_bytes(ran: Sequence[Ran], prices: StagePrices) -> tuple[float, float]:
    """Bytes of activations, and of buffers that pass through the device, at the time when their sum is largest.

    States that never move are left out, and so are the buffers of the head's passes.
    """
    changes: dict[float, NDArray[np.float64]] = defaultdict(lambda: np.zeros(2))
    standing = 0.0
    for name, start, end in intervals(ran):
        buffer = parse_buffer(name)
        if buffer.home is Home.DEVICE and buffer.role in STAYING:
            continue
        if buffer.role is BufferRole.ACTIVATIONS and buffer.subject == GroupKind.HEAD:
            # The head holds only a placeholder, during the whole step.
            standing = float(prices.priced.terms.saved[prices.row(GroupKind.HEAD), 0])
            continue
        passes_by = buffer.home is Home.MOVED or buffer.role is not BufferRole.ACTIVATIONS
        sized = prices.buffer_bytes(name) * np.array([not passes_by, passes_by])
        changes[start] += sized
        changes[end] -= sized
    held_bytes = np.cumsum([changes[time] for time in sorted(changes)], axis=0)
    activations, passing = held_bytes[held_bytes.sum(axis=1).argmax()] if len(held_bytes) else (0.0, 0.0)
    return standing + float(activations), float(passing)
