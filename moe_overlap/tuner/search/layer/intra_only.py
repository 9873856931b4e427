"""The best sharding of a whole model on one sub-mesh, and the layout of megatron-core that comes nearest to it.

1. On every logical shape of the sub-mesh megatron-core's layouts are enumerated, and the integer program is solved without that
   restriction, unless its bound shows that it cannot beat the shapes before.
2. The best free sharding over all shapes is the answer (`--search-space intra-only`: one stage, no pipeline); the cheapest layout
   over all shapes is the nearest plan that megatron-core executes. What lies between them is lost.
3. `executable` says where it is lost: the operators whose algorithm in the free answer no layout has, or none together with the
   others, and what each would gain if it alone could run freely.

Of equally good shardings the one that differs least from the cheapest layout is taken.

Source: Alpa, section 4 (the ILP over all logical shapes) and section 8.2 (intra-operator parallelism only).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_overlap.describe.cluster import Cluster
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.search.layer.sharding_algorithms import ZERO_LEVELS, Workload
from moe_overlap.tuner.search.layer.sharding_ilp import ChoiceProblem, Chosen, solve_choices
from moe_overlap.tuner.search.layer.sharding_layouts import MeshLayout
from moe_overlap.tuner.search.layer.sharding_specs import Spec, logical_meshes
from moe_overlap.tuner.search.layer.sharding_stage import (
    StageProblem,
    model_graphs,
    stage_problem,
)
from moe_overlap.tuner.search.solution import Solution, Status

TIE = 1e-9
"""Share of the objective by which equals may differ, from rounding."""
Layouts = Sequence[tuple[MeshLayout, Chosen]]


@dataclass(frozen=True, slots=True)
class OperatorSharding:
    """One operator of one kind of part in a sharding.

    Attributes:
        part, operator, phase: `dense`, `mlp.linear_fc1`, `forward`.
        loops, out: what mesh axis 0 and axis 1 split of the operator and of its result, in lower case; `replicated` is nothing.
        compute_seconds, communication_seconds: of one micro-batch in one part of the kind.
        resharding_seconds: of the tensors that it reads, the same way.
    """

    part: str
    operator: str
    phase: str
    loops: tuple[str, str]
    out: tuple[str, str]
    compute_seconds: float
    communication_seconds: float
    resharding_seconds: float


@dataclass(frozen=True, slots=True)
class WeightSharding:
    """One weight of one kind of part in a sharding.

    Attributes:
        split: what mesh axis 0 and axis 1 split of it in its products.
        zero_level: along the axes that hold copies.
        step_seconds: gathers, reductions and the update, of one step in one part of the kind.
        bytes: weight, gradient and states of one part on one rank.
    """

    part: str
    weight: str
    split: tuple[str, str]
    zero_level: int
    step_seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Sharding:
    """Every operator and weight of a model on a logical mesh.

    Attributes:
        seconds: of one optimizer step.
        bytes: of one rank, temporaries apart.
    """

    shape: tuple[int, int]
    operators: tuple[OperatorSharding, ...]
    weights: tuple[WeightSharding, ...]
    seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class NearestLayout:
    """The cheapest layout of megatron-core, as fields of a plan's stage; seconds and bytes as in `Sharding`."""

    shape: tuple[int, int]
    tensor: int
    context: int
    data: int
    expert: int
    expert_tensor: int
    expert_data: int
    sequence_parallel: bool
    zero_level: int
    seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class LostOperator:
    """An operator whose best algorithm megatron-core does not execute.

    Attributes:
        free, executed: loops and result's spec in the free sharding and under the nearest layout, as in `OperatorSharding`.
        alone: no layout has the algorithm at all; else none has it together with the other operators' algorithms.
        gain_seconds: of one step, if this operator and its weight could be sharded freely while all else keeps to some layout.
    """

    part: str
    operator: str
    phase: str
    free: tuple[tuple[str, str], tuple[str, str]]
    executed: tuple[tuple[str, str], tuple[str, str]]
    alone: bool
    gain_seconds: float


@dataclass(frozen=True, slots=True)
class Executable:
    """What megatron-core executes of the best sharding on one mesh.

    Attributes:
        free, restricted: the best sharding of all and of megatron-core's; chosen places are those of the stage's problem.
        lost_seconds: what the restriction costs; infinite where no layout fits.
    """

    free: Solution[Chosen]
    restricted: Solution[Chosen]
    layout: MeshLayout | None
    lost_seconds: float
    operators: tuple[LostOperator, ...]


@dataclass(frozen=True, slots=True)
class ShapeResult:
    """The answers on one logical shape; `layout_seconds` is infinite where no layout fits.

    A solution is `cut off` where the shape cannot beat a shape before it.
    """

    shape: tuple[int, int]
    solution: Solution[Chosen]
    layout_seconds: float


@dataclass(frozen=True, slots=True)
class IntraOnly:
    """The answer of the intra-only search.

    Attributes:
        best: None where no sharding fits the memory, or none was found in time.
        nearest: None where no layout fits.
        solution: of all shapes: the bound is the least of theirs.
        not_executed: on the best shape; see `Executable`.
    """

    best: Sharding | None
    nearest: NearestLayout | None
    solution: Solution[Chosen]
    shapes: tuple[ShapeResult, ...]
    not_executed: tuple[LostOperator, ...]


def workload_of(problem: Problem, micro_batches: int) -> Workload:
    """The workload of a problem on one mesh without a pipeline.

    Args:
        micro_batches: of a step; divides the global batch.
    """
    plan, machine = problem.plan, problem.machine
    assert plan.global_batch_size % micro_batches == 0, (plan.global_batch_size, micro_batches)
    return Workload(
        samples=plan.global_batch_size // micro_batches,
        tokens=plan.sequence_length,
        micro_batches=micro_batches,
        gpu=machine.cluster.group_of(0).gpu,
        constants=machine.constants,
        common=machine.common,
        features=problem.features,
        lookup=machine.lookup,
        load=machine.load,
    )


def intra_only(
    captured: CapturedModel,
    workload: Workload,
    cluster: Cluster,
    devices: int | None = None,
    seconds: float = 120.0,
    zero_levels: tuple[int, ...] = ZERO_LEVELS,
    kinds: Sequence[str] | None = None,
    capacity: float | None = None,
) -> IntraOnly:
    """The best sharding over all logical shapes of a sub-mesh.

    Args:
        captured: the model on one rank (TP = CP = EP = 1), nothing recomputed.
        devices: of the sub-mesh, from rank 0 on; all of the cluster where None.
        seconds: time limit of all solvers together.
        zero_levels: that the layouts may have.
        kinds: of the parts in the chain; the whole model where None.
        capacity: bytes of a rank; the GPU's where None.
    Raises:
        NotShardableError: the graphs hold what the search has no algorithms for.
    """
    started = time.monotonic()
    model = model_graphs(captured, workload, kinds)
    number, links = devices if devices is not None else cluster.gpus, cluster.group_of(0)
    meshes = logical_meshes(number, cluster.gpus, links, workload.constants.link_rates)
    shapes = []
    for mesh in meshes:
        stage = stage_problem(model, mesh, workload, capacity=capacity)
        layouts = tuple(stage.layouts(zero_levels))
        cheapest = cheapest_layout(stage, layouts)
        shapes.append((stage.problem.cost(cheapest[1]) if cheapest is not None else math.inf, stage, layouts, cheapest))
    # The shape with the best layout comes first: its sharding cuts most others off.
    shapes.sort(key=lambda shape: shape[0])
    nearest = shapes[0][1], shapes[0][3]
    results: list[ShapeResult] = []
    best: tuple[StageProblem, Solution[Chosen], Layouts] | None = None
    for place, (layout_seconds, stage, layouts, cheapest) in enumerate(shapes):
        left = (started + seconds - time.monotonic()) / (len(shapes) - place)
        known = best[1].objective if best is not None else math.inf
        solution = free_sharding(stage, cheapest, left, known)
        results.append(ShapeResult(stage.mesh.shape, solution, layout_seconds))
        if solution.value is not None and (best is None or solution.objective < best[1].objective):
            best = (stage, solution, layouts)
    return IntraOnly(
        best=sharding_of(best[0], best[1].value) if best is not None and best[1].value is not None else None,
        nearest=_nearest(nearest[0], *nearest[1]) if nearest[1] is not None else None,
        solution=_of_all(results, best[1] if best is not None else None, time.monotonic() - started),
        shapes=tuple(results),
        not_executed=lost_operators(*best) if best is not None else (),
    )


def executable(stage: StageProblem, seconds: float = 60.0, zero_levels: tuple[int, ...] = ZERO_LEVELS) -> Executable:
    """What megatron-core executes of the best sharding on the mesh of a stage, and what it loses.

    Args:
        seconds: time limit of the solver.
    """
    started = time.monotonic()
    layouts = tuple(stage.layouts(zero_levels))
    cheapest = cheapest_layout(stage, layouts)
    free = free_sharding(stage, cheapest, seconds)
    spent = time.monotonic() - started
    if cheapest is None:
        nothing: Solution[Chosen] = Solution(
            value=None, objective=math.inf, bound=math.inf, status=Status.INFEASIBLE, seconds=spent
        )
        return Executable(free, nothing, None, math.inf, ())
    layout, chosen = cheapest
    cost = stage.problem.cost(chosen)
    lost = lost_operators(stage, free, layouts) if free.value is not None else ()
    exact = Solution(value=chosen, objective=cost, bound=cost, status=Status.OPTIMAL, seconds=spent)
    return Executable(free, exact, layout, cost - free.objective, lost)


def cheapest_layout(stage: StageProblem, layouts: Layouts) -> tuple[MeshLayout, Chosen] | None:
    """The enumeration: the layout with the least seconds among those that fit the memory."""
    fitting = [
        (stage.problem.cost(chosen), place)
        for place, (_, chosen) in enumerate(layouts)
        if stage.problem.is_feasible(chosen)
    ]
    return layouts[min(fitting)[1]] if fitting else None


def free_sharding(
    stage: StageProblem, cheapest: tuple[MeshLayout, Chosen] | None, seconds: float, cutoff: float = math.inf
) -> Solution[Chosen]:
    """The best sharding of all; where the cheapest layout is as good, the layout.

    Of equally good shardings, the solver's may differ from the layout for no gain: whatever differs and hangs together returns
    to the layout's choices unless that costs something.
    """
    solution, problem = solve_choices(stage.problem, seconds, cutoff), stage.problem
    if cheapest is None or solution.status == Status.CUT_OFF:
        return solution
    layout, cost = cheapest[1], problem.cost(cheapest[1])
    if solution.value is None or cost <= solution.objective * (1 + TIE):
        # Out of time, or no better: the layout is feasible.
        bound = max(0.0, min(cost, solution.bound))
        return Solution(value=layout, objective=cost, bound=bound, status=_proved(solution), seconds=solution.seconds)
    chosen = solution.value
    allowed = solution.objective * (1 + TIE)
    for together in _differing(problem, chosen, layout):
        returned = tuple(layout[node] if node in together else choice for node, choice in enumerate(chosen))
        if problem.is_feasible(returned) and problem.cost(returned) <= allowed:
            chosen = returned
    objective = problem.cost(chosen)
    return replace(solution, value=chosen, objective=objective, bound=min(objective, solution.bound))


def _proved(solution: Solution[Chosen]) -> Status:
    """An infeasible answer beside a feasible layout would be a mistake of the program."""
    assert solution.status != Status.INFEASIBLE, solution
    return solution.status


def _differing(problem: ChoiceProblem, chosen: Chosen, layout: Chosen) -> list[frozenset[int]]:
    """Nodes where two choices differ: those that edges join, then one by one."""
    left = {node for node, choice in enumerate(chosen) if choice != layout[node]}
    single = [frozenset({node}) for node in sorted(left)]
    groups: list[frozenset[int]] = []
    while left:
        group, edge = set(), {min(left)}
        while edge:
            group |= edge
            reached = {b if a in edge else a for a, b, _ in problem.edges if (a in edge) != (b in edge)}
            edge = (reached & left) - group
        groups.append(frozenset(group))
        left -= group
    return groups + single


def lost_operators(stage: StageProblem, free: Solution[Chosen], layouts: Layouts) -> tuple[LostOperator, ...]:
    """The operators of the free sharding that differ from the cheapest layout, those first whose algorithm no layout has."""
    cheapest = cheapest_layout(stage, layouts)
    if cheapest is None or free.value is None:
        return ()
    whole, lost = stage.problem.cost(cheapest[1]), []
    for place, algorithms in enumerate(stage.algorithms):
        first = stage.first_node[place]
        for node in algorithms.graph.nodes:
            chosen, executed = free.value[first + node.id], cheapest[1][first + node.id]
            if chosen == executed or not node.heavy:
                continue
            related = [first + node.id]
            if node.weight is not None:
                related.append(stage.first_weight[place] + node.weight)
            candidates = algorithms.of_node[node.id]
            lost.append(
                LostOperator(
                    part=algorithms.graph.kind,
                    operator=_name(node.label),
                    phase=node.phase,
                    free=(_words(candidates[chosen].loops), _words(candidates[chosen].out)),
                    executed=(_words(candidates[executed].loops), _words(candidates[executed].out)),
                    alone=all(places[first + node.id] != chosen for _, places in layouts),
                    gain_seconds=whole - min(stage.problem.best_of(places, related) for _, places in layouts),
                )
            )
    return tuple(sorted(lost, key=lambda operator: (not operator.alone, -operator.gain_seconds)))


def sharding_of(stage: StageProblem, chosen: Chosen) -> Sharding:
    """The choices of a stage's problem as data."""
    counts, number = stage.model.counts, stage.workload.micro_batches
    into = np.zeros(len(chosen))
    for a, b, matrix in stage.problem.edges:
        # Edges are kept in the order of their nodes; what leaves a weight or enters it is the weight's.
        into[b] += float(matrix[chosen[a], chosen[b]])
    operators: list[OperatorSharding] = []
    weights: list[WeightSharding] = []
    for place, algorithms in enumerate(stage.algorithms):
        for node, candidates in zip(algorithms.graph.nodes, algorithms.of_node, strict=True):
            index = stage.first_node[place] + node.id
            candidate = candidates[chosen[index]]
            operators.append(
                OperatorSharding(
                    part=algorithms.graph.kind,
                    operator=_name(node.label),
                    phase=node.phase,
                    loops=_words(candidate.loops),
                    out=_words(candidate.out),
                    compute_seconds=candidate.compute_seconds,
                    communication_seconds=candidate.communication_seconds,
                    resharding_seconds=float(into[index]) / number / counts[place],
                )
            )
        for at, (weight, choices) in enumerate(zip(algorithms.graph.weights, algorithms.of_weight, strict=True)):
            index = stage.first_weight[place] + at
            choice = choices[chosen[index]]
            spent = choice.step_seconds + float(into[index]) / counts[place]
            weights.append(
                WeightSharding(
                    algorithms.graph.kind, weight.name, _words(choice.split), choice.level, spent, choice.bytes
                )
            )
    return Sharding(
        stage.mesh.shape, tuple(operators), tuple(weights), stage.problem.cost(chosen), _bytes(stage, chosen)
    )


def _bytes(stage: StageProblem, chosen: Chosen) -> float:
    (row,) = stage.problem.rows
    held = sum(float(values[choice]) for values, choice in zip(row.coefficients, chosen, strict=True))
    # Parameters that no product reads are on every rank, under any sharding.
    return held + sum(graph.other_bytes * stage.model.counts[place] for place, graph in enumerate(stage.model.graphs))


def _nearest(stage: StageProblem, layout: MeshLayout, chosen: Chosen) -> NearestLayout:
    return NearestLayout(
        shape=layout.shape,
        tensor=layout.ranks("tensor"),
        context=layout.ranks("context"),
        data=layout.ranks("data"),
        expert=layout.ranks("expert"),
        expert_tensor=layout.ranks("expert_tensor"),
        expert_data=layout.ranks("expert_data"),
        sequence_parallel=layout.sequence_parallel,
        zero_level=layout.zero_level,
        seconds=stage.problem.cost(chosen),
        bytes=_bytes(stage, chosen),
    )


def _of_all(results: Sequence[ShapeResult], best: Solution[Chosen] | None, seconds: float) -> Solution[Chosen]:
    """One solution of all shapes: the best objective, the least bound."""
    bound = min(result.solution.bound for result in results)
    stopped = any(result.solution.status == Status.TIME_LIMIT for result in results)
    status = Status.TIME_LIMIT if stopped else Status.OPTIMAL if best is not None else Status.INFEASIBLE
    objective = best.objective if best is not None else math.inf
    return Solution(
        value=best.value if best is not None else None,
        objective=objective,
        bound=min(bound, objective),
        status=status,
        seconds=seconds,
    )


def _words(spec: Spec) -> tuple[str, str]:
    return spec[0].name.lower(), spec[1].name.lower()


def _name(label: str) -> str:
    return label.rpartition(" ")[0]
