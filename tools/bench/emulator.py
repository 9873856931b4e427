"""Slow links inside the process: no root, no namespaces.

Data move at the machine's speed; a virtual clock per rank says when they would have left it: an all-to-all of b bytes that starts
at t leaves at max(t, clock) + b / rate, and the clock is set to that. This time goes along with the data, in a message of 8
bytes (CLOCK_MONOTONIC, one for all processes of a machine), and the receiver's wait lasts until the last of its senders has
finished, plus the latency. All-to-alls of a rank follow one another in order of their start, as on one connection. The counts,
a few bytes in a group of their own, overtake the rows of others.

Not modelled: two senders that meet at one receiver's entrance, TCP, shares of the link inside an all-to-all.

    EgressClock       the virtual clock of one rank's exit
    EmulatedExchange  the runtime's wire over such an exit
    GlooAllToAll      the wire over gloo's own all-to-all, which megatron-core's dispatcher uses; for timer compute
    replaced          the same two choices under megatron-core's own dispatcher, for baselines on a CPU
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_overlap.runtime.dispatch.irregular import Wires
from moe_overlap.runtime.dispatch.wire import AllToAll, Pending

HANDED_OVER_BYTES = 128 * 1024
"""The most bytes that one connection puts into the queue of an exit: `tcp_limit_output_bytes` of the bed (bed.py)."""


class EgressClock:
    """The exit of one rank.

    Args:
        bytes_per_second: rate; None: not limited.
        latency_seconds: from the exit to the receiver.
        now: seconds of a clock that all processes of the machine share.
    Attributes:
        sent_bytes: bytes that have been sent so far.
        busy_seconds: how long the exit was busy with them.
    """

    def __init__(
        self,
        bytes_per_second: float | None,
        latency_seconds: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bytes_per_second, self.latency_seconds = bytes_per_second, latency_seconds
        self.sent_bytes, self.busy_seconds = 0, 0.0
        self._now = now
        self._free_at = 0.0

    def send(self, count: int) -> float:
        """Send bytes now; they leave after all bytes that were sent earlier.

        Returns:
            The moment at which the last of them has left.
        """
        seconds = 0.0 if self.bytes_per_second is None else count / self.bytes_per_second
        self._free_at = max(self._now(), self._free_at) + seconds
        self.sent_bytes += count
        self.busy_seconds += seconds
        return self._free_at

    def overtake(self, count: int) -> float:
        """Send a few bytes over a separate connection: they overtake queued bytes, but not bytes that the link already has.

        Their share of the link's rate is neglected.

        Returns:
            The moment at which the last of them has left.
        """
        now = self._now()
        self.sent_bytes += count
        if self.bytes_per_second is None:
            return now
        ahead = min(max(0.0, self._free_at - now), HANDED_OVER_BYTES / self.bytes_per_second)
        return now + ahead + count / self.bytes_per_second


def sleep_until(moment: float, now: Callable[[], float] = time.monotonic) -> None:
    """Sleep until a clock has reached a moment."""
    while (remaining := moment - now()) > 0:
        time.sleep(remaining)


STAMP_TAGS = 1 << 30
"""This is added to the tag of an all-to-all, whose own tags are below."""


class EmulatedExchange(AllToAll):
    """The runtime's wire over an emulated link.

    Args:
        clock: the clock of this rank's exit; all its wires share one.
        overtakes: whether its messages pass those of other groups.
        until: sleeps until a moment.
    """

    def __init__(
        self,
        group: Any,
        clock: EgressClock,
        overtakes: bool = False,
        until: Callable[[float], None] = sleep_until,
    ) -> None:
        super().__init__(group)
        self.clock = clock
        self._send = clock.overtake if overtakes else clock.send
        self._until = until

    def start(
        self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], *, tag: int, name: str
    ) -> Pending[Tensor]:
        """Start as `AllToAll.start` does; the wait ends when the data would have arrived."""
        if self.size == 1:
            return super().start(rows, send_counts, receive_counts, tag=tag, name=name)
        sent_before = self.sent_bytes
        arriving = []
        for peer in self._peers(receive_counts):
            stamp = torch.zeros(1, dtype=torch.double)
            work = dist.irecv(stamp, group=self.group, group_src=peer, tag=STAMP_TAGS + tag)
            arriving.append((work, stamp))
        pending = super().start(rows, send_counts, receive_counts, tag=tag, name=name)
        leaves = torch.tensor([self._send(self.sent_bytes - sent_before)], dtype=torch.double)
        leaving = [
            (dist.isend(leaves, group=self.group, group_dst=peer, tag=STAMP_TAGS + tag), leaves)
            for peer in self._peers(send_counts)
        ]
        return _Delayed(pending, arriving, leaving, self.clock.latency_seconds, self._until)

    def _peers(self, counts: Sequence[int]) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank and counts[peer]]


class _Delayed:
    """An all-to-all under way and the times at which its rows left their senders."""

    def __init__(
        self,
        pending: Pending[Tensor],
        arriving: Sequence[tuple[Any, Tensor]],
        leaving: Sequence[tuple[Any, Tensor]],
        latency_seconds: float,
        until: Callable[[float], None],
    ) -> None:
        self._pending, self._arriving, self._leaving = pending, arriving, leaving
        self._latency_seconds, self._until = latency_seconds, until

    def wait(self) -> Tensor:
        received = self._pending.wait()
        for work, _ in (*self._arriving, *self._leaving):
            work.wait()
        if self._arriving:
            self._until(max(stamp.item() for _, stamp in self._arriving) + self._latency_seconds)
        self._arriving, self._leaving = (), ()
        return received


def emulate(wires: Wires, clock: EgressClock) -> None:
    """Put the wires of a rank on an emulated link; nothing may be under way."""
    wires.rows = EmulatedExchange(wires.rows.group, clock)
    wires.tensor = EmulatedExchange(wires.tensor.group, clock)
    wires.counts.all_to_all = EmulatedExchange(wires.counts.all_to_all.group, clock, overtakes=True)


@dataclass(frozen=True, slots=True)
class _AtTheWait:
    run: Callable[[], Tensor]

    def wait(self) -> Tensor:
        return self.run()


class GlooAllToAll(AllToAll):
    """The wire over one blocking `all_to_all_single`, which runs at the wait: once, and in the same order on every rank.

    gloo posts sends before receives; a receiver's permission to send then queues behind the data of the other direction, and the
    link is half duplex.
    """

    def start(
        self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], *, tag: int, name: str
    ) -> Pending[Tensor]:
        """Start as `AllToAll.start` does, but move nothing before the wait."""
        sent, expected = list(send_counts), list(receive_counts)
        self.sent_bytes += rows[:1].nbytes * (sum(sent) - sent[self.rank])

        def exchange() -> Tensor:
            received = rows.new_empty((sum(expected), *rows.shape[1:]))
            dist.all_to_all_single(received, rows.contiguous(), expected, sent, group=self.group)
            return received

        return _AtTheWait(exchange)


TAG = (1 << 31) - 8
"""The tag of every message: each all-to-all is waited for before the next."""


@contextlib.contextmanager
def replaced(receive_first: bool, clock: EgressClock | None) -> Iterator[None]:
    """Replace `torch.distributed.all_to_all_single` of this process while the block runs.

    Nothing of the overlapped runtime is imported.

    Args:
        receive_first: post every receive before any send, point-to-point: a gain over that is not due to gloo's half-duplex
            all-to-all.
        clock: an emulated link under either; None leaves the link free.
    """
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


def _sizes(splits: Sequence[int] | None, rows: Tensor, size: int) -> list[int]:
    """Rows of every rank as plain numbers; megatron-core hands over arrays."""
    return [rows.shape[0] // size] * size if splits is None else [int(count) for count in splits]


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
