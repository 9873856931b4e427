"""The interface between training loop and executor of a step: `StepRunner`, its result, and the communication error.

It imports no other part of the runtime, so that every part may import it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from moe_overlap.plan.instructions import Instruction, Span

Batch = dict[str, Tensor]
"""One micro-batch of this rank: `tokens`, `labels`, `loss_mask` and `position_ids` [B, S]; `attention_mask` where attention must
not cross documents."""


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


def computes_later(device: torch.device) -> bool:
    """Whether a device executes asynchronously, so that reading a result makes the host wait."""
    return device.type == "cuda"


class CommunicationFailed(RuntimeError):
    """A peer died, hung or disagreed; the message begins with the operation that did not complete."""


@contextlib.contextmanager
def naming(operation: str) -> Iterator[None]:
    """Turn an error of the communication inside the block into a `CommunicationFailed` that begins with the operation."""
    try:
        yield
    except CommunicationFailed:
        raise
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise CommunicationFailed(f"{operation}: {reason or type(error).__name__}") from error


class StepRunner(Protocol):
    """Executes instruction lists on this rank. The training loop knows nothing else of the model.

    Both calls are collective: every rank passes its own list of the same step.
    """

    def run(self, instructions: Sequence[Instruction], batches: Iterator[Batch], step: int) -> StepResult:
        """Execute one training step over the list's micro-batches.

        Args:
            batches: this rank's micro-batches; one is taken for each of the list.
            step: number of the step in the run; part of the seed of gates that draw.
        Raises:
            CommunicationFailed: a peer is gone. Every rank that needs it raises within the groups' timeout.
        """

    def evaluate(self, instructions: Sequence[Instruction], batches: Iterator[Batch], step: int) -> StepResult:
        """Execute the forward part of the same list: no gradients, no update. `step` is the last training step."""
