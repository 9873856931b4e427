"""Device memory that is alive while a part runs. Standard library and numpy.

What a part's graph holds of its own: activations, temporaries, results. Parameters, gradient buffers, tables and what other
parts made are the caller's: a stage adds them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_overlap.tuner.capture.expression import Values, evaluate
from moe_overlap.tuner.capture.graph import Part, Phase


def lifetimes(part: Part) -> dict[int, tuple[int, int]]:
    """First and last operator during which each storage that the part makes is alive.

    The outputs of the forward pass are the next part's once it has ended: they are given back with their last use there. The
    gradient of the part's inputs stays to the end.

    Returns:
        storage -> operators, both included.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for op in part.ops:
        for index in (*op.reads, *op.writes):
            if part.storages[index].role == "activation":
                first.setdefault(index, op.id)
                last[index] = op.id
    forward_end = sum(op.phase == "forward" for op in part.ops) - 1
    for index in last:
        held = part.storages[index].freed_after
        if index in part.outputs:
            last[index] = max(last[index] if index in part.saved else 0, forward_end)
        elif held is None:
            last[index] = len(part.ops) - 1
        else:
            last[index] = max(last[index], held)
    return {index: (first[index], last[index]) for index in first}


def live_bytes(part: Part, phase: Phase, b: Any, s: Any) -> Values:
    """Bytes alive at each operator of a pass; a result counts from the operator that makes it.

    Args:
        b, s: samples and tokens; arrays broadcast.
    Returns:
        [operators of the pass, *shape]. In the backward pass what the forward pass left is alive at the start.
    """
    spans = lifetimes(part)
    ids = [op.id for op in part.ops if op.phase == phase]
    # Ordered by operator, memory taken and given back adds up to what is alive.
    change = np.zeros((len(part.ops) + 1, len(spans)))
    for column, (first, last) in enumerate(spans.values()):
        change[first, column] += 1
        change[last + 1, column] -= 1
    sizes = evaluate([part.storages[index].bytes for index in spans], b, s)
    alive: Values = np.tensordot(np.cumsum(change, axis=0)[ids], sizes, axes=1)
    return alive


def peak_bytes(part: Part, phase: Phase, b: Any, s: Any) -> Values:
    """The most that is alive in a pass."""
    alive: Values = live_bytes(part, phase, b, s).max(axis=0)
    return alive


def kept_bytes(part: Part, b: Any, s: Any) -> Values:
    """What one micro-batch keeps between the passes beside what other parts made: saved activations, without the input."""
    kept = [index for index in part.saved if part.storages[index].role == "activation" and index not in part.outputs]
    return _total(part, kept, b, s)


def output_bytes(part: Part, b: Any, s: Any) -> Values:
    """What the part hands on; alive for as long as the next part keeps its input."""
    return _total(part, part.outputs, b, s)


def keeps_input(part: Part) -> bool:
    """Whether the hidden states that come in are kept for the backward pass."""
    return any(index in part.saved for index in part.inputs)


def _total(part: Part, ids: Sequence[int], b: Any, s: Any) -> Values:
    sizes = evaluate([part.storages[index].bytes for index in ids], b, s)
    total: Values = sizes.sum(axis=0)
    return total


def peak_of_sequence(parts: Sequence[Part], b: int, s: int) -> float:
    """Peak bytes of parts run one after another, forward, then backward, with one micro-batch in flight.

    The slow, plain composition: what each part keeps, its own temporaries, the hidden states between parts while they are
    kept, and in the backward pass the gradient that a part is handed.
    """
    kept = 0.0
    peak = 0.0
    between = [float(output_bytes(part, b, s)) for part in parts]
    for index, part in enumerate(parts):
        incoming = between[index - 1] if index else 0.0
        peak = max(peak, kept + incoming + float(peak_bytes(part, "forward", b, s)))
        kept += float(kept_bytes(part, b, s))
        if keeps_input(part):
            kept += incoming
    for index in reversed(range(len(parts))):
        part = parts[index]
        incoming = between[index - 1] if index else 0.0
        kept -= float(kept_bytes(part, b, s)) + (incoming if keeps_input(part) else 0.0)
        gradient = between[index] if index < len(parts) - 1 else 0.0
        peak = max(
            peak, kept + (incoming if keeps_input(part) else 0.0) + gradient + float(peak_bytes(part, "backward", b, s))
        )
    return peak
