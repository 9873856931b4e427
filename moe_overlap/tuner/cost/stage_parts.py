"""The parts of a stage: their number, order and recomputation.

A part is a captured kind of layer, the embedding, a prediction layer or the head; its *variant* names the recomputed modules.
`part_counts` counts a stage's parts, `ordered_parts` lists them in the order of its forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.tuner.capture.graph import CapturedModel, CapturedPart

WORDS = "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class StagePart:
    """A parameter group of a stage.

    Attributes:
        row: row of its kind in the table of parts.
        chunk: index of its model chunk.
        held_once: True if it holds the activations of at most one micro-batch, as the head does.
    """

    row: int
    chunk: int = 0
    held_once: bool = False


def part_counts(plan: Plan, index: int, graph: CapturedModel) -> list[tuple[CapturedPart, float]]:
    """The parts of a stage, each with its number."""
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
            predictions[0] = holding_words(predictions[0])
        counted += [(part, 1.0) for part in predictions]
    if index == plan.loss_stage:
        counted.append((graph.part("head", samples=samples), 1.0))
    return counted


def holding_words(part: CapturedPart) -> CapturedPart:
    """A prediction layer on another stage than the embedding: its copy of the word embedding counts as a parameter."""
    words_index = part.holds(WORDS, "constant")
    assert words_index is not None, f"{part.kind} reads no word embedding"
    storages = list(part.storages)
    storages[words_index] = replace(storages[words_index], role="parameter")
    return replace(part, storages=tuple(storages))


def layer_variant(stage: StagePlan, place: int) -> str:
    """The captured variant of recomputation of the layer at a place of its chunk."""
    recompute = stage.recompute
    if recompute.granularity == "none" or (recompute.granularity != "uniform" and place >= recompute.layers):
        return "none"
    return "+".join(sorted(recompute.modules)) if recompute.granularity == "selective" else "full"


def prediction_variant(stage: StagePlan) -> str:
    """The variant of prediction layers: megatron-core does not recompute them with the first layers of a chunk."""
    recompute = stage.recompute
    if recompute.granularity == "selective":
        return "+".join(sorted(recompute.modules))
    return "full" if recompute.granularity == "uniform" else "none"


def stage_variants(stage: StagePlan) -> set[str]:
    """The variants of recomputation of a stage's layers, and of prediction layers if it has any."""
    layers = {layer_variant(stage, place) for first, last in stage.chunks for place in range(last - first)}
    return {*layers, prediction_variant(stage), "none"}


def ordered_parts(
    plan: Plan, index: int, graph: CapturedModel, of_kind: Mapping[tuple[str, str], int]
) -> tuple[StagePart, ...]:
    """A stage's parts in the order of its forward pass.

    Args:
        of_kind: (kind, variant) of the stage's parts -> their rows.
    """
    stage, samples = plan.stages[index], plan.stages[index].micro_batch_size
    last = len(stage.chunks) - 1
    parts = []
    if index == plan.embedding_stage:
        row = of_kind["embedding", graph.part("embedding", samples=samples).variant]
        parts.append(StagePart(row))
    for chunk, (first, end) in enumerate(stage.chunks):
        parts += [
            StagePart(of_kind[graph.layer_kinds[layer], layer_variant(stage, layer - first)], chunk)
            for layer in range(first, end)
        ]
    # The last chunk runs a backward pass right after its forward pass, so these parts never hold a second micro-batch.
    if index == plan.mtp_stage:
        kinds = [(kind, prediction_variant(stage)) for kind in graph.mtp_kinds]
        parts += [StagePart(of_kind[kind], last, held_once=True) for kind in kinds]
    if index == plan.loss_stage:
        row = of_kind["head", graph.part("head", samples=samples).variant]
        parts.append(StagePart(row, last, held_once=True))
    return tuple(parts)
