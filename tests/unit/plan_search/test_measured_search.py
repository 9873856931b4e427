"""A search on a machine that measures the operators of its best plans, where rates promise more than the machine keeps."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from moe_overlap.describe.cluster import Cluster, load_cluster
from moe_overlap.plan_search import search as searching
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.search import search_plan
from moe_overlap.tuner.profile.database import Database, OperatorKey, work_of
from tests.unit.plan_search.test_plan_search import SMALL, by_hand
from tests.unit.tuner.profile.test_profile_links import measured_content

JOB = [*SMALL, "--global-batch-size", "4"]
SETTINGS = SearchSettings(has_baseline=False)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Two ranks, none of whose operators is measured yet; attention over B samples takes B times as long as its rate says."""
    (tmp_path / "here.json").write_text(json.dumps(measured_content(tmp_path / "here.measured.jsonl")))

    def measure(database: Database, keys: Sequence[OperatorKey], ranks: int) -> Database:
        for key in keys:
            if key not in database.operators:
                samples = key.shape[0] if key.kind == "attention" else 1
                database.add_operator(key, work_of(key) / 5e10 * samples)
        return database

    monkeypatch.setattr("moe_overlap.tuner.profile.lookup.fill", measure)
    return load_cluster(tmp_path / "here.json")


def test_a_second_search_of_the_machine_finds_nothing_better(machine: Cluster) -> None:
    """The rates rank micro-batches of two samples first; the first predictions show how long those take."""
    answer, again = (search_plan(JOB, machine, SETTINGS, graphs=by_hand) for _ in range(2))
    assert [(plan.name, plan.seconds) for plan in again.uniform.ranked] == [
        (plan.name, plan.seconds) for plan in answer.uniform.ranked
    ]
    assert again.chosen.name == answer.chosen.name and "DP only, micro-batch 1" in {plan.name for plan in answer.others}


def test_a_machine_that_measures_on_and_on_is_answered(machine: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, searches = itertools.count(), []
    once = searching._search_once
    monkeypatch.setattr(searching, "_measured_operators", lambda cluster: next(sizes))
    monkeypatch.setattr(searching, "_search_once", lambda asked: searches.append(asked) or once(asked))
    search_plan(JOB, machine, dataclasses.replace(SETTINGS, space="megatron"), graphs=by_hand)
    assert len(searches) == searching.MOST_SEARCHES
