"""What the search of ranges finds for a stage, and the stage with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from moe_overlap.plan.overlap import Axis, LayerOverlap, SearchLimits
from moe_overlap.plan.plan import StagePlan
from moe_overlap.tuner.search.layer.chunk_passes import without_ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class CutRange:
    """A range in partitions; `layer` is the mixture of experts in whose entry it stands, the first of the range."""

    first_operator: str
    last_operator: str
    layer: int
    partitions: int
    axis: Axis


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenRange(CutRange):
    """A range that was chosen.

    Attributes:
        seconds, uncut_seconds: of one micro-batch, with and without partitions.
        order_gap: how much longer its forward pass takes than in the best order, as a share; None where there are too many.
    """

    seconds: float
    uncut_seconds: float
    order_gap: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredRange:
    """A range for which memory allows fewer partitions than asked; 1: it stays whole."""

    first_operator: str
    last_operator: str
    most_partitions: int
    needed_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRanges:
    """What was found for a stage; seconds of one micro-batch through its layers, both directions.

    Attributes:
        seconds: as the runtime runs them, neighbours of equal k as one pipeline.
        separate_seconds: T, one range after the other.
        uncut_seconds: without partitions.
        excluded: why ranges with an exchange may not be cut: the first range with a reason, layers apart, and the reason.
        evaluations: prices asked for; `simulated`: pipelines among them that were unlike all before.
        solve_seconds: what the search took.
    """

    ranges: tuple[ChosenRange, ...]
    seconds: float
    separate_seconds: float
    uncut_seconds: float
    lowered: tuple[LoweredRange, ...]
    excluded: tuple[tuple[str, str], ...]
    evaluations: int
    simulated: int
    solve_seconds: float


def with_ranges(stage: StagePlan, ranges: Sequence[CutRange], limits: SearchLimits | None) -> StagePlan:
    """A stage with these ranges, whose layers it has entries for, in place of its own; entries that say nothing go."""
    whole = without_ranges(stage)
    entries = {one.layer: one for one in whole.overlap.layers}
    for chosen in ranges:
        entries[chosen.layer] = dataclasses.replace(
            entries[chosen.layer],
            mechanism="partitioned",
            partitions=chosen.partitions,
            first_operator=chosen.first_operator,
            last_operator=chosen.last_operator,
            axis=chosen.axis,
        )
    layers = tuple(one for _, one in sorted(entries.items()) if one != LayerOverlap(layer=one.layer))
    return dataclasses.replace(whole, overlap=dataclasses.replace(whole.overlap, layers=layers, search_limits=limits))
