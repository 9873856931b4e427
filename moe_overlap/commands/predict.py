"""Predict a training step before running it: seconds, throughput, and the memory of every stage.

    python tools/predict.py --megatron-args examples/mixtral-8x7b.args --gpu H100 --num-gpus 64

Reads Megatron flags, prints a summary or, with --json, everything; --trace FILE writes the step as it is simulated, for
ui.perfetto.dev and tools/compare_trace.py. torch is imported only to capture a layout that is not cached.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from moe_overlap import VERSION_LINE
from moe_overlap.api import PRECISIONS, predict, simulated
from moe_overlap.commands.job_arguments import add_job_arguments, cluster_of, words_of
from moe_overlap.describe.errors import ConfigError
from moe_overlap.report.prediction import prediction_json, prediction_text
from moe_overlap.report.trace import write_trace

GIVEN = ("precision", "software", "expert_load", "plan")
"""Options that `predict` takes as they are."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 for a user's mistake. A plan that does not fit is an answer, not a mistake."""
    arguments = _parser().parse_args(argv)
    try:
        cluster = cluster_of(arguments)
        words, given = words_of(arguments), {name: getattr(arguments, name) for name in GIVEN}
        prediction = predict(words, cluster, **given)
        step = simulated(words, cluster, **given) if arguments.trace is not None else None
        if step is not None:
            write_trace(arguments.trace, step)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seconds = None if step is None else step.simulation.step_seconds
    if arguments.json:
        played = {} if seconds is None else {"simulated_step_seconds": seconds}
        print(json.dumps(prediction_json(prediction) | played, indent=1))
        return 0
    print(prediction_text(prediction, cluster))
    if seconds is not None:
        print(f"simulated: {seconds:.3f} s, with what the plan overlaps; {arguments.trace}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=VERSION_LINE)
    add_job_arguments(parser)
    parser.add_argument("--plan", metavar="FILE", help="a plan that decides in place of the flags")
    parser.add_argument("--precision", choices=tuple(PRECISIONS), help="in place of what the flags say")
    parser.add_argument(
        "--software", metavar="RELEASE", help="losses of a release, as 26.04; default the GPU's median release"
    )
    parser.add_argument("--expert-load", metavar="FILE", help="recorded by --log-expert-load; default balanced routing")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument(
        "--trace", metavar="FILE", help="write a simulated step: one rank per stage, for ui.perfetto.dev"
    )
    return parser
