"""The storage tracker on allocation patterns whose peak is known."""

from __future__ import annotations

import gc

import torch

from megatron.training.report.reports import StorageTracker, held_tensors, resident_bytes
from tests.unit.runtime.one_process import MOE, loss_of, small

KIB = 1024


def kib(count: int) -> torch.Tensor:
    return torch.empty(count * KIB, dtype=torch.uint8)


def test_peak_of_a_known_pattern() -> None:
    held = kib(3)
    with StorageTracker([held]) as tracker:
        assert (tracker.bytes, tracker.peak_bytes) == (3 * KIB, 3 * KIB)
        first = kib(4)
        second = kib(10)
        del second
        third = kib(5)
        assert tracker.bytes == 12 * KIB
        first.add_(1)  # in place: nothing new
        view = third[:100].view(10, 10)  # a view: nothing new
        assert (tracker.bytes, tracker.peak_bytes) == (12 * KIB, 17 * KIB)
        del third
        assert tracker.bytes == 12 * KIB  # the view keeps the storage
        del view
        assert tracker.bytes == 7 * KIB
    assert tracker.peak_bytes == 17 * KIB


def test_what_is_held_counts_once() -> None:
    held = kib(2)
    with StorageTracker([held, held[:5], held.view(2, -1)]) as tracker:
        held.mul_(2)
    assert tracker.peak_bytes == 2 * KIB


def test_a_storage_that_is_replaced_does_not_count_twice() -> None:
    """An address that is used again is a new storage."""
    with StorageTracker([]) as tracker:
        for _ in range(50):
            kib(1)
    assert (tracker.bytes, tracker.peak_bytes) == (0, KIB)


def test_what_a_backward_pass_keeps() -> None:
    x = torch.ones(KIB, requires_grad=True)  # 4 KiB, made before
    with StorageTracker([x]) as tracker:
        y = x.exp()  # kept for the backward pass: 4 KiB
        z = y.exp()  # 4 KiB
        del y
        assert tracker.bytes == 12 * KIB
        z.sum().backward()
        del z
        gc.collect()
    assert x.grad is not None and tracker.bytes <= 8 * KIB + 64  # x and its gradient; the sum may live a little longer
    assert tracker.peak_bytes >= 16 * KIB


def test_nothing_is_counted_outside() -> None:
    with StorageTracker([]) as tracker:
        pass
    outside = kib(8)
    assert tracker.peak_bytes == 0 and outside.numel() == 8 * KIB


def test_memory_that_is_given_back_and_taken_again() -> None:
    held, elastic = kib(1), kib(8)
    elastic.untyped_storage().resize_(0)
    with StorageTracker([held, elastic], [elastic]) as tracker:
        first = kib(2)
        elastic.untyped_storage().resize_(8 * KIB)
        elastic.zero_()
        view = elastic[:4]
        elastic.untyped_storage().resize_(0)
        second = kib(4)
    del view
    assert first.numel() and second.numel() and tracker.peak_bytes == 11 * KIB and tracker.bytes == 7 * KIB


def test_held_tensors_of_a_model() -> None:
    """fp32 and one process: parameters, gradients and two moments, 16 bytes a parameter, after the first step."""
    chunk, optimizer = small(MOE).wrapped()
    count = sum(parameter.numel() for parameter in chunk.parameters())
    before = StorageTracker(held_tensors([chunk], optimizer)).bytes
    assert 8 * count <= before <= 8 * count + 200_000  # buffers are padded, position tables are buffers too
    loss_of(chunk).backward()
    chunk.finish_grad_sync()
    optimizer.step()
    after = StorageTracker(held_tensors([chunk], optimizer)).bytes
    assert 8 * count <= after - before <= 8 * count + 10_000


def test_resident_bytes_are_bytes() -> None:
    assert 50 * 2**20 < resident_bytes() < 2**40
