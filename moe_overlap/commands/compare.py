"""Compare two runs by their losses (tools/compare_losses.py), or a predicted trace with a measured one (tools/compare_trace.py).

Both exit with status 2 for a file that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_overlap.commands.exits import interruptible
from moe_overlap.commands.help_topics import Parser
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_text, plain_json
from moe_overlap.describe.version import VERSION_LINE
from moe_overlap.report.trace import comparison_json, comparison_text, read_trace, require_one_job

LOSSES = """Compare the losses of two runs: `tools/compare_losses.py A.jsonl B.jsonl [--bitwise | --relative 1e-5]`.

The files are those of `--log-json`; if a step occurs twice (after a resume), the later line counts. Exit status 0 if the runs
agree, 1 if they do not, 2 for a file that cannot be read.
"""
"""The help of `compare_losses`."""
TRACES = """Compare a predicted trace with a measured one: the seconds of every kind of span, and of the step.

    python tools/compare_trace.py predicted.json measured.json
    python tools/compare_trace.py predicted.json measured.json --json

Traces come from --trace of pretrain_moe.py and of tools/predict.py; files of other ranks from an earlier version (FILE.rank1, …)
are read as well. Both must be of one job, with the same model and layout. A kind is the name of an operator without its layer
(`moe.experts.backward`) and its channel; seconds are means over the ranks of a trace. Errors are errors of the prediction,
relative to the measurement.
"""
"""The help of `compare_traces`."""


def read_losses(path: Path) -> dict[int, float]:
    """step -> loss.

    Raises:
        ConfigError: the file cannot be read, or a line is not one of --log-json.
    """
    try:
        lines = bounded_text(path).splitlines()
    except Unreadable as error:
        raise ConfigError(str(path), "", str(error), "give a file written by --log-json") from None
    losses: dict[int, float] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = plain_json(line)
            step, loss = row["step"], row["loss"]
        except (Unreadable, KeyError, TypeError):
            raise ConfigError(f"{path}:{number}", "", "is no line of --log-json", "give a file it wrote") from None
        if type(step) is not int or step < 1 or type(loss) not in (int, float) or not 0 <= loss <= sys.float_info.max:
            rule = "is no line of --log-json: a step counts from 1, and its loss is a number from 0"
            raise ConfigError(f"{path}:{number}", "", rule, "give a file it wrote")
        losses[step] = float(loss)
    return losses


def relative_differences(first: dict[int, float], second: dict[int, float]) -> dict[int, float]:
    """step -> |a - b| / a over the steps of both runs; the largest float if a is too small to divide by."""

    def difference(a: float, b: float) -> float:
        if a == b:
            return 0.0
        return min(abs(a - b) / a, sys.float_info.max) if a else sys.float_info.max

    return {step: difference(first[step], second[step]) for step in sorted(first.keys() & second.keys())}


@interruptible
def compare_losses(argv: Sequence[str] | None = None) -> int:
    """Print the comparison; 0 if the runs agree, 1 if not, 2 for a file that cannot be read."""
    parser = Parser(description=LOSSES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=VERSION_LINE)
    parser.add_argument("first", type=Path, help="a file of --log-json")
    parser.add_argument("second", type=Path, help="the file of the other run")
    rule = parser.add_mutually_exclusive_group()
    rule.add_argument("--bitwise", action="store_true", help="every loss must be the same number")
    rule.add_argument("--relative", type=float, default=1e-5, help="largest relative difference (default 1e-5)")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_args(argv)
    try:
        if not 0 <= arguments.relative < math.inf:
            raise ConfigError("--relative", arguments.relative, "must be a number from 0", "use, say, 1e-5")
        first, second = read_losses(arguments.first), read_losses(arguments.second)
        differences = relative_differences(first, second)
        if not differences:
            raise ConfigError(
                str(arguments.second), "", "has no step in common with the first file", "compare like runs"
            )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    limit = 0.0 if arguments.bitwise else arguments.relative
    worst = max(differences, key=lambda step: differences[step])
    beyond = [step for step, difference in differences.items() if not difference <= limit]
    only = len(first.keys() ^ second.keys())
    if arguments.json:
        row = {
            "steps": len(differences),
            "worst_step": worst,
            "worst": differences[worst],
            "beyond": beyond,
            "unmatched": only,
        }
        print(json.dumps(row))
    else:
        largest = f"largest relative difference {differences[worst]:.2e} at step {worst}"
        print(f"{len(differences)} steps in both, {only} in one only; {largest}")
        if beyond:
            print(f"{len(beyond)} steps differ by more than {limit:g}, the first is step {beyond[0]}")
    return 1 if beyond else 0


@interruptible
def compare_traces(argv: Sequence[str] | None = None) -> int:
    """Print the comparison; 2 for a file that cannot be read, or traces of different jobs."""
    parser = Parser(description=TRACES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=VERSION_LINE)
    parser.add_argument("predicted", type=Path, help="a trace of tools/predict.py --trace")
    parser.add_argument("measured", type=Path, help="a trace of pretrain_moe.py --trace")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_args(argv)
    try:
        predicted, measured = read_trace(arguments.predicted), read_trace(arguments.measured)
        require_one_job(predicted, measured, (arguments.predicted, arguments.measured))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    comparison = comparison_json(predicted, measured)
    print(json.dumps(comparison, indent=1) if arguments.json else comparison_text(comparison))
    return 0
