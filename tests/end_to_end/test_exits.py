"""Runs that end before their last step: a loss that is not finite, signals, intervals, and how they go on afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe_overlap.commands.compare import compare_losses
from tests.end_to_end.conftest import Undisturbed
from tests.end_to_end.program import PROGRAM, ROOT, SMALL, STEPS, Launch, alone, line_count
from tests.ranks import Ranks

UNREAD = (
    [str(PROGRAM), "--help"],
    [str(PROGRAM), "@examples/tiny-mixtral-8x7b.args", "--dry-run"],
    ["-m", "tools.show_plan", "tests/golden/pp2_ep2.json"],
    ["-m", "tools.import_flags", "tests/golden/train_moe.sh"],
    ["-m", "tools.predict", "--list-gpus"],
    ["-m", "tools.predict", "--help", "all"],
    ["-m", "tools.autotune", "--list-gpus"],
    ["-m", "tools.compare_losses", "--help"],
)
PROMPT_SECONDS = 300.0
"""A rank that has lost its peers must not wait for the collective's timeout of ten minutes."""


def test_loss_that_is_not_finite_ends_every_rank_with_one_line(tmp_path: Path) -> None:
    losses = tmp_path / "losses.jsonl"
    launch = Launch([*SMALL, "--lr", "1e30", "--save", str(tmp_path / "saved"), "--log-json", str(losses)], tmp_path)
    first, second = launch.wait()
    assert (first.status, second.status) == (1, 1)
    (line,) = first.err.splitlines()
    assert re.fullmatch(r"error: step \d+: not finite: loss \S+, gradient norm (nan|inf)", line)
    assert second.err == ""
    # Weights that brought nan are not saved over good ones.
    assert list((tmp_path / "saved").iterdir()) == []
    assert all(json.loads(row)["grad_norm"] < float("inf") for row in losses.read_text().splitlines())


def test_sigterm_with_handler_saves_and_the_run_continues_bitwise(undisturbed: Undisturbed, tmp_path: Path) -> None:
    losses, saved = tmp_path / "losses.jsonl", tmp_path / "saved"
    words = [*SMALL, "--exit-signal-handler", "--save", str(saved), "--log-json", str(losses)]
    job = Ranks(words, tmp_path)
    job.wait_until_lines(losses, 5)
    assert all(handled(process.pid or 0, signal.SIGTERM) for process in job.processes)
    job.signal(signal.SIGTERM, rank=1)  # one rank hears it, both stop in the same step
    first, second = job.wait(PROMPT_SECONDS)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    done = line_count(losses)
    assert 5 <= done < STEPS
    assert [path.name for path in saved.iterdir()] == [f"step-{done:06d}"]
    assert "stopped      signal 15\nnext         python pretrain_moe.py --nproc-per-node 2 @" in first.out
    # The very line that the run printed continues it.
    (following,) = (line.split("pretrain_moe.py ")[1] for line in first.out.splitlines() if line.startswith("next"))
    first = alone(following.split())
    assert first.status == 0 and "FutureWarning" not in first.err, first.err
    assert [json.loads(row)["step"] for row in losses.read_text().splitlines()] == list(range(1, STEPS + 1))
    assert compare_losses(["--bitwise", str(undisturbed.losses), str(losses)]) == 0
    # A finished run says how to train for longer, and that works, too.
    (longer,) = (line.split("pretrain_moe.py ")[1] for line in first.out.splitlines() if line.startswith("next"))
    ranks = longer.removeprefix("--nproc-per-node 2 ").split()
    assert ranks.count("--load") == 1
    extended = Ranks([*ranks, "--exit-interval", str(STEPS + 2)], tmp_path).wait()
    assert [ended.status for ended in extended] == [0, 0], extended[0].err
    assert line_count(losses) == STEPS + 2


def test_sigterm_without_handler_ends_promptly_and_saves_nothing(tmp_path: Path) -> None:
    """Promptly: nothing of ours stands between the signal and the kernel, which ends the process."""
    losses = tmp_path / "losses.jsonl"
    words = [*SMALL, "--train-iters", "1000", "--save", str(tmp_path / "saved"), "--log-json", str(losses)]
    job = Ranks(words, tmp_path)
    job.wait_until_lines(losses, 2)
    assert not any(handled(process.pid or 0, signal.SIGTERM) for process in job.processes)
    job.signal(signal.SIGTERM)
    assert [ended.status for ended in job.wait(PROMPT_SECONDS)] == [-signal.SIGTERM, -signal.SIGTERM]
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [".lock"], "the next job takes it over"


def handled(pid: int, number: signal.Signals) -> bool:
    """Whether a process catches, ignores or blocks a signal."""
    status = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return any(int(status[mask], 16) >> (number - 1) & 1 for mask in ("SigCgt", "SigIgn", "SigBlk"))


@pytest.mark.slow
def test_rank_that_dies_takes_the_others_along(tmp_path: Path) -> None:
    losses = tmp_path / "losses.jsonl"
    job = Ranks([*SMALL, "--train-iters", "1000", "--log-json", str(losses)], tmp_path)
    job.wait_until_lines(losses, 2)
    job.signal(signal.SIGKILL, rank=1)
    first, second = job.wait(PROMPT_SECONDS)
    assert second.status == -signal.SIGKILL
    assert first.status == 1


@pytest.mark.parametrize("words", UNREAD, ids=lambda words: " ".join(words[:2]))
def test_what_nobody_reads_ends_as_other_programs_do(words: list[str]) -> None:
    """`| head -1` that was faster: the other end of the pipe is closed before anything is written.

    Python buffers its output, as it does for users; where it does not, nothing can be told before the first line is out.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        ended = subprocess.run(
            [sys.executable, *words], stdout=out, stderr=subprocess.PIPE, cwd=ROOT, env=environment, check=False
        )
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, b"")


@pytest.mark.parametrize("words", UNREAD[2:-1], ids=lambda words: " ".join(words[1:3]))
def test_a_full_disk_behind_the_output_is_one_line(words: list[str]) -> None:
    with Path("/dev/full").open("w") as out:
        ended = subprocess.run([sys.executable, *words], stdout=out, stderr=subprocess.PIPE, cwd=ROOT, text=True)
    line = "error: standard output: No space left on device; make space, or send it elsewhere\n"
    assert (ended.returncode, ended.stderr) == (2, line)
