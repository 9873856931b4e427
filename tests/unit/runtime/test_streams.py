"""Streams of the executor on stand-ins: who waits for whom, what the allocator is told, and where spans end."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_overlap.plan.instructions import COMPUTE, Instruction
from moe_overlap.plan.lowering.lifetimes import stream_of, uses_to_record
from moe_overlap.plan.lowering.residency import BlockLimits
from moe_overlap.plan.operators import COUNT, DISPATCH, EXPERTS, GATE
from moe_overlap.runtime import groups
from moe_overlap.runtime.dispatch.wire import AllToAll
from moe_overlap.runtime.executor.streams import PRIORITIES, ChannelStreams
from moe_overlap.runtime.spans import CudaClock, SpanRecorder
from tests.unit.plan import plan_samples
from tests.unit.plan.printed_lists import parse_list
from tests.unit.runtime.fake_ranks import executor_of, job_of, two_ranks
from tests.unit.runtime.test_host_waits import WITHOUT_COUNTS

__all__ = ["two_ranks"]
RUN = "--moe-overlap-partitions 2 --defer-weight-gradients --moe-overlap-range around"


class Event:
    """A CUDA event: it knows what its stream had been given when it was recorded, and its time."""

    def __init__(self, library: Library) -> None:
        self.library, self.known, self.time = library, frozenset[int](), 0.0
        library.events += 1

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.library.current
        self.known = frozenset(stream.known)
        self.time = stream.time

    def synchronize(self) -> None:
        self.library.host |= self.known

    def query(self) -> bool:
        return self.time <= self.library.reached

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query(), "CUDA raises for events that the device has not reached"
        self.library.read += 1
        return (end.time - self.time) * 1e3


class Stream:
    """A CUDA stream: the instructions that have ended before what it is given next."""

    def __init__(self, library: Library, priority: int = 0) -> None:
        self.library, self.priority = library, priority
        self.known: set[int] = set()
        self.time = 0.0

    def wait_event(self, event: Event) -> None:
        self.known |= event.known
        self.time = max(self.time, event.time)

    def wait_stream(self, other: Stream) -> None:
        self.known |= other.known
        self.time = max(self.time, other.time)
        self.library.whole_waits.append((self, other))


class Library:
    """A stand-in for torch.cuda."""

    def __init__(self) -> None:
        self.events = self.synchronized = self.read = 0
        self.reached = float("inf")
        self.host: set[int] = set()
        """Instructions that have ended when the host goes on."""
        self.whole_waits: list[tuple[Stream, Stream]] = []
        self.current = Stream(self)

    def Stream(self, priority: int = 0) -> Stream:  # noqa: N802
        return Stream(self, priority)

    def Event(self, enable_timing: bool = False) -> Event:  # noqa: N802
        return Event(self)

    def current_stream(self) -> Stream:
        return self.current

    def synchronize(self) -> None:
        self.synchronized += 1
        self.reached = float("inf")

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


def golden() -> tuple[Instruction, ...]:
    return parse_list((plan_samples.GOLDEN / "pp2_ep2_ahead_rank0.txt").read_text())


def issue(streams: ChannelStreams, library: Library, instructions: Sequence[Instruction]) -> dict[int, frozenset[int]]:
    """Run a list of nothing, transfers on streams of NCCL's; what has ended when each instruction starts."""
    ended: dict[int, frozenset[int]] = {}
    under_way: dict[int, Instruction] = {}

    def end(numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in under_way:
                with streams.ending(under_way.pop(number)):
                    library.current.known.add(number)
                    library.current.time += 1

    streams.begin(instructions)
    for i in instructions:
        end(i.after)
        with streams.running(i):
            ended[i.id] = frozenset(library.current.known)
            if i.kind == "point-to-point":
                under_way[i.id] = i
            else:
                library.current.known.add(i.id)
                library.current.time += 1
    end(list(under_way))
    streams.finish()
    return ended


def test_streams_wait_for_what_the_list_names() -> None:
    made, library = golden(), Library()
    streams = ChannelStreams(library)
    computing = library.current
    ended = issue(streams, library, made)
    assert all(set(i.after) <= ended[i.id] for i in made)
    assert computing.known == {i.id for i in made}, "the next step comes behind everything"
    # A send waits for its own gate alone, not for what computes beside it.
    first_send = next(i for i in made if i.operator.kind is DISPATCH)
    second_gate = next(i for i in made if i.operator.kind is GATE and i.partition == (1,))
    assert second_gate.id < first_send.id and second_gate.id not in ended[first_send.id]
    last_send = next(i for i in made if i.operator.kind is DISPATCH and i.partition == (1,))
    experts = next(i for i in made if i.operator.kind is EXPERTS)
    assert experts.id < last_send.id and experts.id not in ended[last_send.id]


def test_no_wait_passes_through_the_computing_stream() -> None:
    made, library = golden(), Library()
    computing = library.current
    streams = ChannelStreams(library)
    streams.begin(made)
    library.whole_waits.clear()  # a step begins behind the one before
    for i in made:
        with streams.running(i):
            pass
    # Only the update waits for a whole channel; nobody waits for all that computes.
    assert all(waiting is computing for waiting, _ in library.whole_waits)
    assert len(library.whole_waits) <= sum(i.operator.is_update for i in made)


def test_events_are_used_again_and_priorities_are_those_of_the_table() -> None:
    made, library = golden(), Library()
    streams = ChannelStreams(library)
    issue(streams, library, made)
    events = library.events
    assert 0 < events < len(made)
    issue(streams, library, made)
    assert library.events == events
    given = {name: stream.priority for name, stream in streams._streams.items()}
    assert given["ep"] == given["ep.counts"] == given["pp.S0>S1"] == PRIORITIES["ep"] < given[COMPUTE] == 0


@pytest.mark.usefixtures("two_ranks")
def test_the_executor_issues_every_all_to_all_on_its_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    runner, instructions, feed = executor_of(RUN)
    streams = ChannelStreams(library)
    runner._streams = streams
    computing, told, sent = library.current, [], []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: told.append(stream))
    answered = AllToAll._start_on_host

    def noted(wire: AllToAll, *arguments: Any) -> Any:
        sent.append((arguments[-1], library.current))
        return answered(wire, *arguments)

    monkeypatch.setattr(AllToAll, "_start_on_host", noted)
    runner.run(instructions, feed, 0)
    listed = [i for i in instructions if i.kind == "collective" and i.operator.layer is not None]
    by_channel = streams._streams
    counts = [stream for name, stream in sent if name.endswith("count")]
    rows = [stream for name, stream in sent if "dispatch" in name or "combine" in name]
    assert set(counts) == {by_channel["ep.counts"]} and set(rows) == {by_channel["ep"]}
    assert len(counts) == sum(i.operator.kind is COUNT for i in listed)
    # Told of every use that the lifetimes name, each on the stream that uses it.
    named = [by_channel[stream_of(i)] for i in instructions for _ in uses_to_record(instructions).get(i.id, ())]
    assert len(told) >= len(listed) and len(told) <= len(named)
    assert library.current is computing


def test_a_span_on_a_device_ends_where_the_communication_ended() -> None:
    """A transfer of a second that is waited for after four has a span of a second, and its events serve the next step."""
    library = Library()
    recorder = SpanRecorder(CudaClock(library))
    made = golden()
    send = next(i for i in made if i.operator.kind is DISPATCH)
    wire = Stream(library)
    for _ in range(2):
        recorder.start_step()
        with library.stream(wire):
            span = recorder.started(send)
            wire.time += 1
            wait = recorder.ending(span, lambda: None)
        recorder.computing(made[4])
        library.current.time += 4
        recorder.end()
        wait()
        (sent,) = [span for span in recorder.spans() if span.channel == "ep"]
        assert sent.end - sent.start == pytest.approx(1)
        events = library.events
    assert library.events == events == 5  # the start of the step, and two of each span


def test_a_collective_inside_an_operator_splits_it_on_a_device() -> None:
    """Two seconds of a collective between two of one second of its operator; two events, which serve the next step, too."""
    library = Library()
    recorder = SpanRecorder(CudaClock(library), inside=("tp",))
    gate = next(i for i in golden() if i.kind == "compute")
    for _ in range(2):
        recorder.start_step()
        recorder.computing(gate)
        library.current.time += 1
        opened = recorder.start_inside("tp", blocks=True)
        library.current.time += 2
        recorder.wait_inside(opened, lambda: None)
        library.current.time += 1
        spans = recorder.spans()
        assert [(span.channel, span.end - span.start) for span in spans] == [
            ("compute", pytest.approx(1)),
            ("tp", pytest.approx(2)),
            ("compute", pytest.approx(1)),
        ]
        events = library.events
    assert library.events == events == 5  # the start of the step, two of the operator and two of the collective


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("name", [*WITHOUT_COUNTS, "counts"])
def test_the_host_is_two_layers_ahead_at_most(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a pass through a layer begins, the device has begun the one two before; the host waits for nothing later."""
    library = Library()
    runner, instructions, feed = executor_of(WITHOUT_COUNTS.get(name, RUN))
    streams = runner._streams = ChannelStreams(library)
    begun: dict[Any, int] = {}
    ahead: list[int] = []
    running = streams.running
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)

    @contextlib.contextmanager
    def noted(i: Instruction) -> Iterator[None]:
        with running(i):
            layer, m = i.operator.layer, i.micro_batch
            key = layer, m, i.in_backward_pass
            if i.kind == "compute" and None not in key and key not in begun:
                ahead.append(sum(number not in library.host for number in begun.values()))
                begun[key] = i.id
            yield
            library.current.known.add(i.id)

    streams.running = noted  # type: ignore[method-assign]
    for _ in range(2):
        begun.clear()
        ahead.clear()
        for ended in (library.host, *(stream.known for stream in streams._streams.values())):
            ended.clear()
        runner.run(instructions, feed, 0)
        # Where counts travel the host waits for these in every layer, and for no event.
        assert ahead == ([0, 1, 1, 1, 1, 1, 1, 1] if name in WITHOUT_COUNTS else [*range(8)])


def test_events_are_read_as_the_device_reaches_them() -> None:
    """Where the host is about to wait: three spans of a second, of which the device has ended one, then two."""
    library = Library()
    recorder = SpanRecorder(CudaClock(library))
    recorder.start_step()
    for name in ("L0.attention", "L0.mlp", "L1.attention"):
        with recorder.span(name, COMPUTE):
            library.current.time += 1
    for reached, read in ((1.5, 2), (2.5, 4), (2.5, 4)):
        library.reached = reached
        recorder.read_reached()
        assert (library.read, library.synchronized) == (read, 0)
    assert [(span.name, span.start, span.end) for span in recorder.spans()] == [
        ("L0.attention", 0, 1),
        ("L0.mlp", 1, 2),
        ("L1.attention", 2, 3),
    ]
    assert (library.read, library.synchronized) == (6, 1)
    recorder.start_step()
    assert recorder.spans() == []


def loop_of(flags: str, library: Library) -> tuple[Any, Any]:
    """A training loop whose spans are events of a stand-in for CUDA, and its micro-batches."""
    from megatron.training.checkpoint.checkpointing import Progress
    from megatron.training.training import TrainingLoop

    job = job_of(flags)
    job.machinery.runner.context.recorder.clock = CudaClock(library)
    return TrainingLoop(job, Progress()), job.batches("train", 0)


@pytest.mark.usefixtures("two_ranks")
def test_steps_that_nothing_shows_record_no_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of the first and every third step; one more flag reads the spans of every step. Evaluations record none."""
    flags = "--train-iters 4 --log-interval 3 --eval-iters 1"
    for more, recorded in (
        ("", [True, False, True]),
        (f"--log-json {tmp_path}/log.json", [True] * 3),
        (f"--trace {tmp_path}/trace.json", [True] * 3),
        ("--timing-log-level 1", [True] * 3),
    ):
        library = Library()
        loop, feed = loop_of(f"{flags} {more}", library)
        for iteration, is_recorded in enumerate(recorded, 1):
            library.synchronized = 0
            spans = loop.step(iteration, feed)
            assert (len(spans) > 50, library.synchronized) == (is_recorded, int(is_recorded)), (more, iteration)
            assert loop.job.machinery.operation() is not None
        library.synchronized = 0
        loop.evaluate("valid")
        assert library.synchronized == 0
    assert "comm 0.00 s, exposed 0.00 s" in capsys.readouterr().out


@pytest.mark.usefixtures("two_ranks")
def test_events_are_read_before_the_host_waits_for_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    loop, feed = loop_of(RUN, library)
    optimizer, read = loop.job.machinery.runner.context.optimizer, []
    prepare = optimizer.prepare
    monkeypatch.setattr(optimizer, "prepare", lambda: (read.append(library.read), prepare())[1])
    spans = loop.step(1, feed)
    assert 0 < 2 * len(spans) - read[0] < len(spans)


def test_groups_that_are_waited_for_have_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.high, self._timeout = is_high_priority_stream, None
            self.config = types.SimpleNamespace(max_ctas=0)

    class Nccl:
        pass

    Nccl.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(groups.dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(groups.dist, "get_backend", lambda: "nccl")
    limits = BlockLimits(16, 12)
    made = {
        kind: groups._options(kind, None, limits) for kind in ("ep", "tp_ep", "expt_tp", "pp", "dp_cp", "expt_dp", "tp")
    }
    assert {kind: options.config.max_ctas for kind, options in made.items()} == {
        **dict.fromkeys(("ep", "tp_ep", "expt_tp", "pp"), 16),
        **dict.fromkeys(("dp_cp", "expt_dp"), 12),
        "tp": 0,
    }
    assert [kind for kind, options in made.items() if not options.high] == ["dp_cp", "expt_dp", "tp"]
    assert not groups._options("ep", None).config.max_ctas, "NCCL's own where nothing runs beside"
    monkeypatch.setattr(groups.dist, "get_backend", lambda: "gloo")
    assert groups._options("ep", None) is None
