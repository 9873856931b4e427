"""What the exact solver adds to greedy assignment of weight gradients: `python -m tests.validation.assignment_gains`

The tuner decides the overlap of every job twice: with `SECONDS` for each integer program (CP-SAT), and with none, which leaves
the greedy assignment and the repeated period. Both steps are simulated with the same prices; nothing runs on GPUs. With
`--write RECORD.md` the table is kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moe_overlap.api import tune
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan_search.results import Tuned
from moe_overlap.tuner.limits import PLAN_SEARCH_LIMITS

SECONDS = 5.0
NO_SECONDS = 1e-6
"""Too short for any integer program."""


class Job(NamedTuple):
    """A model of examples/ on a cluster; `flags` replace those of the file."""

    example: str
    gpu: str
    gpus: int
    flags: str = ""


JOBS = (
    Job("gpt2-s-moe", "A100", 8),
    Job("gpt2-l-moe", "A100", 8),
    Job("qwen2-moe-2.7b", "H100", 8),
    Job("qwen3-30b-a3b", "H100", 32),
    Job("phi-3.5-moe", "H100", 32),
    Job("mixtral-8x7b", "H100", 64),
    Job("mixtral-8x7b", "H100", 64, "--pipeline-model-parallel-size 1 --num-layers-per-virtual-pipeline-stage 32"),
    Job("qwen3-235b-a22b", "H100", 128),
    Job("deepseek-v3", "H100", 256),
    Job("alpa-moe-10b", "V100-32GB", 32),
)


def decided(job: Job, seconds: float) -> Tuned:
    """The overlap of a job, with so many seconds for each integer program."""
    arguments = [f"@examples/{job.example}.args", *job.flags.split()]
    return tune(arguments, shipped_cluster(job.gpu, job.gpus), PLAN_SEARCH_LIMITS, seconds)


def rows() -> Iterator[str]:
    """A line of the table for every job, as it is decided."""
    for job in JOBS:
        try:
            exact, greedy = decided(job, SECONDS), decided(job, NO_SECONDS)
        except ConfigError as error:
            yield f"| {job.example} | {job.gpus} {job.gpu} | {error} | | | | |"
            continue
        gain = greedy.chosen.seconds / exact.chosen.seconds - 1.0
        name = " ".join(filter(None, (job.example, job.flags)))
        searched = f"{exact.search_seconds:.1f} s, {greedy.search_seconds:.1f} s"
        steps = f"{exact.chosen.seconds:.4f} s | {greedy.chosen.seconds:.4f} s | {100 * gain:+.2f} %"
        yield f"| {name} | {job.gpus} {job.gpu} | {exact.chosen.name} | {steps} | {searched} |"


def main() -> None:
    """Print the table, and write it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    head = [
        "| job | GPUs | overlap | step, CP-SAT | step, greedy | gain | search, both |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(head), flush=True)
    lines = []
    for row in rows():
        print(row, flush=True)
        lines.append(row)
    if arguments.write is not None:
        arguments.write.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
