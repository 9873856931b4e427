"""Where to cut a model into stages, and on which sub-mesh each of them runs: Alpa's dynamic program, exactly.

Contract. Layers 0..L-1 are cut into stages of neighbouring layers; a stage takes an option: a sub-mesh, of a node type where
nodes are unlike. All devices of all types are used. t is the seconds of a stage's stable micro-batch, its transfers included. It
may depend on the number of stages behind, since a stage holds their micro-batches under 1F1B; what does not fit is +inf.

    minimise  Σ t_i + (G - 1) · max t_i                                      Alpa, section 5.2, equation (2); Mist (1) without d

Answer: the stages of an optimum. No ε is left out between thresholds: two answers of this objective differ by the rounding of
sums at most (ROUNDING).

For a threshold T, f(T) is the smallest Σ t_i with every t_i <= T. Alpa computes it for every T among all seconds:

    F(s, k, w; T) = min over stages k..i with option o, t(k, i, o, s - 1) <= T, of t + F(s - 1, i + 1, w - devices(o); T)

with s stages from layer k to the end and w devices left. (The paper says "s subsequent stages"; they are s - 1.) f falls as T
grows, so few thresholds decide. Steps of `cut_stages`:
1. The relaxation that forgets s gives each stage its fastest seconds; its smallest possible max t_i is the lowest threshold.
2. The first thresholds from there at which a plan exists give a plan to beat.
3. No stage slower than (best - f(infinity)) / (G - 1) is in a better plan; nor is one through which the shortest relaxed way is
   too long: forward sum + t + backward sum + (G - 1) max(t, lowest) >= best. Few stages are left.
4. Branch and bound over intervals of thresholds (thresholds.py).

Transfers are part of a stage's seconds (`transfer_seconds`): what they take depends on the cut alone, so no state is needed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.cost.pipeline import PipelineRules, StageTimes, pipeline_seconds
from moe_overlap.tuner.search.pipeline.thresholds import ROUNDING, search_thresholds
from moe_overlap.tuner.search.solution import Solution, Status

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True, slots=True)
class CutProblem:
    """What to cut.

    Attributes:
        seconds: [P, L, L, O] seconds of a stable micro-batch of a stage of layers first..last (both within) on an option, with
            p stages behind it, without transfers; the last p stands for more too. +inf: it does not fit, or is no stage.
        devices_of: [O, K] devices that an option takes of each of K node types.
        devices: [K] devices of each node type; all of them are used.
        micro_batches: G.
        transfer_seconds: [L - 1] seconds of one transfer, one way, if the model is cut behind layer k.
    """

    seconds: Floats
    devices_of: Integers
    devices: tuple[int, ...]
    micro_batches: int
    transfer_seconds: Floats

    @property
    def layers(self) -> int:
        """L."""
        return int(self.seconds.shape[1])


@dataclass(frozen=True, order=True, slots=True)
class CutStage:
    """Layers first..last, both within, on an option."""

    first: int
    last: int
    option: int


def step_of_cuts(problem: CutProblem, stages: Sequence[CutStage]) -> float:
    """Seconds of a step of these stages, by the formula of all searches and predictions."""
    behind = problem.seconds.shape[0] - 1
    times = [
        StageTimes(
            forward=0.0,
            backward=float(problem.seconds[min(len(stages) - 1 - i, behind), stage.first, stage.last, stage.option]),
        )
        for i, stage in enumerate(stages)
    ]
    one_way = [float(problem.transfer_seconds[stage.last]) for stage in stages[:-1]]
    counts = [problem.micro_batches] * len(stages)
    rules = PipelineRules(virtual=1, beside=None)
    return float(pipeline_seconds(times, [0.0] * len(stages), one_way, counts, rules).total)


def cut_stages(problem: CutProblem, time_limit: float = math.inf) -> Solution[tuple[CutStage, ...]]:
    """Steps 1 to 4.

    Args:
        time_limit: seconds; the best so far is answered when they are over, with what is proven.
    """
    started = time.perf_counter()
    more = problem.micro_batches - 1
    ways = _Ways.of(problem)
    # Step 1.
    lowest = float(ways.suffixes(ways.fastest, np.maximum)[0, ways.all_devices])
    levels = np.unique(ways.seconds[np.isfinite(ways.seconds) & (ways.seconds >= lowest)])
    if not math.isfinite(lowest):
        return _solution(problem, None, math.inf, Status.INFEASIBLE, started)
    # Step 2: 1, 2, 4, ... levels above the lowest.
    best, plan = math.inf, None
    reach, tried = 0, -1
    while plan is None and tried < len(levels) - 1:
        tried = min(reach, len(levels) - 1)
        below = ways.restricted(ways.fastest <= levels[tried])
        found = below.shortest(levels[tried])
        reach = 2 * reach + 1
        if found is not None:
            best, plan = found.total + more * found.slowest, found.stages
    if plan is None:
        return _solution(problem, None, math.inf, Status.INFEASIBLE, started)
    # Step 3.
    least = float(ways.suffixes(ways.fastest, np.add)[0, ways.all_devices])
    ways = ways.restricted(least + more * ways.fastest < best)
    through = ways.through() + more * np.maximum(ways.fastest, lowest)
    ways = ways.restricted(through < best)
    levels = levels[least + more * levels < best]
    # Step 4.
    end = search_thresholds(levels, more, least, ways.shortest, best, started + time_limit)
    plan = plan if end.found is None else end.found.stages
    return _solution(problem, plan, end.bound, Status.OPTIMAL if end.is_complete else Status.TIME_LIMIT, started)


def _solution(
    problem: CutProblem, plan: tuple[CutStage, ...] | None, bound: float, status: Status, started: float
) -> Solution[tuple[CutStage, ...]]:
    """The answer, priced by the formula of all searches."""
    objective = math.inf if plan is None else step_of_cuts(problem, plan)
    assert plan is None or objective >= bound * (1.0 - ROUNDING), (objective, bound)
    return Solution(
        value=plan,
        objective=objective,
        bound=objective if status == Status.OPTIMAL else min(bound, objective),
        status=status,
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """A shortest plan below a threshold."""

    edges: tuple[int, ...]
    edge_seconds: tuple[float, ...]
    stages: tuple[CutStage, ...]

    @property
    def total(self) -> float:
        """Sum over the stages."""
        return sum(self.edge_seconds)

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage."""
        return max(self.edge_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ways:
    """Possible stages as edges of a graph: E edges from layer `first` to layer `stop`, sorted by `first`.

    States are numbers of devices left, of all types in one mixed radix; W of them, and state W is no state. `after` [O, W] is the
    state that an option leaves of another.
    """

    layers: int
    first: Integers
    stop: Integers
    option: Integers
    seconds: Floats
    """[P, E], with transfers."""
    fastest: Floats
    """[E] with any number of stages behind."""
    after: Integers

    @classmethod
    def of(cls, problem: CutProblem) -> _Ways:
        """All stages that may fit, with the transfers at their ends."""
        seconds = problem.seconds
        assert seconds.ndim == 4 and seconds.shape[1] == seconds.shape[2] and not np.isnan(seconds).any()
        layers = problem.layers
        first, last, option = np.nonzero(np.isfinite(seconds).any(axis=0) & _is_range(layers)[:, :, None])
        edge = np.concatenate([[0.0], problem.transfer_seconds, [0.0]])
        edges = seconds[:, first, last, option] + (edge[first] + edge[last + 1])
        return cls(
            layers=layers,
            first=first,
            stop=last + 1,
            option=option,
            seconds=edges,
            fastest=edges.min(axis=0),
            after=_states_after(problem.devices_of, problem.devices),
        )

    @property
    def all_devices(self) -> int:
        """The state of a pipeline that has no stage yet."""
        return int(self.after.shape[1]) - 1

    def restricted(self, kept: NDArray[np.bool_]) -> _Ways:
        """Only these stages."""
        return _Ways(
            layers=self.layers,
            first=self.first[kept],
            stop=self.stop[kept],
            option=self.option[kept],
            seconds=self.seconds[:, kept],
            fastest=self.fastest[kept],
            after=self.after,
        )

    def suffixes(self, seconds: Floats, combine: Callable[[Floats, Floats], Floats]) -> Floats:
        """[L + 1, W + 1] smallest sum (or maximum) of stages from a layer to the end that take exactly the devices of a state."""
        result = np.full((self.layers + 1, self.after.shape[1] + 1), math.inf)
        result[self.layers, 0] = 0.0
        starts = np.searchsorted(self.first, np.arange(self.layers + 1))
        for layer in range(self.layers - 1, -1, -1):
            own = slice(starts[layer], starts[layer + 1])
            if starts[layer] < starts[layer + 1]:
                behind = result[self.stop[own, None], self.after[self.option[own]]]
                result[layer, :-1] = combine(seconds[own, None], behind).min(axis=0)
        return result

    def prefixes(self, seconds: Floats) -> Floats:
        """[L + 1, W + 1] smallest sum of stages in front of a layer that take exactly the devices of a state."""
        order = np.argsort(-self.stop, kind="stable")
        backwards = _Ways(
            layers=self.layers,
            first=self.layers - self.stop[order],
            stop=self.layers - self.first[order],
            option=self.option[order],
            seconds=self.seconds[:, order],
            fastest=self.fastest[order],
            after=self.after,
        )
        return backwards.suffixes(seconds[order], np.add)[::-1]

    def through(self) -> Floats:
        """[E] smallest sum of a whole pipeline with this stage in it, all stages being as fast as they can be."""
        front, behind = self.prefixes(self.fastest), self.suffixes(self.fastest, np.add)
        states = np.arange(self.after.shape[1])
        # With w devices in front of a stage, all - w are left to it and to those behind.
        left = self.after[:, self.all_devices - states][self.option]
        return self.fastest + (front[self.first, :-1] + behind[self.stop[:, None], left]).min(axis=1, initial=math.inf)

    def shortest(self, threshold: float, most: float = math.inf) -> _Plan | None:
        """The plan with the smallest sum of stages that take no longer than the threshold; None where no sum is below `most`."""
        below = self.restricted(self.fastest <= threshold)
        relaxed = below._shortest_of_any_length()
        if relaxed is None or relaxed.total >= most:
            return None
        # A plan that is as fast with the stages that it has behind each is the shortest of all.
        if relaxed.edge_seconds == below._exact_seconds(relaxed.edges):
            return relaxed
        # Stages through which no plan leads would only make the tables of each length larger.
        return below.restricted(below.through() < most)._shortest_by_length(threshold)

    def _shortest_of_any_length(self) -> _Plan | None:
        """As fast as stages can be with any number of stages behind."""
        sums = self.suffixes(self.fastest, np.add)
        layer, state, chosen = 0, self.all_devices, []
        if not math.isfinite(sums[layer, state]):
            return None
        while layer < self.layers:
            own = np.flatnonzero(self.first == layer)
            rest = sums[self.stop[own], self.after[self.option[own], state]]
            edge = own[np.argmin(self.fastest[own] + rest)]
            chosen.append(edge)
            layer, state = self.stop[edge], self.after[self.option[edge], state]
        return self.plan(chosen, [float(self.fastest[edge]) for edge in chosen])

    def _shortest_by_length(self, threshold: float) -> _Plan | None:
        """F(s, k, w; T) for s = 1, 2, ... stages, each from the one before; all layers at once."""
        states = self.after.shape[1]
        sums = [np.full((self.layers + 1, states + 1), math.inf)]
        sums[0][self.layers, 0] = 0.0
        best, length = math.inf, 0
        for stages in range(1, self.layers + 1):
            reached = sums[-1].min(axis=1) < math.inf
            seconds = self._of(stages - 1, threshold)
            edges = np.flatnonzero(reached[self.stop] & np.isfinite(seconds))
            if not len(edges):
                break
            rest = sums[-1][self.stop[edges, None], self.after[self.option[edges]]]
            starts = np.searchsorted(self.first[edges], np.unique(self.first[edges]))
            table = np.full((self.layers + 1, states + 1), math.inf)
            table[self.first[edges][starts], :-1] = np.minimum.reduceat(seconds[edges, None] + rest, starts, axis=0)
            sums.append(table)
            if table[0, self.all_devices] < best:
                best, length = float(table[0, self.all_devices]), stages
        if not length:
            return None
        layer, state, chosen, times = 0, self.all_devices, [], []
        for stages in range(length, 0, -1):
            own = np.flatnonzero(self.first == layer)
            seconds = self._of(stages - 1, threshold)
            ways = seconds[own] + sums[stages - 1][self.stop[own], self.after[self.option[own], state]]
            edge = own[np.argmin(ways)]
            chosen.append(edge)
            times.append(float(seconds[edge]))
            layer, state = self.stop[edge], self.after[self.option[edge], state]
        return self.plan(chosen, times)

    def _of(self, behind: int, threshold: float) -> Floats:
        """[E] seconds with so many stages behind; infinite above the threshold."""
        seconds = self.seconds[min(behind, len(self.seconds) - 1)]
        return np.where(seconds <= threshold, seconds, math.inf)

    def plan(self, edges: Sequence[int], seconds: Sequence[float]) -> _Plan:
        """The stages of edges, from the first to the last."""
        stages = [CutStage(int(self.first[e]), int(self.stop[e]) - 1, int(self.option[e])) for e in edges]
        return _Plan(tuple(edges), tuple(seconds), tuple(stages))

    def _exact_seconds(self, edges: Sequence[int]) -> tuple[float, ...]:
        """Seconds of a plan's stages with the stages that are behind each."""
        behind = [min(len(edges) - 1 - place, len(self.seconds) - 1) for place in range(len(edges))]
        return tuple(float(self.seconds[p, edge]) for p, edge in zip(behind, edges, strict=True))


def _is_range(layers: int) -> NDArray[np.bool_]:
    """[L, L] whether first <= last."""
    return np.triu(np.ones((layers, layers), dtype=bool))


def _states_after(devices_of: Integers, devices: tuple[int, ...]) -> Integers:
    """[O, W] the state that is left when an option takes its devices; W where there are too few of one type."""
    sizes = [count + 1 for count in devices]
    digits = np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes))
    left = digits[None] - devices_of[:, :, None]
    enough = (left >= 0).all(axis=1)
    flat = np.ravel_multi_index(tuple(np.moveaxis(np.maximum(left, 0), 1, 0)), sizes)
    return np.where(enough, flat, math.prod(sizes))
