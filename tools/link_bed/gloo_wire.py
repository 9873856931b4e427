"""The wire over gloo's own all-to-all, made at the wait: what megatron-core's dispatcher does, for timer compute.

gloo posts sends before receives; a receiver's permission to send then queues behind the data of the other direction, and the link
is half duplex.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from moe_overlap.runtime.dispatch.exchange import Exchange, Pending


@dataclass(frozen=True, slots=True)
class _AtTheWait:
    run: Callable[[], Tensor]

    def wait(self) -> Tensor:
        return self.run()


class GlooAllToAll(Exchange):
    """An exchange by one blocking `all_to_all_single`; its result is waited for once, in the same order on every rank."""

    def start(
        self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], *, tag: int, name: str
    ) -> Pending[Tensor]:
        """As `Exchange.start`, but nothing moves before the wait."""
        sent, expected = list(send_counts), list(receive_counts)
        self.sent_bytes += rows[:1].nbytes * (sum(sent) - sent[self.rank])

        def exchange() -> Tensor:
            received = rows.new_empty((sum(expected), *rows.shape[1:]))
            dist.all_to_all_single(received, rows.contiguous(), expected, sent, group=self.group)
            return received

        return _AtTheWait(exchange)
