"""kill -9 of the whole job at random moments: it always resumes, and its losses are those of an undisturbed run, bit by bit."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from moe_overlap.commands.compare import compare_losses
from tests.end_to_end.conftest import Undisturbed
from tests.end_to_end.program import SMALL, STEPS, line_count
from tests.ranks import Ranks
from tests.spawn import HANGS_SECONDS


def train_under_fire(words: Sequence[str], folder: Path, kills: int, seed: int) -> Path:
    """Start the job, kill it a few steps later, start it again, ...; then let it finish. Every other start saves beside training.

    Returns:
        The JSON lines of all starts.
    """
    moments = random.Random(seed)
    losses, saved = folder / "losses.jsonl", folder / "saved"
    files = ["--save", str(saved), "--load", str(saved), "--log-json", str(losses)]
    command = [*words, *files, "--save-interval", "2", "--keep-last-checkpoints", "2"]
    for kill in range(kills):
        job = Ranks([*command, "--async-save"] if kill % 2 == 0 else command, folder)
        # Counted in steps, so that a busy machine gets as far; then at some point of a step or a save.
        job.wait_until_lines(losses, line_count(losses) + moments.randint(1, 8))
        time.sleep(moments.uniform(0.0, 0.15))
        assert job.kill(), [ended.err for ended in job.wait()]
    last = Ranks(command, folder).wait(HANGS_SECONDS)
    assert [ended.status for ended in last] == [0, 0], last[0].err
    steps = [json.loads(line)["step"] for line in losses.read_text().splitlines()]
    assert set(steps) == set(range(1, max(steps) + 1))
    repeated = [step for before, step in zip(steps, steps[1:], strict=False) if step <= before]
    assert all(step % 2 == 1 for step in repeated), "a resume starts right after a saved, even step"
    assert steps.count(1) < kills + 1, "every start was from scratch"
    left = sorted(path.name for path in saved.iterdir())
    assert left == [f"step-{step:06d}" for step in (max(steps) - 2, max(steps))], "leftovers, or checkpoints missing"
    return losses


def test_job_killed_three_times_continues_bitwise(undisturbed: Undisturbed, tmp_path: Path) -> None:
    losses = train_under_fire(SMALL, tmp_path, kills=3, seed=3)
    assert compare_losses(["--bitwise", str(undisturbed.losses), str(losses)]) == 0
    assert {json.loads(line)["step"] for line in losses.read_text().splitlines()} == set(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.sweep
def test_job_killed_twelve_times_continues_bitwise(tmp_path: Path) -> None:
    """As many as one likes: `python -m tests.faults --kills 50`."""
    words = [*SMALL, "--train-iters", "100"]  # More than all steps between kills.
    calm = tmp_path / "calm.jsonl"
    undisturbed = Ranks([*words, "--log-json", str(calm)], tmp_path / "calm").wait(HANGS_SECONDS)
    assert [ended.status for ended in undisturbed] == [0, 0], undisturbed[0].err
    losses = train_under_fire(words, tmp_path, kills=12, seed=20)
    assert compare_losses(["--bitwise", str(calm), str(losses)]) == 0
