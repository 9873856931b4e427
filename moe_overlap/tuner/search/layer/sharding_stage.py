"""A complete model on one mesh as a problem of choices: a chain of parts, with each kind of layer modelled once.

Layers of one kind get the same sharding, so the problem has one copy of each kind; its seconds and bytes are multiplied by the
number of layers. Hidden states go from part to part, their gradients back; the cost of an edge between two kinds is multiplied by
the number of places where they are neighbours.
All seconds are those of one optimizer step: nodes and edges times micro-batches, plus the weights' seconds, which occur once.

Tied embeddings: the embedding's table and the head's weight are one tensor. Both products must use it in the same blocks; its
bytes and the seconds of its update count for the head's weight only; the two gradients are added before they are reduced. If the
embedding writes its gradient in other blocks, these are resharded to the head's for every micro-batch.

Memory: weights, gradients, optimizer states and the tensors that one micro-batch saves for its backward pass, over all layers,
must fit the capacity minus the temporaries. The temporaries are those of the part that needs most, in equal shares on all ranks,
independent of the choices; weights that are gathered for a product are not counted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, product

import numpy as np

from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.memory import part_bytes
from moe_overlap.tuner.cost.operators import tabulate
from moe_overlap.tuner.search.layer.sharding_algorithms import Algorithms, Pricer, Workload, turned
from moe_overlap.tuner.search.layer.sharding_graph import (
    NotShardableError,
    OperatorGraph,
    flat_extents,
    operator_graph,
)
from moe_overlap.tuner.search.layer.sharding_ilp import ChoiceProblem, MemoryRow
from moe_overlap.tuner.search.layer.sharding_layouts import MeshLayout, choices_of, layouts_of
from moe_overlap.tuner.search.layer.sharding_specs import Floats, Mesh

EMBEDDING, HEAD = "embedding", "head"
PARAMETER_BYTES = 2.0
"""Bytes per parameter of a captured graph."""


@dataclass(frozen=True, slots=True)
class ModelGraphs:
    """The graphs of a model, one of each kind of part, at one micro-batch.

    Attributes:
        chain: for each part of the model, in the order of the forward pass, the index of its graph.
        pricers: one per graph; their cached prices are reused for the next mesh.
        working_bytes: temporaries of the part that needs most, summed over all ranks.
    """

    graphs: tuple[OperatorGraph, ...]
    chain: tuple[int, ...]
    pricers: tuple[Pricer, ...]
    working_bytes: float

    @property
    def counts(self) -> Counter[int]:
        """How often each graph stands in the chain."""
        return Counter(self.chain)


def model_graphs(captured: CapturedModel, workload: Workload, kinds: Sequence[str] | None = None) -> ModelGraphs:
    """The graphs of a captured model.

    Args:
        captured: the model on one rank, nothing recomputed.
        kinds: kinds of the parts in the chain; None stands for embedding, all decoder layers and head.
    Raises:
        NotShardableError: see `operator_graph`; or the model has multi-token-prediction layers, which are not in the chain.
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
    samples, tokens = workload.samples, workload.tokens
    working = max(
        part_bytes(tabulate(graph.part, samples, tokens), samples, tokens, PARAMETER_BYTES, workload.features).working
        for graph in graphs
    )
    return ModelGraphs(graphs, tuple(distinct.index(name) for name in names), pricers, working)


@dataclass(frozen=True, slots=True)
class Tied:
    """An embedding and a head that share one weight.

    Attributes:
        embedding, head: indices of their graphs.
        table, output: index of the weight in the embedding's and in the head's graph.
        gradient, output_gradient: nodes that compute its gradient, in the embedding's and in the head's graph.
    """

    embedding: int
    head: int
    table: int
    output: int
    gradient: int
    output_gradient: int


@dataclass(slots=True)
class StageProblem:
    """The problem of a model on a mesh.

    Attributes:
        algorithms: one entry per graph.
        problem: its nodes are the nodes of the first graph, of the second and so on, then the weights in the same order.
        tied: the weight that embedding and head share; None if each has its own.
        first_node, first_weight: index in the problem of each graph's first node and first weight.
    """

    model: ModelGraphs
    mesh: Mesh
    workload: Workload
    algorithms: tuple[Algorithms, ...]
    problem: ChoiceProblem
    tied: Tied | None
    first_node: list[int] = field(default_factory=list)
    first_weight: list[int] = field(default_factory=list)

    def place_of(self, index: int) -> tuple[int, int]:
        """(graph, index in the graph) of a node or weight of the problem."""
        firsts = self.first_weight if index >= self.first_weight[0] else self.first_node
        place = bisect_right(firsts, index) - 1
        return place, index - firsts[place]

    @property
    def tied_weights(self) -> tuple[int, ...]:
        """Indices in the problem of the table and of the head's weight if they are tied, else none."""
        tied = self.tied
        if tied is None:
            return ()
        return self.first_weight[tied.embedding] + tied.table, self.first_weight[tied.head] + tied.output

    def held_bytes(self, chosen: Sequence[int]) -> float:
        """Bytes of one rank, the fixed ones included."""
        (row,) = self.problem.rows
        held = sum(float(values[choice]) for values, choice in zip(row.coefficients, chosen, strict=True))
        return held + fixed_bytes(self.model, self.mesh)

    def places(self, layout: MeshLayout) -> tuple[int | None, ...]:
        """The choices of a layout; None if the layout asks for an algorithm that does not exist."""
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


def fixed_bytes(model: ModelGraphs, mesh: Mesh) -> float:
    """Bytes of one rank that do not depend on the choices: temporaries, and parameters that no product reads."""
    others = sum(graph.other_bytes * model.counts[place] for place, graph in enumerate(model.graphs))
    return model.working_bytes / mesh.devices + others


def stage_problem(model: ModelGraphs, mesh: Mesh, workload: Workload) -> StageProblem:
    """The problem of choices of a model on a mesh, within the usable bytes of the workload."""
    algorithms = tuple(
        Algorithms(graph, mesh, workload, pricer) for graph, pricer in zip(model.graphs, model.pricers, strict=True)
    )
    counts, number = model.counts, workload.micro_batches
    # 1. Costs and bytes of the nodes, then of the weights; a kind of part counts as often as it stands in the chain.
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
    # 2. A tied weight is held and updated once: with the head.
    limit = workload.usable_bytes - fixed_bytes(model, mesh)
    tied = tied_weight(model)
    stage = StageProblem(model, mesh, workload, algorithms, ChoiceProblem((), ()), tied, first_node, first_weight)
    if tied is not None:
        table, _ = stage.tied_weights
        costs[table], loads[table] = np.zeros_like(costs[table]), np.zeros_like(loads[table])
    # 3. Edges. The integer program wants different ends and one edge per pair: loops join the node's costs, parallel edges add.
    edges: dict[tuple[int, int], Floats] = {}
    for a, b, matrix in chain(_inner_edges(stage), _weight_edges(stage), _chain_edges(stage), _tied_edges(stage)):
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
    """Resharding of tensors between the nodes of each graph, times the parts that the graph stands for."""
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


def _weight_edges(stage: StageProblem) -> Iterator[tuple[int, int, Floats]]:
    """Gathers of weights for their products, and reductions of the gradients that the products compute."""
    counts, tied = stage.model.counts, stage.tied
    for place, algorithms in enumerate(stage.algorithms):
        graph, first = algorithms.graph, stage.first_node[place]
        for index, weight in enumerate(graph.weights):
            for node in (weight.forward, weight.backward):
                # The gradient of a tied table is added to the head's (`_tied_edges`).
                if node is None or (tied is not None and (place, node) == (tied.embedding, tied.gradient)):
                    continue
                matrix = algorithms.weight_matrix(weight, graph.nodes[node], index) * counts[place]
                yield stage.first_weight[place] + index, first + node, matrix


def tied_weight(model: ModelGraphs) -> Tied | None:
    """The weight that embedding and head share; None if each has its own."""
    places = {graph.kind: place for place, graph in enumerate(model.graphs)}
    if not {EMBEDDING, HEAD} <= places.keys():
        return None
    tables, outputs = (model.graphs[places[kind]].weights for kind in (EMBEDDING, HEAD))
    for (table, first), (output, second) in product(enumerate(tables), enumerate(outputs)):
        if first.parameter == second.parameter and first.backward is not None and second.backward is not None:
            return Tied(places[EMBEDDING], places[HEAD], table, output, first.backward, second.backward)
    return None


def _tied_edges(stage: StageProblem) -> Iterator[tuple[int, int, Floats]]:
    """Embedding and head must choose the same blocks of a tied weight; their gradients are resharded to be added."""
    tied = stage.tied
    if tied is None:
        return
    table, output = stage.algorithms[tied.embedding], stage.algorithms[tied.head]
    # The table is the transpose of the head's weight: its vocabulary is the input dimension, the head's is the output.
    choices = [(turned(choice.split), choice.level) for choice in table.of_weight[tied.table]]
    head_choices = [(choice.split, choice.level) for choice in output.of_weight[tied.output]]
    equal = np.array([[0.0 if choice == head_choice else np.inf for head_choice in head_choices] for choice in choices])
    yield stage.tied_weights[0], stage.tied_weights[1], equal
    weight = output.graph.weights[tied.output]
    table_gradients = [turned(table.gradient_spec(candidate)) for candidate in table.of_node[tied.gradient]]
    head_gradients = [output.gradient_spec(candidate) for candidate in output.of_node[tied.output_gradient]]
    prices = output.resharding(flat_extents(weight), weight.elements * stage.workload.features.gradient_bytes)
    added = [[prices.added(source, target) for target in head_gradients] for source in table_gradients]
    matrix = np.array(added) * stage.workload.micro_batches
    yield stage.first_node[tied.embedding] + tied.gradient, stage.first_node[tied.head] + tied.output_gradient, matrix


def _chain_edges(stage: StageProblem) -> Iterator[tuple[int, int, Floats]]:
    """Resharding of hidden states between neighbouring parts, and of their gradients on the way back."""
    for (before, after), times in Counter(pairwise(stage.model.chain)).items():
        earlier, later = stage.algorithms[before], stage.algorithms[after]
        for source, target, source_end, target_end in (
            (earlier, later, earlier.graph.leaves, later.graph.enters),
            (later, earlier, later.graph.gradient_leaves, earlier.graph.gradient_enters),
        ):
            if source_end is None or target_end is None:
                continue
            node, storage = source_end
            tensor = source.graph.tensors[storage]
            entering = target.graph.nodes[target_end].result
            assert entering is not None
            written = [source.written(candidate, tensor) for candidate in source.of_node[node]]
            needed = [target.written(candidate, entering) for candidate in target.of_node[target_end]]
            prices = source.resharding(source.graph.extents(tensor), tensor.bytes)
            places = (before, after) if source is earlier else (after, before)
            yield (
                stage.first_node[places[0]] + node,
                stage.first_node[places[1]] + target_end,
                prices.matrix(written, needed) * stage.workload.micro_batches * times,
            )
