"""Spans, measured or simulated, as a Perfetto trace (Chrome's JSON format): one process per rank, one track per channel."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from moe_overlap.plan.spans import Span


def write_trace(path: Path, spans: Sequence[Span], rank: int) -> None:
    """Write one rank's spans.

    Args:
        path: file to replace; open it in ui.perfetto.dev.
    """
    channels = {channel: number for number, channel in enumerate(sorted({span.channel for span in spans}))}
    events: list[dict[str, object]] = [
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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
