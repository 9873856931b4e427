"""Spans, measured or simulated, as a Perfetto trace (Chrome's JSON format): one process per rank, one group of lanes per channel.

Perfetto drops a slice that overlaps another one of its lane without lying inside of it. Communications of one channel overlap
where a list starts the next before the last is waited for: each gets a lane on which nothing else runs then. The lanes of a
channel share its name, so a reader sees the channel and not the lane.

A run writes one file with all of its ranks (`--trace` of pretrain_moe.py); every rank counts from its own start of the step.
Earlier versions wrote a file for each rank, FILE, FILE.rank1, …, which are read as well. Beside its spans a file says, under
`otherData`, what ran: plan and model, so that measured seconds can be compared with prices (`tuner/calibrate/refine.py`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_json, write_whole
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import Span
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.serialize import as_values

Event = dict[str, object]
Curve = Sequence[tuple[float, float]]
"""Times in seconds at which a number of bytes changes, and the bytes from then on."""
MEMORY_TRACK = "kept bytes"
MOST_MICROSECONDS = 1e18
"""Latest start and longest duration of a span: some ten thousand years, also where a clock counts from 1970."""
MOST_TRACE_BYTES = 1 << 26
"""Largest trace file that is read: some three hundred thousand spans. Every rank of a run writes a file of its own."""


@dataclass(frozen=True, slots=True)
class TraceFile:
    """The content of a trace file.

    Attributes:
        spans: by rank.
        about: what ran, as `about_run` writes it; empty in files of predictions.
    """

    path: Path
    spans: dict[int, list[Span]]
    about: dict[str, Any]


def about_run(plan: Plan, model: ModelDescription) -> dict[str, Any]:
    """The facts of its run that a measured trace states."""
    return {"plan": as_values(plan), "model": dataclasses.asdict(model)}


def write_trace(path: Path, spans: Sequence[Span], rank: int, about: Mapping[str, Any] | None = None) -> None:
    """Write one rank's spans.

    Args:
        path: file to replace; open it in ui.perfetto.dev.
        about: what ran.
    """
    write_ranks(path, {rank: spans}, about=about)


def write_ranks(
    path: Path,
    spans: Mapping[int, Sequence[Span]],
    memory: Mapping[int, Curve] | None = None,
    about: Mapping[str, Any] | None = None,
    *,
    as_new_file: bool = False,
) -> None:
    """Write the spans of several ranks to one file.

    Args:
        memory: what ranks keep over the step, drawn as one more track of each.
        about: what ran.
        as_new_file: an earlier file is replaced whole or stays as it was. Else it is written in place: a path that a user names
            may be a device or a pipe.
    """
    events = [event for rank, ran in spans.items() for event in _span_events(ran, rank)]
    for rank, curve in (memory or {}).items():
        events += [
            {"ph": "C", "name": MEMORY_TRACK, "pid": rank, "ts": time * 1e6, "args": {"bytes": kept}}
            for time, kept in curve
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    further = {"otherData": about} if about else {}
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", **further})
    if as_new_file:
        write_whole(path, text)
    else:
        path.write_text(text, encoding="utf-8")


def read_traces(path: Path, flag: str = "") -> list[TraceFile]:
    """A trace file and those of the further ranks beside it; a file with several ranks is whole.

    Args:
        flag: that names the file, for errors.
    Raises:
        ConfigError: a file cannot be read, or has no spans.
    """
    whole = _read(path, flag)
    # Files of further ranks beside it are an earlier run's.
    beside = sorted(path.parent.glob(f"{path.name}.rank*")) if len(whole.spans) == 1 else []
    return [whole, *(_read(further, flag) for further in beside)]


def _read(path: Path, flag: str) -> TraceFile:
    subject = f"{flag} {path}".strip()
    spans: dict[int, list[Span]] = {}
    try:
        written: dict[str, Any] = bounded_json(path, MOST_TRACE_BYTES)
        events: list[dict[str, Any]] = written["traceEvents"]
        tracks = {
            (event["pid"], event["tid"]): str(event["args"]["name"])
            for event in events
            if event["ph"] == "M" and event["name"] == "thread_name"
        }
        for event in events:
            if event["ph"] == "X":
                start, placed = _microseconds(event["ts"]) / 1e6, event.get("args", {})
                seconds, rank = _microseconds(event["dur"]) / 1e6, event["pid"]
                if seconds < 0:
                    raise ValueError("a span must last for a number of microseconds from 0")
                if type(rank) is not int or rank < 0:
                    raise ValueError("the pid of a span is a rank, a whole number from 0")
                channel, name = tracks.get((rank, event["tid"]), ""), str(event["name"])
                if not (channel.isprintable() and name.isprintable()):
                    raise ValueError("the name of a span or a track holds control characters")
                place = (int(placed.get("chunk", 0)), int(placed.get("micro_batch", 0)))
                partition = tuple(map(int, placed.get("partition", ())))
                spans.setdefault(rank, []).append(Span(name, channel, *place, start, start + seconds, partition))
        about = dict(written.get("otherData", {}))
    except Unreadable as error:
        rule = str(error) if str(error).startswith("cannot be read") else f"is no trace: it {error}"
        raise ConfigError(subject, "", rule, "give a file of --trace") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(subject, "", f"is no trace ({error!r})", "give a file of --trace") from None
    if not spans:
        raise ConfigError(subject, "", "has no spans", "give a file of --trace")
    return TraceFile(path, spans, about)


def _microseconds(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= MOST_MICROSECONDS:
        raise ValueError(f"a span must begin and last for a number of microseconds of at most {MOST_MICROSECONDS:g}")
    return float(value)


def _span_events(spans: Sequence[Span], rank: int) -> list[Event]:
    lanes = lanes_of(spans)
    tracks = {
        place: number for number, place in enumerate(sorted({*zip((s.channel for s in spans), lanes, strict=True)}))
    }
    events: list[Event] = [
        {"ph": "M", "name": kind, "pid": rank, "tid": number, "args": value}
        for (channel, _), number in tracks.items()
        for kind, value in (("thread_name", {"name": channel}), ("thread_sort_index", {"sort_index": number}))
    ]
    events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
    events += [
        {
            "ph": "X",
            "name": span.name,
            "pid": rank,
            "tid": tracks[span.channel, lane],
            "ts": _nanoseconds(span.start) / 1e3,
            "dur": (_nanoseconds(span.end) - _nanoseconds(span.start)) / 1e3,
            "args": {"chunk": span.chunk, "micro_batch": span.micro_batch} | _partition_of(span),
        }
        for span, lane in zip(spans, lanes, strict=True)
    ]
    return events


def _nanoseconds(seconds: float) -> int:
    """A time as Perfetto keeps it: start and end are rounded, not the duration, which could reach into the next slice."""
    return round(seconds * 1e9)


def lanes_of(spans: Sequence[Span]) -> list[int]:
    """The lane of every span among those of its channel: the first one that is free when the span begins.

    Spans of one lane never overlap, and a channel has no more lanes than spans that run at the same time.
    """
    lanes = [0] * len(spans)
    free_from: dict[str, list[float]] = {}
    for place in sorted(range(len(spans)), key=lambda place: (spans[place].start, spans[place].end)):
        span, ends = spans[place], free_from.setdefault(spans[place].channel, [])
        lane = next((lane for lane, end in enumerate(ends) if end <= span.start), len(ends))
        ends[lane : lane + 1] = [span.end]
        lanes[place] = lane
    return lanes


def _partition_of(span: Span) -> dict[str, list[int]]:
    return {"partition": list(span.partition)} if span.partition else {}
