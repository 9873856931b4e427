"""A micro-batch of a step, devices whose results come later, and how communication fails.

It imports no other part of the runtime, so that every part may import it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

Batch = dict[str, Tensor]
"""One micro-batch of this rank: `tokens`, `labels`, `loss_mask` and `position_ids` [B, S]; `attention_mask` where attention must
not cross documents."""


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
