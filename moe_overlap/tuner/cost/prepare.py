"""The numbers of a plan before any rate is known: operators and bytes of its parts, how many of each a stage has.

Stages that are alike but for their layers are priced together; a plan of equal stages has one such family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.overlap import NO_OVERLAP
from moe_overlap.plan.payload import boundary_bytes
from moe_overlap.plan.pipeline_order import most_in_flight, pipeline_blocks
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.tuner.capture.graph import CapturedModel, Part
from moe_overlap.tuner.cost.features import Features
from moe_overlap.tuner.cost.memory import PartBytes, part_bytes
from moe_overlap.tuner.cost.operators import OpTable, tabulate
from moe_overlap.tuner.cost.pipeline import in_flight

Floats = NDArray[np.float64]
CAPTURED_BYTES = {"fp32": 4.0}
"""Of a captured parameter; 2 in every other precision."""
WORDS = "embedding.word_embeddings.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Stages of one layout. K parts, M stages."""

    stage: StagePlan
    """The first of them."""
    stages: tuple[int, ...]
    tables: tuple[OpTable, ...]
    sizes: tuple[PartBytes, ...]
    counts: Floats
    """[K, M]"""
    in_flight: Floats
    """[M]"""
    boundary_bytes: float
    """Hidden states that cross a stage's edge for one micro-batch, on one rank."""

    @property
    def held_once(self) -> list[bool]:
        """[K] parts of which one micro-batch alone is ever held."""
        return [table.part.kind == "head" or table.part.kind.startswith("mtp.") for table in self.tables]


def prepare(
    plan: Plan,
    model: ModelDescription,
    graphs: Mapping[int, CapturedModel],
    features: Features,
    load: float = 1.0,
) -> tuple[Family, ...]:
    """Evaluate the graphs of every stage at its micro-batch and sequence.

    Args:
        graphs: the captured model of every stage.
        load: rows of the busiest rank of an expert group over the mean.
    """
    families: dict[StagePlan, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        chunks = tuple((0, 0) for _ in stage.chunks)
        alike = replace(stage, chunks=chunks, devices=plan.stages[0].devices, overlap=NO_OVERLAP)
        families.setdefault(alike, []).append(index)
    return tuple(_family(plan, model, graphs, features, indices, load) for indices in families.values())


def _family(
    plan: Plan,
    model: ModelDescription,
    graphs: Mapping[int, CapturedModel],
    features: Features,
    indices: list[int],
    load: float,
) -> Family:
    stage, length = plan.stages[indices[0]], plan.sequence_length
    counted = [part_counts(plan, index, graphs[index]) for index in indices]
    parts = {id(part): part for one in counted for part, _ in one}
    rows = {key: row for row, key in enumerate(parts)}
    counts = np.zeros((len(parts), len(indices)))
    for column, one in enumerate(counted):
        for part, count in one:
            counts[rows[id(part)], column] += count
    captured = CAPTURED_BYTES.get(plan.precision, 2.0)
    flying = [_flying(plan, index) for index in indices]
    size = stage.micro_batch_size
    tables = tuple(tabulate(part, size, length) for part in parts.values())
    sizes = (part_bytes(table, size, length, captured, features, load) for table in tables)
    return Family(
        stage=stage,
        stages=tuple(indices),
        tables=tables,
        sizes=tuple(sizes),
        counts=counts,
        in_flight=np.array(flying),
        boundary_bytes=float(boundary_bytes(plan, stage, model)),
    )


def _flying(plan: Plan, index: int) -> float:
    """Micro-batches whose activations a stage holds at once."""
    stage = plan.stages[index]
    if plan.transfers or stage.overlap.micro_batches_in_flight > 1:
        return float(most_in_flight(pipeline_blocks(plan, index)))
    return in_flight(len(stage.chunks), len(plan.stages), index, stage.gradient_accumulation_steps)


def part_counts(plan: Plan, index: int, graph: CapturedModel) -> list[tuple[Part, float]]:
    """The parts of a stage and how often each is there."""
    stage, samples = plan.stages[index], plan.stages[index].micro_batch_size
    variants: dict[tuple[str, str], int] = {}
    for first, last in stage.chunks:
        for place, layer in enumerate(range(first, last)):
            key = (graph.layer_kinds[layer], layer_variant(stage, place))
            variants[key] = variants.get(key, 0) + 1
    counted = [(graph.part(kind, variant, samples), float(count)) for (kind, variant), count in variants.items()]
    if index == plan.embedding_stage:
        counted.append((graph.part("embedding", samples=samples), 1.0))
    if index == plan.mtp_stage:
        predictions = [graph.part(kind, prediction_variant(stage), samples) for kind in graph.mtp_kinds]
        if index != plan.embedding_stage and graph.part("head", samples=samples).holds(WORDS) is None:
            predictions[0] = _holding_words(predictions[0])
        counted += [(part, 1.0) for part in predictions]
    if index == plan.loss_stage:
        counted.append((graph.part("head", samples=samples), 1.0))
    return counted


def _holding_words(part: Part) -> Part:
    """A prediction layer on another stage than the embedding, whose copy of the words is counted here."""
    words = part.holds(WORDS, "constant")
    assert words is not None, f"{part.kind} reads no word embedding"
    storages = list(part.storages)
    storages[words] = replace(storages[words], role="parameter")
    return replace(part, storages=tuple(storages))


def layer_variant(stage: StagePlan, place: int) -> str:
    """What the layer at a place of its chunk recomputes, as the capture names it."""
    recompute = stage.recompute
    if recompute.granularity == "none" or (recompute.granularity != "uniform" and place >= recompute.layers):
        return "none"
    return "+".join(sorted(recompute.modules)) if recompute.granularity == "selective" else "full"


def prediction_variant(stage: StagePlan) -> str:
    """What a prediction layer recomputes: megatron-core leaves it out where it recomputes the first layers of a chunk."""
    recompute = stage.recompute
    if recompute.granularity == "selective":
        return "+".join(sorted(recompute.modules))
    return "full" if recompute.granularity == "uniform" else "none"


def stage_variants(stage: StagePlan) -> set[str]:
    """What the layers of a stage recompute, and prediction layers if it has any."""
    layers = {layer_variant(stage, place) for first, last in stage.chunks for place in range(last - first)}
    return {*layers, prediction_variant(stage), "none"}
