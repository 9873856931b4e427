"""How an answer changes with network, skew and memory, and the page of a search; on graphs written by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moe_overlap.api import problem_of
from moe_overlap.describe.cluster import GIB, shipped_cluster
from moe_overlap.plan_search.results import Finalist, PlanSearch
from moe_overlap.report.html import Report, Sensitivity, report_html
from moe_overlap.report.search_page import DOES_NOT_FIT, ON_FRONTIER, search_report
from moe_overlap.report.sensitivity import Competitor, memory_sensitivity, network_sensitivity, skew_sensitivity
from moe_overlap.tuner.cost.prediction import predict_plan
from moe_overlap.tuner.search.solution import Solution, Status
from moe_overlap.tuner.search.space import MemoryChoice, UniformLayout
from moe_overlap.tuner.search.uniform import RankedLayout, SearchCounts, UniformSearch
from tests.unit.report.test_report_html import Page
from tests.unit.tuner.cost.test_cost_predict import by_hand

ROOT = Path(__file__).resolve().parents[3]
WORDS = (f"@{ROOT / 'examples/mixtral-8x7b.args'}", "--num-layers", "8", "--global-batch-size", "64")
CLUSTER = shipped_cluster("H100", 64)
SPREAD = (
    "--expert-model-parallel-size",
    "8",
    "--pipeline-model-parallel-size",
    "1",
    "--tensor-model-parallel-size",
    "1",
)


@pytest.fixture(autouse=True)
def hand_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_overlap.api.cached_graphs", by_hand)


def competitor(name: str, *changed: str) -> Competitor:
    problem = problem_of([*WORDS, *changed], CLUSTER, {})
    return Competitor(name, problem.plan, problem)


def seconds(each: Competitor) -> float:
    return predict_plan(each.plan, each.problem).predicted.step_seconds


def test_a_slower_network_makes_no_step_faster_and_the_actual_point_is_the_prediction() -> None:
    plans = [competitor("pipeline"), competitor("spread", *SPREAD)]
    shown = network_sensitivity(plans)
    steps = [step for _, step, _ in shown.points]
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]
    assert shown.actual == 50.0
    (actual,) = [step for value, step, _ in shown.points if value == shown.actual]
    assert actual == min(map(seconds, plans))
    # The best of two is never slower than each alone.
    for alone in plans:
        for (_, both, _), (_, one, _) in zip(shown.points, network_sensitivity([alone]).points, strict=True):
            assert both <= one


def test_a_flip_is_named() -> None:
    plans = [competitor("pipeline"), competitor("spread", *SPREAD)]
    named = {value: name for value, _, name in network_sensitivity(plans).points}
    for value, name in named.items():
        alone = {each.name: dict_of(network_sensitivity([each]))[value] for each in plans}
        assert (name or "pipeline") == min(alone, key=lambda key: alone[key])


def dict_of(shown: Sensitivity) -> dict[float, float]:
    return {value: step for value, step, _ in shown.points}


def test_skewed_routing_costs_time() -> None:
    points = skew_sensitivity([competitor("pipeline")]).points
    assert [load for load, _, _ in points] == [1.0, 1.25, 1.5, 2.0]
    assert [step for _, step, _ in points] == sorted({step for _, step, _ in points})


def test_memory_chooses_from_the_frontier() -> None:
    """A plan fits if a tenth more than it needs does: 39 GiB do not fit into 40."""
    rows = [("large", 1.0, 70 * GIB), ("middle", 2.0, 50 * GIB), ("small", 3.0, 39 * GIB)]
    shown = memory_sensitivity(rows, 80 * GIB, 1.1, "large")
    assert shown.points == (
        (60.0, 2.0, "middle"),
        (80.0, 1.0, ""),
        (100.0, 1.0, ""),
        (120.0, 1.0, ""),
        (160.0, 1.0, ""),
    )
    assert shown.name == "memory of a GPU (at 40 GiB none of these plans fits)" and shown.actual == 80.0


def ranked(name_of: UniformLayout, seconds: float, needed: float) -> RankedLayout:
    return RankedLayout(layout=name_of, memory=MemoryChoice(), seconds=seconds, needed_bytes=needed)


def searched() -> tuple[PlanSearch, list[Competitor]]:
    layout = UniformLayout(tensor=2, context=1, expert=8, expert_tensor=1, pipeline=4, virtual=1, micro_batch=1)
    plans = [competitor(layout.name), competitor("spread", *SPREAD)]
    finalists = [
        Finalist(
            name=each.name,
            problem=each.problem,
            prediction=predict_plan(each.plan, each.problem),
            arguments=(),
            plan_arguments=(),
        )
        for each in plans
    ]
    best = ranked(layout, finalists[0].seconds, finalists[0].prediction.fullest.needed_bytes)
    small = ranked(dataclasses.replace(layout, tensor=4), 9.0, 5.0 * GIB)
    found = UniformSearch(
        solution=Solution(value=best, objective=best.seconds, bound=best.seconds, status=Status.OPTIMAL, seconds=0.1),
        ranked=(best,),
        smallest=small,
        frontier=(best, small),
        counts=SearchCounts(layouts=2, too_large=0, too_slow=0, not_reached=0, evaluated=2, fitting=2, stages=8),
    )
    search = PlanSearch(
        target="megatron-lm",
        space="recompute",
        cluster=CLUSTER,
        arguments=(),
        chosen=finalists[0],
        tuned=None,
        others=(finalists[1],),
        uniform=found,
        refused=(("TP16", "16 heads"),),
        baseline=None,
        dropped={},
        seconds=0.1,
    )
    return search, plans


def test_a_plan_of_the_frontier_that_is_too_large_does_not_fit() -> None:
    search, plans = searched()
    best, small = search.uniform.frontier
    room = search.prediction.available_bytes / search.prediction.memory.high
    for needed, note in ((room * 0.99, ON_FRONTIER), (room * 1.01, DOES_NOT_FIT)):
        uniform = dataclasses.replace(search.uniform, frontier=(best, dataclasses.replace(small, needed_bytes=needed)))
        content = search_report(dataclasses.replace(search, uniform=uniform), plans)
        assert content.candidates[2].note == note


def test_the_page_of_a_search() -> None:
    search, plans = searched()
    content: Report = search_report(search, plans, train_tokens=1e12)
    assert [row.name for row in content.candidates] == [
        search.chosen.name,
        "spread",
        search.uniform.frontier[1].name,
        "TP16",
    ]
    assert [row.is_chosen for row in content.candidates] == [True, False, False, False]
    assert content.candidates[2].note == ON_FRONTIER and content.candidates[3].note == "16 heads"
    assert [each.unit for each in content.sensitivities] == ["GB/s", "busiest over mean", "GiB"]
    page = Page(report_html(content))
    assert page.open == [] and page.loads == []
    assert len(page.tables["sensitivity-table-0"]) == 6
    assert content.answer.runners_up[0].name == "spread"
