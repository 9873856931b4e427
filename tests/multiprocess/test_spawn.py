"""The launcher of the multi-process tests reports what happened, soon."""

from __future__ import annotations

import time

import pytest

from tests.spawn import ProcessFailed, run


def one_raises(places: list[str]) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("from the second process")
    dist.barrier()


def rank_and_sum(number: int) -> tuple[int, int]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(number)
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def one_sleeps() -> None:
    import torch.distributed as dist

    time.sleep(600.0 * dist.get_rank())


def test_results_come_in_order_of_rank() -> None:
    assert run(2, rank_and_sum, 3) == [(0, 6), (1, 6)]


def test_the_first_failure_is_reported_while_others_wait() -> None:
    begin = time.monotonic()
    with pytest.raises(ProcessFailed, match=r"rank 1: Traceback[\s\S]*ValueError: from the second process"):
        run(2, one_raises, [])
    assert time.monotonic() - begin < 300


def test_a_launch_that_does_not_end_is_stopped() -> None:
    with pytest.raises(ProcessFailed, match="rank 1: no result after 5 s"):
        run(2, one_sleeps, timeout_seconds=5)
