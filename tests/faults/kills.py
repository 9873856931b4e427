"""SIGKILL of a whole job at random moments, with a save after every step: it resumes, and its losses are bit by bit the same.

`python -m tests.faults --kills 50` tries many; a few are tried in every slow run (`test_kills.py`). A kill falls at some point
of a step or of a save, and every other start saves beside training.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.program import SMALL, line_count
from tests.ranks import Ranks
from tests.spawn import HANGS_SECONDS

KEPT = 2
"""Checkpoints that --keep-last-checkpoints keeps."""
MOST_STEPS_BETWEEN = 4
AFTER = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a job that was killed again and again.

    Attributes:
        kills: kills that met a running job.
        resumes: starts that went on from a checkpoint.
        repeated: steps that had been executed, and were not saved yet, when a kill came.
        steps: of the whole run.
        problems: sentences; none where all is well.
    """

    kills: int
    resumes: int
    repeated: int
    steps: int
    problems: tuple[str, ...]


def undisturbed_losses(words: Sequence[str], folder: Path) -> dict[int, str]:
    """step -> loss, as a run writes it that nobody disturbs.

    Args:
        words: the length of the run, and where it ends.
    """
    log = folder / "undisturbed.jsonl"
    ended = Ranks([*SMALL, *words, "--log-json", str(log)], folder / "undisturbed").wait(HANGS_SECONDS)
    assert [rank.status for rank in ended] == [0, 0], ended[0].err
    return dict(_losses(log))


def killed_job(
    kills: int,
    seed: int,
    folder: Path,
    told: Callable[[str], object] = lambda line: None,
    flags: Sequence[str] = (),
) -> Outcome:
    """Start a job, kill it a few steps later, start it again, …; let the last start finish, and compare its losses.

    Args:
        flags: of the job, in addition.
        told: is given a row of Markdown for each start, and those of the head.
    """
    moments = random.Random(seed)
    # The schedule of a run that no number of kills comes to the end of; the last start ends AFTER steps later.
    length, end = [*flags, "--train-iters", str(kills * MOST_STEPS_BETWEEN + AFTER)], 0
    log, saved = folder / "losses.jsonl", folder / "saved"
    command = [*SMALL, *length, "--save-interval", "1", "--keep-last-checkpoints", str(KEPT)]
    command += ["--save", str(saved), "--load", str(saved), "--log-json", str(log)]
    problems: list[str] = []
    resumes = repeated = met = 0
    told("| start | saves | went on at step | last step logged | the kill fell into | checkpoints left |")
    told("|---:|---|---:|---:|---|---|")
    for kill in range(kills + 1):
        before, ending = _losses(log), "nothing: it ended by itself"
        words = [*command, *(["--async-save"] if kill % 2 else [])]
        if kill == kills:
            end = (before[-1][0] if before else 0) + AFTER
            words += ["--exit-interval", str(end)]
        job = Ranks(words, folder / "ranks")
        if kill < kills:
            job.wait_until_lines(log, len(before) + moments.randint(1, MOST_STEPS_BETWEEN))
            time.sleep(moments.uniform(0.0, 0.15))
            if not job.kill():
                problems.append(f"start {kill + 1} ended by itself: {job.wait()[0].err[-300:]}")
                break
            met += 1
            # What a save has not yet given its name.
            ending = "a save" if any(saved.glob(".tmp-*")) else "a step"
        else:
            ended = job.wait(HANGS_SECONDS)
            if [rank.status for rank in ended] != [0, 0]:
                problems.append(f"the last start failed: {ended[0].err[-300:]}")
        now = _losses(log)
        first = now[len(before)][0] if len(now) > len(before) else None
        if before and first is not None:
            last = before[-1][0]
            resumes += first > 1
            repeated += max(0, last - first + 1)
            # A save is complete before the next but one begins, so a kill costs the steps of two saves at most.
            if not last - 2 <= first - 1 <= last:
                problems.append(f"start {kill + 1} began at step {first}, step {last} was the last one before")
        left = " ".join(sorted(path.name for path in saved.glob("step-*"))) or "none"
        how = "beside training" if kill % 2 else "between steps"
        told(f"| {kill + 1} | {how} | {first} | {now[-1][0]} | {ending} | {left} |")
    calm = undisturbed_losses([*length, "--exit-interval", str(end)], folder)
    losses = _losses(log)
    problems += [
        f"step {step} has loss {loss}, undisturbed {calm.get(step)}" for step, loss in losses if calm.get(step) != loss
    ]
    if {step for step, _ in losses} != set(calm):
        problems.append("steps are missing")
    left = sorted(path.name for path in saved.iterdir())
    if left != [f"step-{step:06d}" for step in range(end - KEPT + 1, end + 1)]:
        problems.append(f"the folder holds {', '.join(left)}")
    return Outcome(met, resumes, repeated, end, tuple(problems))


def _losses(log: Path) -> list[tuple[int, str]]:
    """The steps of a file of --log-json in its order, each with its loss as text: equal texts are equal bits."""
    if line_count(log) == 0:
        return []
    whole = log.read_text().rpartition("\n")[0].splitlines()
    rows = [json.loads(line) for line in whole]
    return [(row["step"], repr(row["loss"])) for row in rows]
