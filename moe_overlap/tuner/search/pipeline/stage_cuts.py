"""Alpa's dynamic program, exactly: where to cut a model into stages, and on which sub-mesh each of them runs.

Contract. Layers 0..L-1 are cut into stages of neighbouring layers; a stage takes an option: a sub-mesh, of a node type where
nodes are unlike. All devices of all types are used. t is the seconds of a stage's stable micro-batch, its transfers included. It
may depend on the number of stages behind, since a stage holds their micro-batches under 1F1B; what does not fit is +inf.

    minimise  Σ t_i + (G - 1) · max t_i                                      Alpa, section 5.2, equation (2); Mist (1) without d

That is pipeline.py's formula where all seconds of a stage count as backward ones, and never less than with its own forward
seconds: cuts know no directions. Answer: the stages of an optimum. No ε is left out between thresholds: two answers of this
objective differ by the rounding of sums at most (ROUNDING).

For a threshold T, f(T) is the smallest Σ t_i with every t_i <= T. Alpa computes it for every T among all seconds:

    F(s, k, w; T) = min over stages k..i with option o, t(k, i, o, s - 1) <= T, of t + F(s - 1, i + 1, w - devices(o); T)

with s stages from layer k to the end and w devices left. (The paper says "s subsequent stages"; they are s - 1.) f falls as T
grows, so few thresholds decide. Steps of `cut_stages`:
1. The relaxation that forgets s gives each stage its fastest seconds; its smallest possible max t_i is the lowest threshold.
   Where no plan has it, as memory asks for other stages, the program above with max in the place of the sum gives the lowest.
2. The shortest plan of the lowest threshold is one to beat.
3. No stage slower than (best - f(infinity)) / (G - 1) is in a better plan; nor is one through which the shortest relaxed way is
   too long: forward sum + t + backward sum + (G - 1) max(t, lowest) >= best. Few stages are left.
4. Branch and bound over intervals of thresholds (thresholds.py).

Transfers lengthen the stages at both ends of a cut. What one takes depends on the cut and, where sub-meshes have unlike links,
on the slower of its two ends. So a state is a layer together with a rank among the transfers that this cut may have: a stage may
take its own rank at each end or a higher one, and as a longer transfer never helps, an optimum takes the higher of both ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.cost.pipeline import StageTimes, step_seconds, transfer_waits
from moe_overlap.tuner.search.pipeline.thresholds import ROUNDING, search_thresholds
from moe_overlap.tuner.search.solution import Solution, Status

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]

CELLS = 1 << 22
"""Sums held at a time: 32 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutProblem:
    """The layers to cut, the options of a stage, and the devices.

    Attributes:
        seconds: [P, L, L, O] seconds of a stable micro-batch of a stage of layers first..last (both within) on an option, with
            p stages behind it, without transfers; the last p stands for more too. +inf: it does not fit, or is no stage.
        devices_of: [O, K] devices that an option takes of each of K node types.
        devices: [K] devices of each node type; all of them are used.
        micro_batches: G.
        transfer_seconds: [L - 1, O] seconds of one transfer, one way, by the links of an option, if the model is cut behind layer
            k; [L - 1, 1] where options do not matter. The longer one of both ends counts. Each further value of a cut costs time.
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
    """Seconds of a step of these stages, by the formula of all searches and predictions: passes in one direction take all."""
    depth = problem.seconds.shape[0] - 1
    sent = np.broadcast_to(problem.transfer_seconds, (problem.layers - 1, len(problem.devices_of)))
    one_way = [
        max(float(sent[stage.last, stage.option]), float(sent[stage.last, behind.option]))
        for stage, behind in zip(stages, stages[1:], strict=False)
    ]
    waits, _ = transfer_waits(one_way, 1, None)
    times = [
        StageTimes(
            forward=0.0,
            backward=wait
            + float(problem.seconds[min(len(stages) - 1 - i, depth), stage.first, stage.last, stage.option]),
        )
        for i, (stage, wait) in enumerate(zip(stages, waits, strict=True))
    ]
    return float(step_seconds(times, [problem.micro_batches] * len(stages), 1))


def cut_stages(
    problem: CutProblem, time_limit: float = math.inf, beat: float = math.inf
) -> Solution[tuple[CutStage, ...]]:
    """Steps 1 to 4.

    Args:
        time_limit: seconds; the best so far is answered when they are over, with what is proven.
        beat: where step 1 already proves that no plan is faster, that is the answer.
    """
    started = time.perf_counter()
    more = problem.micro_batches - 1
    ways = _Ways.of(problem)
    # Step 1.
    lowest = float(ways.suffixes(ways.fastest, np.maximum)[0, ways.all_devices])
    behind = ways.suffixes(ways.fastest, np.add)
    if not math.isfinite(lowest):
        return _solution(problem, None, math.inf, Status.INFEASIBLE, started)
    least = float(behind[0, ways.all_devices])
    if least + more * lowest >= beat:
        return _solution(problem, None, least + more * lowest, Status.INFEASIBLE, started)
    # Step 2.
    found = ways.shortest(lowest)
    if found is None:
        lowest = ways.lowest()
        found = ways.shortest(lowest) if math.isfinite(lowest) else None
    if found is None:
        return _solution(problem, None, math.inf, Status.INFEASIBLE, started)
    best, plan = found.total + more * found.slowest, found.stages
    # Step 3.
    ways = ways.restricted(least + more * ways.fastest < best)
    ways = replace(ways, whole=ways.through(ways.in_front(np.add), behind))
    ways = ways.restricted(ways.whole + more * np.maximum(ways.fastest, lowest) < best)
    levels = np.unique(ways.seconds[np.isfinite(ways.seconds) & (ways.seconds >= lowest)])
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
    """Possible stages as edges of a graph: E edges from node `first` to node `stop`, sorted by `first`.

    Node k · ranks + r is layer k with the r-th shortest of the transfers in front of it; the model ends in node `end`.
    States are numbers of devices left, of all types in one mixed radix; W of them, and state W is no state. `after` [O, W] is
    the state that an option leaves of another.
    """

    ranks: int
    end: int
    first: Integers
    stop: Integers
    option: Integers
    seconds: Floats
    """[P, E], with transfers."""
    fastest: Floats
    """[E] with any number of stages behind."""
    after: Integers
    whole: Floats
    """[E] lower bound of the sum of a whole pipeline with this stage in it."""

    @classmethod
    def of(cls, problem: CutProblem) -> _Ways:
        """All stages that may fit, with the transfers at their ends."""
        seconds = problem.seconds
        assert seconds.ndim == 4 and seconds.shape[1] == seconds.shape[2] and not np.isnan(seconds).any()
        layers, options = problem.layers, len(problem.devices_of)
        sent = np.broadcast_to(problem.transfer_seconds, (layers - 1, options))
        # Nothing is sent in front of the first layer and behind the last.
        none = np.zeros((1, options))
        values = [np.unique(row, return_inverse=True) for row in (*none, *sent, *none)]
        ranks = max(len(distinct) for distinct, _ in values)
        seconds_of = np.stack(
            [np.pad(distinct, (0, ranks - len(distinct)), constant_values=math.inf) for distinct, _ in values]
        )
        rank_of = np.stack([rank for _, rank in values])
        first, last, option = np.nonzero(np.isfinite(seconds).any(axis=0) & _is_range(layers)[:, :, None])
        lots = []
        for before, behind in product(range(ranks), repeat=2):
            possible = (before >= rank_of[first, option]) & (behind >= rank_of[last + 1, option])
            waits = seconds_of[first, before] + seconds_of[last + 1, behind]
            rows = np.flatnonzero(possible & np.isfinite(waits))
            ends = (first[rows] * ranks + before, (last[rows] + 1) * ranks + behind)
            lots.append((*ends, option[rows], seconds[:, first[rows], last[rows], option[rows]] + waits[rows]))
        start, stop, taken, edges = (np.concatenate(columns, axis=-1) for columns in zip(*lots, strict=True))
        order = np.argsort(start, kind="stable")
        return cls(
            ranks=ranks,
            end=layers * ranks,
            first=start[order],
            stop=stop[order],
            option=taken[order],
            seconds=edges[:, order],
            fastest=edges[:, order].min(axis=0),
            after=_states_after(problem.devices_of, problem.devices),
            whole=np.full(len(start), -math.inf),
        )

    @property
    def all_devices(self) -> int:
        """The state of a pipeline that has no stage yet."""
        return int(self.after.shape[1]) - 1

    def restricted(self, kept: NDArray[np.bool_]) -> _Ways:
        """Only these stages."""
        return _Ways(
            ranks=self.ranks,
            end=self.end,
            first=self.first[kept],
            stop=self.stop[kept],
            option=self.option[kept],
            seconds=self.seconds[:, kept],
            fastest=self.fastest[kept],
            after=self.after,
            whole=self.whole[kept],
        )

    def suffixes(self, seconds: Floats, combine: Callable[[Floats, Floats], Floats]) -> Floats:
        """[nodes, W + 1] smallest sum (or maximum) of stages from a node to the end that take exactly the devices of a state."""
        result = np.full((self.end + 1, self.after.shape[1] + 1), math.inf)
        result[self.end, 0] = 0.0
        # [nodes, O, W] the same by the state in front of a stage with each option: whole rows are gathered for the stages.
        before = np.full((self.end + 1, *self.after.shape), math.inf)
        before[self.end] = result[self.end][self.after]
        starts = np.searchsorted(self.first, np.arange(self.end + 1))
        for node in range(self.end - 1, -1, -1):
            own = slice(starts[node], starts[node + 1])
            if starts[node] < starts[node + 1]:
                behind = before[self.stop[own], self.option[own]]
                result[node, :-1] = combine(seconds[own, None], behind).min(axis=0)
                before[node] = result[node][self.after]
        return result

    def in_front(self, combine: Callable[[Floats, Floats], Floats]) -> Floats:
        """[nodes, W] smallest sum (or maximum) of stages in front of a node that leave exactly the devices of a state, all stages
        being as fast as they can be."""
        order = np.argsort(-self.stop, kind="stable")
        backwards = _Ways(
            ranks=self.ranks,
            end=self.end,
            first=self.end - self.stop[order],
            stop=self.end - self.first[order],
            option=self.option[order],
            seconds=self.seconds[:, order],
            fastest=self.fastest[order],
            after=self.after,
            whole=self.whole[order],
        )
        # Of all devices those are left that the stages in front do not take.
        return backwards.suffixes(self.fastest[order], combine)[::-1, self.all_devices :: -1]

    def through(self, front: Floats, behind: Floats) -> Floats:
        """[E] smallest sum of a whole pipeline with this stage in it, all stages being as fast as they can be.

        Args:
            front: of `in_front`.
            behind: the suffixes of these seconds, or of more stages: then sums may be too small.
        """
        states = self.after.shape[1]
        left = behind[:, self.after]
        result = np.empty(len(self.first))
        step = max(1, CELLS // states)
        for begin in range(0, len(result), step):
            own = slice(begin, begin + step)
            ways = front[self.first[own]] + left[self.stop[own], self.option[own]]
            result[own] = self.fastest[own] + ways.min(axis=1, initial=math.inf)
        return result

    def shortest(self, threshold: float, most: float = math.inf) -> _Plan | None:
        """The plan with the smallest sum of stages that take no longer than the threshold; None where no sum is below `most`."""
        below = self.restricted((self.fastest <= threshold) & (self.whole < most))
        behind = below.suffixes(below.fastest, np.add)
        relaxed = below._shortest_of_any_length(behind)
        if relaxed is None or relaxed.total >= most:
            return None
        # A plan that is as fast with the stages that it has behind each is the shortest of all.
        if relaxed.edge_seconds == below._exact_seconds(relaxed.edges):
            return relaxed
        # Stages through which no plan leads would only make the tables of each length larger.
        front = below.in_front(np.add)
        return below.restricted(below.through(front, behind) < most)._shortest_by_length(threshold, front, most)

    def _shortest_of_any_length(self, sums: Floats) -> _Plan | None:
        """The plan of stages as fast as with any number of stages behind them; `sums` are the suffix sums of those seconds."""
        node, state, chosen = 0, self.all_devices, []
        if not math.isfinite(sums[node, state]):
            return None
        while node < self.end:
            own = np.flatnonzero(self.first == node)
            rest = sums[self.stop[own], self.after[self.option[own], state]]
            edge = own[np.argmin(self.fastest[own] + rest)]
            chosen.append(edge)
            node, state = self.stop[edge], self.after[self.option[edge], state]
        return self.plan(chosen, [float(self.fastest[edge]) for edge in chosen])

    def _shortest_by_length(self, threshold: float, front: Floats, most: float) -> _Plan | None:
        """F(s, k, w; T) for s = 1, 2, ... stages, each from the one before; all nodes at once.

        Args:
            front: of `in_front`; what is not below `most` together with that is not looked at.
        """
        sums, best, length = [self._no_stage()], math.inf, 0
        for stages in range(1, self.end // self.ranks + 1):
            table = self._longer(sums[-1], self._of(stages - 1, threshold), np.add)
            if table is None:
                break
            table[:, :-1][front + table[:, :-1] >= most] = math.inf
            sums.append(table)
            if table[0, self.all_devices] < best:
                best, length = float(table[0, self.all_devices]), stages
        if not length:
            return None
        node, state, chosen, times = 0, self.all_devices, [], []
        for stages in range(length, 0, -1):
            own = np.flatnonzero(self.first == node)
            seconds = self._of(stages - 1, threshold)
            ways = seconds[own] + sums[stages - 1][self.stop[own], self.after[self.option[own], state]]
            edge = own[np.argmin(ways)]
            chosen.append(edge)
            times.append(float(seconds[edge]))
            node, state = self.stop[edge], self.after[self.option[edge], state]
        return self.plan(chosen, times)

    def lowest(self) -> float:
        """The smallest slowest stage of any plan, each stage with those that it has behind it; infinite where there is none."""
        slowest, lowest, front = self._no_stage(), math.inf, self.in_front(np.maximum)
        for stages in range(1, self.end // self.ranks + 1):
            table = self._longer(slowest, self._of(stages - 1, lowest), np.maximum)
            if table is None:
                break
            slowest, lowest = table, min(lowest, float(table[0, self.all_devices]))
            # What is no faster together with the stages in front is in no better plan.
            slowest[:, :-1][np.maximum(front, slowest[:, :-1]) >= lowest] = math.inf
        return lowest

    def _no_stage(self) -> Floats:
        """[nodes, W + 1] sums of pipelines that have no stage yet."""
        sums = np.full((self.end + 1, self.after.shape[1] + 1), math.inf)
        sums[self.end, 0] = 0.0
        return sums

    def _longer(self, sums: Floats, seconds: Floats, combine: Callable[[Floats, Floats], Floats]) -> Floats | None:
        """[nodes, W + 1] the sums (or maxima) of pipelines with one more stage in front; None where there are none."""
        reached = sums.min(axis=1) < math.inf
        edges = np.flatnonzero(reached[self.stop] & np.isfinite(seconds))
        if not len(edges):
            return None
        # Stages that end together on one option leave the same sums: each is gathered once.
        ends, which = np.unique(self.stop[edges] * len(self.after) + self.option[edges], return_inverse=True)
        rest = sums[ends[:, None] // len(self.after), self.after[ends % len(self.after)]][which]
        starts = np.searchsorted(self.first[edges], np.unique(self.first[edges]))
        table = np.full_like(sums, math.inf)
        table[self.first[edges][starts], :-1] = np.minimum.reduceat(combine(seconds[edges, None], rest), starts, axis=0)
        return table

    def _of(self, behind: int, threshold: float) -> Floats:
        """[E] seconds with so many stages behind; infinite above the threshold."""
        seconds = self.seconds[min(behind, len(self.seconds) - 1)]
        return np.where(seconds <= threshold, seconds, math.inf)

    def plan(self, edges: Sequence[int], seconds: Sequence[float]) -> _Plan:
        """The stages of edges, from the first to the last."""
        stages = [
            CutStage(int(self.first[e]) // self.ranks, int(self.stop[e]) // self.ranks - 1, int(self.option[e]))
            for e in edges
        ]
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
