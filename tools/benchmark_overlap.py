"""Measure the gain of overlapping all-to-alls, on one machine.

    tools/benchmark_overlap.py [--namespaces | --emulator] [--timer-compute] [--ranks 2] [--ratio 0.5 1] [--repeats 5]
                               [--gates topk] [--partitions 2] [--ranges around] [--reach 0 1] [--json]
                               [flags of pretrain_moe.py]

Each rank has its own host. The rate of the links between hosts makes the all-to-alls of the sequential step take `ratio` times as
long as the rest of the step. All variants take turns in one run: megatron-core's all-to-all, the same point-to-point with
receives first, the irregular dispatcher (the sequential step), Tutel-style pipelining, deferral of weight gradients, partitions
of the batch, both, and both with a wait right after every start, which must undo the gain. With --micro-batches of 2 or more also
the backward pass of one micro-batch under the forward all-to-alls of another, without and with both ("all").

--namespaces    network namespaces (root); the default if they can be created
--emulator      the link is emulated inside the processes; the default otherwise
--timer-compute operators sleep for their profiled time (processor seconds); communication is real. Steadier, and possible with
                more ranks than cores. Without it computation is real.
--ranges        the ranges that run in partitions; default: around, or after if a gate needs the complete micro-batch
--reach         with --timer-compute: also ranges with this number of operators on each side of every MoE layer (Lancet, figure 6)

tools/record_overlap.py runs the series of examples/records.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Only the folder of a script is on its path: the package `tools` is one folder up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.gates import GATE_FACTS, require_partitionable
from tools.bench.figures import Figures, MeasuredSteps, MeasuredTurn, Totals, table
from tools.bench.launch import (
    RankFailed,
    RanksOnBed,
    add_link_options,
    links_name,
    ranks_on_bed,
    report_failure,
    settle_links,
)
from tools.bench.profile import mean_of_ranks, step_seconds
from tools.bench.variants import MODEL, PLAIN, SEQUENTIAL, Variant, default_ranges, deferral, job_flags, variants
from tools.bench.worker import ORDER_PROFILE, ORDER_STEP, ORDER_USE

RELIABLE_MBIT = 500.0
"""Above this rate gloo's processor time is visible next to the link's."""
PROFILE_STEPS = 5


def step_of(processes: RanksOnBed, variant: str, scale: float = 1.0, trace: Path | None = None) -> dict[str, float]:
    """Execute one step of a variant.

    Args:
        scale: factor of the operators' sleeps, over timer compute.
        trace: file for the spans of rank 0; those of rank N go to FILE.rankN in the same folder.
    Returns:
        The figures of the slowest rank.
    """
    file = None if trace is None else str(trace.resolve())
    answers = processes.tell(do=ORDER_STEP, variant=variant, scale=scale, trace=file)
    return {name: max(answer[name] for answer in answers) for name in answers[0]}


def turn_of(processes: RanksOnBed, variant: str) -> MeasuredTurn:
    """Measure one step."""
    figures = step_of(processes, variant)
    return MeasuredTurn(figures["step"], figures["exposed"])


def measure(
    processes: RanksOnBed, names: Sequence[str], repeats: int, mbit: float, timer: bool, say: Callable[[str], None]
) -> MeasuredSteps:
    """Measure all variants in turn, `repeats` times, each with the limited and with the free link."""
    limited: dict[str, list[MeasuredTurn]] = {name: [] for name in names}
    free: dict[str, list[MeasuredTurn]] = {name: [] for name in names}
    communication: dict[str, list[float]] = {name: [] for name in names} if timer else {}
    for repeat in range(repeats):
        processes.set_rate(mbit)
        for name in names:
            limited[name].append(turn_of(processes, name))
            if timer:
                communication[name].append(step_of(processes, name, scale=0.0)["step"])
        processes.set_rate(None)
        for name in names:
            free[name].append(turn_of(processes, name))
        say(f"repeat {repeat + 1}/{repeats}")
    return MeasuredSteps(limited, free, communication)


def run(
    arguments: argparse.Namespace, job: Sequence[str], gate: str, ranks: int, say: Callable[[str], None]
) -> list[Any]:
    """Measure one gate on one number of ranks; a record per ratio."""
    chosen = choose(arguments, gate)
    names = [variant.name for variant in chosen]
    records = []
    flags = [*job_flags(ranks, arguments.micro_batches, arguments.experts_per_rank), *job]
    timer = arguments.timer_compute
    # megatron-core's own variants run in processes that never import the overlap code.
    groups = [chosen] if timer else [[v for v in chosen if v.plain], [v for v in chosen if not v.plain]]
    with ranks_on_bed(
        ranks,
        flags,
        [group for group in groups if group],
        deferral(gate),
        timer=timer,
        namespaces=arguments.namespaces,
        mbit=None,
        timeout_seconds=arguments.timeout,
    ) as processes:
        if timer:
            use_profile(processes, arguments, say)
        for name in names:
            step_of(processes, name)  # connections, allocations
        calibrating = [step_of(processes, SEQUENTIAL) for _ in range(3)]
        computation = statistics.median(step["step"] for step in calibrating)
        sent_bytes = calibrating[0]["sent_bytes"]
        for ratio in arguments.ratio:
            mbit = sent_bytes / (ratio * computation) * 8 / 1e6
            say(
                f"{ranks} ranks, {gate}, ratio {ratio:g}: {mbit:.0f} Mbit/s"
                + (" (fast)" if mbit > RELIABLE_MBIT else "")
            )
            measured = measure(processes, names, arguments.repeats, mbit, timer, say)
            rows = measured.figures(SEQUENTIAL, PLAIN if PLAIN in names else None)
            if arguments.traces is not None:
                processes.set_rate(mbit)
                for name in names:
                    step_of(processes, name, trace=trace_file(arguments.traces, ranks, gate, ratio, name))
            records.append(record(arguments, ranks, gate, ratio, mbit, measured.totals(SEQUENTIAL), rows))
    return records


def trace_file(folder: Path, ranks: int, gate: str, ratio: float, variant: str) -> Path:
    """File of the trace of one variant, in a folder that exists afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{ranks}ranks-{gate}-{ratio:g}-{variant.replace(' ', '-')}.json"


def use_profile(processes: RanksOnBed, arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Measure the operators on the processes themselves and let all of them sleep equally long."""
    profile = mean_of_ranks(processes.tell(do=ORDER_PROFILE, steps=PROFILE_STEPS))
    measured = step_seconds(profile, arguments.micro_batches)
    factor = 1.0 if arguments.compute_seconds is None else arguments.compute_seconds / measured
    say(f"profile: {measured:.3f} s of computation per step, times {factor:.3f}")
    processes.tell(do=ORDER_USE, profile={name: seconds * factor for name, seconds in profile.items()})


def choose(arguments: argparse.Namespace, gate: str) -> list[Variant]:
    """The requested variants."""
    ranges = default_ranges(gate) if arguments.ranges is None else arguments.ranges
    offered = variants(gate, arguments.partitions, ranges, arguments.tutel, arguments.reach, arguments.micro_batches)
    if arguments.timer_compute:
        # Over timer compute there is one transport per variant; an emulated link has no half-duplex all-to-all.
        offered = [v for v in offered if not v.receive_first and not (v.plain and not arguments.namespaces)]
    if arguments.variants is None:
        return offered
    known = [variant.name for variant in offered]
    for name in arguments.variants:
        if name not in known:
            raise ConfigError("--variants", name, "unknown here", f"choose among {', '.join(known)}")
    return [v for v in offered if v.name in arguments.variants or v.name == SEQUENTIAL]


def record(
    arguments: argparse.Namespace,
    ranks: int,
    gate: str,
    ratio: float,
    mbit: float,
    totals: Totals,
    rows: list[Figures],
) -> dict[str, Any]:
    """The report on one gate, number of ranks and ratio."""
    return {
        "ranks": ranks,
        "gate": gate,
        "ratio_asked": ratio,
        "ratio": totals.ratio,
        "link_mbit": mbit,
        "links": links_name(arguments),
        "compute": "timer" if arguments.timer_compute else "real",
        "repeats": arguments.repeats,
        "micro_batches": arguments.micro_batches,
        "totals": dataclasses.asdict(totals) | {"bound": totals.bound, "bound_speedup": totals.bound_speedup},
        "summary": str(totals),
        "variants": [dataclasses.asdict(row) for row in rows],
        "table": table(rows),
    }


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and the flags that go on to pretrain_moe.py."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_link_options(parser)
    parser.add_argument("--timer-compute", action="store_true")
    parser.add_argument("--compute-seconds", type=float, help="with --timer-compute: scale the profile to this step")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--ratio", type=float, nargs="+", default=[0.5])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gates", nargs="+", default=["topk"])
    parser.add_argument("--partitions", type=int, nargs="*", default=[2])
    parser.add_argument("--ranges", nargs="+", choices=["experts", "after", "around"])
    parser.add_argument("--reach", type=int, nargs="+", default=[], help="operators on each side of a MoE layer")
    parser.add_argument("--tutel", type=int, nargs="*", default=[2, 4], help="degrees of the baseline")
    parser.add_argument("--variants", nargs="+", help="only these; names as in the table")
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step, on every rank")
    parser.add_argument("--experts-per-rank", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600.0, help="longest wait for a rank, in seconds")
    parser.add_argument(
        "--traces", type=Path, metavar="FOLDER", help="also write a trace of one more step of each variant"
    )
    parser.add_argument("--json", action="store_true", help="print nothing but JSON")
    return parser.parse_known_args(argv)


def check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError where there is nothing to measure, and choose the links where the user has not."""
    for ratio in arguments.ratio:
        if ratio <= 0:
            raise ConfigError("--ratio", ratio, "must be positive", "use 0.25, 0.5, 1 or 2")
    if arguments.repeats < 1:
        raise ConfigError("--repeats", arguments.repeats, "must be positive", "use at least 5")
    for ranks in arguments.ranks:
        if ranks < 2:
            raise ConfigError("--ranks", ranks, "one rank sends no tokens to others", "use 2, 4 or 8")
    for reach in arguments.reach:
        if reach < 0 or not arguments.timer_compute:
            rule = "ranges of any operators have no flag, and are followed over timer compute only"
            raise ConfigError("--reach", reach, rule, "add --timer-compute, and use 0 or more")
    settle_links(arguments)
    for gate in arguments.gates:
        if gate not in GATE_FACTS:
            raise ConfigError("--gates", gate, "no such gate", f"choose among {', '.join(GATE_FACTS)}")
        for name in arguments.ranges or ():
            require_partitionable(gate, name)
        choose(arguments, gate)


def main(argv: Sequence[str]) -> int:
    """Measure all requested variants and print the figures."""
    arguments, rest = parse_arguments(argv)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        check(arguments)
        records = []
        for ranks in arguments.ranks:
            for gate in arguments.gates:
                records += run(arguments, [*MODEL, *rest], gate, ranks, say)
                if not arguments.json:
                    for record in records[-len(arguments.ratio) :]:
                        head = f"{ranks} ranks, {gate}, measured ratio {record['ratio']:.2f}: {record['summary']}"
                        print(f"\n{head}\n\n{record['table']}", flush=True)
    except (ConfigError, RankFailed) as error:
        return report_failure(error)
    if arguments.json:
        print(json.dumps(records, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
