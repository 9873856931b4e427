"""The problem of choosing one candidate per stage of a pipeline, its objective, and a lower bound of all choices.

Problem (`PipelineProblem`). Stage i of S takes one of its candidates, a point of its frontier for a number of layers on a number
of devices; layers add up to those of the model, devices to those of the cluster. The objective is pipeline.py's formula and
nothing else (`step_of_choice`); all stages have G micro-batches. Candidates that do not fit their memory are never chosen.

Bound. In the formula, keep the first micro-batch's way through all stages and the last one's way back; replace maxima over stages
by the term of the first stage, and the seconds of a transfer by those of the stage's own end; drop the second way through the
stages after s. The result is at most the formula. It is a sum over stages plus the longest chain, with the numbers of passes of
`warm_up`:

    max over s of (rounds + steady) · t_s / v + Σ t_i / v + first_0 + tail_0 + the fixed seconds of a step

`AdditiveBound` minimizes it by a dynamic program over (stage, layers, devices of each type) below a threshold for the chain. If
the last stage is the slowest, and bubbles hide the first and last micro-batches of later stages, the bound equals the formula.
With `halves` the bound is the mean of that chain and of the chain in which stage s does q_s passes in its warm-up and at the end:
the chain then has a further term q_s / 2 · t_s.

Source: Mist, section 5.3, equations (1) to (3); Alpa, section 5.2 for the program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.cost.evaluate import StageCosts
from moe_overlap.tuner.cost.pipeline import PipelineRules, StageTimes, pipeline_seconds, transfer_waits, warm_up
from moe_overlap.tuner.search.stage.frontier import objective_columns, pareto

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]
Choice = tuple[int, ...]
"""The row of every stage's candidate."""
_Cell = tuple[Integers, int | None, int, tuple[int, ...]]
"""Candidates that take the same layers and devices: rows, first layer, layers, devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOptions:
    """n candidates for a stage; [n] each.

    Attributes:
        layers: number of layers of a candidate.
        devices: [n, K] number of its devices of each of K node types; K = 1 if nodes are equal.
        times: seconds without transfers, as in pipeline.py.
        optimizer: seconds of the update after the last micro-batch.
        fits: True if its peak fits the memory, with the micro-batches that this stage holds.
        sent: seconds of one transfer at the stage's edge, one way; between two stages the longer of both counts.
        first_layer: index of its first layer if layers differ; None if all layers are equal.
    """

    layers: Integers
    devices: Integers
    times: StageTimes
    optimizer: Floats
    fits: NDArray[np.bool_]
    sent: Floats
    first_layer: Integers | None = None

    def __len__(self) -> int:
        return len(self.layers)

    def at(self, rows: Integers) -> StageTimes:
        """Times of some candidates."""
        return StageTimes(**{f.name: self.column(f.name)[rows] for f in fields(StageTimes)})

    def column(self, name: str) -> Floats:
        """[n] one of the times, broadcast if it is the same for all candidates."""
        return np.broadcast_to(getattr(self.times, name), len(self))


def options_of(
    costs: StageCosts, layers: Integers, devices: Sequence[int], sent: float, fits: NDArray[np.bool_]
) -> StageOptions:
    """Candidates from costs [N, M]: strategy n at shape m is row n · M + m.

    Args:
        layers: [M] number of layers of every shape.
        devices: [K] number of devices of each node type, the same for all candidates.
        sent: seconds of one transfer at the stage's edge.
        fits: [N, M] True if the peak fits the memory.
    """
    strategies, shapes = fits.shape
    return StageOptions(
        layers=np.tile(layers, strategies),
        devices=np.tile(np.asarray(devices, dtype=np.intp), (fits.size, 1)),
        times=StageTimes(**{name: seconds.ravel() for name, seconds in costs.times.items()}),
        optimizer=costs.optimizer_seconds.ravel(),
        fits=fits.ravel(),
        sent=np.full(strategies * shapes, sent),
    )


def undominated(options: StageOptions, place: int, stages: int, virtual: int = 1) -> Integers:
    """Rows, in increasing order, of the candidates of stage `place` that fit and that no other candidate dominates.

    Candidates are compared if they take the same layers and devices. The best choice among these rows is as fast as the best
    choice among all rows.
    """
    columns = objective_columns(options.times, options.optimizer, place, stages, virtual)
    columns = np.column_stack([columns, options.sent])
    frontier_rows = []
    for members, *_ in cells_of(options):
        rows = members[options.fits[members]]
        frontier_rows.append(rows[pareto(columns[rows])])
    return np.sort(np.concatenate(frontier_rows)) if frontier_rows else np.empty(0, dtype=np.intp)


def cells_of(options: StageOptions) -> list[_Cell]:
    """The candidates in groups that take the same layers and devices."""
    if not len(options):
        return []
    firsts = np.full(len(options), -1) if options.first_layer is None else options.first_layer
    keys, which = np.unique(np.stack([firsts, options.layers, *options.devices.T]), axis=1, return_inverse=True)
    order = np.argsort(which, kind="stable")
    groups = np.split(order, np.searchsorted(which[order], np.arange(1, keys.shape[1])))
    return [
        (group, None if first < 0 else first, layers, tuple(devices))
        for group, (first, layers, *devices) in zip(groups, keys.T.tolist(), strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class PipelineProblem:
    """Stages in the order of the pipeline, the layers and devices to divide among them ([K], by node type), and their rules."""

    stages: tuple[StageOptions, ...]
    layers: int
    devices: tuple[int, ...]
    micro_batches: int
    rules: PipelineRules


def step_of_choice(problem: PipelineProblem, rows: Sequence[int] | Integers) -> Floats:
    """Seconds of a step of one choice [S], or of n choices [S, n]."""
    chosen = [np.asarray(of_stage, dtype=np.intp) for of_stage in rows]
    sent = [stage.sent[row] for stage, row in zip(problem.stages, chosen, strict=True)]
    step = pipeline_seconds(
        [stage.at(row) for stage, row in zip(problem.stages, chosen, strict=True)],
        [stage.optimizer[row] for stage, row in zip(problem.stages, chosen, strict=True)],
        [np.maximum(current, following) for current, following in zip(sent, sent[1:], strict=False)],
        [problem.micro_batches] * len(chosen),
        problem.rules,
    )
    return np.asarray(step.total)


def improved(problem: PipelineProblem, choice: Choice) -> Choice:
    """The choice after exchanging single candidates for faster ones with the same layers and devices, until none is faster."""
    rows = list(choice)
    seconds, changed = float(step_of_choice(problem, rows)), True
    while changed:
        changed = False
        for place, stage in enumerate(problem.stages):
            comparable = stage.fits & (stage.layers == stage.layers[rows[place]])
            comparable &= (stage.devices == stage.devices[rows[place]]).all(axis=1)
            if stage.first_layer is not None:
                comparable &= stage.first_layer == stage.first_layer[rows[place]]
            others = np.flatnonzero(comparable)
            tried = np.repeat(np.asarray(rows, dtype=np.intp)[:, None], len(others), axis=1)
            tried[place] = others
            steps = step_of_choice(problem, tried)
            if steps.min() < seconds:
                seconds, changed = float(steps.min()), True
                rows[place] = int(others[steps.argmin()])
    return tuple(rows)


def is_feasible(problem: PipelineProblem, choice: Choice) -> bool:
    """True if a choice fits, and uses every layer and device exactly once."""
    layer, devices = 0, np.zeros(len(problem.devices), dtype=np.intp)
    for stage, row in zip(problem.stages, choice, strict=True):
        if not stage.fits[row] or (stage.first_layer is not None and stage.first_layer[row] != layer):
            return False
        layer, devices = layer + int(stage.layers[row]), devices + stage.devices[row]
    return layer == problem.layers and tuple(devices.tolist()) == problem.devices


@dataclass(frozen=True, slots=True)
class BoundedChoice:
    """A choice with the terms of its bound: the sum over stages, and the longest chain; both in seconds."""

    total: float
    slowest: float
    choice: Choice


class AdditiveBound:
    """The bound of the docstring: sums over stages, and the longest chain.

    Attributes:
        chains: [S] of [n] seconds of the chain term at a candidate; the longest of a choice counts.
        sums: [S] of [n] seconds that a candidate adds to the sum over stages.
        fixed: seconds of every choice.

    Args:
        halves: True for the mean of both chains.
    """

    def __init__(self, problem: PipelineProblem, halves: bool = False) -> None:
        self._problem = problem
        self._end = (problem.layers, *problem.devices)
        virtual, count = problem.rules.virtual, len(problem.stages)
        # Seconds that transfers of one second each add to every stage, and to filling and draining.
        waits, filling = transfer_waits([1.0] * (count - 1), virtual, problem.rules.transfer_slowdown)
        self.chains, self.sums = [], []
        for place, (stage, wait) in enumerate(zip(problem.stages, waits, strict=True)):
            stable = stage.column("forward") + stage.column("backward") + wait * stage.sent
            added = stable / virtual
            if not place:
                added = added + stage.column("first") + stage.column("tail") + filling * stage.sent
            self.chains.append(np.where(stage.fits, self._chain(place, stable, halves), math.inf))
            self.sums.append(added)
        updates = [stage.optimizer[stage.fits].min(initial=math.inf) for stage in problem.stages]
        self.fixed = problem.rules.fixed + max(updates)

    def _chain(self, place: int, stable: Floats, halves: bool) -> Floats:
        """[n] seconds of the passes of a stage between its first and its last micro-batch."""
        virtual = self._problem.rules.virtual
        rounds, warm, steady = warm_up(len(self._problem.stages), place, self._problem.micro_batches, virtual)
        if not steady and not halves:  # Then the last stage's chain holds for all.
            return np.zeros_like(stable)
        chain = (rounds + steady) * stable
        return (chain + warm / 2 * stable) / virtual if halves else chain / virtual

    @cached_property
    def levels(self) -> Floats:
        """The possible seconds of the longest chain, in increasing order."""
        seconds = np.unique(np.concatenate(self.chains))
        return seconds[np.isfinite(seconds)]

    def lowest(self) -> float:
        """The smallest possible longest chain; infinite if no choice fits."""
        table = self._tables(self.chains, math.inf, largest=True)[-1]
        return float(table[self._end])

    def at_once(self) -> float:
        """A quick lower bound of all choices: the smallest sum plus the smallest longest chain, maybe of another choice."""
        least, lowest = self.shortest(math.inf), self.lowest()
        return math.inf if least is None else least.total + lowest + self.fixed

    def shortest(self, threshold: float, most: float = math.inf) -> BoundedChoice | None:
        """The choice with the smallest sum of those whose chains stay within the threshold; None if it is not below `most`."""
        problem = self._problem
        tables = self._tables(self.sums, threshold)
        layer, devices = problem.layers, np.array(problem.devices)
        total = float(tables[-1][self._end])
        if total >= most or not math.isfinite(total):
            return None
        rows, slowest = [], 0.0
        for place in range(len(problem.stages) - 1, -1, -1):
            stage = problem.stages[place]
            layers_before, devices_before = layer - stage.layers, devices - stage.devices
            possible = (layers_before >= 0) & (devices_before >= 0).all(axis=1) & (self.chains[place] <= threshold)
            if stage.first_layer is not None:
                possible &= layers_before == stage.first_layer
            possible_rows = np.flatnonzero(possible)
            ways = (
                tables[place][(layers_before[possible_rows], *devices_before[possible_rows].T)]
                + self.sums[place][possible_rows]
            )
            row = int(possible_rows[np.argmin(ways)])
            rows.append(row)
            slowest = max(slowest, float(self.chains[place][row]))
            layer, devices = int(layers_before[row]), devices_before[row]
        return BoundedChoice(total, slowest, tuple(reversed(rows)))

    def through(self, threshold: float) -> list[Floats]:
        """[S] of [n] the smallest sum of the choices with a candidate whose chains stay within the threshold."""
        problem = self._problem
        prefixes = self._tables(self.sums, threshold)
        suffixes = self._tables(self.sums, threshold, backwards=True)
        result = []
        for place, stage in enumerate(problem.stages):
            sums = np.full(len(stage), math.inf)
            for members, where, layers, devices in self._cells(place, threshold):
                source, target = _windows(prefixes[place], where, layers, devices)
                # The state after this stage is the one before the later stages.
                end = suffixes[len(problem.stages) - 1 - place][target]
                sums[members] = (prefixes[place][source] + end).min(initial=math.inf) + self.sums[place][members]
            result.append(sums)
        return result

    def _tables(
        self, values: list[Floats], threshold: float, largest: bool = False, backwards: bool = False
    ) -> list[Floats]:
        """[S + 1] of [L + 1, D_1 + 1, ..., D_K + 1] smallest sum (or maximum) of stages up to a layer with so many devices.

        Backwards: of the last stages, by the layer at which they begin and the devices that earlier stages use.
        """
        problem = self._problem
        table = np.full([size + 1 for size in self._end], math.inf)
        table[self._end if backwards else (0,) * table.ndim] = 0.0
        tables = [table]
        places = range(len(problem.stages))
        for place in reversed(places) if backwards else places:
            following = np.full_like(table, math.inf)
            for members, where, layers, devices in self._cells(place, threshold):
                cost = float(values[place][members].min())
                source, target = _windows(table, where, layers, devices)
                if backwards:
                    source, target = target, source
                ways = np.maximum(table[source], cost) if largest else table[source] + cost
                following[target] = np.minimum(following[target], ways)
            table = following
            tables.append(table)
        return tables

    def _cells(self, place: int, threshold: float) -> list[_Cell]:
        """The groups of a stage, with the candidates whose chains stay within the threshold."""
        cells = []
        for members, where, layers, devices in self._all_cells[place]:
            below = members[self.chains[place][members] <= threshold]
            if len(below) and math.isfinite(self.chains[place][below].min()):
                cells.append((below, where, layers, devices))
        return cells

    @cached_property
    def _all_cells(self) -> list[list[_Cell]]:
        return [
            [cell for cell in cells_of(stage) if cell[2] <= self._end[0] and all(np.array(cell[3]) <= self._end[1:])]
            for stage in self._problem.stages
        ]


def _windows(
    table: Floats, where: int | None, layers: int, devices: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Slices of the states before a stage and of those after it, in the same order; of the first layer `where` if it is given."""
    rows, *columns = table.shape
    first, end = (0, rows - layers) if where is None else (where, min(where + 1, rows - layers))
    end = max(first, end)
    source = [slice(0, size - used) for size, used in zip(columns, devices, strict=True)]
    target = [slice(used, size) for size, used in zip(columns, devices, strict=True)]
    return (slice(first, end), *source), (slice(first + layers, end + layers), *target)
