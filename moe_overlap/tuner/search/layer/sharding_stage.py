"""A whole model on one mesh as a problem of choices: its parts in a chain, each kind of layer once.

Layers of a kind are sharded alike, so the problem has one copy of each kind whose seconds and bytes count as often as there are
layers. Hidden states go from part to part, their gradients back; an edge between two kinds counts as often as they are
neighbours.
All seconds are those of one optimizer step: micro-batches times nodes and edges, plus what weights take once.

Memory: weights, gradients, optimizer states and what one micro-batch saves for its backward pass, over all layers, within the
capacity; temporaries are not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from moe_overlap.describe.cluster import GIB
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.search.layer.sharding_algorithms import Algorithms, Pricer, Workload
from moe_overlap.tuner.search.layer.sharding_graph import NotShardableError, OperatorGraph, operator_graph
from moe_overlap.tuner.search.layer.sharding_ilp import ChoiceProblem, MemoryRow
from moe_overlap.tuner.search.layer.sharding_layouts import MeshLayout, choices_of, layouts_of
from moe_overlap.tuner.search.layer.sharding_specs import Floats, Mesh

EMBEDDING, HEAD = "embedding", "head"


@dataclass(frozen=True, slots=True)
class ModelGraphs:
    """The graphs of a model, one of each kind of part, at one micro-batch.

    Attributes:
        chain: place of each part of the model among the graphs, in the order of the forward pass.
        pricers: of each graph; they keep their prices from mesh to mesh.
    """

    graphs: tuple[OperatorGraph, ...]
    chain: tuple[int, ...]
    pricers: tuple[Pricer, ...]

    @property
    def counts(self) -> Counter[int]:
        """How often each graph stands in the chain."""
        return Counter(self.chain)


def model_graphs(captured: CapturedModel, workload: Workload, kinds: Sequence[str] | None = None) -> ModelGraphs:
    """The graphs of a captured model.

    Args:
        captured: on one rank, nothing recomputed.
        kinds: of the parts in the chain; embedding, all decoder layers and head where None.
    Raises:
        NotShardableError: see `operator_graph`; or multi-token-prediction layers, which stand beside the chain.
    """
    if captured.mtp_kinds:
        raise NotShardableError("multi-token-prediction layers are not in the chain of parts")
    names = tuple(kinds) if kinds is not None else (EMBEDDING, *captured.layer_kinds, HEAD)
    distinct = list(dict.fromkeys(names))
    graphs = tuple(
        operator_graph(captured.part(kind, samples=workload.samples), workload.samples, workload.tokens)
        for kind in distinct
    )
    pricers = tuple(Pricer(graph, workload) for graph in graphs)
    return ModelGraphs(graphs, tuple(distinct.index(name) for name in names), pricers)


@dataclass(slots=True)
class StageProblem:
    """The problem of a model on a mesh.

    Attributes:
        algorithms: of each graph.
        problem: nodes of all graphs in turn, then their weights.
        first_node, first_weight: place of each graph's first node and weight in the problem.
    """

    model: ModelGraphs
    mesh: Mesh
    workload: Workload
    algorithms: tuple[Algorithms, ...]
    problem: ChoiceProblem
    first_node: list[int] = field(default_factory=list)
    first_weight: list[int] = field(default_factory=list)

    def places(self, layout: MeshLayout) -> tuple[int | None, ...]:
        """The choices of a layout; None where it gives what no algorithm is."""
        nodes: list[int | None] = []
        weights: list[int | None] = []
        for algorithms in self.algorithms:
            of_nodes, of_weights = choices_of(layout, algorithms)
            nodes += of_nodes
            weights += of_weights
        return (*nodes, *weights)

    def layouts(self, zero_levels: tuple[int, ...]) -> Iterator[tuple[MeshLayout, tuple[int, ...]]]:
        """Every layout of megatron-core that divides all sizes, with its choices."""
        has_experts = any(graph.experts for graph in self.model.graphs)
        for layout in layouts_of(self.mesh, has_experts, zero_levels):
            places = self.places(layout)
            if all(place is not None for place in places):
                yield layout, tuple(place for place in places if place is not None)


def stage_problem(
    model: ModelGraphs, mesh: Mesh, workload: Workload, rewrites: bool = True, capacity: float | None = None
) -> StageProblem:
    """The problem of choices of a model on a mesh.

    Args:
        rewrites: all-reduces may be reduce-scatters (sequence parallelism, ZeRO).
        capacity: bytes of a rank; those of the workload's GPU where None.
    """
    algorithms = tuple(
        Algorithms(graph, mesh, workload, pricer, rewrites)
        for graph, pricer in zip(model.graphs, model.pricers, strict=True)
    )
    counts, number = model.counts, workload.micro_batches
    costs: list[Floats] = []
    loads: list[Floats] = []
    first_node: list[int] = []
    for place, prices in enumerate(algorithms):
        first_node.append(len(costs))
        for candidates in prices.of_node:
            seconds = [candidate.compute_seconds + candidate.communication_seconds for candidate in candidates]
            costs.append(np.array(seconds) * number * counts[place])
            loads.append(np.array([candidate.bytes for candidate in candidates]) * counts[place])
    first_weight: list[int] = []
    for place, prices in enumerate(algorithms):
        first_weight.append(len(costs))
        for choices in prices.of_weight:
            costs.append(np.array([choice.step_seconds for choice in choices]) * counts[place])
            loads.append(np.array([choice.bytes for choice in choices]) * counts[place])
    limit = capacity if capacity is not None else workload.gpu.memory_gib * GIB
    # Parameters that no product reads are on every rank whatever is chosen.
    limit -= sum(graph.other_bytes * counts[place] for place, graph in enumerate(model.graphs))
    stage = StageProblem(model, mesh, workload, algorithms, ChoiceProblem((), ()), first_node, first_weight)
    edges: dict[tuple[int, int], Floats] = {}
    for a, b, matrix in (*_inner_edges(stage), *_chain_edges(stage)):
        if a == b:
            costs[a] = costs[a] + np.diag(matrix)
            continue
        key, value = ((a, b), matrix) if a < b else ((b, a), matrix.T)
        edges[key] = edges[key] + value if key in edges else value
    stage.problem = ChoiceProblem(
        tuple(costs), tuple((a, b, matrix) for (a, b), matrix in edges.items()), (MemoryRow(tuple(loads), limit),)
    )
    return stage


def _inner_edges(stage: StageProblem) -> Iterator[tuple[int, int, Floats]]:
    """Tensors between the nodes of a graph, and weights beside their products, as often as the graph stands in the chain."""
    counts, number = stage.model.counts, stage.workload.micro_batches
    for place, algorithms in enumerate(stage.algorithms):
        graph, first = algorithms.graph, stage.first_node[place]
        for edge in graph.edges:
            tensor, consumer = graph.tensors[edge.storage], graph.nodes[edge.consumer]
            prices = algorithms.resharding(graph.extents(tensor), tensor.bytes)
            written = [algorithms.written(candidate, tensor) for candidate in algorithms.of_node[edge.producer]]
            needed = [
                algorithms.needed(consumer, candidate, tensor, edge.role)
                for candidate in algorithms.of_node[edge.consumer]
            ]
            matrix = prices.matrix(written, needed) * number * counts[place]
            yield first + edge.producer, first + edge.consumer, matrix
        for index, weight in enumerate(graph.weights):
            for node in (weight.forward, weight.backward):
                if node is not None:
                    matrix = algorithms.weight_matrix(weight, graph.nodes[node], index) * counts[place]
                    yield stage.first_weight[place] + index, first + node, matrix


def _chain_edges(stage: StageProblem) -> Iterator[tuple[int, int, Floats]]:
    """Hidden states from part to part, and their gradients from part to part before."""
    for (before, after), times in Counter(pairwise(stage.model.chain)).items():
        left, right = stage.algorithms[before], stage.algorithms[after]
        for source, target, left_end, right_end in (
            (left, right, left.graph.leaves, right.graph.enters),
            (right, left, right.graph.gradient_leaves, left.graph.gradient_enters),
        ):
            if left_end is None or right_end is None:
                continue
            node, storage = left_end
            tensor = source.graph.tensors[storage]
            entering = target.graph.nodes[right_end].result
            assert entering is not None
            written = [source.written(candidate, tensor) for candidate in source.of_node[node]]
            needed = [target.written(candidate, entering) for candidate in target.of_node[right_end]]
            prices = source.resharding(source.graph.extents(tensor), tensor.bytes)
            places = (before, after) if source is left else (after, before)
            yield (
                stage.first_node[places[0]] + node,
                stage.first_node[places[1]] + right_end,
                prices.matrix(written, needed) * stage.workload.micro_batches * times,
            )


def restricted(stage: StageProblem, layouts: Sequence[tuple[MeshLayout, tuple[int, ...]]]) -> ChoiceProblem:
    """The problem in which every node takes what one layout gives to it; the layout is a further node, the last.

    Args:
        layouts: with their choices.
    """
    problem = stage.problem
    edges = list(problem.edges)
    for node, costs in enumerate(problem.costs):
        ties = np.full((len(costs), len(layouts)), np.inf)
        for column, (_, places) in enumerate(layouts):
            ties[places[node], column] = 0.0
        edges.append((node, len(problem.costs), ties))
    nothing = np.zeros(len(layouts))
    rows = tuple(MemoryRow((*row.coefficients, nothing), row.limit) for row in problem.rows)
    return ChoiceProblem((*problem.costs, nothing), tuple(edges), rows)
