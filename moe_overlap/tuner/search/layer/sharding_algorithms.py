"""The parallel algorithms of every node on a mesh, with their seconds, specs and bytes.

An algorithm maps each of the two mesh axes to one loop of the operator, or to none; the ranks of an axis without a loop repeat
the work. The loops of a product are samples, tokens, experts, outputs (n) and inputs (k); those of attention samples, tokens and
heads; those of kernels that move rows samples, tokens, width and experts.

1. If the loop of a sum is split, each rank has a partial result. The algorithm then ends with an all-reduce, or with a
   reduce-scatter that splits the result along those axes; readers use it split, or gather it. Sequence parallelism arises in this
   way.
2. Attention on split tokens gathers keys and values, and scatters their gradients.
3. Rows of the experts keep the sample and the token they belong to. Dispatch changes the spec from these to EXPERT, an
   all-to-all. If every rank already has all tokens, dispatch is a local slice and combine a reduce-scatter (the all-gather
   dispatcher).
4. A weight is a node of its own. Its gradient is reduced once per step, or for every micro-batch if it is stored in shards; its
   optimizer states and the weight itself may be split further along the axes that hold copies. These are the levels of ZeRO.

Seconds of computation are those of the operator with its sizes divided by the ranks of its loops. All communication counts as
exposed.

Source: Alpa, section 4.1 and table 3; Rajbhandari et al., ZeRO, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from moe_overlap.describe.cluster import Gpu
from moe_overlap.tuner.capture.graph import Op
from moe_overlap.tuner.cost.hardware import CommonConstants, Features, GpuConstants
from moe_overlap.tuner.cost.operators import Lookup, device_seconds, tabulate
from moe_overlap.tuner.search.layer.sharding_graph import (
    EMBEDDINGS,
    Node,
    OperatorGraph,
    ShardedTensor,
    Weight,
    flat_extents,
)
from moe_overlap.tuner.search.layer.sharding_specs import (
    PARTIAL,
    REPLICATED,
    WHOLE,
    Dim,
    Extents,
    Floats,
    Mesh,
    Resharding,
    Spec,
    is_valid,
    specs_of,
)

ZERO_LEVELS = (0, 1, 2, 3)
ELEMENT_BYTES = {"float32": 4}
"""Type -> bytes of an element; 2 for all other types that attention computes in."""
OPERANDS: dict[str, tuple[Dim, ...]] = {
    "input": (Dim.SAMPLES, Dim.TOKENS, Dim.EXPERT, Dim.INPUT),
    "weight": (Dim.EXPERT, Dim.OUTPUT, Dim.INPUT),
    "output": (Dim.SAMPLES, Dim.TOKENS, Dim.EXPERT, Dim.OUTPUT),
}
"""Operand of a product -> the loops that index it."""
SHAPES: dict[str, tuple[tuple[Dim, ...], ...]] = {
    "rows": ((Dim.SAMPLES, Dim.TOKENS), (Dim.OUTPUT,), (Dim.INPUT,)),
    "input gradient": ((Dim.SAMPLES, Dim.TOKENS), (Dim.INPUT,), (Dim.OUTPUT,)),
    "weight gradient": ((Dim.OUTPUT,), (Dim.INPUT,), (Dim.SAMPLES, Dim.TOKENS)),
}
"""Product -> the loops that each number of its shape (m, n, k) counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The computation of a mesh in a step, and its prices.

    Attributes:
        micro_batches: number per step, each with `samples` of `tokens`, over the complete mesh.
        usable_bytes: most bytes of a GPU that a rank may need (`Machine.usable_bytes`).
        gpu, constants, common, features, lookup: prices, as in `cost/layer.py`.
        load: rows of the busiest rank over the mean, if experts are split.
    """

    samples: int
    tokens: int
    micro_batches: int
    usable_bytes: float
    gpu: Gpu
    constants: GpuConstants
    common: CommonConstants = CommonConstants()
    features: Features = Features()
    lookup: Lookup | None = None
    load: float = 1.0


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to compute a node on a mesh.

    Attributes:
        loops: the loop that each mesh axis splits.
        out: spec of the result; WHOLE for a node without one.
        compute_seconds, communication_seconds: of one micro-batch.
        bytes: saved for the backward pass, on one rank.
    """

    loops: Spec
    out: Spec
    compute_seconds: float
    communication_seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """The placement of a weight, its gradient and its optimizer states.

    Attributes:
        split: spec of the weight while products use it.
        level: level of ZeRO along the axes that hold copies.
        stored: spec of the weight between products.
        states: spec of the optimizer states.
        step_seconds: the update and the gather of updated weights, once per step.
        bytes: weight, gradient and states on one rank.
    """

    split: Spec
    level: int
    stored: Spec
    states: Spec
    step_seconds: float
    bytes: float


class Pricer:
    """Seconds of captured operators with their sizes divided by ranks; equal requests are priced once."""

    def __init__(self, graph: OperatorGraph, workload: Workload) -> None:
        self._graph, self._workload = graph, workload
        self._seconds: dict[tuple[int, tuple[int, ...], float], float] = {}

    def seconds(self, requests: list[tuple[Op, tuple[int, ...], float]]) -> Floats:
        """[requests] seconds. A request is an operator, the divisors of its shape, and the share of its bytes."""
        missing = {(op.id, divisors, share): op for op, divisors, share in requests}
        missing = {key: op for key, op in missing.items() if key not in self._seconds}
        if missing:
            self._price(missing)
        return np.array([self._seconds[op.id, divisors, share] for op, divisors, share in requests])

    def _price(self, missing: Mapping[tuple[int, tuple[int, ...], float], Op]) -> None:
        scaled = []
        for place, ((_, divisors, share), op) in enumerate(missing.items()):
            shape = tuple(size / divisor for size, divisor in zip(op.shape, divisors, strict=True))
            # FLOPs of a grouped product depend on its rows, not on the number of groups.
            parts = divisors[1:] if op.cost_class == "grouped_gemm" else divisors
            if op.cost_class == "attention":
                # Samples, heads and query tokens; keys are not divided.
                parts = (divisors[0], divisors[1], divisors[3])
            work = op.flops / math.prod(parts) if op.flops.terms else op.flops
            size = op.bytes.value(self._workload.samples, self._workload.tokens)
            moved = max(0, round(float(size) * share))
            scaled.append(replace(op, id=place, shape=shape, flops=work, bytes=type(op.bytes).of(moved)))
        table = tabulate(replace(self._graph.part, ops=tuple(scaled)), self._workload.samples, self._workload.tokens)
        load = self._workload
        values, _ = device_seconds(table, load.gpu, load.features, load.constants, load.common, load.lookup)
        self._seconds.update(zip(missing, map(float, values), strict=True))


class Algorithms:
    """All algorithms of the nodes and weights of a graph on one mesh, and the seconds of resharding between them."""

    def __init__(self, graph: OperatorGraph, mesh: Mesh, workload: Workload, pricer: Pricer) -> None:
        self.graph, self.mesh, self.workload, self._pricer = graph, mesh, workload, pricer
        self._reshardings: dict[tuple[float, tuple[tuple[Dim, int], ...]], Resharding] = {}
        self.of_node = [self._of_node(node) for node in graph.nodes]
        self.of_weight = [self._of_weight(weight) for weight in graph.weights]

    def resharding(self, extents: Extents, size: float) -> Resharding:
        """Prices of a tensor's changes of spec."""
        key = (size, tuple(extents.items()))
        if key not in self._reshardings:
            self._reshardings[key] = Resharding(extents, size, self.mesh)
        return self._reshardings[key]

    def fitted(self, spec: Spec, tensor: ShardedTensor) -> Spec:
        """The spec limited to the dimensions of a tensor: an axis that splits another dimension holds copies instead."""
        extents = self.graph.extents(tensor)
        dims = [dim if dim < 0 or dim in extents else REPLICATED for dim in spec]
        width = self.mesh.shards((dims[0], dims[1]), (Dim.WIDTH,))
        if width > 1 and extents[Dim.WIDTH] % width:
            dims = [REPLICATED if dim == Dim.WIDTH else dim for dim in dims]
        return dims[0], dims[1]

    def written(self, algorithm: Algorithm, tensor: ShardedTensor) -> Spec:
        """Spec in which a node leaves one of its tensors."""
        return self.fitted(algorithm.out, tensor)

    def needed(self, node: Node, algorithm: Algorithm, tensor: ShardedTensor, role: str) -> Spec:
        """Spec in which a node reads a tensor."""
        if role == "out":
            return self.fitted(algorithm.out, tensor)
        if node.kind == "product":
            width = _WIDTHS[role, node.phase]
            return self.fitted(_mapped(algorithm.loops, {width: Dim.WIDTH}), tensor)
        return self.fitted(algorithm.loops, tensor)

    # Nodes -----------------------------------------------------------------------------------------------------------------

    def _loops(self, node: Node) -> Iterable[Spec]:
        """Every mapping of the mesh axes to loops that divides them evenly."""
        graph, assert_tensor = self.graph, node.source or node.result
        assert assert_tensor is not None
        extents: dict[Dim, int] = {Dim.SAMPLES: graph.samples, Dim.TOKENS: graph.tokens}
        if node.kind == "product" and node.weight is not None:
            extents |= graph.weights[node.weight].extents
        elif node.kind == "attention":
            extents[Dim.WIDTH] = self._heads(node)
        else:
            extents |= graph.extents(assert_tensor)
            if node.kind == "rows":
                extents[Dim.EXPERT] = graph.experts
        return specs_of(extents, self.mesh)

    def _heads(self, node: Node) -> int:
        """Key and value heads: the most ranks that heads are divided among."""
        shape = self.graph.part.ops[node.heavy[0]].shape
        return int(shape[2].value(self.graph.samples, self.graph.tokens))

    def _of_node(self, node: Node) -> tuple[Algorithm, ...]:
        pairs = [(loops, out) for loops in self._loops(node) for out in self._outs(node, loops)]
        compute = self._compute(node, pairs)
        return tuple(
            Algorithm(loops, out, float(seconds), self._communication(node, loops, out), self._saved(node, out))
            for (loops, out), seconds in zip(pairs, compute, strict=True)
        )

    def pending(self, node: Node, loops: Spec) -> Spec:
        """Spec of the result before partial sums are reduced."""
        if node.kind == "product":
            width, summed = (Dim.INPUT, Dim.OUTPUT) if node.phase == "backward" else (Dim.OUTPUT, Dim.INPUT)
            return _mapped(loops, {width: Dim.WIDTH, summed: PARTIAL})
        if node.kind == "rows" and node.result is not None and not node.result.is_rows:
            # Each rank sums the rows of its own experts only.
            return _mapped(loops, {Dim.EXPERT: PARTIAL})
        return loops

    def _outs(self, node: Node, loops: Spec) -> list[Spec]:
        """Specs that a result can have after its partial sums are reduced."""
        if node.result is None:
            return [WHOLE]
        pending, extents = self.pending(node, loops), self.graph.extents(node.result)
        reduced = [dim if dim != PARTIAL else REPLICATED for dim in pending]
        split = [dim for dim in extents if dim != Dim.EXPERT]
        options = [(REPLICATED, *split) if dim == PARTIAL else (reduced[axis],) for axis, dim in enumerate(pending)]
        outs = [(a, b) for a, b in product(*options) if is_valid((a, b), extents, self.mesh)]
        return [out for out in outs if not (node.whole_width and Dim.WIDTH in out)]

    def _communication(self, node: Node, loops: Spec, out: Spec) -> float:
        if node.kind == "attention":
            return self._of_keys(node, loops)
        if node.result is None:
            return 0.0
        pending = self.pending(node, loops)
        seconds = 0.0
        if pending != out:
            seconds = self.resharding(self.graph.extents(node.result), node.result.bytes).between(pending, out)
        return seconds + self._completed(node, out)

    def _completed(self, node: Node, out: Spec) -> float:
        """Seconds of the collectives of merged operators if the width is split, as in the loss over a split vocabulary."""
        if Dim.WIDTH not in out:
            return 0.0
        graph, seconds = self.graph, 0.0
        extents = {Dim.SAMPLES: graph.samples, Dim.TOKENS: graph.tokens}
        for op in (graph.part.ops[index] for index in node.light):
            if op.collective is not None:
                size = float(op.collective.payload_bytes.value(graph.samples, graph.tokens))
                pending, reduced = _mapped(out, {Dim.WIDTH: PARTIAL}), _mapped(out, {Dim.WIDTH: REPLICATED})
                seconds += self.resharding(extents, size).between(pending, reduced)
        return seconds

    def _of_keys(self, node: Node, loops: Spec) -> float:
        """Seconds of gathering keys and values over ranks that split the tokens, and backward of scattering their gradients."""
        if Dim.TOKENS not in loops:
            return 0.0
        graph, op = self.graph, self.graph.part.ops[node.heavy[0]]
        samples, _, groups, _, keys, *widths = (float(n.value(graph.samples, graph.tokens)) for n in op.shape[:7])
        extents = {Dim.SAMPLES: graph.samples, Dim.TOKENS: graph.tokens, Dim.WIDTH: int(groups)}
        seconds = 0.0
        for width in widths:
            prices = self.resharding(extents, samples * keys * groups * width * ELEMENT_BYTES.get(op.dtype, 2))
            seconds += prices.between(loops, _mapped(loops, {Dim.TOKENS: REPLICATED}))
            if node.phase == "backward":
                seconds += prices.between(_mapped(loops, {Dim.TOKENS: PARTIAL}), loops)
        return seconds

    def _saved(self, node: Node, out: Spec) -> float:
        return sum(
            self.graph.tensors[storage].bytes / self.mesh.shards(self.fitted(out, self.graph.tensors[storage]))
            for storage in node.saved
        )

    # Computation -----------------------------------------------------------------------------------------------------------

    def _compute(self, node: Node, pairs: list[tuple[Spec, Spec]]) -> Floats:
        """[pairs] seconds of a node's operators."""
        total = np.zeros(len(pairs))
        for index in node.heavy:
            op = self.graph.part.ops[index]
            total += self._pricer.seconds([self._scaled(node, op, loops) for loops, _ in pairs]) * np.array(
                [self._load(op, loops) for loops, _ in pairs]
            )
        for index in node.light:
            op = self.graph.part.ops[index]
            ones = tuple(1 for _ in op.shape)
            # An operator that adds to a weight's gradient is split like the weight, any other like the result.
            is_gradient = any(self.graph.part.storages[storage].role == "gradient" for storage in op.writes)
            shares = [
                1.0 / (self.mesh.shards(loops, OPERANDS["weight"]) if is_gradient else self.mesh.shards(out))
                for loops, out in pairs
            ]
            total += self._pricer.seconds([(op, ones, share) for share in shares])
        return total

    def _load(self, op: Op, loops: Spec) -> float:
        """Rows of the busiest rank over the mean, if the experts are split; else 1."""
        return self.workload.load if op.scales_with_load and Dim.EXPERT in loops else 1.0

    def _scaled(self, node: Node, op: Op, loops: Spec) -> tuple[Op, tuple[int, ...], float]:
        """The operator, the divisors of its shape, and the share of its bytes that a rank moves."""
        mesh = self.mesh
        if node.kind == "product" and op.name not in EMBEDDINGS:
            return op, self._product_divisors(op, loops), self._product_share(node, op, loops)
        if node.kind == "attention":
            samples, tokens, heads = (mesh.shards(loops, (dim,)) for dim in (Dim.SAMPLES, Dim.TOKENS, Dim.WIDTH))
            divisors = (samples, heads, heads, tokens, 1, 1, 1, 1)
            return op, divisors[: len(op.shape)], 1.0 / mesh.shards(loops)
        # An embedding moves the rows of its tokens, whichever part of the table a rank has; its gradient has the table's size.
        dims = {"embedding": (Dim.SAMPLES, Dim.TOKENS, Dim.OUTPUT), "embedding_dense_backward": OPERANDS["weight"]}
        return op, tuple(1 for _ in op.shape), 1.0 / mesh.shards(loops, dims.get(op.name, ()))

    def _product_divisors(self, op: Op, loops: Spec) -> tuple[int, ...]:
        kind = "rows" if op.phase == "forward" else "input gradient"
        if op.is_weight_gradient and op.cost_class == "gemm":
            kind = "weight gradient"
        m, n, k = (self.mesh.shards(loops, dims) for dims in SHAPES[kind])
        if op.cost_class == "gemm":
            return m, n, k
        if op.is_weight_gradient:
            # The shape of a grouped weight gradient is that of the forward product.
            n, k = k, n
        groups = self.mesh.shards(loops, (Dim.EXPERT,))
        return groups, groups * m, n, k

    def _product_share(self, node: Node, op: Op, loops: Spec) -> float:
        """Bytes of the operands on one rank over those of the undivided operands."""
        graph = self.graph
        weight = graph.weights[node.weight or 0]
        storages = graph.part.storages
        total = of_rank = 0.0
        for index in (*op.reads, *op.writes):
            size = float(storages[index].bytes.value(graph.samples, graph.tokens))
            operand = "weight"
            if index in graph.tensors:
                is_input = index == _input_storage(graph, weight)
                # An input's gradient has the dimensions of the input.
                is_input |= node.phase == "backward" and index in op.writes
                operand = "input" if is_input else "output"
            total += size
            of_rank += size / self.mesh.shards(loops, OPERANDS[operand])
        return of_rank / total if total else 1.0

    # Weights ---------------------------------------------------------------------------------------------------------------

    def _of_weight(self, weight: Weight) -> tuple[WeightChoice, ...]:
        choices = []
        for split in specs_of(weight.extents, self.mesh):
            finer = _mapped(split, {REPLICATED: Dim.FLAT})
            finer = tuple(dim if self.mesh.shape[axis] > 1 else REPLICATED for axis, dim in enumerate(finer))  # type: ignore[assignment]
            for level in ZERO_LEVELS if finer != split else ZERO_LEVELS[:1]:
                choices.append(self._weight_choice(weight, split, finer, level))
        return tuple(choices)

    def _weight_choice(self, weight: Weight, split: Spec, finer: Spec, level: int) -> WeightChoice:
        features, mesh = self.workload.features, self.mesh
        states, gradient, stored = (finer if level >= first else split for first in (1, 2, 3))
        gathers = self.resharding(flat_extents(weight), weight.elements * features.gathered_bytes)
        shares = {spec: weight.elements / mesh.shards(spec) for spec in (split, finer)}
        # As `state_sizes` in cost/stage.py. The update reads master weight, moments and gradient and writes master weight and
        # moments; besides, the norm reads the gradient and its sum is zeroed.
        swept = (
            shares[states] * 2 * (features.optimizer_bytes + features.gradient_bytes)
            + shares[gradient] * features.gradient_bytes
        )
        rate = self.workload.gpu.memory_gb_per_s * 1e9 * self.workload.constants.memory
        return WeightChoice(
            split=split,
            level=level,
            stored=stored,
            states=states,
            step_seconds=gathers.between(states, stored) + swept / rate,
            bytes=shares[stored] * features.weight_bytes
            + shares[gradient] * features.gradient_bytes
            + shares[states] * features.optimizer_bytes,
        )

    def gradient_spec(self, algorithm: Algorithm) -> Spec:
        """Spec in which a backward product leaves its weight's gradient."""
        return _mapped(algorithm.loops, {Dim.SAMPLES: PARTIAL, Dim.TOKENS: PARTIAL})

    def weight_matrix(self, weight: Weight, node: Node, index: int) -> Floats:
        """[choices of the weight, algorithms of a node] seconds of one step between a weight and a product.

        Weights stored in shards are gathered for every micro-batch; gradients stored in shards are reduced for every
        micro-batch, others once.
        """
        choices, algorithms = self.of_weight[index], self.of_node[node.id]
        features, extents, number = self.workload.features, flat_extents(weight), self.workload.micro_batches
        reads = self.resharding(extents, weight.elements * features.weight_bytes)
        needed = [_only(algorithm.loops, OPERANDS["weight"]) for algorithm in algorithms]
        # An embedding's backward pass does not read the table.
        is_read = node.phase == "forward" or self.graph.part.ops[node.heavy[0]].name not in EMBEDDINGS
        seconds = reads.matrix([choice.stored for choice in choices], needed) * number if is_read else 0.0
        if node.phase == "backward":
            gradients = self.resharding(extents, weight.elements * features.gradient_bytes)
            written = [self.gradient_spec(algorithm) for algorithm in algorithms]
            times = np.array([[number if choice.level >= 2 else 1] for choice in choices])
            seconds = seconds + gradients.matrix(written, [choice.states for choice in choices]).T * times
        return np.asarray(seconds, dtype=np.float64) + np.zeros((len(choices), len(algorithms)))


_WIDTHS = {
    ("x", "forward"): Dim.INPUT,
    ("x", "backward"): Dim.INPUT,
    ("dy", "forward"): Dim.OUTPUT,
    ("dy", "backward"): Dim.OUTPUT,
}
"""Role of an operand and pass -> the loop of the product over the operand's width."""


def turned(spec: Spec) -> Spec:
    """Spec of a weight seen as its transpose."""
    return _mapped(spec, {Dim.OUTPUT: Dim.INPUT, Dim.INPUT: Dim.OUTPUT})


def _mapped(spec: Spec, renamed: Mapping[Dim, Dim]) -> Spec:
    first, second = (renamed.get(dim, dim) for dim in spec)
    return first, second


def _only(spec: Spec, dims: tuple[Dim, ...]) -> Spec:
    first, second = (dim if dim in dims else REPLICATED for dim in spec)
    return first, second


def _input_storage(graph: OperatorGraph, weight: Weight) -> int:
    source = graph.nodes[weight.forward].source
    return source.storage if source is not None else -1
