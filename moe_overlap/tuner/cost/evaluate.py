"""Seconds and bytes of complete stages, for many strategies and shapes at once: the core of predictions and searches.

1. A `StageEvaluator` belongs to one layout and micro-batch: kinds of parts, and N strategies about their states.
2. `costs` prices M shapes of a stage (layers, recomputation, micro-batches in flight): seconds by the names of `StageTimes`,
   bytes by CATEGORIES. Predictions have one strategy, searches all of them.

A shape is a sequence of runs: a run repeats one kind of part. Sums over layers are matrix products. If parameter groups step
separately (ZeRO 2 and 3, offloading), moved_states.py gives the terms of a layer.

Legend: K kinds of part, N strategies, R runs, M shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.cost.interference import Concurrent
from moe_overlap.tuner.cost.moved_states import moved_terms
from moe_overlap.tuner.cost.stage import (
    KindTerms,
    LayerTerms,
    StateRates,
    Strategy,
    is_decoupled,
    layer_terms,
)
from moe_overlap.tuner.cost.stage_parts import StagePart

Floats = NDArray[np.float64]
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "communication", "fragmentation")
TIMES: Mapping[str, str] = MappingProxyType(
    {
        "forward": "forward_seconds",
        "backward": "backward_seconds",
        "first": "first_extra_seconds",
        "tail": "tail_seconds",
    }
)
"""Field of `StageTimes` -> field of `StageCosts`."""
SECONDS = (*TIMES.values(), "optimizer_seconds")
"""All seconds of `StageCosts`."""
FEW = 1 << 12
"""Most numbers of which the maximum is taken directly, because grouping by sets of kinds would take longer."""
BLOCK = 1 << 18
"""Numbers of a term per block, few enough to stay in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageShapes:
    """M shapes of a stage at one place of its pipeline.

    Attributes:
        runs: [R] the part of each run, in the order of a forward pass.
        counts: [R, M] number of parts of each run; 0 or 1 for embedding and head.
        in_flight: [M] micro-batches whose activations are held at once; may be a fraction with model chunks.
        boundary_bytes: bytes of hidden states at a stage's edge for one micro-batch.
    """

    runs: tuple[StagePart, ...]
    counts: Floats
    in_flight: Floats
    boundary_bytes: float

    def some(self, shapes: slice) -> StageShapes:
        """The shapes of a slice."""
        return replace(self, counts=self.counts[:, shapes], in_flight=self.in_flight[shapes])


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCosts:
    """Costs of stages; [N, M] each. Seconds are those of pipeline.StageTimes."""

    forward_seconds: Floats
    backward_seconds: Floats
    first_extra_seconds: Floats
    tail_seconds: Floats
    optimizer_seconds: Floats
    """Seconds of the update after the last micro-batch, with the gather of weights after it. 0 if parameter groups step
    separately: then the first micro-batch includes the updates."""
    peaks: dict[str, Floats]
    """Bytes by CATEGORIES."""

    def some(self, shapes: slice) -> StageCosts:
        """The costs of a slice of shapes."""
        seconds = {
            field.name: getattr(self, field.name)[:, shapes] for field in fields(StageCosts) if field.name != "peaks"
        }
        return StageCosts(**seconds, peaks={name: values[:, shapes] for name, values in self.peaks.items()})

    @property
    def times(self) -> dict[str, Floats]:
        """Seconds by the names of pipeline.StageTimes."""
        return {name: getattr(self, field) for name, field in TIMES.items()}

    @property
    def stable_seconds(self) -> Floats:
        """Seconds of a micro-batch in the middle of a step."""
        return self.forward_seconds + self.backward_seconds

    @property
    def peak_bytes(self) -> Floats:
        """Peak bytes over all categories."""
        first, second, *others = self.peaks.values()
        peak: Floats = first + second
        for values in others:
            peak += values
        return peak


class StageEvaluator:
    """Prices of the stages of one layout and micro-batch.

    Args:
        kinds: [K] costs of the parts.
        strategy: [N] strategies about states.
        rates: rates of collectives, copies and the optimizer; those of a group of ranks are [N].
        concurrent: seconds of concurrent work.
        fragmentation: bytes lost by the allocator, as a share of activations and temporaries.
    """

    def __init__(
        self, kinds: KindTerms, strategy: Strategy, rates: StateRates, concurrent: Concurrent, fragmentation: float
    ) -> None:
        self._kinds, self.rates, self._fragmentation = kinds, rates, fragmentation
        self.terms: LayerTerms = layer_terms(kinds, strategy, rates, concurrent)
        terms = self.terms
        seconds = {
            "forward_seconds": terms.forward_seconds,
            "backward_seconds": terms.backward_seconds,
            "first_extra_seconds": terms.first_extra_seconds,
            "tail_seconds": terms.last_extra_seconds,
            "optimizer_seconds": terms.optimizer_seconds + terms.gathered_seconds,
        }
        # [1, N] Strategies whose parameter groups step separately have other terms.
        moves = is_decoupled(strategy)[None]
        self._moved = moved_terms(kinds, strategy, rates, concurrent) if moves.any() else None
        if self._moved is not None:
            of_moved = dict(zip(SECONDS, self._moved.seconds, strict=True))
            seconds = {name: np.where(moves, of_moved[name], of_kinds) for name, of_kinds in seconds.items()}
        self._seconds = seconds

    @property
    def pass_seconds(self) -> tuple[Floats, Floats]:
        """[K] seconds of the forward and of the backward pass of a part, equal for all strategies."""
        return self._kinds.forward_seconds, self._kinds.backward_seconds

    def costs(self, shapes: StageShapes) -> StageCosts:
        """Costs of every strategy [N] at every shape [M]."""
        strategies, size = self.terms.weights.shape[1], shapes.counts.shape[1]
        seconds = np.empty((len(SECONDS), strategies, size))
        peaks = np.empty((len(CATEGORIES), strategies, size))
        rows = max(1, BLOCK // strategies)
        for start in range(0, size, rows):
            block = slice(start, start + rows)
            self._price(shapes.some(block), seconds[:, :, block], peaks[:, :, block])
        return StageCosts(**dict(zip(SECONDS, seconds, strict=True)), peaks=dict(zip(CATEGORIES, peaks, strict=True)))

    def _price(self, shapes: StageShapes, seconds: Floats, peaks: Floats) -> None:
        """Write the costs of some shapes into two arrays.

        Args:
            seconds: [SECONDS, N, M].
            peaks: [CATEGORIES, N, M].
        """
        terms = self.terms
        layers = np.zeros((terms.weights.shape[0], shapes.counts.shape[1]))
        once = np.zeros_like(layers)
        for run, count in zip(shapes.runs, shapes.counts, strict=True):
            layers[run.row] += count
            once[run.row] += count * run.held_once
        activations = terms.saved.T @ (once + (layers - once) * shapes.in_flight)
        present = layers > 0
        working = _largest(terms.working, present)
        for row, name in enumerate(SECONDS):
            seconds[row] = self._seconds[name].T @ layers
        of = dict(zip(CATEGORIES, peaks, strict=True))
        of_states = {"parameters": terms.weights, "gradients": terms.gradients, "optimizer": terms.optimizer}
        for name, per_layer in of_states.items():
            of[name][:] = per_layer.T @ layers
        of["activations"][:], of["temporaries"][:] = activations, working
        of["communication"][:] = edge_bytes(shapes.boundary_bytes, shapes.in_flight)
        if self._moved is not None:
            of["communication"][:] += self._passing(present, activations)
        # States are allocated once, so they do not fragment memory.
        np.multiply(activations + working, self._fragmentation, out=of["fragmentation"])

    def _passing(self, present: NDArray[np.bool_], activations: Floats) -> Floats:
        """[N, M] peak bytes of moved states that pass through the device.

        Args:
            present: [K, M] True for the kinds that a stage has.
            activations: [N, M] bytes that are held after the forward passes.
        """
        assert self._moved is not None
        used, updated = (
            _largest(of_part, present) + _largest(neighbours, present)
            for of_part, neighbours in (self._moved.used_bytes, self._moved.updated_bytes)
        )
        # Updates run before the passes, when no activations are held; the states of the last one leave during the passes.
        return np.maximum(np.maximum(used, _largest(self._moved.leaving_bytes, present)), updated - activations)


def runs_of(parts: Sequence[StagePart]) -> tuple[tuple[StagePart, ...], list[float]]:
    """The runs of equal parts of a stage, and the number of parts of each."""
    runs: list[StagePart] = []
    counts: list[float] = []
    for part in parts:
        if runs and runs[-1] == part:
            counts[-1] += 1.0
        else:
            runs.append(part)
            counts.append(1.0)
    return tuple(runs), counts


def joined(costs: Sequence[StageCosts]) -> StageCosts:
    """The costs of several lots of shapes, concatenated."""

    def join(values: Sequence[Floats]) -> Floats:
        return np.concatenate(values, axis=1)

    seconds = {
        field.name: join([getattr(cost, field.name) for cost in costs])
        for field in fields(StageCosts)
        if field.name != "peaks"
    }
    return StageCosts(**seconds, peaks={name: join([cost.peaks[name] for cost in costs]) for name in CATEGORIES})


def edge_bytes(boundary_bytes: float, in_flight: Floats) -> Floats:
    """Bytes of hidden states at the edge of a stage: one received and one to send, if it holds several micro-batches."""
    return np.where(in_flight > 1, 2.0 * boundary_bytes, 0.0)


def _largest(per_layer: Floats, present: NDArray[np.bool_]) -> Floats:
    """[N, M] maximum over the kinds that a stage has.

    Stages with the same set of kinds have the same maximum, and there are few sets: one maximum per set avoids [K, N, M] numbers.
    """
    if present.shape[1] * per_layer.size <= FEW:
        largest: Floats = np.where(present[:, None, :], per_layer[:, :, None], 0.0).max(axis=0, initial=0.0)
        return largest
    sets, which = np.unique(present, axis=1, return_inverse=True)
    most = np.stack([per_layer[members].max(axis=0, initial=0.0) for members in sets.T], axis=1)
    return most[:, which]
