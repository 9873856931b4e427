"""The tuner against the complete grid: it chooses a plan from measurements, then every layout runs on rate-limited links.

    tools/benchmark_closed_loop.py [--models moe dense] [--mbit 100 300 1000] [--ranks 4] [--micro-batches 2]
                                   [--steps 3] [--slower 6] [--grid-only] [--fastest N]
                                   [--folder DIR] [--json]

For every model and rate of the links:

1. tools/profile_cluster.py runs on the ranks, each on its own host (network namespaces, root), and measures operators and links.
   All hosts count as one node, so that tensor ranks may be neighbours. Then the ranks measure larger messages, because a link's
   token bucket passes most sizes of a quick profile at once.
2. The plan is searched as by tools/autotune.py, only from that cluster file and the model's flags.
3. All layouts of the grid that pretrain_moe.py accepts are predicted, and then executed by the runtime, together with the chosen
   plan. Operators compute, and then sleep until the seconds of the cost model on free links are over
   (tools/bench/padded_ranks.py): this emulates a device --slower times as slow. All communication is real.

The scores are the chosen step over the fastest measured one, and the rank correlation of predicted and measured steps. Every cell
is kept in the folder when it is complete.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Only the folder of a script is on its path: the package `tools` is one folder up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_overlap.api import job_operators, predict, problem_of
from moe_overlap.describe.cluster import Cluster, load_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.job import read_job
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.search import search_plan
from moe_overlap.report.search import write_search
from moe_overlap.tuner.capture.cache import cache_folder
from moe_overlap.tuner.cost.simulate.step import simulate_step
from moe_overlap.tuner.profile.cluster_file import measured_cluster
from moe_overlap.tuner.profile.database import Database, LinkKey
from moe_overlap.tuner.profile.lookup import CALL_SECONDS, IN_STEP, fill
from moe_overlap.tuner.search.space import Run, uniform_layouts
from tools.bench.bed import Bed, CpuGroup, require_namespaces
from tools.bench.closed_loop import (
    EVERY_MODEL,
    MODELS,
    LoopCell,
    LoopRow,
    as_json,
    grid,
    job_of,
    layout_flags_of,
    rows_table,
    table,
)
from tools.bench.launch import (
    FIRST_PORT,
    ROOT,
    LaunchedRanks,
    RankFailed,
    Tell,
    environment_of_job,
    kill_sessions,
    place_of,
    placed,
    report_failure,
)
from tools.bench.machine import LEAST_CALL_SECONDS, Say
from tools.bench.padded_ranks import ORDER_LAYOUT, ORDER_LINKS, ORDER_STEP, command_of_padded

NO_SLOWDOWN = 1e-6
"""Sleeping operators and communication do not slow each other down."""
FREE = 1e6
"""Factor by which links become free: only computation remains in a price."""
LARGE_BYTES = (1 << 21, 1 << 22)
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "point_to_point")
WARMING_STEPS = 1
LAYOUTS_OF_RANKS = 4
"""Layouts that ranks run before they are restarted."""
PROFILE_SECONDS, STEP_SECONDS = 900.0, 240.0
"""Longest wait for a profile, and for an answer of a rank."""


def measure_cluster(bed: Bed, priority: CpuGroup, path: Path) -> None:
    """Run tools/profile_cluster.py on the hosts of a bed.

    Raises:
        RankFailed: a rank ended with another status than 0, or has not ended in PROFILE_SECONDS.
    """
    command = [sys.executable, str(ROOT / "tools/profile_cluster.py"), "--quick", "--output", str(path.resolve())]
    shared = environment_of_job(bed.hosts, bed, FIRST_PORT + 2) | {"LOCAL_WORLD_SIZE": str(bed.hosts)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(bed.hosts):
            started = subprocess.Popen(
                placed(command, rank, bed.hosts, bed),
                env=shared | place_of(rank),
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            processes.append(started)
            priority.join(started.pid)
        deadline = time.monotonic() + PROFILE_SECONDS
        statuses = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        raise RankFailed(f"tools/profile_cluster.py has not ended in {PROFILE_SECONDS:g} s") from None
    finally:
        kill_sessions(processes)
    if any(statuses):
        raise RankFailed(f"tools/profile_cluster.py ended with statuses {statuses}")


def complete(path: Path, ranks: int, tell: Tell, slower: float) -> Cluster:
    """Add large messages to a profile, and make its device slower.

    Most sizes of a quick profile pass a token bucket at once, so a line through them does not predict larger messages.
    """
    database = Database.load(path.with_suffix(".measured.jsonl"))
    keys = [LinkKey(kind, "node", ranks, size) for kind in COLLECTIVES for size in LARGE_BYTES]
    keys = [key for key in keys if key not in database.links]
    for key, seconds in zip(
        keys, tell(do=ORDER_LINKS, keys=[dataclasses.astuple(key) for key in keys])[0], strict=True
    ):
        database.add_link(key, seconds)
    database.add_rate(IN_STEP, slower)
    database.add_rate(CALL_SECONDS, LEAST_CALL_SECONDS)
    database.add_rate("overlap_slowdown", NO_SLOWDOWN)
    content = measured_cluster(database, path.stem, nodes=1, ranks_per_node=ranks)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return load_cluster(path)


def without_links(path: Path) -> Cluster:
    """A copy of a cluster file with free links, in the same folder."""
    content = json.loads(path.read_text())
    group, measured = content["groups"][0], content["measured"]
    for rate in ("node_gb_per_s", "network_gb_per_s"):
        group[rate] *= FREE
    measured["latency_seconds"] /= FREE
    measured["latencies"] = {kind: seconds / FREE for kind, seconds in measured["latencies"].items()}
    free = path.with_name(f"{path.stem}-free.json")
    free.write_text(json.dumps(content, indent=1) + "\n")
    return load_cluster(free)


def operator_seconds(flags: Sequence[str], free: Cluster) -> list[dict[str, float]]:
    """Seconds of one instruction of every operator, stage by stage, on links that take no time."""
    problem = problem_of(flags, free, {})
    step = simulate_step(problem.plan, problem)
    seconds = []
    for prices in step.prices.values():
        of_stage: dict[str, float] = {}
        for i in prices.instructions:
            if i.kind in ("compute", "weight-gradient"):
                of_stage[i.name] = prices.seconds(i) / (len(i.partition) or 1 if i.kind == "weight-gradient" else 1)
        seconds.append(of_stage)
    return seconds


def refusal_of(flags: Sequence[str], ranks: int) -> str | None:
    """The rule by which training refuses a command line; None if it accepts it."""
    try:
        read_job(flags, ranks)
    except ConfigError as error:
        return str(error)
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class LoopCandidate:
    """A command line to predict and run."""

    name: str
    flags: tuple[str, ...]
    predicted_seconds: float
    seconds: list[dict[str, float]]


def candidates_of(
    job: Sequence[str], cluster: Cluster, free: Cluster, micro_batches: Sequence[int], say: Say
) -> tuple[list[LoopCandidate], list[LoopRow]]:
    """Every layout of the grid, predicted; and those that are refused."""
    described = read_job([*job, "--micro-batch-size", "1"], cluster.gpus)
    run = Run(
        gpus=cluster.gpus,
        domain_gpus=cluster.gpus,
        sequence_length=described.plan.sequence_length,
        global_batch_size=described.plan.global_batch_size,
    )
    candidates, refused = [], []
    chosen = list(grid(list(uniform_layouts(described.model, run)), micro_batches))
    fitting = {layout.name: (*job, *layout_flags_of(layout)) for layout in chosen}
    for name, flags in list(fitting.items()):
        if (rule := refusal_of(flags, cluster.gpus)) is not None:
            refused.append(LoopRow(name, flags, refusal=rule))
            del fitting[name]
    assert cluster.measured is not None
    keys = {key for flags in fitting.values() for key in job_operators(flags, cluster.gpus, "cpu")}
    fill(Database.load(Path(cluster.measured.database)), sorted(keys), cluster.gpus)
    for name, flags in fitting.items():
        seconds = predict(flags, cluster).predicted.step_seconds
        candidates.append(LoopCandidate(name, flags, seconds, operator_seconds(flags, free)))
    say(f"{len(candidates)} layouts predicted, {len(refused)} refused")
    return candidates, refused


def choose(job: Sequence[str], cluster: Cluster, free: Cluster, folder: Path, say: Say) -> tuple[LoopCandidate, float]:
    """Search the plan as tools/autotune.py does, and write its files."""
    answer = search_plan([*job], cluster, SearchSettings(has_baseline=False))
    write_search(folder, answer)
    overlap = "" if answer.tuned is None else f" + {answer.tuned.chosen.name}"
    name = f"{answer.chosen.name}{overlap}"
    flags = (f"@{(folder / 'megatron_args.txt').resolve()}",)
    say(f"chosen in {answer.seconds:.1f} s: {name}")
    predicted = answer.prediction.predicted.step_seconds
    return LoopCandidate(name, flags, predicted, operator_seconds(flags, free)), answer.seconds


def measure(
    candidates: Sequence[LoopCandidate], start: Callable[[], LaunchedRanks], steps: int, say: Say
) -> list[LoopRow]:
    """Run every candidate for some steps.

    Args:
        start: starts new ranks. Each earlier layout of a rank keeps about 45 threads of gloo, which wake up even if nothing is
            sent: as the eighteenth layout of its ranks a plan took 2.63 s, as the first one 1.82.
    """
    rows: list[LoopRow] = []
    for first in range(0, len(candidates), LAYOUTS_OF_RANKS):
        with start() as ranks:
            ranks.answers()
            rows += _measured(candidates[first : first + LAYOUTS_OF_RANKS], ranks.tell, steps)
        for number, row in enumerate(rows[first:], first + 1):
            say(
                f"{number}/{len(candidates)} {row.name}: predicted {row.predicted_seconds:.3f} s,"
                f" measured {row.measured_seconds:.3f} s, late {row.late_seconds:.3f} s"
            )
    return rows


def _measured(candidates: Sequence[LoopCandidate], tell: Callable[..., list[Any]], steps: int) -> list[LoopRow]:
    rows = []
    for candidate in candidates:
        tell(do=ORDER_LAYOUT, flags=list(candidate.flags), seconds=candidate.seconds)
        answers = [tell(do=ORDER_STEP) for _ in range(WARMING_STEPS + steps)][WARMING_STEPS:]
        seconds = [max(answer["whole"] for answer in step) for step in answers]
        worst = [max(step, key=lambda answer: float(answer["late"])) for step in answers]
        late = sorted(float(answer["late"]) for answer in worst)[steps // 2]
        unknown = tuple(sorted({name for answer in answers[0] for name in answer["unknown"]}))
        rows.append(
            LoopRow(candidate.name, candidate.flags, candidate.predicted_seconds, tuple(seconds), late, unknown)
        )
    return rows


def cell_of(arguments: argparse.Namespace, model: str, mbit: float, say: Say) -> LoopCell:
    """Profile, choose, predict and run one model on links of one rate."""
    job, folder = job_of(model), arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{mbit:g}mbit.json"
    with CpuGroup() as priority, Bed(arguments.ranks, mbit) as bed:
        say(f"{model} at {mbit:g} Mbit/s: profile")
        operators = folder / "operators.measured.jsonl"
        database = path.with_suffix(".measured.jsonl")
        if operators.exists() and not database.exists():
            shutil.copy(operators, database)  # operators do not depend on links
        measure_cluster(bed, priority, path)
        command = command_of_padded(job, arguments.slower)

        def start() -> LaunchedRanks:
            return LaunchedRanks(
                command, bed.hosts, bed, priority, folder=ROOT, port=FIRST_PORT + 3, timeout_seconds=STEP_SECONDS
            )

        with start() as ranks:
            ranks.answers()
            cluster = complete(path, bed.hosts, ranks.tell, arguments.slower)
        free = without_links(path)
        candidates, refused = candidates_of(job, cluster, free, arguments.micro_batches, say)
        if arguments.grid_only:
            chosen, search_seconds = min(candidates, key=lambda candidate: candidate.predicted_seconds), 0.0
        else:
            chosen, search_seconds = choose(job, cluster, free, folder / f"{model}-{mbit:g}mbit", say)
        keep_operators(database, operators)
        candidates = sorted(candidates, key=lambda candidate: candidate.predicted_seconds)[: arguments.fastest]
        chosen_row, *rows = measure([chosen, *candidates], start, arguments.steps, say)
    return LoopCell(model, mbit, (*rows, *refused), chosen_row, search_seconds)


def keep_operators(database: Path, operators: Path) -> None:
    """Keep the measured operators and rates, without links, for a bed of another rate."""
    lines = [text for text in database.read_text().splitlines() if '"link"' not in text]
    operators.write_text("\n".join(lines) + "\n")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Our options.

    Raises:
        ConfigError: nothing can be measured like that.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), help=f"of {', '.join(EVERY_MODEL)}")
    parser.add_argument("--mbit", type=float, nargs="+", default=[100.0, 300.0, 1000.0], help="rates of the links")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=[2], help="samples of a micro-batch, in the grid"
    )
    parser.add_argument("--steps", type=int, default=3, help="measured steps of every layout, behind one to warm up")
    parser.add_argument(
        "--grid-only",
        action="store_true",
        help="do not search: choose the layout of the grid with the fastest prediction",
    )
    parser.add_argument("--fastest", type=int, help="run only so many of the grid, predicted to be the fastest")
    parser.add_argument("--slower", type=float, default=6.0, help="how much slower than this machine the device is")
    folder = cache_folder().parent / "closed_loop"
    parser.add_argument("--folder", type=Path, default=folder, help=f"of measurements and plans; default {folder}")
    parser.add_argument("--json", action="store_true", help="print nothing but JSON")
    arguments = parser.parse_args(argv)
    for model in arguments.models:
        if model not in EVERY_MODEL:
            raise ConfigError("--models", model, "no such model", f"choose among {', '.join(EVERY_MODEL)}")
    numbers: Mapping[str, Sequence[float]] = {
        "--mbit": arguments.mbit,
        "--micro-batches": arguments.micro_batches,
        "--steps": [arguments.steps],
        "--fastest": [] if arguments.fastest is None else [arguments.fastest],
        "--slower": [arguments.slower],
    }
    for flag, values in numbers.items():
        for value in values:
            if not value > 0:
                raise ConfigError(flag, value, "must be positive", "leave it out for the default")
    if arguments.ranks < 2:
        raise ConfigError("--ranks", arguments.ranks, "one rank has one layout", "use 2 or 4")
    require_namespaces()
    return arguments


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {text}", file=sys.stderr, flush=True)

    try:
        arguments = parse_arguments(argv)
        cells = []
        for mbit in arguments.mbit:
            for model in arguments.models:
                cells.append(cell_of(arguments, model, mbit, say))
                path = arguments.folder / f"{model}-{mbit:g}mbit-{arguments.ranks}ranks.json"
                path.write_text(json.dumps(as_json(cells[-1]), indent=1) + "\n")
                say(rows_table(cells[-1]))
    except (ConfigError, RankFailed) as error:
        return report_failure(error)
    if arguments.json:
        print(
            json.dumps(
                {"ranks": arguments.ranks, "slower": arguments.slower, "cells": [as_json(cell) for cell in cells]},
                indent=1,
            )
        )
    else:
        print(table(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
