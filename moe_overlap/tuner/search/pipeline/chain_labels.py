"""The best choice of a pipeline without model chunks, by a dynamic program over labels: Mist's integer program, solved exactly.

Contract. Problem and objective are stage_options.py's, with one chunk per stage and transfers that take equally long on every
link (`applies`). The answer is the best of all choices; its seconds are `step_of_choice`'s.

Label. Of the chains of pipeline.py, what the stages 0..k say to those behind them is seven numbers. m_s is what stage s does
between its first and its last micro-batch. X and Y are what later stages add: the way of the first micro-batch to the end and
back to stage k, and that of the last one.

    come     when the first forward pass ends here     gone     from the begin of the last backward pass here to the end of all
    chain    max warmed_s + m_s + drain_s              first    max m_s + drain_s and the backward passes up to k: beside X
    last     max warmed_s + m_s and the forward        both     max m_s and all of these passes: beside X and Y
             up to k: beside Y                         update   the slowest optimizer

    step = max(chain, first + X, last + Y, both + X + Y) + update + what is there whatever is chosen

Every number is better small, and stays so whatever follows: of labels with the same layers and devices those on the Pareto
frontier are kept. Steps of `choose_by_labels`:
1. Lower bounds of what is left to later stages, for every number of layers and devices (`_Rest`): the smallest sums of the terms
   of X, Y and X + Y; and of sums with the slowest chain among them, by LEVELS of it.
2. Beams, each of so many labels behind a stage, find a choice that is hard to beat.
3. The same without a beam: labels whose bound is not below the best choice are dropped. Where there are more than MOST the
   answer is what the beams have found, and not complete.

Source: Mist, section 5.3, for the problem; label setting with bounds is Aneja et al., "Shortest chain subject to side
constraints", Networks 1983.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from moe_overlap.tuner.cost.pipeline import StageTimes, transfer_waits, warm_up
from moe_overlap.tuner.search.pipeline.stage_options import Choice, Floats, Integers, PipelineProblem, step_of_choice
from moe_overlap.tuner.search.stage.frontier import pareto

BEAMS = (64, 1024)
"""Labels behind each stage in the beams."""
BEFORE = 8
"""Times as many are looked at before dominated ones are left out."""
MOST = 30_000
"""Labels behind one stage."""
CELLS = 1 << 20
"""Labels by candidates that are worked on at a time."""
LEVELS = 24
"""Intervals of the slowest stage's seconds, whose smallest sums are found each by itself."""
AGREE = 1e-9
"""Share of a step by which the labels of a choice may be off its price, for rounding."""
NUMBERS = ("come", "gone", "chain", "first", "last", "both", "update")
COME, GONE, CHAIN, FIRST, LAST, BOTH, UPDATE = range(len(NUMBERS))


@dataclass(frozen=True, slots=True)
class Labelled:
    """The answer.

    Attributes:
        choice: the best; None where none is below the seconds to beat.
        bound: no choice is faster, but for rounding.
        is_complete: False where there were too many labels, or no time: then the bound is the caller's.
    """

    choice: Choice | None
    seconds: float
    bound: float
    is_complete: bool


def applies(problem: PipelineProblem) -> bool:
    """Whether a pipeline has one chunk per stage, and transfers that take equally long whatever is chosen."""
    sent = np.concatenate([stage.sent for stage in problem.stages])
    return problem.rules.virtual == 1 and bool((sent == sent[:1]).all())


def choose_by_labels(problem: PipelineProblem, rows: Sequence[Integers], beat: float, deadline: float) -> Labelled:
    """Steps 1 to 3.

    Args:
        rows: [S] candidates of every stage that are looked at.
        beat: only what is faster is of interest.
        deadline: of `time.perf_counter`.
    """
    assert applies(problem)
    stages = [_Stage.of(problem, place, of_stage) for place, of_stage in enumerate(rows)]
    rest = _Rest(problem, stages, beat)
    best: Choice | None = None
    bound = -math.inf
    for most in (*BEAMS, None):
        found = _run(problem, stages, rest, beat, most, deadline)
        if found is None:
            return Labelled(best, beat, -math.inf, False)
        bound = found.bound
        if found.choice is not None:
            best = tuple(int(of_stage[row]) for of_stage, row in zip(rows, found.choice, strict=True))
            seconds = float(step_of_choice(problem, best))
            assert abs(seconds - found.seconds) <= AGREE * seconds, (seconds, found.seconds)
            beat = min(beat, seconds)
    return Labelled(best, beat, min(beat, bound), True)


@dataclass(frozen=True, slots=True)
class _Stage:
    """Candidates of a stage that are looked at: n of them. Seconds with their transfers."""

    taken: Integers
    """[n] of the state: layers, then devices of each type, in one mixed radix."""
    begins: Integers | None
    """[n] the layers in front, where they are given."""
    forward: Floats
    backward: Floats
    first: Floats
    tail: Floats
    optimizer: Floats
    ahead: Floats
    """Further forward passes in front of the first backward pass."""
    behind: Floats
    """The last backward passes that are made in a row, without what is behind them."""
    middle: Floats
    """m of the docstring."""
    is_last: bool
    has_steady: bool

    @classmethod
    def of(cls, problem: PipelineProblem, place: int, rows: Integers) -> _Stage:
        """The candidates of a stage."""
        count, stage = len(problem.stages), problem.stages[place]
        times = stage.at(rows)
        column = {f.name: np.broadcast_to(getattr(times, f.name), len(rows)) for f in fields(StageTimes)}
        waits, _ = transfer_waits([float(stage.sent[0])] * (count - 1), 1, problem.rules.beside)
        forward, backward = column["forward"] + waits[place] / 2, column["backward"] + waits[place] / 2
        _, warm, steady = warm_up(count, place, problem.micro_batches, 1)
        radix = _radix(problem)
        taken = stage.layers[rows] * radix[0]
        for kind, size in enumerate(radix[1:]):
            taken = taken + stage.devices[rows, kind] * size
        return cls(
            taken=taken.astype(np.intp),
            begins=None if stage.first_layer is None else stage.first_layer[rows],
            forward=forward,
            backward=backward,
            first=column["first"],
            tail=column["tail"],
            optimizer=stage.optimizer[rows],
            ahead=warm * forward,
            behind=backward + warm * backward,
            middle=steady * (forward + backward),
            is_last=place == count - 1,
            has_steady=steady > 0,
        )


def _radix(problem: PipelineProblem) -> list[int]:
    """Place values of a layer, and of a device of each type, in a state; no choice's devices carry over into the layers."""
    sizes = [1]
    for kind, count in reversed([*enumerate(problem.devices)]):
        most = sum(int(stage.devices[:, kind].max(initial=0)) for stage in problem.stages)
        sizes.insert(0, sizes[0] * (max(count, most) + 1))
    return sizes


def _extended(labels: Floats, stage: _Stage, rows: Integers, columns: Integers) -> Floats:
    """[7, n] labels of some labels, each followed by a candidate.

    Args:
        labels: [7, L].
        rows, columns: [n] of the labels and of the candidates.
    """
    before = labels[:, rows]
    forward, backward = stage.forward[columns], stage.backward[columns]
    middle = stage.middle[columns]
    result = np.empty_like(before)
    come = result[COME] = forward + np.maximum(before[COME], stage.first[columns])
    after_last = np.maximum(stage.tail[columns], before[GONE])
    gone = result[GONE] = backward + after_last
    warmed = come + stage.ahead[columns]
    drain = gone if stage.is_last else stage.behind[columns] + after_last
    # Without a steady part the last forward pass does not wait for the first backward pass.
    passes = middle if stage.has_steady else 0.0
    result[CHAIN] = np.maximum(before[CHAIN], warmed + middle + drain)
    result[FIRST] = np.maximum(before[FIRST] + backward, middle + drain)
    result[LAST] = np.maximum(before[LAST] + forward, warmed + passes)
    result[BOTH] = before[BOTH] + forward + backward
    if stage.has_steady:
        result[BOTH] = np.maximum(result[BOTH], middle)
    result[UPDATE] = np.maximum(before[UPDATE], stage.optimizer[columns])
    return result


def _seconds(labels: Floats, fixed: float) -> Floats:
    """Steps of whole pipelines."""
    come, gone, chain, first, last, both, update = labels
    step = np.maximum(np.maximum(chain, first + come), np.maximum(last + gone, both + come + gone))
    return step + update + fixed


class _Rest:
    """Step 1: lower bounds of what stages k.. add, by the state in front of them; [states] each, infinite where none are left."""

    def __init__(self, problem: PipelineProblem, stages: Sequence[_Stage], beat: float) -> None:
        self._problem, self._stages = problem, stages
        self._radix = _radix(problem)
        self.end = problem.layers * self._radix[0]
        self.end += sum(count * size for count, size in zip(problem.devices, self._radix[1:], strict=True))
        self.states = (problem.layers + 1) * self._radix[0]
        passes = [stage.forward + stage.backward for stage in stages]
        # A stage's chain has the ways of the first and of the last micro-batch, and what it does between them.
        chains = [stage.ahead + stage.middle * stage.has_steady for stage in stages]
        self.passes_rest = self._sums(passes)
        self.update = self._sums([stage.optimizer for stage in stages], largest=True)
        low = max(0.0, float(self._sums(chains, largest=True)[0][0]))
        known = math.isfinite(beat) and math.isfinite(low)
        levels = np.linspace(low, max(low, beat), LEVELS + 1).tolist() if known else []
        self._slowest = [
            (
                lower,
                self._sums(
                    [np.where(chain <= upper, total, math.inf) for chain, total in zip(chains, passes, strict=True)]
                ),
            )
            for lower, upper in zip(levels, levels[1:], strict=False)
        ]

    def _sums(self, values: Sequence[Floats], largest: bool = False) -> list[Floats]:
        """[S + 1] of [states] the smallest sum (or maximum) of a column over the stages k.. ."""
        table = np.full(self.states, math.inf)
        table[self.end] = -math.inf if largest else 0.0
        tables = [table]
        for stage, column in zip(reversed(self._stages), reversed(values), strict=True):
            following, table = table, np.full(self.states, math.inf)
            cells = np.stack([stage.taken, np.zeros_like(stage.taken) - 1 if stage.begins is None else stage.begins])
            keys, which = np.unique(cells, axis=1, return_inverse=True)
            least = np.full(keys.shape[1], math.inf)
            np.minimum.at(least, which, column)
            for (taken, begins), cost in zip(keys.T.tolist(), least.tolist(), strict=True):
                if taken >= self.states:
                    continue
                first, stop = (0, self.states - taken)
                if begins >= 0:
                    first, stop = begins * self._radix[0], min((begins + 1) * self._radix[0], stop)
                if first >= stop:
                    continue
                behind = following[first + taken : stop + taken]
                ways = np.maximum(behind, cost) if largest else behind + cost
                table[first:stop] = np.minimum(table[first:stop], ways)
            tables.append(table)
        return tables[::-1]

    def bound(self, labels: Floats, states: Integers, place: int) -> Floats:
        """[n] seconds that no pipeline stays below that begins with these labels, whose next stage is this one."""
        come, gone, chain, first, last, both, update = labels
        passes_rest = self.passes_rest[place][states]
        step = np.maximum(np.maximum(chain, first + come + passes_rest), last + gone + passes_rest)
        step = np.maximum(step, both + come + gone + 2.0 * passes_rest)
        if self._slowest and place < len(self._stages):
            slow = np.full(len(states), math.inf)
            for lower, sums in self._slowest:
                slow = np.minimum(slow, sums[place][states] + lower)
            step = np.maximum(step, np.maximum(come, 0.0) + np.maximum(gone, 0.0) + slow)
        return step + np.maximum(update, self.update[place][states]) + self._problem.rules.fixed


def _run(
    problem: PipelineProblem,
    stages: Sequence[_Stage],
    rest: _Rest,
    beat: float,
    most: int | None,
    deadline: float,
) -> Labelled | None:
    """Steps 2 and 3: the best choice below the seconds to beat; its rows are those of the stages here.

    Args:
        most: labels that are kept behind each stage.
    Returns:
        None where there were too many labels, or no time.
    """
    nothing = np.full((len(NUMBERS), 1), -math.inf)
    labels, states = nothing, np.zeros(1, dtype=np.intp)
    origins: list[tuple[Integers, Integers]] = []
    dropped = math.inf
    for place, stage in enumerate(stages):
        if not len(states):
            return Labelled(None, beat, min(beat, dropped), True)
        lots = []
        step = max(1, CELLS // max(1, len(stage.taken)))
        for begin in range(0, len(states), step):
            if time.perf_counter() > deadline:
                return None
            lot_rows = slice(begin, begin + step)
            after = states[lot_rows, None] + stage.taken
            possible = after < rest.states
            if stage.begins is not None:
                possible &= states[lot_rows, None] // rest._radix[0] == stage.begins
            possible[possible] = np.isfinite(rest.passes_rest[place + 1][after[possible]])
            rows, columns = np.nonzero(possible)
            extended = _extended(labels, stage, rows + begin, columns)
            bounds = rest.bound(extended, after[rows, columns], place + 1)
            is_open = bounds < beat
            dropped = min(dropped, float(bounds[~is_open].min(initial=math.inf)))
            lots.append(
                (
                    extended[:, is_open],
                    after[rows, columns][is_open],
                    rows[is_open] + begin,
                    columns[is_open],
                    bounds[is_open],
                )
            )
            if most is None and sum(len(lot[1]) for lot in lots) > 16 * MOST:
                return None
        labels, states, rows, columns, bounds = (np.concatenate(parts, axis=-1) for parts in zip(*lots, strict=True))
        undominated = _undominated(labels, states, bounds, most)
        if len(undominated) > MOST:
            return None
        labels, states = labels[:, undominated], states[undominated]
        origins.append((rows[undominated], columns[undominated]))
    if not len(states):
        return Labelled(None, beat, min(beat, dropped), True)
    seconds = _seconds(labels, problem.rules.fixed)
    best = int(seconds.argmin())
    choice, row = [], best
    for rows, columns in reversed(origins):
        choice.append(int(columns[row]))
        row = int(rows[row])
    return Labelled(tuple(reversed(choice)), float(seconds[best]), min(float(seconds[best]), dropped), True)


def _undominated(labels: Floats, states: Integers, bounds: Floats, most: int | None) -> Integers:
    """Labels that no other of the same state beats in all numbers; those with the smallest bounds where only so many are kept."""
    order: Integers = np.arange(len(states))
    if most is not None and len(states) > BEFORE * most:
        order = np.argpartition(bounds, BEFORE * most)[: BEFORE * most]
    order = order[np.argsort(states[order], kind="stable")]
    ends = np.flatnonzero(np.diff(states[order])) + 1
    groups = np.split(order, ends) if len(order) else []
    kept = np.concatenate([order[:0], *(group[pareto(labels[:, group].T)] for group in groups)])
    if most is not None and len(kept) > most:
        kept = kept[np.argpartition(bounds[kept], most)[:most]]
    return kept
