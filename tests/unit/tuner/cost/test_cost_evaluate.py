"""One code prices predictions and searches: many stages at once equal each predicted plan; what holds of every configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from moe_overlap.api import problem_of
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.plan.plan import Offload, Plan, Recompute
from moe_overlap.tuner.cost.analytic import prepare, price, stage_evaluator
from moe_overlap.tuner.cost.evaluate import (
    SECONDS,
    StageCosts,
    StageEvaluator,
    StageShapes,
    runs_of,
)
from moe_overlap.tuner.cost.hardware import Dispatcher
from moe_overlap.tuner.cost.interference import partly_concurrent
from moe_overlap.tuner.cost.layer import Setting, alone_seconds, kernel_seconds, part_cost
from moe_overlap.tuner.cost.links import (
    all_to_all_seconds,
    axis_group,
    collective_seconds,
    point_to_point_seconds,
)
from moe_overlap.tuner.cost.operators import CostClassCode, tabulate
from moe_overlap.tuner.cost.stage import KindTerms, StateRates, Strategy
from moe_overlap.tuner.cost.stage_parts import StagePart
from moe_overlap.tuner.problem import Problem
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, JOB, by_hand

PLANS = 200
CONFIGURATIONS = 1000
SHARES = np.array([0.0, 0.25, 0.5, 1.0])


@cache
def problem(stages: int) -> Problem:
    words = f"--num-layers {5 * stages} --pipeline-model-parallel-size {stages} --expert-model-parallel-size 8"
    return problem_of([*JOB, *words.split()], shipped_cluster("H100", 32), {"graphs": by_hand, "constants": CONSTANTS})


def plan_of(stages: int, strategy: Strategy, number: int, again: int) -> Plan:
    plan = problem(stages).plan
    offload = Offload(
        **{
            name: float(getattr(strategy, f"offload_{name}")[number])
            for name in ("weights", "gradients", "optimizer", "activations")
        }
    )
    recompute = Recompute(layers=again, granularity="full") if again else Recompute()
    level = int(strategy.zero_level[number])
    changed = (replace(stage, zero_level=level, offload=offload, recompute=recompute) for stage in plan.stages)
    return replace(plan, stages=tuple(changed))


@pytest.mark.parametrize("stages", [1, 2])
def test_the_batch_equals_each_predicted_plan(stages: int) -> None:
    """Random strategies and recomputed layers, all at once with a shape for each number of recomputed layers."""
    random, here = np.random.default_rng(stages), problem(stages)
    count = PLANS // 2
    stage = here.plan.stages[0]
    strategy = Strategy(
        data=np.full(count, float(stage.data * stage.context)),
        expert_data=np.full(count, float(stage.expert_data)),
        zero_level=random.integers(0, 4, count).astype(np.float64),
        offload_weights=random.choice(SHARES, count) * random.integers(0, 2, count),
        offload_gradients=random.choice(SHARES, count) * random.integers(0, 2, count),
        offload_optimizer=random.choice(SHARES, count) * random.integers(0, 2, count),
        offload_activations=random.choice(SHARES, count) * random.integers(0, 2, count),
    )
    # Four of five layers recomputed: every kind is there, and the runs are embedding, recomputed, other, head.
    whole = plan_of(stages, strategy, 0, 4)
    (family,) = prepare(whole, here.model, here.graphs, here.features)
    evaluator = stage_evaluator(whole, here.model, family, here.machine, here.features, strategy)
    batches: list[StageCosts] = []
    choices = (1, 2, 4)
    for column in family.stages:
        runs, counts = runs_of(family.parts[column])
        again, rest = [
            run for run, part in enumerate(runs) if family.tables[part.row].part.kind not in ("embedding", "head")
        ]
        table = np.repeat(np.array(counts)[:, None], len(choices), axis=1)
        table[again], table[rest] = choices, 5 - np.array(choices)
        shapes = StageShapes(
            runs=runs,
            counts=table,
            in_flight=np.full(len(choices), family.in_flight[column]),
            boundary_bytes=family.boundary_bytes if stages > 1 else 0.0,
        )
        batches.append(evaluator.costs(shapes))
    transfers = price(whole, here.model, (family,), here.machine, here.features).breakdown["exposed_transfer_seconds"]
    assert (transfers > 0) == (stages > 1)
    for number in range(count):
        place = number % len(choices)
        plan = plan_of(stages, strategy, number, choices[place])
        families = prepare(plan, here.model, here.graphs, here.features)
        found = price(plan, here.model, families, here.machine, here.features)
        waits = found.breakdown["exposed_transfer_seconds"] / plan.stages[0].gradient_accumulation_steps
        for batch, one in zip(batches, found.predicted.stages, strict=True):
            stable = batch.stable_seconds[number, place] + waits
            first, last = (seconds[number, place] for seconds in beyond_stable(batch))
            assert stable == pytest.approx(one.stable_seconds, rel=1e-9)
            assert stable + first == pytest.approx(one.first_seconds, rel=1e-9)
            assert stable + last == pytest.approx(one.last_seconds, rel=1e-9)
            assert batch.peak_bytes[number, place] == pytest.approx(one.peak_bytes, abs=8)


def random_evaluator(
    random: np.random.Generator, size: int = CONFIGURATIONS
) -> tuple[StageEvaluator, KindTerms, Strategy, StateRates]:
    """Kinds of any size under so many strategies."""
    kinds = KindTerms(
        forward_seconds=10 ** random.uniform(-4, -2, 3),
        backward_seconds=10 ** random.uniform(-4, -2, 3),
        saved_bytes=10 ** random.uniform(6, 9, 3),
        working_bytes=10 ** random.uniform(6, 9, 3),
        dense_parameters=10 ** random.uniform(6, 8, 3),
        expert_parameters=10 ** random.uniform(6, 8, 3),
        is_layer=np.array([True, True, False]),
    )
    strategy = Strategy(
        data=random.choice([1.0, 2.0, 8.0], size),
        expert_data=random.choice([1.0, 2.0], size),
        zero_level=random.integers(0, 4, size).astype(np.float64),
        offload_weights=random.choice(SHARES, size) * random.integers(0, 2, size),
        offload_gradients=random.choice(SHARES, size) * random.integers(0, 2, size),
        offload_optimizer=random.choice(SHARES, size) * random.integers(0, 2, size),
        offload_activations=random.choice(SHARES, size) * random.integers(0, 2, size),
    )
    rates = StateRates(
        dense_scatter=10 ** random.uniform(-12, -10, size),
        expert_scatter=10 ** random.uniform(-12, -10, size),
        latency_seconds=1e-5,
        host_copy=2e-11,
        optimizer_sweep=4e-13,
        weight_bytes=2.0,
        gradient_bytes=4.0,
        optimizer_bytes=12.0,
        gathered_bytes=2.0,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    return evaluator_of(kinds, strategy, rates), kinds, strategy, rates


def evaluator_of(kinds: KindTerms, strategy: Strategy, rates: StateRates) -> StageEvaluator:
    return StageEvaluator(kinds, strategy, rates, partly_concurrent(0.15), 0.05)


RUNS = (StagePart(0), StagePart(1), StagePart(2, held_once=True))


def shapes_of(*counts: tuple[int, int, int]) -> StageShapes:
    return StageShapes(
        runs=RUNS,
        counts=np.array(counts, dtype=np.float64).T,
        in_flight=np.full(len(counts), 3.0),
        boundary_bytes=1e6,
    )


def test_a_strategy_costs_the_same_among_others_as_alone() -> None:
    """Also among those of other ZeRO levels, whose states move otherwise."""
    _, kinds, strategy, rates = random_evaluator(np.random.default_rng(11), 200)
    shapes = shapes_of((2, 2, 1))
    together = evaluator_of(kinds, strategy, rates).costs(shapes)
    for number in range(0, 200, 7):
        own = {field.name: getattr(strategy, field.name)[[number]] for field in dataclasses.fields(Strategy)}
        scatters = {name: getattr(rates, name)[[number]] for name in ("dense_scatter", "expert_scatter")}
        alone = evaluator_of(kinds, Strategy(**own), replace(rates, **scatters)).costs(shapes)
        scale = alone.stable_seconds[0, 0]
        for name in SECONDS:
            apart = getattr(together, name)[number, 0] - getattr(alone, name)[0, 0]
            assert abs(apart) < 1e-9 * scale, (number, name)
        assert together.peaks["communication"][number, 0] == pytest.approx(alone.peaks["communication"][0, 0], abs=8)


def step(costs: StageCosts) -> np.ndarray:
    """Seconds of a step of eight micro-batches of a stage by itself."""
    first, last = beyond_stable(costs)
    return 8 * costs.stable_seconds + first + last + costs.optimizer_seconds


def beyond_stable(costs: StageCosts) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of the first and of the last micro-batch beyond a stable one."""
    return costs.first_extra_seconds, costs.tail_seconds


def test_more_layers_take_longer_and_hold_more_than_their_weights() -> None:
    evaluator, kinds, strategy, _ = random_evaluator(np.random.default_rng(3))
    costs = evaluator.costs(shapes_of((1, 1, 1), (2, 1, 1), (2, 2, 1), (3, 2, 1), (4, 2, 1), (4, 4, 1), (8, 4, 1)))
    assert (np.diff(costs.stable_seconds, axis=1) > 0).all() and (np.diff(step(costs), axis=1) > 0).all()
    # Which buffers are there together depends on when they come and go.
    assert (np.diff(costs.peak_bytes, axis=1) > -0.1 * costs.peak_bytes[:, 1:]).all()
    shares = np.where(strategy.zero_level >= 3, 1.0, 0.0)[:, None]
    dense, experts = kinds.dense_parameters, kinds.expert_parameters
    replicas = (strategy.data[:, None], strategy.expert_data[:, None])
    kept = sum(
        parameters[None, :] * (shares / ranks + 1 - shares)
        for parameters, ranks in zip((dense, experts), replicas, strict=True)
    )
    weights = 2.0 * (kept * (1 - strategy.offload_weights[:, None])) @ shapes_of((8, 4, 1)).counts[:, 0]
    assert (costs.peak_bytes[:, -1] >= weights).all()


@pytest.mark.parametrize("slower", ["dense_scatter", "expert_scatter", "host_copy", "optimizer_sweep"])
def test_slower_links_and_copies_never_save_time(slower: str) -> None:
    evaluator, kinds, strategy, rates = random_evaluator(np.random.default_rng(4))
    twice = evaluator_of(kinds, strategy, replace(rates, **{slower: 2 * getattr(rates, slower)}))
    shapes = shapes_of((2, 1, 1), (3, 3, 1), (5, 3, 1))
    fast, slow = step(evaluator.costs(shapes)), step(twice.costs(shapes))
    assert (slow >= fast).all() and (slow > fast).any()
    assert (slow > fast).any()


@pytest.mark.parametrize("dispatcher", ["alltoall", "deepep"])
def test_collectives_of_a_part_take_what_each_takes_alone(dispatcher: Dispatcher) -> None:
    """They are priced together, though their payloads, kinds, groups and loads are unlike."""
    here = problem(1)
    (family,) = prepare(here.plan, here.model, here.graphs, here.features)
    table = next(table for table in family.tables if table.part.kind == "moe")
    links, axes = here.cluster.groups[0], ("tp", "cp", "ep", "etp", "tp_ep", "dp", "dp_cp", "edp")
    setting = Setting(
        gpu=links.gpu, groups={axis: axis_group(4 * (2 + place), 1, 64, links) for place, axis in enumerate(axes)},
        features=dataclasses.replace(here.features, dispatcher=dispatcher), constants=CONSTANTS.gpus["H100"],
        common=CONSTANTS.common, concurrent=partly_concurrent(0.15), topk=2, experts=8, load=1.5,
    )  # fmt: skip
    (first, sent, size), (second, *_), (third, *_), (fourth, *_) = table.collectives
    # The second differs from the first in its load, the third from that in its kind, the fourth from the first in its axis, and
    # the last from the first where that one sends no tokens.
    collectives = (
        (first, sent, size),
        (second, sent, 2 * size),
        (second, replace(sent, kind="all_gather"), 3 * size),
        (third, replace(sent, axis="tp_ep"), 4 * size),
        (fourth, sent, 5 * size),
    )
    loaded = table.loaded & (np.arange(len(table.ops)) != second)
    counts = tuple(replace(op, operator="moe.gate") if op.id == first else op for op in table.ops)
    for ops in (table.ops, counts):
        changed = replace(table, ops=ops, collectives=collectives, loaded=loaded)
        cost = part_cost(changed, setting)
        for one, is_backward in ((cost.forward, False), (cost.backward, True)):
            alone = [
                alone_seconds(changed, setting, *each) for each in collectives if table.backward[each[0]] == is_backward
            ]
            assert len(alone) > 1 and one.exchange_seconds == pytest.approx(sum(alone), rel=1e-12)


def test_products_links_and_loads_keep_to_their_rates() -> None:
    """Random sizes: no product beyond its peak, no link beyond its rate, more tokens and more load take longer."""
    random, here = np.random.default_rng(5), problem(1)
    (family,) = prepare(here.plan, here.model, here.graphs, here.features)
    gpu, links = here.cluster.groups[0].gpu, here.cluster.groups[0]
    constants = CONSTANTS.gpus["H100"]
    groups = {axis: axis_group(8, 1, 32, links) for axis in ("tp", "cp", "ep", "etp", "tp_ep", "dp", "dp_cp", "edp")}
    setting = Setting(
        gpu=gpu, groups=groups, features=here.features, constants=constants, common=CONSTANTS.common,
        concurrent=partly_concurrent(0.15), topk=2,
    )  # fmt: skip
    parts = [table.part for table in family.tables]
    for number in range(CONFIGURATIONS // 10):
        b, s = int(random.integers(1, 9)), int(2 ** random.integers(8, 14))
        part = parts[number % len(parts)]
        table = tabulate(part, b, s)
        seconds, _ = kernel_seconds(table, setting)
        products = np.isin(table.classes, (CostClassCode.GEMM, CostClassCode.GROUPED_GEMM, CostClassCode.ATTENTION))
        assert (table.flops[products] <= seconds[products] * gpu.bf16_tflops * 1e12).all()
        assert part_cost(tabulate(part, b + 1, s), setting).seconds >= part_cost(table, setting).seconds
        loads = [part_cost(table, replace(setting, load=load)).seconds for load in (1.0, 1.5)]
        assert loads[1] >= loads[0]
    rates = dataclasses.replace(constants.link_rates, latency_seconds=0.0)
    for _ in range(CONFIGURATIONS):
        size, stride = int(2 ** random.integers(1, 6)), int(2 ** random.integers(0, 4))
        group, sent = axis_group(min(size, 32 // stride), stride, 32, links), 10 ** random.uniform(3, 10)
        if group.size < 2:
            continue
        fastest = max(links.domain_gb_per_s or 0.0, links.node_gb_per_s, links.network_gb_per_s) * 1e9
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            moved = sent * (group.size - 1) / group.size * (2 if kind == "all_reduce" else 1)
            assert float(collective_seconds(kind, sent, group, rates)) >= moved / fastest / group.size
            assert collective_seconds(kind, 2 * sent, group, rates) > collective_seconds(kind, sent, group, rates)
        assert float(all_to_all_seconds(sent, group, rates)) > 0
        assert float(point_to_point_seconds(sent, axis_group(2, stride, 32, links), rates)) >= sent / fastest
