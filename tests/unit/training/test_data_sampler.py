"""The order of samples: Megatron's, and the number consumed is the whole state."""

from __future__ import annotations

from itertools import chain, islice
from typing import Literal

import pytest

from megatron.training.data.datasets import BatchSampler

Order = Literal["single", "cyclic"]


def stream(order: Order, total: int, consumed: int, micro: int, dp: int, steps: int, seed: int = 3) -> list[int]:
    """Samples of all ranks in the order in which they are consumed."""
    ranks = [
        BatchSampler(
            total_samples=total,
            consumed_samples=consumed,
            micro_batch_size=micro,
            data_parallel_rank=rank,
            data_parallel_size=dp,
            order=order,
            seed=seed,
        )
        for rank in range(dp)
    ]
    chunks = islice(zip(*ranks, strict=True), steps)
    return list(chain.from_iterable(chain.from_iterable(chunks)))


def test_order_by_hand() -> None:
    first = BatchSampler(
        total_samples=11, consumed_samples=2, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=2
    )
    second = BatchSampler(
        total_samples=11, consumed_samples=2, micro_batch_size=2, data_parallel_rank=1, data_parallel_size=2
    )
    assert list(first) == [[2, 3], [6, 7]]  # 10 is dropped: no rank would get a whole micro-batch of the last chunk
    assert list(second) == [[4, 5], [8, 9]]
    assert list(first) == [[2, 3], [6, 7]]


@pytest.mark.parametrize("order", ["single", "cyclic"])
@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (1, 4), (2, 2), (4, 1), (3, 2)])
def test_resume_continues_the_undisturbed_stream(order: Order, micro: int, dp: int) -> None:
    total = 48
    undisturbed = stream(order, total, 0, 1, 1, total)
    for consumed in range(0, 24, 4):
        steps = 24 // (micro * dp)
        assert stream(order, total, consumed, micro, dp, steps) == undisturbed[consumed : consumed + steps * micro * dp]


def test_cyclic_epochs_are_different_permutations() -> None:
    samples = stream("cyclic", 10, 0, 3, 2, 10)
    epochs = [samples[i : i + 10] for i in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert stream("cyclic", 10, 34, 3, 2, 4) == samples[34:58]
    assert stream("cyclic", 10, 0, 3, 2, 10, seed=4) != samples


def test_nothing_left() -> None:
    assert stream("single", 8, 8, 2, 2, 10) == []
    assert stream("single", 8, 6, 2, 2, 10) == []
