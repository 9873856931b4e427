"""Tests of the analytic cost of transfers between stages, against simulated lists, over a grid of pipelines of equal stages."""

from __future__ import annotations

import pytest

from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.dependencies import waiting_for
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.tuner.cost.interference import slowed_down
from moe_overlap.tuner.cost.pipeline import StageTimes, step_seconds, transfer_waits
from moe_overlap.tuner.cost.simulate.engine import simulate
from tests.unit.plan import plan_samples

FORWARD, BACKWARD, BESIDE = 1.0, 2.0, 0.15


def simulated(stages: int, virtual: int, micro_batches: int, one_way: float) -> float:
    """A chunk is one layer, whose seconds are those of attention."""
    plan = plan_samples.plan(stages * virtual, stages, virtual, micro_batches)
    lists = {rank: lower(plan, plan_samples.model("d" * stages * virtual), rank) for rank in range(stages)}
    if virtual == 1:
        lists = {rank: waiting_for(made, lambda i: i.kind == "point-to-point") for rank, made in lists.items()}

    def seconds(_: int, i: Instruction) -> float:
        if i.kind == "point-to-point":
            return one_way
        return {"attention": FORWARD, "backward": BACKWARD}.get(i.name.rpartition(".")[2], 0.0) * ("atten" in i.name)

    return simulate(lists, seconds, slowed_down(BESIDE)).step_seconds


def closed(stages: int, virtual: int, micro_batches: int, one_way: float) -> float:
    waits, filling = transfer_waits([one_way] * (stages - 1), virtual, BESIDE)
    times = [StageTimes(forward=virtual * FORWARD, backward=virtual * BACKWARD + wait) for wait in waits]
    return float(step_seconds(times, [micro_batches] * stages, virtual)) + filling


@pytest.mark.parametrize("one_way", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("micro_batches", [1, 4, 12])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_1f1b_waits_for_every_transfer(stages: int, micro_batches: int, one_way: float) -> None:
    """Exactly."""
    simulated_seconds = simulated(stages, 1, micro_batches, one_way)
    assert closed(stages, 1, micro_batches, one_way) == pytest.approx(simulated_seconds)


@pytest.mark.parametrize("one_way", [0.02, 0.1])
@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("virtual", [2, 4])
@pytest.mark.parametrize("stages", [2, 4])
def test_interleaving_hides_them_but_for_its_ends(stages: int, virtual: int, rounds: int, one_way: float) -> None:
    """Within 1 % of the step, and four transfers."""
    simulated_seconds = simulated(stages, virtual, stages * rounds, one_way)
    found = closed(stages, virtual, stages * rounds, one_way)
    assert found == pytest.approx(simulated_seconds, rel=0.01)
    assert found == pytest.approx(simulated_seconds, abs=4 * one_way)
    bare = (stages * rounds * virtual + stages - 1) * (FORWARD + BACKWARD)
    assert simulated_seconds > bare
