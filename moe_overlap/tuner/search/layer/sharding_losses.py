"""The seconds lost because megatron-core executes layouts, and not any sharding, operator by operator.

The best sharding is compared with the cheapest layout on the same mesh. An operator consists of its forward pass, its backward
pass and its weight; an embedding and a head that share one weight are one operator, since they choose its blocks together. An
operator is *lost* if any of these differs between the two. Its gain is the time that the step would save if this operator could
choose freely and all others stayed as the layout has them: an integer program over its few choices. Gains do not add up to the
total loss: two operators may gain only together, since the tensors between them change, or both may gain the same seconds. The
gain of a kind of part frees all of its operators at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from moe_overlap.tuner.search.layer.sharding_ilp import Chosen, solve_choices
from moe_overlap.tuner.search.layer.sharding_layouts import MeshLayout
from moe_overlap.tuner.search.layer.sharding_specs import AxisWords, axis_words
from moe_overlap.tuner.search.layer.sharding_stage import StageProblem
from moe_overlap.tuner.search.solution import Status

WEIGHT = "weight"
"""Stands in place of a pass's name for the weight with its gradient and its optimizer state."""
TOGETHER = " and "
"""Joins the names of embedding and head where they share one weight."""
ROUNDING = 1e-9
"""Share of a step; smaller gains are rounding errors and count as none."""
Layouts = Sequence[tuple[MeshLayout, Chosen]]


@dataclass(frozen=True, slots=True)
class LostWay:
    """How one pass of an operator, or its weight, differs.

    Attributes:
        part: kind of part, as in `LostOperator`; here always a single one.
        phase: `forward`, `backward` or `weight`.
        free, executed: dimension of the operator, or of the weight, that each mesh axis splits, in the best sharding and in the
            layout.
        free_out, executed_out: the same for the operator's result; for a weight equal to `free` and `executed`.
        free_zero, executed_zero: ZeRO levels of a weight; 0 for passes.
        has_layout: whether at least one layout makes the choice of the best sharding for this operator.
    """

    part: str
    phase: str
    free: AxisWords
    executed: AxisWords
    free_out: AxisWords
    executed_out: AxisWords
    free_zero: int
    executed_zero: int
    has_layout: bool


@dataclass(frozen=True, slots=True)
class LostOperator:
    """An operator whose best algorithm megatron-core does not execute.

    Attributes:
        part, operator: `dense`, `mlp.linear_fc1`; embedding and head with one weight are joined by `TOGETHER`.
        gain_seconds: seconds that one step saves if only this operator could choose freely.
    """

    part: str
    operator: str
    ways: tuple[LostWay, ...]
    gain_seconds: float

    @property
    def has_layout(self) -> bool:
        """Whether each of its ways occurs in some layout. Then no layout combines them with the best of the other operators."""
        return all(way.has_layout for way in self.ways)


@dataclass(frozen=True, slots=True)
class Losses:
    """The loss of the cheapest layout on a mesh against the best sharding there.

    Attributes:
        layout_seconds: seconds of one step.
        operators: the lost operators, largest gain first; the last ones may gain nothing by themselves.
        parts: kind of part -> seconds that one step saves if all operators of the kind could choose freely; kinds with a lost
            operator only.
        is_proven: whether every gain is a proven optimum; false if an integer program ran out of time.
    """

    layout: MeshLayout
    layout_seconds: float
    operators: tuple[LostOperator, ...]
    parts: dict[str, float]
    is_proven: bool


def losses(
    stage: StageProblem, free: Chosen, cheapest: tuple[MeshLayout, Chosen], layouts: Layouts, seconds: float = 30.0
) -> Losses:
    """The loss of the cheapest layout against the best sharding.

    Args:
        free: choices of the best sharding.
        cheapest: the layout and its choices, which fit the memory.
        layouts: all layouts of megatron-core on the mesh.
        seconds: time limit for all gains together.
    """
    layout, executed = cheapest
    ends, layout_seconds, is_proven = time.monotonic() + seconds, stage.problem.cost(executed), True

    def gain(nodes: Sequence[int]) -> float:
        nonlocal is_proven
        problem = stage.problem.freed(executed, nodes)
        solution = solve_choices(problem, ends - time.monotonic())
        is_proven = is_proven and solution.status is Status.OPTIMAL
        # An integer program that runs out of time without a choice gains nothing: its objective is infinite, the gain negative.
        gained = problem.cost([executed[node] for node in nodes]) - solution.objective
        return gained if gained > ROUNDING * layout_seconds else 0.0

    operators: list[LostOperator] = []
    for (part, name), nodes in _operators(stage).items():
        ways = [_way(stage, node, free, executed, layouts) for node in nodes if free[node] != executed[node]]
        if ways:
            operators.append(LostOperator(part, name, tuple(ways), gain(nodes)))
    operators.sort(key=lambda operator: (-operator.gain_seconds, operator.has_layout))
    lost = {operator.part for operator in operators}
    parts = {part: gain(nodes) for part, nodes in _parts(stage).items() if part in lost}
    return Losses(layout, layout_seconds, tuple(operators), parts, is_proven)


def _parts(stage: StageProblem) -> dict[str, list[int]]:
    """Kind of part -> all of its nodes and weights; embedding and head are one where they have one weight."""
    nodes: dict[str, list[int]] = {}
    for index in range(len(stage.problem.costs)):
        nodes.setdefault(stage.algorithms[stage.place_of(index)[0]].graph.kind, []).append(index)
    if stage.tied is None:
        return nodes
    tied = [stage.algorithms[place].graph.kind for place in (stage.tied.embedding, stage.tied.head)]
    return {TOGETHER.join(tied): [node for kind in tied for node in nodes.pop(kind)], **nodes}


def _operators(stage: StageProblem) -> dict[tuple[str, str], list[int]]:
    """Part and name of every heavy operator -> its passes and weights among the nodes of the problem."""
    groups: dict[tuple[str, str], list[int]] = {}
    for place, algorithms in enumerate(stage.algorithms):
        graph = algorithms.graph
        for node in graph.nodes:
            if node.heavy:
                groups.setdefault((graph.kind, node.name), []).append(stage.first_node[place] + node.id)
        for index, weight in enumerate(graph.weights):
            groups[graph.kind, graph.nodes[weight.forward].name].append(stage.first_weight[place] + index)
    if stage.tied is None:
        return groups
    tied = [key for weight in stage.tied_weights for key, nodes in groups.items() if weight in nodes]
    together = [node for key in tied for node in groups.pop(key)]
    parts, names = zip(*tied, strict=True)
    return {(TOGETHER.join(parts), TOGETHER.join(names)): together, **groups}


def _way(stage: StageProblem, index: int, free: Chosen, executed: Chosen, layouts: Layouts) -> LostWay:
    place, at = stage.place_of(index)
    algorithms, part = stage.algorithms[place], stage.algorithms[place].graph.kind
    has_layout = any(chosen[index] == free[index] for _, chosen in layouts)
    if index >= stage.first_weight[0]:
        free_choice, executed_choice = (algorithms.of_weight[at][choice] for choice in (free[index], executed[index]))
        free_split, executed_split = axis_words(free_choice.split), axis_words(executed_choice.split)
        return LostWay(
            part=part,
            phase=WEIGHT,
            free=free_split,
            executed=executed_split,
            free_out=free_split,
            executed_out=executed_split,
            free_zero=free_choice.level,
            executed_zero=executed_choice.level,
            has_layout=has_layout,
        )
    free_algorithm, executed_algorithm = (algorithms.of_node[at][choice] for choice in (free[index], executed[index]))
    return LostWay(
        part=part,
        phase=algorithms.graph.nodes[at].phase,
        free=axis_words(free_algorithm.loops),
        executed=axis_words(executed_algorithm.loops),
        free_out=axis_words(free_algorithm.out),
        executed_out=axis_words(executed_algorithm.out),
        free_zero=0,
        executed_zero=0,
        has_layout=has_layout,
    )
