"""The best choice of a pipeline without model chunks, by a dynamic program over labels: Mist's integer program, solved exactly.

Contract. Problem and objective are stage_options.py's, with one chunk per stage and equally long transfers on every link
(`applies`). The answer is the best of all choices; its seconds are `step_of_choice`'s.

Label. Later stages depend on the stages 0..k through seven numbers, which come from the chains of pipeline.py. m_s: seconds of
stage s between its first and its last micro-batch. X, Y: seconds that later stages add, X while the first micro-batch goes to the
last stage and back to stage k, Y the same for the last micro-batch.

    come     end of the first forward pass at k        gone     from the begin of the last backward pass at k to the end of all
    chain    max warmed_s + m_s + drain_s              first    max m_s + drain_s + backward passes up to k; X is added
    last     max warmed_s + m_s + forward              both     max m_s + forward and backward passes up to k; X + Y is added
             passes up to k; Y is added                update   the slowest optimizer

    step = max(chain, first + X, last + Y, both + X + Y) + update + the fixed seconds of a step

The step never falls if one of the seven numbers rises, whatever stages follow. So among labels with the same layers and devices
only the Pareto frontier is needed. Steps of `choose_by_labels`:
1. Lower bounds of the seconds of later stages, for every number of layers and devices (`_LaterStages`): the smallest sums of the
   terms of X, Y and X + Y; and the smallest sums if the slowest chain lies in one of LEVELS intervals.
2. Beam searches with BEAMS labels per stage give a good incumbent.
3. The search without a beam: labels whose bound is not below the incumbent are pruned. With more than MOST labels the answer is
   that of the beams, and not complete.

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
"""Number of labels after each stage, per beam."""
BEFORE = 8
"""Factor of labels, those with the smallest bounds, that are compared for dominance in a beam."""
MOST = 30_000
"""Most labels after one stage in the search without a beam."""
CELLS = 1 << 20
"""Most (label, candidate) pairs in memory at a time."""
LEVELS = 24
"""Number of intervals of the slowest chain's seconds; each has its own table of smallest sums."""
AGREE = 1e-9
"""Largest relative difference between the seconds of a label and of `step_of_choice`, from rounding."""
NUMBERS = ("come", "gone", "chain", "first", "last", "both", "update")
COME, GONE, CHAIN, FIRST, LAST, BOTH, UPDATE = range(len(NUMBERS))


@dataclass(frozen=True, slots=True)
class Labelled:
    """The answer.

    Attributes:
        choice: the best; None if no choice is below the seconds to beat.
        bound: no choice is faster, except for rounding.
        is_complete: False if there were too many labels or too little time; then only the caller's bound holds.
    """

    choice: Choice | None
    seconds: float
    bound: float
    is_complete: bool


def applies(problem: PipelineProblem) -> bool:
    """True if a pipeline has one chunk per stage, and transfers take equally long for all candidates."""
    sent = np.concatenate([stage.sent for stage in problem.stages])
    return problem.rules.virtual == 1 and bool((sent == sent[:1]).all())


def choose_by_labels(problem: PipelineProblem, rows: Sequence[Integers], beat: float, deadline: float) -> Labelled:
    """Steps 1 to 3.

    Args:
        rows: [S] the unpruned candidates of every stage.
        beat: incumbent seconds; slower choices are pruned.
        deadline: time by `time.perf_counter`.
    """
    assert applies(problem)
    stages = [_Stage.of(problem, place, of_stage) for place, of_stage in enumerate(rows)]
    later_stages = _LaterStages(problem, stages, beat)
    best: Choice | None = None
    bound = -math.inf
    for most in (*BEAMS, None):
        labelled = _run(problem, stages, later_stages, beat, most, deadline)
        if labelled is None:
            return Labelled(best, beat, -math.inf, False)
        bound = labelled.bound
        if labelled.choice is not None:
            best = tuple(int(of_stage[row]) for of_stage, row in zip(rows, labelled.choice, strict=True))
            seconds = float(step_of_choice(problem, best))
            assert abs(seconds - labelled.seconds) <= AGREE * seconds, (seconds, labelled.seconds)
            beat = min(beat, seconds)
    return Labelled(best, beat, min(beat, bound), True)


@dataclass(frozen=True, slots=True)
class _Stage:
    """The n unpruned candidates of a stage; seconds include transfers."""

    state_offset: Integers
    """[n] what a candidate adds to the state: layers, then devices of each type, as one number of mixed radix."""
    begins: Integers | None
    """[n] layers before the stage; None if all layers are equal."""
    forward: Floats
    backward: Floats
    first: Floats
    tail: Floats
    optimizer: Floats
    ahead: Floats
    """Forward passes of the warm-up after the first one."""
    closing: Floats
    """Backward passes after the last forward pass, without the wait for later stages."""
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
        waits, _ = transfer_waits([float(stage.sent[0])] * (count - 1), 1, problem.rules.transfer_slowdown)
        forward, backward = column["forward"] + waits[place] / 2, column["backward"] + waits[place] / 2
        _, warm, steady = warm_up(count, place, problem.micro_batches, 1)
        radix = _radix(problem)
        state_offset = stage.layers[rows] * radix[0]
        for kind, size in enumerate(radix[1:]):
            state_offset = state_offset + stage.devices[rows, kind] * size
        return cls(
            state_offset=state_offset.astype(np.intp),
            begins=None if stage.first_layer is None else stage.first_layer[rows],
            forward=forward,
            backward=backward,
            first=column["first"],
            tail=column["tail"],
            optimizer=stage.optimizer[rows],
            ahead=warm * forward,
            closing=backward + warm * backward,
            middle=steady * (forward + backward),
            is_last=place == count - 1,
            has_steady=steady > 0,
        )


def _radix(problem: PipelineProblem) -> list[int]:
    """Place values of a layer and of a device of each type in a state; large enough that devices never carry into the layers."""
    sizes = [1]
    for kind, count in reversed([*enumerate(problem.devices)]):
        most = sum(int(stage.devices[:, kind].max(initial=0)) for stage in problem.stages)
        sizes.insert(0, sizes[0] * (max(count, most) + 1))
    return sizes


def _extended(labels: Floats, stage: _Stage, rows: Integers, columns: Integers) -> Floats:
    """[7, n] the labels after one more stage.

    Args:
        labels: [7, L].
        rows, columns: [n] indices of the label and of the candidate that extends it.
    """
    before = labels[:, rows]
    forward, backward = stage.forward[columns], stage.backward[columns]
    middle = stage.middle[columns]
    result = np.empty_like(before)
    come = result[COME] = forward + np.maximum(before[COME], stage.first[columns])
    after_last = np.maximum(stage.tail[columns], before[GONE])
    gone = result[GONE] = backward + after_last
    warmed = come + stage.ahead[columns]
    drain = gone if stage.is_last else stage.closing[columns] + after_last
    # Without steady passes the last forward pass does not wait for the first backward pass.
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
    """[n] step seconds of complete pipelines."""
    come, gone, chain, first, last, both, update = labels
    step = np.maximum(np.maximum(chain, first + come), np.maximum(last + gone, both + come + gone))
    return step + update + fixed


class _LaterStages:
    """Step 1: lower bounds of the seconds of stages k.. by the state before them; [states] each, infinite if none complete it."""

    def __init__(self, problem: PipelineProblem, stages: Sequence[_Stage], beat: float) -> None:
        self._problem, self._stages = problem, stages
        self._radix = _radix(problem)
        self.end = problem.layers * self._radix[0]
        self.end += sum(count * size for count, size in zip(problem.devices, self._radix[1:], strict=True))
        self.states = (problem.layers + 1) * self._radix[0]
        passes = [stage.forward + stage.backward for stage in stages]
        # The chain at a stage: the first and the last micro-batch through all stages, and its own passes between the two.
        chains = [stage.ahead + stage.middle * stage.has_steady for stage in stages]
        self.later_passes = self._sums(passes)
        self.update = self._sums([stage.optimizer for stage in stages], largest=True)
        low = max(0.0, float(self._sums(chains, largest=True)[0][0]))
        has_levels = math.isfinite(beat) and math.isfinite(low)
        levels = np.linspace(low, max(low, beat), LEVELS + 1).tolist() if has_levels else []
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
        """[S + 1] of [states]: the smallest sum (or maximum) of a column over the stages k.. ."""
        table = np.full(self.states, math.inf)
        table[self.end] = -math.inf if largest else 0.0
        tables = [table]
        for stage, column in zip(reversed(self._stages), reversed(values), strict=True):
            following, table = table, np.full(self.states, math.inf)
            cells = np.stack(
                [stage.state_offset, np.zeros_like(stage.state_offset) - 1 if stage.begins is None else stage.begins]
            )
            keys, which = np.unique(cells, axis=1, return_inverse=True)
            least = np.full(keys.shape[1], math.inf)
            np.minimum.at(least, which, column)
            for (offset, begins), cost in zip(keys.T.tolist(), least.tolist(), strict=True):
                if offset >= self.states:
                    continue
                first, stop = (0, self.states - offset)
                if begins >= 0:
                    first, stop = begins * self._radix[0], min((begins + 1) * self._radix[0], stop)
                if first >= stop:
                    continue
                suffix_sums = following[first + offset : stop + offset]
                ways = np.maximum(suffix_sums, cost) if largest else suffix_sums + cost
                table[first:stop] = np.minimum(table[first:stop], ways)
            tables.append(table)
        return tables[::-1]

    def bound(self, labels: Floats, states: Integers, place: int) -> Floats:
        """[n] lower bounds of the pipelines that begin with these labels and continue with stage `place`."""
        come, gone, chain, first, last, both, update = labels
        later_passes = self.later_passes[place][states]
        step = np.maximum(np.maximum(chain, first + come + later_passes), last + gone + later_passes)
        step = np.maximum(step, both + come + gone + 2.0 * later_passes)
        if self._slowest and place < len(self._stages):
            slow = np.full(len(states), math.inf)
            for lower, sums in self._slowest:
                slow = np.minimum(slow, sums[place][states] + lower)
            step = np.maximum(step, np.maximum(come, 0.0) + np.maximum(gone, 0.0) + slow)
        return step + np.maximum(update, self.update[place][states]) + self._problem.rules.fixed


def _run(
    problem: PipelineProblem,
    stages: Sequence[_Stage],
    later_stages: _LaterStages,
    beat: float,
    most: int | None,
    deadline: float,
) -> Labelled | None:
    """Steps 2 and 3: the best choice below the seconds to beat, as rows of `stages`.

    Args:
        most: size of the beam; None: no beam.
    Returns:
        None if there were too many labels or too little time.
    """
    nothing = np.full((len(NUMBERS), 1), -math.inf)
    labels, states = nothing, np.zeros(1, dtype=np.intp)
    origins: list[tuple[Integers, Integers]] = []
    dropped = math.inf
    for place, stage in enumerate(stages):
        if not len(states):
            return Labelled(None, beat, min(beat, dropped), True)
        lots = []
        step = max(1, CELLS // max(1, len(stage.state_offset)))
        for begin in range(0, len(states), step):
            if time.perf_counter() > deadline:
                return None
            lot_rows = slice(begin, begin + step)
            after = states[lot_rows, None] + stage.state_offset
            possible = after < later_stages.states
            if stage.begins is not None:
                possible &= states[lot_rows, None] // later_stages._radix[0] == stage.begins
            possible[possible] = np.isfinite(later_stages.later_passes[place + 1][after[possible]])
            rows, columns = np.nonzero(possible)
            extended = _extended(labels, stage, rows + begin, columns)
            bounds = later_stages.bound(extended, after[rows, columns], place + 1)
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
    """Indices of the labels on the Pareto frontier of their state; in a beam the `most` of them with the smallest bounds."""
    order: Integers = np.arange(len(states))
    if most is not None and len(states) > BEFORE * most:
        order = np.argpartition(bounds, BEFORE * most)[: BEFORE * most]
    order = order[np.argsort(states[order], kind="stable")]
    ends = np.flatnonzero(np.diff(states[order])) + 1
    groups = np.split(order, ends) if len(order) else []
    frontier = np.concatenate([order[:0], *(group[pareto(labels[:, group].T)] for group in groups)])
    if most is not None and len(frontier) > most:
        frontier = frontier[np.argpartition(bounds[frontier], most)[:most]]
    return frontier
