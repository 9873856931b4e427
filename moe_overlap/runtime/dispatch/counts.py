"""Phase one of the irregular exchange: who sends how many rows to whom.

Every rank tells every rank of the expert group (expert-tensor ranks included) how many of its rows go to each expert that rank
holds. The numbers come to the host once per layer; the backward pass reuses them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_overlap.runtime.dispatch.exchange import Exchange, Pending


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows of one dispatch on the host, as one rank sees them. L experts per rank, P expert ranks, Q expert-tensor ranks.

    Attributes:
        to_expert: [P·L] rows this rank sends to each expert.
        from_source: [Q][P][L] rows each rank sends to each of this rank's experts.
        tensor_rank: this rank's place among the Q.
    """

    to_expert: tuple[int, ...]
    from_source: tuple[tuple[tuple[int, ...], ...], ...]
    tensor_rank: int

    @property
    def experts_per_rank(self) -> int:
        """L."""
        return len(self.from_source[0][0])

    @property
    def sent(self) -> list[int]:
        """[P] rows to each expert rank."""
        each = self.experts_per_rank
        return [sum(self.to_expert[start : start + each]) for start in range(0, len(self.to_expert), each)]

    @property
    def received(self) -> list[int]:
        """[P] rows from each expert rank."""
        return [sum(experts) for experts in self.from_source[self.tensor_rank]]

    @property
    def gathered(self) -> list[int]:
        """[Q] rows each expert-tensor rank receives; all of them work on the sum."""
        return [sum(map(sum, sources)) for sources in self.from_source]

    @property
    def per_expert(self) -> list[int]:
        """[L] rows of each expert this rank holds."""
        sources = [experts for sources in self.from_source for experts in sources]
        return [sum(rows) for rows in zip(*sources, strict=True)]

    @property
    def by_source(self) -> list[int]:
        """[Q·P·L] sizes of the pieces in the order they arrive."""
        return [rows for sources in self.from_source for experts in sources for rows in experts]

    def chunk(self, index: int, degree: int) -> Counts:
        """The counts of one of `degree` chunks of every (source, expert) piece. The chunks add up to the whole."""

        def part(rows: int) -> int:
            return (index + 1) * rows // degree - index * rows // degree

        return Counts(
            tuple(map(part, self.to_expert)),
            tuple(tuple(tuple(map(part, experts)) for experts in sources) for sources in self.from_source),
            self.tensor_rank,
        )


class CountExchange:
    """Exchanges counts over the expert group.

    Args:
        exchange: the wire over all Q·P ranks, expert-tensor ranks fastest.
        expert_ranks, tensor_ranks, tensor_rank: P, Q, and this rank's place among the Q.
    Attributes:
        host_copies: copies of counts from the device to the host so far.
    """

    def __init__(self, exchange: Exchange, expert_ranks: int, tensor_ranks: int, tensor_rank: int) -> None:
        assert exchange.size == expert_ranks * tensor_ranks, "the wire must join all ranks of the experts"
        self.exchange, self.expert_ranks, self.tensor_ranks, self.tensor_rank = (
            exchange,
            expert_ranks,
            tensor_ranks,
            tensor_rank,
        )
        self.host_copies = 0
        self._stream: Any = None

    def start(self, to_expert_E: Tensor, *, tag: int, name: str) -> Pending[Counts]:
        """Start the exchange of one layer's counts.

        Args:
            to_expert_E: [E] int64 rows this rank sends to each expert, on the device of the tokens.
        """
        if not to_expert_E.is_cuda:
            return _CountsOnHost(self, to_expert_E, self._start_wire(to_expert_E, tag, name))
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        to_expert_E.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            received = self._start_wire(to_expert_E, tag, name).wait()
            device = torch.cat([to_expert_E, received.flatten()])
            host = torch.empty(device.shape, dtype=device.dtype, pin_memory=True)
            host.copy_(device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return _CountsFromStream(self, host, copied, to_expert_E.shape[0])

    def _start_wire(self, to_expert_E: Tensor, tag: int, name: str) -> Pending[Tensor]:
        rows = to_expert_E.view(self.expert_ranks, -1).repeat_interleave(self.tensor_ranks, dim=0)
        ones = [1] * self.exchange.size
        return self.exchange.start(rows, ones, ones, tag=tag, name=name)

    def to_host(self, numbers: Tensor, experts: int) -> Counts:
        """Counts of one host tensor that holds [E] rows sent, then [P, Q, L] rows received. The only place that reads counts."""
        self.host_copies += 1
        values = iter(numbers.tolist())
        to_expert = tuple(itertools.islice(values, experts))
        each = experts // self.expert_ranks
        arrived = {
            (tensor, expert): tuple(itertools.islice(values, each))
            for expert in range(self.expert_ranks)
            for tensor in range(self.tensor_ranks)
        }
        sources = tuple(
            tuple(arrived[tensor, expert] for expert in range(self.expert_ranks)) for tensor in range(self.tensor_ranks)
        )
        return Counts(to_expert, sources, self.tensor_rank)


class _CountsOnHost:
    def __init__(self, owner: CountExchange, to_expert_E: Tensor, wire: Pending[Tensor]) -> None:
        self._owner, self._sent, self._wire = owner, to_expert_E, wire
        self._counts: Counts | None = None

    def wait(self) -> Counts:
        if self._counts is None:
            numbers = torch.cat([self._sent, self._wire.wait().flatten()])
            self._counts = self._owner.to_host(numbers, self._sent.shape[0])
        return self._counts


class _CountsFromStream:
    """The copy is under way on the side stream; the host waits for its event alone. Not yet run on hardware."""

    def __init__(self, owner: CountExchange, host: Tensor, copied: Any, experts: int) -> None:
        self._owner, self._host, self._copied, self._experts = owner, host, copied, experts
        self._counts: Counts | None = None

    def wait(self) -> Counts:
        if self._counts is None:
            self._copied.synchronize()
            self._counts = self._owner.to_host(self._host, self._experts)
        return self._counts
