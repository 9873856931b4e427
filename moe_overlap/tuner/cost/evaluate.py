"""Seconds and bytes of complete stages, for many strategies and shapes at once: what predictions and searches are made of.

1. `StageEvaluator` is made once for a layout and a micro-batch: kinds of parts, and N strategies about their states.
2. `costs` answers for M shapes of a stage (layers, recomputation, micro-batches in flight): seconds by the names of `StageTimes`,
   bytes by CATEGORIES. Predictions ask for one strategy, searches for all of them.

A shape is a sequence of runs: a run repeats one kind of part. Sums over layers are matrix products. Where parameter groups step
by themselves the seconds are no sums; they grow by the same amount with every further layer of a long run, so decoupled.py plays
each run at SHORT layers at most, and the rest is extrapolated from one layer less.

Legend: K kinds of part, N strategies, R runs, M shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.cost.decoupled import play_stages
from moe_overlap.tuner.cost.interference import Concurrent, Interference
from moe_overlap.tuner.cost.stage import (
    KindTerms,
    LayerTerms,
    StateRates,
    Strategy,
    UseBytes,
    UseSeconds,
    is_decoupled,
    layer_terms,
    use_bytes,
    use_seconds,
)
from moe_overlap.tuner.cost.use_slowdowns import ListKind, Part, SlowdownTable

Floats = NDArray[np.float64]
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "communication", "fragmentation")
EDGES = ("enter", "behind", "waited", "enter_waited", "again", "turn", "round", "drain", "rush", "copies")
"""Extra seconds at the ends of a step, which only stages have whose parameter groups step by themselves."""
PLAYED: Mapping[str, str] = MappingProxyType(
    {
        **{name: f"{name}_seconds" for name in ("forward", "backward", "tail")},
        **{name: f"{name}_extra_seconds" for name in ("first", *EDGES)},
    }
)
"""Fields of `StageTimes`, and of `StageCosts`: seconds that are no sums over layers where parameter groups step by themselves."""
SECONDS = (*PLAYED.values(), "optimizer_seconds")
"""All seconds of `StageCosts`; the optimizer's are those behind all passes."""
NOTED = (*PLAYED, "buffer_bytes", "update_bytes")
"""What is kept of a play, in the order of its rows."""
SHORT = 4
"""Layers of a run that are played."""
PlayKey = tuple[tuple[Part, ...], bool, bool]
"""A stage that is played: its parts, whether it waits for no other, and whether its backward pass follows its forward pass."""
FEW = 1 << 12
"""Numbers that are compared faster than the sets of kinds among them are found."""
LANES = 1 << 14
"""Strategies of all stages that are played in one go; with a quarter as many starting operations took a tenth longer."""
MOST_SLICES = 8
"""Strategies that lie in more slices than these are written by their places."""
BLOCK = 1 << 18
"""Numbers of a term worked on at a time, few enough to stay in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageShapes:
    """M shapes of a stage at one place of its pipeline.

    Attributes:
        runs: [R] parts in the order of a forward pass; each stands for a run of equal ones.
        counts: [R, M] parts of each run; embedding and head are runs of 0 or 1.
        in_flight: [M] micro-batches whose activations are held at once; with virtual stages a fraction.
        is_first, is_last: whether the stage waits for no other, and whether its backward pass follows its forward pass.
        boundary_bytes: hidden states at a stage's edge for one micro-batch: one received, one to be sent, each way.
    """

    runs: tuple[Part, ...]
    counts: Floats
    in_flight: Floats
    is_first: bool
    is_last: bool
    boundary_bytes: float

    def some(self, shapes: slice) -> StageShapes:
        """A part of the shapes."""
        return replace(self, counts=self.counts[:, shapes], in_flight=self.in_flight[shapes])


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCosts:
    """Costs of stages; [N, M] each. Seconds are those of pipeline.StageTimes."""

    forward_seconds: Floats
    backward_seconds: Floats
    first_extra_seconds: Floats
    enter_extra_seconds: Floats
    behind_extra_seconds: Floats
    waited_extra_seconds: Floats
    enter_waited_extra_seconds: Floats
    again_extra_seconds: Floats
    turn_extra_seconds: Floats
    round_extra_seconds: Floats
    drain_extra_seconds: Floats
    rush_extra_seconds: Floats
    copies_extra_seconds: Floats
    tail_seconds: Floats
    optimizer_seconds: Floats
    """Seconds of the update behind the last micro-batch, with weights that are gathered behind it; where parameter groups step by
    themselves it is 0 and the first micro-batch has them."""
    peaks: dict[str, Floats]
    """Bytes by CATEGORIES."""

    def some(self, shapes: slice) -> StageCosts:
        """Costs of a part of the shapes."""
        seconds = {
            field.name: getattr(self, field.name)[:, shapes] for field in fields(StageCosts) if field.name != "peaks"
        }
        return StageCosts(**seconds, peaks={name: values[:, shapes] for name, values in self.peaks.items()})

    @property
    def times(self) -> dict[str, Floats]:
        """Seconds by the names of pipeline.StageTimes."""
        return {name: getattr(self, field) for name, field in PLAYED.items()}

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
    """Prices stages of one layout and micro-batch.

    Args:
        kinds: [K] costs of the parts.
        strategy: [N] decisions about states.
        rates: of collectives, copies and the optimizer; [N] where they belong to a group of ranks.
        concurrent, factors: how what runs at the same time slows down, as seconds and as factors.
        fragmentation: part of activations and temporaries that the allocator reserves in vain.
    """

    def __init__(
        self,
        kinds: KindTerms,
        strategy: Strategy,
        rates: StateRates,
        concurrent: Concurrent,
        factors: Interference,
        fragmentation: float,
    ) -> None:
        self._kinds, self._strategy, self.rates, self._factors = kinds, strategy, rates, factors
        self._concurrent, self._fragmentation = concurrent, fragmentation
        self.terms: LayerTerms = layer_terms(kinds, strategy, rates, concurrent)
        self._decoupled = is_decoupled(strategy)
        self._played: dict[PlayKey, list[Floats]] = {}

    @property
    def pass_seconds(self) -> tuple[Floats, Floats]:
        """[K] seconds of the forward and of the backward pass of a part, whatever the strategy."""
        return self._kinds.forward_seconds, self._kinds.backward_seconds

    def anew(self) -> StageEvaluator:
        """The same evaluator before it has answered anything."""
        arguments = (self._kinds, self._strategy, self.rates, self._concurrent, self._factors, self._fragmentation)
        return StageEvaluator(*arguments)

    @cached_property
    def _groups(self) -> list[tuple[NDArray[np.intp], SlowdownTable]]:
        """Strategies whose lists have one order, with the seconds of their uses."""
        moves, groups = self._strategy.offload_weights > 0, []
        for kind in (ListKind(weights, self.rates.transfers_wait) for weights in (False, True)):
            members = np.flatnonzero(self._decoupled & (moves == kind.offloads_weights))
            if len(members):
                strategy, rates = _part_of(self._strategy, members), _rates_of(self.rates, members)
                seconds = use_seconds(self._kinds, strategy, rates)
                sizes = use_bytes(self._kinds, strategy, rates)
                groups.append((members, SlowdownTable(seconds, sizes, kind, self._factors)))
        return groups

    def costs(self, shapes: StageShapes) -> StageCosts:
        """Costs of every strategy [N] at every shape [M]."""
        play_together([(self, self.unplayed(shapes))])
        strategies, size = self.terms.weights.shape[1], shapes.counts.shape[1]
        seconds = np.zeros((len(SECONDS), strategies, size))
        peaks = np.empty((len(CATEGORIES), strategies, size))
        rows = max(1, BLOCK // strategies)
        for start in range(0, size, rows):
            block = slice(start, start + rows)
            self._price(shapes.some(block), seconds[:, :, block], peaks[:, :, block])
        return StageCosts(**dict(zip(SECONDS, seconds, strict=True)), peaks=dict(zip(CATEGORIES, peaks, strict=True)))

    def _price(self, shapes: StageShapes, seconds: Floats, peaks: Floats) -> None:
        """Write the costs of some shapes.

        Args:
            seconds: by SECONDS; zeros.
            peaks: by CATEGORIES.
        """
        terms = self.terms
        layers = np.zeros((terms.weights.shape[0], shapes.counts.shape[1]))
        once = np.zeros_like(layers)
        for run, count in zip(shapes.runs, shapes.counts, strict=True):
            layers[run.row] += count
            once[run.row] += count * run.held_once
        activations = terms.saved.T @ (once + (layers - once) * shapes.in_flight)
        working = _largest(terms.working, layers > 0)
        buffers = np.zeros_like(activations)
        # Where parameter groups step together seconds are sums over the layers.
        for row, of_kinds in self._summed.items():
            seconds[row, ~self._decoupled] = of_kinds @ layers
        if self._decoupled.any():
            self._decouple(shapes, activations, seconds, buffers)
        of = dict(zip(CATEGORIES, peaks, strict=True))
        of_states = {"parameters": terms.weights, "gradients": terms.gradients, "optimizer": terms.optimizer}
        for name, per_layer in of_states.items():
            of[name][:] = per_layer.T @ layers
        of["activations"][:], of["temporaries"][:] = activations, working
        np.add(buffers, edge_bytes(shapes.boundary_bytes, shapes.in_flight), out=of["communication"])
        # States are allocated once and leave no holes.
        np.multiply(activations + working, self._fragmentation, out=of["fragmentation"])

    @cached_property
    def _summed(self) -> dict[int, Floats]:
        """Row of the seconds in `_price` -> [N', K] seconds of each kind, for strategies whose parameter groups step together."""
        if self._decoupled.all():
            return {}
        terms = self.terms
        named = {
            "forward_seconds": terms.forward_seconds,
            "backward_seconds": terms.backward_seconds,
            "first_extra_seconds": terms.first_extra_seconds,
            "tail_seconds": terms.last_extra_seconds,
            "optimizer_seconds": terms.optimizer_seconds + terms.gathered_seconds,
        }
        return {SECONDS.index(name): of_kinds[:, ~self._decoupled].T for name, of_kinds in named.items()}

    def _decouple(self, shapes: StageShapes, activations: Floats, seconds: Floats, buffers: Floats) -> None:
        """Write what is played, for strategies whose parameter groups step by themselves."""
        for counts, shorter, places in _short(shapes):
            beyond = shapes.counts[:, places] - counts[:, None]
            longer = np.flatnonzero(beyond.any(axis=1))
            base = self._played[_play_key(shapes, counts)]
            less = [self._played[_play_key(shapes, fewer)] for fewer in shorter]
            for number, (members, _) in enumerate(self._groups):
                fewer = [of_group[number] for of_group in less]
                noted = _extended(base[number], fewer, beyond[longer], bool((counts > SHORT).any()))
                # Shapes that differ in what they hold alone mostly follow one another: a slice is written faster than places.
                is_row = places[-1] - places[0] == len(places) - 1
                for rows, own in _as_slices(members) if is_row else [(members[:, None], slice(None))]:
                    grid = (rows, slice(places[0], places[-1] + 1) if is_row else places)
                    seconds[:-1, *grid] = noted[: len(PLAYED), own]
                    buffer_bytes, update_bytes = noted[len(PLAYED) :, own]
                    # Updates stand in front of the passes, when few activations are held.
                    buffers[grid] = np.maximum(buffer_bytes, update_bytes - activations[grid])

    def unplayed(self, shapes: StageShapes) -> list[PlayKey]:
        """The stages that `costs` would play for some shapes."""
        if not self._decoupled.any():
            return []
        counts = [each for base, shorter, _ in _short(shapes) for each in (base, *shorter)]
        keys = dict.fromkeys(_play_key(shapes, each) for each in counts)
        return [key for key in keys if key not in self._played]

    @property
    def _kinship(self) -> object:
        """Equal for evaluators whose strategies can be played in one go: kinds of list, of parts, and of interference."""
        return [(table.kind, table.seconds.forward.shape[0], table.table.tobytes()) for _, table in self._groups]


def play_together(wanted: Sequence[tuple[StageEvaluator, Sequence[PlayKey]]]) -> None:
    """Play stages in one go: of several evaluators, whose strategies lie side by side, and such that differ in kinds of parts.

    Args:
        wanted: evaluators, each with the plays that it will need (`unplayed`).
    """
    by_key: dict[PlayKey, list[StageEvaluator]] = {}
    for evaluator, keys in wanted:
        for key in keys:
            by_key.setdefault(key, []).append(evaluator)
    # By identity: evaluators have no order, and comparing their numbers would take long.
    lots: dict[tuple[int, ...], tuple[list[StageEvaluator], list[PlayKey]]] = {}
    for key, evaluators in by_key.items():
        for members in _alike(evaluators):
            lots.setdefault(tuple(map(id, members)), (members, []))[1].append(key)
    for members, keys in lots.values():
        for number, table in enumerate(_side_by_side(members)):
            ends = np.cumsum([len(member._groups[number][0]) for member in members])[:-1]
            for key, played in _played(keys, table):
                for member, own in zip(members, np.split(played, ends, axis=1), strict=True):
                    member._played.setdefault(key, []).append(own.copy())


def _alike(evaluators: Sequence[StageEvaluator]) -> list[list[StageEvaluator]]:
    """Evaluators in groups that can be played together."""
    groups: list[tuple[object, list[StageEvaluator]]] = []
    for evaluator in dict.fromkeys(evaluators):
        kinship = evaluator._kinship
        members = next((members for known, members in groups if known == kinship), None)
        if members is None:
            groups.append((kinship, [evaluator]))
        else:
            members.append(evaluator)
    return [members for _, members in groups]


def _side_by_side(evaluators: Sequence[StageEvaluator]) -> list[SlowdownTable]:
    """Seconds and bytes of the uses of several evaluators, for each group of strategies."""
    if len(evaluators) == 1:
        return [table for _, table in evaluators[0]._groups]
    joint = []
    for of_group in zip(*(evaluator._groups for evaluator in evaluators), strict=True):
        first = of_group[0][1]
        seconds = UseSeconds(**_beside([table.seconds for _, table in of_group]))
        sizes = UseBytes(**_beside([table.sizes for _, table in of_group]))
        joint.append(SlowdownTable(seconds, sizes, first.kind, first.factors))
    return joint


def _beside(values: Sequence[UseSeconds] | Sequence[UseBytes]) -> dict[str, Floats]:
    return {
        field.name: np.concatenate([getattr(each, field.name) for each in values], axis=1)
        for field in fields(values[0])
    }


def _played(keys: Sequence[PlayKey], table: SlowdownTable) -> Iterator[tuple[PlayKey, Floats]]:
    """[len(NOTED), N] of each stage; those that differ in the kinds of their parts alone are played in one go."""
    by_structure: dict[object, list[PlayKey]] = {}
    for key in keys:
        parts, *place = key
        by_structure.setdefault((*(replace(part, row=0) for part in parts), *place), []).append(key)
    most = max(1, LANES // table.seconds.forward.shape[1])
    for equivalent in by_structure.values():
        _, is_first, is_last = equivalent[0]
        for start in range(0, len(equivalent), most):
            lot = equivalent[start : start + most]
            played = play_stages([parts for parts, *_ in lot], table, ahead=0 if is_last else 1, waits=not is_first)
            noted = np.stack([getattr(played, name) for name in NOTED])
            yield from zip(lot, np.split(noted, len(lot), axis=1), strict=True)


def _play_key(shapes: StageShapes, counts: Floats) -> PlayKey:
    parts = tuple(part for part, count in zip(shapes.runs, counts, strict=True) for _ in range(int(count)))
    return parts, shapes.is_first, shapes.is_last


def _short(shapes: StageShapes) -> Iterator[tuple[Floats, list[Floats], NDArray[np.intp]]]:
    """Parts of each run [R] that are played; the same with one part less in a run that is longer; the shapes they stand for."""
    kept, which = np.unique(_kept(shapes), axis=1, return_inverse=True)
    for column, counts in enumerate(kept.T):
        places = np.flatnonzero(which == column)
        longer = np.flatnonzero((shapes.counts[:, places] > counts[:, None]).any(axis=1))
        yield counts, [counts - (np.arange(len(counts)) == run) for run in longer], places


def _kept(shapes: StageShapes) -> Floats:
    """[R, M] parts of each run that are played.

    Buffers pass between the ends of a pass in the time of a few layers: a layer adds the same from the fifth on, and up to half
    as much again before. A chunk that has one long run is therefore played at one layer more.
    """
    kept = np.minimum(shapes.counts, SHORT)
    for chunk in {run.chunk for run in shapes.runs}:
        own = [index for index, run in enumerate(shapes.runs) if run.chunk == chunk and run.is_layer]
        is_only = (kept[own] == SHORT) & (kept[own].sum(axis=0) == SHORT)
        kept[own] = np.where(is_only, np.minimum(shapes.counts[own], SHORT + 1), kept[own])
    return kept


def _extended(base: Floats, less: Sequence[Floats], beyond: Floats, is_longer: bool) -> Floats:
    """[len(NOTED), N, M] of stages with longer runs than were played: each further part adds what the last one has added.

    Without longer runs all are alike: M is 1.

    Args:
        base: [len(NOTED), N] of the stage that was played.
        less: the stage with one part less in each of the runs [R] that are longer.
        beyond: [R, M] parts that were not played.
        is_longer: whether a run is played at more than SHORT layers.
    """
    if not less:
        return base[:, :, None]
    # Buffers of three uses are there at a time: a further layer adds none. A longer pass shows fewer beside its end than the list
    # has; so that what fits runs, the shorter one counts where both were played.
    buffers, start = NOTED.index("buffer_bytes"), base
    added = np.stack([base - shorter for shorter in less], axis=2)
    added[buffers] = 0.0
    if is_longer:
        start = base.copy()
        start[buffers] = np.maximum(base[buffers], less[0][buffers])
    extended: Floats = start[:, :, None] + added @ beyond
    return extended


def runs_of(parts: Sequence[Part]) -> tuple[tuple[Part, ...], list[float]]:
    """The runs of equal parts of a stage, and how many each has."""
    runs: list[Part] = []
    counts: list[float] = []
    for part in parts:
        if runs and runs[-1] == part:
            counts[-1] += 1.0
        else:
            runs.append(part)
            counts.append(1.0)
    return tuple(runs), counts


def joined(costs: Sequence[StageCosts]) -> StageCosts:
    """Costs of several lots of shapes, one after the other."""

    def join(values: Sequence[Floats]) -> Floats:
        return np.concatenate(values, axis=1)

    seconds = {
        field.name: join([getattr(cost, field.name) for cost in costs])
        for field in fields(StageCosts)
        if field.name != "peaks"
    }
    return StageCosts(**seconds, peaks={name: join([cost.peaks[name] for cost in costs]) for name in CATEGORIES})


def edge_bytes(boundary_bytes: float, in_flight: Floats) -> Floats:
    """Bytes of hidden states at the edge of a stage of a pipeline: one received and one to be sent, where it works ahead."""
    return np.where(in_flight > 1, 2.0 * boundary_bytes, 0.0)


def _part_of(strategy: Strategy, members: NDArray[np.intp]) -> Strategy:
    return Strategy(**{field.name: getattr(strategy, field.name)[members] for field in fields(Strategy)})


def _rates_of(rates: StateRates, members: NDArray[np.intp]) -> StateRates:
    return replace(rates, dense_scatter=rates.dense_scatter[members], expert_scatter=rates.expert_scatter[members])


def _as_slices(places: NDArray[np.intp]) -> list[tuple[slice | NDArray[np.intp], slice]]:
    """Ascending places as slices, which are written faster, each with its share; as they are where that takes many slices."""
    ends = np.flatnonzero(np.diff(places) != 1) + 1
    if len(ends) >= MOST_SLICES:
        return [(places, slice(None))]
    bounds = [0, *ends.tolist(), len(places)]
    return [
        (slice(places[start], places[end - 1] + 1), slice(start, end))
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]


def _largest(per_layer: Floats, present: NDArray[np.bool_]) -> Floats:
    """[N, M] maximum over the kinds that a stage has.

    Stages that hold the same kinds have the same maximum, and there are few such sets: one pass over each in place of [K, N, M].
    """
    if present.shape[1] * per_layer.size <= FEW:
        largest: Floats = np.where(present[:, None, :], per_layer[:, :, None], 0.0).max(axis=0, initial=0.0)
        return largest
    sets, which = np.unique(present, axis=1, return_inverse=True)
    most = np.stack([per_layer[members].max(axis=0, initial=0.0) for members in sets.T], axis=1)
    return most[:, which]
