"""The irregular all-to-all dispatcher: counts first, then exactly the rows that are routed (Lancet, section 6 and Fig. 10).

    1. permute      rows in order of their expert, token and probability packed into one row      compute
    2. counts       how many rows go where; the one copy to the host                               all-to-all
    3. dispatch     the rows to the ranks of their experts                                         all-to-all
    4. sort         rows of one expert together (expert-tensor ranks: gathered first)               compute
    5. unsort       the experts' output back in order of arrival (expert-tensor: summed)            compute
    6. combine      the way back, counts swapped                                                   all-to-all
    7. unpermute    sum per token                                                                   compute

Compute stages run under autograd, one autograd segment each; all-to-alls run outside autograd and have a backward of their own,
again with counts swapped. The dispatcher keeps no state between stages: the state of a pass is in its `Handle`, so several
partitions and micro-batches can be in flight.

With a static capacity every rank sends every expert as many rows as the gate's capacity. Stage 2 is left out: the host knows all
counts. Unused slots carry the row of an arbitrary token; their results and gradients are discarded.

Counts (stage 2): every rank tells every rank of the expert group (expert-tensor ranks included) how many of its rows go to each
expert of that rank. The counts are copied to the host once per layer, because the host sets shapes and splits; the backward pass
uses them again.

T tokens, E experts of the layer, H elements per token, N rows, X columns of a packed row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy
import numpy.typing
import torch
from torch import Tensor

from moe_overlap.runtime.dispatch.ordered_sums import SelectInOrder, SumInOrder
from moe_overlap.runtime.dispatch.row_order import ExpertOrder, Reorder, SortUnpack
from moe_overlap.runtime.dispatch.wire import (
    AllToAll,
    Done,
    GatherUnpack,
    Pack,
    Pending,
    PermutePacked,
    SumOwnRows,
    TensorRanks,
    Unpack,
)


@dataclass(frozen=True, eq=False)
class Counts:
    """Rows of one dispatch, as one rank sees them. L experts per rank, P expert ranks, Q expert-tensor ranks, S = Q · P sources.

    The host sets shapes by them; the device computes row numbers from its own copy, which spares one from the host.

    Attributes:
        to_expert_E: [P·L] int64 rows this rank sends to each expert.
        from_source_QPL: [Q, P, L] int64 rows each rank sends to each of this rank's experts.
        tensor_rank: this rank's place among the Q.
        on_device: the same two on the device of the tokens; None where all numbers of each are equal. Read them by `for_device`.
    """

    to_expert_E: numpy.typing.NDArray[numpy.int64]
    from_source_QPL: numpy.typing.NDArray[numpy.int64]
    tensor_rank: int
    on_device: tuple[Tensor, Tensor] | None = None

    @cached_property
    def sent(self) -> list[int]:
        """[P] rows to each expert rank."""
        return _numbers(self.to_expert_E.reshape(self.from_source_QPL.shape[1:]).sum(1))

    @cached_property
    def received(self) -> list[int]:
        """[P] rows from each expert rank."""
        return _numbers(self.from_source_QPL[self.tensor_rank].sum(1))

    @cached_property
    def gathered(self) -> list[int]:
        """[Q] rows each expert-tensor rank receives; every rank computes on all of them."""
        return _numbers(self.from_source_QPL.sum((1, 2)))

    @cached_property
    def per_expert(self) -> list[int]:
        """[L] rows of each expert this rank holds."""
        return _numbers(self.from_source_QPL.sum((0, 1)))

    def for_device(self) -> tuple[Tensor, Tensor] | None:
        """`on_device`, for use on the current stream."""
        for counts in self.on_device or ():
            if counts.is_cuda:
                # The all-to-all of counts allocated them on a stream of its own; they are no buffer of a list.
                counts.record_stream(torch.cuda.current_stream())
        return self.on_device

    def order(self, device: torch.device) -> ExpertOrder:
        """The order of the gathered rows by expert, on the device of the tokens."""
        *sources_QP, experts = self.from_source_QPL.shape
        on_device = self.for_device()
        if on_device is None:
            return ExpertOrder.of_equal(math.prod(sources_QP), experts, int(self.from_source_QPL[0, 0, 0]), device)
        return ExpertOrder.of(on_device[1].reshape(-1, experts), sum(self.gathered))

    def chunk(self, index: int, degree: int) -> Counts:
        """The counts of one of `degree` chunks of every (source, expert) piece; the chunks add up to these counts."""
        on_device = self.for_device()
        if on_device is not None:
            on_device = (chunk_of(on_device[0], index, degree), chunk_of(on_device[1], index, degree))
        return Counts(
            chunk_of(self.to_expert_E, index, degree),
            chunk_of(self.from_source_QPL, index, degree),
            self.tensor_rank,
            on_device,
        )


Rows = TypeVar("Rows", Tensor, numpy.typing.NDArray[numpy.int64])


def chunk_of(rows: Rows, index: int, degree: int) -> Rows:
    """The rows of one of `degree` chunks of pieces with so many rows."""
    # Differences of rounded prefixes: sender and receiver cut a pair's rows alike without asking each other.
    return (index + 1) * rows // degree - index * rows // degree


def _numbers(array: numpy.typing.NDArray[numpy.int64]) -> list[int]:
    numbers: list[int] = array.tolist()
    return numbers


@dataclass(frozen=True, slots=True)
class Known:
    """Counts that are known without communication; the wait returns them."""

    counts: Counts

    def wait(self) -> Counts:
        return self.counts


class CountAllToAll:
    """The all-to-all of counts over the expert group.

    Args:
        all_to_all: the wire over all Q·P ranks, expert-tensor ranks fastest.
        expert_ranks, tensor_ranks, tensor_rank: P, Q, and this rank's place among the Q.
    Attributes:
        host_copies: copies of counts from the device to the host so far.
    """

    def __init__(self, all_to_all: AllToAll, expert_ranks: int, tensor_ranks: int, tensor_rank: int) -> None:
        assert all_to_all.size == expert_ranks * tensor_ranks, "the wire must join all ranks of the experts"
        self.all_to_all, self.expert_ranks = all_to_all, expert_ranks
        self.tensor_ranks, self.tensor_rank = tensor_ranks, tensor_rank
        self.host_copies = 0
        self._stream: Any = None

    def prepare(self, device: torch.device, experts: int, in_flight: int) -> None:
        """Have torch pin host memory for so many counts under way together: within a step CUDA might wait for the device."""
        if device.type == "cuda":
            numbers = experts * (1 + self.tensor_ranks)
            # Held together, so that there are so many; freed, torch keeps them for the next of this size.
            pinned = [torch.empty(numbers, dtype=torch.int64, pin_memory=True) for _ in range(in_flight)]
            del pinned

    def start(self, to_expert_E: Tensor, *, tag: int, name: str) -> Pending[Counts]:
        """Start the all-to-all of one layer's counts.

        Args:
            to_expert_E: [E] int64 rows this rank sends to each expert, on the device of the tokens.
        """
        if not to_expert_E.is_cuda:
            return _CountsOnHost(self, to_expert_E, self._start_wire(to_expert_E, tag, name))
        stream = torch.cuda.current_stream()
        if not self.all_to_all.on_current_stream:
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            # The gate writes the counts on the current stream. A side stream copies them to the host while the current one
            # goes on.
            self._stream.wait_stream(stream)
            stream = self._stream
        # `record_stream`: the tensor was allocated on the other stream and is no buffer of a list.
        to_expert_E.record_stream(stream)
        with torch.cuda.stream(stream):
            received = self._start_wire(to_expert_E, tag, name).wait()
            device = torch.cat([to_expert_E, received.flatten()])
            # Pinned memory: a copy into pageable memory would block the host in spite of non_blocking.
            host = torch.empty(device.shape, dtype=device.dtype, pin_memory=True)
            host.copy_(device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return _CountsFromStream(self, host, device, copied, to_expert_E.shape[0])

    def _start_wire(self, to_expert_E: Tensor, tag: int, name: str) -> Pending[Tensor]:
        # The rows are gathered over the expert-tensor ranks later: each of them must know all counts.
        rows = to_expert_E.view(self.expert_ranks, -1)
        if self.tensor_ranks > 1:
            rows = rows.repeat_interleave(self.tensor_ranks, dim=0)
        ones = [1] * self.all_to_all.size
        return self.all_to_all.start(rows, ones, ones, tag=tag, name=name)

    def to_host(self, numbers: Tensor, on_device: Tensor, experts: int) -> Counts:
        """Read the counts of one host tensor: [E] rows sent, then [P, Q, L] rows received. No other place reads counts.

        Args:
            on_device: the same on the device of the tokens.
        """
        self.host_copies += 1
        values = numbers.numpy().copy()  # pinned memory goes back with `numbers`
        shape_PQL = (self.expert_ranks, self.tensor_ranks, experts // self.expert_ranks)
        return Counts(
            values[:experts],
            values[experts:].reshape(shape_PQL).swapaxes(0, 1),
            self.tensor_rank,
            (on_device[:experts], on_device[experts:].view(shape_PQL).transpose(0, 1)),
        )


class _CountsOnHost:
    """Counts in flight in host memory; read once, then stored."""

    def __init__(self, owner: CountAllToAll, to_expert_E: Tensor, wire: Pending[Tensor]) -> None:
        self._owner, self._sent, self._wire = owner, to_expert_E, wire
        self._counts: Counts | None = None

    def wait(self) -> Counts:
        if self._counts is None:
            numbers = torch.cat([self._sent, self._wire.wait().flatten()])
            self._counts = self._owner.to_host(numbers, numbers, self._sent.shape[0])
        return self._counts


class _CountsFromStream:
    """Counts that the side stream copies to the host; the wait is for the copy's event only. Not yet run on hardware."""

    def __init__(self, owner: CountAllToAll, host: Tensor, on_device: Tensor, copied: Any, experts: int) -> None:
        self._owner, self._on_device = owner, on_device
        self._host: Tensor | None = host
        self._copied, self._experts = copied, experts
        self._counts: Counts | None = None

    def wait(self) -> Counts:
        if self._counts is None:
            self._copied.synchronize()
            assert self._host is not None
            self._counts = self._owner.to_host(self._host, self._on_device, self._experts)
            self._host = None
        return self._counts


_TAGS_PER_HANDLE = 8
_COUNT, _DISPATCH, _COMBINE, _DISPATCH_BACKWARD, _COMBINE_BACKWARD, _TENSOR = range(6)
"""Tags of one handle; `_TENSOR` takes two of them."""


@dataclass(slots=True)
class Handle:
    """One pass of one partition through one layer's dispatch and combine.

    Attributes:
        name: the layer's operator (`L3.moe`), for errors and spans.
        map_TE: which tokens go to which experts.
        to_expert_E: rows per expert, on the device of the tokens.
        row_sources_N: index token · E + expert of every permuted row; 0 for rows past the routed ones and for unused slots of a
            static capacity.
        row_tokens_N: token of every permuted row; 0 for the same rows.
        probs_dtype: type of the probabilities.
        tag: first of this handle's tags.
        arriving: the counts in flight; None until `start_counts`.
        summed_into_N: with a static capacity the token to whose sum a row is added, T for unused slots.
        order: of the rows by expert, once `IrregularDispatcher.sort` has computed it; a copy of the handle has none.
    """

    name: str
    map_TE: Tensor
    to_expert_E: Tensor
    row_sources_N: Tensor
    row_tokens_N: Tensor
    probs_dtype: torch.dtype
    tag: int
    arriving: Pending[Counts] | None = None
    summed_into_N: Tensor | None = None
    order: ExpertOrder | None = field(default=None, init=False)

    @property
    def counts(self) -> Counts:
        """The counts; waits for them on first use."""
        assert self.arriving is not None, f"{self.name}: start_counts comes first"
        return self.arriving.wait()

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.map_TE.shape[0])


class Wires:
    """The wires of one rank's experts; all layers of a stage can share them.

    Args:
        groups: megatron-core's collection; `ep`, `expt_tp` and `tp_ep` are read.
        on_current_stream: see `AllToAll`.
    """

    def __init__(self, groups: Any, on_current_stream: bool = False) -> None:
        self.rows = AllToAll(groups.ep, on_current_stream)
        self.tensor = AllToAll(groups.expt_tp, on_current_stream)
        counts = AllToAll(groups.tp_ep, on_current_stream)
        self.counts = CountAllToAll(counts, self.rows.size, self.tensor.size, self.tensor.rank)

    @property
    def sent_bytes(self) -> int:
        """Bytes that have left this rank, counts included."""
        return self.rows.sent_bytes + self.tensor.sent_bytes + self.counts.all_to_all.sent_bytes


class IrregularDispatcher:
    """The stages of dispatch and combine; one dispatcher serves all layers that share its wires.

    Args:
        wires: the wires of this rank's experts.
        takes_bounds: whether a pass with a bound of its rows allocates as many, so that no stage before the counts waits for the
            device; rows past the routed ones are never sent. Otherwise the host counts the routed rows (free on a CPU).
        in_order: whether the rows of a token are summed in a fixed order on a GPU as well (ordered_sums.py).
        static_capacity: whether every pass has a capacity, to which its rows are padded.
    """

    def __init__(
        self,
        wires: Wires,
        takes_bounds: bool = False,
        in_order: bool = False,
        static_capacity: bool = False,
    ) -> None:
        self.wires, self.takes_bounds = wires, takes_bounds
        self.in_order, self.static_capacity = in_order, static_capacity

    def open(
        self,
        map_TE: Tensor,
        probs_dtype: torch.dtype,
        name: str,
        most_rows: int | None = None,
        capacity: int | None = None,
    ) -> Handle:
        """Open the handle of a pass, from the gate's decision.

        Args:
            map_TE: [T, E] bool; what the gate dropped is not set.
            name: the layer's operator.
            most_rows: upper bound of the rows that the gate routes; None: no bound.
            capacity: with a static capacity, the largest number of tokens that the gate lets each expert take, and the rows sent
                to it; the same on all ranks.
        """
        tokens, experts = map_TE.shape
        assert experts % self.wires.rows.size == 0, f"{name}: {experts} experts on {self.wires.rows.size} ranks"
        assert (capacity is not None) == self.static_capacity, f"{name}: a static capacity belongs to every pass"
        chosen_TE = map_TE.bool()
        to_expert_E = chosen_TE.sum(dim=0)
        if capacity is not None:
            return self._open_static(chosen_TE.t().contiguous(), map_TE, to_expert_E, probs_dtype, name, capacity)
        rows = int(to_expert_E.sum()) if most_rows is None or not self.takes_bounds else most_rows
        # Expert by expert, tokens in order. `size` saves asking the device for the number of rows: one operator, no wait.
        experts_N, places_N = torch.nonzero_static(chosen_TE.t(), size=rows, fill_value=0).unbind(1)
        flat_N = torch.add(experts_N, places_N, alpha=experts)
        return Handle(name, map_TE, to_expert_E, flat_N, places_N, probs_dtype, self.take_tags())

    def _open_static(
        self, chosen_ET: Tensor, map_TE: Tensor, to_expert_E: Tensor, probs_dtype: torch.dtype, name: str, capacity: int
    ) -> Handle:
        experts, tokens = chosen_ET.shape
        rows = experts * capacity
        firsts_E1 = torch.arange(0, rows, capacity, device=chosen_ET.device).unsqueeze(1)
        # The n-th token of an expert goes to its n-th slot, pairs that were not chosen go past the last row.
        places = torch.where(chosen_ET, firsts_E1 + chosen_ET.cumsum(1) - 1, rows).view(-1)
        pairs = torch.arange(chosen_ET.numel(), device=chosen_ET.device)
        sources = pairs.new_full((rows + 1,), -1).scatter_(0, places, pairs)[:rows]
        is_empty, sources = sources < 0, sources.clamp(min=0)
        # A rank without tokens still takes part in the all-to-alls.
        places_N = sources % max(tokens, 1)
        tokens_N = places_N.masked_fill(is_empty, tokens)
        flat = places_N * experts + sources // max(tokens, 1)
        ranks, local = self.wires.rows.size, experts // self.wires.rows.size
        sources_QPL = numpy.full((self.wires.tensor.size, ranks, local), capacity)
        counts = Counts(numpy.full(experts, capacity), sources_QPL, self.wires.tensor.rank)
        return Handle(name, map_TE, to_expert_E, flat, places_N, probs_dtype, self.take_tags(), Known(counts), tokens_N)

    def opened_again(self, handle: Handle) -> Handle:
        """A new handle for the decisions in another handle's tensors, with its own tags and counts."""
        arriving = handle.arriving if self.static_capacity else None
        return replace(handle, tag=self.take_tags(), arriving=arriving)

    def take_tags(self) -> int:
        """Reserve the tags of a new handle and return the first; all ranks open their handles in the same order."""
        return self.wires.rows.take_tags(_TAGS_PER_HANDLE)

    def select(self, hidden_TH: Tensor, probs_TE: Tensor, handle: Handle) -> tuple[Tensor, Tensor]:
        """Tokens [N, H] and probabilities [N] in order of their expert, unpacked."""
        places_N = handle.row_tokens_N
        if self.in_order:
            tokens_N = handle.summed_into_N
            if tokens_N is None:
                # Rows past the routed ones repeat a token that has rows of its own: they must count for no token.
                numbers_N = torch.arange(places_N.shape[0], device=places_N.device)
                tokens_N = places_N.masked_fill(numbers_N >= handle.to_expert_E.sum(), handle.tokens)
            rows = SelectInOrder.apply(hidden_TH, places_N, tokens_N)
        else:
            rows = hidden_TH.index_select(0, places_N)
        return rows, probs_TE.reshape(-1).index_select(0, handle.row_sources_N)

    def permute(
        self,
        hidden_TH: Tensor,
        probs_TE: Tensor,
        map_TE: Tensor,
        name: str = "moe",
        most_rows: int | None = None,
        capacity: int | None = None,
    ) -> tuple[Tensor, Handle]:
        """Stage 1: packed rows [N, X] in order of their expert, and the handle of this pass."""
        handle = self.open(map_TE, probs_TE.dtype, name, most_rows, capacity)
        if self.in_order:
            return Pack.apply(*self.select(hidden_TH, probs_TE, handle)), handle
        return PermutePacked.apply(hidden_TH, probs_TE, handle.row_tokens_N, handle.row_sources_N), handle

    def start_counts(self, handle: Handle) -> Pending[Counts]:
        """Stage 2: the all-to-all of counts. Its wait returns them; later stages that need the counts wait for them."""
        handle.arriving = self.wires.counts.start(
            handle.to_expert_E, tag=handle.tag + _COUNT, name=f"{handle.name}.count"
        )
        return handle.arriving

    def start_dispatch(self, rows_NX: Tensor, handle: Handle) -> Pending[Tensor]:
        """Stage 3: packed rows to the ranks of their experts; rows past the routed ones are not sent."""
        sent, received = handle.counts.sent, handle.counts.received
        routed = sum(sent)
        assert routed <= rows_NX.shape[0], f"{handle.name}: {routed} rows routed, {rows_NX.shape[0]} allowed for"
        tag, name = handle.tag + _DISPATCH, f"{handle.name}.dispatch"
        rows_NX = rows_NX if rows_NX.shape[0] == routed else rows_NX[:routed]
        return self.wires.rows.start(rows_NX, sent, received, tag=tag, name=name)

    def sort(self, received_NX: Tensor, handle: Handle) -> tuple[Tensor, Tensor, Tensor]:
        """Stage 4: rows [M, H] expert by expert, rows of each expert [L] int64 on the host, probabilities [M].

        M: rows of all expert-tensor ranks. Within an expert: by expert-tensor rank, then expert rank, then token.
        """
        if self.wires.tensor.size > 1:
            return self.by_expert(*self.arrive(received_NX, handle), handle)
        rows, probs = SortUnpack.apply(received_NX, handle.probs_dtype, self._order(handle))
        return rows, torch.tensor(handle.counts.per_expert, dtype=torch.int64), probs

    def arrive(self, received_NX: Tensor, handle: Handle) -> tuple[Tensor, Tensor]:
        """Rows and probabilities of received packed rows; with expert-tensor ranks, those of all of them."""
        if self.wires.tensor.size == 1:
            return Unpack.apply(received_NX, handle.probs_dtype)
        return GatherUnpack.apply(received_NX, handle.probs_dtype, self._tensor_ranks(handle))

    def by_expert(self, rows_MH: Tensor, probs_M: Tensor, handle: Handle) -> tuple[Tensor, Tensor, Tensor]:
        """Reorder the rows of all sources from order of arrival to order of expert; returns the same as `sort`."""
        rows, probs = (Reorder.apply(x, self._order(handle)) for x in (rows_MH, probs_M))
        return rows, torch.tensor(handle.counts.per_expert, dtype=torch.int64), probs

    def unsort(self, output_MH: Tensor, handle: Handle) -> Tensor:
        """Stage 5: the experts' output [M, H] in order of arrival; with expert-tensor ranks, this rank's rows."""
        return self.leave(self.by_arrival(output_MH, handle), handle)

    def by_arrival(self, output_MH: Tensor, handle: Handle) -> Tensor:
        """Undo `by_expert`."""
        returned: Tensor = Reorder.apply(output_MH, self._order(handle).back)
        return returned

    def leave(self, output_MH: Tensor, handle: Handle) -> Tensor:
        """Sum the output over the expert-tensor ranks and keep this rank's rows."""
        if self.wires.tensor.size == 1:
            return output_MH
        return SumOwnRows.apply(output_MH, self._tensor_ranks(handle))

    def start_combine(self, rows_NH: Tensor, handle: Handle) -> Pending[Tensor]:
        """Stage 6: results to the ranks of their tokens."""
        sent, received = handle.counts.sent, handle.counts.received
        tag, name = handle.tag + _COMBINE, f"{handle.name}.combine"
        return self.wires.rows.start(rows_NH, received, sent, tag=tag, name=name)

    def unpermute(self, returned_NH: Tensor, handle: Handle) -> Tensor:
        """Stage 7: [T, H] the sum of each token's results; zero where no expert took it."""
        tokens_N = handle.summed_into_N
        if tokens_N is None:
            tokens_N = handle.row_tokens_N
            if tokens_N.shape[0] != returned_NH.shape[0]:
                tokens_N = tokens_N[: returned_NH.shape[0]]
        if self.in_order:
            return SumInOrder.apply(returned_NH, tokens_N, handle.tokens)
        if handle.summed_into_N is not None:
            # One extra token collects the results of unused slots and is cut off.
            sums_TH = returned_NH.new_zeros((handle.tokens + 1, returned_NH.shape[1]))
            return sums_TH.index_add_(0, tokens_N, returned_NH)[:-1]
        return returned_NH.new_zeros((handle.tokens, returned_NH.shape[1])).index_add_(0, tokens_N, returned_NH)

    def start_combine_backward(self, gradient_NH: Tensor, handle: Handle) -> Pending[Tensor]:
        """Gradient of the rows that came back -> gradient of the rows passed to `start_combine`."""
        sent, received = handle.counts.sent, handle.counts.received
        tag, name = handle.tag + _COMBINE_BACKWARD, f"{handle.name}.combine.backward"
        return self.wires.rows.start(gradient_NH, sent, received, tag=tag, name=name)

    def start_dispatch_backward(self, gradient_NX: Tensor, handle: Handle) -> Pending[Tensor]:
        """Packed gradient of the rows that arrived -> packed gradient of the rows passed to `start_dispatch`."""
        sent, received = handle.counts.sent, handle.counts.received
        tag, name = handle.tag + _DISPATCH_BACKWARD, f"{handle.name}.dispatch.backward"
        # The backward pass sends no counts: they are those of the forward pass, swapped.
        pending = self.wires.rows.start(gradient_NX, received, sent, tag=tag, name=name)
        padded = _WithZeroRows(pending, handle.row_sources_N.shape[0])
        if gradient_NX.is_cuda and self.wires.rows.on_current_stream:
            # On the stream of the all-to-all: on another one the allocator would not know of the received rows' last reader.
            return Done(padded.wait())
        return padded

    def _order(self, handle: Handle) -> ExpertOrder:
        if handle.order is None:
            handle.order = handle.counts.order(handle.row_tokens_N.device)
        return handle.order

    def _tensor_ranks(self, handle: Handle) -> TensorRanks:
        return TensorRanks(self.wires.tensor, handle.counts.gathered, handle.tag + _TENSOR, handle.name)


class _WithZeroRows:
    """An all-to-all whose rows end in zeros: the gradient of rows that were never sent."""

    def __init__(self, pending: Pending[Tensor], rows: int) -> None:
        self._pending, self._rows = pending, rows

    def wait(self) -> Tensor:
        arrived = self._pending.wait()
        missing = self._rows - arrived.shape[0]
        return torch.cat([arrived, arrived.new_zeros((missing, *arrived.shape[1:]))]) if missing else arrived
