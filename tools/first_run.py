"""`make train`: a cluster in a box, and all steps from a measurement to a tuned training, in a few minutes.

    python tools/first_run.py [--link auto|namespaces|emulator|none] [--processes 2] [--folder runs/first]
                              [--plain-steps 12] [flags of pretrain_moe.py]

1. link      Every process represents a GPU on its own machine. Computation is measured first; the link between the processes
             gets the rate at which all-to-alls take half as long as computation, as on many clusters.
2. measure   operators of this model, collectives on this link, and the host's overhead per step.
3. tune      `tools/autotune.py --overlap-only`: which overlap hides the all-to-alls best on such a cluster?
4. train     a few steps of the plain run, then the complete run with the plan, from the same start.
5. compare   predicted and measured steps, exposed communication and losses of both.

The model is examples/first-run.args; flags that follow change it. --link: `namespaces` are separate hosts on this machine with
rate-limited exits (root, iproute2); `emulator` limits all-to-alls inside the processes; `auto` takes the first of both that this
machine allows; `none` has no limit. Everything is written to --folder: cluster.json, plan.json, megatron_args.txt,
trace.json (a tuned step of every rank, for ui.perfetto.dev), report.html, result.json.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Only the folder of a script is on its path: the package `tools` is one folder up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.training.cli.arguments import expand_files, parse
from megatron.training.cli.validation import validate
from moe_overlap.api import Tuned, job_operators, read_job, tune
from moe_overlap.commands.exits import INTERRUPTED, end_process
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import plain_json
from moe_overlap.plan.instructions import Span, communication_seconds
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.plan.trace import read_traces, write_ranks
from moe_overlap.report.picture import draw, step_of
from moe_overlap.report.tuning import write_run
from tools.bench.bed import Bed
from tools.bench.first_report import Facts, RunFacts, facts_json, page, table
from tools.bench.launch import ROOT, RankFailed, RanksOnBed, ranks_on_bed, report_failure
from tools.bench.machine import MEASURED_LINKS, MeasuredBed, measure_host_time_here, predicted_spans
from tools.bench.training import command_of_training, train
from tools.bench.variants import Variant
from tools.bench.worker import ORDER_STEP

JOB = ROOT / "examples" / "first-run.args"
RATIO = 0.5
"""The link's rate is chosen for this ratio of all-to-all seconds to computation seconds."""
PROBED_STEPS, WARM_UP = 5, 2
SHOWN_STEPS = {"plain": 1, "tuned": 4}
"""Number of steps of a training that are shown, in addition to the first."""
MEASURED_PARTITIONS = (2, 4, 8)
"""Operators are measured in the sizes that these numbers of parts leave, too."""
LIMITS = SearchLimits(max_partitions=MEASURED_PARTITIONS[-1], group_seconds=0.0, range_limit=16)
LINKS = {**MEASURED_LINKS, "all_to_all": tuple(1 << power for power in range(18, 24))}
"""Parts of an all-to-all are small: they are measured from 256 KiB on."""
OPERATORS_AT_ONCE = 25
OUTPUTS = ("--save", "--log-json", "--trace", "--tensorboard-dir", "--wandb-project", "--log-expert-load")
"""Flags of files that the plain run leaves to the tuned one."""
QUIET_SECONDS = 20
OWN_FILES = (
    "cluster.json",
    "cluster.measured.jsonl",
    "plan.json",
    *(f"{name}{kind}" for name in ("plain", "tuned") for kind in (".jsonl", "_trace.json")),
    *(f"{name}{kind}.rank*" for name in ("plain", "tuned") for kind in (".jsonl", "_trace.json")),
)
"""Files of the folder, as patterns, that a new run begins without."""
PLACING = ("setpriv", "taskset")
"""Programs of util-linux that give every rank its processor, and end it with this program."""
REFUSED = (
    ("--dry-run", "the first run trains", f"use pretrain_moe.py @{JOB.relative_to(ROOT)} --dry-run"),
    (
        "--load",
        "plain and tuned training begin at step 1",
        "go on with pretrain_moe.py @runs/first/megatron_args.txt --load …",
    ),
    ("--log-interval", "the comparison reads every step", "drop it"),
    ("--exit-interval", "the comparison ends the plain training itself", "use --train-iters"),
)
"""Flags of pretrain_moe.py that the first run has no use for: flag, rule and fix."""


@dataclasses.dataclass(frozen=True, slots=True)
class FirstRun:
    """The run of a command line.

    Attributes:
        link: namespaces, emulator or none.
        no_namespaces: why `auto` chose the emulator; empty if it did not.
        ranks: number of processes, all in one group of expert parallelism.
        flags: flags of pretrain_moe.py, with files expanded.
        train_steps: number of steps of the tuned run.
        plain_steps: number of steps of the plain run.
        folder: an absolute path.
    """

    link: str
    no_namespaces: str
    ranks: int
    flags: tuple[str, ...]
    train_steps: int
    plain_steps: int
    folder: Path

    @property
    def emulated(self) -> bool:
        """True if the processes emulate the link."""
        return self.link == "emulator"


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """Seconds and bytes of a plain step, by rank-averaged medians.

    Attributes:
        compute_seconds: without the all-to-alls, forward and backward.
        exchange_seconds: the time of its all-to-alls.
        sent_bytes: that leave a rank.
    """

    compute_seconds: float
    exchange_seconds: float
    sent_bytes: float

    @property
    def ratio(self) -> float:
        """All-to-all over computation."""
        return self.exchange_seconds / self.compute_seconds


def link_mbit(probe: Probe, ratio: float = RATIO) -> float:
    """The rate, in 10^6 bit/s, at which the bytes of a step take `ratio` of its computation; three digits."""
    return float(f"{probe.sent_bytes * 8 / (ratio * probe.compute_seconds) / 1e6:.3g}")


def probe_of(steps: Sequence[Sequence[dict[str, float]]]) -> Probe:
    """Summarise steps.

    Args:
        steps: of every step, the answers of all ranks (`tools.bench.worker.Rank.step`).
    """

    def middle(value: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(statistics.fmean(map(value, answers)) for answers in steps)

    return Probe(
        compute_seconds=middle(lambda answer: answer["step"] - answer["exposed"]),
        exchange_seconds=middle(lambda answer: answer["exchanges"]),
        sent_bytes=middle(lambda answer: answer["sent_bytes"]),
    )


def settled_link(link: str) -> tuple[str, str]:
    """The requested link, or for `auto` the first that this machine allows; and the reason if `auto` could not use namespaces.

    Raises:
        ConfigError: namespaces are requested and cannot be created.
    """
    if link not in ("auto", "namespaces"):
        return link, ""
    try:
        with Bed(1, None):
            return "namespaces", ""
    except ConfigError as error:
        if link == "namespaces":
            raise
        return "emulator", error.rule


def read_command(argv: Sequence[str]) -> FirstRun:
    """Read and check everything before anything is started.

    Raises:
        ConfigError: a flag is wrong, or the job has nothing that crosses the link.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--link", default="auto", help="auto, namespaces, emulator or none")
    parser.add_argument("--processes", type=int, default=2, help="ranks, each a machine of its own (2)")
    parser.add_argument("--folder", type=Path, default=Path("runs/first"), help="of everything that is written")
    parser.add_argument("--plain-steps", type=int, default=12, help="steps without overlap, to compare with (12)")
    arguments, more = parser.parse_known_args(argv)
    ranks = arguments.processes
    if arguments.link not in ("auto", "namespaces", "emulator", "none"):
        raise ConfigError("--link", arguments.link, "unknown", "use auto, namespaces, emulator or none")
    if ranks < 2:
        raise ConfigError("--processes", ranks, "one process has no link", "use 2, or run pretrain_moe.py itself")
    if arguments.plain_steps < 1:
        raise ConfigError("--plain-steps", arguments.plain_steps, "must be positive", "use 12")
    if missing := [program for program in PLACING if shutil.which(program) is None]:
        raise ConfigError(
            "make train", ", ".join(missing), "not installed", "install util-linux, or use pretrain_moe.py"
        )
    for flag, rule, fix in REFUSED:
        if any(word.partition("=")[0] == flag for word in expand_files(more)):
            raise ConfigError(flag, "", rule, fix)
    batch = micro_batch_size([f"@{JOB}", *more]) * ranks
    grown = ("--expert-model-parallel-size", str(ranks), "--global-batch-size", str(batch))
    flags = tuple(expand_files([f"@{JOB}", *grown, *more]))
    parsed = parse(list(flags))
    validate(parsed.config, ranks)
    plan = read_job(flags, ranks).plan
    if plan.stages[0].expert != ranks:
        size = parsed.config.parallel.expert_model_parallel_size
        raise ConfigError("--expert-model-parallel-size", size, f"{ranks} processes share one link", f"use {ranks}")
    if plan.is_listed:
        raise ConfigError(
            "--moe-overlap-*", "", "how to overlap is what this run finds out", "drop the flags of overlap"
        )
    steps = parsed.config.training.train_iters
    if steps is None:
        raise ConfigError("--train-samples", "", "the comparison counts steps", "use --train-iters")
    link, no_namespaces = settled_link(arguments.link)
    folder = arguments.folder.resolve()
    return FirstRun(link, no_namespaces, ranks, flags, steps, min(arguments.plain_steps, steps), folder)


def micro_batch_size(flags: Sequence[str]) -> int:
    """The micro-batch of the flags, before the batch that depends on it is known."""
    size = parse(list(expand_files(flags))).config.training.micro_batch_size
    if size is None:
        raise ConfigError("--micro-batch-size", "", "is not given", "add it")
    return size


def without(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The arguments without some flags and their values."""
    return _split(arguments, flags)[0]


def only(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Some flags of the arguments, with their values."""
    return _split(arguments, flags)[1]


def _split(arguments: Sequence[str], flags: Sequence[str]) -> tuple[list[str], list[str]]:
    others: list[str] = []
    named: list[str] = []
    into = others
    for word in arguments:
        if word.startswith("--"):
            into = named if word.partition("=")[0] in flags else others
        into.append(word)
    return others, named


class Console:
    """Result lines on stdout and a progress line on stderr."""

    def __init__(self) -> None:
        self._moving = sys.stderr.isatty()
        self._printed_at = time.monotonic()

    def say(self, name: str, text: str) -> None:
        """A line that stays."""
        if self._moving:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        print(f"{name:<11} {text}", flush=True)

    def doing(self, text: str) -> None:
        """Print progress: a terminal shows only the latest line, a file gets at most one line per QUIET_SECONDS."""
        if self._moving:
            sys.stderr.write(f"\r\x1b[K            … {text}")
        elif time.monotonic() - self._printed_at > QUIET_SECONDS:
            self._printed_at = time.monotonic()
            sys.stderr.write(f"            … {text}\n")
        sys.stderr.flush()


def measure(run: FirstRun, console: Console) -> tuple[float | None, MeasuredBed, Cluster]:
    """Steps 1 and 2: derive and make the link, then measure operators, collectives and the host's overhead."""
    begun = time.monotonic()
    flags, plain = without(run.flags, OUTPUTS), Variant("plain", ())
    console.doing("starting the ranks")
    with ranks_on_bed(
        run.ranks, flags, [[plain]], plain, timer=False, namespaces=run.link == "namespaces", mbit=None
    ) as ranks:
        mbit = make_link(run, ranks, console)
        path = run.folder / "cluster.json"
        bed = MeasuredBed(path, run.ranks, 1, ranks.tell, console.doing)
        keys = operators_of(flags, run.ranks)
        for first in range(0, len(keys), OPERATORS_AT_ONCE):
            console.doing(f"measuring operators {first + 1} … of {len(keys)}")
            bed.measure_operators(keys[: first + OPERATORS_AT_ONCE])
        bed.measure_links(LINKS)
    console.doing("measuring the host's overhead per step, on two other jobs")
    measure_host_time_here(bed.database, bed.cluster())
    cluster = bed.cluster()
    text = (
        f"{len(bed.database.operators)} operators, {len(bed.database.links)} transfers and the host's share of a step"
    )
    console.say("2 measure", f"{text}, in {time.monotonic() - begun:.0f} s")
    return mbit, bed, cluster


def make_link(run: FirstRun, ranks: RanksOnBed, console: Console) -> float | None:
    """Derive the rate from computation, and look at what all-to-alls take then. Returns it in 10^6 bit/s, None for no limit."""

    def probe() -> Probe:
        for _ in range(WARM_UP):
            ranks.tell(do=ORDER_STEP, variant="plain", scale=1.0)
        return probe_of([ranks.tell(do=ORDER_STEP, variant="plain", scale=1.0) for _ in range(PROBED_STEPS)])

    console.doing("timing steps on a link without limit")
    free = probe()
    if run.link == "none":
        console.say("1 link", f"none: the machine's own memory; all-to-alls take {free.ratio:.0%} of computation")
        return None
    mbit = link_mbit(free)
    ranks.set_rate(mbit)
    console.doing(f"timing steps on a link of {mbit:g} Mbit/s")
    limited = probe()
    place = {"namespaces": "network namespaces behind rate-limited exits", "emulator": "emulated inside the processes"}
    console.say("1 link", f"{mbit:g} Mbit/s out of each rank: {place[run.link]}")
    if run.no_namespaces:
        console.say("", f"not in namespaces: {run.no_namespaces}")
    link_seconds, sent = limited.sent_bytes * 8 / (mbit * 1e6), limited.sent_bytes / 2**20
    share = f"{link_seconds / free.compute_seconds:.2f} of the {free.compute_seconds:.2f} s of its computation"
    console.say("", f"a step sends {sent:.0f} MiB, {link_seconds:.2f} s at this rate: {share}")
    console.say("", f"with waiting for each other's data its all-to-alls take {limited.exchange_seconds:.2f} s")
    return mbit


def operators_of(flags: Sequence[str], ranks: int) -> list[Any]:
    """Operators of the job, uncut and in partitions."""
    ways: list[tuple[str, ...]] = [(), ("--defer-weight-gradients",)]
    for parts in MEASURED_PARTITIONS:
        cut = ("--moe-overlap-partitions", str(parts), "--moe-overlap-range", "around", "--defer-weight-gradients")
        with contextlib.suppress(ConfigError):  # a micro-batch has fewer samples: the tuner does not cut it so often
            job_operators([*flags, *cut], ranks, "cpu")
            ways.append(cut)
    return sorted({key for way in ways for key in job_operators([*flags, *way], ranks, "cpu")})


def tune_job(run: FirstRun, cluster: Cluster, console: Console) -> Tuned:
    """Step 3: choose the overlap and write flags and plan."""
    console.doing("comparing ways to overlap")
    tuned = tune(without(run.flags, OUTPUTS), cluster, LIMITS)
    write_run(run.folder, tuned)
    gained = tuned.plain_seconds / tuned.chosen.seconds
    figures = f"{tuned.plain_seconds:.2f} s → {tuned.chosen.seconds:.2f} s a step predicted ({gained:.2f}x)"
    console.say(
        "3 tune",
        f"{len(tuned.others) + 1} ways compared in {tuned.search_seconds:.0f} s: {tuned.chosen.name}; {figures}",
    )
    return tuned


def plain_words(run: FirstRun) -> list[str]:
    """Flags of the plain run: it follows the schedule of the complete run, and ends early."""
    outputs = ("--log-json", str(run.folder / "plain.jsonl"), "--trace", str(run.folder / "plain_trace.json"))
    ends = ("--eval-iters", "0", "--exit-interval", str(run.plain_steps), "--log-interval", "1")
    return [*without(run.flags, OUTPUTS), *outputs, *ends]


def tuned_words(run: FirstRun, tuned: Tuned) -> list[str]:
    """Flags of the tuned run: the user's come last, and win."""
    outputs = ("--log-json", str(run.folder / "tuned.jsonl"), "--trace", str(run.folder / "tuned_trace.json"))
    logging = ("--save", "checkpoints", "--log-interval", "1")
    plan = run.folder / "plan.json"
    decided = ("--plan", str(plan)) if plan.exists() else ()
    return [*outputs, *logging, *tuned.arguments, *only(run.flags, OUTPUTS), *decided]


def train_job(
    run: FirstRun, flags: Sequence[str], name: str, steps: int, mbit: float | None, console: Console
) -> list[dict[str, Any]]:
    """Step 4: train once. The first step and a few others are shown; the complete output is in NAME.log.

    Returns:
        What the training has logged of every step.
    """
    logged = Path(str(parse(list(flags)).config.logging.log_json))
    before = logged.stat().st_size if logged.exists() else 0  # a user's file may hold other runs
    parts = SHOWN_STEPS[name]
    shown = {1, *(round(steps * part / parts) for part in range(1, parts + 1))}

    def show(line: str) -> None:
        first, _, rest = line.partition(" ")
        if first == "step":
            number = int(rest.split("/")[0])
            if number in shown:
                console.say("", " ".join(line.split("  peak")[0].split()))
            else:
                console.doing(" ".join(line.split()))
        elif first in ("valid", "test", "saved"):
            console.say("", " ".join(line.split()))

    rate = mbit * 1e6 / 8 if run.emulated and mbit is not None else None
    with Bed(run.ranks, mbit) if run.link == "namespaces" else contextlib.nullcontext() as bed:
        train(command_of_training(flags, rate), run.ranks, bed, run.folder / f"{name}.log", show)
    return [dict(plain_json(line)) for line in logged.read_bytes()[before:].decode().splitlines()]


def predicted_steps(trainings: Sequence[Sequence[str]], bed: MeasuredBed, cluster: Cluster) -> list[list[Span]]:
    """A step of rank 0 under the flags of every training, as its recorder would write it."""
    return [predicted_spans(without(of_run, OUTPUTS), cluster, bed.links(), None)[0] for of_run in trainings]


def compare(
    run: FirstRun,
    tuned: Tuned,
    predicted: Sequence[Sequence[Span]],
    setting: Sequence[str],
    trainings: Sequence[Sequence[str]],
    rows: Sequence[Sequence[dict[str, Any]]],
) -> Facts:
    """Step 5: predicted and measured figures of both trainings; the trace and the page are written."""
    traces = [Path(str(parse(list(of_run)).config.overlap.trace)) for of_run in trainings]
    measured = [{rank: ran for file in read_traces(path) for rank, ran in file.spans.items()} for path in traces]
    seconds = tuned.plain_seconds, tuned.chosen.seconds
    plain_facts, tuned_facts = (RunFacts(seconds[n], communication_seconds(predicted[n])[1], rows[n]) for n in range(2))
    facts = Facts(setting, tuned.chosen.name, plain_facts, tuned_facts)
    steps = [
        step_of(spans, f"{name}, {kind}")
        for n, name in enumerate(("Plain", "Tuned"))
        for kind, spans in (("predicted", predicted[n]), ("measured (the last step)", measured[n][0]))
    ]
    write_ranks(run.folder / "trace.json", measured[1])
    (run.folder / "result.json").write_text(json.dumps(facts_json(facts), indent=1) + "\n", encoding="utf-8")
    (run.folder / "report.html").write_text(page(facts, draw(steps)), encoding="utf-8")
    return facts


def torch_build() -> str:
    """One line: the installed torch, and the devices that it trains on."""
    import torch

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
    gpus = torch.cuda.device_count()
    return f"torch {torch.__version__}, {built}; it trains on {f'{gpus} GPUs' if gpus else 'the CPU'} here"


def go(run: FirstRun, console: Console) -> Facts:
    """Steps 1 to 5."""
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        for pattern in OWN_FILES:
            for old in run.folder.glob(pattern):
                old.unlink()
    except OSError as error:
        raise ConfigError("--folder", run.folder, f"cannot be written: {error.strerror}", "give another") from None
    place = f"files: {run.folder}"
    console.say("first run", f"{run.ranks} ranks of pretrain_moe.py share the experts of {JOB.stem}; {place}")
    console.say("", torch_build())
    mbit, bed, cluster = measure(run, console)
    tuned = tune_job(run, cluster, console)
    trainings = plain_words(run), tuned_words(run, tuned)
    console.say("4 train", f"plain: {run.plain_steps} of {run.train_steps} steps, nothing overlapped")
    plain_rows = train_job(run, trainings[0], "plain", run.plain_steps, mbit, console)
    console.say("", f"tuned: all {run.train_steps} steps from the same start, {tuned.chosen.name}")
    tuned_rows = train_job(run, trainings[1], "tuned", run.train_steps, mbit, console)
    link = "no limited link" if mbit is None else f"{run.link}, {mbit:g} Mbit/s"
    setting = (f"{JOB.stem}: {run.ranks} ranks, {link}", f"plan: {tuned.chosen.name}")
    return compare(run, tuned, predicted_steps(trainings, bed, cluster), setting, trainings, (plain_rows, tuned_rows))


def main(argv: Sequence[str]) -> int:
    """Go, and print the answer; 2 for a user's mistake."""
    console = Console()
    try:
        run = read_command(argv)
        facts = go(run, console)
    except (ConfigError, RankFailed) as error:
        return report_failure(error)
    except KeyboardInterrupt:
        print("\nerror: interrupted; the ranks and their hosts are gone", file=sys.stderr)
        return INTERRUPTED
    for index, line in enumerate(table(facts)):
        console.say("" if index else "5 compare", line)
    console.say("look at", f"{run.folder / 'report.html'} (picture), {run.folder / 'trace.json'} (ui.perfetto.dev)")
    return 0


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
