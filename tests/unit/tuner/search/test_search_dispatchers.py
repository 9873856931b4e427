"""The search over dispatchers of tokens: against a search for each dispatcher, its bounds against all prices, and its flags."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.training.cli.arguments import expand_files
from megatron.training.cli.config import Config
from moe_overlap.api import predict, problem_of
from moe_overlap.commands.job_arguments import DISPATCHER, MOE
from moe_overlap.describe.cluster import GIB, Measured, shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription, expected_places
from moe_overlap.describe.readers.predicted_flags import grouped
from moe_overlap.plan.plan import Plan
from moe_overlap.plan_search import search as plan_search
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.search import search_plan
from moe_overlap.report.search import search_json, write_search
from moe_overlap.tuner.capture.cache import Flags
from moe_overlap.tuner.capture.graph import CapturedModel, CapturedPart, Op
from moe_overlap.tuner.cost.hardware import Dispatcher
from moe_overlap.tuner.search.dispatchers import (
    CALIBRATED,
    FIRST,
    LIBRARIES,
    NAMES,
    DispatcherOutcome,
    FlooredCosts,
    Side,
    dispatchers_of,
    floors_of,
    runs,
    search_dispatchers,
    uncalibrated,
)
from moe_overlap.tuner.search.paired import CostsOfBoth, with_paired
from moe_overlap.tuner.search.space import UniformLayout
from moe_overlap.tuner.search.uniform import UniformSearch, search_uniform
from moe_overlap.tuner.search.uniform_cost import UniformCosts
from moe_overlap.tuner.write.dispatcher_flags import FLAGS, by_dispatcher, with_dispatcher
from moe_overlap.tuner.write.upstream_rules import PAIRED
from moe_overlap.tuner.write.upstream_values import parser_errors
from tests.unit.plan_search.test_plan_search import OPTIONS, SMALL, by_hand
from tests.unit.tuner.search.test_search_uniform import Case, case_of, graphs_of

FURTHER = NAMES[1:]


def sent_by(dispatcher: Dispatcher, topk: int, op: Op) -> Op:
    """An operator of the routed experts as a dispatcher has it: what it sends, and half of the permutations."""
    if op.operator not in ("moe.dispatch", "moe.combine") or dispatcher == FIRST:
        return op
    if op.collective is None:
        return dataclasses.replace(op, bytes=op.bytes * Fraction(1, 2))
    ranks, sent = op.collective.size, op.collective.payload_bytes
    if dispatcher == "allgather":
        kind = "all_gather" if op.operator == "moe.dispatch" else "reduce_scatter"
        gathered = dataclasses.replace(op.collective, kind=kind, payload_bytes=sent * Fraction(ranks, topk))  # type: ignore[arg-type]
        return dataclasses.replace(op, name=kind, collective=gathered)
    # The library sends one copy to every rank that a token goes to.
    copies = Fraction(expected_places(topk, ranks)).limit_denominator(10**6) / topk
    return dataclasses.replace(op, collective=dataclasses.replace(op.collective, payload_bytes=sent * copies))


@cache
def part_by(dispatcher: Dispatcher, topk: int, part: CapturedPart) -> CapturedPart:
    return dataclasses.replace(part, ops=tuple(sent_by(dispatcher, topk, op) for op in part.ops))


def graphs_by(dispatcher: Dispatcher, plan: Plan, model: ModelDescription) -> Mapping[int, CapturedModel]:
    return {
        index: dataclasses.replace(
            graph, parts=tuple(part_by(dispatcher, model.router_topk, part) for part in graph.parts)
        )
        for index, graph in graphs_of(plan, model).items()
    }


def side(case: Case, dispatcher: Dispatcher) -> Side:
    features = dataclasses.replace(case.task.features, dispatcher=dispatcher)
    task = dataclasses.replace(case.task, graphs=partial(graphs_by, dispatcher), features=features)
    bounds = dataclasses.replace(case.bounds, features=features, machine=task.machine)
    return Side(task=task, bounds=lambda layout: bounds)


def with_overlap(side: Side) -> Side:
    """The side whose layouts may also have Megatron-LM's overlap."""
    features = dataclasses.replace(side.task.features, overlap_experts=True, delay_weight_gradients=True)
    return dataclasses.replace(side, paired=dataclasses.replace(side.task, features=features))


def with_host(case: Case, seconds: float) -> Case:
    """The case on a host that needs so many seconds for a call."""
    constants = dataclasses.replace(case.task.machine.constants, host_seconds=seconds)
    machine = dataclasses.replace(case.task.machine, constants=constants)
    return dataclasses.replace(case, task=dataclasses.replace(case.task, machine=machine))


def case(*words: str, host: float = 1e-6, **options: Any) -> Case:
    small = ("--num-layers", "2", "--moe-ffn-hidden-size", "8192", "--global-batch-size", "32")
    return with_host(case_of(*small, *words, space="megatron", **options), host)


MANY_CHOICES = ("--num-experts", "8", "--moe-router-topk", "4")
CASES = {
    "plain": case(),
    "few experts chosen, two nodes": case("--num-experts", "16", "--moe-ffn-hidden-size", "16384", gpus=16),
    "many experts chosen, two nodes": case(*MANY_CHOICES, "--moe-ffn-hidden-size", "32768", gpus=16),
    "slow links": case(*MANY_CHOICES, "--moe-ffn-hidden-size", "32768", domain_gb_per_s=8.0, node_gb_per_s=8.0),
    "the host is slower": case(
        *MANY_CHOICES, "--moe-ffn-hidden-size", "4096", host=3e-4, domain_gb_per_s=40.0, node_gb_per_s=40.0
    ),
    "the host is about as fast": case(*MANY_CHOICES, "--moe-ffn-hidden-size", "16384", host=5e-5),
}


FAST = ("the host is slower",)
NAMED = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


def bare(case: Case) -> list[UniformLayout]:
    """The layouts without a dispatcher: those that split experts, stages and samples alone."""
    return [layout for layout in case.sound if layout.ranks[:2] == (1, 1) and layout.micro_batch <= 2]


def under(case: Case, name: Dispatcher) -> list[UniformLayout]:
    return [dataclasses.replace(layout, dispatcher=name) for layout in bare(case) if runs(name, layout)]


@cache
def searches(name: str) -> tuple[dict[str, float], UniformSearch, tuple[DispatcherOutcome, ...]]:
    """The best step of every dispatcher, each searched on its own, and the search over all of them."""
    case = CASES[name]
    task, bounds = side(case, FIRST).task, side(case, FIRST).bounds
    first = search_uniform(bare(case), UniformCosts(task), bounds, keep=3)
    each = {FIRST: first.solution.objective}
    for other in FURTHER:
        own = side(case, other)
        each[other] = search_uniform(under(case, other), UniformCosts(own.task), own.bounds, keep=3).solution.objective
    return each, *search_dispatchers(first, bare(case), task, FURTHER, partial(side, case), 3)


@pytest.mark.parametrize("name", NAMED)
def test_the_best_is_that_of_a_search_for_each_dispatcher(name: str) -> None:
    each, both, outcomes = searches(name)
    assert both.solution.objective == pytest.approx(min(each.values()), rel=1e-12)
    assert both.solution.value is not None
    assert each[both.solution.value.layout.dispatcher or FIRST] == pytest.approx(min(each.values()), rel=1e-12)
    assert [outcome.name for outcome in outcomes] == list(FURTHER)
    assert all(outcome.priced <= outcome.layouts for outcome in outcomes)


@pytest.mark.parametrize("name", NAMED)
def test_overlap_of_megatron_lm_is_searched_under_every_library(name: str) -> None:
    """The best of all is that of a search for each dispatcher, with the overlap and without."""
    case = CASES[name]
    each = {}
    for other in (FIRST, *LIBRARIES):
        own = with_overlap(side(case, other))
        layouts = [*with_paired(bare(case) if other == FIRST else under(case, other))]
        costs = CostsOfBoth(own.task, own.paired)
        each[other] = search_uniform(layouts, costs, costs.bounds(own.bounds), keep=3)
    first = with_overlap(side(case, FIRST))
    libraries = [*LIBRARIES]
    found, outcomes = search_dispatchers(
        each[FIRST],
        bare(case),
        first.task,
        libraries,
        lambda other: with_overlap(side(case, other)),
        3,
        paired=first.paired,
    )
    best = min((search.solution for search in each.values()), key=lambda solution: solution.objective)
    assert found.solution.objective == pytest.approx(best.objective, rel=1e-12)
    assert found.solution.value is not None and best.value is not None
    assert found.solution.value.layout.paired == best.value.layout.paired
    assert all(outcome.layouts > len(under(case, outcome.name)) for outcome in outcomes)


@pytest.mark.slow
def test_no_dispatcher_always_wins_and_most_layouts_need_no_graph_of_another() -> None:
    every = [searches(name) for name in CASES]
    assert len({min(each, key=each.__getitem__) for each, _, _ in every}) > 1
    outcomes = [outcome for _, _, of_case in every for outcome in of_case]
    assert sum(outcome.priced for outcome in outcomes) < sum(outcome.layouts for outcome in outcomes) / 2


@pytest.mark.parametrize("name", NAMED)
def test_no_bound_is_above_a_step(name: str) -> None:
    """Also where the host sets the pace: tokens travel while it launches."""
    case = CASES[name]
    first = with_overlap(side(case, FIRST))
    floors = floors_of(first.task, first.paired)
    capacity = case.cluster.groups[0].gpu.memory_gib * GIB / case.task.machine.memory.high
    tightest = 0.0
    for other in FURTHER:
        own = with_overlap(side(case, other))
        bounded, costs = FlooredCosts(own, floors, math.inf), CostsOfBoth(own.task, own.paired)
        for layout in with_paired(under(case, other)):
            evaluated = costs.evaluate(layout)
            fitting = evaluated.seconds[evaluated.needed_bytes <= capacity]
            if fitting.size:
                bound, least = bounded.step_bound(layout), float(fitting.min())
                assert bound <= least * (1 + 1e-9), layout.name
                tightest = max(tightest, bound / least)
    assert tightest > 0.8


def test_beside_another_micro_batch_no_bound_waits_for_the_host_in_every_layer() -> None:
    case = CASES["the host is about as fast"]
    first = with_overlap(side(case, FIRST))
    floors = floors_of(first.task, first.paired)
    layouts = [layout for layout in with_paired(bare(case)) if layout.paired]
    with_pairs = [floors[True][0].step_floor(layout, 0.0) for layout in layouts]
    one_by_one = [floors[False][0].step_floor(dataclasses.replace(layout, paired=False), 0.0) for layout in layouts]
    assert all(pairs <= alone for pairs, alone in zip(with_pairs, one_by_one, strict=True))
    assert any(pairs < 0.99 * alone for pairs, alone in zip(with_pairs, one_by_one, strict=True))


def test_what_runs_where() -> None:
    node = shipped_cluster("H100", 8).group_of(0)
    assert dispatchers_of(node) == ("alltoall", "allgather", "deepep", "hybridep")
    assert "hybridep" not in dispatchers_of(shipped_cluster("A100", 8).group_of(0))
    apart = dataclasses.replace(node, domain_gpus=1)
    assert dispatchers_of(apart) == ("alltoall", "allgather")
    alone = CASES["plain"].layouts[0]
    alone = dataclasses.replace(alone, expert=1, expert_tensor=1)
    assert runs("allgather", alone) and not runs("deepep", alone)
    assert runs("deepep", dataclasses.replace(alone, expert=2))


def test_a_dense_model_has_no_dispatcher_to_be_marked() -> None:
    words = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 256 --num-attention-heads 4 --seq-length 64 --bf16"
    words += " --max-position-embeddings 64 --vocab-size 512 --micro-batch-size 1 --global-batch-size 8"
    words += " --tensor-model-parallel-size 2 --lr 1 --train-iters 1"
    found = problem_of(words.split(), shipped_cluster("H100", 8), {"graphs": by_hand}).extrapolating
    assert not any("dispatcher" in reason for reason in found)


def test_prices_without_measured_steps_are_marked() -> None:
    assert uncalibrated("alltoall", "H100") == uncalibrated("deepep", "H100") == uncalibrated("hybridep", "GB200") == []
    for name, gpu in (("deepep", "GB200"), ("hybridep", "H100"), ("allgather", "H100")):
        assert uncalibrated(name, gpu) == [f"no calibration run of the {name} dispatcher on {gpu}"]  # type: ignore[arg-type]
    assert set(CALIBRATED) == set(FURTHER)


JOB = ["--num-experts", "4", "--hidden-size", "8"]
H100 = shipped_cluster("H100", 8)


def test_flags_that_name_a_dispatcher_keep_it() -> None:
    assert with_dispatcher([*JOB, "--moe-token-dispatcher-type", "allgather"], H100, False)[1] == ()
    assert with_dispatcher([*JOB, "--moe-enable-deepep"], H100, False)[1] == ()
    assert with_dispatcher(JOB[2:], H100, False) == (JOB[2:], ())
    with pytest.raises(
        ConfigError, match="--search-dispatcher: the model has no experts to dispatch tokens to; drop it"
    ):
        with_dispatcher(JOB[2:], H100, True)
    words, further = with_dispatcher(JOB, H100, False)
    assert words == [*JOB, "--moe-token-dispatcher-type", "alltoall"] and further == FURTHER
    named = [*JOB, "--moe-token-dispatcher-type", "flex", "--moe-enable-deepep"]
    assert with_dispatcher(named, H100, True) == (words, FURTHER)
    own = Measured(database="", device="cuda", latency_seconds=1e-5, constants={})
    measured = dataclasses.replace(H100, measured=own)
    assert with_dispatcher(JOB, measured, False) == (JOB, ())
    with pytest.raises(ConfigError, match="--search-dispatcher: a measured cluster has the prices of the dispatcher"):
        with_dispatcher(JOB, measured, True)
    with pytest.raises(ConfigError, match="^--moe-deepep-num-sms 20: adjusts one dispatcher, and several are searched"):
        with_dispatcher([*named, "--moe-deepep-num-sms", "20"], H100, True)
    assert (*DISPATCHER, *MOE) == ("--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm")


@pytest.mark.parametrize("name", NAMES)
def test_upstream_knows_the_flags_of_every_dispatcher(name: Dispatcher) -> None:
    words = by_dispatcher([*JOB, "--moe-token-dispatcher-type", "alltoall"], name)
    flags = grouped(words)
    assert not parser_errors(flags)
    said = [flags["--moe-token-dispatcher-type"], *flags.get("--moe-flex-dispatcher-backend", ())]
    assert said == ([("flex",), name] if len(FLAGS[name]) == 4 else [(name,)])


def by_config(config: Config, model: ModelDescription, plan: Plan, flags: Flags) -> Mapping[int, CapturedModel]:
    """Graphs by hand of the dispatcher that a configuration names."""
    kind = config.moe.moe_token_dispatcher_type
    name = config.device.moe_flex_dispatcher_backend if kind == "flex" else kind
    return {
        index: dataclasses.replace(graph, parts=tuple(part_by(name, model.router_topk, part) for part in graph.parts))  # type: ignore[arg-type]
        for index, graph in by_hand(config, model, plan, flags).items()
    }


@pytest.mark.slow
def test_a_library_and_megatron_lms_overlap_are_written_together() -> None:
    """Slow links: both together are faster than the one or the other."""
    group = H100.groups[0]
    slow = dataclasses.replace(H100, groups=(dataclasses.replace(group, domain_gb_per_s=25.0, node_gb_per_s=25.0),))
    wide = [*SMALL, "--num-experts", "16", "--moe-router-topk", "8", "--moe-ffn-hidden-size", "8191"]
    options: Any = {**OPTIONS, "graphs": by_config}
    settings = SearchSettings(target="megatron-lm", space="megatron", has_baseline=False, frees_dispatcher=True)
    found = search_plan(wide, slow, settings, **options)
    assert found.chosen.problem.features.dispatcher in LIBRARIES and found.written.flags.keys() >= {*PAIRED}
    words, step = found.written.arguments, found.prediction.predicted.step_seconds
    assert predict(words, slow, **options).predicted.step_seconds == step
    without = [word for word in words if word not in PAIRED]
    assert predict(without, slow, **options).predicted.step_seconds > 1.02 * step
    kept = search_plan(wide, slow, dataclasses.replace(settings, frees_dispatcher=False), **options)
    assert kept.prediction.predicted.step_seconds > 1.02 * step


@pytest.mark.slow
def test_a_freed_dispatcher_is_written_and_predicted_as_the_search_has_it(tmp_path: Path) -> None:
    """Links are so slow that fewer copies of a token are faster; the flags of a kept dispatcher change nothing."""
    group = H100.groups[0]
    slow = dataclasses.replace(H100, groups=(dataclasses.replace(group, domain_gb_per_s=10.0, node_gb_per_s=10.0),))
    wide = [*SMALL, "--num-experts", "16", "--moe-router-topk", "8", "--moe-ffn-hidden-size", "32767"]
    options: Any = {**OPTIONS, "graphs": by_config}
    settings = SearchSettings(target="megatron-lm", space="megatron", has_baseline=False)
    kept = search_plan(wide, slow, settings, **options)
    freed = search_plan(wide, slow, dataclasses.replace(settings, frees_dispatcher=True), **options)
    assert "dispatchers" not in search_json(kept) and kept.chosen.problem.features.dispatcher == "alltoall"
    said = search_json(freed)["dispatchers"]
    assert [other["name"] for other in said["further"]] == ["allgather", "deepep", "hybridep"]
    assert freed.prediction.predicted.step_seconds < kept.prediction.predicted.step_seconds
    write_search(tmp_path, freed)
    words = list(expand_files([f"@{tmp_path / 'megatron_args.txt'}"]))
    again = predict(words, slow, **options)
    assert again.predicted == freed.prediction.predicted and not parser_errors(grouped(words))
    assert again.extrapolating == freed.prediction.extrapolating
    chosen = said["chosen"]
    assert chosen != "alltoall" and any(
        chosen in words[at + 1] for at, word in enumerate(words) if "dispatcher" in word
    )
    assert bool(again.extrapolating) == (chosen != "deepep")


@pytest.mark.parametrize(
    ("searched", "of_flags", "beyond"), [("hybridep", "alltoall", True), ("", "hybridep", True), ("", "deepep", False)]
)
def test_a_search_for_anyone_says_that_a_library_is_beyond_calibration(
    monkeypatch: pytest.MonkeyPatch, searched: str, of_flags: str, beyond: bool
) -> None:
    """Its finalists are no flags that are read again, from which the others have it."""
    handed: list[tuple[str, ...]] = []
    monkeypatch.setattr(plan_search, "machine_for", lambda *_: (None, ("a first reason",)))
    monkeypatch.setattr(plan_search, "FreeSearch", lambda **_: None)
    monkeypatch.setattr(plan_search, "free_finalists", lambda *given: handed.append(given[-1]) or [])
    nothing = SimpleNamespace(read=str, finalist=str)
    request: Any = SimpleNamespace(settings=SearchSettings(target="any"), predicts_plans=True, cluster=H100, options={})
    rules = SimpleNamespace(reader=nothing, upstream_reader=nothing)
    layout, features = SimpleNamespace(dispatcher=searched), SimpleNamespace(dispatcher=of_flags)
    plans: Any = SimpleNamespace(
        rules=rules, job=None, layouts=[layout], uniform=None, staged=None, task=SimpleNamespace(features=features)
    )
    assert plan_search._finalists(plans, request) == []
    assert handed == [
        ("a first reason", *(["no calibration run of the hybridep dispatcher on H100"] if beyond else []))
    ]
