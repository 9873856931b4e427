"""The prediction of a plan, and which of the ways to compute the seconds of a step gives it.

Error: against the simulated whole list, from which all other ways are derived (of predictions against measured steps
`expected_error.py` tells). Cost: CPU milliseconds of one step, GPT-7B in four stages with 64 micro-batches.

    way                                       error of a step                             cost    who asks
    closed form of one plan                   states stay: none where stages are equal,      6    predict, where nothing overlaps
      analytic.py                             4 % where not; states move: 5 % in the             or moves; all others for bytes
                                              mean, 15 % at most                                 and the breakdown
    closed form of many plans                 the same seconds                           <0.01    searches of uniform plans, and
      search/uniform_cost.py                                                                     of stages
    lower bounds                              never above the closed form                <0.01    searches, to prune
      search/bounds.py, part_tables.py
    optimistic form of overlap                may be above or below                      <0.01    searches: which layouts get
      search/hidden.py                                                                           their overlap decided
    simulated range of operators              that of the range alone                       <1    the number of partitions
      search/layer/partition_pipeline.py
    simulated compressed list                 1e-6; compress.py names what is lost          50    predict, where lists overlap;
      simulate/compress.py                                                                       order of a search's best plans
    simulated whole list                      none                                         900    predict, where states move or
      simulate/step.py                                                                           stages are of unlike shape

1. A plan without overlap whose states stay where they are: the closed form is the answer.
2. Stages that overlap by their own lists, or are of unlike shape: the step of the simulated lists.
3. Parameter groups that step by themselves (ZeRO 2 and 3, offloading): step and bytes of the whole lists, of as many
   micro-batches as tell the rest. The closed form (moved_states.py) only orders candidates; its bytes are 20 % below to 40 %
   above those of the lists (tests/unit/tuner/cost/test_cost_corners.py).
4. A machine with refined prices: the closed form knows none, and is scaled as they scale the simulated step.
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
    played_micro_batches,
    simulate_step,
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
    """Seconds and bytes of a plan for comparing many of them: as `predict_plan`, but by closed form where states move, as
    simulating those lists takes seconds each.

    Raises:
        ConfigError: as `predict_plan`.
    """
    problem = problem.run_by(plan)
    analytic = closed_form(plan, problem)
    if plan.follows_lists:
        return with_lists(analytic, plan, problem)
    return analytic if problem.machine.refined == NOT_REFINED else with_refined(analytic, plan, problem)


def closed_form(plan: Plan, problem: Problem) -> Prediction:
    """The prediction of a plan without any list."""
    model, machine = problem.model, problem.machine
    families = prepare(plan, model, problem.graphs, problem.features, machine.load)
    return price(plan, model, families, machine, problem.features, problem.extrapolating)


def moves_states(plan: Plan) -> bool:
    """Whether predictions of a plan are those of its lists because parameter groups step by themselves."""
    return not plan.follows_lists and any(stage.is_decoupled for stage in plan.stages)


def with_moved_states(closed: Prediction, plan: Plan, problem: Problem) -> Prediction:
    """A prediction with the seconds of simulated lists, all scaled alike, and with the bytes that those keep.

    Raises:
        ConfigError: the plan uses a field that is not lowered yet.
    """
    played: dict[int, SimulatedStep] = {}

    def step(micro_batches: int) -> float:
        played[micro_batches] = simulate_step(plan.with_micro_batches(micro_batches), problem)
        return played[micro_batches].simulation.step_seconds

    count, stages = plan.stages[0].gradient_accumulation_steps, len(plan.stages)
    scaled = _scaled(closed, step_of_many(step, count, stages) / closed.predicted.step_seconds)
    longest = played[played_micro_batches(count, stages)]
    kept = (
        _with_kept(stage, longest, rank, problem)
        for stage, rank in zip(scaled.predicted.stages, longest.prices, strict=True)
    )
    return replace(scaled, predicted=replace(scaled.predicted, stages=tuple(kept)))


def with_refined(closed: Prediction, plan: Plan, problem: Problem) -> Prediction:
    """A prediction whose seconds are scaled as refined prices scale its simulated step, all alike.

    Args:
        closed: the analytic one, which knows no refined prices; its bytes stay.
    """

    def step(at: Problem) -> float:
        count = plan.stages[0].gradient_accumulation_steps
        return step_of_many(
            lambda few: simulate_step(plan.with_micro_batches(few), at).simulation.step_seconds, count, len(plan.stages)
        )

    # A ratio of two simulations: what simulated and analytic steps see differently cancels.
    return _scaled(closed, step(problem) / step(problem.refined_by(NOT_REFINED)))


def _scaled(closed: Prediction, scale: float) -> Prediction:
    """A prediction with all of its seconds scaled alike."""
    predicted = closed.predicted
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
    breakdown = {name: seconds * scale for name, seconds in closed.breakdown.items()}
    return replace(closed, predicted=predicted, breakdown=breakdown, mfu=closed.mfu / scale)


def _with_kept(closed: PredictedStage, step: SimulatedStep, rank: int, problem: Problem) -> PredictedStage:
    """A stage with the bytes that its list keeps; what operators hold while they run, and hidden states at its edges, are no
    part of a list and stay as they are."""
    prices, peaks = step.prices[rank], closed.peak_bytes_by_category
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
    return replace(closed, peak_bytes=sum(astuple(peaks)), peak_bytes_by_category=peaks)


def _kept_bytes(ran: Sequence[Ran], prices: StagePrices) -> tuple[float, float]:
    """Bytes of activations, and of what is on the device for a while, at the time when both together are most.

    States that are never elsewhere are left out, and so is what the head keeps while it works.
    """
    changes: dict[float, NDArray[np.float64]] = defaultdict(lambda: np.zeros(2))
    standing = 0.0
    for name, start, end in intervals(ran):
        buffer = parse_buffer(name)
        if buffer.home is Home.DEVICE and buffer.role in STAYING:
            continue
        if buffer.role is BufferRole.ACTIVATIONS and buffer.subject == GroupKind.HEAD:
            # Of the head a placeholder alone stays, all the time.
            standing = float(prices.priced.terms.saved[prices.row(GroupKind.HEAD), 0])
            continue
        passes_by = buffer.home is Home.MOVED or buffer.role is not BufferRole.ACTIVATIONS
        sized = prices.buffer_bytes(name) * np.array([not passes_by, passes_by])
        changes[start] += sized
        changes[end] -= sized
    kept = np.cumsum([changes[time] for time in sorted(changes)], axis=0)
    activations, passing = kept[kept.sum(axis=1).argmax()] if len(kept) else (0.0, 0.0)
    return standing + float(activations), float(passing)
