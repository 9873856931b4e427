"""Spans, measured or simulated, as a Perfetto trace (Chrome's JSON format): one process per rank, one group of lanes per channel.

Perfetto drops a slice that partly overlaps another one of its lane. Communications of one channel overlap if a list starts one
before the previous has been waited for: each gets a lane that is free at that time. All lanes of a channel have the channel's
name, so a reader sees channels, not lanes.

A run writes one file with all of its ranks (`--trace` of pretrain_moe.py); the times of a rank count from its own start of the
step. Earlier versions wrote a file for each rank, FILE, FILE.rank1, …; these are read as well. Under `otherData` a file also
holds plan and model of the run, so that measured seconds can be compared with prices (`tuner/calibrate/refine.py`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_json, printable, write_whole
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import Span
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.serialize import as_values

Event = dict[str, object]
Curve = Sequence[tuple[float, float]]
"""Points (seconds, bytes): the bytes held from that time on."""
MEMORY_TRACK = "kept bytes"
MOST_MICROSECONDS = 1e18
"""Latest start and longest duration of a span: about thirty thousand years, so clocks that count from 1970 fit."""
MOST_TRACE_BYTES = 1 << 26
"""Largest trace file that is read, about three hundred thousand spans."""


PREDICTED = "predicted"
"""Entry of `TraceFile.about` by which a simulated step is told from a measured one."""


@dataclass(frozen=True, slots=True)
class TraceFile:
    """The content of a trace file.

    Attributes:
        spans: by rank.
        about: plan and model of the run, as `about_run` writes them; with `PREDICTED` if the step was simulated.
    """

    path: Path
    spans: dict[int, list[Span]]
    about: dict[str, Any]


def about_run(plan: Plan, model: ModelDescription) -> dict[str, Any]:
    """The description of a run in its measured trace: plan and model."""
    return {"plan": as_values(plan), "model": dataclasses.asdict(model)}


def write_trace(path: Path, spans: Sequence[Span], rank: int, about: Mapping[str, Any] | None = None) -> None:
    """Write one rank's spans.

    Args:
        path: file to replace; open it in ui.perfetto.dev.
        about: the description of the run, from `about_run`.
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
        memory: bytes that each rank holds over the step, drawn as one more track.
        about: the description of the run, from `about_run`.
        as_new_file: replaces an earlier file atomically. Otherwise the file is written in place, because a path from a user
            may be a device or a pipe.
    """
    events = [event for rank, spans_of_rank in spans.items() for event in _span_events(spans_of_rank, rank)]
    for rank, curve in (memory or {}).items():
        events += [
            {"ph": "C", "name": MEMORY_TRACK, "pid": rank, "ts": time * 1e6, "args": {"bytes": size}}
            for time, size in curve
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"otherData": about} if about else {}
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", **metadata})
    if as_new_file:
        write_whole(path, text)
    else:
        path.write_text(text, encoding="utf-8")


def read_traces(path: Path, flag: str = "") -> list[TraceFile]:
    """A trace file and, if it holds a single rank, the files FILE.rank1, … of the other ranks.

    Args:
        flag: the flag with the path, for errors.
    Raises:
        ConfigError: a file cannot be read, or has no spans.
    """
    first = _read(path, flag)
    # A file with several ranks is complete: files of other ranks in its folder belong to an earlier run.
    other_ranks = sorted(path.parent.glob(f"{path.name}.rank*")) if len(first.spans) == 1 else []
    return [first, *(_read(other, flag) for other in other_ranks)]


def _read(path: Path, flag: str) -> TraceFile:
    subject = f"{flag} {path}".strip()
    spans: dict[int, list[Span]] = {}
    written: Any = None
    try:
        written = bounded_json(path, MOST_TRACE_BYTES)
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
        has_events = isinstance(written, dict) and isinstance(written.get("traceEvents"), list)
        reason = f"an event is malformed ({error!r})" if has_events else "it has no traceEvents"
        raise ConfigError(subject, "", f"is no trace: {printable(reason, 100)}", "give a file of --trace") from None
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
    """A time in Perfetto's unit. Start and end are rounded, not the duration: its rounding could overlap the next slice."""
    return round(seconds * 1e9)


def lanes_of(spans: Sequence[Span]) -> list[int]:
    """The lane of every span within its channel: the first one that is free when the span begins.

    Spans of one lane never overlap, and a channel has only as many lanes as spans that run at the same time.
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
