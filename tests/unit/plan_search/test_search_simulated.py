"""Simulated steps of searched plans: uniform plans drawn at random are lowered, and their simulation is near their prediction."""

from __future__ import annotations

import dataclasses
import random
import time
from functools import partial

import pytest

from moe_overlap.api import problem_of
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.plan import Transfer
from moe_overlap.plan_search import finalists
from moe_overlap.plan_search.finalists import (
    MOVED,
    SIMULATED,
    UNLIKE,
    in_order,
    simulated_finalists,
    simulated_until_ahead,
)
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.results import APART, Finalist
from moe_overlap.plan_search.search import search_plan
from moe_overlap.report.search import search_json
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.prediction import predict_plan
from moe_overlap.tuner.cost.simulate.step import listed_seconds, simulate_step
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.search.space import MemoryChoice
from tests.unit.plan_search.test_plan_search import H100, OPTIONS, SMALL, searched
from tests.unit.tuner.search.test_search_uniform import case_of, graphs_of
from tests.validation.golden_graphs import golden_graphs

ENOUGH = 8
"""Micro-batches for each stage behind which filling and draining a pipeline are a small part of a step."""


@pytest.mark.parametrize(
    ("layers", "gpu", "network"), [("6", "H100", 50.0), ("8", "A100", 25.0), ("6", "H100", 5.0), ("12", "B200", 50.0)]
)
def test_uniform_plans_drawn_at_random_are_simulated_as_predicted(layers: str, gpu: str, network: float) -> None:
    """Within a hundredth where stages are equal and micro-batches many; no plan is further away than the search counts on.

    With few micro-batches, or chunks of unlike sizes, a pipeline fills otherwise than the analytic cost says.
    """
    words = ("--global-batch-size", "64", "--num-layers", layers)
    case, draw = case_of(*words, gpu=gpu, network_gb_per_s=network), random.Random(f"{layers} {gpu} {network}")
    close = 0
    for layout in draw.sample(case.sound, 24):
        memory = MemoryChoice(layers=draw.choice((0, 1)))
        plan = case.plan(layout, memory)
        problem = Problem(
            model=case.model,
            plan=plan,
            graphs=graphs_of(plan, case.model),
            features=case.task.features,
            machine=case.task.machine,
        )
        predicted, simulated_seconds = predict_plan(plan, problem).predicted.step_seconds, listed_seconds(plan, problem)
        is_equal = case.model.num_layers % (layout.pipeline * layout.virtual) == 0
        many = plan.stages[0].gradient_accumulation_steps >= ENOUGH * layout.pipeline
        assert simulated_seconds == pytest.approx(predicted, rel=APART if is_equal and many else SIMULATED), layout.name
        close += is_equal and many
    assert close >= 3


def test_processes_that_share_the_simulations_answer_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = searched("megatron-lm")
    bare = [dataclasses.replace(each, simulated=None) for each in (found.chosen, *found.others)]
    alone = simulated_finalists(bare)
    assert len({each.simulated for each in alone} - {None}) > 2
    own: list[Finalist] = []
    monkeypatch.setattr(
        finalists, "listed_seconds", lambda plan, problem: own.append(plan) or listed_seconds(plan, problem)
    )
    shared = simulated_finalists(bare, jobs=2)
    assert [each.simulated for each in shared] == [each.simulated for each in alone]
    assert 0 < len(own) < sum(each.simulated is not None for each in alone), "the other process has its share"


def test_emitted_plans_are_simulated_as_predicted() -> None:
    """Every ranked plan lowers without error; the JSON says its simulated step."""
    found = searched("megatron-lm")
    finalists = (found.chosen, *found.others)
    near = min(finalist.seconds for finalist in finalists) * (1.0 + SIMULATED)
    for finalist in finalists:
        assert (finalist.simulated is not None) == (finalist.seconds <= near)
        simulated = listed_seconds(finalist.plan, finalist.problem)
        assert simulated == pytest.approx(finalist.seconds, rel=SIMULATED)
        if finalist.simulated is not None:
            assert finalist.simulated_seconds == pytest.approx(simulated, rel=1e-9)
            assert finalist.is_apart == (abs(simulated / finalist.seconds - 1.0) > APART)
    values = search_json(found)
    assert values["simulated_step_seconds"] == found.chosen.simulated_seconds
    assert [other["simulated_step_seconds"] is None for other in values["runners_up"]] == [
        other.simulated is None for other in found.others
    ]


def test_simulated_steps_order_the_plans() -> None:
    """The plan whose simulated step is shorter leads, although its prediction is longer."""
    chosen = searched("megatron-lm").chosen

    def finalist(name: str, slower: float, simulated: float | None) -> Finalist:
        predicted = chosen.prediction.predicted
        predicted = dataclasses.replace(predicted, step_seconds=(1.0 + slower) * predicted.step_seconds)
        prediction = dataclasses.replace(chosen.prediction, predicted=predicted)
        return dataclasses.replace(chosen, name=name, prediction=prediction, simulated=simulated)

    plans = [finalist("predicted", 0.0, 1.05), finalist("simulated", 0.02, 1.0), finalist("far", 0.08, None)]
    assert [plan.name for plan in in_order(plans)] == ["simulated", "predicted", "far"]
    assert all(plan.simulated is None for plan in simulated_finalists([finalist("late", 0.0, None)], time.monotonic()))


def test_no_prediction_leads_that_another_simulated_step_has_put_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed forms of plans that keep states on the host may be too short: the fastest by prediction are simulated until one of
    them is as fast as all others are predicted to be, and what was not simulated never leads."""
    chosen = dataclasses.replace(searched("megatron-lm").chosen, simulated=None)
    whole = chosen.prediction.predicted.step_seconds
    simulated_seconds = {"short": 1.3, "even": 1.1, "middle": 1.2, "long": 1.0}
    asked: list[str] = []

    def finalist(name: str, share: float) -> Finalist:
        predicted = dataclasses.replace(chosen.prediction.predicted, step_seconds=share * whole)
        prediction = dataclasses.replace(chosen.prediction, predicted=predicted)
        problem = dataclasses.replace(chosen.problem)
        names[id(problem)] = name
        return dataclasses.replace(chosen, name=name, prediction=prediction, problem=problem)

    def listed(plan: object, problem: Problem) -> float:
        asked.append(names[id(problem)])
        return simulated_seconds[asked[-1]] * whole

    names: dict[int, str] = {}
    monkeypatch.setattr("moe_overlap.plan_search.finalists.listed_seconds", listed)
    plans = [finalist("middle", 1.05), finalist("short", 1.0), finalist("long", 1.15), finalist("even", 1.04)]
    known = simulated_until_ahead(plans)
    assert asked == ["short", "even", "middle"], "the fourth is predicted to be slower than the second was simulated"
    assert [plan.name for plan in in_order(known)] == ["even", "middle", "short", "long"]
    asked.clear()
    assert in_order(simulated_until_ahead(plans, most=1))[0].name == "short", "predictions alone never lead"
    assert asked == ["short"]
    assert all(plan.simulated is None for plan in simulated_until_ahead(plans, time.monotonic()))


def test_plans_on_unlike_meshes_are_simulated_where_they_may_lead_and_not_shown_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their lists are those of all ranks: most of a search's time, if every such plan were simulated."""
    chosen = dataclasses.replace(searched("megatron-lm").chosen, simulated=None)
    asked: list[str] = []
    names: dict[int, str] = {}

    crossing = (Transfer(from_stage=0, to_stage=1, tiles=()),)

    def finalist(name: str, seconds: float, lacks_lists: bool) -> Finalist:
        plan = dataclasses.replace(chosen.plan, transfers=crossing if lacks_lists else ())
        problem = dataclasses.replace(chosen.problem, plan=plan)
        names[id(problem)] = name
        prediction = priced(seconds)
        return dataclasses.replace(
            chosen, name=name, problem=problem, prediction=prediction, lacks_lists=lacks_lists, simulated=None
        )

    def priced(seconds: float) -> Prediction:
        predicted = dataclasses.replace(chosen.prediction.predicted, step_seconds=seconds)
        return dataclasses.replace(chosen.prediction, predicted=predicted)

    def listed(plan: object, problem: Problem) -> Prediction:
        asked.append(names[id(problem)])
        return full if asked[-1] == "full" else priced(1.1)

    full = dataclasses.replace(priced(1.0), capacity_bytes=1)
    monkeypatch.setattr("moe_overlap.plan_search.finalists.predict_plan", listed)
    monkeypatch.setattr("moe_overlap.plan_search.finalists.listed_seconds", lambda plan, problem: 1.2)
    unlike = [finalist("full", 1.0, True), finalist("tiles", 1.01, True), finalist("slow", 1.15, True)]
    plans = [*unlike, finalist("alike", 1.02, False), finalist("late", 1.3, False)]
    known = simulated_until_ahead(plans)
    assert asked == ["full", "tiles"], "the third is predicted to be slower than the second was simulated"
    assert [plan.name for plan in known] == ["tiles", "alike", "late"]
    assert known[0].seconds == 1.1 and not any(plan.lacks_lists for plan in known)
    asked.clear()
    assert [plan.name for plan in simulated_until_ahead(plans, time.monotonic())] == ["alike", "late"] and not asked
    assert [plan.name for plan in simulated_until_ahead(unlike, time.monotonic())] == ["tiles"], "one is needed"
    with pytest.raises(ConfigError, match="no plan is left whose simulated lists fit"):
        simulated_until_ahead(unlike[:1])
    asked.clear()
    many = [finalist(f"tiles {number}", 1.0 + number / 1000, True) for number in range(5)]
    assert len(simulated_until_ahead(many)) == len(asked) == UNLIKE


def test_plans_whose_states_move_are_answered_by_their_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that do not fit by them are dropped, and behind them further ones are tried; what was not tried never leads."""
    chosen = dataclasses.replace(searched("megatron-lm").chosen, simulated=None)
    asked: list[str] = []
    names: dict[int, str] = {}

    def finalist(name: str, seconds: float, lacks_lists: bool = True) -> Finalist:
        problem = dataclasses.replace(chosen.problem)
        names[id(problem)] = name
        return dataclasses.replace(
            chosen, name=name, problem=problem, prediction=priced(seconds), lacks_lists=lacks_lists
        )

    def priced(seconds: float, **said: int) -> Prediction:
        predicted = dataclasses.replace(chosen.prediction.predicted, step_seconds=seconds)
        return dataclasses.replace(chosen.prediction, predicted=predicted, **said)

    def listed(plan: object, problem: Problem) -> Prediction:
        asked.append(names[id(problem)])
        return priced(1.0, capacity_bytes=1) if asked[-1].startswith("full") else priced(1.03)

    monkeypatch.setattr("moe_overlap.plan_search.finalists.predict_plan", listed)
    monkeypatch.setattr("moe_overlap.plan_search.finalists.listed_seconds", lambda plan, problem: 1.2)
    full = [finalist(f"full {number}", 1.0 + number / 1000) for number in range(3)]
    plans = [*full, finalist("fits", 1.2), finalist("resident", 1.21, lacks_lists=False), finalist("far", 1.9)]
    for search in (simulated_finalists, partial(simulated_until_ahead, most=2), partial(simulated_finalists, jobs=2)):
        asked.clear()
        known = search(plans)
        assert [plan.name for plan in known] == ["fits", "resident", "far"]
        assert [(plan.seconds, plan.simulated, plan.lacks_lists) for plan in known[::2]] == [
            (1.03, 1.0, False),
            (1.9, None, True),
        ]
        assert in_order(known)[0].name == "fits"
    with pytest.raises(ConfigError, match="no plan is left whose simulated lists fit"):
        simulated_finalists(full)
    with pytest.raises(ConfigError, match="no plan is left whose simulated lists fit"):
        simulated_until_ahead(full)
    # Closed forms of moved states are rough: up to MOVED behind the fastest simulated step their lists are asked, too.
    asked.clear()
    near = [finalist(name, 1.03 * (1.0 + MOVED) + more) for name, more in (("rough", -1e-3), ("beyond", 1e-3))]
    simulated_until_ahead([finalist("first", 1.0), *near])
    assert asked == ["first", "rough"]
    # Without time the closed form is the answer.
    asked.clear()
    for late in (simulated_finalists, simulated_until_ahead):
        assert [plan.name for plan in late(plans, time.monotonic())][:3] == ["full 0", "full 1", "full 2"] and not asked


def test_a_flex_dispatcher_is_searched_with_ranks_that_exchange_tokens() -> None:
    """megatron-core's flex dispatcher refuses one expert rank: such layouts are not even captured."""
    words = [*SMALL, "--moe-token-dispatcher-type", "flex", "--moe-enable-deepep", "--disable-bias-linear"]
    found = search_plan(words, H100, SearchSettings(target="megatron-lm"), **OPTIONS)
    for finalist in (found.chosen, *found.others):
        stage = finalist.plan.stages[0]
        assert stage.expert * stage.expert_tensor > 1


@pytest.mark.parametrize("words", [[], ["--recompute-granularity", "full", "--recompute-method", "block"]])
def test_prediction_layers_behind_the_embedding_are_simulated(words: list[str]) -> None:
    """The last stage reads a copy of the words, which steps with the prediction layers; and those are never recomputed."""
    flags = [*SMALL, "--mtp-num-layers", "1", "--pipeline-model-parallel-size", "2", *words]
    flags += ["--recompute-num-layers", "1"] if words else []
    problem = problem_of(flags, H100, {**OPTIONS, "graphs": golden_graphs})
    predicted = predict_plan(problem.plan, problem).predicted.step_seconds
    assert listed_seconds(problem.plan, problem) == pytest.approx(predicted, rel=0.05)
    ran = simulate_step(problem.plan, problem).ran(problem.plan.stages[1].devices.ranks[0])
    steps = {event.instruction.name: event.end - event.start for event in ran if event.instruction.kind == "optimizer"}
    assert steps["optimizer.embedding"] == 0.0 < steps["optimizer.mtp0"]
