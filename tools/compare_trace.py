"""Compare a predicted trace with a measured one: the seconds of every kind of span, and of the step.

    python tools/compare_trace.py predicted.json measured.json
    python tools/compare_trace.py predicted.json measured.json --json

Traces are those of --trace, of pretrain_moe.py and of tools/predict.py; further ranks of a measured run (FILE.rank1, …) are found
beside the file. A kind is the name of an operator without its layer (`moe.experts.backward`) on its channel; seconds are means
over the ranks that a trace has. Errors are those of the prediction, relative to the measurement.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.operators import parse_operator


@dataclass(frozen=True, slots=True)
class Trace:
    """Spans of a step, summed.

    Attributes:
        seconds: by kind of span and channel, the mean of the ranks.
        step_seconds: from the first start to the last end, of the slowest rank.
    """

    seconds: dict[tuple[str, str], float]
    step_seconds: float


def read_trace(path: Path) -> Trace:
    """A trace file and its further ranks.

    Raises:
        ConfigError: a file cannot be read, or has no spans.
    """
    ranks = [rank for one in (path, *sorted(path.parent.glob(f"{path.name}.rank*"))) for rank in _ranks(one)]
    sums: dict[tuple[str, str], float] = {}
    for spans in ranks:
        for name, channel, start, end in spans:
            kind = (kind_of(name), channel)
            sums[kind] = sums.get(kind, 0.0) + (end - start) / len(ranks)
    steps = [max(span[3] for span in spans) - min(span[2] for span in spans) for spans in ranks]
    return Trace(sums, max(steps))


Spans = list[tuple[str, str, float, float]]
"""Name, channel, start and end in seconds."""


def _ranks(path: Path) -> list[Spans]:
    try:
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        tracks = {
            (event["pid"], event["tid"]): str(event["args"]["name"])
            for event in events
            if event["ph"] == "M" and event["name"] == "thread_name"
        }
        spans: dict[int, Spans] = {}
        for event in events:
            if event["ph"] == "X":
                start = float(event["ts"]) / 1e6
                channel = tracks.get((event["pid"], event["tid"]), "")
                span = (str(event["name"]), channel, start, start + float(event["dur"]) / 1e6)
                spans.setdefault(event["pid"], []).append(span)
    except OSError as error:
        raise ConfigError(str(path), "", f"cannot be read: {error.strerror}", "give a file of --trace") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(str(path), "", f"is no trace ({error!r})", "give a file of --trace") from None
    if not spans:
        raise ConfigError(str(path), "", "has no spans", "give a file of --trace")
    return list(spans.values())


def kind_of(name: str) -> str:
    """An operator's name without its layer, stages and parts."""
    try:
        operator = parse_operator(name)
    except ConfigError:
        return name
    part = operator.part.partition(".S")[0] if operator.part.startswith(("send.", "receive.")) else operator.part
    return ".".join(piece for piece in (part, operator.suffix) if piece)


def rows_of(predicted: Trace, measured: Trace) -> list[dict[str, Any]]:
    """A row for each kind that a trace has, the longest first; `error` is None where nothing was measured."""
    rows = []
    for name, channel in predicted.seconds.keys() | measured.seconds.keys():
        seconds, real = predicted.seconds.get((name, channel), 0.0), measured.seconds.get((name, channel), 0.0)
        rows.append(_row(name, channel, seconds, real))
    return sorted(rows, key=lambda row: (-max(row["measured_seconds"], row["predicted_seconds"]), row["kind"]))


def _row(kind: str, channel: str, predicted: float, measured: float) -> dict[str, Any]:
    error = predicted / measured - 1.0 if measured > 0 else None
    return {
        "kind": kind,
        "channel": channel,
        "predicted_seconds": predicted,
        "measured_seconds": measured,
        "error": error,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison; 2 for a file that cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("predicted", type=Path)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_args(argv)
    try:
        predicted, measured = read_trace(arguments.predicted), read_trace(arguments.measured)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    step = _row("step", "", predicted.step_seconds, measured.step_seconds)
    rows = rows_of(predicted, measured)
    if arguments.json:
        print(json.dumps({"step": step, "kinds": rows}, indent=1))
        return 0
    print(f"{'kind':<34}{'channel':<10}{'predicted ms':>14}{'measured ms':>13}{'error':>9}")
    for row in (*rows, step):
        share = "-" if row["error"] is None else f"{row['error']:+.1%}"
        seconds = f"{row['predicted_seconds'] * 1e3:>14.2f}{row['measured_seconds'] * 1e3:>13.2f}"
        print(f"{row['kind']:<34}{row['channel']:<10}{seconds}{share:>9}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
