"""Seconds of a step from the seconds of its stages: 1F1B and interleaved 1F1B, in closed form.

    step = (G - 1) · max t_i + Σ t_i over the stages, of which a micro-batch passes all but the slowest 1/v as a bubble
           + the largest delta_i of first and last micro-batch, less what the stages before it leave to wait

G micro-batches, v virtual stages, t_i seconds of a stable micro-batch (forward and backward, all chunks) at stage i.
Source: Mist, section 5.3, third term; for v = 1 and equal stages it is (G + S - 1) · t. tuner/cost/simulate_step.py is its slow
twin; where t_i counts transfers that a stage waits for, as megatron-core's 1F1B does, the twin's lists wait less.
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


def in_flight(schedule_virtual: int, stages: int, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once, in whole passes of all its chunks.

    1F1B: stages behind it, and its own. Interleaved: 2 (S - 1 - i) + (v - 1) S + 1 chunk passes of v.
    """
    if schedule_virtual == 1:
        return float(min(micro_batches, stages - stage))
    passes = min(2 * (stages - stage - 1) + (schedule_virtual - 1) * stages + 1, micro_batches * schedule_virtual)
    return passes / schedule_virtual
