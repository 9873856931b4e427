"""Seconds of a step from the seconds of its stages: 1F1B and interleaved 1F1B, in closed form.

    step = (G - 1) · max t_i + Σ t_i over the stages, of which a micro-batch passes all but the slowest 1/v as a bubble
           + the largest delta_i of first and last micro-batch, less what the stages before it leave to wait

G micro-batches, v virtual stages, t_i seconds of a stable micro-batch (forward and backward, all chunks) at stage i, with what it
waits for transfers (`transfer_waits`).
Source: Mist, section 5.3, third term; for v = 1 and equal stages it is (G + S - 1) · t. tuner/cost/simulate/step.py is its slow
twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    """Parts of a step, in seconds; they add up to its time without the optimizer."""

    steady: float
    """The slowest stage at work."""
    bubble: float
    """Filling and draining the pipeline."""
    edges: float
    """First and last micro-batch beyond a stable one."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.steady + self.bubble + self.edges


def step_seconds(
    stable: Sequence[float], first_extra: Sequence[float], last_extra: Sequence[float], micro_batches: int, virtual: int
) -> StepSeconds:
    """Seconds of a step without the optimizer.

    Args:
        stable: t_i of every stage.
        first_extra: what the first micro-batch takes beyond it; stages after the first do it while they wait for input.
        last_extra: what the last one takes beyond it; stages after the first end early and do it while the others drain.
        virtual: chunks per stage.
    """
    slowest = max(stable)
    bubble = (sum(stable) - slowest) / virtual
    edges, waited = 0.0, 0.0
    for seconds, first, last in zip(stable, first_extra, last_extra, strict=True):
        # A stage waits for the forward passes before it, about a third of their time, and drains before their backward ones.
        edges = max(edges, max(0.0, first - waited / 3) + max(0.0, last - waited * 2 / 3))
        waited += seconds / virtual
    return StepSeconds(steady=micro_batches * slowest, bubble=bubble, edges=edges)


def transfer_waits(stages: int, virtual: int, one_way: float, beside: float | None) -> tuple[list[float], float]:
    """What transfers between stages add to a step.

    megatron-core's 1F1B waits for each of them: behind a forward pass for the exchange with the stage behind, behind a backward
    pass for that with the stage before. Its interleaved pipeline may have them beside its passes, which then take longer by a
    share of every transfer in or out; the passes that fill and drain the pipeline wait for them, but for those of stages that
    wait anyway. That count is read off simulated lists; with transfers of 5 % of a forward pass it is right to 1 % of a step.

    Args:
        one_way: seconds of one transfer.
        beside: share by which a transfer slows down what runs beside it; None: every pass waits for its transfers.
    Returns:
        Seconds of a stable micro-batch at each stage; seconds of filling and draining beside what those add to the bubble.
    """
    if stages == 1:
        return [0.0], 0.0
    if virtual == 1:
        return [one_way * ((stage > 0) + (stage < stages - 1)) for stage in range(stages)], 0.0
    if beside is None:
        return [2.0 * one_way * virtual] * stages, 0.0
    return [beside * one_way * (4 * virtual - 2)] * stages, one_way * (2 * virtual * stages - stages - 1)


def in_flight(schedule_virtual: int, stages: int, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once, in whole passes of all its chunks.

    1F1B: stages behind it, and its own. Interleaved: 2 (S - 1 - i) + (v - 1) S + 1 chunk passes of v.
    """
    if schedule_virtual == 1:
        return float(min(micro_batches, stages - stage))
    passes = min(2 * (stages - stage - 1) + (schedule_virtual - 1) * stages + 1, micro_batches * schedule_virtual)
    return passes / schedule_virtual
