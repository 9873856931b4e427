"""Counts that queue behind rows: measured or not, and which lists pay for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from test_cost_listed_step import BASE, CLUSTER, PAIRED, PARTS
from test_cost_predict import CONSTANTS, by_hand
from test_cost_simulate_step import STAGES

from moe_overlap.describe.cluster import Measured
from moe_overlap.predicting import task_of
from moe_overlap.tuner.cost.measured import COUNTS, QUEUED_COUNTS, queue_seconds
from moe_overlap.tuner.cost.simulate_step import simulate_step
from moe_overlap.tuner.profile.database import Database, Device, LinkKey


def count_seconds(words: str, queued: float) -> set[float]:
    """Of all exchanges of counts of a list."""
    task = task_of([*BASE, *words.split()], CLUSTER, {"graphs": by_hand, "constants": CONSTANTS})
    machine = dataclasses.replace(task.machine, queue_seconds=queued)
    step = simulate_step(task.job.plan, task.job.model, task.graphs, machine, task.features)
    (prices,) = step.prices.values()
    return {prices.seconds(i) for i in prices.made if i.name.endswith(".count")}


@pytest.mark.parametrize(
    ("words", "waits"),
    [
        (PARTS, True),
        (f"{PAIRED} --global-batch-size 256", True),
        ("--defer-weight-gradients", False),
    ],
)
def test_counts_wait_where_other_rows_may_be_on_their_way(words: str, waits: bool) -> None:
    (alone,), (queued,) = (count_seconds(f"{STAGES} 1 {words}", seconds) for seconds in (0.0, 0.5))
    assert queued - alone == pytest.approx(0.5 if waits else 0.0)


def test_what_a_database_says_of_counts(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "links.jsonl", Device("cpu", "here", 1, "2"))
    measured = Measured(database=str(database.path), device="cpu", latency_seconds=0.0, constants={})
    cluster = dataclasses.replace(CLUSTER, measured=measured)
    assert queue_seconds(CLUSTER) == queue_seconds(cluster) == 0.0, "not measured"
    database.add_link(LinkKey(COUNTS, "network", 2, 64), 0.25)
    assert queue_seconds(cluster) == 0.0, "half of it"
    database.add_link(LinkKey(QUEUED_COUNTS, "network", 2, 64), 1.0)
    assert queue_seconds(cluster) == 0.75
