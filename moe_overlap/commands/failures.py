"""The single error line of a failing rank: the reason, the operation, the rank and the step.

There are four kinds of errors: out of memory; a lost or unresponsive peer; another rank that failed a common check and prints its
own error; and a bug, whose traceback is written to a file that the line names.
"""

from __future__ import annotations

import os
import re
import tempfile
import traceback
from dataclasses import dataclass
from typing import Literal

Kind = Literal["memory", "peer", "other"]
_ALLOCATION = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|std::bad_alloc|Cannot allocate memory", re.IGNORECASE)
_LOST = re.compile(
    r"(closed|reset) by peer|timed out|timeout|broken pipe|gloo|nccl|socket|connection (refused|was)", re.IGNORECASE
)
_NOISE = re.compile(r"\[[^\]\s]*/[^\]\s]+:\d+\] |\. This is typically caused by .*")
"""The position in torch's C++ sources at the start of gloo's messages, and the general advice at their end."""
_MOST_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Place:
    """The place at which a rank failed.

    Attributes:
        activity: `step 3`, `evaluation after step 3`, `save after step 3` or `start`.
        operation: the running operator or communication; None if the message names it, and outside of steps.
    """

    rank: int
    activity: str
    operation: str | None = None


def kind_of_failure(error: BaseException) -> Kind:
    """The kind of an error that a rank reports, from its class and message."""
    import torch
    import torch.distributed as dist

    from moe_overlap.runtime.step import CommunicationFailed

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "memory"
    # An allocation inside a communication can fail, too.
    if isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(_first_line(error)):
        return "memory"
    # torch raises the same class for a wrong shape in a communication as for its failure.
    cause = error.__cause__
    if isinstance(error, CommunicationFailed) and type(cause) is RuntimeError and not _LOST.search(str(cause)):
        return "other"
    if isinstance(error, (CommunicationFailed, dist.DistError)):
        return "peer"
    # gloo raises plain RuntimeErrors.
    return "peer" if isinstance(error, RuntimeError) and _LOST.search(_first_line(error)) else "other"


def failure_line(error: BaseException, kind: Kind, place: Place) -> str:
    """`error: L0.moe.dispatch: lost a peer: Connection closed by peer [127.0.0.1]:4711 (rank 0, step 3)`."""
    from moe_overlap.runtime.step import CommunicationFailed

    named, reason = f"{place.operation}: " if place.operation else "", _first_line(error)
    # These messages begin with their operation.
    is_named = isinstance(error, CommunicationFailed)
    if kind == "memory":
        # Replaces the message, which begins with the operation if a communication failed.
        allocation = _ALLOCATION.search(reason)
        reason = f"{int(allocation[1]) / 2**20:,.1f} MiB more were asked for" if allocation else reason
        text = f"{named}out of memory{f': {reason}' if reason else ''}; a smaller --micro-batch-size or recomputation needs less"
    elif kind == "peer":
        text = reason if is_named else f"{named}lost a peer: {reason}"
    else:
        text = reason if is_named else f"{named}{type(error).__name__}{f': {reason}' if reason else ''}"
        text += _kept_traceback(error, place.rank)
    return f"error: {text} (rank {place.rank}, {place.activity})"


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return " ".join(_NOISE.sub("", text).split())[:_MOST_CHARACTERS]


def _kept_traceback(error: BaseException, rank: int) -> str:
    """Write the traceback to a new file. Returns text with its path; empty if it cannot be written."""
    try:
        descriptor, path = tempfile.mkstemp(prefix=f"moe-rank{rank}-", suffix=".traceback", text=True)
        with os.fdopen(descriptor, "w") as file:
            file.write("".join(traceback.format_exception(error)))
    except OSError:
        return ""
    return f"; traceback in {path}"
