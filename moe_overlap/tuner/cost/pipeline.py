"""The step of a pipeline from the seconds of its stages, under 1F1B and interleaved 1F1B.

A stage has these seconds (`StageTimes`): a stable micro-batch takes F_i + B_i = t_i; the passes at the ends of a step take more.
A step is as long as the longest chain of passes that wait for each other. The formula has one chain for each stage s: to s,
through the passes of s from its first to its last micro-batch, and back. With G micro-batches, S stages of v chunks, passes of a
chunk f = F / v and b = B / v, and without the extra seconds of first and last passes:

    in       the first micro-batch reaches stage s:                            Σ_(j<=s) f_j
    rounds   forward passes of the first S micro-batches through all chunks but the last: all of them on s, or one micro-batch
             around all stages, or on the stage before s:                      max((v - 1) S f_s, (v - 1) Σ f_j)
    warm-up  q_s more forward passes, or the first micro-batch to the last
             stage and back:                                                   max(q_s f_s, Σ_(j>s) f_j + b_j)
    steady   backward and forward passes in turn:                              (G v - 1 - (v - 1) S - q_s) · (f_s + b_s)
    out      q_s + 1 backward passes, or the last micro-batch to the last
             stage and back:                                                   b_s + max(q_s b_s, Σ_(j>s) f_j + b_j)
    rounds   backward, as above: max((v - 1) S b_s, (v - 1) Σ b_j), and the way to the first stage Σ_(j<s) b_j

q_s is megatron-core's warm-up without the rounds: S - 1 - s, or twice that if v > 1. Without steady passes only one of the two
ways to the last stage counts, because the last forward pass does not wait for the first backward pass. The step is the maximum
over s. The formula leaves out chains that change stages elsewhere, so it is never above a step of such passes; it is exact for
1F1B of two stages and for equal stages, and within 1 % for most others (tests/unit/tuner/cost/test_cost_pipeline.py).

First and last passes. The first forward pass of a stage takes `first` seconds more, which include updates and gathers of weights,
and which overlap with the wait for its input: it ends D_i = max(D_(i-1), first_i - Σ_(j<i) f_j) late. With several chunks the
first pass of the last chunk ends after all earlier passes of the stage, and after that of the stage before. Gradients are reduced
and copied `tail` seconds after the last backward pass; the step ends with the latest stage.

Stages of different shape cut a step into G_i micro-batches each: stage s waits for G_j / G_s micro-batches of stage j if those
are smaller. `pipeline_seconds` first lengthens passes by the transfers between stages, and adds the update of the slowest
optimizer at the end. Predictions call it for one pipeline, searches for n at once: each field is a number, or [n] of them. If all
stages have the same number of micro-batches, no step gets shorter if any of a stage's seconds gets longer, so a search may prune
a candidate for a stage that another one dominates. Without forward seconds the formula is Alpa's: (G - 1) · max t_i + Σ t_i.

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
    """The seconds of a step by cause; they add up to the step without the optimizer."""

    slowest: int | NDArray[np.intp]
    """Index of the slowest stage; of equal ones the first."""
    steady: Seconds
    """Stable micro-batches of the slowest stage."""
    bubble: Seconds
    """Filling and draining the pipeline."""
    edges: Seconds
    """Extra seconds of the first and the last micro-batch."""
    total: Seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineRules:
    """Settings that all stages of a pipeline share."""

    virtual: int
    """Model chunks per stage."""
    transfer_slowdown: float | None
    """Share of a transfer's seconds by which it slows a concurrent pass; None: every pass waits for its transfers."""
    fixed: float = 0.0
    """Seconds of every step outside of its stages."""
    uneven: Seconds = 1.0
    """Factor by which a step is longer because its chunks differ (uneven_chunks.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSeconds:
    """A complete step."""

    stages: tuple[StageTimes, ...]
    """With their transfers."""
    transfers: tuple[Seconds, ...]
    """Seconds of transfers in a stable micro-batch, of every stage."""
    step: Seconds
    """Seconds of the passes: without `filling` and without the optimizer."""
    filling: Seconds
    """Seconds of transfers that fill and drain the pipeline, in addition to their share of the bubble."""
    update: Seconds
    """Seconds of the slowest optimizer, and those of every step."""

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
        optimizer: of every stage, the seconds of its update after the last micro-batch.
        one_way: seconds of one transfer from every stage but the last to the next.
        micro_batches: G_i of every stage.
    """
    transfers, filling = transfer_waits(one_way, rules.virtual, rules.transfer_slowdown)
    times = [
        replace(stage, forward=stage.forward + transfer / 2, backward=stage.backward + transfer / 2)
        for stage, transfer in zip(stages, transfers, strict=True)
    ]
    # Stages update at the same time, after the gradient norm that all of them wait for.
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
    """Numbers of chunk passes after a stage's first one: of the rounds, of the warm-up (q), and pairs of the steady part."""
    rounds = (virtual - 1) * min(stages, micro_batches)
    remaining = micro_batches * virtual - 1 - rounds
    warm = min((2 if virtual > 1 else 1) * (stages - 1 - stage), remaining)
    return rounds, warm, remaining - warm


def _left_to_right(terms: Iterable[Seconds]) -> Seconds:
    """Sum in the order of the terms, the same for floats and arrays: since Python 3.12 `sum` compensates floats, not arrays."""
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
    # Sums over the later stages: forward passes of the last micro-batch, backward passes of the first.
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
    """[S] end of the first forward pass of the last chunk."""
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
    """[S] seconds from the end of each stage's last backward pass to the end of the step; and the same with that pass."""
    after_last, gone = [stages[0].tail], [backward[0] + stages[0].tail]
    for b, stage in zip(backward[1:], stages[1:], strict=True):
        after_last.append(np.maximum(stage.tail, gone[-1]))
        gone.append(b + after_last[-1])
    return after_last, gone


def spent_on(
    stages: Sequence[StageTimes], micro_batches: Sequence[int], virtual: int, uneven: Seconds = 1.0
) -> StepSeconds:
    """A step without the optimizer by cause; arguments as of `step_seconds` and `PipelineRules`."""
    work = np.stack(
        np.broadcast_arrays(*[count * stage.stable for count, stage in zip(micro_batches, stages, strict=True)])
    )
    bare = [StageTimes(forward=stage.forward, backward=stage.backward) for stage in stages]
    total, stable = (step_seconds(times, micro_batches, virtual) * uneven for times in (stages, bare))
    steady = work.max(axis=0)
    # A single stage has no bubble; rounding may make the difference negative, as the sums have different orders.
    bubble = np.maximum(stable - steady, 0.0)
    return StepSeconds(slowest=np.argmax(work, axis=0), steady=steady, bubble=bubble, edges=total - stable, total=total)


def transfer_waits(one_way: Sequence[Seconds], virtual: int, slowdown: float | None) -> tuple[list[Seconds], Seconds]:
    """Seconds that transfers between stages add to a step.

    megatron-core's 1F1B waits for each transfer: after a forward pass for that to the next stage, after a backward pass for that
    to the stage before. Its interleaved pipeline may overlap transfers with passes, which then take longer by a share of every
    transfer in or out; passes that fill and drain the pipeline wait, except on stages that are idle anyway. The number of these
    waits comes from simulated lists; with transfers of 5 % of a forward pass it is right to 1 % of a step.

    Args:
        one_way: seconds of one transfer from every stage but the last to the next.
        slowdown: share of a transfer's seconds by which it slows a concurrent pass; None: every pass waits for its transfers.
    Returns:
        Seconds per stable micro-batch of each stage; seconds of filling and draining in addition to their share of the bubble.
    """
    if not one_way:
        return [0.0], 0.0
    stages, slowest = len(one_way) + 1, _largest(one_way)
    if virtual == 1:
        return [before + after for before, after in zip([0.0, *one_way], [*one_way, 0.0], strict=True)], 0.0
    # The last stage sends to the first one of the next chunk, so every pass uses all links.
    if slowdown is None:
        return [2.0 * slowest * virtual] * stages, 0.0
    return [slowdown * slowest * (4 * virtual - 2)] * stages, slowest * (2 * virtual * stages - stages - 1)


def averaged(times: StageTimes, micro_batches: int) -> StageTimes:
    """The seconds of a stage with its first and last extra seconds spread over all micro-batches."""
    return StageTimes(
        forward=times.forward + times.first / micro_batches,
        backward=times.backward + times.tail / micro_batches,
    )


def in_flight(stages: int, stage: int, micro_batches: int, layers: tuple[int, ...]) -> float:
    """Number of micro-batches, each of all its layers, whose activations a stage holds at once.

    1F1B: one for each later stage, and its own. Interleaved with equal chunks: 2 (S - 1 - i) + (v - 1) S + 1 passes of a chunk,
    each 1 / v of a micro-batch. With unequal chunks: the largest number of held layers over the stage's layers.

    Args:
        layers: number of layers of each of its chunks.
    """
    virtual = len(layers)
    if virtual == 1:
        return float(min(micro_batches, stages - stage))
    ahead = 2 * (stages - stage - 1) + (virtual - 1) * stages
    if len(set(layers)) == 1 or not any(layers):
        return min(ahead + 1, micro_batches * virtual) / virtual
    return _most_layers(stages, ahead, min(micro_batches, 4 * stages), layers) / sum(layers)


def lone_share(stages: int, chunks: int, micro_batches: int) -> float:
    """Share of unpaired passes in a pipeline that pairs forward with backward passes; its bubble counts as passes, too.

    With pairs (plan/lowering/pipeline_order.py: `paired`) the critical path is the last stage's: S - 1 chunk passes before its
    first one and after its last one, (v - 1) S + 1 of its own forward passes before the first pair and as many backward passes
    after the last pair, and the pairs. So v S of the closed form's v M + S - 1 mean passes are unpaired. On a single stage: the
    first forward and the last backward pass, one of M.
    """
    return min(1.0, chunks * stages / (chunks * micro_batches + stages - 1))


@cache
def _most_layers(stages: int, ahead: int, micro_batches: int, layers: tuple[int, ...]) -> int:
    """Most layers whose activations are held at once, counted along the periodic order of the passes."""
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
            # Backward passes go through the chunks from the last to the first.
            held -= layers[len(layers) - 1 - entered[number - ahead]]
    return most


def _largest(seconds: Sequence[Seconds]) -> Seconds:
    """The elementwise maximum."""
    largest: Seconds = seconds[0]
    for other in seconds[1:]:
        largest = np.maximum(largest, other)
    return largest
