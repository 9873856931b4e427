"""Decide how a run overlaps its communication: `tools/autotune.py --overlap-only`.

    python tools/autotune.py --overlap-only --megatron-args examples/mixtral-8x7b.args --gpu H100 --num-gpus 64 --output tuned
    torchrun ... pretrain_moe.py @tuned/megatron_args.txt

For the parallel layout of the flags, ways to hide all-to-all are searched and their steps predicted. Written to --output:
plan.json (where something is overlapped), megatron_args.txt (the flags that run it), trace.json (the predicted step with few
micro-batches, for ui.perfetto.dev). Printed: what was chosen, and why the others were not.

    torchrun ... pretrain_moe.py @tuned/megatron_args.txt --trace measured.json
    python tools/autotune.py --overlap-only ... --refine measured.json --output tuned2

With traces of runs of the same job, whatever they overlap, its prices are refined by what was measured
(moe_overlap/tuner/calibrate/refine.py); the plan that was measured stays where nothing is predicted to be faster. A trace is of a
run's last step: let it make a few.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_overlap import VERSION_LINE
from moe_overlap.api import tune
from moe_overlap.commands.job_arguments import add_job_arguments, cluster_of, words_of
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.report.trace import write_trace
from moe_overlap.report.tuning import tuned_json, tuned_text, write_run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 for a user's mistake."""
    arguments = _parser().parse_args(argv)
    try:
        if not arguments.overlap_only:
            rule = "parallelism and memory are not searched yet"
            raise ConfigError("--overlap-only", "missing", rule, "add it to decide the overlap of these flags")
        cluster = cluster_of(arguments)
        limits = SearchLimits(
            max_partitions=arguments.overlap_max_partitions,
            group_seconds=arguments.overlap_group_seconds,
            range_limit=arguments.overlap_range_limit,
        )
        given = {"software": arguments.software, "expert_load": arguments.expert_load}
        tuned = tune(words_of(arguments), cluster, limits, arguments.time_limit, arguments.refine, **given)
        folder = Path(arguments.output)
        write_run(folder, tuned)
        write_trace(folder / "trace.json", tuned.step)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(tuned_json(tuned), indent=1) if arguments.json else tuned_text(tuned, folder))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=VERSION_LINE)
    add_job_arguments(parser)
    parser.add_argument("--output", metavar="DIR", required=True, help="where the plan, the flags and the trace go")
    parser.add_argument("--overlap-only", action="store_true", help="keep the parallel layout, decide the overlap")
    parser.add_argument("--overlap-max-partitions", metavar="N", type=int, default=8, help="most partitions of a range")
    parser.add_argument(
        "--overlap-group-seconds", metavar="S", type=float, default=0.0, help="shorter operators are moved together"
    )
    parser.add_argument("--overlap-range-limit", metavar="N", type=int, default=16, help="most groups in a range")
    parser.add_argument("--time-limit", metavar="S", type=float, default=5.0, help="of each weight-gradient schedule")
    parser.add_argument(
        "--software", metavar="RELEASE", help="losses of a release, as 26.04; default the GPU's median release"
    )
    parser.add_argument("--expert-load", metavar="FILE", help="recorded by --log-expert-load; default balanced routing")
    parser.add_argument(
        "--refine",
        metavar="TRACE",
        nargs="+",
        default=(),
        help="of --trace of pretrain_moe.py: what runs of this job took",
    )
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    return parser


def run() -> int:
    """Entry point of `moe-tune` and `tools/autotune.py`."""
    # The search makes millions of small objects and no cycles of them: looking for some takes a quarter of its time.
    gc.disable()
    return main()
