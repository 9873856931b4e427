"""What exchanges cost beside their rows: from a database, and in the prices and steps of lists."""

from __future__ import annotations

import dataclasses

import pytest

from moe_overlap.api import problem_of
from moe_overlap.tuner.cost.interference import COUNTS, QUEUED_COUNTS, STARTS, AllToAllCosts, costs_of
from moe_overlap.tuner.cost.prediction import predict_plan
from moe_overlap.tuner.cost.simulate.step import simulate_step
from moe_overlap.tuner.profile.cluster_file import FittedLinks
from moe_overlap.tuner.profile.database import LinkKey
from tests.unit.tuner.cost.test_cost_listed_step import BASE, CLUSTER, PARTS
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, by_hand
from tests.unit.tuner.cost.test_cost_simulate_step import STAGES

FREE = FittedLinks(0.0, 1e30, 0.0)


def test_lists_pay_for_starts_and_counts() -> None:
    group = CLUSTER.groups[0]
    slow = dataclasses.replace(group, domain_gb_per_s=1.0, network_gb_per_s=1.0)
    cluster = dataclasses.replace(CLUSTER, groups=(slow,))
    task = problem_of([*BASE, *f"{STAGES} 1 {PARTS}".split()], cluster, {"graphs": by_hand, "constants": CONSTANTS})

    def step(costs: AllToAllCosts) -> tuple[float, float]:
        """Simulated instruction by instruction, and predicted from folded lists."""
        costly = dataclasses.replace(task, machine=dataclasses.replace(task.machine, exchanges=costs))
        whole = simulate_step(task.plan, costly)
        return whole.simulation.step_seconds, predict_plan(task.plan, costly).predicted.step_seconds

    free, counted, queued, started = (
        step(costs)
        for costs in (
            AllToAllCosts(FREE, 0.0, 0.0),
            AllToAllCosts(FREE, 0.5, 0.0),
            AllToAllCosts(FREE, 0.0, 0.5),
            AllToAllCosts(FittedLinks(0.5, 1e30, 0.0), 0.0, 0.0),
        )
    )
    for whole, folded in (free, counted, queued, started):
        assert folded == pytest.approx(whole, rel=1e-3)
    assert free[0] < queued[0] < counted[0] < started[0], (
        "not every count meets rows; dispatch and combine are started, too"
    )
    made = simulate_step(task.plan, task).prices[0].instructions
    exchanges = sum(i.channel.startswith("ep") for i in made)
    assert started[0] == pytest.approx(free[0] + 0.5 * exchanges, rel=0.2), "nothing runs beside a start"


def test_what_a_database_says() -> None:
    def key(kind: str, held: int) -> LinkKey:
        return LinkKey(kind, "network", 2, held)

    links = {key(STARTS, 200): 3.0, key(STARTS, 400): 4.0, key(COUNTS, 64): 0.25, key(QUEUED_COUNTS, 64): 1.0}
    costs = costs_of(links)
    assert costs is not None and (costs.count_seconds, costs.queue_seconds) == (0.25, 0.75)
    assert costs.starting.latency_seconds + 150 / costs.starting.bytes_per_second == pytest.approx(3.5), "half leaves"
    for kind in (STARTS, COUNTS, QUEUED_COUNTS):
        assert costs_of({key: taken for key, taken in links.items() if key.kind != kind}) is None
