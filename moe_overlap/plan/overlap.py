"""The schema of overlap: how one stage and its layers overlap communication with computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from moe_overlap.plan import operators
from moe_overlap.plan.gates import GATE_FACTS
from moe_overlap.plan.operators import (
    ATTENTION,
    COMBINE,
    DISPATCH,
    EXPERTS,
    GATE,
    MERGE,
    MLP,
    MOE_PARTS,
    OperatorId,
    OperatorKind,
    layer_operator,
    parse_operator,
)

Gate = Literal["topk", "switch", "batch_prioritized", "random", "hash", "expert_choice"]
Mechanism = Literal["none", "tutel", "partitioned", "cross_micro_batch", "fused"]
Axis = Literal["batch", "sequence", "capacity"]
Dispatcher = Literal["alltoall", "allgather", "flex", "irregular"]
TUTEL_DEGREES = (1, 2, 4, 8)
MAY_BE_MISSING = {"may_be_missing": True}
"""Metadata of a field that older files of the same schema version lack: a missing field has its default, and a field with its
default is not written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredLimit:
    """A range for which memory allows fewer partitions than the limit of the search."""

    first_operator: str
    last_operator: str
    max_partitions: int
    """1: the range is not cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchLimits:
    """The limits of the search that chose an overlap (Lancet, section 5). For information; the runtime does not read them."""

    max_partitions: int
    """ρ: most partitions of a range."""
    group_seconds: float
    """γ: operators shorter than this, in seconds, are grouped before the search."""
    range_limit: int
    """ι: most groups in a range."""
    lowered: tuple[LoweredLimit, ...] = field(default=(), metadata=MAY_BE_MISSING)
    """Ranges of the stage for which ρ was lowered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelBlocks:
    """Thread blocks of each fused kernel that communicate; its other blocks compute (COMET, section 3.2)."""

    dispatch: int
    """Communicating blocks of the kernel that fuses dispatch and first expert GEMM; its backward fetches the gradients of the
    experts' output and runs the second GEMM's input gradient."""
    combine: int
    """Communicating blocks of the kernel that fuses second expert GEMM and combine; its backward runs the first GEMM's input
    gradient and sends it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOverlap:
    """The overlap of one MoE layer; fields that the mechanism does not read are null."""

    layer: int
    """Number of the layer in the model, from 0."""
    gate: Gate | None = None
    """Null: the router flags of the model decide."""
    mechanism: Mechanism = "none"
    tutel_degree: int | None = None
    """Capacity chunks of the Tutel-style pipeline."""
    partitions: int | None = None
    """k: partitions of a micro-batch, from the first to the last operator."""
    first_operator: str | None = None
    last_operator: str | None = None
    axis: Axis | None = None
    """The axis of the micro-batch that is cut into partitions."""
    dispatcher: Dispatcher | None = None
    """Null: the dispatcher flag of the run decides."""
    kernel_blocks: KernelBlocks | None = None
    """Null with mechanism fused: the runtime takes the best split of each kernel."""
    weight_gradient_slots: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Backward collective, or the send of a chunk's input gradient (deferral.py) -> weight-gradient operators that run under it,
    in order. Never modify it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOverlap:
    """The overlap of one stage."""

    gradient_chunk_bytes: int = 0
    """Most bytes of one gradient reduction; 0: one reduction at the end of the step."""
    reduce_at_once: bool = field(default=False, metadata=MAY_BE_MISSING)
    """Whether a reduction starts as soon as the gradients of its parameter group are complete, concurrently with all-to-alls,
    which use other links; otherwise it waits for a gap between all-to-alls."""
    overlap_param_gather: bool = field(default=False, metadata=MAY_BE_MISSING)
    """Whether sharded weights are gathered under the first passes of the next step, group by group; otherwise right after the
    update."""
    max_deferred_bytes: int = 0
    """Most bytes of operands that deferred weight gradients may keep alive."""
    micro_batches_in_flight: int = 1
    """Number of micro-batches whose operators are interleaved."""
    sends_late: bool = field(default=False, metadata=MAY_BE_MISSING)
    """With two interleaved micro-batches: whether the forward pass sends after the last computation of the backward pass, which
    then hides the forward pass's last all-to-all; otherwise it sends before, and only weight gradients hide that all-to-all."""
    search_limits: SearchLimits | None = None
    layers: tuple[LayerOverlap, ...] = ()
    """MoE layers with at least one field that is not its default, in model order."""

    @property
    def is_listed(self) -> bool:
        """Whether the executor runs the step by its instruction list, instead of megatron-core's schedule."""
        return bool(self.layers) or self.micro_batches_in_flight > 1

    @property
    def cuts_layers(self) -> bool:
        """Whether modules are called several times per micro-batch: once per partition or capacity chunk."""
        return any(layer.mechanism in ("partitioned", "tutel") for layer in self.layers)

    @property
    def fused_layers(self) -> frozenset[int]:
        """Layers whose all-to-alls run inside fused kernels."""
        return frozenset(layer.layer for layer in self.layers if layer.mechanism == "fused")


NO_OVERLAP = StageOverlap()


RangeWord = Literal["experts", "after", "around"]
"""Value of `--moe-overlap-range`: the operators that run in partitions, here of layer 3.

    experts   L3.moe.gate … L3.moe.merge
    after     L3.moe.gate … L4.attention, or the end of the chunk
    around    L3.attention … L3.moe.merge

Adjacent ranges with the same number of partitions form one pipeline (interleave.py): with `after` or `around` on every layer
there is no barrier between mixture-of-experts layers.
"""
Place = tuple[int, OperatorKind]
"""A layer, and the kind of an operator in it."""
CHUNKED_PARTS = (DISPATCH, EXPERTS, COMBINE)
"""Operators that the Tutel-style pipeline runs in chunks of each expert's rows; gate and merge are not cut (Lancet, Fig. 5a)."""


def range_of_word(word: RangeWord, layer: int, chunk: tuple[int, int]) -> tuple[str, str]:
    """First and last operator of the range of one mixture-of-experts layer.

    Args:
        chunk: the layers of its model chunk, half open.
    """
    assert chunk[0] <= layer < chunk[1], (layer, chunk)
    first = layer_operator(layer, ATTENTION if word == "around" else GATE)
    if word == "after" and layer + 1 < chunk[1]:
        return first, layer_operator(layer + 1, ATTENTION)
    return first, layer_operator(layer, MERGE)


def order_of(operator: OperatorId) -> tuple[int, int]:
    """Sort key: forward order in the model."""
    assert operator.layer is not None
    return operator.layer, part_order(operator.kind)


def part_order(part: str) -> int:
    """Index of an operator in the forward order of its layer, dense or MoE."""
    return 1 if part == MLP else MOE_PARTS.index(part)


def range_ends(layer: LayerOverlap) -> tuple[OperatorId, OperatorId]:
    """First and last operator of a partitioned layer."""
    assert layer.first_operator is not None and layer.last_operator is not None
    return parse_operator(layer.first_operator), parse_operator(layer.last_operator)


def needs_whole_batch(layer: LayerOverlap) -> bool:
    """Whether the gate needs the whole micro-batch, so that partitions begin after it."""
    return layer.gate is not None and not GATE_FACTS[layer.gate].partitionable_before


def partitions_of(overlap: StageOverlap, layers: Sequence[int]) -> dict[Place, int]:
    """Number of partitions or capacity chunks of every operator that is cut.

    A gate that needs the whole micro-batch is not cut, although its range begins with it.

    Args:
        layers: of the stage.
    """
    partitions: dict[Place, int] = {}
    for layer in overlap.layers:
        if layer.mechanism == "tutel":
            assert layer.tutel_degree is not None
            partitions |= {(layer.layer, part): layer.tutel_degree for part in CHUNKED_PARTS}
        if layer.mechanism != "partitioned":
            continue
        assert layer.partitions is not None
        first, last = map(order_of, range_ends(layer))
        for number in layers:
            for part in (*MOE_PARTS, operators.MLP):
                if first <= (number, part_order(part)) <= last:
                    partitions[number, part] = layer.partitions
        if needs_whole_batch(layer):
            del partitions[layer.layer, GATE]
    return partitions
