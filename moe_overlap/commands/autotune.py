"""Search the plan of a run: layout, recomputation and overlap, written as flags and a Slurm script.

    python tools/autotune.py --megatron-args examples/mixtral-8x7b.args --gpu H100 --num-gpus 64 --output tuned
    sbatch tuned/launch.sbatch      (or: python pretrain_moe.py --nproc-per-node N @tuned/megatron_args.txt)

The layout in the flags is only the baseline. --target megatron-lm answers with flags that unmodified Megatron-LM accepts;
--target both searches for both, writes the answer for Megatron-LM to DIR/megatron-lm and prints the gain.
--num-gpus 32,64,128 prints a table of the best plans and writes each to DIR/<n>-gpus. Written to --output: megatron_args.txt,
launch.sbatch, plan.json, report.html, and trace.json (the predicted step with few micro-batches, for ui.perfetto.dev).
docs/searching.md describes the search.

    python tools/autotune.py --overlap-only --megatron-args examples/mixtral-8x7b.args --gpu H100 --num-gpus 64 --output tuned
    python tools/autotune.py --overlap-only ... --refine measured.json --output tuned2

--overlap-only keeps the layout of the flags and decides how it hides all-to-alls. Traces of runs of the same job with any overlap
(pretrain_moe.py --trace) refine its prices; the measured plan stays unless another one is predicted to be faster. A trace is of
a run's last step: run a few steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from megatron.training.report.live_line import LiveLine
from moe_overlap.commands.exits import INTERRUPTED, interruptible
from moe_overlap.commands.help_topics import Removed, parser_with_topics, topic
from moe_overlap.commands.job_arguments import (
    PRECISIONS,
    PRICES,
    EachOnce,
    add_job_arguments,
    add_margin_argument,
    add_routing_arguments,
    assumed_of,
    check_flags,
    cluster_of,
    clusters_of,
    expert_load_of,
    folder_of_answer,
    job_flags,
    known_flags,
    margin_of,
    name_of,
    notes_of,
    on_standard_error,
    token_count,
)
from moe_overlap.describe.errors import ConfigError, require
from moe_overlap.describe.files import printable
from moe_overlap.describe.host import usable_cores
from moe_overlap.describe.version import VERSION_LINE
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.report.answer_files import require_no_other_files
from moe_overlap.tuner.limits import PLAN_SEARCH_LIMITS, check_limits
from moe_overlap.tuner.search.space import NARROW_DEFAULT, SEARCH_SPACES

# What searches, and the solvers behind it, take a second to load. Functions below load them behind the checks of their flags,
# so that `--help` and a mistake are answered at once.
if TYPE_CHECKING:
    from moe_overlap.api import Options
    from moe_overlap.plan_search.request import SearchSettings
    from moe_overlap.tuner.capture.cache import Tell
    from moe_overlap.tuner.search.pipeline.per_stage import StagedPlan
    from moe_overlap.tuner.search.pipeline.sub_meshes import MeshPlan
    from moe_overlap.tuner.search.uniform import RankedLayout

MOST_PER_CORE = 8
"""Most processes of --jobs for each core: more need memory without searching faster."""
JOBS = 4
"""Most processes without --jobs: each holds its own prices, up to some GiB in the widest spaces."""
SOLVER_SECONDS = 5.0
"""Default solver time for each weight-gradient schedule."""


@interruptible
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 for a user's mistake."""
    begun = time.monotonic()
    arguments = _parser().parse_args(argv)
    try:
        for note in notes_of(arguments):
            print(f"not the same as {arguments.model}: {note}", file=sys.stderr)
        for sentence in assumed_of(arguments):
            print(f"assumed: {sentence}", file=sys.stderr)
        return _overlap(arguments) if arguments.overlap_only else _plan(arguments, begun)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted before the answer was complete", file=sys.stderr)
        return INTERRUPTED


def _overlap(arguments: argparse.Namespace) -> int:
    """Decide the overlap of the flags' own layout."""
    for option, default in (
        ("target", "moe-overlap"),
        ("search_space", None),
        ("train_tokens", None),
        ("no_imbalance", False),
        ("allow_micro_batch_change", False),
        ("search_dispatcher", False),
        ("jobs", None),
    ):
        value, flag = getattr(arguments, option), f"--{option.replace('_', '-')}"
        if value != default:
            rule = "has no effect with --overlap-only, which keeps your layout"
            raise ConfigError(flag, "" if value is True else value, rule, "drop one of them")
    if "," in str(arguments.num_gpus or ""):
        rule = "--overlap-only keeps one layout, for one number of GPUs"
        raise ConfigError("--num-gpus", arguments.num_gpus, rule, "drop --overlap-only, or give one number")
    cluster, folder = cluster_of(arguments), folder_of_answer(arguments)
    if folder is not None:
        _require_writable(folder)
        require_no_other_files(folder)
    check_flags(job_flags(arguments), cluster.gpus, arguments.precision is not None)
    from moe_overlap.api import tune
    from moe_overlap.report.tuning import tuned_details, tuned_json, tuned_lines, write_tuned

    options = _options(arguments, EachOnce())
    seconds = SOLVER_SECONDS if arguments.time_limit is None else arguments.time_limit
    tuned = tune(job_flags(arguments), cluster, _limits(arguments), seconds, arguments.refine, **options)
    files = [] if folder is None else write_tuned(folder, tuned, cluster, on_standard_error)
    if arguments.json:
        print(json.dumps(tuned_json(tuned), indent=1))
        return 0
    print("\n".join(tuned_lines(tuned, folder, cluster, files)))
    if arguments.verbose:
        print("\n".join(["", *tuned_details(tuned)]))
    return 0


def _plan(arguments: argparse.Namespace, begun: float) -> int:
    """Search the whole plan.

    Args:
        begun: when the command started, from which the time limit counts.
    """
    if arguments.refine:
        raise ConfigError(
            "--refine", arguments.refine[0], "traces refine the overlap of one layout", "add --overlap-only"
        )
    limit = arguments.time_limit
    if limit is not None and not limit > 0:
        raise ConfigError("--time-limit", limit, "must be greater than 0 seconds", "drop it to search all")
    folder = folder_of_answer(arguments)
    if folder is not None:
        _require_writable(folder)
    train_tokens = None if arguments.train_tokens is None else token_count(arguments.train_tokens)
    jobs = _jobs(arguments.jobs)
    clusters_of(arguments)
    check_flags(job_flags(arguments), None)
    limits = _limits(arguments)
    # Before the search, which evaluates overlap last, or never if nothing can overlap.
    check_limits(limits)
    from moe_overlap.plan_search.request import SearchSettings

    # From here on an error first ends the line of progress.
    # The limit holds for each of several searches: time left is told of a single one.
    is_single = arguments.target != "both" and "," not in str(arguments.num_gpus or "")
    progress = SearchProgress(sys.stderr, begun, limit if is_single else None)
    remaining = float("inf") if limit is None else max(1e-3, limit - (time.monotonic() - begun))
    settings = SearchSettings(
        target="moe-overlap" if arguments.target == "both" else arguments.target,
        space=arguments.search_space,
        seconds=remaining,
        overlap_limits=limits,
        has_baseline=arguments.megatron_args is not None,
        averages=arguments.no_imbalance,
        changes_micro_batch=arguments.allow_micro_batch_change,
        frees_dispatcher=arguments.search_dispatcher,
        jobs=jobs,
        progress=progress,
    )
    try:
        return _searched(arguments, settings, train_tokens, progress)
    finally:
        progress.end()


def _searched(
    arguments: argparse.Namespace, settings: SearchSettings, train_tokens: float | None, progress: SearchProgress
) -> int:
    """Search, write and print the answer, for one or several numbers of GPUs and targets."""
    from moe_overlap.commands.tune_many import tune_both, tune_numbers
    from moe_overlap.plan_search.results import folder_of
    from moe_overlap.plan_search.search import search_plan
    from moe_overlap.report.prediction import prediction_text
    from moe_overlap.report.search import detail_lines, search_json, search_lines
    from moe_overlap.report.search_folder import write_answer
    from moe_overlap.report.targets import UPSTREAM_FOLDER

    options, ended = _options(arguments, progress.tell), progress.end
    clusters = clusters_of(arguments)
    folder = folder_of_answer(arguments)
    if folder is not None:
        for place in [folder] if len(clusters) == 1 else [folder / folder_of(cluster) for cluster in clusters]:
            require_no_other_files(place)
        if arguments.target == "both":
            require_no_other_files(folder / UPSTREAM_FOLDER)
    argv = job_flags(arguments, chooses_dispatcher=clusters[0].measured is None)
    if len(clusters) > 1:
        return tune_numbers(arguments, argv, clusters, settings, options, train_tokens, ended)
    if arguments.target == "both":
        return tune_both(arguments, argv, clusters[0], settings, options, train_tokens, ended)
    search = search_plan(argv, clusters[0], settings, **options)
    ended()
    files = [] if folder is None else write_answer(folder, search, on_standard_error, train_tokens)
    if arguments.json:
        print(json.dumps(search_json(search, train_tokens), indent=1))
        return 0
    print("\n".join(search_lines(search, folder, files, train_tokens)))
    if arguments.verbose:
        print(f"\n{prediction_text(search.prediction, search.cluster)}")
        print("\n".join(detail_lines(search)))
    return 0


def _jobs(jobs: int | None) -> int:
    """Number of searching processes: `jobs`, or one per usable core, at most `JOBS`.

    Raises:
        ConfigError: fewer than one, or more than `MOST_PER_CORE` for each core.
    """
    cores = usable_cores()
    if jobs is None:
        # Only on Linux is it safe to fork a process that has loaded its libraries.
        return min(JOBS, cores) if sys.platform == "linux" else 1
    require(jobs >= 1, "--jobs", jobs, "must be at least 1", "write the number of cores")
    rule = f"is more than {MOST_PER_CORE} for each of {cores} core{'s' if cores > 1 else ''}"
    require(jobs <= MOST_PER_CORE * cores, "--jobs", jobs, rule, f"write {cores}, or drop it")
    return jobs


def _options(arguments: argparse.Namespace, tell: Tell) -> Options:
    return {
        "tell": tell,
        "name": name_of(arguments),
        "software": arguments.software,
        "expert_load": expert_load_of(arguments),
        "precision": arguments.precision,
        "memory_margin": margin_of(arguments),
    }


def _require_writable(folder: Path) -> None:
    """Refuse, before the search, a folder that cannot be written or has control characters in its name."""
    if not str(folder).isprintable():
        raise ConfigError("--output", printable(str(folder)), "has control characters", "give another name")
    place = folder
    while not place.exists():
        place = place.parent
    try:
        # Permissions are not enough: root ignores them, and a file system may be full or read-only.
        Path(tempfile.mkdtemp(dir=place)).rmdir()
    except OSError as error:
        rule = f"{place} cannot be written ({error.strerror})"
        raise ConfigError("--output", str(folder), rule, "give another folder") from None


def _limits(arguments: argparse.Namespace) -> SearchLimits:
    """The limits of the search for overlap.

    Raises:
        ConfigError: a flag sets a limit, but the search has no plans with partitions.
    """
    limits = {
        name: value
        for name in ("max_partitions", "group_seconds", "range_limit")
        if (value := getattr(arguments, f"overlap_{name}")) is not None
    }
    if limits and not arguments.overlap_only and arguments.target == "megatron-lm":
        name, value = next(iter(limits.items()))
        rule = "partitions are this fork's overlap, which --target megatron-lm does not execute"
        raise ConfigError(f"--overlap-{name.replace('_', '-')}", value, rule, "drop it")
    return dataclasses.replace(PLAN_SEARCH_LIMITS, **limits)


class SearchProgress:
    """Reports the progress of the search: on one live line of a terminal, otherwise on a new line every ten seconds.

    Args:
        begun: when the command started.
        limit: seconds of `--time-limit`, of which the rest is told; None: it is not.
    """

    def __init__(self, stream: TextIO, begun: float | None = None, limit: float | None = None) -> None:
        self._stream, self._reported, self._limit = stream, time.monotonic(), limit
        self._begun = self._reported if begun is None else begun
        self._line = LiveLine(stream)
        self._line.show("reading the captured layers of the model")
        self._has_told = False

    def __call__(self, done: int, total: int, best: RankedLayout | StagedPlan | MeshPlan | None) -> None:
        """Report the progress if the last report is old enough."""
        text = "nothing that fits yet" if best is None else f"best so far {best.seconds:.3f} s, {best.name}"
        self._show(f"{done:,} of at most {total:,} layouts evaluated; {text}")

    def tell(self, text: str) -> None:
        """Report a long operation, such as a capture, before and while it runs."""
        if self._has_told or self._line.is_shown:
            self._show(text)
        else:
            on_standard_error(text)
        self._has_told = True

    def _show(self, text: str) -> None:
        is_live, now = self._line.is_shown, time.monotonic()
        if now - self._reported < (0.2 if is_live else 10.0):
            return
        self._reported = now
        if self._limit is not None:
            text += f"; {max(0.0, self._limit - (now - self._begun)):.0f} of {self._limit:g} s left"
        if is_live:
            self._line.show(text)
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def end(self) -> None:
        """Clear the live line before the answer is printed."""
        self._line.clear()


NEEDED = ("--megatron-args", "--model", "--gpu", "--num-gpus", "--output", "--target", "--overlap-only", "--verbose")


def _parser() -> argparse.ArgumentParser:
    parser = parser_with_topics(__doc__, NEEDED, known_flags())
    parser.add_argument("--version", action="version", version=VERSION_LINE)
    add_job_arguments(parser)
    job = topic(parser, "job")
    job.add_argument("--precision", choices=PRECISIONS, help="instead of the value in the flags")
    search = topic(parser, "search", "which plans are looked at, and for how long")
    search.add_argument(
        "--target",
        choices=("moe-overlap", "megatron-lm", "both", "any"),
        default="moe-overlap",
        help="who runs the plan",
    )
    search.add_argument("--overlap-only", action="store_true", help="keep the parallel layout, decide the overlap")
    search.add_argument(
        "--search-space",
        metavar="NAME",
        help=_spaces_help(),
    )
    search.add_argument(
        "--no-imbalance", action="store_true", help="search as if all micro-batches of a stage took their mean"
    )
    search.add_argument(
        "--allow-micro-batch-change",
        action="store_true",
        help="search other micro-batches under an expert capacity, too, where each drops other tokens",
    )
    search.add_argument(
        "--search-dispatcher",
        action="store_true",
        help="search the dispatcher of tokens although the flags name one; where they name none it is searched",
    )
    search.add_argument(
        "--jobs",
        metavar="J",
        type=int,
        help=f"processes of this host that search (default: its cores, {JOBS} at most)",
    )
    search.add_argument("--shard", metavar="I/N", action=Removed, rule="a search takes seconds", fix="use --jobs N")
    search.add_argument(
        "--time-limit",
        metavar="S",
        type=float,
        help="seconds of each search, after which the best so far is the answer; with --overlap-only of each "
        "weight-gradient schedule (5)",
    )
    _add_overlap_arguments(topic(parser, "overlap", "how fine the overlap is decided, and what was measured of it"))
    prices = topic(parser, "prices", PRICES)
    prices.add_argument(
        "--software", metavar="RELEASE", help="losses of a release, as 26.04; default the GPU's median release"
    )
    add_routing_arguments(prices)
    add_margin_argument(parser)
    answer = topic(parser, "answer", "what is printed and written")
    answer.add_argument("--output", metavar="DIR", help="where the plan, the flags and the trace go; default: nowhere")
    answer.add_argument("--train-tokens", metavar="N", help="tokens of the whole training, as 300B")
    answer.add_argument(
        "--verbose", action="store_true", help="every figure of the chosen plan, and all that was tried"
    )
    answer.add_argument("--json", action="store_true", help="everything, as JSON")
    return parser


def _spaces_help() -> str:
    """Each search space, and the targets that it needs."""
    texts = []
    for name, row in SEARCH_SPACES.items():
        lacking = "" if row.megatron_lm is not None else "; not for megatron-lm"
        texts.append(f"{name} ({row.about}{lacking})")
    return f"beside the layout: {', '.join(texts)}; default full for moe-overlap, {NARROW_DEFAULT} for others"


def _add_overlap_arguments(overlap: argparse._ArgumentGroup) -> None:
    for flag, kind, metavar, default, text in (
        ("--overlap-max-partitions", int, "N", PLAN_SEARCH_LIMITS.max_partitions, "most partitions of a range"),
        (
            "--overlap-group-seconds",
            float,
            "S",
            PLAN_SEARCH_LIMITS.group_seconds,
            "shorter operators are moved together",
        ),
        ("--overlap-range-limit", int, "N", PLAN_SEARCH_LIMITS.range_limit, "most groups in a range"),
    ):
        overlap.add_argument(flag, metavar=metavar, type=kind, help=f"{text} (default {default:g})")
    overlap.add_argument(
        "--refine",
        metavar="TRACE",
        nargs="+",
        default=(),
        help="of --trace of pretrain_moe.py: what runs of this job took",
    )


def run() -> int:
    """Entry point of `moe-tune` and `tools/autotune.py`."""
    # The search creates millions of small objects without cycles: garbage collection would take a quarter of its time.
    gc.disable()
    return main()
