"""Live memory of one rank over a simulated step.

A buffer is there from the start of what writes it first to the end of what reads it last; written anew later, it is there again.
Parameters, gradient sums and states stay on the device all the time, what begins with `host.` never is there.
`activations.L3.m0` stands for what the forward pass of a micro-batch through a part saves for its backward pass, which no
instruction names: from the first computation of the one to the last of the other. Of an offloaded share (`moved.activations.…`)
the list says itself when it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lifetimes import last_uses
from moe_overlap.plan.list_builder import Draft
from moe_overlap.plan.part_uses import part_of
from moe_overlap.tuner.cost.simulate import Ran

STAYING = ("parameters", "gradient", "state")
"""First words of buffers that outlive a step."""
HOST = "host"
Interval = tuple[str, float, float]
"""Buffer, and from when to when it is there."""


def live_bytes(ran: Sequence[Ran], bytes_of: Callable[[str], float]) -> list[tuple[float, float]]:
    """When memory changes, and the bytes from then on.

    Args:
        ran: one rank's part of a Simulation.
        bytes_of: bytes of a buffer, of `activations.…` as well.
    Returns:
        In order of time, from 0; the largest bytes are the peak.
    """
    changes: dict[float, float] = {0.0: 0.0}
    for name, start, end in intervals(ran):
        size = bytes_of(name)
        changes[start] = changes.get(start, 0.0) + size
        changes[end] = changes.get(end, 0.0) - size
    total = 0.0
    curve: list[tuple[float, float]] = []
    for time in sorted(changes):
        total += changes[time]
        if not curve or changes[time] != 0:
            curve.append((time, total))
    return curve


def intervals(ran: Sequence[Ran]) -> Iterator[Interval]:
    """When each buffer is there."""
    in_list = sorted(ran, key=lambda one: one.instruction.id)
    step = max((one.end for one in ran), default=0.0)
    ends = last_uses([one.instruction for one in in_list])
    there: dict[str, tuple[float, float]] = {}
    for one in in_list:
        i = one.instruction
        for name in dict.fromkeys((*i.reads, *i.writes)):
            word = name.partition(".")[0]
            if word == HOST:
                continue
            given = name in i.reads and name not in there
            start, end = there.get(name, (0.0 if given else one.start, one.end))
            there[name] = (start, max(end, one.end))
            if word in STAYING:
                there[name] = (0.0, step)
            elif name in ends[i.id]:
                yield (name, *there.pop(name))
    yield from ((name, start, end) for name, (start, end) in there.items())
    yield from _activations(in_list)


def _activations(in_list: Sequence[Ran]) -> Iterator[Interval]:
    spans: dict[str, tuple[float, float]] = {}
    for one in in_list:
        i: Instruction = one.instruction
        if i.micro_batch is not None and (part := part_of(Draft.of(i))):
            name = f"activations.{part}.m{i.micro_batch}"
            start, end = spans.get(name, (one.start, one.end))
            spans[name] = (min(start, one.start), max(end, one.end))
    yield from ((name, start, end) for name, (start, end) in spans.items())
