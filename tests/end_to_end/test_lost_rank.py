"""A peer that is lost in the middle of an exchange: every rank that is left says in which operation, and ends."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.end_to_end.program import SMALL_ARGS, Launch

PROGRAM = Path(__file__).with_name("lost_rank.py")
OVERLAPPED = """
    --attention-dropout 0 --hidden-dropout 0 --moe-gate topk --moe-token-dispatcher-type irregular --moe-overlap-partitions 2
    --defer-weight-gradients --max-deferred-bytes 60000 --distributed-timeout-minutes 1 --train-iters 100
""".split()
PROMPT_SECONDS, TIMEOUT_SECONDS = 45.0, 60.0
STEPS = 2
WAITED_FOR = "L0.moe.count"
"""The peer is lost at its first dispatch of a step; what is waited for next are the counts of the second part."""


def lose(rank: int, how: str, folder: Path, ranks: int, *more: str) -> Launch:
    """Two layers, two parts and two micro-batches make eight dispatches per step; the next one is L0's."""
    losing = [str(rank), str(8 * STEPS + 1), how]
    return Launch([*losing, SMALL_ARGS, *OVERLAPPED, *more], folder, ranks, PROGRAM)


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_with_the_operation(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    sizes = ("--num-experts", "6", "--expert-model-parallel-size", "3", "--global-batch-size", "12")
    launch = lose(1, "SIGKILL", tmp_path, 3, *sizes, "--log-json", str(log))
    launch.wait_until_lines(log, STEPS)
    first, lost, third = launch.wait(PROMPT_SECONDS)
    assert lost.status == -signal.SIGKILL
    for rank, ended in ((0, first), (2, third)):
        assert ended.status == 1, ended.err
        (line,) = ended.err.splitlines()
        assert line.startswith(f"error: {WAITED_FOR}: rank {rank} could not complete its all-to-all with rank 1")
    rows = [json.loads(row) for row in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["deferred_peak_bytes"] <= 60_000 and row["deferred_early"] > 0 for row in rows)
    assert (
        f"  deferred {rows[-1]['deferred_peak_bytes'] / 2**20:.1f} MiB, {rows[-1]['deferred_early']} early" in first.out
    )


@pytest.mark.slow
def test_a_frozen_rank_ends_the_other_after_the_timeout(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    launch = lose(1, "SIGSTOP", tmp_path, 2, "--log-json", str(log))
    try:
        launch.wait_until_lines(log, STEPS)
        begin = time.monotonic()
        status = launch.processes[0].wait(TIMEOUT_SECONDS + PROMPT_SECONDS)
    finally:
        launch.kill()
    assert status == 1 and time.monotonic() - begin > TIMEOUT_SECONDS - 1
    (line,) = (tmp_path / "rank0.err").read_text().splitlines()
    assert line.startswith(f"error: {WAITED_FOR}: rank 0 could not complete its all-to-all with rank 1")
