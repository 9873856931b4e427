"""The best sharding of a model on one cluster, and the cheapest layout that megatron-core executes.

1. On every logical shape of the cluster, enumerate megatron-core's layouts; then solve the integer program without that
   restriction, unless its bound shows that it cannot beat the shapes before.
2. The best free sharding over all shapes is the answer (one stage, no pipeline). The cheapest layout
   over all shapes is the nearest plan that megatron-core executes; the difference of the two is the loss.
3. Explain the loss by operator (`sharding_losses.py`): operators whose best algorithm no layout has, or no layout combines with
   the others, and the seconds that each would gain if it could choose freely.

Among equally good shardings, the answer is the one that differs least from the cheapest layout.

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
from moe_overlap.tuner.search.layer.sharding_losses import Layouts, Losses, losses
from moe_overlap.tuner.search.layer.sharding_specs import axis_words, logical_meshes
from moe_overlap.tuner.search.layer.sharding_stage import StageProblem, model_graphs, stage_problem
from moe_overlap.tuner.search.solution import Solution, Status

TIE = 1e-9
"""Relative difference of two objectives below which they count as equal, since it may be rounding."""
GAIN_SECONDS = 30.0
"""Time limit for computing the gains of single operators."""


@dataclass(frozen=True, slots=True)
class OperatorSharding:
    """One operator of one kind of part in a sharding.

    Attributes:
        part, operator, phase: `dense`, `mlp.linear_fc1`, `forward`.
        loops, out: dimension of the operator and of its result that mesh axis 0 and axis 1 split, in lower case; `replicated`:
            none.
        compute_seconds, communication_seconds: of one micro-batch in one part of the kind.
        resharding_seconds: for the tensors that it reads, of one micro-batch in one part of the kind.
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
        split: dimension that mesh axis 0 and axis 1 split while products use the weight.
        zero_level: level of ZeRO along the axes that hold copies.
        step_seconds: gathers, reductions and the update, of one step in one part of the kind.
        bytes: weight, gradient and optimizer states of one part on one rank.
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
        bytes: held by one rank.
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
class ShapeResult:
    """The answers on one logical shape; `layout_seconds` is infinite if no layout fits.

    The status of the solution is `cut off` if the shape cannot beat an earlier one.
    """

    shape: tuple[int, int]
    solution: Solution[Chosen]
    layout_seconds: float


@dataclass(frozen=True, slots=True)
class IntraOnly:
    """The answer of the intra-only search.

    Attributes:
        best: the best free sharding; None if none fits the memory, or the time ended before one was found.
        nearest: the cheapest layout over all shapes; None if no layout fits.
        solution: summary of all shapes; its bound is the smallest of theirs.
        losses: the cheapest layout against the best sharding, both on the shape of the best; None if one of them is missing.
    """

    best: Sharding | None
    nearest: NearestLayout | None
    solution: Solution[Chosen]
    shapes: tuple[ShapeResult, ...]
    losses: Losses | None


def workload_of(problem: Problem, micro_batches: int) -> Workload:
    """The workload of a problem on one mesh without a pipeline.

    Args:
        micro_batches: number per step; divides the global batch.
    """
    plan, machine = problem.plan, problem.machine
    assert plan.global_batch_size % micro_batches == 0, (plan.global_batch_size, micro_batches)
    return Workload(
        samples=plan.global_batch_size // micro_batches,
        tokens=plan.sequence_length,
        micro_batches=micro_batches,
        usable_bytes=machine.usable_bytes,
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
    seconds: float = 120.0,
    zero_levels: tuple[int, ...] = ZERO_LEVELS,
) -> IntraOnly:
    """The best sharding over all logical shapes of a cluster.

    Args:
        captured: the model on one rank (TP = CP = EP = 1), nothing recomputed.
        seconds: time limit; at least one shape is set up, and a shape that is not solved in time has no bound.
        zero_levels: levels of ZeRO that the layouts may use.
    Raises:
        NotShardableError: the graphs hold an operator that the search has no algorithms for.
    """
    started = time.monotonic()
    # 1. Set up all shapes first: layouts are cheap, and their seconds order the expensive programs.
    model = model_graphs(captured, workload)
    meshes = logical_meshes(cluster.gpus, cluster.gpus, cluster.group_of(0), workload.constants.link_rates)
    shapes: list[_Shape] = []
    results: list[ShapeResult] = []
    for mesh in meshes:
        if shapes and time.monotonic() >= started + seconds:
            results.append(_out_of_time(mesh.shape))
            continue
        stage = stage_problem(model, mesh, workload)
        layouts = tuple(stage.layouts(zero_levels))
        shapes.append(_Shape(stage, layouts, cheapest_layout(stage, layouts)))
    # 2. Solve the free problems. The shape with the best layout comes first: its sharding, as incumbent, cuts most others off.
    shapes.sort(key=lambda shape: shape.layout_seconds)
    best: tuple[_Shape, Solution[Chosen]] | None = None
    for place, shape in enumerate(shapes):
        remaining = (started + seconds - time.monotonic()) / (len(shapes) - place)
        incumbent_seconds = best[1].objective if best is not None else math.inf
        solution = free_sharding(shape.stage, shape.cheapest, remaining, incumbent_seconds)
        results.append(ShapeResult(shape.stage.mesh.shape, solution, shape.layout_seconds))
        if solution.value is not None and solution.objective < incumbent_seconds:
            best = shape, solution
    # 3. Where the layouts lose; this has a time limit of its own.
    spent = time.monotonic() - started
    return IntraOnly(
        best=None if best is None or best[1].value is None else sharding_of(best[0].stage, best[1].value),
        nearest=None if shapes[0].cheapest is None else _nearest(shapes[0].stage, *shapes[0].cheapest),
        solution=_of_all(results, best[1] if best is not None else None, spent),
        shapes=tuple(results),
        losses=None if best is None else _losses(*best, min(GAIN_SECONDS, max(1.0, seconds - spent))),
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """A logical shape with its layouts, and the cheapest that fits; None if none does."""

    stage: StageProblem
    layouts: Layouts
    cheapest: tuple[MeshLayout, Chosen] | None

    @property
    def layout_seconds(self) -> float:
        return math.inf if self.cheapest is None else self.stage.problem.cost(self.cheapest[1])


def _losses(shape: _Shape, solution: Solution[Chosen], seconds: float) -> Losses | None:
    if shape.cheapest is None or solution.value is None:
        return None
    return losses(shape.stage, solution.value, shape.cheapest, shape.layouts, seconds)


def _out_of_time(shape: tuple[int, int]) -> ShapeResult:
    """The result of a mesh shape that was not reached in time: no sharding, and a bound of 0."""
    nothing: Solution[Chosen] = Solution(
        value=None, objective=math.inf, bound=0.0, status=Status.TIME_LIMIT, seconds=0.0
    )
    return ShapeResult(shape, nothing, math.inf)


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
    """The best sharding; the cheapest layout, if it is as good.

    The solver's sharding may differ from the layout without a gain. So each connected group of differing nodes is reset to the
    layout's choices if that costs nothing.
    """
    solution, problem = solve_choices(stage.problem, seconds, cutoff), stage.problem
    if cheapest is None or solution.status == Status.CUT_OFF:
        return solution
    layout, cost = cheapest[1], problem.cost(cheapest[1])
    if solution.value is None or cost <= solution.objective * (1 + TIE):
        # Out of time, or not better than the layout, which is feasible.
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
    """The status of a solution; infeasible cannot occur, since a feasible layout exists."""
    assert solution.status != Status.INFEASIBLE, solution
    return solution.status


def _differing(problem: ChoiceProblem, chosen: Chosen, layout: Chosen) -> list[frozenset[int]]:
    """Nodes where two choices differ: first groups that edges connect, then single nodes."""
    remaining = {node for node, choice in enumerate(chosen) if choice != layout[node]}
    single = [frozenset({node}) for node in sorted(remaining)]
    groups: list[frozenset[int]] = []
    while remaining:
        group, edge = set(), {min(remaining)}
        while edge:
            group |= edge
            reached = {b if a in edge else a for a, b, _ in problem.edges if (a in edge) != (b in edge)}
            edge = (reached & remaining) - group
        groups.append(frozenset(group))
        remaining -= group
    return groups + single


def sharding_of(stage: StageProblem, chosen: Chosen) -> Sharding:
    """The choices of a stage's problem, by operator and weight."""
    counts, number = stage.model.counts, stage.workload.micro_batches
    into = np.zeros(len(chosen))
    for a, b, matrix in stage.problem.edges:
        # Edges go from the smaller to the larger index, and weights come after all nodes: so edges of weights count for them.
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
                    operator=node.name,
                    phase=node.phase,
                    loops=axis_words(candidate.loops),
                    out=axis_words(candidate.out),
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
                    algorithms.graph.kind, weight.name, axis_words(choice.split), choice.level, spent, choice.bytes
                )
            )
    return Sharding(
        stage.mesh.shape, tuple(operators), tuple(weights), stage.problem.cost(chosen), stage.held_bytes(chosen)
    )


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
        bytes=stage.held_bytes(chosen),
    )


def _of_all(results: Sequence[ShapeResult], best: Solution[Chosen] | None, seconds: float) -> Solution[Chosen]:
    """One solution for all shapes: the best objective, the smallest bound."""
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
