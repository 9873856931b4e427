"""The overlap benchmark on a small job: every variant steps, the figures add up, nothing is left."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.end_to_end.program import ROOT

PROGRAM = ROOT / "tools" / "benchmark_overlap.py"
SMALL = """
    --emulator --repeats 1 --ratio 0.5 --json --hidden-size 64 --moe-ffn-hidden-size 64 --num-attention-heads 4
    --micro-batch-size 4 --seq-length 64
""".split()


def benchmark(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *words]
    return subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, timeout=600, check=False)


def only_record(*words: str) -> Any:
    ended = benchmark(*SMALL, *words)
    assert ended.returncode == 0, ended.stderr
    (record,) = json.loads(ended.stdout)
    return record


@pytest.mark.slow
def test_timer_compute() -> None:
    record = only_record("--timer-compute", "--compute-seconds", "0.4")
    rows = {row["variant"]: row for row in record["variants"]}
    both = "both 2 around"
    assert list(rows) == [
        "irregular",
        "tutel 2",
        "tutel 4",
        "deferral",
        "partitions 2 around",
        both,
        f"{both}, waiting",
    ]
    assert (record["links"], record["compute"], record["ranks"], record["gate"]) == ("emulator", "timer", 2, "topk")
    assert rows["irregular"]["speedup"]["median"] == 1.0 and rows["irregular"]["hidden"] == 0.0
    assert all(row["free_step_seconds"]["median"] >= 0.4 for row in rows.values()), "no step is shorter than its sleeps"
    assert all(row["alone_seconds"] < row["step_seconds"]["median"] for row in rows.values())


@pytest.mark.slow
def test_real_compute() -> None:
    record = only_record()
    names = [row["variant"] for row in record["variants"]]
    both = "both 2 around"
    assert names == [
        "alltoall",
        "alltoall receive-first",
        "irregular",
        "tutel 2",
        "tutel 4",
        "deferral",
        "partitions 2 around",
        both,
        f"{both}, waiting",
    ]
    assert record["compute"] == "real"
    assert all(row["plain_speedup"]["median"] > 0 for row in record["variants"])


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--variants", "magic"], "error: --variants magic: unknown here; choose among "),
        (["--ratio", "0"], "error: --ratio 0.0: must be positive; use 0.25, 0.5, 1 or 2\n"),
        (["--repeats", "0"], "error: --repeats 0: must be positive; use at least 5\n"),
        (["--ranks", "1"], "error: --ranks 1: one rank exchanges nothing; use 2, 4 or 8\n"),
    ],
)
def test_mistakes(words: list[str], error: str) -> None:
    ended = benchmark("--emulator", *words)
    assert ended.returncode == 2 and ended.stdout == "" and ended.stderr.startswith(error)
