"""The space `intra-only`: beside the plan, the best sharding of all and what megatron-core's layouts lose of it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.training.cli.config import Config
from moe_overlap.describe.cluster import GIB, shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan
from moe_overlap.plan_search import free_sharding
from moe_overlap.plan_search.free_sharding import search_sharding
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.results import PlanSearch, SearchedSharding
from moe_overlap.plan_search.search import search_plan
from moe_overlap.report.search import detail_lines, search_json, search_lines
from moe_overlap.report.sharding import operator_lines, sharding_details, sharding_lines
from moe_overlap.tuner.capture.cache import Flags
from moe_overlap.tuner.capture.graph import CapturedModel, Layout
from moe_overlap.tuner.search.layer.intra_only import IntraOnly, intra_only, workload_of
from moe_overlap.tuner.search.layer.sharding_ilp import solve_choices
from moe_overlap.tuner.search.layer.sharding_losses import LostOperator, LostWay
from moe_overlap.tuner.search.layer.sharding_specs import logical_meshes
from moe_overlap.tuner.search.layer.sharding_stage import fixed_bytes, model_graphs, stage_problem
from moe_overlap.tuner.search.solution import Solution, Status
from tests.unit.plan_search.test_plan_search import by_hand
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS
from tests.unit.tuner.search.sharding_cases import cluster, dense, workload
from tests.unit.tuner.search.spaces import SPACES

PAIR = shipped_cluster("H100", 2)
# The dense layer of sharding_cases.py.
DENSE = """--num-layers 1 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --micro-batch-size 1
    --global-batch-size 4 --bf16 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
    --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights --train-iters 10 --lr 1e-4
    --use-distributed-optimizer""".split()
SETTINGS = SearchSettings(target="any", space=SPACES["intra-only"], has_baseline=False)


def graphs(config: Config, model: ModelDescription, plan: Plan, flags: Flags) -> Mapping[int, CapturedModel]:
    """By hand on several ranks; on one as captured, where only what is recomputed is by hand."""
    made = dict(by_hand(config, model, plan, flags))
    for index, captured in made.items():
        if dataclasses.replace(captured.layout, precision="bf16") == Layout():
            again = tuple(part for part in captured.parts if part.variant != "none")
            made[index] = dataclasses.replace(captured, parts=(*dense().parts, *again))
    return made


@pytest.fixture(scope="module")
def told() -> tuple[PlanSearch, str]:
    """The search, and its answer with every detail."""
    search = search_plan(DENSE, PAIR, SETTINGS, graphs=graphs, constants=CONSTANTS)
    return search, "\n".join([*search_lines(search, Path(), [], None), *detail_lines(search)])


def test_the_answer_is_the_free_optimum_of_all_meshes(told: tuple[PlanSearch, str]) -> None:
    """Against each mesh by itself, solved without a cutoff and with megatron-core's layouts enumerated."""
    search, _ = told
    values = json.loads(json.dumps(search_json(search)))["sharding"]
    number = search.plan.stages[0].gradient_accumulation_steps
    load = workload_of(search.chosen.problem, number)
    model = model_graphs(dense(), load)
    stages = [
        stage_problem(model, mesh, load)
        for mesh in logical_meshes(2, 2, PAIR.group_of(0), search.chosen.problem.machine.constants.link_rates)
    ]
    free = min(solve_choices(stage.problem).objective for stage in stages)
    layouts = min(stage.problem.cost(places) for stage in stages for _, places in stage.layouts((0, 1, 2, 3)))
    assert values["not_run"] is None and (values["micro_batches"], values["samples"]) == (number, 4 // number)
    assert values["step_seconds"] == pytest.approx(free, rel=1e-6) and values["status"] == "optimal"
    assert values["bound"] == pytest.approx(free, rel=1e-6) and 0 <= values["gap"] < 1e-6
    assert values["nearest"]["step_seconds"] == pytest.approx(layouts, rel=1e-9)
    assert values["lost_seconds"] == pytest.approx(layouts - free, rel=1e-3) and values["lost_seconds"] > 0
    assert values["solver_seconds"] > 0


def test_the_free_sharding_fits_with_the_margin_of_memory(told: tuple[PlanSearch, str]) -> None:
    """As every plan does: what it needs, times the quantile of --memory-margin, is within the capacity."""
    problem = told[0].chosen.problem
    machine = dataclasses.replace(problem.machine, memory=dataclasses.replace(problem.machine.memory, high=1.25))
    load = workload_of(dataclasses.replace(problem, machine=machine), 1)
    mesh = logical_meshes(2, 2, PAIR.group_of(0), machine.constants.link_rates)[0]
    stage = stage_problem(model_graphs(dense(), load), mesh, load)
    (row,) = stage.problem.rows
    assert row.limit + fixed_bytes(stage.model, mesh) == pytest.approx((80 * GIB - machine.reserved_bytes) / 1.25)


def test_what_is_lost_is_said_in_words(told: tuple[PlanSearch, str]) -> None:
    search, text = told
    assert search.sharding is not None and search.sharding.answer is not None
    answer = search.sharding.answer
    lines = sharding_lines(search.sharding)
    assert "\n".join(lines) in "\n".join(search_lines(search, Path(), [], None)) and "\n".join(lines) in text
    assert answer.best is not None and answer.nearest is not None and answer.losses is not None
    assert lines[0].startswith("sharding    free for every operator a step loses ")
    assert f" of the {answer.nearest.seconds:.4g} s of " in lines[0] and "(optimal, bound " in lines[0]
    gaining = [operator for operator in answer.losses.operators if operator.gain_seconds > 1e-6 * answer.best.seconds]
    assert gaining and all(operator.gain_seconds <= search.sharding.lost_seconds + 1e-12 for operator in gaining)
    for operator in gaining:
        for line in operator_lines(operator, answer.best.shape):
            assert line in text
    assert text.count(" would gain ") == len(gaining)
    (together,) = [line.strip() for line in lines if "together would gain: " in line]
    sums = [f"{gain * 1e3:.3g} ms" for gain in answer.losses.parts.values()]
    assert sums and all(each in together for each in sums)
    details = "\n".join(detail_lines(search))
    assert details in text and f"best on the mesh {answer.best.shape[0]} × {answer.best.shape[1]}, " in details
    rows = search_json(search)["sharding"]["operators"]
    assert [row["gain_seconds"] for row in rows] == [operator.gain_seconds for operator in answer.losses.operators]
    assert search_json(search)["sharding"]["parts"] == answer.losses.parts


def test_the_plan_is_one_that_megatron_core_executes(told: tuple[PlanSearch, str]) -> None:
    """The best sharding changes nothing of the plan, which is that of the enumeration."""
    search, _ = told
    best = search.uniform.solution.value
    assert best is not None and search.chosen.seconds == pytest.approx(best.seconds, rel=1e-9)
    assert len(search.plan.stages) == 1


def test_a_model_without_algorithms_is_answered_all_the_same() -> None:
    """Graphs by hand do not say what operators read."""
    search = search_plan(DENSE, PAIR, SETTINGS, graphs=by_hand, constants=CONSTANTS)
    (line,) = [line for line in search_lines(search, Path(), [], None) if line.startswith("sharding")]
    assert line.startswith("sharding    not searched free for every operator: embedding: ")
    assert search_json(search)["sharding"] == {"not_run": search.sharding and search.sharding.refusal}
    assert not sharding_details(search.sharding or SearchedSharding())
    narrow = dataclasses.replace(SETTINGS, space=SPACES["zero3"])
    other = search_plan(DENSE, PAIR, narrow, graphs=by_hand, constants=CONSTANTS)
    assert other.sharding is None and "sharding" not in search_json(other)


def test_time_and_ctrl_c_end_the_program(told: tuple[PlanSearch, str], monkeypatch: pytest.MonkeyPatch) -> None:
    problem, task = told[0].chosen.problem, _Task()
    assert search_sharding(problem, task, -math.inf).refusal == "the search ended before it"  # type: ignore[arg-type]
    assert search_sharding(problem, task, math.inf, is_interrupted=True).answer is None  # type: ignore[arg-type]
    answer = intra_only(dense(), workload(samples=4), cluster(1, 2), seconds=0.0)
    assert answer.solution.status == "time limit" and answer.solution.bound == 0.0
    # What is left is the best layout of the one shape that was set up.
    assert answer.best is not None and answer.nearest is not None and answer.best.seconds == answer.nearest.seconds
    assert {shape.shape for shape in answer.shapes} == {(2, 1), (1, 2)}

    def stops(*given: Any, **options: Any) -> IntraOnly:
        raise KeyboardInterrupt

    monkeypatch.setattr(free_sharding, "intra_only", stops)
    monkeypatch.setattr(free_sharding, "_on_one_rank", lambda task: dense())
    assert search_sharding(problem, task, math.inf).refusal == "Ctrl-C ended it"  # type: ignore[arg-type]


def test_where_nothing_fits_more_micro_batches_are_tried(
    told: tuple[PlanSearch, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only numbers that divide the batch, from the plan's on, each with what is left of the time."""
    problem = told[0].chosen.problem
    tried: list[tuple[int, int]] = []

    def fits_at_four(captured: Any, load: Any, cluster: Any, **options: Any) -> IntraOnly:
        tried.append((load.micro_batches, load.samples))
        assert 0 < options["seconds"] <= 50.0
        return _nothing(Status.INFEASIBLE if load.micro_batches < 4 else Status.TIME_LIMIT)

    monkeypatch.setattr(free_sharding, "intra_only", fits_at_four)
    monkeypatch.setattr(free_sharding, "_on_one_rank", lambda task: dense())
    searched = search_sharding(problem, _Task(), free_sharding.time.monotonic() + 50.0)  # type: ignore[arg-type]
    first = problem.plan.stages[0].gradient_accumulation_steps
    assert tried == [(number, 4 // number) for number in (1, 2, 4) if number >= first]
    assert searched.micro_batches == 4 and "none was found in time" in sharding_lines(searched)[0]
    nothing = SearchedSharding(answer=_nothing(Status.INFEASIBLE), micro_batches=4, samples=1)
    (line,) = sharding_lines(nothing)
    assert "nothing fits a GPU without recomputation" in line and not sharding_details(nothing)


def test_a_tie_is_said() -> None:
    answer = intra_only(dense(), workload(samples=4, micro_batches=8), cluster(2, 1))
    (line,) = sharding_lines(SearchedSharding(answer=answer, micro_batches=8, samples=4))
    assert answer.best is not None and "(optimal, bound " in line
    assert f"free for every operator nothing beats the {answer.best.seconds:.4g} s of DP2, ZeRO-1, with nothing" in line
    late = dataclasses.replace(
        answer, solution=dataclasses.replace(answer.solution, status=Status.TIME_LIMIT, bound=0.0)
    )
    (line,) = sharding_lines(SearchedSharding(answer=late, micro_batches=8, samples=4))
    assert "nothing better was found in time than" in line and "nothing beats" not in line


def test_a_plan_that_does_not_fit_is_one_line() -> None:
    """Weights, gradients and optimizer state of 1.6 TB on two GPUs."""
    deep = " ".join(DENSE).replace("--num-layers 1 ", "--num-layers 400 ").split()
    with pytest.raises(ConfigError, match=r"no plan fits: weights, gradients and optimizer states take [\d,.]+ GiB"):
        search_plan(deep, PAIR, SETTINGS, graphs=graphs, constants=CONSTANTS)


class _Task:
    """A task with the only field that is read."""

    space = dataclasses.make_dataclass("Space", [("zero_levels", tuple, (0, 1, 2, 3))])()


def _nothing(status: Status) -> IntraOnly:
    bound = math.inf if status is Status.INFEASIBLE else 0.0
    solution: Solution[Any] = Solution(value=None, objective=math.inf, bound=bound, status=status, seconds=1.0)
    return IntraOnly(None, None, solution, (), None)


def test_words_of_an_operator() -> None:
    samples, outputs = ("samples", "samples"), ("output", "replicated")
    way = LostWay("moe.window128", "forward", outputs, samples, ("width", "partial"), samples, 0, 0, False)
    lost = LostOperator("moe.window128", "experts", (way,), 0.0025)
    assert operator_lines(lost, (2, 4)) == [
        "experts of the MoE layer with window 128 would gain 2.5 ms alone (no layout has that)",
        "  forward: outputs over 2 and the same on 4 instead of samples over 8",
    ]
    alike = dataclasses.replace(way, executed=outputs, executed_out=("width", "width"), has_layout=True)
    states = LostWay("head", "weight", outputs, outputs, outputs, outputs, 3, 1, True)
    assert operator_lines(LostOperator("dense", "experts", (alike, states), 0.0025), (2, 4)) == [
        "experts of the dense layer would gain 2.5 ms alone (no layout has that with the rest)",
        "  MoE layer with window 128 forward: outputs over 2 and the same on 4 with the result width over 2 and summands on 4 "
        "instead of the result width over 8",
        "  head weight: outputs over 2 and the same on 4, ZeRO-3, instead of outputs over 2 and the same on 4, ZeRO-1",
    ]
