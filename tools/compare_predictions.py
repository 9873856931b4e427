"""Compare predicted with measured steps on this machine: tools/compare_predictions.py --cluster here.json [--steps 12] [--json
FILE].

Each configuration is predicted on a cluster description of this machine (tools/profile_cluster.py), then trained for some steps.
Compared are the seconds of a step: the median after the first ones, and the least. Operators that a configuration needs and the
database lacks are measured by the prediction, once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from moe_overlap.api import predict
from moe_overlap.commands.exits import interruptible
from moe_overlap.describe.cluster import Cluster, load_cluster
from moe_overlap.describe.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
MODEL = "examples/tiny-mixtral-8x7b.args"
WARM_UP_STEPS = 3
RANKS = 2
CONFIGURATIONS = {
    "EP2": "",
    "EP2, micro-batch 2": "--micro-batch-size 2",
    "EP2, micro-batch 8": "--micro-batch-size 8",
    "DP2": "--expert-model-parallel-size 1",
    "DP2, micro-batch 8": "--expert-model-parallel-size 1 --micro-batch-size 8",
    "TP2": "--expert-model-parallel-size 1 --tensor-model-parallel-size 2 --sequence-parallel",
    "PP2": "--expert-model-parallel-size 1 --pipeline-model-parallel-size 2",
    "PP2, micro-batch 2": "--expert-model-parallel-size 1 --pipeline-model-parallel-size 2 --micro-batch-size 2",
}


@dataclass(frozen=True, slots=True)
class Compared:
    """One configuration; seconds of a step."""

    name: str
    predicted: float
    median: float
    least: float
    breakdown: Mapping[str, float]
    provenance: Mapping[str, float]

    @property
    def error(self) -> float:
        """Error of the prediction, relative to the median."""
        return self.predicted / self.median - 1.0


@interruptible
def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; 2 for a user's mistake."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", metavar="C.json", required=True, help="this machine, measured with 2 ranks")
    parser.add_argument("--steps", type=int, default=12, help="of each run; the first ones are left out (default 12)")
    parser.add_argument("--only", metavar="NAME", action="append", help="one configuration; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="write every figure")
    arguments = parser.parse_args(argv)
    try:
        cluster = _measured_here(arguments.cluster)
        chosen = _chosen(arguments.only)
        if arguments.steps <= WARM_UP_STEPS:
            fix = f"use more than {WARM_UP_STEPS}"
            raise ConfigError("--steps", arguments.steps, "no step is left after the first ones", fix)
        compared = [_compare(name, flags, cluster, arguments.steps) for name, flags in chosen.items()]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(as_table(compared))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(as_json(compared, cluster), indent=1) + "\n", encoding="utf-8")
    return 0


def _measured_here(path: str) -> Cluster:
    cluster = load_cluster(path)
    if cluster.measured is None or cluster.gpus != RANKS:
        raise ConfigError("--cluster", path, f"was not measured with {RANKS} ranks", "run tools/profile_cluster.py")
    return cluster


def _chosen(only: Sequence[str] | None) -> dict[str, str]:
    for name in only or ():
        if name not in CONFIGURATIONS:
            raise ConfigError("--only", name, "unknown configuration", f"known: {'; '.join(CONFIGURATIONS)}")
    return {name: flags for name, flags in CONFIGURATIONS.items() if only is None or name in only}


def _compare(name: str, written: str, cluster: Cluster, steps: int) -> Compared:
    flags = [f"@{ROOT / MODEL}", *written.split()]
    prediction = predict(flags, cluster)
    print(f"{name}: predicted {prediction.predicted.step_seconds:.3f} s", file=sys.stderr)
    seconds = _train(flags, steps)
    provenance = prediction.predicted.provenance
    return Compared(
        name=name,
        predicted=prediction.predicted.step_seconds,
        median=median(seconds),
        least=min(seconds),
        breakdown=prediction.breakdown,
        provenance={origin: getattr(provenance, origin) for origin in ("measured", "interpolated", "roofline")},
    )


def _train(flags: Sequence[str], steps: int) -> list[float]:
    """Seconds of the steps after the first ones.

    Raises:
        ConfigError: the run failed; its last line says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps.jsonl"
        run = ["--train-iters", str(steps), "--lr-decay-iters", "240", "--eval-iters", "0", "--log-json", str(log)]
        launcher = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node", str(RANKS)]
        command = [sys.executable, "-P", "-m", *launcher]
        done = subprocess.run(
            [*command, str(ROOT / "pretrain_moe.py"), *flags, *run],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not log.exists():
            errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            reason = (errors or done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ConfigError("the measured run", " ".join(flags), f"failed ({reason})", "run it by hand")
        rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [row["step_seconds"] for row in rows if row["step"] > WARM_UP_STEPS]


def as_table(compared: Sequence[Compared]) -> str:
    """Markdown, with the mean absolute error at its end."""
    lines = [
        "| configuration | predicted s | measured s (median) | least s | error | measured operators |",
        "|---|---|---|---|---|---|",
    ]
    for row in compared:
        figures = f"{row.predicted:.3f} | {row.median:.3f} | {row.least:.3f} | {row.error:+.1%}"
        lines.append(f"| {row.name} | {figures} | {row.provenance['measured']:.0%} |")
    worst = max(compared, key=lambda row: abs(row.error))
    error = mean(abs(row.error) for row in compared)
    return "\n".join([*lines, "", f"mean absolute error {error:.1%}, worst {worst.error:+.1%} ({worst.name})"])


def as_json(compared: Sequence[Compared], cluster: Cluster) -> dict[str, Any]:
    """Everything, for a record."""
    rows = [
        {
            "configuration": row.name,
            "flags": CONFIGURATIONS[row.name],
            "predicted_seconds": row.predicted,
            "median_seconds": row.median,
            "least_seconds": row.least,
            "error": row.error,
            "breakdown": dict(row.breakdown),
            "provenance": dict(row.provenance),
        }
        for row in compared
    ]
    return {
        "model": MODEL,
        "device": cluster.group_of(0).gpu.name,
        "ranks": RANKS,
        "mean_absolute_error": mean(abs(row.error) for row in compared),
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
