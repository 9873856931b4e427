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
from pathlib import Path

from moe_overlap import VERSION_LINE
from moe_overlap.describe.errors import ConfigError
from moe_overlap.report.trace import comparison_json, comparison_text, read_trace


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
    comparison = comparison_json(predicted, measured)
    print(json.dumps(comparison, indent=1) if arguments.json else comparison_text(comparison))
    return 0
