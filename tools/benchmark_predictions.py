"""Compare predicted with measured steps: plans of a small MoE job are predicted, then executed on rate-limited links.

    tools/benchmark_predictions.py [--namespaces | --emulator] [--timer-compute] [--mbit 300] [--repeats 5]
                                   [--plans irregular "both 2 around" …] [--folder DIR] [--json] [flags of pretrain_moe.py]

Two ranks, each on its own host, are joined by links of the given rate. Plans named `pipeline …` have four ranks, two stages of
two ranks that share their experts, and several micro-batches; those named `interleaved …` have two model chunks per stage as
well. Both need timer compute on namespaces: four computing ranks need four cores, and links between stages are not emulated.
1. The ranks measure operators, links and the host's time once for each rate (--folder keeps the measurements).
2. Every plan is predicted from the model's captured graph, as in tools/predict.py, and simulated.
3. All plans run in turn and leave traces, which are compared as in tools/compare_trace.py.
Predicted and measured spans of an all-to-all both last from its start to the end of its rank's wait.

--timer-compute operators sleep for their profiled time, in run and prediction, and there is no update: this tests the order, the
                links and the simulator. Without it computation is real and predicted operator by operator; the host's overhead
                per step is measured on two other jobs (tools/bench/machine.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Only the folder of a script is on its path: the package `tools` is one folder up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_overlap.api import job_operators
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.trace import write_ranks
from moe_overlap.report.trace import Trace, read_trace, rows_of
from moe_overlap.tuner.capture.cache import cache_folder
from tools.bench.launch import (
    RankFailed,
    Tell,
    add_link_options,
    links_name,
    ranks_on_bed,
    report_failure,
    settle_links,
)
from tools.bench.machine import MeasuredBed, Say, calibrating, predicted_spans
from tools.bench.profile import mean_of_ranks
from tools.bench.variants import JOB, Variant, deferral, job_flags, late_sends, variants
from tools.bench.worker import ORDER_PROFILE, ORDER_STEP, ORDER_USE

GATE, RANGE = "topk", "around"
PLANS = ("irregular", "tutel 2", "deferral", "partitions 2 around", "both 2 around", "both 4 around")
PIPELINED = ("pipeline both 2 around",)
PROFILE_STEPS = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """How the ranks of a bed share the job.

    Attributes:
        prefix: of the names of its plans.
        chunks: of every stage, of a layer each where there are several.
    """

    prefix: str
    ranks: int
    stages: int
    micro_batches: int
    chunks: int = 1

    @property
    def flags(self) -> list[str]:
        """Flags of the job, after those of the default job."""
        sizes = job_flags(self.ranks // self.stages, self.micro_batches, 2)
        stages = ["--pipeline-model-parallel-size", str(self.stages)] if self.stages > 1 else []
        layers = ["--num-layers", str(self.stages * self.chunks)] if self.chunks > 1 else []
        chunks = [*layers, "--num-virtual-stages-per-pipeline-rank", str(self.chunks)] if layers else []
        return [*sizes, *stages, *chunks]

    @property
    def plans(self) -> dict[str, Variant]:
        """Its plans by their names, in the order of the overlap benchmark."""
        plans = variants(GATE, (2, 4), (RANGE,), (2, 4), micro_batches=self.micro_batches)
        plans += [late_sends(GATE)] if self.stages > 1 else []
        named = [dataclasses.replace(plan, name=f"{self.prefix}{plan.name}") for plan in plans if not plan.plain]
        return {plan.name: plan for plan in named}


FLAT, STAGES, CHUNKS = Shape("", 2, 1, 1), Shape("pipeline ", 4, 2, 4), Shape("interleaved ", 4, 2, 4, 2)
SHAPES = (FLAT, STAGES, CHUNKS)


def choose(names: Sequence[str]) -> dict[Shape, list[Variant]]:
    """Plans by their names, of every shape.

    Raises:
        ConfigError: an unknown one.
    """
    for name in names:
        if not any(name in shape.plans for shape in SHAPES):
            staged = [name.removeprefix(STAGES.prefix) for name in STAGES.plans]
            several = ", ".join(name for name in staged if name not in FLAT.plans)
            fix = f"choose among {', '.join(FLAT.plans)}, with `pipeline ` or `interleaved ` before it also {several}"
            raise ConfigError("--plans", name, "unknown here", fix)
    return {shape: [plan for name, plan in shape.plans.items() if name in names] for shape in SHAPES}


@dataclasses.dataclass(frozen=True, slots=True)
class JudgedPredictions:
    """One plan, predicted and measured.

    Attributes:
        steps: measured seconds of every repeat.
        kinds: as `compare_trace.rows_of` gives them, of the median of each kind.
    """

    plan: str
    predicted_seconds: float
    steps: tuple[float, ...]
    kinds: list[dict[str, Any]]

    @property
    def measured_seconds(self) -> float:
        """Median of the measured steps."""
        return statistics.median(self.steps)

    @property
    def error(self) -> float:
        """Error of the predicted step, relative to the measured one."""
        return self.predicted_seconds / self.measured_seconds - 1.0


def judge(plan: str, predicted: Trace, measured: Sequence[Trace]) -> JudgedPredictions:
    """Compare a prediction with repeated measurements."""
    kinds = {kind for trace in measured for kind in trace.seconds}
    middle = {kind: statistics.median(trace.seconds.get(kind, 0.0) for trace in measured) for kind in kinds}
    steps = tuple(trace.step_seconds for trace in measured)
    rows = rows_of(predicted, Trace(middle, statistics.median(steps)))
    return JudgedPredictions(plan, predicted.step_seconds, steps, rows)


def report(judged: Sequence[JudgedPredictions]) -> dict[str, Any]:
    """Everything, for JSON: errors of steps, and of the kinds of spans over all plans, weighted by their seconds."""
    return {
        "mean_error": statistics.fmean(abs(comparison.error) for comparison in judged),
        "plans": [
            {
                "plan": comparison.plan,
                "predicted_seconds": comparison.predicted_seconds,
                "measured_seconds": comparison.measured_seconds,
                "error": comparison.error,
                "measured_steps": comparison.steps,
                "kinds": comparison.kinds,
            }
            for comparison in judged
        ],
    }


def table(judged: Sequence[JudgedPredictions]) -> str:
    """Steps, then the spans of each plan that matter most."""
    lines = [f"{'plan':<34}{'predicted ms':>14}{'measured ms':>13}{'error':>9}   min … max of {len(judged[0].steps)}"]
    for comparison in judged:
        spread = f"{min(comparison.steps) * 1e3:.0f} … {max(comparison.steps) * 1e3:.0f}"
        lines.append(
            _line(comparison.plan, comparison.predicted_seconds, comparison.measured_seconds, comparison.error)
            + f"   {spread}"
        )
    lines.append(f"{'mean error':<61}{statistics.fmean(abs(comparison.error) for comparison in judged):>9.1%}")
    for comparison in judged:
        lines += ["", comparison.plan]
        for row in comparison.kinds:
            name = f"  {row['kind']} ({row['channel']})"
            lines.append(_line(name, row["predicted_seconds"], row["measured_seconds"], row["error"]))
    return "\n".join(lines)


def _line(name: str, predicted: float, measured: float, error: float | None) -> str:
    share = "-" if error is None else f"{error:+.1%}"
    return f"{name:<34}{predicted * 1e3:>14.1f}{measured * 1e3:>13.1f}{share:>9}"


def run(arguments: argparse.Namespace, rest: Sequence[str], say: Say) -> list[JudgedPredictions]:
    """Measure the beds, predict all plans, execute and compare them."""
    chosen = choose(arguments.plans).items()
    return [comparison for shape, some in chosen if some for comparison in run_on(shape, some, arguments, rest, say)]


def run_on(
    shape: Shape, chosen: Sequence[Variant], arguments: argparse.Namespace, rest: Sequence[str], say: Say
) -> list[JudgedPredictions]:
    """Measure the bed of one shape, predict its plans, execute and compare them."""
    job = [*JOB, *shape.flags, *rest]
    real = not arguments.timer_compute
    arguments.folder.mkdir(parents=True, exist_ok=True)
    flags = {variant.name: [*job, *variant.flags] for variant in chosen}
    calibrations = calibrating(shape.ranks) if real else []
    keys = {key for flags_of_plan in flags.values() for key in job_operators(flags_of_plan, shape.ranks, "cpu")}
    name = f"{links_name(arguments)}-{arguments.mbit:g}mbit" + (f"-{shape.stages}stages" if shape.stages > 1 else "")
    name += f"-{shape.chunks}chunks" if shape.chunks > 1 else ""
    where = {"timer": not real, "namespaces": arguments.namespaces, "mbit": arguments.mbit}
    with ranks_on_bed(shape.ranks, job, [[*chosen, *calibrations]], deferral(GATE), **where) as ranks:
        tell = ranks.tell
        bed = MeasuredBed(arguments.folder / f"{name}.json", shape.ranks, shape.stages, tell, say)
        bed.measure_operators(sorted(keys))
        bed.measure_links()
        if real:
            bed.measure_host_time()
        profile = None
        if arguments.timer_compute:
            profile = mean_of_ranks(tell(do=ORDER_PROFILE, steps=PROFILE_STEPS))
            tell(do=ORDER_USE, profile=profile)
        cluster, predicted = bed.cluster(), {}
        for variant in chosen:
            path = arguments.folder / f"{variant.name}.predicted.json"
            write_ranks(path, predicted_spans(flags[variant.name], cluster, bed.links(), profile))
            predicted[variant.name] = read_trace(path)
        measured = run_in_turn(chosen, arguments, tell, say)
    return [judge(variant.name, predicted[variant.name], measured[variant.name]) for variant in chosen]


def run_in_turn(
    chosen: Sequence[Variant], arguments: argparse.Namespace, tell: Tell, say: Say
) -> dict[str, list[Trace]]:
    """Execute one step of each to warm up, then `repeats` of each in turn; return their traces."""
    for variant in chosen:
        tell(do=ORDER_STEP, variant=variant.name, scale=1.0)
    traces: dict[str, list[Trace]] = {variant.name: [] for variant in chosen}
    for repeat in range(arguments.repeats):
        for variant in chosen:
            path = arguments.folder / f"{variant.name}.measured.json"
            tell(do=ORDER_STEP, variant=variant.name, scale=1.0, trace=str(path.resolve()))
            traces[variant.name].append(read_trace(path))
        say(f"repeat {repeat + 1}/{arguments.repeats}")
    return traces


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and the flags that go on to pretrain_moe.py.

    Raises:
        ConfigError: nothing can be measured like that.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_link_options(parser)
    parser.add_argument("--timer-compute", action="store_true")
    parser.add_argument("--mbit", type=float, default=300.0, help="rate of the links")
    parser.add_argument("--repeats", type=int, default=5)
    default = f"{', '.join(PLANS)}; with timer compute on namespaces also {', '.join(PIPELINED)}"
    parser.add_argument("--plans", nargs="+", help=f"default: {default}")
    folder = cache_folder().parent / "beds"
    parser.add_argument("--folder", type=Path, default=folder, help=f"of measurements and traces; default {folder}")
    parser.add_argument("--json", action="store_true", help="print nothing but JSON")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.mbit <= 0:
        raise ConfigError("--mbit", arguments.mbit, "must be positive", "use 100 to 500")
    if arguments.repeats < 1:
        raise ConfigError("--repeats", arguments.repeats, "must be positive", "use at least 3")
    settle_links(arguments)
    has_stages = arguments.timer_compute and arguments.namespaces
    if arguments.plans is None:
        arguments.plans = (*PLANS, *(PIPELINED if has_stages else ()))
    for shape, plans in choose(arguments.plans).items():
        if shape.stages > 1 and plans and not has_stages:
            rule = "four ranks in two stages run with timer compute on namespaces alone"
            raise ConfigError("--plans", plans[0].name, rule, "add --timer-compute, without --emulator")
    return arguments, rest


def main(argv: Sequence[str]) -> int:
    """Compare and print."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        arguments, rest = parse_arguments(argv)
        judged = run(arguments, rest, say)
    except (ConfigError, RankFailed) as error:
        return report_failure(error)
    if not arguments.json:
        print(table(judged))
        return 0
    setting = {
        "links": links_name(arguments),
        "compute": "timer" if arguments.timer_compute else "real",
        "link_mbit": arguments.mbit,
        "ranks": sorted({shape.ranks for shape, plans in choose(arguments.plans).items() if plans}),
    }
    print(json.dumps(setting | report(judged), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
