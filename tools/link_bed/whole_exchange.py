"""What stands in for `torch.distributed.all_to_all_single` under megatron-core's own dispatcher, for baselines on a CPU.

`receive_first`: point-to-point with every receive posted before any send, so that a gain over it is not gloo's half-duplex
all-to-all. `clock`: an emulated link under either. Neither imports anything of the overlapped runtime.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tools.link_bed.egress import EgressClock, sleep_until

TAG = (1 << 31) - 8
"""Of every message; each exchange is waited for before the next."""


@contextlib.contextmanager
def replaced(receive_first: bool, clock: EgressClock | None) -> Iterator[None]:
    """Replace the all-to-all of this process while the block runs."""
    original = dist.all_to_all_single
    if not receive_first and clock is None:
        yield
        return

    def all_to_all_single(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> None:
        assert not async_op, "megatron-core waits for its all-to-all"
        group = group if group is not None else dist.group.WORLD
        size = group.size()
        arriving = _sizes(output_split_sizes, output, size)
        leaving = _sizes(input_split_sizes, input, size)
        leaves = _leave(input, leaving, group.rank(), clock)
        if receive_first:
            _exchange(output, input, arriving, leaving, group)
        else:
            original(output, input, arriving, leaving, group=group)
        if clock is not None:
            _wait_for_senders(leaves, arriving, group, clock)

    dist.all_to_all_single = all_to_all_single
    try:
        yield
    finally:
        dist.all_to_all_single = original


def _sizes(given: Sequence[int] | None, rows: Tensor, size: int) -> list[int]:
    """Rows of every rank as plain numbers; megatron-core hands over arrays."""
    return [rows.shape[0] // size] * size if given is None else [int(count) for count in given]


def _exchange(output: Tensor, rows: Tensor, arriving: list[int], leaving: list[int], group: Any) -> None:
    me, size = group.rank(), group.size()
    into, outof = output.split(arriving), rows.contiguous().split(leaving)
    into[me].copy_(outof[me])
    peers = [(me + step) % size for step in range(1, size)]
    works = [dist.irecv(into[p], group=group, group_src=p, tag=TAG) for p in peers if arriving[p]]
    works += [dist.isend(outof[p], group=group, group_dst=p, tag=TAG) for p in peers if leaving[p]]
    for work in works:
        assert work is not None
        work.wait()


def _leave(rows: Tensor, leaving: list[int], me: int, clock: EgressClock | None) -> float:
    if clock is None:
        return 0.0
    row_bytes = rows.element_size() * (rows.numel() // max(1, rows.shape[0]))
    return clock.send(row_bytes * (sum(leaving) - leaving[me]))


def _wait_for_senders(leaves: float, arriving: list[int], group: Any, clock: EgressClock) -> None:
    """Sleep until the last rank that sends here has finished."""
    stamps = torch.zeros(group.size(), dtype=torch.double)
    dist.all_gather_into_tensor(stamps, torch.tensor([leaves], dtype=torch.double), group=group)
    senders = [stamps[p].item() for p in range(group.size()) if p != group.rank() and arriving[p]]
    if senders:
        sleep_until(max(senders) + clock.latency_seconds)
