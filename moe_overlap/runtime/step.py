"""The interface between a training loop and whatever runs a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moe_overlap.plan.instructions import Instruction, Span

Batch = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step, as every rank sees it; the spans are this rank's.

    Attributes:
        loss: mean loss over the tokens of the global batch, in nats; on every rank.
        tokens: tokens of the global batch that count in the loss.
        grad_norm: global norm before clipping, of unscaled gradients; nan in an evaluation, and where the scaled ones overflowed.
        updated: whether the weights moved; false when loss or norm is not finite.
        zero_gradients: number of zero gradients where counted; None where they overflowed.
        predictions: mean loss of every multi-token-prediction layer, over the tokens that count in it.
    """

    loss: float
    tokens: int
    grad_norm: float
    updated: bool
    zero_gradients: int | None
    spans: tuple[Span, ...]
    predictions: tuple[float, ...] = ()


class CommunicationFailed(RuntimeError):
    """A peer died, hung or disagreed; the message begins with the operation that did not complete."""


@contextlib.contextmanager
def naming(operation: str) -> Iterator[None]:
    """Have what fails in the block, which communicates, say in which operation."""
    try:
        yield
    except CommunicationFailed:
        raise
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise CommunicationFailed(f"{operation}: {reason or type(error).__name__}") from error


class StepRunner(Protocol):
    """Runs instruction lists on this rank. The training loop knows nothing else of the model.

    Attributes:
        step: number of the step in the run, set before each one; gates that draw take it into their draws.
    """

    step: int

    def run(self, instructions: Sequence[Instruction], batches: Iterator[Batch]) -> StepResult:
        """One training step over the list's micro-batches.

        Raises:
            CommunicationFailed: a peer is gone. Every rank that needs it raises within the groups' timeout.
        """

    def evaluate(self, instructions: Sequence[Instruction], batches: Iterator[Batch]) -> StepResult:
        """The forward part of the same list: no gradients, no update."""
