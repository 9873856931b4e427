"""A folder of checkpoints belongs to one job, and ranks do not outlive their launcher."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.program import PROGRAM, SMALL, SMALL_ARGS, STANDALONE, Ended, alone, environment, line_count
from tests.spawn import HANGS_SECONDS

ONE = (SMALL_ARGS, "--expert-model-parallel-size", "1", "--lr-warmup-iters", "2")


def wait_for_steps(log: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    while line_count(log) < steps:
        assert time.monotonic() < deadline, f"{log} has {line_count(log)} lines"
        time.sleep(0.05)


def children(process: int) -> list[int]:
    """Processes whose parent this is."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == process:
                found.append(int(folder.name))
    return found


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_second_job_is_told_of_the_first(tmp_path: Path) -> None:
    log, saved = tmp_path / "log.jsonl", tmp_path / "saved"
    words = [*ONE, "--train-iters", "100000", "--save", str(saved), "--log-json", str(log)]
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), *words], env=environment(), stdout=subprocess.DEVNULL, cwd=PROGRAM.parent
    ) as first:
        try:
            wait_for_steps(log, 1)
            second = alone([*ONE, "--train-iters", "3", "--save", str(saved)])
        finally:
            first.kill()
    pattern = rf"error: --save {re.escape(str(saved))}: belongs to another job \(process {first.pid} on \S+, since \S+ \S+\); "
    assert second.status == 2 and re.match(pattern, second.err) and second.err.count("\n") == 1, second
    # The first one was killed and its lock is still there.
    third: Ended = alone([*ONE, "--train-iters", "3", "--save", str(saved)])
    assert third.status == 0, third
    assert [path.name for path in saved.iterdir()] == ["step-000003"]


@pytest.mark.slow
def test_ranks_end_with_their_launcher_and_the_restart_resumes(tmp_path: Path) -> None:
    log, saved = tmp_path / "log.jsonl", tmp_path / "saved"
    torchrun = [sys.executable, "-m", "torch.distributed.run", *STANDALONE, "--nproc-per-node", "2"]
    files = ["--save", str(saved), "--load", str(saved), "--save-interval", "2", "--log-json", str(log)]
    launcher = subprocess.Popen(
        [*torchrun, str(PROGRAM), *SMALL, "--train-iters", "100000", "--override-opt-param-scheduler", *files],
        cwd=PROGRAM.parent,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_steps(log, 5)
    ranks = children(launcher.pid)
    assert len(ranks) >= 2
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    deadline = time.monotonic() + HANGS_SECONDS
    while any(map(is_alive, ranks)):
        assert time.monotonic() < deadline, "ranks outlive their launcher"
        time.sleep(0.05)
    steps = line_count(log)
    again = subprocess.run(
        [*torchrun, str(PROGRAM), *SMALL, "--train-iters", str(steps + 2), "--override-opt-param-scheduler", *files],
        cwd=PROGRAM.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANGS_SECONDS,
    )
    assert again.returncode == 0, again.stderr
    assert "loaded " in again.stdout and not (saved / ".lock").exists()
