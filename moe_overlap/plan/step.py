"""The seam between a training loop and whatever executes a step: `StepRunner`, and the `StepResult` of its calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from moe_overlap.plan.instructions import Instruction, Span

Batch = TypeVar("Batch", contravariant=True)
"""One micro-batch of a rank; nothing here looks into it."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one step, equal on every rank but for the spans, which are this rank's.

    Attributes:
        loss: mean loss over the tokens of the global batch, in nats.
        tokens: tokens of the global batch that count in the loss.
        grad_norm: global norm of the unscaled gradients before clipping; nan in an evaluation and where the loss scale made a
            gradient overflow.
        updated: whether the weights moved; false when loss or norm is not finite.
        zero_gradients: number of zero gradients; None where they are not counted or a gradient overflowed.
        predictions: mean loss of every multi-token-prediction layer, over the tokens that count in it.
        balance: mean of every balancing loss, without its coefficient, by upstream's name and by layer; none in an evaluation, or
            where graphs are replayed.
    """

    loss: float
    tokens: int
    grad_norm: float
    updated: bool
    zero_gradients: int | None
    spans: tuple[Span, ...]
    predictions: tuple[float, ...] = ()
    balance: Mapping[str, Mapping[int, float]] = field(default_factory=dict)


class StepRunner(Protocol[Batch]):
    """Executes instruction lists on this rank. The training loop knows nothing else of the model.

    All calls are collective: every rank passes its own list of the same step.
    """

    def run(self, instructions: Sequence[Instruction], batches: Iterator[Batch], step: int) -> StepResult:
        """Execute one training step over the list's micro-batches.

        Args:
            batches: this rank's micro-batches; as many are taken as the list has.
            step: number of the step in the run; gates that draw take it into their draws.
        Raises:
            CommunicationFailed: a peer is gone. Every rank that needs it raises within the groups' timeout.
        """

    def flush(self, instructions: Sequence[Instruction]) -> None:
        """Execute the updates alone that the last step has left to the next one. Collective, as the other calls.

        Args:
            instructions: the list of these updates; empty on ranks whose stage updates at the end of its own step.
        """

    def evaluate(self, instructions: Sequence[Instruction], batches: Iterator[Batch], step: int) -> StepResult:
        """Execute the forward part of the same list: no gradients, no update. `step` is the last training step."""
