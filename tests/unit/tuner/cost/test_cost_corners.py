"""The closed form of a stage against simulated instruction lists, over corners of ZeRO, offloading, recomputation and schedule.

The list is the truth. Of seconds the whole step is compared, of bytes what a list keeps: states, activations, and what of both is
on the device for a while; what an operator holds while it runs is no part of a list.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import pytest

from moe_overlap.api import problem_of
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.plan.instructions import BufferRole, parse_buffer
from moe_overlap.plan.operators import GroupKind
from moe_overlap.plan.plan import Offload, Plan, Recompute, StagePlan, Tile, Transfer
from moe_overlap.tuner.cost.analytic import prepare, price
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.prediction import closed_form, moves_states, predict_plan
from moe_overlap.tuner.cost.simulate.memory import intervals, live_bytes
from moe_overlap.tuner.cost.simulate.step import simulate_step
from moe_overlap.tuner.problem import Problem
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, JOB, by_hand

SHARES = (0.0, 0.5, 1.0)
RECOMPUTED = ("none", "half", "full")


@dataclass(frozen=True, kw_only=True)
class Corner:
    """A plan by what it decides; shares of weights, gradients, optimizer states, activations."""

    zero_level: int
    offload: tuple[float, float, float, float]
    recompute: str = "none"
    interleaved: bool = False
    unequal: bool = False
    """The second stage has half as many layers, and all of its states on the device."""
    slow_host: bool = False
    """L4, whose copies take long and disturb the rest a lot (as measured), more layers and four times as many micro-batches."""
    stages: int = 2
    per_stage: int = 3
    """Micro-batches of a step for each stage."""

    @property
    def problem(self) -> Problem:
        """The job on the machine."""
        return problem(self.interleaved, self.slow_host, self.stages, self.per_stage)


@cache
def problem(interleaved: bool, slow_host: bool = False, stages: int = 2, per_stage: int = 3) -> Problem:
    gpu, gpus, layers, batch = "H100", 16 * stages, 4 * stages, 16 * stages * per_stage
    if slow_host:
        gpu, gpus, layers, batch = "L4", 8, 16, 96
    words = f"--num-layers {layers} --pipeline-model-parallel-size {stages} --global-batch-size {batch}"
    words += " --expert-model-parallel-size 4"
    words += f" --num-layers-per-virtual-pipeline-stage {layers // stages // 2}" if interleaved else ""
    constants = replace(CONSTANTS, gpus={gpu: CONSTANTS.gpus["H100"]})
    return problem_of([*JOB, *words.split()], shipped_cluster(gpu, gpus), {"graphs": by_hand, "constants": constants})


def plan_of(corner: Corner) -> Plan:
    plan = corner.problem.plan
    weights, gradients, optimizer, activations = corner.offload
    offload = Offload(weights=weights, gradients=gradients, optimizer=optimizer, activations=activations)
    stages: list[StagePlan] = []
    assert corner.stages == 2 or not corner.unequal
    for index, stage in enumerate(plan.stages):
        if corner.unequal:
            cuts = [(0, 4), (4, 5), (5, 7), (7, 8)] if corner.interleaved else [(0, 5), (5, 8)]
            times = max(end for of_stage in plan.stages for _, end in of_stage.chunks) // 8
            cuts = [(first * times, end * times) for first, end in cuts]
            stage = replace(stage, chunks=tuple(cuts[index :: len(plan.stages)]))
        layers = max(last - first for first, last in stage.chunks)
        again = {"none": 0, "half": max(1, layers // 2), "full": layers}[corner.recompute]
        stages.append(
            replace(
                stage,
                zero_level=corner.zero_level,
                offload=Offload() if corner.unequal and index else offload,
                recompute=Recompute(layers=again, granularity="full") if again else Recompute(),
            )
        )
    return replace(plan, stages=tuple(stages))


def errors(corner: Corner) -> tuple[float, float]:
    """By how much the closed form exceeds the list: seconds of the step, and the worst stage's bytes, as a share of all."""
    plan, here = plan_of(corner), corner.problem
    families = prepare(plan, here.model, here.graphs, here.features, here.machine.load)
    closed = price(plan, here.model, families, here.machine, here.features).predicted
    listed = simulate_step(plan, here)
    seconds = closed.step_seconds / listed.simulation.step_seconds - 1
    edge = 2.0 * families[0].boundary_bytes
    bytes_ = []
    for rank, stage in zip(listed.prices, closed.stages, strict=True):
        peaks = stage.peak_bytes_by_category
        sent = edge if stage is closed.stages[0] or corner.interleaved else 0.0
        working = peaks.temporaries + peaks.fragmentation + sent
        kept = max(size for _, size in live_bytes(listed.ran(rank), partial(_layer_bytes, listed.prices[rank])))
        bytes_.append((stage.peak_bytes - working - kept) / (kept + working))
    return seconds, max(bytes_, key=abs)


def _layer_bytes(prices: StagePrices, name: str) -> float:
    """Bytes of a buffer. What the head keeps is there while the head works, and among the temporaries of the closed form."""
    buffer = parse_buffer(name)
    of_head = buffer.role is BufferRole.ACTIVATIONS and buffer.subject == GroupKind.HEAD
    return 0.0 if of_head else prices.buffer_bytes(name)


def corners() -> Iterator[Corner]:
    """All of them, in an order in which neighbours differ in many respects."""
    shapes = list(itertools.product(RECOMPUTED, (False, True), (False, True)))
    for zero_level, offload in itertools.product(range(4), itertools.product(SHARES, repeat=4)):
        for recompute, interleaved, unequal in shapes:
            yield Corner(
                zero_level=zero_level, offload=offload, recompute=recompute, interleaved=interleaved, unequal=unequal
            )


ORDERED = 0.2
"""Share of a step by which the closed form of a plan that moves states may be off: it orders candidates, lists answer."""
TRIED = {
    "states whole on every rank": Corner(zero_level=0, offload=(0, 0, 1, 0)),
    "gradients in shards": Corner(zero_level=2, offload=(0, 1, 0, 0)),
    "weights that stay between passes": Corner(zero_level=1, offload=(1, 0, 0, 0)),
    "activations": Corner(zero_level=1, offload=(0, 0, 0, 1)),
    "gathered for each use": Corner(zero_level=3, offload=(0, 0, 0, 0)),
    "reduced for each use": Corner(zero_level=2, offload=(0, 0, 0, 0)),
    "halves": Corner(zero_level=1, offload=(0.5, 0.5, 0.5, 0.5)),
    "recomputed": Corner(zero_level=3, offload=(0, 0, 0, 1), recompute="full"),
    "interleaved": Corner(zero_level=0, offload=(0.5, 0.5, 1, 0.5), interleaved=True),
    "unequal": Corner(zero_level=2, offload=(0.5, 0, 1, 0), interleaved=True, unequal=True),
    "slow host": Corner(zero_level=2, offload=(0, 0, 1, 0), slow_host=True),
}


@pytest.mark.parametrize("name", TRIED)
def test_the_closed_form_is_near_enough_to_order_plans(name: str) -> None:
    seconds, bytes_ = errors(TRIED[name])
    assert abs(seconds) < ORDERED and -0.2 < bytes_ < 0.4


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("unequal", [False, True])
def test_plans_whose_states_stay_are_priced_as_their_lists(interleaved: bool, unequal: bool) -> None:
    seconds, bytes_ = errors(Corner(zero_level=1, offload=(0, 0, 0, 0), interleaved=interleaved, unequal=unequal))
    assert abs(seconds) < 0.015 and abs(bytes_) < 0.01


@pytest.mark.parametrize("corner", TRIED.values(), ids=TRIED)
def test_answers_are_those_of_the_list(corner: Corner) -> None:
    seconds, bytes_ = apart_from_list(corner)
    # Where nothing moves the closed form is the answer.
    assert seconds < (1e-9 if moves_states(plan_of(corner)) else 0.003) and bytes_ <= 8


def apart_from_list(corner: Corner) -> tuple[float, float]:
    """How far a prediction is from the list: seconds as a share of the step, and the most bytes of a stage.

    Bytes of all that the list keeps, and of what is on the device for a while when that is most.
    """
    plan, here = plan_of(corner), corner.problem
    listed, predicted = simulate_step(plan, here), predict_plan(plan, here).predicted
    apart = []
    for rank, stage in zip(listed.prices, predicted.stages, strict=True):
        peaks = stage.peak_bytes_by_category
        sent = 2.0 * listed.prices[rank].priced.family.boundary_bytes
        sent *= stage is predicted.stages[0] or corner.interleaved
        ran, size_of = listed.ran(rank), partial(_layer_bytes, listed.prices[rank])
        when, kept = max(live_bytes(ran, size_of), key=lambda point: point[1])
        apart.append(abs(stage.peak_bytes - peaks.temporaries - peaks.fragmentation - sent - kept))
        passing = ("moved.", "weights.", "dweights.")
        there = (name for name, start, end in intervals(ran) if start <= when < end and name.startswith(passing))
        apart.append(abs(peaks.communication - sent - sum(map(size_of, there))))
    return abs(predicted.step_seconds / listed.simulation.step_seconds - 1.0), max(apart)


def test_unlike_stages_have_their_own_micro_batches_and_boundaries() -> None:
    """A second stage that takes two samples at a time, half as often; the closed form against all ranks' lists."""
    words = (
        "--pipeline-model-parallel-size 2 --micro-batch-size 1 --expert-model-parallel-size 4 --global-batch-size 64"
    )
    options = {"graphs": by_hand, "constants": CONSTANTS}
    here = problem_of([*JOB, *words.split()], shipped_cluster("H100", 8), options)
    first, second = here.plan.stages
    second = replace(second, micro_batch_size=2, gradient_accumulation_steps=8)
    tiles = (
        Tile(source=sample % 4, target=4 + sample // 2, batch=(sample, sample + 1), sequence=(0, 4096))
        for sample in range(8)
    )
    transfer = Transfer(from_stage=0, to_stage=1, tiles=tuple(tiles))
    plan = replace(here.plan, stages=(first, second), transfers=(transfer,))
    families = prepare(plan, here.model, here.graphs, here.features)
    closed = price(plan, here.model, families, here.machine, here.features).predicted.step_seconds
    assert closed == pytest.approx(simulate_step(plan, here).simulation.step_seconds, rel=0.05)


def in_turn() -> list[Corner]:
    """Every ZeRO level with every four ratios, each under one of the twelve shapes in turn."""
    shapes = 12
    chosen = [corner for place, corner in enumerate(corners()) if place % shapes == place // shapes * 5 % shapes]
    assert len({(corner.recompute, corner.interleaved, corner.unequal) for corner in chosen}) == shapes
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("every", [pytest.param(5, marks=pytest.mark.sweep), 17])
def test_answers_in_corners_are_those_of_the_list(every: int) -> None:
    found = [apart_from_list(corner) for corner in in_turn()[::every] if moves_states(plan_of(corner))]
    assert len(found) > 300 / every
    assert max(seconds for seconds, _ in found) < 1e-9 and max(bytes_ for _, bytes_ in found) <= 8


@pytest.mark.slow
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.sweep), 6])
def test_a_twelfth_of_all_corners(every: int) -> None:
    """What searches order candidates by: six micro-batches on two stages, so that the ends of a step are half of it."""
    found = np.array([errors(corner) for corner in in_turn()[::every]])
    seconds, bytes_ = found.T
    assert np.abs(seconds).max() < ORDERED and np.abs(seconds).mean() < 0.06
    assert bytes_.min() > -0.2 and bytes_.max() < 0.45 and np.abs(bytes_).mean() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("every", [pytest.param(13, marks=pytest.mark.sweep), 54])
def test_corners_of_a_slow_host(every: int) -> None:
    """On L4 with four times as many micro-batches, where copies disturb the rest a lot."""
    seconds = np.abs([errors(replace(corner, slow_host=True))[0] for corner in in_turn()[3::every]])
    assert len(seconds) > 300 // every and seconds.mean() < 0.1 and seconds.max() < 2 * ORDERED


@pytest.mark.parametrize("layers", [(3, 5), (5, 3)], ids=["long behind", "long in front"])
def test_weights_that_no_pass_hides_are_gathered_behind_the_update(layers: tuple[int, int]) -> None:
    """As lists and Megatron-LM do. In front of a stage's first pass they would cost nothing where it waits for that: -2.1 %."""
    words = [word for word in JOB if word != "--overlap-param-gather"]
    words += "--num-layers 8 --global-batch-size 96 --expert-model-parallel-size 4".split()
    here = problem_of(words, shipped_cluster("H100", 32), {"graphs": by_hand, "constants": CONSTANTS})
    first, second = here.plan.stages
    stages = replace(first, chunks=((0, layers[0]),)), replace(second, chunks=((layers[0], 8),))
    plan = replace(here.plan, stages=stages)
    closed, listed = closed_form(plan, here), simulate_step(plan, here)
    assert closed.predicted.step_seconds == pytest.approx(listed.simulation.step_seconds, rel=0.004)
    # They are communication of data ranks, and no part of the optimizer's seconds.
    gathered, whole = replace(here.features, overlap_param_gather=True), closed.breakdown
    under_passes = closed_form(plan, replace(here, features=gathered)).breakdown
    assert whole["optimizer_seconds"] == pytest.approx(under_passes["optimizer_seconds"])
    assert whole["exposed_data_seconds"] > 1.5 * under_passes["exposed_data_seconds"]
    assert sum(whole.values()) == pytest.approx(closed.predicted.step_seconds)
