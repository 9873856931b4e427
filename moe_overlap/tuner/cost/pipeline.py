"""The step of a pipeline from the seconds of its stages, under 1F1B and interleaved 1F1B.

A stage has these seconds (`StageTimes`): a stable micro-batch takes F_i + B_i = t_i; its first forward pass ends late by `first`
where its input is there from the start, and by `waited` where it has waited for it, as updates are made while it waits; its last
backward pass takes longer by `drain`, and `tail` seconds later all is reduced and copied. Then

    step = G · max t_i + (Σ t_i − max t_i) / v + D + L
    D    = the delay of the first forward pass, carried on: D_i = max(D_(i-1) + waited_i, first_i − Σ_(j<i) F_j / v)
    L    = the latest tail: max over i of Σ_(j≥i) drain_j + tail_i − Σ_(j<i) B_j / v

G micro-batches, v virtual stages: of the slowest stage's micro-batches nothing is hidden, and the others are passed once, as a
bubble, of which interleaving leaves 1 / v. Stages of unlike shape cut a step into G_i micro-batches each: the stage with the
largest G_i · t_i is the slowest, and it waits for G_j / G_i micro-batches of stage j where those are smaller.

Before that, transfers between stages lengthen their passes; behind it comes the update of the slowest optimizer. All of it is
`pipeline_seconds`, which a prediction asks for one pipeline and a search for n at once: each field is a number, or [n] of them.
Where all stages have as many micro-batches, a step is never shorter for any of a stage's seconds being longer: a candidate for
a stage that another beats in all of them is in no best pipeline that this other is not in.

Source: Mist, section 5.3, equation (1), third term; `simulate/step.py` is the slow twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Seconds: TypeAlias = float | NDArray[np.float64]
"""Of one pipeline, or [n] of as many pipelines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of one stage of a pipeline."""

    forward: Seconds
    backward: Seconds
    first: Seconds = 0.0
    """Seconds of the first forward pass beyond `forward`, its input there from the start, with the updates in front of it."""
    waited: Seconds = 0.0
    """The same where the stage has waited for its input."""
    turn: Seconds = 0.0
    """Seconds of the first backward pass of the last stage beyond `backward`."""
    drain: Seconds = 0.0
    """Seconds of the last backward pass beyond `backward`."""
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

    @property
    def total(self) -> Seconds:
        """Seconds of the step without the optimizer."""
        return self.steady + self.bubble + self.edges


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineRules:
    """What holds for all stages of a pipeline."""

    virtual: int
    """Model chunks per stage."""
    beside: float | None
    """Share by which a transfer slows down what runs beside it; None: every pass waits for its transfers."""
    fixed: float = 0.0
    """Seconds of every step, whatever its stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSeconds:
    """A complete step."""

    stages: tuple[StageTimes, ...]
    """With their transfers."""
    transfers: tuple[Seconds, ...]
    """Seconds of a stable micro-batch at each stage that are transfers."""
    step: StepSeconds
    filling: Seconds
    """Transfers that fill and drain the pipeline, beside what they add to the bubble."""
    update: Seconds
    """The slowest optimizer, and what every step takes."""

    @property
    def total(self) -> Seconds:
        """Seconds of the step."""
        return self.step.total + self.filling + self.update


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
    step = step_seconds(times, micro_batches, rules.virtual)
    return PipelineSeconds(stages=tuple(times), transfers=tuple(transfers), step=step, filling=filling, update=update)


def step_seconds(stages: Sequence[StageTimes], micro_batches: Sequence[int], virtual: int) -> StepSeconds:
    """Seconds of a step without the optimizer.

    Args:
        stages: in the order of the pipeline.
        micro_batches: G_i of every stage; all are equal unless stages are of unlike shape.
        virtual: chunks per stage.
    """
    # Some stages may be the same in all n pipelines.
    work = np.stack(
        np.broadcast_arrays(*[count * stage.stable for count, stage in zip(micro_batches, stages, strict=True)])
    )
    slowest = np.argmax(work, axis=0)
    own = np.asarray(micro_batches)[slowest]
    # Chunks are 1 / v of a stage, so filling and draining the pipeline takes 1 / v as long.
    bubble: Seconds = 0.0
    for index, (count, stage) in enumerate(zip(micro_batches, stages, strict=True)):
        bubble = bubble + np.where(slowest == index, 0.0, np.maximum(1.0, count / own) * stage.stable)
    delay, passed = stages[0].first, stages[0].forward / virtual
    for stage in stages[1:]:
        delay = np.maximum(delay + stage.waited / virtual, stage.first - passed)
        passed = passed + stage.forward / virtual
    tail: Seconds = float("-inf")
    drained: Seconds = 0.0
    backward: Seconds = sum(stage.backward for stage in stages) / virtual
    for stage in reversed(stages):
        drained = drained + stage.drain / virtual
        backward = backward - stage.backward / virtual
        tail = np.maximum(tail, drained + stage.tail - backward)
    return StepSeconds(
        slowest=slowest, steady=work.max(axis=0), bubble=bubble / virtual, edges=delay + stages[-1].turn + tail
    )


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


def in_flight(schedule_virtual: int, stages: int, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once, in whole passes of all its chunks.

    1F1B: stages behind it, and its own. Interleaved: 2 (S - 1 - i) + (v - 1) S + 1 chunk passes of v.
    """
    if schedule_virtual == 1:
        return float(min(micro_batches, stages - stage))
    passes = min(2 * (stages - stage - 1) + (schedule_virtual - 1) * stages + 1, micro_batches * schedule_virtual)
    return passes / schedule_virtual


def _largest(seconds: Sequence[Seconds]) -> Seconds:
    """The largest of several, in each pipeline by itself."""
    largest: Seconds = seconds[0]
    for other in seconds[1:]:
        largest = np.maximum(largest, other)
    return largest
