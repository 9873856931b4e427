"""The closed form of a stage against simulated instruction lists, over the corners of ZeRO, offloading, recomputation and schedule.

The list is the truth. Of seconds the whole step is compared, of bytes what a list keeps: states, activations, and what of both is on
the device for a while; what an operator holds while it runs is no part of a list.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest

from moe_overlap.api import problem_of
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.plan.plan import Offload, Plan, Recompute, StagePlan
from moe_overlap.tuner.cost.analytic import prepare, price
from moe_overlap.tuner.cost.simulate.step import simulate_step
from moe_overlap.tuner.problem import Problem
from tests.unit.tuner.test_cost_predict import CONSTANTS, JOB, by_hand

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


@cache
def problem(interleaved: bool) -> Problem:
    words = "--num-layers 8 --pipeline-model-parallel-size 2 --global-batch-size 96 --expert-model-parallel-size 4"
    words += " --num-layers-per-virtual-pipeline-stage 2" if interleaved else ""
    cluster = shipped_cluster("H100", 32)
    return problem_of([*JOB, *words.split()], cluster, {"graphs": by_hand, "constants": CONSTANTS})


def plan_of(corner: Corner) -> Plan:
    plan = problem(corner.interleaved).plan
    weights, gradients, optimizer, activations = corner.offload
    offload = Offload(weights=weights, gradients=gradients, optimizer=optimizer, activations=activations)
    stages: list[StagePlan] = []
    for index, stage in enumerate(plan.stages):
        if corner.unequal:
            cuts = [(0, 4), (4, 5), (5, 7), (7, 8)] if corner.interleaved else [(0, 5), (5, 8)]
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
    """By how much the closed form exceeds the list: seconds of the step, and the worst stage's bytes, as shares of all it holds."""
    plan, here = plan_of(corner), problem(corner.interleaved)
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
        kept = max(size for _, size in listed.kept_bytes(rank))
        bytes_.append((stage.peak_bytes - working - kept) / (kept + working))
    return seconds, max(bytes_, key=abs)


def corners() -> Iterator[Corner]:
    """All of them, in an order in which neighbours differ in many respects."""
    shapes = list(itertools.product(RECOMPUTED, (False, True), (False, True)))
    for zero_level, offload in itertools.product(range(4), itertools.product(SHARES, repeat=4)):
        for recompute, interleaved, unequal in shapes:
            yield Corner(
                zero_level=zero_level, offload=offload, recompute=recompute, interleaved=interleaved, unequal=unequal
            )
