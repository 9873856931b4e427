"""The wire of the dispatchers: an asynchronous all-to-all of rows with unequal shares, and the packed rows that it carries.

Contract of `AllToAll`: rank i sends `send_counts[j]` rows to rank j, which expects exactly that many; the rows arrive in order
of the sending rank. Nothing is padded, no message carries zero rows, a rank's own rows never leave it.

- CPU (gloo): point-to-point requests, every receive posted before any send, because gloo's own all-to-all posts sends first and
  is half duplex. Tags identify all-to-alls, so several may be in flight and may be waited for in any order; on one group they
  share a link in order of their start.
- CUDA (NCCL): one `all_to_all_single` on a stream of its own, so that it overlaps with compute, or on the current stream of a
  caller who orders the streams himself (executor/streams.py). NCCL ignores tags and matches collectives by their order: all ranks
  of a group must start their all-to-alls in the same order, which the instruction list guarantees. Not yet run on hardware.

Packed rows carry token and probability, so that one all-to-all moves both. A packed row is a row of H elements followed by its
probability and by unused columns up to 16 bytes. The probability is stored as bits, read as elements of the rows' type (an fp32
probability after bf16 rows takes two), or as its value where the rows' type is the wider one. Both are exact. A packed tensor
may only be moved and cut: its last columns are bits, and a sum of two of them is meaningless. The gradient of a packed tensor is
packed the same way, so the all-to-all of the backward pass carries both gradients.

Expert-tensor parallelism: every rank of the group holds a slice of the same experts and computes on the rows of all. Before the
experts the rows are gathered; after them the partial outputs are summed and each rank keeps its own rows. Both use the wire of
the dispatch, so unequal shares need no padding; sums run in order of rank, in fp32 at least, so that every layout of the ranks
gives the same bits.

N rows, H elements per row, X columns after a row (`Columns`).
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_overlap.runtime.step import CommunicationFailed

T_co = TypeVar("T_co", covariant=True)

_TAGS = 1 << 30
"""gloo's tags are 32-bit; numbers start over after this many."""


class Pending(Protocol[T_co]):
    """An operation in flight."""

    def wait(self) -> T_co:
        """Wait for the result; waiting again returns the same."""


class AllToAllError(CommunicationFailed):
    """An all-to-all that did not complete: a peer died, hung or disagreed.

    Attributes:
        name: the operation, as the instruction list calls it (`L3.moe.dispatch`).
        peers: global ranks whose rows had not arrived when it failed; the one that reported the failure comes first.
    """

    def __init__(self, name: str, rank: int, peers: Sequence[int], cause: object) -> None:
        self.name, self.peers = name, tuple(peers)
        reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        listed = ", ".join(str(peer) for peer in self.peers)
        super().__init__(f"{name}: rank {rank} could not complete its all-to-all with rank {listed}: {reason}")


class AllToAll:
    """Sends rows among the ranks of one group.

    Args:
        group: the ranks; gloo for tensors in host memory, NCCL for tensors on a GPU.
        on_current_stream: whether all-to-alls run on the stream that the caller has made current; the caller then orders streams
            and tells the allocator of uses. Otherwise the wire has a stream of its own, which the waiting stream waits for.
    Attributes:
        rank, size: this rank's place in the group, and its size.
        sent_bytes: bytes that have left this rank so far.
    """

    def __init__(self, group: Any, on_current_stream: bool = False) -> None:
        self.on_current_stream = on_current_stream
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.sent_bytes = 0
        self._global_ranks = dist.get_process_group_ranks(group)
        self._next_tag = 0
        self._stream: Any = None

    def take_tags(self, count: int) -> int:
        """Reserve `count` tags and return the first; equal on all ranks that reserve in the same order."""
        first = self._next_tag
        self._next_tag = (first + count) % _TAGS
        return first

    def start(
        self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], *, tag: int, name: str
    ) -> Pending[Tensor]:
        """Start one all-to-all. Autograd does not see it.

        Args:
            rows: [sum of send_counts, ...] rows for rank 0, then rank 1, …; must not change before the wait.
            send_counts, receive_counts: [size] rows to and from each rank of the group.
            tag: distinguishes this all-to-all from others in flight.
            name: the operation, for errors.
        Returns:
            A handle that waits for the [sum of receive_counts, ...] rows that arrive, in order of the sending rank. For a group
                of one these are `rows` itself.
        Raises:
            AllToAllError: a peer is known to be gone; also raised by the wait, within the timeout.
        """
        assert len(send_counts) == len(receive_counts) == self.size, f"{name}: {self.size} counts each way"
        assert rows.shape[0] == sum(send_counts), f"{name}: {rows.shape[0]} rows, counts say {sum(send_counts)}"
        assert send_counts[self.rank] == receive_counts[self.rank], f"{name}: own rows counted differently"
        rows = (rows.detach() if rows.requires_grad else rows).contiguous()
        row_bytes = rows.element_size() * math.prod(rows.shape[1:])
        self.sent_bytes += row_bytes * (rows.shape[0] - send_counts[self.rank])
        if self.size == 1:
            return Done(rows)
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        if rows.is_cuda:
            return self._start_on_stream(rows, received, send_counts, receive_counts)
        return self._start_on_host(rows, received, send_counts, receive_counts, tag % _TAGS, name)

    def _start_on_host(
        self,
        rows: Tensor,
        received: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        tag: int,
        name: str,
    ) -> Pending[Tensor]:
        outgoing, incoming = rows.split(list(send_counts)), received.split(list(receive_counts))
        incoming[self.rank].copy_(outgoing[self.rank])
        # Each rank begins with its successor, so that they do not all send to rank 0 first.
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        works: list[tuple[int, Any]] = []
        peer = self.rank
        try:
            for peer in peers:
                if receive_counts[peer]:
                    works.append((peer, dist.irecv(incoming[peer], group=self.group, group_src=peer, tag=tag)))
            for peer in peers:
                if send_counts[peer]:
                    works.append((peer, dist.isend(outgoing[peer], group=self.group, group_dst=peer, tag=tag)))
        except RuntimeError as error:
            # None of them has ended; a rank that failed because of another may be the first to report.
            unfinished = dict.fromkeys([peer, *peers])
            raise self._failed(name, list(unfinished), error) from error
        return _OnHost(self, rows, received, works, name)

    def _start_on_stream(
        self, rows: Tensor, received: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Pending[Tensor]:
        """Start an all-to-all beside the current stream, or on it. Not yet run on hardware."""
        if self.on_current_stream:
            work = dist.all_to_all_single(
                received, rows, list(receive_counts), list(send_counts), group=self.group, async_op=True
            )
            work.wait()  # the current stream waits for NCCL's, the host does not
            return Done(received)
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        # The rows are written by the current stream; everything issued on it so far comes before the all-to-all.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work = dist.all_to_all_single(
                received, rows, list(receive_counts), list(send_counts), group=self.group, async_op=True
            )
            work.wait()  # NCCL runs on a stream of its own: this one waits for it, the host does not
            done = torch.cuda.Event()
            done.record()
        # Both were allocated on the current stream: without this the allocator would hand their memory out again as soon as
        # Python drops them, while the all-to-all still reads and writes it.
        for tensor in (rows, received):
            tensor.record_stream(self._stream)
        return _OnStream(received, done)

    def _failed(self, name: str, peers: Sequence[int], cause: Exception) -> AllToAllError:
        ranks = [self._global_ranks[peer] for peer in peers]
        return AllToAllError(name, self._global_ranks[self.rank], ranks, cause)

    def _patience_seconds(self) -> float:
        """How long a wait waits on a CPU: the group's timeout.

        On CUDA the host does not wait: NCCL's watchdog ends the process after that time and names the collective.
        """
        seconds: float = self.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        return seconds


class Done:
    """A finished result: a group of one sends nothing."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def wait(self) -> Tensor:
        return self._rows


class _OnHost:
    """Point-to-point requests in flight, and the tensors that they read and write: gloo keeps neither alive."""

    def __init__(
        self, all_to_all: AllToAll, rows: Tensor, received: Tensor, works: list[tuple[int, Any]], name: str
    ) -> None:
        self._all_to_all, self._received, self._works, self._name = all_to_all, received, works, name
        self._rows: Tensor | None = rows

    def wait(self) -> Tensor:
        # One deadline for all peers: a wait per peer could take their number times the timeout.
        deadline = time.monotonic() + self._all_to_all._patience_seconds()
        while self._works:
            peer, work = self._works[0]
            remaining = max(1e-3, deadline - time.monotonic())
            try:
                work.wait(datetime.timedelta(seconds=remaining))
            except RuntimeError as error:
                unfinished = dict.fromkeys(peer for peer, _ in self._works)
                raise self._all_to_all._failed(self._name, list(unfinished), error) from error
            # Popped only when it has ended: a failed wait reports the peers that remain.
            self._works.pop(0)
        self._rows = None
        return self._received


class _OnStream:
    """An all-to-all on its own stream; at the wait the current stream waits for it, the host goes on."""

    def __init__(self, received: Tensor, done: Any) -> None:
        self._received, self._done = received, done

    def wait(self) -> Tensor:
        torch.cuda.current_stream().wait_event(self._done)
        return self._received


ALIGNED_BYTES = 16
"""NCCL copies so many bytes at a time if both buffers begin at a multiple of them, else one by one."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a packed row after its H elements: those of its probability, and unused ones.

    Rows whose width is a multiple of ALIGNED_BYTES stay aligned, wherever the rows for a peer begin. Unused columns are never
    written or read: they cost no launch.

    Attributes:
        bits: columns of the probability.
        appended: all columns after the row.
    """

    bits: int
    appended: int

    @staticmethod
    def of(rows_dtype: torch.dtype, probs_dtype: torch.dtype) -> Columns:
        """The columns for rows and probabilities of these types."""
        bits = max(1, probs_dtype.itemsize // rows_dtype.itemsize)
        return Columns(bits, max(bits, ALIGNED_BYTES // rows_dtype.itemsize))

    def split(self, packed_NX: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the rows [N, H] and of the bits of their probabilities."""
        sizes = [packed_NX.shape[1] - self.appended, self.bits, self.appended - self.bits]
        rows, bits, _ = packed_NX.split(sizes, dim=1)
        return rows, bits


def join(rows_TH: Tensor, probs_T: Tensor, places_N: Tensor | None = None, sources_N: Tensor | None = None) -> Tensor:
    """Packed rows [N, H + X], outside autograd.

    Args:
        places_N: the row of every packed row; None: each in turn.
        sources_N: the index of its probability in probs_T; None: each in turn.
    """
    columns = Columns.of(rows_TH.dtype, probs_T.dtype)
    rows = rows_TH.shape[0] if places_N is None else places_N.shape[0]
    packed = rows_TH.new_empty((rows, rows_TH.shape[1] + columns.appended))
    rows_NH, bits_NX = columns.split(packed)
    if places_N is None:
        rows_NH.copy_(rows_TH)
    else:
        torch.index_select(rows_TH, 0, places_N, out=rows_NH)
    probs_N = probs_T if sources_N is None else probs_T.index_select(0, sources_N)
    bits_NX.copy_(_bits(probs_N, rows_TH.dtype, columns.bits))
    return packed


def cut(packed_NX: Tensor, probs_dtype: torch.dtype, numbers_M: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows [M, H] and probabilities [M] of packed rows, outside autograd.

    Args:
        numbers_M: the packed row of every row; None: each in turn, M = N.
    """
    pair = Columns.of(packed_NX.dtype, probs_dtype).split(packed_NX)
    rows, bits = (x.contiguous() if numbers_M is None else x.index_select(0, numbers_M) for x in pair)
    return rows, _probs(bits, probs_dtype)


def _bits(probs_N: Tensor, rows_dtype: torch.dtype, columns: int) -> Tensor:
    """Probabilities as columns [N, `columns`] of the rows' type: their bits, or their values if the rows' type is wider."""
    if probs_N.dtype.itemsize < rows_dtype.itemsize:
        return probs_N.to(rows_dtype).unsqueeze(1)
    probs_N = probs_N.contiguous()
    return (probs_N if probs_N.dtype == rows_dtype else probs_N.view(rows_dtype)).view(-1, columns)


def _probs(bits_NX: Tensor, probs_dtype: torch.dtype) -> Tensor:
    """The probabilities [N] of columns [N, X]: the inverse of `_bits`."""
    bits = bits_NX.view(-1)
    if bits.dtype == probs_dtype:
        return bits
    return bits.view(probs_dtype) if probs_dtype.itemsize >= bits.dtype.itemsize else bits.to(probs_dtype)


class Pack(torch.autograd.Function):
    """`join` under autograd: Pack.apply(rows_NH, probs_N) -> packed."""

    @staticmethod
    def forward(ctx: Any, rows_NH: Tensor, probs_N: Tensor) -> Tensor:
        ctx.probs_dtype = probs_N.dtype
        return join(rows_NH, probs_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return cut(gradients[0], ctx.probs_dtype)


class Unpack(torch.autograd.Function):
    """`cut` under autograd: Unpack.apply(packed, probs_dtype) -> rows_NH, probs_N."""

    @staticmethod
    def forward(ctx: Any, packed_NX: Tensor, probs_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return cut(packed_NX, probs_dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return join(*gradients), None


class PermutePacked(torch.autograd.Function):
    """PermutePacked.apply(hidden_TH, probs_TE, places_N, sources_N) -> packed rows [N, H + X].

    `join` for the tokens and probabilities of every row, without materialising the rows. Backward sums the rows of a token.

    Args:
        places_N: the token of every row.
        sources_N: index of its probability in probs_TE, flattened.
    """

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, probs_TE: Tensor, places_N: Tensor, sources_N: Tensor) -> Tensor:
        ctx.save_for_backward(places_N, sources_N)
        ctx.shapes, ctx.probs_dtype = (hidden_TH.shape, probs_TE.shape), probs_TE.dtype
        return join(hidden_TH, probs_TE.reshape(-1), places_N, sources_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        places_N, sources_N = ctx.saved_tensors
        (packed,), (hidden_shape, probs_shape) = gradients, ctx.shapes
        drows_NH, bits_NX = Columns.of(packed.dtype, ctx.probs_dtype).split(packed)
        dhidden_TH = packed.new_zeros(hidden_shape).index_add_(0, places_N, drows_NH)
        dprobs_N = _probs(bits_NX.contiguous(), ctx.probs_dtype)
        dprobs = dprobs_N.new_zeros(probs_shape.numel()).index_add_(0, sources_N, dprobs_N)
        return dhidden_TH, dprobs.view(probs_shape), None, None


@dataclass(frozen=True, slots=True)
class TensorRanks:
    """The all-to-alls of one layer among its expert-tensor ranks.

    Attributes:
        all_to_all: the wire among them.
        rows: number of rows of each rank.
        tag: first of two tags, for gather and sum.
        name: the layer's operator.
    """

    all_to_all: AllToAll
    rows: Sequence[int]
    tag: int
    name: str

    def everyones(self, rows: Tensor, suffix: str = "") -> Tensor:
        """Gather the rows of all ranks: [sum of rows, ...], in order of rank."""
        size = self.all_to_all.size
        own_rows = [rows.shape[0]] * size
        repeated = rows.repeat(size, *[1] * (rows.dim() - 1))
        return self.all_to_all.start(
            repeated, own_rows, self.rows, tag=self.tag, name=f"{self.name}.gather{suffix}"
        ).wait()

    def for_me(self, rows: Tensor, suffix: str = "") -> tuple[Tensor, ...]:
        """Collect every rank's share of this rank's rows: one [own rows, ...] tensor per rank."""
        own_rows = [self.rows[self.all_to_all.rank]] * self.all_to_all.size
        name = f"{self.name}.sum{suffix}"
        return self.all_to_all.start(rows, self.rows, own_rows, tag=self.tag + 1, name=name).wait().split(own_rows)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    # A loop and not a stacked sum: the order of the additions is fixed, whatever the shapes.
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


class GatherUnpack(torch.autograd.Function):
    """GatherUnpack.apply(packed, probs_dtype, ranks) -> everyone's rows [N, H] and probabilities [N].

    The backward pass sums everyone's gradients of this rank's rows.
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, probs_dtype: torch.dtype, ranks: TensorRanks) -> tuple[Tensor, Tensor]:
        ctx.probs_dtype, ctx.ranks = probs_dtype, ranks
        return cut(ranks.everyones(packed), probs_dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        parts = [cut(part, ctx.probs_dtype) for part in ctx.ranks.for_me(join(*gradients), ".backward")]
        return join(_sum([rows for rows, _ in parts]), _sum([probs for _, probs in parts])), None, None


class SumOwnRows(torch.autograd.Function):
    """SumOwnRows.apply(partial, ranks) -> this rank's rows [N, H] of the sum over ranks; backward gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _sum(ranks.for_me(partial))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.everyones(gradients[0], ".backward"), None
