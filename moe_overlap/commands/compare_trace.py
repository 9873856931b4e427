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

from moe_overlap import VERSION_LINE
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.operators import kind_of
from moe_overlap.plan.trace import read_traces


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
    ranks = [spans for one in read_traces(path) for spans in one.spans.values()]
    sums: dict[tuple[str, str], float] = {}
    for spans in ranks:
        for span in spans:
            kind = (kind_of(span.name), span.channel)
            sums[kind] = sums.get(kind, 0.0) + (span.end - span.start) / len(ranks)
    steps = [max(span.end for span in spans) - min(span.start for span in spans) for spans in ranks]
    return Trace(sums, max(steps))


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
    parser.add_argument("--version", action="version", version=VERSION_LINE)
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
