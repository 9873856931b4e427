"""Uniform plans: the enumeration against the rules of a plan, prices and bounds against `predict`, the search against both."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest

from megatron.training.plan_flags import plan_from_flags
from moe_overlap.describe.cluster import GIB, Cluster, shipped_cluster
from moe_overlap.describe.errors import ConfigError, OutOfTime
from moe_overlap.describe.model import ModelDescription
from moe_overlap.job import features_of, read_job
from moe_overlap.plan.plan import Offload, Plan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan_search.free import narrow_space
from moe_overlap.tuner.capture.graph import CapturedModel, CapturedPart, Layout
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.feasibility import MemoryQuantiles
from moe_overlap.tuner.cost.machine import machine_of
from moe_overlap.tuner.cost.operators import tabulate
from moe_overlap.tuner.cost.prediction import estimate_plan
from moe_overlap.tuner.cost.uneven_chunks import unevenness
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.search.bounds import Bounds
from moe_overlap.tuner.search.solution import Status
from moe_overlap.tuner.search.space import (
    MemoryChoice,
    Run,
    UniformLayout,
    chunks_of,
    layers_of_chunks,
    layers_of_parts,
    uniform_layouts,
    uniform_plan,
)
from moe_overlap.tuner.search.uniform import RankedLayout, UniformSearch, search_uniform
from moe_overlap.tuner.search.uniform_cost import UniformCosts, UniformTask
from tests.unit.plan import plan_samples
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, JOB
from tests.unit.tuner.hand_made import captured_by_hand
from tests.unit.tuner.search.spaces import SPACES

pytestmark = pytest.mark.usefixtures("whole_memory")

SMALL = [*JOB, "--num-layers", "6", "--num-experts", "4", "--expert-model-parallel-size", "1"]


@cache
def graph_of(model: ModelDescription, degrees: tuple[int, int, int, int]) -> CapturedModel:
    graph = captured_by_hand(model, Layout(**dict(zip(DEGREES, degrees, strict=True))))
    again = [recomputing_a_module(part) for part in graph.parts if part.variant == "none" and part.kind in LAYERS]
    return dataclasses.replace(graph, parts=(*graph.parts, *again))


def recomputing_a_module(part: CapturedPart) -> CapturedPart:
    """A layer that keeps half as many storages between the passes, and runs its first operator again."""
    first = dataclasses.replace(
        part.ops[0], id=len(part.ops), phase="backward", is_recomputed=True, after=(len(part.ops) - 1,)
    )
    return dataclasses.replace(part, variant=MODULE[0], ops=(*part.ops, first), saved=part.saved[::2])


LAYERS = ("dense", "moe")
MODULE = ("layernorm",)
DEGREES = ("tensor", "context", "expert", "expert_tensor")


def graphs_of(plan: Plan, model: ModelDescription) -> Mapping[int, CapturedModel]:
    return {
        index: graph_of(model, (stage.tensor, stage.context, stage.expert, stage.expert_tensor))
        for index, stage in enumerate(plan.stages)
    }


@dataclasses.dataclass(frozen=True)
class Case:
    """A small model on a few GPUs."""

    task: UniformTask
    model: ModelDescription
    template: Plan
    layouts: list[UniformLayout]
    bounds: Bounds
    cluster: Cluster

    @property
    def sound(self) -> list[UniformLayout]:
        """Layouts that graphs by hand describe: they gather no rows over expert-tensor ranks."""
        return [layout for layout in self.layouts if layout.expert_tensor == 1]

    def plan(self, layout: UniformLayout, memory: MemoryChoice) -> Plan:
        return uniform_plan(self.template, self.model.num_layers, layout, memory)

    def predicted(self, layout: UniformLayout, memory: MemoryChoice) -> tuple[float, float]:
        """Seconds and bytes of the fullest stage, as tools/predict.py has them."""
        prediction = self.prediction(layout, memory)
        return prediction.predicted.step_seconds, float(prediction.fullest.needed_bytes)

    def prediction(self, layout: UniformLayout, memory: MemoryChoice) -> Prediction:
        plan = self.plan(layout, memory)
        problem = Problem(
            model=self.model,
            plan=plan,
            graphs=graphs_of(plan, self.model),
            features=self.task.features,
            machine=self.task.machine,
        )
        return estimate_plan(plan, problem)

    def search(self, **options: object) -> UniformSearch:
        return search_uniform(self.sound, UniformCosts(self.task), lambda layout: self.bounds, **options)  # type: ignore[arg-type]


def case_of(*words: str, gpus: int = 8, space: str = "recompute", gpu: str = "H100", **links: float) -> Case:
    cluster = shipped_cluster(gpu, gpus)
    if links:
        cluster = dataclasses.replace(cluster, groups=(dataclasses.replace(cluster.groups[0], **links),))
    job = read_job([*SMALL, "--global-batch-size", "16", *words], gpus)
    template = plan_from_flags(job.config, job.model, gpus)
    machine, _ = machine_of(cluster, CONSTANTS, is_moe=job.model.num_experts > 0)
    features = features_of(job.config, job.plan.precision, job.flags)
    task = UniformTask(
        templates=lambda tensor: (template, job.model),
        graphs=graphs_of,
        machine=machine,
        features=features,
        space=SPACES[space],
    )
    run = Run(gpus=gpus, domain_gpus=8, sequence_length=4096, global_batch_size=job.plan.global_batch_size)
    bounds = Bounds(model=job.model, template=template, machine=machine, features=features, space=task.space)
    return Case(task, job.model, template, list(uniform_layouts(job.model, run)), bounds, cluster)


CASE = case_of()


# The space


def test_every_layout_is_a_valid_plan_and_none_is_missing() -> None:
    """All combinations of degrees are tried against the rules of a plan."""
    enumerated = set(CASE.layouts)
    assert len(enumerated) == len(CASE.layouts)
    for layout in enumerated:
        validate_plan(CASE.plan(layout, MemoryChoice()), CASE.model)
    powers = (1, 2, 4, 8)
    ways = itertools.product(powers, powers, (1, 2, 3, 4, 8), powers, powers, range(1, 7), (1, 2, 4, 8, 16))
    for tensor, context, expert, expert_tensor, pipeline, virtual, micro_batch in ways:
        layout = UniformLayout(
            tensor=tensor,
            context=context,
            expert=expert,
            expert_tensor=expert_tensor,
            pipeline=pipeline,
            virtual=virtual,
            micro_batch=micro_batch,
        )
        if layout in enumerated or tensor * context * pipeline > 8 or math.gcd(context, micro_batch) > 1:
            continue
        if pipeline * virtual > 6 or (pipeline == 1 and virtual > 1):
            continue
        data = 8 // (pipeline * tensor * context)
        if 16 % (data * micro_batch):
            continue
        with pytest.raises(ConfigError):
            validate_plan(CASE.plan(layout, MemoryChoice()), CASE.model)


def test_context_ranks_for_samples_are_never_better() -> None:
    """The layouts that are not enumerated: CP c and a micro-batch of c cost what CP 1 and one sample do, and more."""
    costs = UniformCosts(CASE.task)
    one = UniformLayout(tensor=1, context=1, expert=4, expert_tensor=1, pipeline=1, virtual=1, micro_batch=1)
    shared = costs.evaluate(dataclasses.replace(one, context=2, micro_batch=2))
    alone = costs.evaluate(one)
    assert (alone.seconds <= shared.seconds).all() and (alone.needed_bytes <= shared.needed_bytes).all()


@pytest.mark.parametrize(("layers", "parts"), [(61, 16), (6, 6), (7, 4), (5, 1), (94, 8)])
def test_parts_are_equal_and_shorter_at_the_ends(layers: int, parts: int) -> None:
    sizes = layers_of_parts(layers, parts)
    assert sum(sizes) == layers and max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)
    ranges = [chunk for chunks in zip(*chunks_of(layers, parts, 1), strict=True) for chunk in chunks]
    assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])]


CHUNKED = [(94, 16, 5), (61, 16, 3), (61, 8, 3), (61, 8, 5), (32, 4, 6), (32, 2, 7), (60, 8, 4), (48, 4, 4), (94, 8, 4)]


@pytest.mark.parametrize(("layers", "stages", "virtual"), CHUNKED)
def test_chunks_are_equal_and_longer_in_front(layers: int, stages: int, virtual: int) -> None:
    sizes = layers_of_chunks(layers, stages, virtual)
    assert sum(sizes) == layers and max(sizes) - min(sizes) <= 1 and sizes[-1] == min(sizes)
    of_stages = [sum(sizes[stage::stages]) for stage in range(stages)]
    assert max(of_stages) - min(of_stages) <= 1 and of_stages[-1] == min(of_stages)
    ranges = [chunk for chunks in zip(*chunks_of(layers, stages, virtual), strict=True) for chunk in chunks]
    assert [last - first for first, last in ranges] == sizes
    assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])]


def test_chunks_that_are_longer_in_front_let_stages_wait_less() -> None:
    """Beside chunks that are shorter at both ends of the model; the loss takes as long as a layer or two."""

    def waits(sizes: list[int], stages: int, loss: float) -> float:
        chunks = [np.array([sizes[stage::stages]] * 2, dtype=float)[..., None] for stage in range(stages)]
        chunks[-1][:, -1] += loss
        total = sum(float(each[0].sum()) for each in chunks) / stages
        longest = max(float(each[0].sum()) for each in chunks)
        return float(unevenness(chunks, 8 * stages)[0]) * longest / total

    gains = {}
    for (layers, stages, virtual), loss in itertools.product(CHUNKED, (0.5, 1.0, 2.0)):
        before = waits(layers_of_parts(layers, stages * virtual), stages, loss)
        gains[layers, stages, virtual, loss] = before / waits(layers_of_chunks(layers, stages, virtual), stages, loss)
    assert min(gains.values()) > 0.985
    assert min(gains[shape] for shape in ((61, 16, 3, 1.0), (61, 8, 3, 1.0), (61, 8, 5, 2.0))) > 1.04


def test_attention_and_experts_have_degrees_of_their_own() -> None:
    """Parallel folding: TP 2 for attention beside EP 4 for experts that are whole."""
    assert any(
        (layout.tensor, layout.expert, layout.expert_tensor, layout.pipeline) == (2, 4, 1, 1) for layout in CASE.layouts
    )


# Prices


def test_experts_with_biases_are_not_split() -> None:
    """megatron-core refuses them: a layout with ETP ended the search of such a model in its first capture."""
    run = Run(gpus=8, domain_gpus=8, sequence_length=128, global_batch_size=16)
    plain = plan_samples.model("mmmm")
    biased = list(uniform_layouts(dataclasses.replace(plain, linear_bias=True), run))
    assert {layout.expert_tensor for layout in biased} == {1} and {layout.expert for layout in biased} >= {1, 2, 4}
    assert {layout.expert_tensor for layout in uniform_layouts(plain, run)} > {1}


@pytest.mark.parametrize("space", ["recompute", "offload"])
def test_prices_are_those_of_predict(space: str) -> None:
    case, draw = case_of(space=space), random.Random(space)
    costs = UniformCosts(case.task)
    for layout in draw.sample(case.layouts, 4 if space == "offload" else 12):
        evaluated = costs.evaluate(layout)
        n, r = (draw.randrange(size) for size in evaluated.seconds.shape)
        seconds, needed = case.predicted(layout, evaluated.choices[n][r])
        assert evaluated.seconds[n, r] == pytest.approx(seconds, rel=1e-9)
        assert evaluated.needed_bytes[n, r] == pytest.approx(needed, rel=1e-6)


def test_the_fullest_of_equal_stages_counts() -> None:
    """Stages in the middle have equal parts, and hold more micro-batches the further they stand in front."""
    case = case_of(
        "--num-layers", "4", "--moe-layer-freq", "([0]+[1]*3)", "--hidden-size", "4096", "--vocab-size", "257"
    )
    layout = UniformLayout(tensor=1, context=1, expert=2, expert_tensor=1, pipeline=4, virtual=1, micro_batch=1)
    evaluated = UniformCosts(case.task).evaluate(layout)
    fullest = set()
    for r, choice in enumerate(evaluated.choices[0]):
        prediction = case.prediction(layout, choice)
        fullest.add(prediction.fullest.stage)
        assert evaluated.needed_bytes[0, r] == pytest.approx(float(prediction.fullest.needed_bytes), rel=1e-6)
    assert fullest == {1} and len(evaluated.choices[0]) == 2


@pytest.mark.parametrize("axis", ["ep", "tp_ep"])
def test_a_part_that_layouts_share_costs_each_what_it_costs_it_alone(axis: str) -> None:
    """One table for all, in groups inside a node of two GPUs and beyond it, with loads that grow with the ranks of experts."""
    case = case_of(nodes=4, gpus_per_node=2, domain_gpus=2)
    table = tabulate(graph_of(case.model, (1, 1, 2, 1)).part("moe", samples=1), 1, 128)
    sent = tuple((index, dataclasses.replace(each, axis=axis), size) for index, each, size in table.collectives)
    table = dataclasses.replace(table, collectives=sent)
    task = dataclasses.replace(case.task, operators=lambda layout: [(table, 1)], load=lambda expert: 1.0 + expert / 8)
    costs, seen = UniformCosts(task), set()
    for layout in case.layouts:
        seconds = costs.through_seconds(layout)
        assert seconds == UniformCosts(task).through_seconds(layout)
        seen.add(seconds)
    assert len(seen) > 3


def test_a_part_of_a_space_has_the_prices_of_the_whole() -> None:
    """All layers again or none, and the optimizer alone on the host: those rows and columns, and nothing else."""
    wide = case_of(space="offload").task
    space = dataclasses.replace(wide.space, all_layers=True, offloads=("optimizer",))
    part = UniformCosts(dataclasses.replace(wide, space=space))
    for layout in (CASE.layouts[0], next(each for each in CASE.layouts if each.pipeline == 2 and each.virtual == 3)):
        whole, some = UniformCosts(wide).evaluate(layout), part.evaluate(layout)
        longest = 6 // (layout.pipeline * layout.virtual)
        assert [choice.layers for choice in some.choices[0]] == [0, longest]
        assert {choice.offload for row in some.choices for choice in row} == {
            Offload(optimizer=share) for share in (0.0, 0.5, 1.0)
        }
        known = {
            choice: place for n, row in enumerate(whole.choices) for r, choice in enumerate(row) for place in [(n, r)]
        }
        for n, row in enumerate(some.choices):
            for r, choice in enumerate(row):
                assert some.seconds[n, r] == pytest.approx(whole.seconds[known[choice]], rel=1e-9)
                assert some.needed_bytes[n, r] == pytest.approx(whole.needed_bytes[known[choice]], rel=1e-9)
    assert narrow_space(space) == dataclasses.replace(SPACES["recompute"], all_layers=True)


def cases() -> list[Case]:
    """Perturbed models and clusters."""
    return [
        CASE,
        case_of(gpus=4, network_gb_per_s=5.0),
        case_of("--num-layers", "8", "--moe-router-topk", "3", gpu="A100"),
        case_of("--num-query-groups", "2", "--group-query-attention", "--seq-length", "2048"),
        case_of("--moe-layer-freq", "([0]*2+[1]*4)", "--hidden-size", "1024"),
    ]


def test_no_bound_is_above_a_plan() -> None:
    for case in cases():
        costs = UniformCosts(case.task)
        layouts, held = case.sound[::3], []
        for layout in layouts:
            evaluated = costs.evaluate(layout)
            assert case.bounds.step_seconds(layout) <= costs.step_bound(layout) * (1 + 1e-9)
            assert costs.step_bound(layout) <= evaluated.seconds.min() * (1 + 1e-9)
            assert case.bounds.needed_bytes(layout) <= evaluated.needed_bytes.min()
            held.append(evaluated.needed_bytes.min() * case.template.world_size / case.bounds.state_bytes)
        # Bounds that say nothing would pass, too.
        assert 1.0 <= min(held) < 2.0
        tight = [case.bounds.step_seconds(layout) / costs.evaluate(layout).seconds.min() for layout in layouts]
        assert max(tight) > 0.4


# The search


Prices = dict[UniformLayout, dict[MemoryChoice, tuple[float, float]]]
"""Seconds and bytes of the fullest stage of every plan of every layout."""


def prices_of(case: Case) -> Prices:
    """Every plan of every layout by `predict`, one by one. They do not depend on the memory that a GPU has."""
    prices: Prices = {}
    for layout in case.sound:
        longest = max(last - first for chunks in chunks_of(case.model.num_layers, layout.pipeline, layout.virtual)
                      for first, last in chunks)  # fmt: skip
        choices = [MemoryChoice(layers=layers) for layers in range(longest + 1)]
        choices += [MemoryChoice(modules=modules) for modules in case.task.modules]
        prices[layout] = {choice: case.predicted(layout, choice) for choice in choices}
    return prices


def fastest(case: Case, prices: Prices) -> list[tuple[float, UniformLayout]]:
    """The fastest plan of each layout that fits and recomputes no modules but the case's."""
    most = case.cluster.group_of(0).gpu.memory_gib * GIB / case.task.machine.memory.high
    allowed = {(), *case.task.modules}
    best = []
    for layout, choices in prices.items():
        of_case = [price for choice, price in choices.items() if choice.modules in allowed]
        if fitting := [seconds for seconds, needed in of_case if needed <= most]:
            best.append((min(fitting), layout))
    return sorted(best)


def least_memory(case: Case, share: float) -> Case:
    """The case on GPUs of which a share of the memory is left, so that much does not fit."""
    group = case.cluster.groups[0]
    gpu = dataclasses.replace(group.gpu, memory_gib=group.gpu.memory_gib * share)
    cluster = dataclasses.replace(case.cluster, groups=(dataclasses.replace(group, gpu=gpu),))
    machine = dataclasses.replace(
        case.task.machine, cluster=cluster, memory=MemoryQuantiles(0.9, 1.1), reserved_bytes=0
    )
    task = dataclasses.replace(case.task, machine=machine)
    return dataclasses.replace(
        case, task=task, cluster=cluster, bounds=dataclasses.replace(case.bounds, machine=machine)
    )


def with_modules(case: Case) -> Case:
    """The case in which a module may be recomputed."""
    return dataclasses.replace(case, task=dataclasses.replace(case.task, modules=(MODULE,)))


def agrees(case: Case, best: list[tuple[float, UniformLayout]], keep: int) -> None:
    found = case.search(keep=keep)
    assert found.solution.status is Status.OPTIMAL and found.solution.gap == 0.0
    assert found.solution.objective == pytest.approx(best[0][0], rel=1e-9)
    seconds: dict[object, float] = {}
    for each, layout in best:
        seconds.setdefault((layout.ranks, layout.pipeline), each)
    kept = [plan.seconds for plan in found.ranked]
    assert kept == pytest.approx(sorted(seconds.values())[: len(kept)], rel=1e-9)
    counts = found.counts
    assert counts.layouts == len(case.sound) == counts.too_large + counts.too_slow + counts.evaluated
    assert not counts.not_reached


@cache
def few_gpus() -> tuple[Case, Prices]:
    """So many micro-batches that bounds are close to steps: with one plan kept, bounds a fifth too high would lose the best."""
    case = case_of("--global-batch-size", "64", gpus=4)
    return case, prices_of(with_modules(case))


def test_the_search_finds_what_an_enumeration_finds() -> None:
    roomy, prices = few_gpus()
    case = least_memory(roomy, 0.055)
    for number in (1, 2, 3):
        agrees(case, fastest(case, prices), number)
    found = case.search(keep=3)
    assert 0 < found.counts.fitting < found.counts.evaluated and found.counts.too_large


@pytest.mark.slow
def test_the_search_finds_what_an_enumeration_finds_on_perturbed_cases() -> None:
    perturbed_cases = list(cases())
    assert len(perturbed_cases) > 2
    for case in perturbed_cases:
        prices, small = prices_of(with_modules(case)), least_memory(case, 0.055)
        for perturbed in (case, small, with_modules(small)):
            agrees(perturbed, fastest(perturbed, prices), 3)


def test_a_deadline_that_is_over_ends_the_search_with_what_it_has() -> None:
    stopped = CASE.search(deadline=-math.inf)
    assert stopped.solution.status is Status.TIME_LIMIT and stopped.solution.value is None
    assert 0 < stopped.solution.bound <= CASE.search().solution.objective
    counts = stopped.counts
    assert counts.not_reached == counts.layouts - counts.too_large and not counts.too_slow and not counts.evaluated


def test_a_capture_that_does_not_end_in_time_ends_the_search_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, calls = UniformCosts.evaluate, itertools.count()

    def evaluated(*words: object, **named: object) -> object:
        if next(calls) == 2:
            raise OutOfTime("--time-limit", "", "passed", "give more time")
        return evaluate(*words, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(UniformCosts, "evaluate", evaluated)
    stopped = CASE.search()
    assert stopped.solution.status is Status.TIME_LIMIT and not stopped.is_interrupted
    assert stopped.solution.value is not None and stopped.counts.evaluated == 2


@pytest.mark.parametrize("where", ["evaluate", "step_bound"])
def test_a_layout_that_an_interrupt_leaves_unfinished_still_bounds_the_step(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the best one: the bound was that of the next, and it counted as ruled out."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    at_once = CASE.search(deadline=-math.inf)
    monkeypatch.setattr(UniformCosts, where, interrupted)
    stopped = CASE.search()
    assert stopped.is_interrupted and not stopped.counts.evaluated and not stopped.counts.too_slow
    assert stopped.counts.not_reached == at_once.counts.not_reached > 0
    # Layouts in front of it have their parts priced by then, which only raises bounds.
    assert stopped.solution.bound >= at_once.solution.bound
    if where == "step_bound":
        assert stopped.solution.bound == at_once.solution.bound


def test_an_interrupt_keeps_the_best_so_far() -> None:
    def interrupted(done: int, total: int, best: object) -> None:
        if done == 3:
            raise KeyboardInterrupt

    stopped = CASE.search(progress=interrupted)
    solution = stopped.solution
    assert solution.status is Status.TIME_LIMIT and stopped.counts.evaluated == 3
    assert solution.value is not None and solution.bound < solution.objective
    assert solution.objective >= CASE.search().solution.objective >= solution.bound


def test_nothing_fits() -> None:
    found = least_memory(CASE, 0.02).search()
    assert found.solution.status is Status.INFEASIBLE and found.solution.value is None and found.ranked == ()


def test_what_the_target_refuses_is_no_answer() -> None:
    found = CASE.search(accepts=lambda layout, memory: layout.tensor == 2 and not memory.layers)
    assert {plan.layout.tensor for plan in found.ranked} == {2}
    assert {plan.memory.layers for plan in found.ranked} == {0}


def test_what_is_refused_late_hides_no_other_plan_of_its_layout() -> None:
    """The search keeps what it would keep if the target refused the same plans early: recomputing layers is the next best."""
    asked = []

    def admits(plan: RankedLayout) -> bool:
        asked.append(plan)
        return plan.memory.layers > 1

    late, early = CASE.search(admits=admits), CASE.search(accepts=lambda layout, memory: memory.layers > 1)
    assert late.ranked == early.ranked and late.ranked
    assert any(plan.memory.layers <= 1 for plan in asked)
    refused = {(plan.layout, plan.memory) for plan in asked if plan.memory.layers <= 1}
    assert not refused & {(plan.layout, plan.memory) for plan in late.frontier}


def test_the_frontier_trades_seconds_for_bytes() -> None:
    frontier = CASE.search().frontier
    assert len(frontier) > 1
    for faster, smaller in itertools.pairwise(frontier):
        assert faster.seconds < smaller.seconds and faster.needed_bytes > smaller.needed_bytes


def test_modules_are_recomputed_where_the_fastest_does_not_fit() -> None:
    """The search agrees with an enumeration of all layouts; where everything fits, no module is recomputed or priced."""
    roomy, prices = few_gpus()
    case = least_memory(roomy, 0.055)
    agrees(with_modules(case), fastest(with_modules(case), prices), 3)
    with_freedom, without = with_modules(case).search(keep=3), case.search(keep=3)
    assert with_freedom.solution.objective < without.solution.objective
    assert any(plan.memory.modules == MODULE for plan in with_freedom.ranked)
    all_fits = case_of(gpus=4)
    assert with_modules(all_fits).search().ranked == all_fits.search().ranked
