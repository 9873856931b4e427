"""Instructions of one rank for one step, their buffers, and the spans of their execution, as printable data.

A list is in issue order. Instructions of one channel run one after the other, in list order; different channels run
concurrently. An instruction starts when all of `after` have finished and its channel is free.

Channels: `compute`; `optimizer`, if each parameter group steps separately; one per process group (`ep`, `dp`); one per
direction of a stage boundary (`pp.S0>S1`, `pp.S0>S1.backward`: with a single one, two stages that both wait to send would
deadlock); one per copy direction (`h2d`, `d2h`).

Names. In instructions, drafts and spans `name` is the print form of an operator (operators.py) and `operator` its typed form.
`reads` and `writes` hold names of buffers; `BufferId` is the typed form of such a name and `parse_buffer` parses it. No other
file parses either kind of name.
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
"""Channels of the collectives inside operators. They have spans but no instructions: a list counts them as computation."""


class ScheduleError(Exception):
    """A list or an order that must not be executed: a bug of this project, never a user's mistake."""


class BufferRole(StrEnum):
    """The content of a buffer. A leading `d` marks the gradient of an activation."""

    TOKENS = "tokens"
    LABELS = "labels"
    HIDDEN = "h"
    """Hidden states that enter a layer, and cross a stage boundary before it."""
    ATTENDED = "a"
    """Hidden states after attention."""
    ROWS = "rows"
    """Routed rows, permuted for sending."""
    COUNTS = "counts"
    """Rows that this rank sends to each expert."""
    SPLITS = "splits"
    """Rows that each rank sends to each expert."""
    CAPACITY = "capacity"
    """The capacity that a gate has used so far, handed to the next partition."""
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
        """The role whose gradient this is; any other role returns itself."""
        return _DIFFERENTIATED.get(self, self)


_DIFFERENTIATED = {BufferRole(f"d{role}"): role for role in BufferRole if f"d{role}" in set(BufferRole)}


class Home(StrEnum):
    """The place of a buffer's copy of the content; its value is the first word of the name."""

    DEVICE = ""
    HOST = "host"
    """The offloaded share, on the host."""
    MOVED = "moved"
    """The offloaded share while it is on the device."""
    TILES = "tiles"
    """Tiles received from another stage, before an all-gather completes the tensor."""


@dataclass(frozen=True, slots=True)
class BufferId:
    """The name of a buffer, as data: `a.L3.m0.p1`, `gradient.L3`, `host.state.L3`, `saved.L3.attention.qkv.m0`.

    Attributes:
        subject: the owner of the content: a layer or parameter group, `mtp0.loss`, or, for the operands of a weight
            gradient, that gradient's name without its suffix. Empty for `tokens`, `labels`, `normed` and `loss`.
        micro_batch: None for content of a whole step.
        partition: the partition of the micro-batch; None for all of it.
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
        """The first word of the name: the home, or the role of a buffer on the device."""
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
        ScheduleError: not the name of a buffer.
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
    """The role of a buffer's name; None for the name of a tensor inside an operator, which is no buffer."""
    try:
        return parse_buffer(name).role
    except ScheduleError:
        return None


@cache
def whole_buffer(name: str) -> str:
    """`a.L3.m0.p1` -> `a.L3.m0`: the buffer without its partition."""
    return str(replace(parse_buffer(name), partition=None))


@cache
def stem_of(name: str) -> str:
    """`a.L3.m0.p1` -> `a.L3`: the buffer without its micro-batch and partition."""
    return str(replace(parse_buffer(name), micro_batch=None, partition=None))


@cache
def placed(buffer: str, micro_batch: int) -> str:
    """The name with this micro-batch; gradient sums over micro-batches stay as they are."""
    named = parse_buffer(buffer)
    return buffer if named.role is BufferRole.GRADIENT else str(replace(named, micro_batch=micro_batch))


@cache
def partition_of(buffer: str, index: int) -> str:
    """`a.L3.m0` -> `a.L3.m0.p1`: one partition of a buffer."""
    return str(replace(parse_buffer(buffer), partition=index))


@cache
def saved_for(gradient: OperatorId, micro_batch: int | None = None) -> str:
    """The buffer in which a backward instruction saves the operands of a deferred weight gradient."""
    return str(BufferId(BufferRole.SAVED, str(replace(gradient, phase=FORWARD)), micro_batch))


@cache
def reads_counts(reads: tuple[str, ...]) -> bool:
    """Whether an instruction that reads these buffers needs the counts of rows on the host, which decides sizes and splits."""
    return any(parse_buffer(name).role is BufferRole.SPLITS for name in reads)


@cache
def parse_access(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The buffers that an operator reads and writes, from the form `a.L3 shared.L3 -> h.L4`."""
    reads, arrow, writes = text.partition("->")
    assert arrow, text
    return tuple(reads.split()), tuple(writes.split())


@cache
def channel_group(channel: str) -> str:
    """`ep.counts` -> `ep`, `pp.S0>S1` -> `pp`: the kind of a channel, by which spans are grouped."""
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
        chunk: model chunk (virtual stage); None if it belongs to no pass.
        micro_batch: micro-batch of the step; None if it belongs to no pass.
        partition: partitions of the micro-batch, capacity chunks of its routed rows, or the bucket of a gradient reduction;
            empty: not cut.
        channel: the resource it occupies while it runs.
        reads, writes: buffers.
        bytes: planned bytes that leave the rank.
        peers: ranks at the other end of a point-to-point transfer.
        region: a piece of a boundary tensor as (first sample, end, first token, end), half open, in this rank's shard of the
            micro-batch; empty: all of the shard.
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
        """The typed form of its name; ConfigError if the name is no operator's."""
        return parse_operator(self.name, "instruction")

    @property
    def in_backward_pass(self) -> bool:
        """Whether it belongs to a backward pass, recomputation included."""
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
        """The kind of its channel, by which spans are grouped."""
        return channel_group(self.channel)


def _cells(instruction: Instruction) -> tuple[str, ...]:
    """The columns of a printed line."""

    def index(letter: str, number: int | None) -> str:
        return "-" if number is None else f"{letter}{number}"

    def many(values: Iterable[object]) -> str:
        return ",".join(map(str, values)) or "-"

    i = instruction
    place = (index("S", i.stage), index("c", i.chunk), index("m", i.micro_batch), "p" + many(i.partition))
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
    """The inverse of `to_json`; ConfigError for an entry of another form."""
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
    """The partition of the instruction; empty: not cut."""

    @property
    def operator(self) -> OperatorId:
        """The typed form of its name; ConfigError if the name is no operator's."""
        return parse_operator(self.name, "span")

    @property
    def place(self) -> tuple[str, str, int, int, tuple[int, ...]]:
        """Everything but the time."""
        return self.name, self.channel, self.chunk, self.micro_batch, self.partition


def operator_spans(spans: Sequence[Span]) -> list[Span]:
    """The spans with one per instruction: collectives inside operators are dropped, and the parts of their operators are merged.

    The wait for such a collective splits the compute span of its operator in two; the second part begins when the collective
    ends. Consecutive spans of one operator that are split for any other reason are not merged.
    """
    ends = {round(span.end * 1e9) for span in spans if span.channel in INSIDE}
    if not ends:
        return list(spans)
    merged: list[Span] = []
    computed = -1  # index of the latest compute span
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        if span.channel in INSIDE:
            continue
        if span.channel == COMPUTE:
            # In nanoseconds, as traces keep times.
            if computed >= 0 and merged[computed].place == span.place and round(span.start * 1e9) in ends:
                merged[computed] = replace(merged[computed], end=span.end)
                continue
            computed = len(merged)
        merged.append(span)
    return merged


def communication_seconds(spans: Sequence[Span]) -> tuple[float, float]:
    """Communication of a step.

    Returns:
        Seconds with communication, and the exposed ones among them, in which no compute span runs.
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
