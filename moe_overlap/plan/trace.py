"""Spans, measured or simulated, as a Perfetto trace (Chrome's JSON format): one process per rank, one track per channel."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_overlap.plan.spans import Span

Event = dict[str, object]
Curve = Sequence[tuple[float, float]]
"""When a number of bytes changes, in seconds, and the bytes from then on."""
MEMORY_TRACK = "kept bytes"


def write_trace(path: Path, spans: Sequence[Span], rank: int) -> None:
    """Write one rank's spans.

    Args:
        path: file to replace; open it in ui.perfetto.dev.
    """
    write_ranks(path, {rank: spans})


def write_ranks(path: Path, spans: Mapping[int, Sequence[Span]], memory: Mapping[int, Curve] | None = None) -> None:
    """Write the spans of several ranks to one file.

    Args:
        memory: what ranks keep over the step, drawn as one more track of each.
    """
    events = [event for rank, ran in spans.items() for event in _span_events(ran, rank)]
    for rank, curve in (memory or {}).items():
        events += [
            {"ph": "C", "name": MEMORY_TRACK, "pid": rank, "ts": time * 1e6, "args": {"bytes": kept}}
            for time, kept in curve
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _span_events(spans: Sequence[Span], rank: int) -> list[Event]:
    channels = {channel: number for number, channel in enumerate(sorted({span.channel for span in spans}))}
    events: list[Event] = [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": channel}}
        for channel, number in channels.items()
    ]
    events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
    events += [
        {
            "ph": "X",
            "name": span.name,
            "pid": rank,
            "tid": channels[span.channel],
            "ts": span.start * 1e6,
            "dur": (span.end - span.start) * 1e6,
            "args": {"chunk": span.chunk, "micro_batch": span.micro_batch},
        }
        for span in spans
    ]
    return events
