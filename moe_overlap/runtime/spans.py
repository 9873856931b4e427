"""The span recorder: which operator ran when, under the names of the instruction list; and the seconds of a step's phases.

One recorder per rank is handed to the layers, the pipeline's communicator and the optimizer. Work that blocks the rank forms
one serial line: `begin` ends the span before it. Work in the background has spans of its own (`background`). On a CPU a span
costs two clock reads. On CUDA an event is recorded on the current stream, and costs the host a call of the driver when it is
recorded and another when it is read: a step whose spans nobody asks for records none. Events that the device has reached are read
where the host is about to wait for it anyway (`read_reached`), the rest at the end of the step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_overlap.plan.instructions import COMPUTE, DATA, EXPERT, PIPELINE, Instruction, Span, operator_spans
from moe_overlap.plan.operators import EXCHANGE_PARTS, FORWARD, RECOMPUTE, OperatorKind, parse_operator


@dataclass(slots=True)
class _Open:
    """A span that has not ended."""

    name: str
    channel: str
    chunk: int
    micro_batch: int
    partition: tuple[int, ...]
    start: Any

    @property
    def place(self) -> tuple[str, str, int, int, tuple[int, ...]]:
        """Everything but the time: work at the same place continues the span."""
        return self.name, self.channel, self.chunk, self.micro_batch, self.partition

    def beginning(self, channel: str, start: Any) -> _Open:
        """A span of the same operator that begins now; `dataclasses.replace` takes several times as long."""
        return _Open(self.name, channel, self.chunk, self.micro_batch, self.partition, start)


class HostClock:
    """Wall clock of the host, for work that has finished when the call returns."""

    queues = False
    """Whether a mark is reached later than it is made."""

    def start_step(self) -> None:
        """Nothing to prepare: marks are numbers."""

    def mark(self) -> float:
        """Read the clock."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Seconds between two marks."""
        return end - start

    def is_reached(self, mark: float) -> bool:
        """Every mark is readable at once."""
        return True

    def finish(self) -> None:
        """Do nothing: every mark has been reached."""


class CudaClock:
    """Events on the current CUDA stream, which every step uses again. Not yet run on hardware.

    Args:
        library: torch.cuda, or a stand-in with its `Event` (`record`, `query`, `elapsed_time`) and `synchronize`.
    """

    queues = True

    def __init__(self, library: Any = torch.cuda) -> None:
        self._library = library
        self._events: list[Any] = []
        self._used = 0

    def start_step(self) -> None:
        """Use the events of the previous step again: they have been read."""
        self._used = 0

    def mark(self) -> Any:
        """Record an event on the current stream."""
        if self._used == len(self._events):
            self._events.append(self._library.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two events, once the stream has reached both."""
        return start.elapsed_time(end) / 1e3

    def is_reached(self, mark: Any) -> bool:
        """Whether the stream has reached an event; the host does not wait."""
        reached: bool = mark.query()
        return reached

    def finish(self) -> None:
        """Wait until every mark has been reached: soon, since the host has already read the norm and the loss."""
        self._library.synchronize()


class SpanRecorder:
    """Records the spans of one step on one rank.

    Args:
        inside: channels of collectives inside operators that are handed to `start_inside` (layer_collectives.py).
    Attributes:
        covered: channels whose work is recorded; other communication counts as compute.
    """

    def __init__(self, clock: HostClock | CudaClock | None = None, inside: Sequence[str] = ()) -> None:
        self.covered = (EXPERT, PIPELINE, DATA, *inside)
        self.clock = clock or (CudaClock() if torch.cuda.is_available() else HostClock())
        self.chunk, self.micro_batch = 0, 0
        self._partition: tuple[int, ...] = ()
        self._in_backward = False
        self._current: _Open | None = None
        self._raw: list[tuple[_Open, Any]] = []
        self._read: list[Span] = []
        self._background: list[_Open] = []
        self._origin: Any = None
        self._next_records = self._records = True

    def ask(self, reads_spans: bool) -> bool:
        """Say whether anybody reads the spans of the next steps.

        Returns:
            Whether they are recorded: on a CPU always, as they cost next to nothing there.
        """
        self._next_records = reads_spans or not self.clock.queues
        return self._next_records

    def start_step(self) -> None:
        """Drop the spans of the step before, and count seconds from now on."""
        self._raw.clear()
        self._read.clear()
        self._background.clear()
        self.clock.start_step()
        self._current, self._in_backward = None, False
        self._records = self._next_records
        self._origin = self._mark()

    def _mark(self) -> Any:
        return self.clock.mark() if self._records else None

    @property
    def operation(self) -> str | None:
        """The operator or communication that runs now, or else the one that ended last; None before the first of a step."""
        if self._current is not None:
            return self._current.name
        if self._background:
            return self._background[-1].name
        return self._raw[-1][0].name if self._raw else None

    def forward(self, chunk: int, micro_batch: int) -> None:
        """Note that the forward pass of one micro-batch starts on this rank."""
        self.chunk, self.micro_batch, self._in_backward = chunk, micro_batch, False
        self._partition = ()

    def place(self, chunk: int, micro_batch: int, partition: tuple[int, ...] = ()) -> None:
        """Assign the next spans to this chunk and micro-batch; their names are complete, in backward passes too."""
        self.chunk, self.micro_batch, self._in_backward = chunk, micro_batch, False
        self._partition = partition

    def begin(self, name: str, channel: str = COMPUTE) -> None:
        """End the current span and begin the next. Forward work met during a backward pass is a recomputation."""
        if self._in_backward and channel in (COMPUTE, EXPERT) and parse_operator(name).phase is FORWARD:
            name = str(replace(parse_operator(name), phase=RECOMPUTE))
        self._switch(name, channel)

    def _switch(self, name: str, channel: str) -> None:
        current = self._current
        place = (name, channel, self.chunk, self.micro_batch, self._partition)
        # A layer that is entered twice in a row (a hook inside a recomputed module) continues its span.
        if current is not None and current.place == place:
            return
        now = self._mark()
        if current is not None:
            self._raw.append((current, now))
        self._current = _Open(*place, now)

    def end(self) -> None:
        """End the current span without beginning another."""
        if self._current is not None:
            self._raw.append((self._current, self._mark()))
            self._current = None

    @contextlib.contextmanager
    def span(self, name: str, channel: str) -> Iterator[None]:
        """Record a block of synchronous work as one span."""
        self._switch(name, channel)
        try:
            yield
        finally:
            self.end()

    def place_at(self, instruction: Instruction) -> None:
        """The next spans belong to the chunk, micro-batch and partition of an instruction."""
        self.place(instruction.chunk or 0, instruction.micro_batch or 0, instruction.partition)

    def computing(self, instruction: Instruction) -> None:
        """An instruction of a list begins to compute: called where its operator starts, not where the list is read."""
        self.place_at(instruction)
        self.begin(instruction.name)

    def started(self, instruction: Instruction) -> Any:
        """A communication of a list starts now; pass the result to `ending`."""
        self.place_at(instruction)
        return self.background(instruction.name, instruction.channel_group)

    def ending(self, opened: Any, wait: Callable[[], None]) -> Callable[[], None]:
        """Wait for the communication of `started`, and end its span.

        On a GPU the end is marked at once on the communication's stream, which reaches the mark when the communication ends. On
        a CPU gloo does not report the end of a transfer before the wait: there the span ends with the wait.
        """
        if self.clock.queues:
            self.finish_background(opened)
            return wait

        def finish() -> None:
            wait()
            self.finish_background(opened)

        return finish

    def background(self, name: str, channel: str) -> Any:
        """Start a span that runs beside the current one; pass the result to `finish_background`."""
        opened = _Open(name, channel, self.chunk, self.micro_batch, self._partition, self._mark())
        self._background.append(opened)
        return opened

    def finish_background(self, opened: Any) -> None:
        """End a span of `background`: its work has been waited for. A span of an earlier step is dropped."""
        if any(opened is other for other in self._background):
            self._background = [other for other in self._background if other is not opened]
            self._raw.append((opened, self._mark()))

    def start_inside(self, channel: str, blocks: bool) -> Any:
        """Start a collective inside the operator that computes now; pass the result to `wait_inside`.

        Args:
            blocks: whether the caller waits at once, so that the operator's span ends here and continues after the wait.
        Returns:
            None if the channel is not covered, and where no operator computes: the collective is then part of the
                communication that is being recorded.
        """
        current = self._current
        if current is None or current.channel != COMPUTE or channel not in self.covered:
            return None
        now = self._mark()
        opened = current.beginning(channel, now)
        if blocks:
            self._raw.append((current, now))
            self._current = opened
        else:
            self._background.append(opened)
        return opened

    def wait_inside(self, opened: Any, wait: Callable[..., Any], *timeout: Any) -> Any:
        """Wait for a collective of `start_inside` and end its span; the span of the waiting operator continues after it."""
        waiting, blocks = self._current, self._current is opened
        if not blocks:
            if not any(opened is other for other in self._background):
                return wait(*timeout)  # of an earlier step, or waited for before
            if waiting is not None:
                self._raw.append((waiting, self._mark()))
                self._current = None
        answer = wait(*timeout)
        now = self._mark()
        self._raw.append((opened, now))
        if not blocks:
            self._background = [other for other in self._background if other is not opened]
        if waiting is not None:
            self._current = waiting.beginning(COMPUTE if blocks else waiting.channel, now)
        return answer

    def on_backward(self, name: str, *tensors: Tensor) -> Any:
        """Pass tensors through unchanged; when their gradients arrive, `name` begins, for the micro-batch that is current now.

        Returns:
            The tensor, or a tuple of several.
        """
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return tensors[0] if len(tensors) == 1 else tensors
        passed = _BackwardMark.apply(self, name, self.chunk, self.micro_batch, *tensors)
        return passed[0] if len(tensors) == 1 else passed

    def begin_backward(self, name: str, chunk: int, micro_batch: int) -> None:
        """Begin a backward operator; called by the marks of `on_backward`."""
        self.chunk, self.micro_batch, self._in_backward = chunk, micro_batch, True
        self._partition = ()
        self._switch(name, EXPERT if parse_operator(name).kind in EXCHANGE_PARTS else COMPUTE)

    def spans(self) -> list[Span]:
        """End the step and return its spans in order of their start; background work that nobody waited for ends now.

        Returns:
            None of a step that is not recorded.
        """
        self.end()
        for opened in list(self._background):
            self.finish_background(opened)
        if not self._records:
            return []
        self.read_reached()
        self.clock.finish()
        self.read_reached()
        assert len(self._read) == len(self._raw), "the device has reached every mark"
        return sorted(self._read, key=lambda span: (span.start, span.end))

    def read_reached(self) -> None:
        """Read the spans that have ended, in order of recording, up to the first that the device has not reached.

        Called where the host waits for the device next: reading them costs no time of the device, which has work then.
        """
        seconds = self.clock.seconds
        for opened, end in self._raw[len(self._read) :] if self._records else ():
            if not self.clock.is_reached(end):
                return
            start_seconds, end_seconds = seconds(self._origin, opened.start), seconds(self._origin, end)
            place = opened.name, opened.channel, opened.chunk, opened.micro_batch
            self._read.append(Span(*place, start_seconds, end_seconds, opened.partition))


class _BackwardMark(torch.autograd.Function):
    """Identity whose backward tells the recorder that an operator's backward begins."""

    @staticmethod
    def forward(ctx: Any, recorder: SpanRecorder, name: str, chunk: int, micro_batch: int, *tensors: Tensor) -> Any:
        ctx.mark = (recorder, name, chunk, micro_batch)
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)  # no view: pipelines free their outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        recorder, name, chunk, micro_batch = ctx.mark
        recorder.begin_backward(name, chunk, micro_batch)
        return (None, None, None, None, *gradients)


PHASE_OF_CHANNEL = {EXPERT: "expert-exchange", PIPELINE: "pipeline-exchange"}
"""Communication inside the forward-backward phase: channel -> timer."""
TIMER_OF = {
    OperatorKind.OPTIMIZER: "optimizer",
    OperatorKind.NORM: "optimizer",
    OperatorKind.GRADIENTS: "all-grads-sync",
    OperatorKind.PARAMETERS: "params-all-gather",
}


def phase_seconds(spans: Iterable[Span], level: int) -> dict[str, float]:
    """Add up the timers of one step on one rank, under the names of Megatron-LM's timers.

    Args:
        level: of --timing-log-level. 1: `forward-backward`, from the first operator to the last; `all-grads-sync`;
            `optimizer`, norm and clipping included; `params-all-gather`. 2: also the parts of the first, which may overlap:
            `forward-compute` (with recomputation), `backward-compute` (with weight gradients), `expert-exchange` and
            `pipeline-exchange`; the last two have no equal upstream.
    Returns:
        Name -> seconds; a phase that the rank does not have is left out.
    """
    seconds: dict[str, float] = {}
    first, last = float("inf"), 0.0
    # Megatron-LM's timers count the collectives of tensor and context ranks as computation.
    spans = operator_spans(list(spans)) if level else []
    # Only the norm waits for sends: their spans reach into the update, and their phase does not.
    update = min((span.start for span in spans if span.operator.is_update), default=float("inf"))
    for span in spans:
        if span.operator.kind in TIMER_OF:
            names, end = [TIMER_OF[span.operator.kind]], span.end
        else:
            end = min(span.end, update)
            first, last = min(first, span.start), max(last, end)
            seconds["forward-backward"] = last - first
            names = [_phase_of(span)] if level > 1 else []
        for name in names:
            seconds[name] = seconds.get(name, 0.0) + end - span.start
    return seconds


def _phase_of(span: Span) -> str:
    if span.channel != COMPUTE:
        return PHASE_OF_CHANNEL.get(span.channel, span.channel)
    operator = span.operator
    # Recomputation runs in the backward pass, but Megatron-LM's timer of forward computation counts it, too.
    is_backward = operator.in_backward_pass and operator.phase is not RECOMPUTE
    return "backward-compute" if is_backward else "forward-compute"
