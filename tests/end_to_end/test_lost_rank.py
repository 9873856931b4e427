"""A rank that is lost or fails in the middle of a step: every rank that is left says in which operation and step, and ends."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.program import SMALL_ARGS
from tests.ranks import Ranks, Trouble

OVERLAPPED = """
    --attention-dropout 0 --hidden-dropout 0 --moe-gate topk --moe-token-dispatcher-type irregular --moe-overlap-partitions 2
    --defer-weight-gradients --max-deferred-bytes 60000 --train-iters 100
""".split()
FROZEN_MINUTES, LOST_MINUTES = 1, 10
PROMPT_SECONDS = 300.0
"""A busy machine takes long to start a job; a rank that waited for its timeout to find a peer lost would take twice as long."""
STEPS = 2
WAITED_FOR = "L0.moe.count"
"""The peer is lost at its first dispatch of a step; what is waited for next are the counts of the second part."""


def lose(how: str, folder: Path, ranks: int, *more: str, minutes: int = LOST_MINUTES) -> Ranks:
    """Two layers, two parts and two micro-batches make eight dispatches per step; the next one, on rank 1, is L0's."""
    timeout = ["--distributed-timeout-minutes", str(minutes)]
    trouble = Trouble(rank=1, dispatch=8 * STEPS + 1, how=how)
    return Ranks([SMALL_ARGS, *OVERLAPPED, *timeout, *more], folder, ranks, trouble)


def lose_plain(how: str, folder: Path) -> Ranks:
    """Two micro-batches make two dispatches of the first layer in each step."""
    trouble = Trouble(rank=1, dispatch=2 * STEPS + 1, how=f"{how}-plain")
    return Ranks([SMALL_ARGS, "--train-iters", "100"], folder, 2, trouble)


@pytest.fixture(scope="module", autouse=True)
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ranks, float]]:
    """A job whose rank 1 is frozen, and when it was; the other one waits for a minute, in which other tests run."""
    folder = tmp_path_factory.mktemp("frozen")
    log = folder / "log.jsonl"
    job = lose("SIGSTOP", folder, 2, "--log-json", str(log), minutes=FROZEN_MINUTES)
    try:
        job.wait_until_lines(log, STEPS)
        yield job, time.time()
    finally:
        job.kill()


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_with_the_operation(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    sizes = ("--num-experts", "6", "--expert-model-parallel-size", "3", "--global-batch-size", "12")
    first, lost, third = lose("SIGKILL", tmp_path, 3, *sizes, "--log-json", str(log)).wait(PROMPT_SECONDS)
    assert lost.status == -signal.SIGKILL
    for rank, ended in ((0, first), (2, third)):
        assert ended.status == 1, ended.err
        (line,) = ended.err.splitlines()
        # The other one that is left may have ended, because of rank 1, before this one looked.
        said = re.match(
            rf"error: {WAITED_FOR}: rank {rank} could not complete its all-to-all with rank ([\d, ]+): ", line
        )
        assert said and "1" in said[1].split(", "), line
        assert line.endswith(f"(rank {rank}, step 3)")
    rows = [json.loads(row) for row in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["deferred_peak_bytes"] <= 60_000 and row["deferred_early"] > 0 for row in rows)
    assert (
        f"  deferred {rows[-1]['deferred_peak_bytes'] / 2**20:.1f} MiB, {rows[-1]['deferred_early']} early" in first.out
    )


FAILURES = {
    "raise": r"L0\.moe\.dispatch: KeyError: 'no such expert'; traceback in (\S+)",
    "memory": r"L0\.moe\.dispatch: out of memory: 2,048\.0 MiB more were asked for; a smaller .* needs less",
}
"""Way to fail -> what the rank itself says."""


@pytest.mark.slow
@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_a_failing_rank_and_the_other_say_one_line_each(tmp_path: Path, overlap: bool, how: str) -> None:
    job = lose(how, tmp_path, 2) if overlap else lose_plain(how, tmp_path)
    left, failed = job.wait(PROMPT_SECONDS)
    assert (left.status, failed.status) == (1, 1)
    (line,) = failed.err.splitlines()
    said = re.fullmatch(rf"error: {FAILURES[how]} \(rank 1, step 3\)", line)
    assert said, line
    if how == "raise":
        assert Path(said[1]).read_text().startswith("Traceback (most recent call last)")
        Path(said[1]).unlink()
    (line,) = left.err.splitlines()
    waited_for = rf"{re.escape(WAITED_FOR)}: rank 0 could not" if overlap else r"L0\.moe\.dispatch: lost a peer: "
    assert re.fullmatch(rf"error: {waited_for}.* \(rank 0, step 3\)", line), line


@pytest.mark.slow
def test_a_killed_rank_of_a_plain_run_ends_the_other_with_the_operation(tmp_path: Path) -> None:
    left, lost = lose_plain("SIGKILL", tmp_path).wait(PROMPT_SECONDS)
    assert (left.status, lost.status, lost.err) == (1, -signal.SIGKILL, "")
    (line,) = left.err.splitlines()
    assert re.fullmatch(r"error: L0\.moe\.dispatch: lost a peer: \w.* \(rank 0, step 3\)", line), line


@pytest.mark.slow
def test_a_frozen_rank_ends_the_other_after_the_timeout(frozen: tuple[Ranks, float]) -> None:
    job, begin = frozen
    said = job.folder / "rank0.err"
    ended = job.wait(60 * FROZEN_MINUTES + PROMPT_SECONDS, only=0)[0]
    # The line is written where the rank ends, which may be long before this test looks.
    assert ended.status == 1 and said.stat().st_mtime - begin > 60 * FROZEN_MINUTES - 1
    (line,) = ended.err.splitlines()
    assert line.startswith(f"error: {WAITED_FOR}: rank 0 could not complete its all-to-all with rank 1")
