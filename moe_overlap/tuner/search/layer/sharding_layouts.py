"""megatron-core's layouts on a logical mesh, as algorithms of the operators.

A layout gives every mesh axis one role for attention and dense blocks (tensor, context, data) and one for the experts
(expert-tensor, expert, expert-data). megatron-core numbers ranks with tensor (expert-tensor) fastest and data (expert-data)
slowest, so axis 1 has the faster of two roles. Layouts with three roles need a third axis and are left out.

1. The first product of a block is split by outputs over tensor ranks, the second by inputs; the router has the split of the
   tokens.
2. With sequence parallelism tensor ranks split tokens between the blocks: results are reduce-scattered, inputs gathered. MoE with
   tensor parallelism requires it.
3. Tokens go to the experts by all-to-all (EXPERT over expert ranks), and are gathered over expert-tensor ranks.
4. All weights have the same level of ZeRO.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from moe_overlap.plan.operators import EXPERTS
from moe_overlap.tuner.search.layer.sharding_algorithms import OPERANDS, ZERO_LEVELS, Algorithms
from moe_overlap.tuner.search.layer.sharding_graph import Node, OperatorGraph
from moe_overlap.tuner.search.layer.sharding_specs import REPLICATED, WHOLE, Dim, Mesh, Spec

DenseRole = Literal["tensor", "context", "data"]
ExpertRole = Literal["expert_tensor", "expert", "expert_data"]
DENSE_ROLES: tuple[DenseRole, ...] = ("tensor", "context", "data")
EXPERT_ROLES: tuple[ExpertRole, ...] = ("expert_tensor", "expert", "expert_data")
"""Roles in the order of rank numbers: ranks of the first are neighbours, ranks of the last are farthest from each other."""
BY_OUTPUTS = frozenset({"qkv", "q", "q_up", "kv_up", "fc1", "output"})
BY_INPUTS = frozenset({"proj", "fc2", "word"})
"""Weights that tensor ranks split by outputs, and by inputs; the inputs of the word embedding are the vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshLayout:
    """A layout of megatron-core on a mesh.

    Attributes:
        dense, experts: roles of mesh axis 0 and axis 1.
        zero_level: level of ZeRO of all weights.
    """

    shape: tuple[int, int]
    dense: tuple[DenseRole, DenseRole]
    experts: tuple[ExpertRole, ExpertRole]
    sequence_parallel: bool
    zero_level: int

    def ranks(self, role: str) -> int:
        """Ranks of a role: `tensor`, `context`, `data`, `expert_tensor`, `expert`, `expert_data`."""
        roles = self.dense if role in DENSE_ROLES else self.experts
        size = 1
        for axis in (0, 1):
            size *= self.shape[axis] if roles[axis] == role else 1
        return size


def layouts_of(mesh: Mesh, has_experts: bool, zero_levels: tuple[int, ...] = ZERO_LEVELS) -> Iterator[MeshLayout]:
    """All layouts on a mesh, without duplicates: an axis of one rank always has the last role."""
    dense = [(DENSE_ROLES[a], DENSE_ROLES[b]) for a, b in _pairs(mesh, len(DENSE_ROLES))]
    experts = [(EXPERT_ROLES[a], EXPERT_ROLES[b]) for a, b in _pairs(mesh, len(EXPERT_ROLES))]
    experts = experts if has_experts else [("expert_data", "expert_data")]
    for attention, routed, level in product(dense, experts, zero_levels):
        splits = "tensor" in attention
        for sequence in (True,) if splits and has_experts else (False, True) if splits else (False,):
            yield MeshLayout(
                shape=mesh.shape, dense=attention, experts=routed, sequence_parallel=sequence, zero_level=level
            )


def _pairs(mesh: Mesh, roles: int) -> list[tuple[int, int]]:
    """Indices of the roles of axis 0 and axis 1: in descending order on used axes, the last role on an axis of one rank."""
    last = roles - 1
    options = [range(roles) if size > 1 else (last,) for size in mesh.shape]
    return [(a, b) for a, b in product(*options) if a >= b or 1 in mesh.shape]


def algorithm_of(layout: MeshLayout, graph: OperatorGraph, node: Node) -> tuple[Spec, Spec]:
    """The loops and the spec of the result of a node in a layout."""
    tokens = _tokens(layout)
    if node.kind == "input":
        return tokens, tokens
    if node.kind == "attention":
        loops = _by_role(layout.dense, {"tensor": Dim.WIDTH, "context": Dim.TOKENS, "data": Dim.SAMPLES})
        return loops, loops
    if node.operator == EXPERTS:
        return _of_experts(layout, graph, node, tokens)
    if node.kind == "rows" or node.weight_name not in BY_OUTPUTS | BY_INPUTS:
        return tokens, tokens
    is_forward, splits_outputs = node.phase == "forward", node.weight_name in BY_OUTPUTS
    loop = Dim.OUTPUT if splits_outputs else Dim.INPUT
    loops = _by_role(layout.dense, {"tensor": loop, "context": Dim.TOKENS, "data": Dim.SAMPLES})
    if splits_outputs == is_forward:
        return loops, _by_role(layout.dense, {"tensor": Dim.WIDTH, "context": Dim.TOKENS, "data": Dim.SAMPLES})
    return loops, tokens


def _tokens(layout: MeshLayout) -> Spec:
    """Spec of hidden states between the blocks."""
    between_blocks = Dim.TOKENS if layout.sequence_parallel else REPLICATED
    return _by_role(layout.dense, {"tensor": between_blocks, "context": Dim.TOKENS, "data": Dim.SAMPLES})


def _by_role(roles: tuple[str, str], dims: dict[str, Dim]) -> Spec:
    return dims[roles[0]], dims[roles[1]]


def _of_experts(layout: MeshLayout, graph: OperatorGraph, node: Node, tokens: Spec) -> tuple[Spec, Spec]:
    """Loops and result's spec of the experts' products, and of the sorting of rows before and after them."""

    def spec(expert_tensor: tuple[Dim, Dim]) -> Spec:
        """EXPERT over expert ranks, `expert_tensor` over expert-tensor ranks, the split of tokens over expert-data ranks."""
        roles = layout.experts
        first, second = (
            {"expert": Dim.EXPERT, "expert_tensor": expert_tensor[axis], "expert_data": tokens[axis]}[roles[axis]]
            for axis in (0, 1)
        )
        return first, second

    gathered, scattered = spec((REPLICATED, REPLICATED)), spec(tokens)
    if node.kind == "rows":
        assert node.source is not None
        is_before = graph.nodes[graph.producers[node.source.storage]].kind == "rows"
        loops = gathered if is_before else scattered
        return loops, loops
    splits_outputs = node.weight_name in BY_OUTPUTS
    loop = Dim.OUTPUT if splits_outputs else Dim.INPUT
    loops = spec((loop, loop))
    if splits_outputs == (node.phase == "forward"):
        return loops, spec((Dim.WIDTH, Dim.WIDTH))
    return loops, scattered


def weight_of_layout(layout: MeshLayout, graph: OperatorGraph, index: int) -> tuple[Spec, int]:
    """Split and level of ZeRO of a weight in a layout."""
    loops, _ = algorithm_of(layout, graph, graph.nodes[graph.weights[index].forward])
    first, second = (dim if dim in OPERANDS["weight"] else REPLICATED for dim in loops)
    return (first, second), layout.zero_level


def choices_of(layout: MeshLayout, algorithms: Algorithms) -> tuple[list[int | None], list[int | None]]:
    """Indices of a layout's choices: one per node among its algorithms, one per weight among its placements.

    None stands for an algorithm that does not exist because a size is not divisible. A weight without copies has level 0 only.
    """
    graph, mesh = algorithms.graph, algorithms.mesh
    nodes: list[int | None] = []
    for node, candidates in zip(graph.nodes, algorithms.of_node, strict=True):
        loops, out = (_used(spec, mesh) for spec in algorithm_of(layout, graph, node))
        out = out if node.result is not None else WHOLE
        places = {(candidate.loops, candidate.out): place for place, candidate in enumerate(candidates)}
        nodes.append(places.get((loops, out)))
    weights: list[int | None] = []
    for index, choices in enumerate(algorithms.of_weight):
        split, level = weight_of_layout(layout, graph, index)
        levels = {choice.level: place for place, choice in enumerate(choices) if choice.split == _used(split, mesh)}
        weights.append(levels.get(level, levels.get(0) if len(levels) == 1 else None))
    return nodes, weights


def _used(spec: Spec, mesh: Mesh) -> Spec:
    """The spec without axes of one rank."""
    first, second = (dim if size > 1 else REPLICATED for dim, size in zip(spec, mesh.shape, strict=True))
    return first, second
