"""A search on a machine that measures the operators of its best plans, where rates promise more than the machine keeps."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_overlap.describe.cluster import Cluster, load_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan_search import search as searching
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.search import search_plan
from moe_overlap.tuner.profile.database import Database, OperatorKey, work_of
from moe_overlap.tuner.search.solution import Status
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


class Searched:
    """Stands in for `SearchedPlans`."""

    def __init__(self, is_interrupted: bool = False, status: Status = Status.OPTIMAL) -> None:
        self.is_interrupted = is_interrupted
        self.uniform = SimpleNamespace(solution=SimpleNamespace(status=status))

    def interrupted(self) -> Searched:
        return Searched(is_interrupted=True)


NOTHING_FITS = ConfigError("the search", "", "no plan fits", "use more GPUs")


@pytest.mark.parametrize(
    ("second", "sizes", "seconds", "is_interrupted"),
    [
        (Searched(status=Status.TIME_LIMIT), (0, 1, 2), math.inf, False),
        (Searched(status=Status.TIME_LIMIT, is_interrupted=True), (0, 1, 2), math.inf, True),
        (KeyboardInterrupt(), (0, 1), math.inf, True),
        (NOTHING_FITS, (0, 1, 2), 1.0, False),
        (NOTHING_FITS, (0, 1, 1), math.inf, False),
    ],
)
def test_a_repeated_search_that_fails_keeps_the_last_complete_answer(
    second: Searched | BaseException,
    sizes: Sequence[int],
    seconds: float,
    is_interrupted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the deadline, at Ctrl-C, and where nothing fits although nothing new was measured.

    Args:
        sizes: operators that are measured before the first search and behind each.
        seconds: of the time limit; the second search ends later.
    """
    first, answers, measured, clock = Searched(), iter([None, second]), iter(sizes), iter([0.0, 2.0])

    def search(request: object) -> tuple[Searched, list[str]]:
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer or first, ["the second" if answer else "the first"]

    monkeypatch.setattr(searching, "_search_once", search)
    monkeypatch.setattr(searching, "_measured_operators", lambda cluster: next(measured))
    monkeypatch.setattr(searching.time, "monotonic", lambda: next(clock))
    request = SimpleNamespace(cluster=None, deadline=seconds)
    plans, finalists = searching._search_until_measured(request)  # type: ignore[arg-type]
    assert finalists == ["the first"] and plans.is_interrupted == is_interrupted
    assert (plans is first) == (not is_interrupted)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), NOTHING_FITS])
def test_a_first_search_that_fails_has_no_answer(failure: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(request: object) -> None:
        raise failure

    monkeypatch.setattr(searching, "_search_once", search)
    monkeypatch.setattr(searching, "_measured_operators", lambda cluster: 0)
    with pytest.raises(type(failure)):
        searching._search_until_measured(SimpleNamespace(cluster=None, deadline=math.inf))  # type: ignore[arg-type]
