"""Compare the overlap that the tuner chooses with every plan that flags can express, on rate-limited links.

    tools/benchmark_choices.py [--namespaces | --emulator] [--gates switch topk batch_prioritized] [--ratio 0.25 0.5 1 2]
                               [--sweeps 1] [--repeats 5] [--real] [--folder DIR] [--json] [flags of pretrain_moe.py]

A cell is a gate and a ratio of all-to-all seconds to computation; the rate of the links sets the ratio. Two ranks, each on its
own host, execute two micro-batches per step. They measure the operators of each gate and the links of each cell. From these
measurements, and without any measured step, `tune` (tools/autotune.py --overlap-only) chooses a plan. Then all plans of
`hand_set` (tools/bench/figures.py) run in turn, and after that the fastest of them, the chosen one and megatron-core's list,
`repeats` times.

Timer compute: every operator sleeps for its seconds in the cost model, so the tuner's computation is exact; only the passes run,
without the update. Links are real.

--real          afterwards run megatron-core's list, the sequential one and the chosen plans with real computation, in turn
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Only the folder of a script is on its path: the package `tools` is one folder up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_overlap.api import job_operators, problem_of, read_job, tune
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.gates import GATE_FACTS
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.plan.plan import Plan
from moe_overlap.plan_search.results import Tuned
from moe_overlap.report.tuning import write_run
from moe_overlap.tuner.capture.cache import cache_folder
from moe_overlap.tuner.cost.simulate.step import simulate_step
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.search.layer.candidates import PLAIN as NOTHING
from tools.bench.figures import BASELINES, CHOSEN, Judged, Spread, baselines, fastest, hand_set
from tools.bench.launch import (
    RankFailed,
    RanksOnBed,
    add_link_options,
    links_name,
    ranks_on_bed,
    report_failure,
    settle_links,
)
from tools.bench.machine import MeasuredBed, PricedList, Say, priced_list
from tools.bench.variants import JOB, Variant, deferral, job_flags, plain_flags
from tools.bench.worker import ORDER_ADD, ORDER_STEP

RANKS, MICRO_BATCHES, EXPERTS_PER_RANK = 2, 2, 2
SMALLER = ("--seq-length", "80", "--moe-ffn-hidden-size", "1536")
"""Flags that shrink the other benchmarks' job: 640 tokens, half a second of computation and 1.25 MiB per all-to-all."""
OF_GATE = {"switch": ("--seq-length", "120")}
"""Flags of single gates. One expert per token halves the messages, and short ones pass a limited link for free after a pause."""
FINALISTS = 3
CELL_LINKS = {
    "all_to_all": tuple(1 << power for power in range(18, 23)),
    "all_gather": (1 << 20, 1 << 21),
    "reduce_scatter": (1 << 20, 1 << 21),
}
ANY_MBIT, WARMING_MBIT = 300.0, 5000.0
"""Link rates while operators are measured, and while plans run for the first time."""
LIMITS = SearchLimits(max_partitions=8, group_seconds=0.0, range_limit=16)
"""The defaults of tools/autotune.py."""
NO_SLOWDOWN = 1e-6
"""Sleeping operators and all-to-alls do not slow each other down."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """The choice and the measurements for one gate at one ratio.

    Attributes:
        ratio: all-to-all seconds per second of computation, by bytes and rate.
        chosen: the variant of the tuner's choice.
        real: plan -> steps with real computation.
    """

    gate: str
    ratio: float
    mbit: float
    tuned: Tuned
    chosen: Variant
    judged: Judged
    real: dict[str, list[float]] = dataclasses.field(default_factory=dict)


class GateCells:
    """The cells of one gate, whose operators are measured once.

    Args:
        ranks: over timer compute.
        job: flags of the job, without overlap.
    """

    def __init__(self, arguments: argparse.Namespace, gate: str, job: list[str], ranks: RanksOnBed, say: Say) -> None:
        self._arguments, self._gate, self._job, self._ranks, self._say = arguments, gate, job, ranks, say
        self._flags = [*job, *plain_flags(gate), "--moe-gate", gate]
        self._operators = self._bed("operators")
        self._operators.database.add_rate("overlap_slowdown", NO_SLOWDOWN)
        self._operators.measure_operators(sorted(set(job_operators(self._flags, RANKS, "cpu"))))

    def cell(self, ratio: float) -> Cell:
        """Choose, predict and measure one cell."""
        problem = problem_of(self._flags, self._operators.cluster(), {})
        plain = priced(problem, problem.plan)
        mbit = plain.sent_bytes * 8e-6 / (ratio * plain.computation)
        self._say(f"{self._gate}, ratio {ratio:g}: {mbit:.0f} Mbit/s, computation {plain.computation:.3f} s")
        self._ranks.set_rate(mbit)
        bed = self._bed(f"ratio-{ratio:g}", self._operators)
        bed.measure_links(CELL_LINKS)
        tuned = tune(self._flags, bed.cluster(), LIMITS)
        self._say(f"chosen in {tuned.search_seconds:.1f} s: {tuned.chosen.name}")
        folder = self._arguments.folder / f"{self._gate}-{ratio:g}-chosen"
        write_run(folder, tuned)
        flags = (f"@{(folder / 'megatron_args.txt').resolve()}",)
        chosen = Variant(CHOSEN, flags, plain=tuned.chosen.name == NOTHING)
        problem = problem_of(self._flags, bed.cluster(), {})
        swept = hand_set(self._gate, problem.plan.stages[0].micro_batch_size)
        expected = {CHOSEN: priced(problem, tuned.chosen.decided)}
        for variant in (*baselines(self._gate), *swept):
            plan = read_job([*self._job, *variant.flags], RANKS).plan
            expected[variant.name] = priced(problem, plan)
        judged = self._measure(swept, chosen, expected, mbit)
        return Cell(self._gate, ratio, mbit, tuned, chosen, judged)

    def _measure(
        self, swept: Sequence[Variant], chosen: Variant, expected: dict[str, PricedList], mbit: float
    ) -> Judged:
        """Measure all plans in turn, then the finalists in turn."""
        self._ranks.set_rate(WARMING_MBIT)
        for variant in (chosen, *baselines(self._gate), *swept):
            added = dataclasses.asdict(variant)
            self._ranks.tell(do=ORDER_ADD, variant=added, sleeps=expected[variant.name].sleeps)
            self._step(variant.name, scale=0.0)  # allocations
        self._ranks.set_rate(mbit)
        names = [variant.name for variant in swept]
        steps = self._in_turn(names, self._arguments.sweeps)
        self._say(f"swept {len(names)} plans {self._arguments.sweeps} times")
        finals = self._in_turn([*BASELINES, CHOSEN, *fastest(steps, FINALISTS)], self._arguments.repeats)
        return Judged(finals, steps, {name: price.seconds for name, price in expected.items()})

    def _in_turn(self, names: Sequence[str], repeats: int) -> dict[str, list[float]]:
        turns = [[self._step(name) for name in names] for _ in range(repeats)]
        return {name: list(steps) for name, steps in zip(names, zip(*turns, strict=True), strict=True)}

    def _step(self, name: str, scale: float = 1.0) -> float:
        return max(answer["step"] for answer in self._ranks.tell(do=ORDER_STEP, variant=name, scale=scale))

    def _bed(self, name: str, like: MeasuredBed | None = None) -> MeasuredBed:
        """A bed with its own database, which starts with the measurements of another bed."""
        path = self._arguments.folder / f"{links_name(self._arguments)}-{self._gate}-{name}.json"
        if like is not None:
            shutil.copy(like.database.path, path.with_suffix(".measured.jsonl"))
        return MeasuredBed(path, RANKS, 1, self._ranks.tell, self._say)


def priced(problem: Problem, plan: Plan) -> PricedList:
    """Price a plan of the problem's layout as the tuner does."""
    return priced_list(simulate_step(plan, problem))


def measure_really(arguments: argparse.Namespace, job: list[str], cells: Sequence[Cell], say: Say) -> list[Cell]:
    """Measure the chosen plans of a gate with real computation, each in turn with the two baselines."""
    plain, sequential = baselines(cells[0].gate)
    ours = [
        dataclasses.replace(cell.chosen, name=f"{CHOSEN} {cell.ratio:g}") for cell in cells if not cell.chosen.plain
    ]
    groups, measured = [[plain], [sequential, *ours]], []
    where = {"timer": False, "namespaces": arguments.namespaces, "mbit": ANY_MBIT}
    with ranks_on_bed(RANKS, job, groups, sequential, **where) as ranks:
        for cell in cells:
            ranks.set_rate(cell.mbit)
            names = {name: name for name in BASELINES}
            if not cell.chosen.plain:
                names[CHOSEN] = f"{CHOSEN} {cell.ratio:g}"
            steps: dict[str, list[float]] = {name: [] for name in names}
            for repeat in range(arguments.repeats + 1):
                for name, variant in names.items():
                    seconds = max(answer["step"] for answer in ranks.tell(do=ORDER_STEP, variant=variant, scale=1.0))
                    steps[name] += [seconds] if repeat else []  # the first one warms up
            say(f"{cell.gate}, ratio {cell.ratio:g}: real computation")
            measured.append(dataclasses.replace(cell, real=steps))
    return measured


def run(arguments: argparse.Namespace, rest: Sequence[str], say: Say) -> list[Cell]:
    """Measure all cells."""
    base = [*JOB, *job_flags(RANKS, MICRO_BATCHES, EXPERTS_PER_RANK), *SMALLER]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    where = {"timer": True, "namespaces": arguments.namespaces, "mbit": ANY_MBIT}
    measured: list[Cell] = []
    for gate in arguments.gates:
        profiled, job = deferral(gate), [*base, *OF_GATE.get(gate, ()), *rest]
        with ranks_on_bed(RANKS, job, [[profiled]], profiled, **where) as ranks:
            cells = GateCells(arguments, gate, job, ranks, say)
            cells_of_gate = []
            for ratio in arguments.ratio:
                cells_of_gate.append(cells.cell(ratio))
                say(line(cells_of_gate[-1]))
        measured += measure_really(arguments, job, cells_of_gate, say) if arguments.real else cells_of_gate
    return measured


def line(cell: Cell) -> str:
    """A cell in a row of a table."""
    judged = cell.judged
    columns = [
        cell.gate,
        f"{cell.ratio:g}",
        f"{cell.mbit:.0f}",
        cell.tuned.chosen.name,
        f"{judged.median(CHOSEN):.3f}",
        judged.best,
        f"{judged.median(judged.best):.3f}",
        f"{judged.over_best:+.1%}",
        *(f"{judged.gain(name).median:.2f}" for name in BASELINES),
        f"{judged.error(CHOSEN):+.1%}",
        f"{judged.mean_error:.1%}",
        *(f"{gain.min:.2f} {gain.median:.2f} {gain.max:.2f}" for gain in real_gains(cell)),
    ]
    return f"| {' | '.join(columns)} |"


COLUMNS = (
    "gate, ratio, Mbit/s, chosen, s, best hand-set, s, over best, alltoall/chosen, irregular/chosen, error, mean error"
)
REAL_COLUMNS = "real alltoall/chosen, real irregular/chosen"


def table(cells: Sequence[Cell]) -> str:
    """A row for each cell, in Markdown."""
    names = COLUMNS.split(", ") + (REAL_COLUMNS.split(", ") if any(cell.real for cell in cells) else [])
    return "\n".join([f"| {' | '.join(names)} |", "|" + "---|" * len(names), *map(line, cells)])


def real_gains(cell: Cell) -> list[Spread]:
    """Gains of the chosen plan over each baseline with real computation; none if it was not measured."""
    ours = cell.real.get(CHOSEN, [])
    return [
        Spread.of([slow / fast for slow, fast in zip(cell.real[name], ours, strict=True)]) for name in BASELINES if ours
    ]


def as_json(cell: Cell) -> dict[str, Any]:
    """Everything that was measured."""
    judged = cell.judged
    return {
        "gate": cell.gate,
        "ratio": cell.ratio,
        "link_mbit": cell.mbit,
        "chosen": cell.tuned.chosen.name,
        "search_seconds": cell.tuned.search_seconds,
        "best": judged.best,
        "over_best": judged.over_best,
        "gain": {name: dataclasses.asdict(judged.gain(name)) for name in BASELINES},
        "error": judged.error(CHOSEN),
        "mean_error": judged.mean_error,
        "finals": {
            name: {"steps": steps} | dataclasses.asdict(Spread.of(steps)) for name, steps in judged.finals.items()
        },
        "swept": judged.swept,
        "predicted": judged.predicted,
        "real": cell.real,
    }


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and the flags that go on to pretrain_moe.py.

    Raises:
        ConfigError: nothing can be measured like that.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_link_options(parser)
    parser.add_argument("--gates", nargs="+", default=["switch", "topk", "batch_prioritized"])
    parser.add_argument("--ratio", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0])
    parser.add_argument("--sweeps", type=int, default=1, help="how often all plans take turns")
    parser.add_argument("--repeats", type=int, default=5, help="turns of the finalists")
    parser.add_argument("--real", action="store_true", help="also with real computation")
    folder = cache_folder().parent / "choices"
    parser.add_argument("--folder", type=Path, default=folder, help=f"of measurements and plans; default {folder}")
    parser.add_argument("--json", action="store_true", help="print nothing but JSON")
    arguments, rest = parser.parse_known_args(argv)
    for gate in arguments.gates:
        if gate not in GATE_FACTS:
            raise ConfigError("--gates", gate, "no such gate", f"choose among {', '.join(GATE_FACTS)}")
    for ratio in arguments.ratio:
        if not 0 < ratio < math.inf:
            raise ConfigError("--ratio", ratio, "must be positive", "use 0.25, 0.5, 1 or 2")
    for flag, value in (("--sweeps", arguments.sweeps), ("--repeats", arguments.repeats)):
        if value < 1:
            raise ConfigError(flag, value, "must be positive", "use at least 1, and 5 repeats")
    settle_links(arguments)
    return arguments, rest


def main(argv: Sequence[str]) -> int:
    """Measure and print."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        arguments, rest = parse_arguments(argv)
        cells = run(arguments, rest, say)
    except (ConfigError, RankFailed) as error:
        return report_failure(error)
    if arguments.json:
        setting = {"links": links_name(arguments), "ranks": RANKS, "micro_batches": MICRO_BATCHES}
        print(json.dumps(setting | {"cells": [as_json(cell) for cell in cells]}, indent=1))
    else:
        print(table(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
