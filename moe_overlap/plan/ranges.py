"""Ranges of operators that run in partitions: the words of `--moe-overlap-range`, and the operators of a range.

    experts   L3.moe.gate … L3.moe.merge
    after     L3.moe.gate … L4.attention, or the end of the chunk
    around    L3.attention … L3.moe.merge

Neighbouring ranges of equally many partitions are one pipeline (partition_order.py): `after` and `around` on every
layer leave no barrier between mixture-of-experts layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from moe_overlap.plan import operators
from moe_overlap.plan.gate_rules import GATE_FACTS
from moe_overlap.plan.operators import (
    ATTENTION,
    COMBINE,
    DISPATCH,
    EXPERTS,
    GATE,
    MERGE,
    MLP,
    MOE_PARTS,
    Operator,
    layer_operator,
    parse_operator,
)
from moe_overlap.plan.overlap import LayerOverlap, StageOverlap

RangeWord = Literal["experts", "after", "around"]
Place = tuple[int, str]
"""Layer, part."""
CHUNKED_PARTS = (DISPATCH, EXPERTS, COMBINE)
"""What the Tutel-style pipeline runs in chunks of each expert's rows; gate and merge stay whole (Lancet, Fig. 5a)."""


def range_of_word(word: RangeWord, layer: int, chunk: tuple[int, int]) -> tuple[str, str]:
    """First and last operator of the range of one mixture-of-experts layer.

    Args:
        chunk: the layers of its chunk, half open.
    """
    assert chunk[0] <= layer < chunk[1], (layer, chunk)
    first = layer_operator(layer, ATTENTION if word == "around" else GATE)
    if word == "after" and layer + 1 < chunk[1]:
        return first, layer_operator(layer + 1, ATTENTION)
    return first, layer_operator(layer, MERGE)


def order_of(operator: Operator) -> tuple[int, int]:
    """Sort key: forward order in the model."""
    assert operator.layer is not None
    return operator.layer, part_order(operator.part)


def part_order(part: str) -> int:
    """Place of a part in its layer, dense or not."""
    return 1 if part == MLP else MOE_PARTS.index(part)


def range_ends(layer: LayerOverlap) -> tuple[Operator, Operator]:
    """First and last operator of a partitioned layer."""
    assert layer.first_operator is not None and layer.last_operator is not None
    return parse_operator(layer.first_operator), parse_operator(layer.last_operator)


def needs_whole_batch(layer: LayerOverlap) -> bool:
    """Whether the gate decides on the whole micro-batch, so that partitions begin behind it."""
    return layer.gate is not None and not GATE_FACTS[layer.gate].partitionable_before


def partitions_of(overlap: StageOverlap, layers: Sequence[int]) -> dict[Place, int]:
    """Partitions of every operator that runs in partitions, or in chunks of capacity.

    A gate that needs the whole micro-batch is not among them, though its range begins with it.

    Args:
        layers: of the stage.
    """
    found: dict[Place, int] = {}
    for layer in overlap.layers:
        if layer.mechanism == "tutel":
            assert layer.tutel_degree is not None
            found |= {(layer.layer, part): layer.tutel_degree for part in CHUNKED_PARTS}
        if layer.mechanism != "partitioned":
            continue
        assert layer.partitions is not None
        first, last = map(order_of, range_ends(layer))
        for number in layers:
            for part in (*MOE_PARTS, operators.MLP):
                if first <= (number, part_order(part)) <= last:
                    found[number, part] = layer.partitions
        if needs_whole_batch(layer):
            del found[layer.layer, GATE]
    return found
