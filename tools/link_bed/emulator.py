"""Slow links inside the process: no root, no namespaces.

Data move at the machine's speed; a virtual clock per rank says when they would have left it: an exchange of b bytes that starts
at t leaves at max(t, clock) + b / rate, and the clock is set to that. This time goes along with the data, in a message of 8
bytes (CLOCK_MONOTONIC, one for all processes of a machine), and the receiver's wait lasts until the last of its senders has
finished, plus the latency. Exchanges of a rank follow one another in order of their start, as on one connection. The counts,
a few bytes in a group of their own, overtake the rows of others.

Not modelled: two senders that meet at one receiver's entrance, TCP, shares of the link inside an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_overlap.runtime.dispatch.exchange import Exchange, Pending
from moe_overlap.runtime.dispatch.irregular import Wires
from tools.link_bed.egress import EgressClock, sleep_until

STAMP_TAGS = 1 << 30
"""Added to the tag of an exchange, whose own tags are below."""


class EmulatedExchange(Exchange):
    """An exchange over an emulated link.

    Args:
        clock: of this rank's exit; all its exchanges share one.
        overtakes: whether its messages pass those of other groups.
        until: sleeps until a moment.
    """

    def __init__(
        self,
        group: Any,
        clock: EgressClock,
        timeout_seconds: float | None = None,
        overtakes: bool = False,
        until: Callable[[float], None] = sleep_until,
    ) -> None:
        super().__init__(group, timeout_seconds)
        self.clock = clock
        self._send = clock.overtake if overtakes else clock.send
        self._until = until

    def start(
        self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], *, tag: int, name: str
    ) -> Pending[Tensor]:
        """As `Exchange.start`; the wait ends when the data would have arrived."""
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
    """An exchange and the times at which its parts left their senders."""

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
    wires.counts.exchange = EmulatedExchange(wires.counts.exchange.group, clock, overtakes=True)
