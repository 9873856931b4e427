"""The interface between a training loop and whatever runs a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moe_overlap.plan.instructions import Instruction
from moe_overlap.runtime.spans import Span

Batch = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step, as every rank sees it; the spans are this rank's.

    Attributes:
        loss: mean loss over the tokens of the global batch, in nats; on every rank.
        tokens: tokens of the global batch that count in the loss.
        grad_norm: global norm before clipping; nan in an evaluation.
        updated: whether the weights moved; false when loss or norm is not finite.
        zero_gradients: number of zero gradients where counted.
    """

    loss: float
    tokens: int
    grad_norm: float
    updated: bool
    zero_gradients: int | None
    spans: tuple[Span, ...]


class StepRunner(Protocol):
    """Runs instruction lists on this rank. The training loop knows nothing else of the model.

    Attributes:
        step: number of the step in the run, set before each one; gates that draw take it into their draws.
    """

    step: int

    def run(self, instructions: Sequence[Instruction], batches: Iterator[Batch]) -> StepResult:
        """One training step over the list's micro-batches."""

    def evaluate(self, instructions: Sequence[Instruction], batches: Iterator[Batch]) -> StepResult:
        """The forward part of the same list: no gradients, no update."""
