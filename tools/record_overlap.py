"""The overlap benchmark in full: every series that examples/records has, measured and written down.

    tools/record_overlap.py FOLDER [--series ratios gates …] [--repeats 5] [flags of benchmark_overlap.py]

Each series is one run of tools/benchmark_overlap.py; its JSON output goes to FOLDER/SERIES.json, with command, commit,
machine and load. Then all tables of the folder go into FOLDER/README.md, between the marks <!-- figures -->; the text outside
the marks is kept. `--series` without names measures nothing and writes the tables again. Run it on an idle machine, as root.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.bench.marks import write_between_marks

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = "tools/benchmark_overlap.py"
MARK = "figures"
HEAD = f"# Overlap on rate-limited links\n\n<!-- {MARK} -->\n<!-- /{MARK} -->\n"
NOT_OURS = ("alltoall", "irregular", "tutel")
"""Beginnings of the names of baselines."""


@dataclass(frozen=True, slots=True)
class Series:
    """One run of the benchmark.

    Attributes:
        title: what varies.
        flags: those of its command line.
    """

    title: str
    flags: str


SERIES = {
    "ratios": Series(
        "Communication ratio, timer compute",
        "--timer-compute --ratio 0.05 0.25 0.5 1 2 --partitions 2 4 --tutel 2 4 8 --variants alltoall 'tutel 2' 'tutel 4' "
        "'tutel 8' deferral 'partitions 2 around' 'both 2 around' 'both 4 around'",
    ),
    "micro-batches": Series(
        "Four micro-batches, timer compute",
        "--timer-compute --ratio 1 --micro-batches 4 --variants 'tutel 4' 'both 2 around' 'micro-batches' "
        "'micro-batches and deferral' 'all 2 around'",
    ),
    "gates": Series(
        "Gates, timer compute", "--timer-compute --ratio 1 --tutel 4 --gates switch topk batch_prioritized"
    ),
    "ranks": Series(
        "Ranks, weak scaling, timer compute",
        "--timer-compute --ranks 2 4 8 --ratio 1 --variants 'tutel 4' 'partitions 2 around' 'both 2 around'",
    ),
    "ranges": Series(
        "Ranges, timer compute; four layers, every other one a mixture of experts (Lancet, figure 6)",
        "--timer-compute --ratio 1 --tutel 4 --reach 0 1 2 3 --num-layers 4 --moe-layer-freq [0,1]*2",
    ),
    "real": Series(
        "Communication ratio, real compute",
        "--ratio 0.5 1 --variants alltoall 'alltoall receive-first' 'tutel 4' 'partitions 2 around' 'both 2 around'",
    ),
}
"""All series in the order of their tables, with two experts per rank everywhere."""


def measure(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run one series.

    Args:
        arguments: further arguments, after those of the series.
    Returns:
        The content of its file.
    Raises:
        SystemExit: the benchmark failed, and has printed the reason.
    """
    command = [PROGRAM, *shlex.split(SERIES[name].flags), *arguments]
    begun = {"started": time.strftime("%Y-%m-%d %H:%M:%S"), "load_average": os.getloadavg()[0]}
    print(f"{name}: {shlex.join(command)}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, *command, "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    versions = {package: version(package) for package in ("torch", "megatron-core")}
    return begun | {
        "command": shlex.join(["python", *command]),
        "commit": commit.stdout.strip(),
        "machine": f"{os.cpu_count()} processors, {_processor()}",
        "versions": {"Python": platform.python_version()} | versions,
        "records": json.loads(done.stdout),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def render(measured: dict[str, dict[str, Any]]) -> str:
    """All series as Markdown: what stands out, then every table."""
    text = "\n" + _overview(measured)
    for name, series in measured.items():
        versions = ", ".join(f"{package} {number}" for package, number in series["versions"].items())
        text += f"\n## {SERIES[name].title}\n\n`{series['command']}`\n\n"
        text += f"{series['started']}, commit {series['commit']}; {series['machine']}, load average "
        text += f"{series['load_average']:.1f} at the start; {versions}.\n"
        for record in series["records"]:
            text += f"\n{_place(record)}: {record['summary']}.\n\n{record['table']}"
    return text + "\n"


def _place(record: dict[str, Any]) -> str:
    accumulated = f", {record['micro_batches']} micro-batches" if record["micro_batches"] > 1 else ""
    link = f"{record['link_mbit']:.0f} Mbit/s ({record['links']})"
    return f"{record['ranks']} ranks, {record['gate']}{accumulated}, ratio {record['ratio']:.2f}, {link}"


def _overview(measured: dict[str, dict[str, Any]]) -> str:
    """One line per ratio, gate and number of ranks: median speedups over the sequential step on the same transport."""
    lines = [
        "| series | ranks | gate | ratio | best Tutel degree | best of ours | share hidden | bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, series in measured.items():
        for record in series["records"]:
            tutel = _best(row for row in record["variants"] if row["variant"].startswith("tutel"))
            ours = _best(row for row in record["variants"] if not row["variant"].startswith(NOT_OURS))
            hidden = "-" if ours is None or ours["hidden"] is None else f"{ours['hidden']:.0%}"
            cells = (
                name,
                record["ranks"],
                record["gate"],
                f"{record['ratio']:.2f}",
                _shown(tutel),
                _shown(ours),
                hidden,
            )
            bound = f"{record['totals']['bound_speedup']:.2f}×"
            lines.append("| " + " | ".join(map(str, (*cells, bound))) + " |")
    return "\n".join(lines) + "\n"


def _best(rows: Any) -> dict[str, Any] | None:
    return max(rows, key=lambda row: float(row["speedup"]["median"]), default=None)


def _shown(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{row['speedup']['median']:.2f}× ({row['variant']})"


def main(argv: Sequence[str]) -> int:
    """Measure the series of the command line, then write the tables of all series in the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--series", nargs="*", choices=list(SERIES), default=list(SERIES))
    parser.add_argument("--repeats", type=int, default=5)
    arguments, rest = parser.parse_known_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.series:
        series = measure(name, ["--repeats", str(arguments.repeats), *rest])
        (arguments.folder / f"{name}.json").write_text(json.dumps(series, indent=1) + "\n")
    files = {name: arguments.folder / f"{name}.json" for name in SERIES}
    readme = arguments.folder / "README.md"
    if not readme.exists():
        readme.write_text(HEAD)
    write_between_marks(readme, MARK, render({n: json.loads(f.read_text()) for n, f in files.items() if f.exists()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
