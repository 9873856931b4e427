"""The graph that the intra-operator search shards: heavy operators of a captured part, with the light ones merged into them.

A part that was captured on one rank (TP = CP = EP = 1) has undivided operators. Its nodes are products, attention kernels,
embeddings, kernels that move rows to and from the order of the experts (each once forward and once backward), and the tensors
that enter the part. Every other operator is light: it joins the node of its deepest operand and has that node's spec; its other
operands must then have the same spec.

The products for an input's gradient and for a weight's gradient share an operand and are one node. The dimensions of a tensor
follow from its bytes: those of activations grow with b · s, and bytes per token give the width.

Left out, because they are small: gradients of norms and biases, and the router's sums over tokens.

Source: Alpa, section 4.2 (merging of operators, depth by breadth-first search).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from moe_overlap.plan.operators import EXPERTS
from moe_overlap.tuner.capture.graph import CapturedPart, Op, Phase
from moe_overlap.tuner.cost.layer import weight_of
from moe_overlap.tuner.search.layer.sharding_specs import UNLIMITED, Dim, Extents

NodeKind = Literal["input", "product", "attention", "rows"]
"""`product`: a gemm, a grouped gemm, or an embedding, which is a product with one-hot rows. `rows`: a kernel that moves tokens to
rows of the experts, back, or among the rows."""
Role = Literal["x", "dy", "same", "out"]
"""How a node uses a tensor: as a product's input, as the gradient of its output, in the spec of the node itself, or in the spec
of its result (operands of merged operators)."""
MOVE_ROWS = "te.move_rows"
EMBEDDINGS = ("embedding", "embedding_dense_backward")
WIDTHWISE = frozenset(
    (
        *("clone", "_to_copy", "copy_", "cat", "add", "add_", "mul", "mul_", "zeros_like"),
        *("silu", "silu_backward", "gelu", "gelu_backward", "native_dropout", "native_dropout_backward"),
        *("te.rotary", "te.add_bias", "latent.rotary_queries", "latent.rotary_keys"),
        *("compiled.swiglu", "compiled.swiglu_back", "compiled.weighted_swiglu", "compiled.weighted_swiglu_back"),
        *("compiled.bias_gelu", "compiled.bias_gelu_back", "compiled.bias_dropout_add_fused_train"),
    )
)
"""Light operators that process each entry of a token's width, or each head, independently of the others."""


class NotShardableError(ValueError):
    """A captured part has an operator that the search has no sharding for."""


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A storage of activations.

    Attributes:
        is_rows: the rows are in the order of the experts, one for each expert of a token.
        entries: two-byte entries per token; 0 if a token has less than one.
    """

    storage: int
    bytes: float
    is_rows: bool
    entries: int


@dataclass(slots=True)
class Weight:
    """A parameter of a product; for a grouped product the parameters of all experts.

    Attributes:
        parameter: name of the stored parameter; equal for a tied embedding and the head.
        extents: sizes of OUTPUT and INPUT, for grouped products also of EXPERT.
        forward, backward: the nodes that read it; None if there is no such node.
    """

    name: str
    parameter: str
    extents: Extents
    elements: int
    forward: int
    backward: int | None = None


@dataclass(slots=True)
class Node:
    """A heavy operator, or a tensor that enters the part, with the light operators that follow it.

    Attributes:
        label: for messages: module, or operator, and pass.
        weight_name: name of a product's weight in plans (`qkv`, `fc2`); empty for other nodes.
        heavy, light: ids of operators.
        weight: index of a product's weight.
        partner: for a backward node, its forward node.
        source, result: first operand and result of the heavy operator; its algorithm splits their dimensions. `result` is None
            for a backward product whose input has no gradient.
        whole_width: a merged operator needs the full width of a token.
        read: (storage, role) of every activation that another node writes.
        saved: storages that are kept for the backward pass.
    """

    id: int
    kind: NodeKind
    phase: Phase
    label: str
    operator: str
    weight_name: str = ""
    heavy: list[int] = field(default_factory=list)
    light: list[int] = field(default_factory=list)
    weight: int | None = None
    partner: int | None = None
    source: ShardedTensor | None = None
    result: ShardedTensor | None = None
    whole_width: bool = False
    read: dict[tuple[int, Role], None] = field(default_factory=dict)
    saved: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The label without its pass."""
        return self.label.rpartition(" ")[0]


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that one node writes and another reads."""

    producer: int
    consumer: int
    storage: int
    role: Role


@dataclass(slots=True)
class OperatorGraph:
    """The graph of a part.

    Attributes:
        kind: kind of the part.
        samples, tokens: of the micro-batch, over the complete mesh.
        tensors: storage -> activation.
        producers: storage -> the node that writes it.
        enters: the node of the incoming hidden states; None for the embedding.
        leaves: node and storage of the outgoing hidden states; None for the head.
        gradient_enters, gradient_leaves: the same for their gradients.
        other_bytes: bytes of parameters that no product reads; every rank holds all of them.
    """

    part: CapturedPart
    kind: str
    samples: int
    tokens: int
    experts: int = 0
    nodes: list[Node] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    tensors: dict[int, ShardedTensor] = field(default_factory=dict)
    producers: dict[int, int] = field(default_factory=dict)
    enters: int | None = None
    leaves: tuple[int, int] | None = None
    gradient_enters: int | None = None
    gradient_leaves: tuple[int, int] | None = None
    other_bytes: float = 0.0

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Every tensor that one node writes and another reads."""
        return tuple(
            Edge(self.producers[storage], node.id, storage, role)
            for node in self.nodes
            for storage, role in node.read
            if self.producers[storage] != node.id
        )

    def extents(self, tensor: ShardedTensor) -> Extents:
        """The dimensions of an activation that may be split, with their lengths."""
        extents = {Dim.SAMPLES: self.samples, Dim.TOKENS: self.tokens}
        if tensor.entries:
            extents[Dim.WIDTH] = tensor.entries
        if tensor.is_rows:
            extents[Dim.EXPERT] = self.experts
        return extents


def operator_graph(part: CapturedPart, samples: int, tokens: int) -> OperatorGraph:
    """The nodes of a captured part.

    Args:
        samples: of a micro-batch, over all ranks of the mesh.
        tokens: of one sample.
    Raises:
        NotShardableError: the part recomputes, is sharded already, or has a backward product without a forward product.
    """
    for op in part.ops:
        if op.is_recomputed or (op.collective is not None and op.collective.size > 1):
            raise NotShardableError(
                f"{part.kind}: {op.name} is recomputed or runs in a group; capture one rank, no recomputation"
            )
    return _Builder(part, samples, tokens).graph()


class _Builder:
    """Assigns the operators of a part, in order, to nodes."""

    def __init__(self, part: CapturedPart, samples: int, tokens: int) -> None:
        self.part = part
        self.result = OperatorGraph(part, part.kind, samples, tokens)
        self.result.experts = max(
            (int(op.shape[0].value(samples, tokens)) for op in part.ops if op.cost_class == "grouped_gemm"), default=0
        )
        self.depths: dict[int, int] = {}
        """Storage -> operators on the longest path to it."""
        self.by_weight: dict[tuple[int, ...], Node] = {}
        """Ids of parameters -> the forward product that reads them."""
        self.backward: dict[int, Node] = {}
        """Forward product -> its backward node."""

    def graph(self) -> OperatorGraph:
        """The graph of the part."""
        graph, part = self.result, self.part
        # 1. Nodes for the tensors that enter. A head's incoming gradient is a few bytes of a scalar, which needs no node.
        if part.gradient_outputs:
            graph.enters = self._enter(part.inputs, "forward")
        if part.gradient_inputs and part.outputs and self._bytes(part.outputs[0]) > 64:
            graph.gradient_enters = self._enter(part.gradient_inputs, "backward")
        # 2. Every operator, in order: a light one joins a node that already exists.
        for op in part.ops:
            self._place(op)
        # 3. Outgoing tensors, saved tensors, and the parameters that no product reads.
        for name, storages in (("leaves", part.outputs), ("gradient_leaves", part.gradient_outputs)):
            if storages and storages[0] in graph.producers and self._grows(storages[0]):
                setattr(graph, name, (graph.producers[storages[0]], storages[0]))
        for storage in part.saved:
            if storage in graph.producers:
                graph.nodes[graph.producers[storage]].saved.append(storage)
        products = {index for ids in self.by_weight for index in ids}
        graph.other_bytes = sum(
            self._bytes(s.id) for s in part.storages if s.role == "parameter" and s.id not in products
        )
        return graph

    def _bytes(self, storage: int) -> float:
        return float(self.part.storages[storage].bytes.value(self.result.samples, self.result.tokens))

    def _grows(self, storage: int) -> bool:
        """Whether a storage grows with the tokens, as activations do and weights do not."""
        size, twice = (self.part.storages[storage].bytes.value(self.result.samples, s) for s in (4096, 8192))
        return float(twice) > 1.5 * float(size)

    def _tensor(self, storage: int, is_rows: bool) -> ShardedTensor:
        tokens = self.result.samples * self.result.tokens
        tensor = ShardedTensor(storage, self._bytes(storage), is_rows, int(self._bytes(storage) / tokens / 2))
        return self.result.tensors.setdefault(storage, tensor)

    def _enter(self, storages: Sequence[int], phase: Phase) -> int | None:
        """A node of the largest tensor that enters: hidden states or their gradients."""
        storage = max(storages, key=self._bytes)
        node = self._node("input", phase, f"input of the {phase} pass", "")
        node.source = node.result = self._tensor(storage, False)
        # A gradient that enters the backward pass is deeper than all of the forward pass.
        self.result.producers[storage], self.depths[storage] = node.id, len(self.part.ops) * (phase == "backward")
        return node.id

    def _node(self, kind: NodeKind, phase: Phase, label: str, operator: str) -> Node:
        node = Node(len(self.result.nodes), kind, phase, label, operator)
        self.result.nodes.append(node)
        return node

    def _place(self, op: Op) -> None:
        storages = self.part.storages
        depth = 1 + max((self.depths.get(index, 0) for index in op.reads), default=0)
        parameters = tuple(index for index in op.reads if storages[index].role == "parameter")
        if op.cost_class in ("gemm", "grouped_gemm") and (parameters or op.is_weight_gradient):
            self._product(op, parameters)
        elif op.name in EMBEDDINGS:
            self._embedding(op, parameters)
        elif op.cost_class == "attention":
            self._heavy(op, "attention", self._is_rows(op))
        elif op.name == MOVE_ROWS:
            # In the experts' operator the kernel sorts rows; in others it turns tokens into rows, or rows into tokens.
            self._heavy(op, "rows", True if op.operator == EXPERTS else not self._is_rows(op))
        else:
            self._merge(op)
        for index in op.writes:
            if storages[index].role in ("activation", "input") and self._grows(index):
                self.depths[index] = max(depth, self.depths.get(index, 0))

    def _activations(self, op: Op) -> list[int]:
        return [index for index in op.reads if index in self.result.producers]

    def _is_rows(self, op: Op) -> bool:
        main = max(self._activations(op), key=self._bytes, default=None)
        return main is not None and self.result.tensors[main].is_rows

    def _write(self, node: Node, op: Op, is_rows: bool) -> None:
        """Record the node as producer of the activations that an operator writes."""
        for index in op.writes:
            if self.part.storages[index].role != "activation" or not self._grows(index):
                continue
            self.result.producers[index] = node.id
            self._tensor(index, is_rows)

    def _heavy(self, op: Op, kind: NodeKind, is_rows: bool) -> Node:
        """Create the node of an attention kernel, or of a kernel that moves rows."""
        node = self._node(kind, op.phase, f"{op.module or op.operator} {op.phase}", op.operator)
        node.heavy.append(op.id)
        read = self._activations(op)
        if not read:
            raise NotShardableError(f"{self.part.kind}: {op.name} reads nothing that the part computes")
        node.read.update(((index, "same"), None) for index in read)
        node.source = self.result.tensors[max(read, key=self._bytes) if kind == "rows" else read[0]]
        self._write(node, op, is_rows)
        node.result = self.result.tensors[max(op.writes, key=self._bytes)]
        return node

    def _product(self, op: Op, parameters: tuple[int, ...]) -> Node:
        """Create the node of a forward product, or let a gradient product join the backward node of its weight."""
        is_grouped = op.cost_class == "grouped_gemm"
        sizes = [int(size.value(self.result.samples, self.result.tokens)) for size in op.shape]
        read = self._activations(op)
        if op.phase == "forward":
            groups, (outputs, inputs) = (sizes[0], sizes[2:]) if is_grouped else (0, sizes[1:])
            node = self._weighted(op, parameters, outputs, inputs, groups)
            node.read.update(((index, "x"), None) for index in read)
            node.source = self.result.tensors[read[0]]
        else:
            node = self._backward_node(self._forward_of(op, parameters, read), op)
            forward = self.result.nodes[node.partner if node.partner is not None else 0]
            input_storage = forward.source.storage if forward.source is not None else -1
            node.read.update(
                ((index, "x" if op.is_weight_gradient and index == input_storage else "dy"), None) for index in read
            )
            gradients = [index for index in read if index != input_storage]
            node.source = self.result.tensors[gradients[0]] if gradients else node.source
        if not op.is_weight_gradient:
            self._write(node, op, is_grouped)
            node.result = self.result.tensors[op.writes[0]]
        return node

    def _weighted(self, op: Op, parameters: tuple[int, ...], outputs: int, inputs: int, groups: int) -> Node:
        node = self._node("product", op.phase, f"{op.module or op.operator} forward", op.operator)
        extents = {Dim.OUTPUT: outputs, Dim.INPUT: inputs, **({Dim.EXPERT: groups} if groups else {})}
        node.heavy.append(op.id)
        node.weight, node.weight_name = len(self.result.weights), weight_of(self.part, op)
        elements = outputs * inputs * max(1, groups)
        stored = max(parameters, key=self._bytes)
        self.result.weights.append(
            Weight(f"{op.module}.weight", self.part.storages[stored].name, extents, elements, node.id)
        )
        # A product may read a bias, too; it is smaller than the weight.
        self.by_weight[tuple(index for index in parameters if self._bytes(index) >= outputs * inputs)] = node
        return node

    def _forward_of(self, op: Op, parameters: tuple[int, ...], read: list[int]) -> Node:
        """The forward product of a gradient product: both read one weight, or one writes the gradient of the other's weight."""
        storages = self.part.storages
        gradients = {storages[index].name for index in op.writes if storages[index].role == "gradient"}
        shape = {int(size.value(self.result.samples, self.result.tokens)) for size in op.shape}
        for ids, node in self.by_weight.items():
            extents = self.result.weights[node.weight or 0].extents
            if gradients:
                if gradients & {storages[index].name for index in ids}:
                    return node
            elif op.is_weight_gradient:
                # The gradient is written to a temporary tensor and added later: input and widths identify the product.
                input_storage = node.source.storage if node.source is not None else -1
                if input_storage in read and {extents[Dim.OUTPUT], extents[Dim.INPUT]} <= shape:
                    return node
            elif set(ids) & set(parameters):
                return node
        raise NotShardableError(
            f"{self.part.kind}: no forward product belongs to the backward product {op.name} ({op.module})"
        )

    def _backward_node(self, forward: Node, op: Op) -> Node:
        if forward.id not in self.backward:
            node = self._node("product", "backward", forward.label.replace("forward", "backward"), forward.operator)
            node.weight, node.partner, node.weight_name = forward.weight, forward.id, forward.weight_name
            self.result.weights[forward.weight or 0].backward = node.id
            self.backward[forward.id] = node
        node = self.backward[forward.id]
        node.heavy.append(op.id)
        return node

    def _embedding(self, op: Op, parameters: tuple[int, ...]) -> Node:
        """Create or join the node of an embedding: a product of one-hot rows with a table whose inputs are the vocabulary."""
        tokens = self.result.samples * self.result.tokens
        if op.phase == "forward":
            if not (parameters and op.writes):
                raise NotShardableError(f"{self.part.kind}: {op.name} reads no table, or writes nothing")
            written = self._tensor(op.writes[0], False)
            entry = self._bytes(parameters[0])
            width = max(1, round(written.bytes / tokens / 2))
            node = self._weighted(op, parameters, width, max(1, round(entry / 2 / width)), 0)
            node.weight_name = "word" if "word_embeddings" in op.module.split(".") else "position"
            self._write(node, op, False)
            node.result = self.result.tensors[op.writes[0]]
            return node
        size = self._bytes(op.writes[0])
        for ids, forward in self.by_weight.items():
            if self._bytes(ids[0]) == size:
                node = self._backward_node(forward, op)
                gradient = max(op.reads, key=self._bytes)
                node.read[gradient, "dy"] = None
                node.source = self.result.tensors.get(gradient)
                return node
        raise NotShardableError(f"{self.part.kind}: no embedding belongs to the gradient {op.name}")

    def _merge(self, op: Op) -> Node | None:
        """Let a light operator join the node of its deepest operand; None if it reads no activation."""
        graph = self.result
        read = self._activations(op)
        if not read:
            return self._merge_gradient(op)
        main = max(read, key=lambda index: (self.depths.get(index, 0), self._bytes(index)))
        node = graph.nodes[graph.producers[main]]
        node.light.append(op.id)
        # An output that does not grow with the micro-batch, such as a bias's gradient, is a sum over tokens, not over the width.
        is_result = any(self._grows(index) for index in op.writes)
        node.whole_width |= is_result and op.name not in WIDTHWISE and not self._is_completed(op)
        node.read.update(((index, "out"), None) for index in read if graph.producers[index] != node.id)
        self._write(node, op, graph.tensors[main].is_rows)
        return node

    def _merge_gradient(self, op: Op) -> Node | None:
        """Let an operator that only adds to a weight's gradient join the product that computed the addend."""
        graph, written = self.result, {self.part.storages[index].name for index in op.writes}
        for node in graph.nodes:
            computed = {self.part.storages[index].id for heavy in node.heavy for index in self.part.ops[heavy].writes}
            if written and node.weight is not None and node.phase == "backward" and computed & set(op.reads):
                node.light.append(op.id)
                return node
        return None

    def _is_completed(self, op: Op) -> bool:
        """Whether the captured code supports a split width: it completes its sums by collectives, as a split loss does."""
        groups = [other for other in self.part.ops if other.collective is not None and other.operator == op.operator]
        return bool(groups)


def flat_extents(weight: Weight) -> Extents:
    """Dimensions of a weight and of its states, which ZeRO cuts anywhere."""
    return {**weight.extents, Dim.FLAT: UNLIMITED}
