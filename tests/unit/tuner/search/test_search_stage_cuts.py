"""Cuts, sub-meshes, placement and clusters of operators, each against all possibilities."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
import pytest

from moe_overlap.tuner.search.pipeline.operator_clusters import Tensor, cluster, received_bytes
from moe_overlap.tuner.search.pipeline.placement import SubMesh, place, submeshes
from moe_overlap.tuner.search.pipeline.stage_cuts import CutProblem, CutStage, cut_stages, step_of_cuts
from moe_overlap.tuner.search.pipeline.thresholds import search_thresholds
from moe_overlap.tuner.search.solution import Status

INSTANCES = 150


def all_plans(problem: CutProblem) -> Iterator[tuple[CutStage, ...]]:
    """Every cut and every choice of options that uses all devices."""
    layers, options = problem.layers, range(len(problem.devices_of))
    for count in range(layers):
        for cuts in combinations(range(1, layers), count):
            edges = [0, *cuts, layers]
            for chosen in product(options, repeat=count + 1):
                if tuple(problem.devices_of[list(chosen)].sum(axis=0)) == problem.devices:
                    yield tuple(CutStage(a, b - 1, o) for a, b, o in zip(edges, edges[1:], chosen, strict=False))


def by_hand(problem: CutProblem, stages: tuple[CutStage, ...]) -> float:
    """Equation (2), with one transfer at each cut in front of a stage and behind it."""
    sent = np.broadcast_to(problem.transfer_seconds, (problem.layers - 1, len(problem.devices_of)))
    pairs = zip(stages, stages[1:], strict=False)
    cut = {a.last: max(sent[a.last, a.option], sent[a.last, b.option]) for a, b in pairs}
    seconds = []
    for behind, stage in zip(range(len(stages) - 1, -1, -1), stages, strict=True):
        p = min(behind, len(problem.seconds) - 1)
        own = float(problem.seconds[p, stage.first, stage.last, stage.option])
        seconds.append(own + cut.get(stage.first - 1, 0.0) + cut.get(stage.last, 0.0))
    return sum(seconds) + (problem.micro_batches - 1) * max(seconds) if max(seconds) < math.inf else math.inf


def random_problem(draw: np.random.Generator) -> CutProblem:
    """One or two node types, with and without limits by the stages behind; few values, so that there are ties."""
    layers = int(draw.integers(1, 6))
    if draw.random() < 0.3:
        devices_of, devices = (
            np.array([[1, 0], [2, 0], [0, 1], [0, 2]]),
            (int(draw.integers(1, 4)), int(draw.integers(1, 3))),
        )
    else:
        nodes, per_node = (int(draw.integers(1, 4)), int(draw.choice([1, 2])))
        devices_of = np.array([[mesh.devices] for mesh in submeshes(nodes, per_node)])
        devices = (nodes * per_node,)
    depths = int(draw.choice([1, 2, 4]))
    shape = (1, layers, layers, len(devices_of))
    seconds = draw.integers(1, 30, shape) / 7 if draw.random() < 0.5 else draw.uniform(1, 5, shape)
    # A stage with more stages behind does not fit, or takes longer as it recomputes.
    seconds = seconds + np.cumsum(
        draw.choice([0.0, 0.0, 0.5, math.inf], (depths, *shape[1:]), p=[0.5, 0.2, 0.2, 0.1]), axis=0
    )
    return CutProblem(
        seconds=seconds,
        devices_of=devices_of,
        devices=devices,
        micro_batches=int(draw.choice([1, 2, 8, 64])),
        # None; by the cut; by the option, with two values or any.
        transfer_seconds=[
            np.zeros((layers - 1, 1)),
            draw.uniform(0, 1, (layers - 1, 1)),
            draw.integers(1, 3, (layers - 1, len(devices_of))) / 2,
            draw.uniform(0, 1, (layers - 1, len(devices_of))),
        ][draw.integers(4)],
    )


def test_cuts_are_the_best_of_all() -> None:
    draw = np.random.default_rng(52)
    infeasible = unlike = limited = 0
    for _ in range(INSTANCES):
        problem = random_problem(draw)
        plans = list(all_plans(problem))
        best = min((by_hand(problem, stages) for stages in plans), default=math.inf)
        solution = cut_stages(problem)
        assert solution.objective == pytest.approx(best, rel=1e-12)
        if solution.value is None:
            infeasible += 1
            assert solution.status == Status.INFEASIBLE and best == math.inf
            continue
        unlike += len(problem.devices) > 1
        limited += len(problem.seconds) > 1
        assert solution.status == Status.OPTIMAL and solution.gap == 0.0
        assert solution.value in plans
        assert solution.objective == step_of_cuts(problem, solution.value)
        assert by_hand(problem, solution.value) == pytest.approx(solution.objective, rel=1e-12)
    assert min(infeasible, unlike, limited) > 10


def cluster_table(layers: int, nodes: int, per_node: int, depths: int = 1, memory: float = math.inf) -> CutProblem:
    """Layers of unlike work on sub-meshes that lose efficiency with their size, and noise on every stage."""
    draw = np.random.default_rng(1)
    meshes = submeshes(nodes, per_node)
    sizes = np.array([mesh.devices for mesh in meshes])
    before = np.concatenate([[0.0], np.cumsum(draw.uniform(0.5, 1.5, layers))])
    work = (before[None, 1:] - before[:-1, None])[:, :, None]
    seconds = np.where(work > 0, work / sizes**0.85 * draw.uniform(0.95, 1.05, (layers, layers, len(meshes))), math.inf)
    held = work / sizes * (1.0 + 0.3 * np.arange(1, depths + 1)[:, None, None, None])
    return CutProblem(
        seconds=np.where(held <= memory, seconds, math.inf),
        devices_of=sizes[:, None],
        devices=(nodes * per_node,),
        micro_batches=64,
        transfer_seconds=draw.uniform(0, 0.02, (layers - 1, 1)),
    )


def smallest_sum(problem: CutProblem, threshold: float) -> float:
    """The smallest sum of stages that take no longer than the threshold, from the front of the model, all devices used."""
    (total,), layers = problem.devices, problem.layers
    cut = np.concatenate([[0.0], problem.transfer_seconds[:, 0], [0.0]])
    seconds = problem.seconds[0] + (cut[:-1, None] + cut[None, 1:])[:, :, None]
    sums = np.full((layers + 1, total + 1), math.inf)
    sums[0, 0] = 0.0
    for last in range(layers):
        for option, (size,) in enumerate(problem.devices_of):
            own = seconds[: last + 1, last, option]
            own = np.where(own <= threshold, own, math.inf)
            ways = (own[:, None] + sums[: last + 1, : total + 1 - size]).min(axis=0)
            sums[last + 1, size:] = np.minimum(sums[last + 1, size:], ways)
    return float(sums[layers, total])


def by_all_thresholds(problem: CutProblem) -> float:
    """Alpa's program as the paper writes it: every threshold that has a plan, up to where none can be better."""
    cut = np.concatenate([[0.0], problem.transfer_seconds[:, 0], [0.0]])
    seconds = problem.seconds[0] + (cut[:-1, None] + cut[None, 1:])[:, :, None]
    levels = np.unique(seconds[np.isfinite(seconds)])
    more, best, least = problem.micro_batches - 1, math.inf, smallest_sum(problem, math.inf)
    first = bisect_left(levels, True, key=lambda level: smallest_sum(problem, level) < math.inf)
    for threshold in levels[first:]:
        if least + more * threshold >= best:
            break
        best = min(best, smallest_sum(problem, threshold) + more * float(threshold))
    return best


def test_cuts_are_those_of_every_threshold() -> None:
    problem = cluster_table(10, 2, 4)
    assert cut_stages(problem).objective == pytest.approx(by_all_thresholds(problem), rel=1e-12)


@pytest.mark.slow
def test_large_cuts_are_those_of_every_threshold() -> None:
    problem = cluster_table(48, 8, 8)
    assert cut_stages(problem).objective == pytest.approx(by_all_thresholds(problem), rel=1e-12)


@pytest.mark.parametrize(("depths", "memory"), [(1, math.inf), (48, 2.5)])
def test_48_layers_on_64_devices_are_cut(depths: int, memory: float) -> None:
    """The size of a search: by all thresholds it takes minutes, and more where the number of stages behind counts."""
    assert cut_stages(cluster_table(48, 8, 8, depths, memory)).status == Status.OPTIMAL


def test_no_time_is_a_plan_with_what_is_proven() -> None:
    problem = cluster_table(24, 4, 4)
    solution, optimum = cut_stages(problem, time_limit=0.0), cut_stages(problem).objective
    assert solution.status == Status.TIME_LIMIT and solution.value is not None
    assert solution.bound <= optimum <= solution.objective


def test_what_is_proven_to_be_too_slow_is_not_looked_for() -> None:
    problem = cluster_table(24, 4, 4)
    optimum = cut_stages(problem).objective
    slow = cut_stages(problem, beat=0.5 * optimum)
    assert slow.value is None and slow.status == Status.INFEASIBLE and 0.5 * optimum <= slow.bound <= optimum
    assert cut_stages(problem, beat=1.001 * optimum).objective == optimum


@dataclass(frozen=True)
class Stair:
    """A plan of a threshold."""

    total: float
    slowest: float


@dataclass(frozen=True)
class Stairs:
    """Sums that fall as levels grow; a plan's slowest stage is the first level of its stair."""

    levels: np.ndarray
    sums: np.ndarray
    asked: list[float]

    def shortest(self, threshold: float, most: float) -> Stair | None:
        """The plan of a threshold, and what was asked for."""
        self.asked.append(threshold)
        total = float(self.sums[np.searchsorted(self.levels, threshold)])
        slowest = float(self.levels[np.flatnonzero(self.sums == total)[0]])
        return Stair(total, slowest) if total < most else None


def test_best_threshold_is_that_of_all() -> None:
    """And few of the thresholds are evaluated."""
    draw = np.random.default_rng(11)
    asked = possible = 0
    for _ in range(200):
        size = int(draw.integers(1, 60))
        sums = np.cumsum(draw.uniform(0, 3, size) * (draw.random(size) < 0.6))[::-1] + 1.0
        sums[: int(draw.integers(0, 3))] = math.inf
        stairs = Stairs(np.cumsum(draw.uniform(0.01, 1, size)), sums, [])
        weight = float(draw.choice([0.0, 0.5, 3.0]))
        best = float((sums + weight * stairs.levels).min())
        end = search_thresholds(stairs.levels, weight, float(sums[-1]), stairs.shortest, math.inf, math.inf)
        assert end.is_complete and end.bound == pytest.approx(best, rel=1e-12)
        assert (end.plan is None) == math.isinf(best)
        asked, possible = asked + len(stairs.asked), possible + size
        stopped = search_thresholds(stairs.levels, weight, float(sums[-1]), stairs.shortest, math.inf, -math.inf)
        assert stopped.bound <= best * (1 + 1e-12) and stopped.is_complete == math.isinf(best)
    assert asked < 0.5 * possible


def test_epsilon_would_lose_the_optimum() -> None:
    """Thresholds of 1.0 and 1.0000005 are a millionth of a second apart: Alpa's release answers 190."""
    seconds = np.full((1, 2, 2, 1), math.inf)
    seconds[0, 0, 0, 0], seconds[0, 1, 1, 0], seconds[0, 0, 1, 0] = 1.0, 1.0000005, 1.9
    problem = CutProblem(
        seconds=np.concatenate([seconds, seconds + 0.9], axis=3),
        devices_of=np.array([[1], [2]]),
        devices=(2,),
        micro_batches=100,
        transfer_seconds=np.zeros((1, 1)),
    )
    assert cut_stages(problem).objective == pytest.approx(2.0000005 + 99 * 1.0000005, rel=1e-12)


def multisets(total: int, sizes: list[SubMesh]) -> Iterator[list[SubMesh]]:
    """All multisets of sub-meshes with so many devices."""
    if total == 0:
        yield []
    elif sizes:
        for count in range(total // sizes[-1].devices + 1):
            for rest in multisets(total - count * sizes[-1].devices, sizes[:-1]):
                yield [sizes[-1]] * count + rest


@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
@pytest.mark.parametrize("nodes", range(1, 9))
def test_every_multiset_covers_the_cluster(nodes: int, per_node: int) -> None:
    draw = np.random.default_rng(nodes)
    whole = (1 << nodes * per_node) - 1
    for meshes in multisets(nodes * per_node, list(submeshes(nodes, per_node))):
        draw.shuffle(meshes)  # type: ignore[arg-type]
        covered = 0
        placed = place(meshes, nodes, per_node)
        for mesh, where in zip(meshes, placed, strict=True):
            assert where.mesh == mesh and where.first_device + mesh.per_node <= per_node
            bits = ((1 << mesh.devices) - 1) << (where.first_node * per_node + where.first_device)
            assert covered & bits == 0
            covered |= bits
        assert covered == whole
    # Neighbouring stages of one shape lie side by side, in the order of the pipeline.
    places = [
        (where.first_node, where.first_device) for where in place([SubMesh(1, 1)] * (nodes * per_node), nodes, per_node)
    ]
    assert places == sorted(places)


def test_sub_meshes_are_those_of_the_paper() -> None:
    shapes = [(mesh.nodes, mesh.per_node) for mesh in submeshes(3, 4)]
    assert shapes == [(1, 1), (1, 2), (1, 4), (2, 4), (3, 4)]


def random_graph(draw: np.random.Generator) -> tuple[list[Tensor], np.ndarray, int]:
    operators = int(draw.integers(1, 9))
    tensors = []
    for producer in range(operators - 1):
        behind = np.arange(producer + 1, operators)
        readers = np.sort(draw.choice(behind, int(draw.integers(1, len(behind) + 1)), replace=False))
        tensors.append(Tensor(producer, tuple(int(reader) for reader in readers), float(draw.integers(0, 6))))
    return tensors, draw.integers(0, 5, operators).astype(float), operators


def test_clusters_of_operators_are_the_best_of_all() -> None:
    """First the largest bytes, then the variance of FLOPs; bytes are counted tensor by tensor."""
    draw = np.random.default_rng(9)
    infeasible = 0
    for _ in range(INSTANCES):
        tensors, flops, operators = random_graph(draw)
        layers, delta = int(draw.integers(1, operators + 1)), float(draw.choice([0.0, 0.3, 1.0]))
        best = (math.inf, math.inf)
        for cuts in combinations(range(1, operators), layers - 1):
            edges = [0, *cuts, operators]
            spans = [range(a, b) for a, b in zip(edges, edges[1:], strict=False)]
            work = [sum(flops[i] for i in span) for span in spans]
            if max(work) > (1 + delta) * sum(flops) / layers + 1e-9:
                continue
            received = [
                sum(t.size_bytes for t in tensors if t.producer < span.start and set(span) & set(t.consumers))
                for span in spans
            ]
            best = min(best, (max(received), sum(w * w for w in work)))
        solution = cluster(received_bytes(tensors, operators), flops, layers, delta)
        assert solution.objective == best[0]
        if solution.value is None:
            infeasible += 1
            assert solution.status == Status.INFEASIBLE
            continue
        ends = [*solution.value[1:], operators]
        squares = sum(float(flops[a:b].sum()) ** 2 for a, b in zip(solution.value, ends, strict=True))
        assert squares == best[1] and all(a < b for a, b in zip(solution.value, ends, strict=True))
    assert 5 < infeasible < INSTANCES / 2
