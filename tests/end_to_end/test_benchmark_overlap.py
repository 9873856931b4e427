"""The overlap benchmark on a small job: every variant steps, the figures add up, nothing is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.program import ROOT
from tests.link_hosts import left_by, namespaces_allowed
from tests.signals import restore_interruptions

PROGRAM = ROOT / "tools" / "benchmark_overlap.py"
SMALL = """
    --emulator --repeats 1 --ratio 0.5 --json --hidden-size 64 --moe-ffn-hidden-size 64 --num-attention-heads 4
    --micro-batch-size 4 --seq-length 64
""".split()
TIMED = """
    --timer-compute --compute-seconds 0.4 --ratio 2.5 --repeats 5 --moe-ffn-hidden-size 64 --json
""".split()
"""Exchanges of 4 MiB, so that the burst that a limited link carries for nothing after every pause hardly counts."""


def benchmark(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *words]
    return subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, timeout=600, check=False)


def only_record(*words: str) -> Any:
    ended = benchmark(*SMALL, *words)
    assert ended.returncode == 0, ended.stderr
    (record,) = json.loads(ended.stdout)
    return record


@pytest.mark.slow
@pytest.mark.alone
def test_timer_compute() -> None:
    record = only_record("--timer-compute", "--compute-seconds", "0.4")
    rows = {row["variant"]: row for row in record["variants"]}
    both = "both 2 around"
    assert list(rows) == [
        "irregular",
        "tutel 2",
        "tutel 4",
        "deferral",
        "chunks 4 and deferral",
        "partitions 2 around",
        both,
        f"{both}, waiting",
    ]
    assert (record["links"], record["compute"], record["ranks"], record["gate"]) == ("emulator", "timer", 2, "topk")
    assert rows["irregular"]["speedup"]["median"] == 1.0
    assert rows["irregular"]["hidden"] in (0.0, None), "None where a busy machine makes steps on a free link as long"
    assert all(row["free_step_seconds"]["median"] >= 0.4 for row in rows.values()), "no step is shorter than its sleeps"
    assert all(row["alone_seconds"] < row["step_seconds"]["median"] for row in rows.values())


@pytest.fixture(scope="module")
def timed() -> dict[str, Any]:
    """Rows of the sequential step, of both tricks, and of both with a wait behind every issue; links as far as allowed."""
    both = "both 2 around"
    links = "--namespaces" if namespaces_allowed() else "--emulator"
    ended = benchmark(links, *TIMED, "--variants", both, f"{both}, waiting")
    assert ended.returncode == 0, ended.stderr
    (record,) = json.loads(ended.stdout)
    return {row["variant"]: row for row in record["variants"]}


@pytest.mark.slow
@pytest.mark.alone
def test_exposed_spans_are_what_a_free_link_saves(timed: dict[str, Any]) -> None:
    for name, row in timed.items():
        spans = row["exposed_seconds"]["median"] - row["free_exposed_seconds"]
        assert spans == pytest.approx(row["exposed_by_difference"], rel=0.05), name
        assert row["exposed_by_difference"] > 0.3, "more than what other work on the machine adds"


@pytest.mark.slow
@pytest.mark.alone
def test_a_wait_behind_every_issue_undoes_the_gain(timed: dict[str, Any]) -> None:
    assert timed["both 2 around"]["speedup"]["median"] > 1.2
    assert timed["both 2 around, waiting"]["speedup"]["median"] < 1.05


@pytest.mark.slow
@pytest.mark.alone
def test_nothing_is_left_after_an_interruption() -> None:
    links = "--namespaces" if namespaces_allowed() else "--emulator"
    command = [sys.executable, str(PROGRAM), links, *TIMED]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restore_interruptions,
    ) as started:
        assert started.stderr is not None
        assert any(line.startswith("profile:") for line in started.stderr), "the ranks are up"
        ranks = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        assert len(ranks) == 2 and (links == "--emulator" or len(left_by(started.pid)) >= 3)
        started.send_signal(signal.SIGINT)
        started.stderr.read()
        assert started.wait(60) != 0
    assert left_by(started.pid) == [] and not any(Path("/proc", pid).exists() for pid in ranks)


@pytest.mark.slow
@pytest.mark.alone
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
        "chunks 4 and deferral",
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
        (["--ranks", "1"], "error: --ranks 1: one rank sends no tokens to others; use 2, 4 or 8\n"),
    ],
)
def test_mistakes(words: list[str], error: str) -> None:
    ended = benchmark("--emulator", *words)
    assert ended.returncode == 2 and ended.stdout == "" and ended.stderr.startswith(error)
