"""The step of a pipeline from the seconds of its stages, under 1F1B and interleaved 1F1B.

A stage has these seconds (`StageTimes`): a stable micro-batch takes F_i + B_i = t_i, and passes at the ends of a step take more
than that. A step is as long as the longest chain of passes that wait for each other. For each stage s
the chains are counted that pass there between its first and its last micro-batch. With G micro-batches, S stages of v chunks,
passes of a chunk f = F / v and b = B / v, and what first and last passes take beyond them left out:

    in       the first micro-batch comes through the stages in front:          Σ_(j<=s) f_j
    rounds   the first S micro-batches pass all chunks but the last, here, once around all stages, or on a stage in front, from
             which the last chunk's first pass comes:                          max((v - 1) S f_s, (v - 1) Σ f_j)
    warm-up  q_s more forward passes, or the first one's way there and back:   max(q_s f_s, Σ_(j>s) f_j + b_j)
    steady   backward and forward passes in turn:                              (G v - 1 - (v - 1) S - q_s) · (f_s + b_s)
    out      as many backward passes, or the last one's way there and back:    b_s + max(q_s b_s, Σ_(j>s) f_j + b_j)
    rounds   max((v - 1) S b_s, (v - 1) Σ b_j), and the way out Σ_(j<s) b_j

q_s is S - 1 - s, or twice that where v > 1: megatron-core's warm-up without the rounds. Where no steady part is left, the way
there and back is waited for once: the last forward pass does not wait for the first backward pass. The step is the largest over
s. Chains that change stages elsewhere are left out: the formula is never above a step of such passes, exact for 1F1B of two
stages and for equal stages, and within 1 % for most others (tests/unit/tuner/cost/test_cost_pipeline.py).

First and last passes. The first forward pass of a stage takes `first` longer, updates and gathered weights among it, while the
stage waits for its input as well: D_i = max(D_(i-1), first_i - Σ_(j<i) f_j) is how late it ends. With several chunks the last
chunk's first pass ends no earlier than all passes before it take on the stage, and no earlier than on the stage in front. `tail`
seconds behind the last backward pass all gradients are reduced and copied: the end is that of the latest stage.

Stages of unlike shape cut a step into G_i micro-batches each: stage s waits for G_j / G_s micro-batches of stage j where those
are smaller. Before all that, transfers between stages lengthen their passes; behind it comes the update of the slowest optimizer.
All of it is `pipeline_seconds`, which a prediction asks for one pipeline and a search for n at once: each field is a number, or
[n] of them. Where all stages have as many micro-batches, a step is never shorter for any of a stage's seconds being longer: a
candidate for a stage that another beats in all of them is in no best pipeline that this other is not in. Where forward passes
take nothing, the formula is Alpa's: (G - 1) · max t_i + Σ t_i.

Source: Mist, section 5.3, equation (1), third term, which is the last stage's chain; `simulate/step.py` is the slow twin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from operator import add
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Seconds: TypeAlias = float | NDArray[np.float64]
"""Seconds of one pipeline, or [n] of as many pipelines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of one stage of a pipeline."""

    forward: Seconds
    backward: Seconds
    first: Seconds = 0.0
    """Extra seconds of the first forward pass, with the updates in front of it."""
    tail: Seconds = 0.0
    """From the end of the last backward pass to the end of all reductions and copies."""

    @property
    def stable(self) -> Seconds:
        """Seconds of a stable micro-batch."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    """A step by what its seconds are spent on; they add up to its time without the optimizer."""

    slowest: int | NDArray[np.intp]
    """Index of the slowest stage, the first of equal ones."""
    steady: Seconds
    """The slowest stage at work."""
    bubble: Seconds
    """Filling and draining the pipeline."""
    edges: Seconds
    """First and last micro-batch beyond a stable one."""
    total: Seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineRules:
    """Settings that all stages of a pipeline share."""

    virtual: int
    """Model chunks per stage."""
    beside: float | None
    """Share by which a transfer slows down what runs beside it; None: every pass waits for its transfers."""
    fixed: float = 0.0
    """Seconds of every step, whatever its stages."""
    uneven: Seconds = 1.0
    """How many times as long passes take because chunks are unlike (uneven_chunks.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSeconds:
    """A complete step."""

    stages: tuple[StageTimes, ...]
    """With their transfers."""
    transfers: tuple[Seconds, ...]
    """Seconds of a stable micro-batch at each stage that are transfers."""
    step: Seconds
    """Without transfers that fill and drain, and without the optimizer."""
    filling: Seconds
    """Transfers that fill and drain the pipeline, beside what they add to the bubble."""
    update: Seconds
    """The slowest optimizer, and what every step takes."""

    @property
    def total(self) -> Seconds:
        """Seconds of the step."""
        return self.step + self.filling + self.update


def pipeline_seconds(
    stages: Sequence[StageTimes],
    optimizer: Sequence[Seconds],
    one_way: Sequence[Seconds],
    micro_batches: Sequence[int],
    rules: PipelineRules,
) -> PipelineSeconds:
    """Seconds of a step: the objective of every search over stages, and the answer of a prediction.

    Args:
        stages: in the order of the pipeline, without transfers.
        optimizer: of every stage, the seconds of its update behind the last micro-batch.
        one_way: seconds of one transfer from every stage but the last to the next.
        micro_batches: G_i of every stage.
    """
    transfers, filling = transfer_waits(one_way, rules.virtual, rules.beside)
    times = [
        replace(stage, forward=stage.forward + transfer / 2, backward=stage.backward + transfer / 2)
        for stage, transfer in zip(stages, transfers, strict=True)
    ]
    # Stages update at the same time, behind the norm that all of them wait for.
    update = _largest(optimizer) + rules.fixed
    step = step_seconds(times, micro_batches, rules.virtual) * rules.uneven
    return PipelineSeconds(stages=tuple(times), transfers=tuple(transfers), step=step, filling=filling, update=update)


def step_seconds(stages: Sequence[StageTimes], micro_batches: Sequence[int], virtual: int) -> Seconds:
    """Seconds of a step without the optimizer.

    Args:
        stages: in the order of the pipeline.
        micro_batches: G_i of every stage; all are equal unless stages are of unlike shape.
        virtual: chunks per stage.
    """
    return _largest([_longest_chain(stages, micro_batches, count, virtual) for count in dict.fromkeys(micro_batches)])


def warm_up(stages: int, stage: int, micro_batches: int, virtual: int) -> tuple[int, int, int]:
    """Passes of a chunk behind a stage's first one: those of the rounds, q, and pairs of passes of the steady part."""
    rounds = (virtual - 1) * min(stages, micro_batches)
    remaining = micro_batches * virtual - 1 - rounds
    warm = min((2 if virtual > 1 else 1) * (stages - 1 - stage), remaining)
    return rounds, warm, remaining - warm


def _left_to_right(terms: Iterable[Seconds]) -> Seconds:
    """Sum in the order of the terms, for one plan and arrays of plans alike: since Python 3.12 `sum` compensates floats alone."""
    return reduce(add, terms, 0.0)


def _longest_chain(stages: Sequence[StageTimes], micro_batches: Sequence[int], count: int, virtual: int) -> Seconds:
    """The longest chain over the stages that have this number of micro-batches."""
    shares = [max(1.0, number / count) / virtual for number in micro_batches]
    forward = [stage.forward * share for stage, share in zip(stages, shares, strict=True)]
    backward = [stage.backward * share for stage, share in zip(stages, shares, strict=True)]
    entered = _entered(stages, forward, count, virtual)
    after_last, gone = _ends(stages, backward)
    round_back: Seconds = _left_to_right(backward)
    longest: Seconds = float("-inf")
    # Sums over the stages behind this one: forward passes of the last micro-batch, backward passes of the first.
    forward_rest: Seconds = 0.0
    backward_rest: Seconds = 0.0
    for index in range(len(stages) - 1, -1, -1):
        f, b = forward[index], backward[index]
        if micro_batches[index] == count:
            rounds, warm, steady = warm_up(len(stages), index, count, virtual)
            cycles = np.maximum(rounds * b, (virtual - 1) * round_back) if rounds else 0.0
            warmed, last = entered[index] + warm * f, forward_rest + gone[-1]
            drain = b + warm * b + after_last[index] if index < len(stages) - 1 else gone[-1]
            steady_begin = np.maximum(warmed, entered[-1] + backward_rest)
            if steady:
                chain = steady_begin + steady * (f + b) + np.maximum(drain, last)
            else:
                chain = np.maximum(steady_begin + drain, warmed + last)
            longest = np.maximum(longest, cycles + chain)
        forward_rest, backward_rest = forward_rest + f, backward_rest + b
    return longest


def _entered(stages: Sequence[StageTimes], forward: Sequence[Seconds], count: int, virtual: int) -> list[Seconds]:
    """[S] when the first forward pass of the last chunk ends."""
    rounds, _, _ = warm_up(len(stages), 0, count, virtual)
    around = (virtual - 1) * _left_to_right(forward) if rounds else 0.0
    passed: Seconds = 0.0
    delay: Seconds = stages[0].first
    ends: list[Seconds] = []
    for index, (f, stage) in enumerate(zip(forward, stages, strict=True)):
        if index:
            delay = np.maximum(delay, stage.first - passed)
        passed = passed + f
        ended, busy = passed + delay, f + stage.first
        if rounds:
            busy = busy + rounds * f
            ended = np.maximum(ended + (np.maximum(around, rounds * f) if index else around), busy)
            ended = np.maximum(ended, ends[-1] + f) if index else ended
        ends.append(np.maximum(ended, busy))
    return ends


def _ends(stages: Sequence[StageTimes], backward: Sequence[Seconds]) -> tuple[list[Seconds], list[Seconds]]:
    """[S] seconds after each stage's last backward pass, on it and on the stages in front; and the same with that pass."""
    after_last, gone = [stages[0].tail], [backward[0] + stages[0].tail]
    for b, stage in zip(backward[1:], stages[1:], strict=True):
        after_last.append(np.maximum(stage.tail, gone[-1]))
        gone.append(b + after_last[-1])
    return after_last, gone


def spent_on(
    stages: Sequence[StageTimes], micro_batches: Sequence[int], virtual: int, uneven: Seconds = 1.0
) -> StepSeconds:
    """A step without the optimizer by what its seconds are spent on; arguments as of `step_seconds` and `PipelineRules`."""
    work = np.stack(
        np.broadcast_arrays(*[count * stage.stable for count, stage in zip(micro_batches, stages, strict=True)])
    )
    bare = [StageTimes(forward=stage.forward, backward=stage.backward) for stage in stages]
    total, stable = (step_seconds(given, micro_batches, virtual) * uneven for given in (stages, bare))
    steady = work.max(axis=0)
    # A single stage has no bubble, but its passes are added up in another order than its work.
    bubble = np.maximum(stable - steady, 0.0)
    return StepSeconds(slowest=np.argmax(work, axis=0), steady=steady, bubble=bubble, edges=total - stable, total=total)


def transfer_waits(one_way: Sequence[Seconds], virtual: int, beside: float | None) -> tuple[list[Seconds], Seconds]:
    """Seconds that transfers between stages add to a step.

    megatron-core's 1F1B waits for each of them: behind a forward pass for the transfer to the next stage, behind a backward
    pass for that to the stage before. Its interleaved pipeline may have them beside its passes, which then take longer by a
    share of every transfer in or out; the passes that fill and drain the pipeline wait for them, but for those of stages that
    wait anyway. That count is read off simulated lists; with transfers of 5 % of a forward pass it is right to 1 % of a step.

    Args:
        one_way: seconds of one transfer from every stage but the last to the next.
        beside: share by which a transfer slows down what runs beside it; None: every pass waits for its transfers.
    Returns:
        Seconds of a stable micro-batch at each stage; seconds of filling and draining beside what those add to the bubble.
    """
    if not one_way:
        return [0.0], 0.0
    stages, slowest = len(one_way) + 1, _largest(one_way)
    if virtual == 1:
        return [before + behind for before, behind in zip([0.0, *one_way], [*one_way, 0.0], strict=True)], 0.0
    # The last stage of a chunk sends to the first of the next: all links are in every pass.
    if beside is None:
        return [2.0 * slowest * virtual] * stages, 0.0
    return [beside * slowest * (4 * virtual - 2)] * stages, slowest * (2 * virtual * stages - stages - 1)


def averaged(times: StageTimes, micro_batches: int) -> StageTimes:
    """The seconds of a stage whose micro-batches all take their mean."""
    return StageTimes(
        forward=times.forward + times.first / micro_batches,
        backward=times.backward + times.tail / micro_batches,
    )


def in_flight(stages: int, stage: int, micro_batches: int, layers: tuple[int, ...]) -> float:
    """Micro-batches whose activations a stage holds at once, in whole passes of all its layers.

    1F1B: stages behind it, and its own. Interleaved: 2 (S - 1 - i) + (v - 1) S + 1 chunk passes of v, where the chunks have as
    many layers; where not, those of the chunks that are held when most layers are.

    Args:
        layers: of each of its chunks.
    """
    virtual = len(layers)
    if virtual == 1:
        return float(min(micro_batches, stages - stage))
    ahead = 2 * (stages - stage - 1) + (virtual - 1) * stages
    if len(set(layers)) == 1 or not any(layers):
        return min(ahead + 1, micro_batches * virtual) / virtual
    return _most_layers(stages, ahead, min(micro_batches, 4 * stages), layers) / sum(layers)


def lone_share(stages: int, chunks: int, micro_batches: int) -> float:
    """Share of the passes of a pipeline, with those that its bubble stands for, that no pass of another micro-batch runs beside.

    Where a forward pass runs beside a backward pass (plan/lowering/pipeline_order.py: `paired`), the step goes through the last
    stage: S - 1 chunk passes until its first one begins and after its last one has ended, (v - 1) S + 1 of its own forward until
    the first pair and as many backward behind the last, and pairs. As mean seconds of the closed form's v M + S - 1 passes these
    are v S alone. On a single stage: the first forward and the last backward pass, one of M.
    """
    return min(1.0, chunks * stages / (chunks * micro_batches + stages - 1))


@cache
def _most_layers(stages: int, ahead: int, micro_batches: int, layers: tuple[int, ...]) -> int:
    """Layers whose activations are held at once: counted in the order of the passes, which repeats itself."""
    entered = [
        chunk
        for first in range(0, micro_batches, stages)
        for chunk in range(len(layers))
        for _ in range(min(stages, micro_batches - first))
    ]
    held = most = 0
    for number, chunk in enumerate(entered):
        held += layers[chunk]
        most = max(most, held)
        if number >= ahead:
            # Gradients come back through the chunks from the last to the first.
            held -= layers[len(layers) - 1 - entered[number - ahead]]
    return most


def _largest(seconds: Sequence[Seconds]) -> Seconds:
    """The largest of several, in each pipeline by itself."""
    largest: Seconds = seconds[0]
    for other in seconds[1:]:
        largest = np.maximum(largest, other)
    return largest
