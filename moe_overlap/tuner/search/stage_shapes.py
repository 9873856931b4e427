"""The stages of a uniform layout as shapes of a stage evaluator: the parts they hold under every choice of recomputation.

Legend: S stages, N strategies about states, R choices of recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.graph import CapturedModel, CapturedPart
from moe_overlap.tuner.cost.evaluate import StageEvaluator, StageShapes
from moe_overlap.tuner.cost.stage_parts import WORDS, StagePart, holding_words
from moe_overlap.tuner.search.space import MemoryChoice

Floats = NDArray[np.float64]
Row = tuple[str, str]
"""Kind and variant of recomputation of a part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedParts:
    """The parts of a model at some ranks and a micro-batch."""

    evaluator: StageEvaluator
    rows: Mapping[Row, int]
    kinds: tuple[str, ...]
    """Kind of every layer."""
    predictions: tuple[str, ...]
    """Kinds of the multi-token-prediction layers."""
    boundary_bytes: float
    parts: tuple[CapturedPart, ...]
    """The parts of the rows. The reference keeps them alive, because costs are cached by the identity of their parts."""

    def shapes(self, plan: Plan, index: int, recomputes: Sequence[MemoryChoice], held: float) -> StageShapes:
        """A stage under every choice of recomputation: its parts in the order of a forward pass.

        Args:
            held: micro-batches whose activations the stage holds at once.
        """
        stage, last = plan.stages[index], len(plan.stages[index].chunks) - 1
        runs: list[StagePart] = []
        counts: list[list[float]] = []

        def add(part: StagePart, count: Sequence[float]) -> None:
            runs.append(part)
            counts.append(list(count))

        everywhere = [1.0] * len(recomputes)
        if index == plan.embedding_stage:
            add(StagePart(self.rows["embedding", "none"]), everywhere)
        for chunk, (first, end) in enumerate(stage.chunks):
            place = first
            for kind, layers in groupby(self.kinds[first:end]):
                size = len(list(layers))
                # The first layers of a chunk are recomputed: the number of them in this run.
                again = [
                    size if choice.every_layer else min(size, max(0, choice.layers - (place - first)))
                    for choice in recomputes
                ]
                for variant, count in _by_variant(size, again, recomputes):
                    if any(count):
                        add(StagePart(self.rows[kind, variant], chunk), count)
                place += size
        if index == plan.mtp_stage:
            for number, kind in enumerate(self.predictions):
                for variant, count in _by_variant(1, [int(choice.every_layer) for choice in recomputes], recomputes):
                    if any(count):
                        row = self.rows[_prediction_row(number, kind), variant]
                        add(StagePart(row, last, held_once=True), count)
        if index == plan.loss_stage:
            add(StagePart(self.rows["head", "none"], last, held_once=True), everywhere)
        return StageShapes(
            runs=tuple(runs),
            counts=np.array(counts),
            in_flight=np.full(len(recomputes), held),
            # A single stage sends no hidden states.
            boundary_bytes=self.boundary_bytes if len(plan.stages) > 1 else 0.0,
        )

    def lots(self, plan: Plan, recomputes: Sequence[MemoryChoice], held: Sequence[float]) -> list[StageLot]:
        """The stages of a plan in lots of equal parts, which take equally long.

        Args:
            held: [S] micro-batches whose activations a stage holds at once.
        """
        members: dict[object, list[int]] = {}
        ends = {plan.embedding_stage, plan.mtp_stage, plan.loss_stage}
        for index, stage in enumerate(plan.stages):
            kinds = tuple(self.kinds[first:end] for first, end in stage.chunks)
            members.setdefault((kinds, index if index in ends else None), []).append(index)
        return [
            StageLot(
                stages=tuple(indices),
                shape=self.shapes(plan, indices[0], recomputes, 1.0),
                held=[held[i] for i in indices],
            )
            for indices in members.values()
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLot:
    """Stages of a pipeline with equal parts.

    Attributes:
        stages: their places in the pipeline.
        shape: the shape of each of them, with one micro-batch in flight.
        held: micro-batches whose activations each of them holds at once.
    """

    stages: tuple[int, ...]
    shape: StageShapes
    held: Sequence[float]

    @property
    def all(self) -> StageShapes:
        """[stages · R] the shapes of all stages: R of the first stage, then R of the next."""
        choices = self.shape.counts.shape[1]
        counts = np.tile(self.shape.counts, (1, len(self.stages)))
        return replace(self.shape, counts=counts, in_flight=np.repeat(np.asarray(self.held, float), choices))


def parts_of(graph: CapturedModel, plan: Plan, samples: int) -> Iterator[tuple[Row, CapturedPart]]:
    """The parts that stages of a plan may hold.

    Args:
        samples: of a micro-batch.
    """
    variants = list(dict.fromkeys(part.variant for part in graph.parts))
    for kind in dict.fromkeys(graph.layer_kinds):
        for variant in variants:
            yield (kind, variant), graph.part(kind, variant, samples)
    head = graph.part("head", samples=samples)
    yield ("embedding", "none"), graph.part("embedding", samples=samples)
    for number, kind in enumerate(graph.mtp_kinds):
        for variant in variants:
            part = graph.part(kind, variant, samples)
            copies_words = number == 0 and plan.mtp_stage != plan.embedding_stage and head.holds(WORDS) is None
            yield (_prediction_row(number, kind), variant), holding_words(part) if copies_words else part
    yield ("head", "none"), head


def _prediction_row(number: int, kind: str) -> str:
    """The key of a prediction layer; the first one is separate, as it may hold a copy of the word embedding."""
    return kind if number else f"first {kind}"


def _by_variant(
    size: int, again: Sequence[int], recomputes: Sequence[MemoryChoice]
) -> Iterator[tuple[str, list[float]]]:
    """Each variant with the number of layers of a run that have it, under every choice.

    Args:
        again: [R] number of layers of the run that are recomputed completely.
    """
    yield "full", [float(layers) for layers in again]
    yield (
        "none",
        [float(size - layers) if not choice.modules else 0.0 for layers, choice in zip(again, recomputes, strict=True)],
    )
    for modules in dict.fromkeys(choice.modules for choice in recomputes if choice.modules):
        yield "+".join(sorted(modules)), [float(size) * (choice.modules == modules) for choice in recomputes]
