"""The seconds lost because megatron-core executes layouts, and not any sharding, operator by operator.

The best sharding is compared with the cheapest layout on the same mesh. An operator is its forward and its backward pass and its
weight; an embedding and a head with one weight are one operator, since they choose its blocks together. An operator is *lost*
where any of these differs. Its gain is what the step would take less if this operator alone could choose freely, while all else
stays as the layout has it: the integer program over its few choices. Gains do not add up to what is lost: two operators may gain
only together, as the tensors between them change, and may gain the same twice. A kind of part gains the same way, with all of its
operators free at a time.
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
"""In the place of a pass: the weight with its gradient and its optimizer state."""
TOGETHER = " and "
"""Between the names of embedding and head where they have one weight."""
ROUNDING = 1e-9
"""Share of a step below which a gain is rounding."""
Layouts = Sequence[tuple[MeshLayout, Chosen]]


@dataclass(frozen=True, slots=True)
class LostWay:
    """How one pass of an operator, or its weight, differs.

    Attributes:
        part: one; see `LostOperator`.
        phase: `forward`, `backward` or `weight`.
        free, executed: what the mesh axes split of the operator, or of the weight, in the best sharding and in the layout.
        free_out, executed_out: of its result; of a weight as `free` and `executed`.
        free_zero, executed_zero: levels of ZeRO of a weight; 0 of passes.
        has_layout: whether any layout has it, for this operator by itself.
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
        part, operator: `dense`, `mlp.linear_fc1`; several, where embedding and head have one weight.
        gain_seconds: of one step, if it alone could choose freely.
    """

    part: str
    operator: str
    ways: tuple[LostWay, ...]
    gain_seconds: float

    @property
    def has_layout(self) -> bool:
        """Whether layouts have each of its ways; then none has them together with the other operators' best."""
        return all(way.has_layout for way in self.ways)


@dataclass(frozen=True, slots=True)
class Losses:
    """The loss of the cheapest layout on a mesh against the best sharding there.

    Attributes:
        layout_seconds: of one step.
        operators: from the largest gain on; the last ones gain nothing alone.
        parts: kind of part -> gain if all of its operators could choose freely, for kinds with such operators.
        is_proven: whether every gain is an optimum; else time ended a program.
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
        cheapest: the layout, with its choices, which fit the memory.
        layouts: all of megatron-core.
        seconds: time limit of all gains together.
    """
    layout, executed = cheapest
    ends, whole, is_proven = time.monotonic() + seconds, stage.problem.cost(executed), True

    def gain(nodes: Sequence[int]) -> float:
        nonlocal is_proven
        problem = stage.problem.freed(executed, nodes)
        solution = solve_choices(problem, ends - time.monotonic())
        is_proven = is_proven and solution.status is Status.OPTIMAL
        # Where time ends a program before it finds a choice, the layout's own is the best known.
        gained = problem.cost([executed[node] for node in nodes]) - solution.objective
        return gained if gained > ROUNDING * whole else 0.0

    operators: list[LostOperator] = []
    for (part, name), nodes in _operators(stage).items():
        ways = [_way(stage, node, free, executed, layouts) for node in nodes if free[node] != executed[node]]
        if ways:
            operators.append(LostOperator(part, name, tuple(ways), gain(nodes)))
    operators.sort(key=lambda operator: (-operator.gain_seconds, operator.has_layout))
    lost = {operator.part for operator in operators}
    parts = {part: gain(nodes) for part, nodes in _parts(stage).items() if part in lost}
    return Losses(layout, whole, tuple(operators), parts, is_proven)


def _parts(stage: StageProblem) -> dict[str, list[int]]:
    """Kind of part -> all of its nodes and weights; embedding and head are one where they have one weight."""
    nodes: dict[str, list[int]] = {}
    for index in range(len(stage.problem.costs)):
        nodes.setdefault(stage.algorithms[stage.place_of(index)[0]].graph.kind, []).append(index)
    if stage.tied is None:
        return nodes
    own = [stage.algorithms[place].graph.kind for place in (stage.tied.embedding, stage.tied.head)]
    return {TOGETHER.join(own): [node for kind in own for node in nodes.pop(kind)], **nodes}


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
    own = [key for weight in stage.tied_weights for key, nodes in groups.items() if weight in nodes]
    together = [node for key in own for node in groups.pop(key)]
    parts, names = zip(*own, strict=True)
    return {(TOGETHER.join(parts), TOGETHER.join(names)): together, **groups}


def _way(stage: StageProblem, index: int, free: Chosen, executed: Chosen, layouts: Layouts) -> LostWay:
    place, at = stage.place_of(index)
    algorithms, part = stage.algorithms[place], stage.algorithms[place].graph.kind
    has_layout = any(chosen[index] == free[index] for _, chosen in layouts)
    if index >= stage.first_weight[0]:
        best, own = (algorithms.of_weight[at][choice] for choice in (free[index], executed[index]))
        split, own_split = axis_words(best.split), axis_words(own.split)
        return LostWay(part, WEIGHT, split, own_split, split, own_split, best.level, own.level, has_layout)
    wanted, given = (algorithms.of_node[at][choice] for choice in (free[index], executed[index]))
    return LostWay(
        part=part,
        phase=algorithms.graph.nodes[at].phase,
        free=axis_words(wanted.loops),
        executed=axis_words(given.loops),
        free_out=axis_words(wanted.out),
        executed_out=axis_words(given.out),
        free_zero=0,
        executed_zero=0,
        has_layout=has_layout,
    )
