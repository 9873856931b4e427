"""Plans on sub-meshes: the search against every plan by its analytic cost, its plans against `predict`, and spaces compared."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from moe_overlap.describe.cluster import Cluster, Measured, shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import load_plan
from moe_overlap.plan_search import free
from moe_overlap.plan_search.finalists import Finalist
from moe_overlap.plan_search.flags import PlanFlags
from moe_overlap.plan_search.free import free_finalist, refusal_of
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.results import PlanSearch
from moe_overlap.plan_search.search import search_plan
from moe_overlap.report.search import search_json, search_lines, searched_lines, write_search
from moe_overlap.tuner.cost.links import axis_group, pair_group
from moe_overlap.tuner.cost.prediction import predict_plan
from moe_overlap.tuner.profile.database import OperatorKey
from moe_overlap.tuner.profile.lookup import operator_keys
from moe_overlap.tuner.search.pipeline.placement import SubMesh
from moe_overlap.tuner.search.pipeline.shares import joined_meshes
from moe_overlap.tuner.search.pipeline.sub_meshes import (
    FAR,
    UNITS,
    MeshPlan,
    MeshSearch,
    MeshStage,
    _Meshes,
    _Table,
    coarse,
    search_meshes,
)
from moe_overlap.tuner.search.solution import Solution, Status
from moe_overlap.tuner.search.space import RECOMPUTE, MemoryChoice, Restriction, Run
from tests.unit.plan_search.test_plan_search import OPTIONS
from tests.unit.tuner.cost.test_cost_predict import JOB
from tests.unit.tuner.search.spaces import SPACES
from tests.unit.tuner.search.test_search_per_stage import problem_of
from tests.unit.tuner.search.test_search_uniform import Case, case_of, least_memory

SLOW = {"domain_gb_per_s": 20.0, "node_gb_per_s": 20.0}
WORDS = ("--num-layers", "3", "--pipeline-model-parallel-size", "1")


@cache
def small(gpus: int = 4, batch: int = 4) -> tuple[Case, Run]:
    """Three layers on four GPUs whose links are slow: devices divide, layers do not; nothing is recomputed."""
    case = case_of(*WORDS, "--global-batch-size", str(batch), gpus=gpus, space="full", **SLOW)
    space = dataclasses.replace(case.task.space, recomputes=False)
    case = dataclasses.replace(case, task=dataclasses.replace(case.task, space=space))
    return case, Run(gpus=gpus, domain_gpus=8, sequence_length=4096, global_batch_size=batch)


@cache
def searched(restriction: Restriction = Restriction.FREE) -> MeshSearch:
    case, run = small()
    return search_meshes(case.task, run, (restriction,))


def every_plan(search: _Meshes, samples: int, layers: int) -> Iterator[MeshPlan]:
    """All cuts, sub-meshes and ways with nothing recomputed."""
    for count in range(1, layers + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            ends = [0, *cuts, layers]
            for meshes in itertools.product(search.meshes, repeat=count):
                if sum(mesh.devices for mesh in meshes) != search.run.gpus:
                    continue
                for layouts in itertools.product(*(search.at(mesh, samples) for mesh in meshes)):
                    parts = zip(ends, ends[1:], meshes, layouts, strict=False)
                    stages = tuple(
                        MeshStage(first=a, last=b, mesh=mesh, layout=layout, memory=MemoryChoice())
                        for a, b, mesh, layout in parts
                    )
                    yield MeshPlan(stages=stages, width=search.width, nodes=search.nodes, per_node=search.per_node)


@pytest.mark.parametrize(
    ("share", "batch"),
    [(0.055, 4), pytest.param(1.0, 8, marks=pytest.mark.slow), pytest.param(0.06, 8, marks=pytest.mark.slow)],
)
def test_the_search_finds_what_an_enumeration_finds(share: float, batch: int) -> None:
    """In the spread seconds first and last micro-batches are no exact sum: half a percent may be lost."""
    case, run = small(batch=batch)
    case = least_memory(case, share) if share < 1.0 else case
    found = search_meshes(case.task, run)
    search = _Meshes(case.task, run, (1,))
    seconds, tried = [], 0
    for samples in search.batches((Restriction.FREE,)):
        for plan in every_plan(search, samples, 3):
            prediction, tried = search.prediction(plan), tried + 1
            seconds.append(prediction.predicted.step_seconds if prediction.fits else math.inf)
    best = min(seconds)
    assert tried > 50 and (share == 1.0 or not all(map(math.isfinite, seconds)))
    assert best * (1 - 1e-9) <= found.solution.objective <= best * 1.005
    assert found.solution.bound <= best


def test_stages_fit_where_predictions_do() -> None:
    """Cell by cell: some way of a stage fits with so many stages behind if and only if it does in some plan."""
    case, run = small()
    case = least_memory(case, 0.055)
    search = _Meshes(case.task, run, (1,))
    table, fits = _Table(search, 1, (Restriction.FREE,)), {}
    states = dataclasses.replace(case.bounds, space=RECOMPUTE).state_bytes
    for plan in every_plan(search, 1, 3):
        last, held = len(plan.stages) - 1, 0
        for place, (stage, made) in enumerate(zip(plan.stages, search.prediction(plan).predicted.stages, strict=True)):
            needed = made.peak_bytes - made.peak_bytes_by_category.fragmentation
            held += needed * stage.mesh.devices
            key = (last - place, stage.first, stage.last - 1, search.meshes.index(stage.mesh))
            fits[key] = fits.get(key, False) or needed <= search.capacity
        assert held >= states > 0, plan.name
    assert {key: bool(np.isfinite(table.stable[key])) for key in fits} == fits
    assert set(fits.values()) == {True, False}


def test_plans_are_valid_and_predicted_alike() -> None:
    """The analytic cost is the prediction where neighbours are equal; else lists are simulated, and ranks wait for tiles."""
    case, _ = small()
    unlike = 0
    for candidate in searched().ranked[:3]:
        plan = candidate.plan(case.template, 3)
        validate_plan(plan, case.model)
        step = predict_plan(plan, problem_of(case, plan)).predicted.step_seconds
        unlike += bool(plan.transfers)
        assert step == pytest.approx(candidate.seconds, rel=0.15 if plan.transfers else 1e-9)
        assert refusal_of(plan) is None
        assert sorted(rank for stage in plan.stages for rank in stage.devices.ranks) == [0, 1, 2, 3]
    assert unlike


@pytest.mark.parametrize("is_measured", [False, True])
def test_operators_of_the_plans_that_are_left_are_measured(is_measured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of many tokens took six times as long as its rate says: a plan of one micro-batch won on paper alone."""
    case, _ = small()
    found = next(plan for plan in searched().ranked if plan.plan(case.template, 3).transfers)
    cluster = case.task.machine.cluster
    if is_measured:
        measured = Measured(database="", device="cpu", latency_seconds=0.0, constants={})
        cluster = dataclasses.replace(cluster, measured=measured)
    task = dataclasses.replace(case.task, machine=dataclasses.replace(case.task.machine, cluster=cluster))
    asked: list[list[OperatorKey]] = []
    monkeypatch.setattr(free, "lookup_of", lambda _, keys: asked.append(keys))
    monkeypatch.setattr(free, "all_to_all_costs", lambda _: None)
    finalist = free_finalist(found, task, lambda *_: PlanFlags([], ()))
    (keys,) = asked
    assert {key.kind for key in keys} == ({*keys_of(finalist)} if is_measured else set())


def keys_of(finalist: Finalist) -> set[str]:
    """Kinds of operators of a plan."""
    problem = finalist.problem
    return {key.kind for key in operator_keys(problem.plan, problem.model, problem.graphs, problem.features)}


def test_restrictions_are_never_faster() -> None:
    free, equal = searched().solution, searched(Restriction.EQUAL_OPERATORS).solution
    assert free.objective <= equal.objective
    for plan in searched(Restriction.EQUAL_OPERATORS).ranked:
        sizes = [stage.last - stage.first for stage in plan.stages]
        assert max(sizes) - min(sizes) <= 1


def test_one_device_for_every_stage() -> None:
    case, run = small(gpus=2)
    found = search_meshes(case.task, run, (Restriction.ONE_DEVICE,))
    assert found.solution.status in (Status.OPTIMAL, Status.FEASIBLE) and found.solution.value is not None
    for plan in found.ranked:
        assert [stage.mesh for stage in plan.stages] == [SubMesh(1, 1)] * 2


def test_nodes_that_cannot_be_halved_are_one_line() -> None:
    case, run = small()
    group = dataclasses.replace(case.cluster.groups[0], gpus_per_node=6)
    machine = dataclasses.replace(case.task.machine, cluster=dataclasses.replace(case.cluster, groups=(group,)))
    task = dataclasses.replace(case.task, machine=machine, space=SPACES["equal-operator"])
    with pytest.raises(ConfigError, match="gpus_per_node 6: nodes of 6 GPUs cannot be halved into sub-meshes"):
        search_meshes(task, run)


def test_no_time_is_said() -> None:
    case, run = small()
    solution = search_meshes(case.task, run, deadline=-math.inf).solution
    assert solution.status is Status.TIME_LIMIT and solution.value is None and solution.bound == 0.0


def test_links_of_two_ranks() -> None:
    """Ranks in order have the link of the group of two; a tile may also cross a node's edge."""
    links = shipped_cluster("H100", 16).groups[0]
    for first, apart in ((0, 1), (0, 4), (0, 8), (8, 2)):
        assert pair_group(first, first + apart, 16, links) == axis_group(2, apart, 16, links)
    assert pair_group(7, 8, 16, links).per_node == 1 and axis_group(2, 1, 16, links).per_node == 2


def test_coarse_seconds_are_never_longer() -> None:
    seconds = np.array([8.0, 4.0, 2.0, 1.0, 0.5])
    assert coarse(seconds).tolist() == [8.0, 4.0, 0.5, 0.5, 0.5]
    assert coarse(seconds[:3]).tolist() == seconds[:3].tolist()


# Whole searches


def cluster_of(gpus: int) -> Cluster:
    cluster = shipped_cluster("H100", gpus)
    return dataclasses.replace(cluster, groups=(dataclasses.replace(cluster.groups[0], **SLOW),))


@cache
def answer(space: str, gpus: int = 4) -> PlanSearch:
    words = [*JOB, "--num-layers", "3", "--moe-ffn-hidden-size", "4095", "--num-experts", "4"]
    words += ["--expert-model-parallel-size", "1", "--global-batch-size", "8"]
    settings = SearchSettings(target="any", space=SPACES[space], has_baseline=False)
    return search_plan(words, cluster_of(gpus), settings, **OPTIONS)


def test_a_stage_on_each_gpu() -> None:
    search = answer("inter-only", 2)
    assert [len(stage.devices.ranks) for stage in search.plan.stages] == [1, 1]
    assert search_json(search)["search"]["per_stage"]["mesh_programs"] > 0
    with pytest.raises(ConfigError) as caught:
        answer("inter-only", 4)
    rule = "a stage on each of 4 GPUs needs as many layers, and model has 3"
    assert str(caught.value) == f"--search-space inter-only: {rule}; use fewer GPUs, or another space"


@pytest.mark.slow
def test_the_full_space_is_never_slower(tmp_path: Path) -> None:
    spaces = [name for name in SPACES if name not in ("full", "inter-only")]
    full = answer("full")
    objective = search_json(full)["search"]["objective"]
    for space in spaces:
        other = search_json(answer(space))["search"]
        assert objective <= other["objective"] * (1 + 1e-3), space
        assert other["bound"] <= other["objective"], space
    assert full.plan.transfers and full.refusal is None
    write_search(tmp_path, full)
    plan = load_plan(tmp_path / "plan.json")
    again = predict_plan(dataclasses.replace(plan, predicted=None), full.chosen.problem)
    assert plan.predicted is not None
    assert again.predicted.step_seconds == pytest.approx(plan.predicted.step_seconds, rel=0.01)
    lines = search_lines(full, tmp_path, ["plan.json"], None)
    assert not any(line.startswith("not run ") for line in lines) and "--plan" in full.written.flags
    assert any("cuts and sub-meshes of unlike size: " in line for line in searched_lines(full))
    json.dumps(search_json(full))


def test_plans_far_slower_than_a_known_one_are_not_looked_for() -> None:
    case, run = small()
    best = searched().solution
    same = search_meshes(case.task, run, incumbent_seconds=best.objective)
    assert same.solution.value == best.value
    none = search_meshes(case.task, run, incumbent_seconds=0.25 * best.objective / FAR)
    assert none.solution.value is None and none.solution.status is Status.INFEASIBLE and none.ranked == ()
    assert none.programs < same.programs <= searched().programs
    assert 0.25 * best.objective <= none.solution.bound <= best.objective


def test_a_share_that_ran_out_of_time_leaves_the_whole_unproven() -> None:
    def share(status: Status, bound: float) -> MeshSearch:
        nothing = Solution(value=None, objective=math.inf, bound=bound, status=status, seconds=1.0)
        return MeshSearch(solution=nothing, ranked=(), programs=1, priced=1, cheapest=1)

    whole, late = share(Status.INFEASIBLE, math.inf), share(Status.TIME_LIMIT, 0.0)
    assert joined_meshes([whole, late]).solution.status is Status.TIME_LIMIT
    assert joined_meshes([whole, whole]).solution.status is Status.INFEASIBLE


@pytest.mark.parametrize("layers", [3, 48, 49, 61, 96, 100])
def test_units_are_all_layers_and_no_more_than_there_may_be(layers: int) -> None:
    """61 layers are those of DeepSeek-V3: a unit of two of them is far above the mean of 48."""
    case, run = small()
    search = _Meshes(case.task, run, (1,))
    search.model = dataclasses.replace(search.model, num_layers=layers)
    search.graph = dataclasses.replace(
        search.graph, layer_kinds=tuple(itertools.islice(itertools.cycle(search.graph.layer_kinds), layers))
    )
    sizes = [end - first for first, end in search.units]
    assert len(sizes) == min(layers, UNITS) and sum(sizes) == layers and max(sizes) - min(sizes) <= 1


def test_units_are_alike_in_their_work_not_in_the_number_of_operators() -> None:
    case, run = small()
    search = _Meshes(case.task, run, (1,))
    part = search.graph.part("moe")
    products = tuple(op for op in part.ops if op.cost_class in ("gemm", "grouped_gemm"))
    rest = tuple(op for op in part.ops if op not in products)
    assert len(rest) > len(products)
    heavy, light = (
        dataclasses.replace(part, kind=kind, ops=ops) for kind, ops in (("heavy", products), ("light", rest))
    )
    search.model = dataclasses.replace(search.model, num_layers=64)
    search.graph = dataclasses.replace(
        search.graph, parts=(*search.graph.parts, heavy, light), layer_kinds=("heavy",) * 40 + ("light",) * 24
    )
    # 16 layers fewer than units: the light ones stand together.
    assert search.units[:40] == tuple((layer, layer + 1) for layer in range(40))
