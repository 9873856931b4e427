"""Plans of unlike stages: the search against every plan by `predict`, its answer against the simulator, and spaces compared."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from moe_overlap.describe.cluster import GIB
from moe_overlap.plan.plan import Offload, Plan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan_search.free import freed_layouts, narrow_space, refusal_of, search_beyond
from moe_overlap.plan_search.processes import SearchBudget
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.pipeline import StageTimes, averaged
from moe_overlap.tuner.cost.prediction import estimate_plan
from moe_overlap.tuner.cost.simulate.step import simulate_step
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.search.pipeline.per_stage import StagedPlan, StageSearch, search_stages
from moe_overlap.tuner.search.pipeline.shares import joined_stages
from moe_overlap.tuner.search.pipeline.sub_meshes import MeshSearch
from moe_overlap.tuner.search.solution import Solution, Status
from moe_overlap.tuner.search.space import MemoryChoice, Run, UniformLayout
from moe_overlap.tuner.search.uniform import RankedLayout, search_uniform
from moe_overlap.tuner.search.uniform_cost import UniformCosts
from tests.unit.tuner.search.spaces import SPACES
from tests.unit.tuner.search.test_search_uniform import Case, case_of, graphs_of, least_memory, with_modules

pytestmark = pytest.mark.usefixtures("whole_memory")

LAYOUT = UniformLayout(tensor=1, context=1, expert=2, expert_tensor=1, pipeline=2, virtual=1, micro_batch=1)
STRATEGIES = [(1, Offload()), (3, Offload()), (1, Offload(optimizer=0.5))]
THREE = ("--num-layers", "3", "--pipeline-model-parallel-size", "1")


def costs_of(case: Case, averages: bool = False) -> UniformCosts:
    """Prices of a few strategies, so that every plan can be predicted."""
    costs = UniformCosts(dataclasses.replace(case.task, averages=averages))
    costs.strategies = list(STRATEGIES)
    return costs


def problem_of(case: Case, plan: Plan) -> Problem:
    return Problem(
        model=case.model,
        plan=plan,
        graphs=graphs_of(plan, case.model),
        features=case.task.features,
        machine=case.task.machine,
    )


def predicted(case: Case, plan: Plan) -> Prediction:
    return estimate_plan(plan, problem_of(case, plan))


def every_plan(case: Case, layout: UniformLayout, layers: int) -> list[StagedPlan]:
    """All plans of two stages, by what the stages decide."""
    plans = []
    for first in range(1, layers):
        ranges = ((0, first), (first, layers))
        memories = [
            [
                MemoryChoice(layers=again, zero_level=level, offload=offload)
                for again in range(last - begin + 1)
                for level, offload in STRATEGIES
            ]
            for begin, last in ranges
        ]
        for choice in itertools.product(*memories):
            plans.append(
                StagedPlan(
                    layout=layout,
                    chunks=tuple((chunk,) for chunk in ranges),
                    memories=choice,
                    seconds=math.inf,
                    needed_bytes=0.0,
                )
            )
    return plans


def predictions_of(case: Case, layout: UniformLayout, layers: int) -> list[Prediction]:
    """Every plan by `predict`."""
    return [predicted(case, plan.plan(case.template, layers)) for plan in every_plan(case, layout, layers)]


def fastest(case: Case, predictions: list[Prediction]) -> float:
    """The shortest step of every plan that fits the GPUs of a case; what a GPU holds changes nothing else of a prediction."""
    capacity = int(case.cluster.group_of(0).gpu.memory_gib * GIB)
    here = [replace(each, capacity_bytes=capacity, memory=case.task.machine.memory) for each in predictions]
    fitting = [each.predicted.step_seconds for each in here if each.fits]
    assert 0 < len(fitting) < len(predictions)
    return min(fitting)


@cache
def scarce() -> Case:
    """A model of which a stage fits only if it decides something about its memory."""
    return least_memory(case_of(*THREE, "--global-batch-size", "64", gpus=4, space="full"), 0.045)


@cache
def searched() -> StageSearch:
    return search_stages(costs_of(scarce()), [LAYOUT])


def agree(case: Case, predictions: list[Prediction]) -> StageSearch:
    found = search_stages(costs_of(case), [LAYOUT])
    assert found.solution.status is Status.OPTIMAL and found.solution.gap <= 1e-6
    assert found.solution.objective == pytest.approx(fastest(case, predictions), rel=1e-9)
    return found


def test_the_search_finds_what_an_enumeration_finds() -> None:
    found = agree(scarce(), predictions_of(scarce(), LAYOUT, 3))
    assert found.on_frontier < found.candidates
    uniform = search_uniform([LAYOUT], costs_of(scarce()), lambda layout: scarce().bounds)
    assert found.solution.objective < uniform.solution.objective


def test_stages_may_keep_the_modules_that_the_uniform_plan_recomputes() -> None:
    """DeepSeek-V3's fastest uniform plan recomputes modules, and its stages were priced without that choice."""
    case = with_modules(scarce())
    costs = UniformCosts(replace(case.task, space=SPACES["stages"]))
    evaluated = costs.evaluate(LAYOUT, of_modules=True)
    uniform = RankedLayout(
        layout=LAYOUT,
        memory=evaluated.choices[0][0],
        seconds=float(evaluated.seconds[0, 0]),
        needed_bytes=float(evaluated.needed_bytes[0, 0]),
    )
    assert uniform.memory.modules
    roomy = replace(case.task, machine=case_of(*THREE, gpus=4).task.machine, space=SPACES["stages"])
    found = search_stages(UniformCosts(roomy), [LAYOUT], [uniform])
    assert found.solution.objective <= uniform.seconds and found.solution.value is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("--moe-router-topk", "3"),
        ("--moe-layer-freq", "([0]*1+[1]*2)"),
        ("--seq-length", "2048", "--max-position-embeddings", "2048"),
    ],
)
def test_the_search_finds_what_an_enumeration_finds_on_perturbed_cases(words: tuple[str, ...]) -> None:
    case = case_of(*THREE, "--global-batch-size", "64", *words, gpus=4, space="full", node_gb_per_s=10.0)
    predictions = predictions_of(case, LAYOUT, 3)
    assert len(predictions) > 100
    for share in (0.04, 0.045, 0.05):
        agree(least_memory(case, share), predictions)


def test_the_answer_is_a_plan_that_the_closed_form_and_the_simulator_price_the_same() -> None:
    case, staged = scarce(), searched().solution.value
    assert staged is not None
    plan = staged.plan(case.template, 3)
    validate_plan(plan, case.model)
    assert plan.stages[0].recompute != plan.stages[1].recompute or plan.stages[0].offload != plan.stages[1].offload
    prediction = predicted(case, plan)
    assert prediction.fits
    assert prediction.predicted.step_seconds == pytest.approx(staged.seconds, rel=1e-9)
    assert prediction.fullest.needed_bytes == pytest.approx(staged.needed_bytes, rel=1e-6)
    simulated = simulate_step(plan, problem_of(case, plan)).simulation.step_seconds
    assert simulated == pytest.approx(staged.seconds, rel=0.01)
    refusal = refusal_of(plan)
    assert refusal is None or ".offload.gradients" in refusal


def test_what_is_slower_than_a_known_plan_is_no_answer() -> None:
    case = scarce()
    best = searched().solution.value
    assert best is not None
    impossible = RankedLayout(
        layout=dataclasses.replace(LAYOUT, micro_batch=2),
        memory=MemoryChoice(),
        seconds=0.5 * best.seconds,
        needed_bytes=0.0,
    )
    found = search_stages(costs_of(case), [LAYOUT], [impossible])
    assert found.solution.value is None and found.ranked == ()
    assert found.solution.status is Status.INFEASIBLE


@pytest.mark.parametrize("share", [0.94, 0.96, 0.98, 1.0])
def test_a_uniform_plan_that_another_layout_beats_is_no_start(share: float) -> None:
    """Many micro-batches, unequal stages: numbers of layers that are too slow end before the uniform ones are reached."""
    case = case_of(*THREE, "--global-batch-size", "1024", gpus=4, space="full")
    own = search_uniform([LAYOUT], costs_of(case), lambda layout: case.bounds).solution.value
    assert own is not None
    other = dataclasses.replace(own, layout=dataclasses.replace(LAYOUT, micro_batch=2), seconds=share * own.seconds)
    found = search_stages(costs_of(case), [LAYOUT], [other, own])
    assert found.solution.objective >= other.seconds or found.solution.value is not None


def test_a_deadline_and_an_interrupt_leave_the_best_so_far() -> None:
    stopped = search_stages(costs_of(scarce()), [LAYOUT], deadline=-math.inf)
    assert stopped.solution.status is Status.TIME_LIMIT and stopped.solution.value is None
    assert 0.0 < stopped.solution.bound <= searched().solution.objective

    def interrupted(done: int, total: int, best: object) -> None:
        raise KeyboardInterrupt

    two = [LAYOUT, dataclasses.replace(LAYOUT, micro_batch=2)]
    stopped = search_stages(costs_of(scarce()), two, progress=interrupted)
    assert stopped.solution.status is Status.TIME_LIMIT and stopped.layouts == 1
    assert stopped.solution.value == searched().solution.value
    assert 0.0 < stopped.solution.bound <= stopped.solution.objective


# Spaces


@cache
def objective(space: str, pipelines: tuple[int, ...] = (1, 2)) -> float:
    """Seconds of the best plan of a space, of four layouts with these numbers of stages."""
    case = scarce()
    single = dataclasses.replace(LAYOUT, pipeline=1, expert=1)
    layouts = [LAYOUT, single, dataclasses.replace(single, expert=4), dataclasses.replace(LAYOUT, expert=1)]
    assert set(layouts) <= set(case.layouts)
    layouts = [layout for layout in layouts if SPACES[space].has(layout) and layout.pipeline in pipelines]
    task = dataclasses.replace(case.task, space=SPACES[space])
    narrow = dataclasses.replace(case.task, space=narrow_space(task.space))
    found = search_uniform(layouts, UniformCosts(narrow), lambda layout: case.bounds)
    search = search_beyond(found, layouts, task, lambda layout: case.bounds, 20)
    staged = math.inf if search.staged is None else search.staged.solution.objective
    return min(search.uniform.solution.objective, staged)


@pytest.mark.parametrize("space", ["recompute", "zero", "offload", "data", "zero2", "zero3", "equal-layer"])
def test_the_full_space_is_never_worse_than_a_part_of_it(space: str) -> None:
    assert objective("full") <= objective(space) * (1.0 + 1e-9)


def test_each_space_adds_to_the_one_before() -> None:
    two = [objective(space, (2,)) for space in ("full", "equal-layer", "offload", "zero", "recompute")]
    assert two == sorted(two) and two[0] < two[-1]


def test_layouts_of_the_fastest_uniform_plans_are_freed() -> None:
    """Those of several stages, without model chunks, and with twice the micro-batch."""
    case = scarce()
    alone = RankedLayout(
        layout=dataclasses.replace(LAYOUT, pipeline=1), memory=MemoryChoice(), seconds=1.0, needed_bytes=0.0
    )
    found = search_uniform([alone.layout], UniformCosts(case.task), lambda layout: case.bounds)
    chunks = dataclasses.replace(alone, layout=dataclasses.replace(LAYOUT, virtual=2))
    found = dataclasses.replace(found, ranked=(alone, chunks))
    assert freed_layouts(found, case.layouts) == [LAYOUT, dataclasses.replace(LAYOUT, micro_batch=2)]


def test_sub_meshes_know_the_uniform_plans_contexts_but_no_step_outside_their_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Uniform plans are not in the space of equal operators: none of their steps cuts its search off."""
    asked: list[dict[str, Any]] = []

    def meshes(*arguments: object, **options: Any) -> MeshSearch:
        asked.append(options)
        nothing = Solution(value=None, objective=math.inf, bound=math.inf, status=Status.INFEASIBLE, seconds=0.0)
        return MeshSearch(solution=nothing, ranked=(), programs=0, priced=0, cheapest=0)

    monkeypatch.setattr("moe_overlap.plan_search.free.search_meshes", meshes)
    words = ("--num-layers", "4", "--pipeline-model-parallel-size", "1", "--global-batch-size", "8")
    case = case_of(*words, gpus=4, space="equal-operator")
    narrow = dataclasses.replace(case.task, space=narrow_space(case.task.space))
    layouts = [layout for layout in case.layouts if layout.context <= 2 and layout.micro_batch == 1]
    uniform = search_uniform(layouts, UniformCosts(narrow), lambda layout: case.bounds)
    run = Run(gpus=4, domain_gpus=8, sequence_length=4096, global_batch_size=8)
    search_beyond(uniform, layouts, case.task, lambda layout: case.bounds, 20, run=run)
    assert math.isfinite(uniform.solution.objective) and 2 in {plan.layout.context for plan in uniform.ranked}
    assert [(options["contexts"], options["incumbent_seconds"]) for options in asked] == [([1, 2], math.inf)]


def test_a_space_whose_states_move_adds_no_plan_with_model_chunks() -> None:
    """Although such a plan fits, and a search that interleaves what moves would find it."""
    case = case_of("--num-layers", "4", "--pipeline-model-parallel-size", "1", gpus=4, space="offload")
    case = least_memory(case, 0.05)
    narrow = dataclasses.replace(case.task, space=narrow_space(case.task.space))
    whole = dataclasses.replace(LAYOUT, tensor=2, expert=1, expert_tensor=2)
    layouts = [whole, dataclasses.replace(whole, virtual=2)]
    assert {*layouts} <= {*case.layouts}
    uniform, interleaved = (
        search_uniform(layouts, UniformCosts(task), lambda layout: case.bounds) for task in (narrow, case.task)
    )
    chunks = [plan for plan in interleaved.ranked if plan.layout.virtual > 1 and plan not in uniform.ranked]
    wide = search_beyond(uniform, layouts, case.task, lambda layout: case.bounds, 20).uniform
    assert chunks and not [plan for plan in chunks if plan in wide.ranked]


def test_data_spaces_have_data_ranks_alone() -> None:
    for name, levels in (("data", (0,)), ("zero2", (2,)), ("zero3", (3,))):
        space = SPACES[name]
        assert space.zero_levels == levels
        layouts = [layout for layout in scarce().layouts if space.has(layout)]
        assert {(layout.ranks, layout.pipeline) for layout in layouts} == {((1, 1, 1, 1), 1)}
        assert len({layout.micro_batch for layout in layouts}) > 1


# Mean micro-batches


def test_mean_micro_batches_take_as_long_together() -> None:
    times = StageTimes(forward=2.0, backward=3.0, first=1.0, tail=4.0)
    mean = averaged(times, 8)
    assert 8 * mean.stable == pytest.approx(8 * times.stable + 1.0 + 4.0)
    assert mean.first == mean.tail == 0.0


def test_what_mean_micro_batches_decide_is_never_faster() -> None:
    case = scarce()
    staged = search_stages(costs_of(case, averages=True), [LAYOUT]).solution.value
    assert staged is not None
    step = predicted(case, staged.plan(case.template, 3)).predicted.step_seconds
    assert step >= searched().solution.objective * (1.0 - 1e-9)
    assert staged.seconds != pytest.approx(step, rel=1e-6)


# Processes


def test_any_number_of_processes_finds_the_same_plans() -> None:
    """Uniform plans, freed stages and sub-meshes are shared by processes; each of which searches its part to the same end."""
    case = case_of(*THREE, "--global-batch-size", "8", gpus=4, space="full")
    case = least_memory(case, 0.055)
    layouts = [layout for layout in case.layouts if layout.virtual == 1 and layout.micro_batch <= 2]
    run = Run(gpus=4, domain_gpus=8, sequence_length=4096, global_batch_size=8)
    task = dataclasses.replace(case.task, space=SPACES["full"])
    narrow = dataclasses.replace(case.task, space=narrow_space(task.space))
    found = search_uniform(layouts, UniformCosts(narrow), lambda layout: case.bounds)
    one, two = (
        search_beyond(found, layouts, task, lambda layout: case.bounds, 20, SearchBudget(jobs=jobs), run)
        for jobs in (1, 2)
    )
    assert one.staged is not None and two.staged is not None
    assert one.uniform.ranked == two.uniform.ranked and one.uniform.solution.bound == two.uniform.solution.bound
    assert one.staged.ranked == two.staged.ranked and len(one.staged.ranked) > 1
    assert one.staged.solution.objective == two.staged.solution.objective
    assert one.staged.solution.status == two.staged.solution.status
    assert two.staged.layouts == one.staged.layouts and two.staged.mesh_stages >= one.staged.mesh_stages > 0


def test_shares_rank_what_a_search_of_all_layouts_ranks() -> None:
    """In the order of the layouts a plan is ranked if it is as fast as all before: a share knows no plans of the others."""
    layouts = [dataclasses.replace(LAYOUT, micro_batch=size) for size in (1, 2, 4, 8)]
    steps = dict(zip(layouts, (9.0, 11.0, 8.0, 8.5), strict=True))

    def share(own: list[UniformLayout], bound: float, status: Status) -> StageSearch:
        plans = sorted(
            (StagedPlan(layout=each, chunks=(), memories=(), seconds=steps[each], needed_bytes=0.0) for each in own),
            key=lambda plan: plan.seconds,
        )
        best = Solution(value=plans[0], objective=plans[0].seconds, bound=bound, status=status, seconds=1.0)
        return StageSearch(solution=best, ranked=tuple(plans), layouts=len(own), candidates=3, on_frontier=2)

    shares = [share(layouts[1::2], 7.0, Status.OPTIMAL), share(layouts[0::2], 7.5, Status.FEASIBLE)]
    whole = joined_stages(shares, layouts, 10.0)
    assert [plan.seconds for plan in whole.ranked] == [8.0, 9.0]
    assert whole.solution.value == whole.ranked[0] and whole.solution.objective == 8.0
    assert (whole.solution.bound, whole.solution.status) == (7.0, Status.FEASIBLE)
    assert (whole.layouts, whole.candidates, whole.on_frontier) == (4, 6, 4)
    none = joined_stages(shares, layouts, 1.0)
    assert none.ranked == () and none.solution.value is None
