"""Instructions of one rank for one step, their buffers, and the spans of their execution, as printable data.

A list is in issue order. Instructions of one channel start in list order, the next when the one before has finished;
different channels run at the same time. An instruction starts when all of `after` have finished and its channel is
free.

Channels: `compute`; `optimizer`, where parameter groups step by themselves; one per process group (`ep`, `dp`); one per
direction of a stage boundary (`pp.S0>S1`, `pp.S0>S1.backward`: on a single one, two stages that both wait to send would block
each other); one per copy direction (`h2d`, `d2h`).

Names. An instruction, a draft of it and a span carry the print form of an operator (operators.py) in `name`, and answer with the
typed one in `operator`. Buffers are named in `reads` and `writes`; `BufferId` is such a name as data, `parse_buffer` reads it. No
other file takes either apart.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from typing import Any, Literal, get_args

from moe_overlap.plan.operators import FORWARD, NUMBER, WEIGHT_GRADIENT, OperatorId, OperatorKind, parse_operator
from moe_overlap.plan.overlap import MAY_BE_MISSING
from moe_overlap.plan.serialize import as_values, read_record

Kind = Literal["compute", "weight-gradient", "collective", "point-to-point", "copy", "optimizer"]
KINDS: tuple[str, ...] = get_args(Kind)
COMPUTE, OPTIMIZER, TO_DEVICE, TO_HOST = "compute", "optimizer", "h2d", "d2h"
EXPERT, DATA, PIPELINE = "ep", "dp", "pp"
"""Groups of channels: all-to-alls between experts, collectives over replicas, transfers between stages."""
TENSOR, CONTEXT, EXPERT_TENSOR = "tp", "cp", "etp"
INSIDE = (TENSOR, CONTEXT, EXPERT_TENSOR)
"""Channels of the collectives inside operators, which have spans and no instructions: a list counts them as computation."""


class ScheduleError(Exception):
    """A list or an order that must not be run: our own mistake, never a user's."""


class BufferRole(StrEnum):
    """The content of a buffer. Gradients of what operators hand to each other carry a `d` in front."""

    TOKENS = "tokens"
    LABELS = "labels"
    HIDDEN = "h"
    """Hidden states that enter a layer, and cross a stage boundary before it."""
    ATTENDED = "a"
    """Hidden states behind attention."""
    ROWS = "rows"
    """Routed rows, permuted for sending."""
    COUNTS = "counts"
    """Rows that this rank sends to each expert."""
    SPLITS = "splits"
    """Rows that each rank sends to each expert."""
    CAPACITY = "capacity"
    """The state of a gate that hands capacity to the next partition."""
    RECEIVED = "received"
    COMPUTED = "computed"
    RETURNED = "returned"
    SHARED = "shared"
    """The output of the shared experts."""
    INNER = "inner"
    """The activated output of the first product inside fused kernels."""
    NORMED = "normed"
    LOSS = "loss"
    D_HIDDEN = "dh"
    D_ATTENDED = "da"
    D_ROWS = "drows"
    D_RECEIVED = "dreceived"
    D_COMPUTED = "dcomputed"
    D_RETURNED = "dreturned"
    D_SHARED = "dshared"
    D_INNER = "dinner"
    D_NORMED = "dnormed"
    SAVED = "saved"
    """Operands of a deferred weight gradient."""
    ACTIVATIONS = "activations"
    """Tensors that the forward pass of a micro-batch through a parameter group saves for its backward pass."""
    PARAMETERS = "parameters"
    WEIGHTS = "weights"
    """Gathered parameters."""
    GRADIENT = "gradient"
    """Weight gradients, summed over micro-batches."""
    D_WEIGHTS = "dweights"
    """Weight gradients of one micro-batch, before they are scattered."""
    STATE = "state"
    """Optimizer state."""
    NORM = "norm"

    @property
    def differentiated(self) -> BufferRole:
        """The role of which this is the gradient; a role that is no gradient is its own."""
        return _DIFFERENTIATED.get(self, self)


_DIFFERENTIATED = {BufferRole(f"d{role}"): role for role in BufferRole if f"d{role}" in set(BufferRole)}


class Home(StrEnum):
    """Which copy of the content a buffer is; its value is the first word of the name."""

    DEVICE = ""
    HOST = "host"
    """The share that is offloaded, on the host."""
    MOVED = "moved"
    """The same share while it is on the device."""
    TILES = "tiles"
    """The tiles that have arrived of a tensor that ranks complete for each other."""


@dataclass(frozen=True, slots=True)
class BufferId:
    """The name of a buffer, as data: `a.L3.m0.p1`, `gradient.L3`, `host.state.L3`, `saved.L3.attention.qkv.m0`.

    Attributes:
        subject: what the content belongs to: a layer or parameter group, `mtp0.loss`, or, where it is saved for a weight
            gradient, that gradient's name without its suffix. Empty where the role says it all.
        micro_batch: None where the content is of a whole step.
        partition: the part of a micro-batch; None for the whole.
    """

    role: BufferRole
    subject: str = ""
    micro_batch: int | None = None
    partition: int | None = None
    home: Home = Home.DEVICE

    def __str__(self) -> str:
        micro_batch = "" if self.micro_batch is None else f"m{self.micro_batch}"
        partition = "" if self.partition is None else f"p{self.partition}"
        return ".".join(word for word in (self.home, self.role, self.subject, micro_batch, partition) if word)

    @property
    def word(self) -> str:
        """The first word of the name: the home where that is not the device, else the role."""
        return self.home or self.role

    @property
    def gradient(self) -> OperatorId:
        """The weight gradient that a saved buffer is for; the inverse of `saved_for`."""
        assert self.role is BufferRole.SAVED, self
        return parse_operator(f"{self.subject}.{WEIGHT_GRADIENT}", "buffer")


_BUFFER = re.compile(rf"(?:({'|'.join(filter(None, Home))})\.)?([a-z]+)(?:\.(.+?))??(?:\.m{NUMBER})?(?:\.p{NUMBER})?")
_SUBJECT = re.compile(rf"L{NUMBER}|mtp{NUMBER}(\.loss)?|embedding|head|norm")


@cache
def parse_buffer(name: str) -> BufferId:
    """The buffer of a name; the inverse of `str`.

    Raises:
        ScheduleError: no buffer is called so.
    """
    match = _BUFFER.fullmatch(name)
    if match is None or match[2] not in set(BufferRole):
        raise ScheduleError(f"{name!r} is not a buffer name such as a.L3.m0.p1, gradient.L3 or host.state.head")
    micro_batch, partition = (None if number is None else int(number) for number in match.groups()[3:])
    buffer = BufferId(BufferRole(match[2]), match[3] or "", micro_batch, partition, Home(match[1] or ""))
    is_known = not buffer.subject or buffer.role is BufferRole.SAVED or bool(_SUBJECT.fullmatch(buffer.subject))
    if not is_known or str(buffer) != name:
        raise ScheduleError(f"{name!r} is not a buffer name: it belongs to no layer or parameter group")
    if buffer.role is BufferRole.SAVED and buffer.subject:
        parse_operator(str(buffer.gradient), "buffer")
    return buffer


@cache
def buffer_role(name: str) -> BufferRole | None:
    """The role of a name that may also be that of something inside an operator, which has none."""
    try:
        return parse_buffer(name).role
    except ScheduleError:
        return None


@cache
def whole_buffer(name: str) -> str:
    """`a.L3.m0.p1` -> `a.L3.m0`: the buffer of which this is a partition."""
    return str(replace(parse_buffer(name), partition=None))


@cache
def stem_of(name: str) -> str:
    """`a.L3.m0.p1` -> `a.L3`: the content, of whichever micro-batch and partition."""
    return str(replace(parse_buffer(name), micro_batch=None, partition=None))


@cache
def placed(buffer: str, micro_batch: int) -> str:
    """The name with its micro-batch; sums over micro-batches have none."""
    named = parse_buffer(buffer)
    return buffer if named.role is BufferRole.GRADIENT else str(replace(named, micro_batch=micro_batch))


@cache
def partition_of(buffer: str, index: int) -> str:
    """`a.L3.m0` -> `a.L3.m0.p1`: one partition of a buffer."""
    return str(replace(parse_buffer(buffer), partition=index))


@cache
def saved_for(gradient: OperatorId, micro_batch: int | None = None) -> str:
    """The buffer that a backward instruction leaves for a weight gradient."""
    return str(BufferId(BufferRole.SAVED, str(replace(gradient, phase=FORWARD)), micro_batch))


@cache
def reads_counts(reads: tuple[str, ...]) -> bool:
    """Whether who reads these buffers needs the counts of rows on the host: only there are sizes and splits decided."""
    return any(parse_buffer(name).role is BufferRole.SPLITS for name in reads)


@cache
def parse_access(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The buffers that an operator reads and writes, from the form `a.L3 shared.L3 -> h.L4`."""
    reads, arrow, writes = text.partition("->")
    assert arrow, text
    return tuple(reads.split()), tuple(writes.split())


@cache
def channel_group(channel: str) -> str:
    """`ep.counts` -> `ep`, `pp.S0>S1` -> `pp`: the kind of a channel, under which spans record it."""
    return channel.partition(".")[0]


def boundary_channel(transfer: OperatorId) -> str:
    """`pp.S0>S1.backward`: one channel for each direction of a stage boundary."""
    return f"{PIPELINE}.{transfer.boundary}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One entry of a list.

    Attributes:
        id: place in the list, from 0.
        name: operator name, see operators.py.
        stage: pipeline stage of the rank.
        chunk: virtual stage, None where it does not apply, as below.
        micro_batch: micro-batch of the step.
        partition: pieces of the micro-batch or of its routed rows, or the chunk of a gradient reduction; empty: not cut.
        channel: what it occupies while it runs.
        reads, writes: buffers.
        bytes: planned bytes that leave the rank; 0 where nothing does.
        peers: ranks at the other end of a point-to-point transfer.
        region: of a piece of a boundary tensor the first sample and the one behind the last, then the same of its tokens, among
            those of the micro-batch that this rank has; empty: the whole.
        after: ids that must have finished.
    """

    id: int
    kind: Kind
    name: str
    stage: int
    chunk: int | None = None
    micro_batch: int | None = None
    partition: tuple[int, ...] = ()
    channel: str = COMPUTE
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    bytes: int = 0
    peers: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    region: tuple[int, ...] = field(default=(), metadata=MAY_BE_MISSING)

    def __str__(self) -> str:
        return " ".join(_cells(self))

    @property
    def operator(self) -> OperatorId:
        """Its name, taken apart; ConfigError where it is no operator's."""
        return parse_operator(self.name, "instruction")

    @property
    def in_backward_pass(self) -> bool:
        """Whether it belongs to a backward pass."""
        return self.operator.in_backward_pass

    @property
    def sends(self) -> bool:
        """Whether it sends over a stage boundary."""
        return self.kind == "point-to-point" and self.operator.kind is OperatorKind.SEND

    @property
    def receives(self) -> bool:
        """Whether it receives over a stage boundary."""
        return self.kind == "point-to-point" and self.operator.kind is OperatorKind.RECEIVE

    @property
    def channel_group(self) -> str:
        """The kind of its channel, under which spans record it."""
        return channel_group(self.channel)


def _cells(instruction: Instruction) -> tuple[str, ...]:
    """The columns of a printed line."""

    def one(letter: str, number: int | None) -> str:
        return "-" if number is None else f"{letter}{number}"

    def many(values: Iterable[object]) -> str:
        return ",".join(map(str, values)) or "-"

    i = instruction
    place = (one("S", i.stage), one("c", i.chunk), one("m", i.micro_batch), "p" + many(i.partition))
    buffers = (many(i.reads), "->", many(i.writes))
    region = f"[{i.region[0]}:{i.region[1]},{i.region[2]}:{i.region[3]}]" if i.region else ""
    ends = (f"{i.bytes}B", f"@{many(i.peers)}{region}", "after", many(i.after))
    return (str(i.id), i.kind, i.name, *place, i.channel, *buffers, *ends)


def format_list(instructions: Sequence[Instruction]) -> str:
    """A list as aligned lines."""
    rows = [_cells(instruction) for instruction in instructions]
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = {0, 11}  # id and bytes
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        lines.append(" ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(cells)).rstrip())
    return "".join(line + "\n" for line in lines)


def to_json(instructions: Iterable[Instruction]) -> list[Any]:
    """A list as plain JSON values."""
    return [as_values(instruction) for instruction in instructions]


def from_json(values: Iterable[Any]) -> tuple[Instruction, ...]:
    """The inverse of `to_json`; ConfigError where an entry has another form."""
    entries = enumerate(values)
    return tuple(read_record(Instruction, value, "instructions", f"[{index}]") for index, value in entries)


COMPUTING = (COMPUTE, OPTIMIZER)
"""Channels that keep the device busy; the others move bytes."""


@dataclass(frozen=True, slots=True)
class Span:
    """One executed instruction: measured by the runtime's recorder or simulated by the tuner; seconds since the step's start.

    A collective inside an operator (channels INSIDE) has the name of that operator.
    """

    name: str
    channel: str
    chunk: int
    micro_batch: int
    start: float
    end: float
    partition: tuple[int, ...] = ()
    """The partition of the instruction; empty where nothing is cut."""

    @property
    def operator(self) -> OperatorId:
        """Its name, taken apart; ConfigError where it is no operator's."""
        return parse_operator(self.name, "span")

    @property
    def place(self) -> tuple[str, str, int, int, tuple[int, ...]]:
        """Everything but the time."""
        return self.name, self.channel, self.chunk, self.micro_batch, self.partition


def operator_spans(spans: Sequence[Span]) -> list[Span]:
    """The spans as the instruction list has them: without the collectives inside operators, whose operators are whole again.

    A wait for such a collective splits a compute span in two: the second begins where the collective ends. Spans of an operator
    that stand behind one another for another reason stay apart.
    """
    ends = {round(span.end * 1e9) for span in spans if span.channel in INSIDE}
    if not ends:
        return list(spans)
    whole: list[Span] = []
    computed = -1  # index of the latest compute span
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        if span.channel in INSIDE:
            continue
        if span.channel == COMPUTE:
            # In nanoseconds, as traces keep times.
            if computed >= 0 and whole[computed].place == span.place and round(span.start * 1e9) in ends:
                whole[computed] = replace(whole[computed], end=span.end)
                continue
            computed = len(whole)
        whole.append(span)
    return whole


def communication_seconds(spans: Sequence[Span]) -> tuple[float, float]:
    """Communication of a step.

    Returns:
        Seconds in which communication ran, and those of them in which no compute span covered it (exposed).
    """
    communication = _union((s.start, s.end) for s in spans if s.channel not in COMPUTING)
    compute = _union((s.start, s.end) for s in spans if s.channel in COMPUTING)
    covered = sum(max(0.0, min(e1, e2) - max(s1, s2)) for s1, e1 in communication for s2, e2 in _near(compute, s1, e1))
    total = sum(end - start for start, end in communication)
    return total, total - covered


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _near(intervals: list[tuple[float, float]], start: float, end: float) -> list[tuple[float, float]]:
    first = bisect.bisect_left(intervals, (start, start))
    last = bisect.bisect_right(intervals, (end, end))
    return intervals[max(0, first - 1) : last]
