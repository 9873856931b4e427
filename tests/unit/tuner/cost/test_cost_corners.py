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
from numpy.typing import NDArray

from moe_overlap.api import problem_of
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.plan.instructions import BufferRole, parse_buffer
from moe_overlap.plan.operators import GroupKind
from moe_overlap.plan.plan import Offload, Plan, Recompute, StagePlan, Tile, Transfer
from moe_overlap.tuner.cost import analytic
from moe_overlap.tuner.cost.analytic import prepare, price, price_family
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.links import LinkUse
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


NEAR, FAR = 0.01, 0.06
REPAIRED = {
    # Updates of the second stage go on beside its first passes, here and below (`interleaved`, `updates beside a few passes`).
    "states of ZeRO-0 are whole on every rank": (Corner(zero_level=0, offload=(0, 0, 1, 0)), 0.015, 0.04),
    "gradients of ZeRO-2 move in shards": (Corner(zero_level=2, offload=(0, 1, 0, 0)), NEAR, 0.03),
    "weights stay between passes": (Corner(zero_level=1, offload=(1, 0, 0, 0)), NEAR, 0.05),
    "head and embedding keep their activations": (Corner(zero_level=1, offload=(0, 0, 0, 1)), NEAR, FAR),
    "gathers share links with tokens": (Corner(zero_level=3, offload=(0, 0, 0, 0)), NEAR, 0.04),
    "transfers between stages share links with gathers": (
        Corner(zero_level=3, offload=(0.5, 1, 0, 1), recompute="full", interleaved=True),
        NEAR,
        0.01,
    ),
    "reductions go on under forward passes": (Corner(zero_level=2, offload=(0, 0, 0, 0)), NEAR, 0.05),
    "everything by halves": (Corner(zero_level=1, offload=(0.5, 0.5, 0.5, 0.5)), NEAR, 0.05),
    "recomputed": (Corner(zero_level=3, offload=(0, 0, 0, 1), recompute="full"), NEAR, 0.03),
    "unequal": (Corner(zero_level=0, offload=(0, 0, 1, 0), unequal=True), 0.004, 0.013),
    # Those passes wait for neither the one nor the other alone: copies of updates go on while the stage waits, and after.
    "interleaved": (Corner(zero_level=1, offload=(0, 0, 0.5, 0), interleaved=True), 0.023, FAR),
    "each chunk is entered with updates": (
        Corner(zero_level=0, offload=(0.5, 0, 0.5, 0), recompute="half", interleaved=True),
        NEAR,
        FAR,
    ),
    "forward passes ahead move activations alone": (
        Corner(zero_level=3, offload=(1, 0, 1, 1), unequal=True),
        NEAR,
        0.09,
    ),
    "the first backward pass fetches no gradients": (
        Corner(zero_level=1, offload=(1, 1, 0, 1), recompute="half", interleaved=True, unequal=True),
        0.011,
        0.1,
    ),
    "backward passes at the end move gradients alone": (
        Corner(zero_level=1, offload=(0, 0.5, 0, 0), recompute="half", interleaved=True),
        NEAR,
        FAR,
    ),
    # Copies that updates leave behind last for several of many passes, here and on the first of unequal stages.
    "updates beside a few passes of many": (Corner(zero_level=1, offload=(0, 0, 1, 0), slow_host=True), 0.02, 0.1),
    "updates of shards": (Corner(zero_level=2, offload=(0, 0, 1, 0), slow_host=True, unequal=True), 0.025, 0.03),
    "slowdowns that are read off a play overshoot": (
        Corner(zero_level=2, offload=(0.5, 0.5, 1, 0.5), slow_host=True),
        0.025,
        0.03,
    ),
    "what updates leave behind is gone when a gradient has been waited for": (
        Corner(zero_level=0, offload=(0, 0.5, 1, 0), recompute="full", unequal=True),
        0.004,
        NEAR,
    ),
    "behind its first passes the last stage waits no more": (
        Corner(zero_level=3, offload=(0, 0, 0, 1), recompute="half", interleaved=True),
        0.013,
        0.03,
    ),
    # The first stage has the most to do: it never waits for gradients, as peaks of bytes have it.
    "a layer beyond the fourth": (Corner(zero_level=1, offload=(0.5, 1, 0, 0.5), unequal=True), 0.006, 0.035),
    "the last passes come close upon each other": (
        Corner(zero_level=2, offload=(0.5, 0.5, 0, 0.5), recompute="full", interleaved=True),
        0.009,
        NEAR,
    ),
    "a backward pass that goes around was waited for": (
        Corner(zero_level=0, offload=(0.5, 0.5, 0, 1), recompute="full", interleaved=True),
        0.007,
        NEAR,
    ),
    "transfers share links with weights that are gathered ahead": (
        Corner(zero_level=3, offload=(0, 1, 0, 0), recompute="full", unequal=True),
        NEAR,
        NEAR,
    ),
    "a stage updates beside the last copies of the other": (
        Corner(zero_level=0, offload=(0, 0.5, 0.5, 0.5), recompute="half", unequal=True),
        NEAR,
        0.022,
    ),
    "updates of all chunks share the device with the first pass": (
        Corner(zero_level=0, offload=(0, 0, 0, 1), recompute="full", interleaved=True),
        0.008,
        NEAR,
    ),
    "gradients on their way hold up the next ones": (
        Corner(zero_level=1, offload=(0.5, 1, 0.5, 0.5), interleaved=True),
        0.008,
        0.07,
    ),
    "passes in a row are counted once": (
        Corner(zero_level=3, offload=(0.5, 1, 1, 0.5), recompute="half", interleaved=True),
        0.006,
        NEAR,
    ),
    "updated while others are waited for": (
        Corner(zero_level=0, offload=(1, 0.5, 1, 0.5), interleaved=True),
        0.008,
        0.07,
    ),
    "the last pass has not waited": (Corner(zero_level=0, offload=(0, 0, 0.5, 1), unequal=True), 0.006, NEAR),
    "states are fetched while a stage waits": (
        Corner(zero_level=1, offload=(1, 1, 1, 0.5), recompute="full"),
        0.007,
        NEAR,
    ),
    "the second forward pass is slow, too": (Corner(zero_level=0, offload=(0, 1, 0, 1), recompute="half"), 0.006, NEAR),
    "transfers go on beside the next collectives": (
        Corner(zero_level=3, offload=(0, 0.5, 0.5, 0), interleaved=True, unequal=True),
        NEAR,
        0.04,
    ),
    "the first round has short passes": (
        Corner(zero_level=3, offload=(0.5, 0, 0, 0), recompute="half", interleaved=True),
        0.006,
        NEAR,
    ),
    "the stage behind takes longer for its first pass in a row": (
        Corner(zero_level=0, offload=(0, 0.5, 0.5, 1), recompute="full", interleaved=True),
        0.009,
        NEAR,
    ),
    "a first stage that has not waited leaves more to copy": (
        Corner(zero_level=2, offload=(0.5, 0, 1, 0), interleaved=True, unequal=True),
        0.008,
        0.09,
    ),
    "what its last pass leaves counts once for all chunks": (
        Corner(zero_level=0, offload=(1, 1, 1, 0), recompute="half", interleaved=True),
        0.003,
        0.09,
    ),
    "uses and gathers slow down states that come for later updates": (
        Corner(zero_level=3, offload=(0, 1, 1, 0), interleaved=True, unequal=True),
        0.004,
        0.035,
    ),
    "an embedding leaves no activations": (
        Corner(zero_level=1, offload=(0, 0, 0, 1), recompute="half", interleaved=True, unequal=True),
        0.003,
        NEAR,
    ),
    "a use computes before it needs its gradient": (
        Corner(zero_level=1, offload=(0, 0.5, 0, 0.5), recompute="full", interleaved=True, unequal=True),
        0.003,
        NEAR,
    ),
    "a stage that has waited has updated before it goes on": (
        Corner(zero_level=2, offload=(0, 1, 0, 1), recompute="full", interleaved=True),
        0.004,
        NEAR,
    ),
    "uses slow down the gathers of what is updated": (
        Corner(zero_level=2, offload=(0, 0.5, 0.5, 0), recompute="half", interleaved=True),
        0.004,
        0.07,
    ),
    "in front of all uses states come before they are gathered": (
        Corner(zero_level=2, offload=(0.5, 0, 0.5, 0)),
        0.002,
        NEAR,
    ),
    "states come in the room that others leave": (
        Corner(zero_level=0, offload=(0.5, 0, 1, 0), recompute="full", unequal=True),
        0.007,
        1e-6,
    ),
    "nothing": (Corner(zero_level=1, offload=(0, 0, 0, 0)), NEAR, NEAR),
}
"""Corner, and how far closed form and list may be apart: seconds, bytes. Each was 0.5 to 84 % off in seconds, but the last."""


@pytest.mark.parametrize("name", REPAIRED)
def test_repaired_corners(name: str) -> None:
    corner, in_seconds, in_bytes = REPAIRED[name]
    seconds, bytes_ = errors(corner)
    assert abs(seconds) <= in_seconds and abs(bytes_) <= in_bytes


@pytest.mark.parametrize(
    "corner",
    [
        Corner(zero_level=1, offload=(0, 1, 0.5, 1), recompute="half"),
        Corner(zero_level=1, offload=(0.5, 1, 1, 1), recompute="full", interleaved=True),
        Corner(zero_level=1, offload=(1, 1, 0.5, 1), recompute="full", interleaved=True),
        Corner(zero_level=2, offload=(1, 0, 1, 1), recompute="half"),
        Corner(zero_level=1, offload=(0.5, 1, 0, 1), recompute="half"),
        Corner(zero_level=0, offload=(0, 0.5, 1, 0), interleaved=True, unequal=True),
        Corner(zero_level=1, offload=(1, 1, 0.5, 0)),
        Corner(zero_level=0, offload=(0.5, 1, 1, 0.5), recompute="full"),
    ],
    ids=[
        "gradients that leave",
        "through several chunks",
        "and weights that come",
        "shards of a stage that has waited",
        "gradients of a stage that has waited",
        "states that leave under passes of the next chunk",
        "what comes for backward passes that are waited for",
        "what comes for updates while a stage waits",
    ],
)
def test_peak_is_not_far_below_the_list(corner: Corner) -> None:
    """What is searched for should fit when it runs: these were 7 to 24 % below their lists."""
    assert errors(corner)[1] > (-0.03 if corner.offload[2] else -0.01)


@pytest.mark.parametrize("corner", [corner for corner, _, _ in REPAIRED.values()][::5])
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


def test_a_stage_in_the_middle_fetches_states_while_it_waits() -> None:
    """Those of two parts are there together when its first forward pass begins; it was 16 % below its list."""
    words = "--num-layers 16 --pipeline-model-parallel-size 4 --global-batch-size 96 --expert-model-parallel-size 4"
    here = problem_of([*JOB, *words.split()], shipped_cluster("H100", 32), {"graphs": by_hand, "constants": CONSTANTS})
    moved = Offload(weights=0.5, gradients=1.0, optimizer=1.0, activations=1.0)
    stages = tuple(replace(stage, offload=moved) for stage in here.plan.stages)
    plan = replace(here.plan, stages=stages)
    closed, listed = (tell(plan, here).predicted.stages[2].peak_bytes for tell in (closed_form, predict_plan))
    assert closed > 0.96 * listed


def test_last_backward_passes_hold_one_pass_fewer() -> None:
    """More gradients are on their way there, beside fewer activations: both in full would be 18 % above the list."""
    corner = Corner(zero_level=2, offload=(0.5, 0, 1, 0), interleaved=True, unequal=True)
    assert abs(errors(corner)[1]) < 0.1


def test_gathers_beside_tokens_on_another_link_cost_less() -> None:
    """ZeRO-3 with EP4 inside a node, whose tokens leave the network to the experts' gathers, as the list has it, too."""
    plan, here = plan_of(Corner(zero_level=3, offload=(0, 0, 0, 0))), problem(False)
    families = prepare(plan, here.model, here.graphs, here.features, here.machine.load)
    evaluator = price_family(plan, here.model, families[0], here.machine, here.features)
    assert evaluator.rates.token_use == LinkUse(1.0, 0.0)
    assert evaluator.rates.expert_use.domain < 1.0 == evaluator.rates.expert_use.network
    closed = price(plan, here.model, families, here.machine, here.features).predicted.step_seconds
    with pytest.MonkeyPatch.context() as one_link:
        one_link.setattr(analytic, "link_use", lambda *_: LinkUse())
        shared = price(plan, here.model, families, here.machine, here.features).predicted.step_seconds
    assert closed < 0.99 * shared


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


@pytest.mark.parametrize(
    ("corner", "apart"),
    [
        (Corner(zero_level=3, offload=(0, 0, 0, 0), interleaved=True), 0.012),
        (Corner(zero_level=2, offload=(0, 0, 0, 0), interleaved=True), 0.006),
        (Corner(zero_level=2, offload=(0, 1, 0, 0)), 0.006),
    ],
    ids=["beside gathers", "beside reductions", "passes that wait for them"],
)
def test_transfers_between_stages_add_to_a_step_what_they_add_to_its_list(corner: Corner, apart: float) -> None:
    """Shares of the step; on links without collectives of states transfers would take 1 to 3 % of it less."""
    plan, here = plan_of(corner), corner.problem

    def steps() -> NDArray[np.float64]:
        families = prepare(plan, here.model, here.graphs, here.features, here.machine.load)
        closed = price(plan, here.model, families, here.machine, here.features).predicted.step_seconds
        return np.array([closed, simulate_step(plan, here).simulation.step_seconds])

    whole = steps()
    with pytest.MonkeyPatch.context() as without:
        without.setattr(analytic, "boundary_seconds", lambda *_: 0.0)
        without.setattr(analytic, "point_to_point_seconds", lambda *_: 0.0)
        without.setattr(StagePrices, "transfer_seconds", lambda _: 0.0)
        closed, listed = whole / steps() - 1.0
    assert listed > 0.02 and abs(closed - listed) < apart


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
def test_a_twelfth_of_all_corners() -> None:
    """What searches price by. Most of `REPAIRED` are among these, so that they are better than all (`test_every_corner`).

    Equal stages under 1F1B are told apart. Causes of what is left, found by putting the list in the place of one part of the
    closed form at a time (seconds of passes; the longest chain of them; transfers that take nothing):
    - Interleaved stages of which one is the slowest (up to 1.3 % above): transfers that fill and drain the pipeline are
      added, though that stage never waits for one; and updates of parts one behind another are priced as if their jobs met at
      once. Adding transfers only to passes that wait is exact where all passes of a stage take as long, but half a per cent
      below the list in the mean: the formula knows the mean of a stage's passes.
    - Partial waits (below the list): copies that updates leave behind still slow down the first passes of the second
      stage, or hold up its last chunk, where these have waited for a short time; `pipeline.py` knows stages that have waited for
      all of them, and such that have not waited. Bytes of the stage that has less to do differ most.
    """
    chosen = in_turn()
    found = {corner: errors(corner) for corner in chosen}
    assert sum(abs(seconds) <= NEAR for seconds, _ in found.values()) >= 316
    for is_plain, middle, most in ((True, 0.003, 0.008), (False, 0.004, 0.0135)):
        seconds = np.abs([found[at][0] for at in chosen if (at.interleaved or at.unequal) != is_plain])
        assert np.median(seconds) < middle and seconds.max() < most
    bytes_ = np.array([error for _, error in found.values()])
    assert np.median(np.abs(bytes_)) < 0.02 and bytes_.min() > -0.086 and bytes_.max() < 0.22


@pytest.mark.slow
@pytest.mark.sweep
def test_every_corner() -> None:
    """All 3,888; those under 1F1B are told apart."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for corner in corners():
        seconds[corner.interleaved].append(errors(corner)[0])
    plain, interleaved = (np.abs(found) for found in seconds.values())
    assert len(plain) == len(interleaved) == 1944
    assert (plain <= NEAR).sum() >= 1932 and plain.max() < 0.015
    assert (interleaved <= NEAR).sum() >= 1846 and interleaved.max() < 0.0215


@pytest.mark.slow
@pytest.mark.sweep
def test_corners_of_a_slow_host() -> None:
    """Every thirteenth of those 324 on L4, where slowdowns decide more: the closed form errs by more there."""
    seconds = np.abs([errors(replace(corner, slow_host=True))[0] for corner in in_turn()[3::13]])
    assert len(seconds) == 25 and seconds.mean() < 0.0135 and seconds.max() < 0.034


@pytest.mark.slow
@pytest.mark.parametrize("every", [pytest.param(5, marks=pytest.mark.sweep), 20])
def test_errors_do_not_grow_with_micro_batches(every: int) -> None:
    """Four times as many: what errs in every one of them shows, and what errs at the ends of a step is a few milliseconds."""
    seconds = np.abs([errors(replace(corner, per_stage=12))[0] for corner in in_turn()[2::every]])
    assert len(seconds) > 300 / every and seconds.max() < 0.012 and np.median(seconds) < 0.0025


@pytest.mark.slow
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.sweep), 13])
def test_corners_of_four_stages(every: int) -> None:
    """Equal ones. Interleaved stages wait for each other in more ways than one chain of passes has: up to 4.5 % below the list.

    Answers are those of lists, also there; searches look at the lists of the best few.
    """
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for corner in in_turn()[::every]:
        if not corner.unequal:
            seconds[corner.interleaved].append(errors(replace(corner, stages=4))[0])
    plain, interleaved = (np.abs(found) for found in seconds.values())
    assert min(len(plain), len(interleaved)) >= 81 // every
    assert plain.max() < 0.0105 and np.median(plain) < 0.004 and interleaved.max() < 0.045
    if every == 1:
        assert (plain <= NEAR).sum() >= 78 and (interleaved <= NEAR).sum() >= 48


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
