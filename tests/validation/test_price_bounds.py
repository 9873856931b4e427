"""What holds of every price: nothing is faster than its machine, states are held, and more work or less machine takes longer.

A thousand random runs (random_runs.py) at the shipped constants. Bounds are counted anew here, from operators, groups and the
description of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from moe_overlap.describe.cluster import Gpu, NodeGroup
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.expression import evaluate
from moe_overlap.tuner.cost.analytic import Family, Priced, prepare, price_family
from moe_overlap.tuner.cost.layer import alone_seconds, kernel_seconds
from moe_overlap.tuner.cost.links import Group
from moe_overlap.tuner.cost.operators import CostClassCode, OpTable
from moe_overlap.tuner.cost.prediction import estimate_plan
from moe_overlap.tuner.problem import Problem
from tests.unit.plan.plan_samples import a_third
from tests.validation.random_runs import Run, random_runs

RUNS = 1000
PRODUCTS = (CostClassCode.GEMM, CostClassCode.GROUPED_GEMM, CostClassCode.ATTENTION)
ROUNDING = 1e-9
MOVED = 0.005
"""Of a step whose states move: the first and the last micro-batch add differences of overlaps, which may shrink with more work.
Of 57 such runs one gets shorter, by 0.2 %; answers are those of lists."""
MOST_SHORTER = 0.05
"""Share of such runs that get shorter by any of the changes, or no longer with more layers or tokens."""
GIGA = 1e9


@cache
def thousand_runs() -> list[tuple[Run, Problem]]:
    return list(random_runs(13, RUNS))


def families_of(problem: Problem) -> list[Priced]:
    plan, machine, features = problem.plan, problem.machine, problem.features
    families = prepare(plan, problem.model, problem.graphs, features, machine.load)
    return [price_family(plan, problem.model, family, machine, features) for family in families]


def peak_of(table: OpTable, gpu: Gpu, precision: str) -> np.ndarray:
    """[N] operations per second of the units that each product may run in."""
    narrow = {"fp8": gpu.fp8_tflops, "mxfp8": gpu.fp8_tflops, "nvfp4": gpu.fp4_tflops or gpu.fp8_tflops}.get(precision)
    return np.where(table.quantizable, narrow or gpu.bf16_tflops, gpu.bf16_tflops) * 1e12


def least_seconds(kind: str, payload: float, group: Group) -> float:
    """Below which no collective can be: what a rank, and what a block of ranks, must send over all of its links together."""
    links, n = group.links, group.size
    near, card = max(links.domain_gb_per_s or 0.0, links.node_gb_per_s) * GIGA, links.network_gb_per_s * GIGA
    block = max(group.per_domain, group.per_node)
    if kind == "all_to_all":
        return max(payload * (n - block) / n / card, payload * (block - 1) / n / near)
    times = 2.0 if kind == "all_reduce" else 1.0
    # Every rank takes in all that the others have; a block does so for the ranks outside of it, through a card of each rank.
    inside = payload * (n - 1) / n / (near * (block > 1) + card * (n > block))
    across = payload * (n - block) / n / (block * card)
    return times * max(inside, across)


def weights_of(plan: Plan, family: Family, problem: Problem) -> np.ndarray:
    """[M] bytes of the weights that the stages of a family keep on a device."""
    stage, held = family.stage, np.zeros(len(family.stages))
    for table, counts in zip(family.tables, family.counts, strict=True):
        for storage in table.part.storages:
            if storage.role == "parameter":
                size = float(np.asarray(evaluate([storage.bytes], stage.micro_batch_size, plan.sequence_length))[0])
                ranks = stage.expert_data if storage.replicas == "edp" else stage.data * stage.context
                held += counts * size / 2.0 / (ranks if stage.zero_level == 3 else 1)
    return held * problem.features.weight_bytes * (1.0 - stage.offload.weights)


def test_nothing_is_faster_than_its_machine_and_weights_are_held() -> None:
    compared = set()
    for run, problem in thousand_runs():
        plan, links = problem.plan, problem.cluster.group_of(0)
        gpu = links.gpu
        held: dict[int, float] = {}
        for priced in families_of(problem):
            for table in priced.family.tables:
                check_operators(table, priced, gpu)
                for index, collective, payload in table.collectives:
                    group = priced.setting.groups[collective.axis]
                    if group.size > 1 and problem.features.dispatcher == "alltoall":
                        seconds = alone_seconds(table, priced.setting, index, collective, payload)
                        least = least_seconds(collective.kind, payload, group)
                        assert seconds >= least * (1 - ROUNDING), (run, collective)
                        compared.add((collective.kind, collective.axis))
            check_states(priced, links)
            held |= dict(zip(priced.family.stages, weights_of(plan, priced.family, problem), strict=True))
        prediction = estimate_plan(plan, problem)
        assert 0 < prediction.mfu < 1, run
        assert min(prediction.breakdown.values()) > -1e-9 * prediction.predicted.step_seconds, run
        for index, stage in enumerate(prediction.predicted.stages):
            assert stage.peak_bytes >= stage.peak_bytes_by_category.parameters >= held[index] * (1 - ROUNDING) - 1, run
    axes = {"tp", "cp", "ep", "etp"}
    assert {axis for _, axis in compared} >= axes and len(compared) >= 6


def check_operators(table: OpTable, priced: Priced, gpu: Gpu) -> None:
    seconds, _ = kernel_seconds(table, priced.setting)
    products = np.isin(table.classes, PRODUCTS)
    peak = peak_of(table, gpu, priced.setting.features.precision)
    assert (seconds[products] * peak[products] >= table.flops[products] * (1 - ROUNDING)).all()
    streams = table.classes == CostClassCode.MEMORY
    assert (seconds[streams] * gpu.memory_gb_per_s * GIGA >= table.bytes[streams] * (1 - ROUNDING)).all()


def check_states(priced: Priced, links: NodeGroup) -> None:
    """Seconds per byte of states that are gathered, copied and swept."""
    rates, groups = priced.rates, priced.setting.groups
    for scatter, axis in ((rates.dense_scatter, "dp_cp"), (rates.expert_scatter, "edp")):
        if groups[axis].size > 1:
            assert scatter[0] >= least_seconds("all_gather", 1.0, groups[axis]) * (1 - ROUNDING)
    assert rates.host_copy * links.host_gb_per_s * GIGA >= 1 - ROUNDING
    assert rates.optimizer_sweep * links.gpu.memory_gb_per_s * GIGA >= 1 - ROUNDING


def step(problem: Problem) -> float:
    return estimate_plan(problem.plan, problem).predicted.step_seconds


def with_links(problem: Problem, **fields: Any) -> Problem:
    machine = problem.machine
    groups = tuple(replace(group, **fields) for group in machine.cluster.groups)
    cluster = replace(machine.cluster, groups=groups)
    return replace(problem, machine=replace(machine, cluster=cluster))


def halved(problem: Problem, link: str) -> Problem:
    group = problem.cluster.group_of(0)
    return with_links(problem, **{link: getattr(group, link) / 2}) if getattr(group, link) else problem


def with_slow_memory(problem: Problem) -> Problem:
    gpu = problem.cluster.group_of(0).gpu
    return with_links(problem, gpu=replace(gpu, memory_gb_per_s=gpu.memory_gb_per_s / 2))


def with_skew(problem: Problem) -> Problem:
    return replace(problem, machine=replace(problem.machine, load=1.5)) if problem.model.num_experts else problem


CHANGES: Mapping[str, Callable[[Run, Problem], Problem]] = {
    "layers": lambda run, _: run.problem(layers=run.layers + run.step_of_layers),
    "tokens": lambda run, _: run.problem(sequence=2 * run.sequence),
    "skew": lambda _, problem: with_skew(problem),
    "device memory": lambda _, problem: with_slow_memory(problem),
    "domain": lambda _, problem: halved(problem, "domain_gb_per_s"),
    "node": lambda _, problem: halved(problem, "node_gb_per_s"),
    "network": lambda _, problem: halved(problem, "network_gb_per_s"),
    "host": lambda _, problem: halved(problem, "host_gb_per_s"),
}


@a_third
def test_more_work_and_slower_links_take_longer(third: int) -> None:
    """Layers, tokens, experts that are chosen unlike, device memory and each link at half of its rate."""
    runs, longer, shorter = thousand_runs()[third::3], dict.fromkeys(CHANGES, 0), 0
    for run, problem in runs:
        seconds, is_shorter = step(problem), False
        for name, change in CHANGES.items():
            changed = change(run, problem)
            if changed is problem:
                continue
            more = step(changed)
            assert more >= seconds * (1 - (MOVED if run.is_decoupled else ROUNDING)), (name, more / seconds - 1, run)
            is_shorter |= more < seconds * (1 - ROUNDING)
            longer[name] += more > seconds * 1.0001
        shorter += is_shorter
    few = MOST_SHORTER * sum(run.is_decoupled for run, _ in runs)
    assert shorter <= few
    # Copies of states may last longer than all passes, so that more tokens are hidden under them.
    assert longer["layers"] >= len(runs) - few and longer["tokens"] >= len(runs) - few
    # Not every run has each link, experts, or copies to its host; what is there is paid for.
    assert min(longer.values()) >= len(runs) // 20, longer
