"""Alpa's dynamic program, solved exactly: where to cut a model into stages, and on which sub-mesh each stage runs.

Contract. Layers 0..L-1 are cut into stages of neighbouring layers; a stage takes an option: a sub-mesh, with a node type if nodes
differ. All devices of all types are used. t is the seconds of a stage's stable micro-batch, including its transfers. It may
depend on the number of later stages, because under 1F1B a stage holds one micro-batch for each of them; an option that does not
fit has t = +inf.

    minimise  Σ t_i + (G - 1) · max t_i                                      Alpa, section 5.2, equation (2); Mist (1) without d

This is pipeline.py's formula with all seconds of a stage in its backward pass, an upper bound of the formula with its true
forward seconds; cuts do not separate directions. Answer: the stages of an optimum. No thresholds are skipped (Alpa skips those
closer than ε): objectives of two optima differ by rounding at most (ROUNDING).

For a threshold T, f(T) is the smallest Σ t_i with every t_i <= T. Alpa computes it for every T among all seconds:

    F(s, k, w; T) = min over stages k..i with option o, t(k, i, o, s - 1) <= T, of t + F(s - 1, i + 1, w - devices(o); T)

with s stages from layer k to the end on w devices. (The paper says "s subsequent stages"; they are s - 1.) f never rises with T,
so few thresholds need an evaluation. Steps of `cut_stages`:
1. The relaxation that ignores s gives each stage its fastest seconds; its smallest possible max t_i is the lowest threshold.
   If memory excludes all plans of this threshold, the program above with max instead of the sum gives the lowest threshold.
2. The shortest plan of the lowest threshold is the incumbent.
3. A stage is pruned if it is slower than (best - f(infinity)) / (G - 1), or if the shortest relaxed pipeline through it is too
   long: prefix sum + t + suffix sum + (G - 1) max(t, lowest) >= best. Few stages remain.
4. Branch and bound over intervals of thresholds (thresholds.py).

Transfers lengthen the stages at both ends of a cut. The seconds of a transfer depend on the cut and, if sub-meshes have different
links, on the slower of both ends. So a state is a layer and the rank of a transfer among those possible at this cut: a stage may
take the rank of its own links at each end or a higher one. A longer transfer never helps, so an optimum takes the higher of both.
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
"""Most sums in memory at a time: 32 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutProblem:
    """The layers to cut, the options of a stage, and the devices.

    Attributes:
        seconds: [P, L, L, O] seconds of a stable micro-batch of a stage of layers first..last (both inclusive) on an option, with
            p later stages, without transfers; the last p stands for all larger ones. +inf: it does not fit, or first > last.
        devices_of: [O, K] devices of an option of each of K node types.
        devices: [K] devices of each node type; all of them are used.
        micro_batches: G.
        transfer_seconds: [L - 1, O] seconds of one transfer, one way, over the links of an option, if the model is cut after
            layer k; [L - 1, 1] if all options have the same links. The longer of both ends counts. Each distinct value at a cut
            adds to the run time.
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
    """Layers first..last, both inclusive, on an option."""

    first: int
    last: int
    option: int


def step_of_cuts(problem: CutProblem, stages: Sequence[CutStage]) -> float:
    """Seconds of a step of these stages by pipeline.py's formula, with all seconds of a stage in its backward pass."""
    depth = problem.seconds.shape[0] - 1
    sent = np.broadcast_to(problem.transfer_seconds, (problem.layers - 1, len(problem.devices_of)))
    one_way = [
        max(float(sent[stage.last, stage.option]), float(sent[stage.last, following.option]))
        for stage, following in zip(stages, stages[1:], strict=False)
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
        time_limit: seconds; after them the answer is the incumbent with the bound proven so far.
        beat: seconds; if step 1 proves that no plan is faster, the answer is INFEASIBLE with this bound.
    """
    started = time.perf_counter()
    weight = problem.micro_batches - 1
    graph = _StageGraph.of(problem)
    # Step 1.
    lowest = float(graph.suffixes(graph.fastest, np.maximum)[0, graph.all_devices])
    suffix_sums = graph.suffixes(graph.fastest, np.add)
    if not math.isfinite(lowest):
        return _solution(problem, None, math.inf, Status.INFEASIBLE, started)
    least = float(suffix_sums[0, graph.all_devices])
    if least + weight * lowest >= beat:
        return _solution(problem, None, least + weight * lowest, Status.INFEASIBLE, started)
    # Step 2.
    incumbent = graph.shortest(lowest)
    if incumbent is None:
        lowest = graph.lowest()
        incumbent = graph.shortest(lowest) if math.isfinite(lowest) else None
    if incumbent is None:
        return _solution(problem, None, math.inf, Status.INFEASIBLE, started)
    best, plan = incumbent.total + weight * incumbent.slowest, incumbent.stages
    # Step 3.
    graph = graph.restricted(least + weight * graph.fastest < best)
    graph = replace(graph, pipeline_bound=graph.through(graph.in_front(np.add), suffix_sums))
    graph = graph.restricted(graph.pipeline_bound + weight * np.maximum(graph.fastest, lowest) < best)
    levels = np.unique(graph.seconds[np.isfinite(graph.seconds) & (graph.seconds >= lowest)])
    levels = levels[least + weight * levels < best]
    # Step 4.
    end = search_thresholds(levels, weight, least, graph.shortest, best, started + time_limit)
    plan = plan if end.plan is None else end.plan.stages
    return _solution(problem, plan, end.bound, Status.OPTIMAL if end.is_complete else Status.TIME_LIMIT, started)


def _solution(
    problem: CutProblem, plan: tuple[CutStage, ...] | None, bound: float, status: Status, started: float
) -> Solution[tuple[CutStage, ...]]:
    """The answer, priced by `step_of_cuts`."""
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
    """A shortest plan within a threshold."""

    edges: tuple[int, ...]
    edge_seconds: tuple[float, ...]
    stages: tuple[CutStage, ...]

    @property
    def total(self) -> float:
        """Sum of the seconds of the stages."""
        return sum(self.edge_seconds)

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage."""
        return max(self.edge_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StageGraph:
    """Possible stages as edges of a graph: E edges from node `first` to node `stop`, sorted by `first`.

    Node k · ranks + r is layer k with the r-th shortest of the possible transfers before it; the model ends in node `end`.
    A state is the numbers of remaining devices of all types, as one number of mixed radix; there are W, and W itself marks an
    impossible state. `after` [O, W] is the state after an option takes its devices.
    """

    ranks: int
    end: int
    first: Integers
    stop: Integers
    option: Integers
    seconds: Floats
    """[P, E] by number of later stages, with transfers."""
    fastest: Floats
    """[E] minimum over the number of later stages."""
    after: Integers
    pipeline_bound: Floats
    """[E] lower bound of the sum of a complete pipeline that has this stage."""

    @classmethod
    def of(cls, problem: CutProblem) -> _StageGraph:
        """All stages that may fit, with the transfers at their ends."""
        seconds = problem.seconds
        assert seconds.ndim == 4 and seconds.shape[1] == seconds.shape[2] and not np.isnan(seconds).any()
        layers, options = problem.layers, len(problem.devices_of)
        sent = np.broadcast_to(problem.transfer_seconds, (layers - 1, options))
        # Nothing is sent before the first layer and after the last.
        none = np.zeros((1, options))
        values = [np.unique(row, return_inverse=True) for row in (*none, *sent, *none)]
        ranks = max(len(distinct) for distinct, _ in values)
        seconds_of = np.stack(
            [np.pad(distinct, (0, ranks - len(distinct)), constant_values=math.inf) for distinct, _ in values]
        )
        rank_of = np.stack([rank for _, rank in values])
        first, last, option = np.nonzero(np.isfinite(seconds).any(axis=0) & _is_range(layers)[:, :, None])
        lots = []
        for rank_before, rank_after in product(range(ranks), repeat=2):
            possible = (rank_before >= rank_of[first, option]) & (rank_after >= rank_of[last + 1, option])
            waits = seconds_of[first, rank_before] + seconds_of[last + 1, rank_after]
            rows = np.flatnonzero(possible & np.isfinite(waits))
            ends = (first[rows] * ranks + rank_before, (last[rows] + 1) * ranks + rank_after)
            lots.append((*ends, option[rows], seconds[:, first[rows], last[rows], option[rows]] + waits[rows]))
        start, stop, edge_options, edges = (np.concatenate(columns, axis=-1) for columns in zip(*lots, strict=True))
        order = np.argsort(start, kind="stable")
        return cls(
            ranks=ranks,
            end=layers * ranks,
            first=start[order],
            stop=stop[order],
            option=edge_options[order],
            seconds=edges[:, order],
            fastest=edges[:, order].min(axis=0),
            after=_states_after(problem.devices_of, problem.devices),
            pipeline_bound=np.full(len(start), -math.inf),
        )

    @property
    def all_devices(self) -> int:
        """The state before the first stage: no device is used."""
        return int(self.after.shape[1]) - 1

    def restricted(self, mask: NDArray[np.bool_]) -> _StageGraph:
        """The graph with only the edges of a mask [E]."""
        return _StageGraph(
            ranks=self.ranks,
            end=self.end,
            first=self.first[mask],
            stop=self.stop[mask],
            option=self.option[mask],
            seconds=self.seconds[:, mask],
            fastest=self.fastest[mask],
            after=self.after,
            pipeline_bound=self.pipeline_bound[mask],
        )

    def suffixes(self, seconds: Floats, combine: Callable[[Floats, Floats], Floats]) -> Floats:
        """[nodes, W + 1] smallest sum (or maximum) of stages from a node to the end with exactly a state's devices."""
        result = np.full((self.end + 1, self.after.shape[1] + 1), math.inf)
        result[self.end, 0] = 0.0
        # [nodes, O, W] the same by the state before a stage of each option: stages gather complete rows.
        before = np.full((self.end + 1, *self.after.shape), math.inf)
        before[self.end] = result[self.end][self.after]
        starts = np.searchsorted(self.first, np.arange(self.end + 1))
        for node in range(self.end - 1, -1, -1):
            edges = slice(starts[node], starts[node + 1])
            if starts[node] < starts[node + 1]:
                rest = before[self.stop[edges], self.option[edges]]
                result[node, :-1] = combine(seconds[edges, None], rest).min(axis=0)
                before[node] = result[node][self.after]
        return result

    def in_front(self, combine: Callable[[Floats, Floats], Floats]) -> Floats:
        """[nodes, W] smallest sum (or maximum) of the stages before a node after which exactly the devices of a state remain;
        each stage takes its fastest seconds."""
        order = np.argsort(-self.stop, kind="stable")
        reversed_graph = _StageGraph(
            ranks=self.ranks,
            end=self.end,
            first=self.end - self.stop[order],
            stop=self.end - self.first[order],
            option=self.option[order],
            seconds=self.seconds[:, order],
            fastest=self.fastest[order],
            after=self.after,
            pipeline_bound=self.pipeline_bound[order],
        )
        # Reversed: the remaining devices are those that the stages before the node do not use.
        return reversed_graph.suffixes(self.fastest[order], combine)[::-1, self.all_devices :: -1]

    def through(self, front: Floats, suffix_sums: Floats) -> Floats:
        """[E] smallest sum of a complete pipeline that has this stage; each stage takes its fastest seconds.

        Args:
            front: the result of `in_front`.
            suffix_sums: the result of `suffixes` for these edges, or for more; then the sums are lower bounds.
        """
        states = self.after.shape[1]
        rest = suffix_sums[:, self.after]
        result = np.empty(len(self.first))
        step = max(1, CELLS // states)
        for begin in range(0, len(result), step):
            edges = slice(begin, begin + step)
            ways = front[self.first[edges]] + rest[self.stop[edges], self.option[edges]]
            result[edges] = self.fastest[edges] + ways.min(axis=1, initial=math.inf)
        return result

    def shortest(self, threshold: float, most: float = math.inf) -> _Plan | None:
        """The plan with the smallest sum of stages within the threshold; None if no sum is below `most`."""
        below = self.restricted((self.fastest <= threshold) & (self.pipeline_bound < most))
        suffix_sums = below.suffixes(below.fastest, np.add)
        relaxed = below._shortest_of_any_length(suffix_sums)
        if relaxed is None or relaxed.total >= most:
            return None
        # If the relaxed plan is as fast with its true numbers of later stages, it is the shortest of all.
        if relaxed.edge_seconds == below._exact_seconds(relaxed.edges):
            return relaxed
        # Prune stages of no possible plan: they would only enlarge the tables of each length.
        front = below.in_front(np.add)
        return below.restricted(below.through(front, suffix_sums) < most)._shortest_by_length(threshold, front, most)

    def _shortest_of_any_length(self, sums: Floats) -> _Plan | None:
        """The shortest plan of the fastest seconds, whose suffix sums are `sums`, whatever the number of later stages."""
        node, state, chosen = 0, self.all_devices, []
        if not math.isfinite(sums[node, state]):
            return None
        while node < self.end:
            edges = np.flatnonzero(self.first == node)
            rest = sums[self.stop[edges], self.after[self.option[edges], state]]
            edge = edges[np.argmin(self.fastest[edges] + rest)]
            chosen.append(edge)
            node, state = self.stop[edge], self.after[self.option[edge], state]
        return self.plan(chosen, [float(self.fastest[edge]) for edge in chosen])

    def _shortest_by_length(self, threshold: float, front: Floats, most: float) -> _Plan | None:
        """F(s, k, w; T) for s = 1, 2, ... stages, each from the table before; all nodes at once.

        Args:
            front: the result of `in_front`; a state whose sum with it is not below `most` is pruned.
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
            edges = np.flatnonzero(self.first == node)
            seconds = self._of(stages - 1, threshold)
            ways = seconds[edges] + sums[stages - 1][self.stop[edges], self.after[self.option[edges], state]]
            edge = edges[np.argmin(ways)]
            chosen.append(edge)
            times.append(float(seconds[edge]))
            node, state = self.stop[edge], self.after[self.option[edge], state]
        return self.plan(chosen, times)

    def lowest(self) -> float:
        """The smallest possible slowest stage of a plan, by the true numbers of later stages; infinite if there is no plan."""
        slowest, lowest, front = self._no_stage(), math.inf, self.in_front(np.maximum)
        for stages in range(1, self.end // self.ranks + 1):
            table = self._longer(slowest, self._of(stages - 1, lowest), np.maximum)
            if table is None:
                break
            slowest, lowest = table, min(lowest, float(table[0, self.all_devices]))
            # A state that is no faster together with the stages before it is in no better plan.
            slowest[:, :-1][np.maximum(front, slowest[:, :-1]) >= lowest] = math.inf
        return lowest

    def _no_stage(self) -> Floats:
        """[nodes, W + 1] sums of zero stages: 0 at the end, infinite elsewhere."""
        sums = np.full((self.end + 1, self.after.shape[1] + 1), math.inf)
        sums[self.end, 0] = 0.0
        return sums

    def _longer(self, sums: Floats, seconds: Floats, combine: Callable[[Floats, Floats], Floats]) -> Floats | None:
        """[nodes, W + 1] the sums (or maxima) with one more stage in front; None if no stage fits."""
        reached = sums.min(axis=1) < math.inf
        edges = np.flatnonzero(reached[self.stop] & np.isfinite(seconds))
        if not len(edges):
            return None
        # Stages with the same end and option share their remaining sums: these are gathered once.
        ends, which = np.unique(self.stop[edges] * len(self.after) + self.option[edges], return_inverse=True)
        rest = sums[ends[:, None] // len(self.after), self.after[ends % len(self.after)]][which]
        starts = np.searchsorted(self.first[edges], np.unique(self.first[edges]))
        table = np.full_like(sums, math.inf)
        table[self.first[edges][starts], :-1] = np.minimum.reduceat(combine(seconds[edges, None], rest), starts, axis=0)
        return table

    def _of(self, later_stages: int, threshold: float) -> Floats:
        """[E] seconds with so many later stages; infinite above the threshold."""
        seconds = self.seconds[min(later_stages, len(self.seconds) - 1)]
        return np.where(seconds <= threshold, seconds, math.inf)

    def plan(self, edges: Sequence[int], seconds: Sequence[float]) -> _Plan:
        """The stages of edges, from the first to the last."""
        stages = [
            CutStage(int(self.first[e]) // self.ranks, int(self.stop[e]) // self.ranks - 1, int(self.option[e]))
            for e in edges
        ]
        return _Plan(tuple(edges), tuple(seconds), tuple(stages))

    def _exact_seconds(self, edges: Sequence[int]) -> tuple[float, ...]:
        """Seconds of a plan's stages by the true number of later stages of each."""
        later_stages = [min(len(edges) - 1 - place, len(self.seconds) - 1) for place in range(len(edges))]
        return tuple(float(self.seconds[count, edge]) for count, edge in zip(later_stages, edges, strict=True))


def _is_range(layers: int) -> NDArray[np.bool_]:
    """[L, L] True if first <= last."""
    return np.triu(np.ones((layers, layers), dtype=bool))


def _states_after(devices_of: Integers, devices: tuple[int, ...]) -> Integers:
    """[O, W] the state after an option takes its devices; W if there are too few of one type."""
    sizes = [count + 1 for count in devices]
    digits = np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes))
    remaining = digits[None] - devices_of[:, :, None]
    enough = (remaining >= 0).all(axis=1)
    flat = np.ravel_multi_index(tuple(np.moveaxis(np.maximum(remaining, 0), 1, 0)), sizes)
    return np.where(enough, flat, math.prod(sizes))
