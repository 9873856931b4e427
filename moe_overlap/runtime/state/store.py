"""A parameter store: the weights, gradient sums and optimizer states of one parameter group and kind, each one flat storage.

Terms. A *parameter group* is the embedding, a layer or the head; its *kinds* are its dense parameters and its experts, which have
unlike numbers of replicas D. A store sees its parameters as D *rows* of w elements, cut and padded as megatron-core's DDP cuts a
bucket: rank r of the replicas owns row r. The *share* of a rank is what its optimizer steps: row r, or all rows with ZeRO 0.

    level   weights            gradient sums                        states of the optimizer
    0       all                all; reduced and gathered            all
    1       all                all; reduced at the end of the step  row r
    2       all                row r; all of one micro-batch        row r
    3       row r; all in use  row r; all of one micro-batch        row r

Contract.
1. Parameters stay megatron-core's objects with their attributes; their data and `main_grad` are views of the storages.
2. Storage that is not always there keeps its identity: its memory is freed and allocated again by `resize_`. So views, and
   tensors that autograd has saved, are valid again once it is refilled. Between `close_weights` and the end of the next gather
   nothing may read the weights; outside `open_sums` … `start_reduction` nothing may add to the sums (ZeRO 2, 3).
3. Gradients are scaled, then summed: in the order of rank on CPUs, in NCCL's order on GPUs. All levels use the same reduction, so
   they give the same bits where they sum the same micro-batches (not shown on GPUs).
4. A kind without replicas (D = 1) has nothing to shard: it is kept as at level 1.
5. Of offloaded weights and states the last elements of every storage wait on the host (host_memory.py): those of the weights as
   the level stores them, of the master weights, and of each moment. `fetch` precedes a use, `store` follows a change, and
   `release` the last use.

- CPU (gloo): a reduction is an all-to-all of rows and a sum in order of rank; gloo's own sends twice the bytes.
- CUDA (NCCL): a reduce-scatter; memory that another stream still uses is registered with the allocator, so freed memory returns
  late. Before it allocates a group, the host waits until the device has freed all but the last of those that are freed by then
  (`host_waits` of plan/lowering/lifetimes.py): one group more is there than on a CPU. Not yet run on hardware.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_overlap.plan.operators import Copied
from moe_overlap.plan.plan import Offload
from moe_overlap.runtime.dispatch.wire import AllToAll
from moe_overlap.runtime.state.host_memory import HostMemory, OffloadedTail

PARAMETER_ELEMENTS, BUCKET_ELEMENTS = 64, 128
"""Elements at whose multiples DDP lets a parameter begin, and a bucket end."""
Wait = Callable[[], None]
"""Waits until a communication has ended and its result is stored."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one parameter in a rank's share.

    Attributes:
        first, last: elements of the parameter, half open.
        main: the fp32 weights that the optimizer steps; fp32 weights are their own.
        gradient: the reduced gradients.
        holders: (rank among the replicas, first, last element) of every rank with a part of this parameter; with ZeRO 0 of this
            rank alone, which has all of it.
    """

    parameter: torch.nn.Parameter
    first: int
    last: int
    main: Tensor
    gradient: Tensor
    holders: tuple[tuple[int, int, int], ...]


class ParameterStore:
    """The storages of one parameter group and kind on one rank. Building it moves the parameters' data into them.

    Args:
        group: name of the parameter group: `L3`.
        parameters: of one type, in the order of registration.
        zero_level: of the stage.
        replicas: the wire among the D ranks with these parameters.
        scale: factor of a gradient before it is summed over the replicas.
        offload: shares in host memory, of the stage.
        host: takes them.
    Attributes:
        zero_level: of this kind: at most 1 without replicas.
        weights, sums: [D·w] all rows.
        stored, total: this rank's share of the weights and of the reduced gradients.
        is_reduced: whether a gradient of this step has been reduced.
    """

    def __init__(
        self,
        group: str,
        parameters: Sequence[torch.nn.Parameter],
        zero_level: int,
        replicas: AllToAll,
        scale: float,
        offload: Offload,
        host: HostMemory,
    ) -> None:
        self.group, self.replicas, self._scale = group, replicas, scale
        self._offload, self._host = offload, host
        self.weights = torch.empty(0)
        self.zero_level = zero_level if replicas.size > 1 else min(zero_level, 1)
        # Its group is gathered for each use, but this kind has no replicas: it is read where it is stored.
        self.is_read_while_gathered = zero_level == 3 and self.zero_level < 3
        self._ranges: dict[torch.nn.Parameter, tuple[int, int]] = {}
        end = 0
        # The order in which DDP fills its buckets.
        for parameter in reversed(parameters):
            first = _rounded(end, PARAMETER_ELEMENTS)
            end = first + parameter.numel()
            self._ranges[parameter] = (first, end)
        elements = _rounded(end, math.lcm(replicas.size, BUCKET_ELEMENTS))
        self._width = elements // replicas.size
        self._row = slice(replicas.rank * self._width, (replicas.rank + 1) * self._width)
        self._share = slice(0, elements) if self.zero_level == 0 else self._row
        weights = torch.zeros(elements, dtype=parameters[0].dtype, device=parameters[0].device)
        self.sums = torch.zeros(elements, dtype=torch.float32, device=parameters[0].device)
        for parameter, (first, last) in self._ranges.items():
            weights[first:last] = parameter.detach().reshape(-1)
        self._show(weights)
        for parameter, (first, last) in self._ranges.items():
            parameter.main_grad = self.sums[first:last].view(parameter.shape)  # type: ignore[attr-defined]
        self.stored = self.weights[self._share]
        self.total = self.sums[self._share]
        if self.zero_level == 3:
            self.stored = self.stored.clone()
        if self.zero_level >= 2:
            self.total = torch.zeros_like(self.total)
        # fp32 weights are their own master weights, unless they move without them.
        is_main = self.stored.dtype == torch.float32 and not offload.weights
        self.main = self.stored if is_main else self.stored.to(torch.float32, copy=True)
        self._moments: tuple[Tensor, ...] = ()
        self.is_reduced = False
        self._tails: dict[Copied, tuple[OffloadedTail, ...]] = {}
        if offload.weights:
            home = self.stored if self.zero_level == 3 else self.weights
            self._tails[Copied.WEIGHTS] = (OffloadedTail(home, offload.weights, host),)
        if offload.optimizer and not is_main:
            self._tails[Copied.OPTIMIZER] = (OffloadedTail(self.main, offload.optimizer, host),)
        self.shards = tuple(self._shards())
        self.put_away()
        self.close_weights()
        if self.zero_level >= 2:
            _free(self.sums)

    @property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """Its parameters."""
        return tuple(self._ranges)

    @property
    def held(self) -> tuple[Tensor, ...]:
        """All storages of the store."""
        return self.weights, self.sums, self.stored, self.total, self.main, *self._moments

    @property
    def elastic(self) -> tuple[Tensor, ...]:
        """The storages that are freed and refilled, or cut and extended, during a step."""
        tails = [tail.flat for of_kind in self._tails.values() for tail in of_kind]
        shards = (*((self.sums,) if self.zero_level >= 2 else ()), *((self.weights,) if self.zero_level == 3 else ()))
        return (*shards, *tails)

    def make_moments(self, count: int) -> list[tuple[Tensor, ...]]:
        """Allocate moments of the optimizer, zero; returns those of every shard."""
        self._moments = tuple(torch.zeros_like(self.main) for _ in range(count))
        starts = [shard.main.storage_offset() - self.main.storage_offset() for shard in self.shards]
        pairs = zip(starts, self.shards, strict=True)
        views = [tuple(moment[at : at + shard.main.numel()] for moment in self._moments) for at, shard in pairs]
        if share := self._offload.optimizer:
            tails = [OffloadedTail(moment, share, self._host) for moment in self._moments]
            self._tails[Copied.OPTIMIZER] = (*self._tails.get(Copied.OPTIMIZER, ()), *tails)
            self.put_away()
        return views

    @torch.no_grad()
    def start_gather(self) -> Wait:
        """Start to gather the weights from the rows of all replicas."""
        if self.replicas.size == 1 or self.zero_level == 0:
            return _nothing
        _refill(self.weights)
        work = dist.all_gather_into_tensor(self.weights, self.stored, group=self.replicas.group, async_op=True)
        assert work is not None
        if self.weights.is_cuda:
            # The channel's stream waits for NCCL's, the host does not; a reader of the weights waits for the channel's stream.
            work.wait()
            return _nothing
        return lambda: _wait(work)

    def close_weights(self) -> None:
        """Free the weights of all rows, if they are kept in shards, behind the last use of gathered weights."""
        if self.zero_level == 3:
            _free(self.weights)
        elif self.is_read_while_gathered:
            self.release(Copied.WEIGHTS)

    @torch.no_grad()
    def replace_weights(self) -> None:
        """Store weights that were read or written from outside, and free what is kept in shards or on the host.

        A reader may hold or share their storage, as a save that goes on does: the parameters get another one.
        """
        moved = self._tails.get(Copied.WEIGHTS, ())
        if self.zero_level == 3:
            self.stored.copy_(self.weights[self._row])
            self._show(torch.empty_like(self.weights))
            _free(self.weights)
        elif moved:
            self._show(self.weights.clone())
            self.stored = self.weights[self._share]
            moved[0].replace(self.weights)
        if moved and self.stored.dtype == self.main.dtype:
            self.write_state(self.main, self.stored)
        for tail in moved:
            tail.store()
            tail.release()

    # Offloading

    def fetch(self, what: Copied) -> None:
        """Bring the offloaded share of the weights or the states back."""
        for tail in self._tails.get(what, ()):
            tail.fetch()

    def store(self, what: Copied) -> None:
        """Copy the moving share of the weights or the states to the host."""
        for tail in self._tails.get(what, ()):
            tail.store()

    def release(self, what: Copied) -> None:
        """Free the moving share of the weights or the states on the device."""
        for tail in self._tails.get(what, ()):
            tail.release()

    def open_weights(self) -> None:
        """Make room for weights that an update writes."""
        for tail in self._tails.get(Copied.WEIGHTS, ()):
            tail.make_room()

    def put_away(self) -> None:
        """Move every offloaded share that is on the device to the host."""
        for what in self._tails:
            self.store(what)
            self.release(what)

    def read_state(self, part: Tensor) -> Tensor:
        """A shard's master weights or one of its moments; a copy on the host where their storage is offloaded."""
        return next((tail.read(part) for tail in self._tails.get(Copied.OPTIMIZER, ()) if tail.holds(part)), part)

    @torch.no_grad()
    def write_state(self, part: Tensor, values: Tensor) -> None:
        """Store a shard's master weights or one of its moments, wherever they are."""
        for tail in self._tails.get(Copied.OPTIMIZER, ()):
            if tail.holds(part):
                tail.write(part, values)
                return
        part.copy_(values)

    def _show(self, weights: Tensor) -> None:
        """Make the parameters views of a storage."""
        self.weights = weights
        for parameter, (first, last) in self._ranges.items():
            parameter.data = weights[first:last].view(parameter.shape)

    @torch.no_grad()
    def open_sums(self) -> None:
        """Make room for the gradient of a micro-batch, if gradients are kept in shards; no effect where there is room."""
        if self.zero_level >= 2 and not self.sums.untyped_storage().nbytes():
            _refill(self.sums)
            self.sums.zero_()

    @torch.no_grad()
    def start_reduction(self, name: str) -> Wait:
        """Start to sum over the replicas what `sums` holds; the sum is in `total` after the wait.

        With ZeRO 2 and 3 it is added to that of earlier micro-batches, and the room for this one is freed.

        Args:
            name: the operation, for errors.
        """
        self.is_reduced = True
        wire, sums_Dw = self.replicas, self.sums.view(self.replicas.size, -1)
        if wire.size == 1:
            self.sums *= self._scale
            return _nothing
        # A copy, so that the room of the sums is free at once.
        sent_Dw = sums_Dw * self._scale
        if self.zero_level >= 2:
            _free(self.sums)
        if sent_Dw.is_cuda:
            row = torch.empty_like(sent_Dw[0])
            work = dist.reduce_scatter_tensor(row, sent_Dw, group=wire.group, async_op=True)
            assert work is not None
            work.wait()
            self._take(row)
            return _nothing
        one_each = [1] * wire.size
        pending = wire.start(sent_Dw, one_each, one_each, tag=wire.take_tags(1), name=name)
        return lambda: self._take(torch.sum(pending.wait(), dim=0))

    @torch.no_grad()
    def _take(self, row: Tensor) -> None:
        """Store the reduced gradients of this rank's row."""
        if self.zero_level >= 2:
            self.total += row
            return
        self.sums[self._row] = row
        if self.zero_level == 0:
            self.share_sums()

    @torch.no_grad()
    def share_sums(self) -> None:
        """Gather the reduced gradients of all rows (ZeRO 0). Collective."""
        dist.all_gather_into_tensor(self.sums, self.sums[self._row].clone(), group=self.replicas.group)

    @torch.no_grad()
    def own_row(self, parameter: torch.nn.Parameter) -> tuple[int, Tensor]:
        """The first element of a parameter in this rank's row, and the reduced gradients of its elements there."""
        first, last = self._ranges[parameter]
        begin, end = max(first, self._row.start), max(first, self._row.start, min(last, self._row.stop))
        return begin - first, self.total[begin - self._share.start : end - self._share.start]

    @torch.no_grad()
    def clear(self) -> None:
        """Begin the sums of the next step."""
        self.is_reduced = False
        # Below level 2 the total is a part of the sums.
        (self.total if self.zero_level >= 2 else self.sums).zero_()

    def _shards(self) -> Iterator[Shard]:
        for parameter, (first, last) in self._ranges.items():
            begin, end = max(first, self._share.start), min(last, self._share.stop)
            if begin >= end:
                continue
            part = slice(begin - self._share.start, end - self._share.start)
            yield Shard(
                parameter,
                begin - first,
                end - first,
                self.main[part],
                self.total[part],
                self._holders(first, last),
            )

    def _holders(self, first: int, last: int) -> tuple[tuple[int, int, int], ...]:
        if self.zero_level == 0:
            return ((self.replicas.rank, 0, last - first),)
        rows = range(first // self._width, (last - 1) // self._width + 1)
        return tuple(
            (row, max(first, row * self._width) - first, min(last, (row + 1) * self._width) - first) for row in rows
        )


def _rounded(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple


def _free(tensor: Tensor) -> None:
    """Give back a tensor's memory and keep the tensor."""
    if tensor.is_cuda:
        # Work that this stream has been given may still use it.
        tensor.record_stream(torch.cuda.current_stream())
    tensor.untyped_storage().resize_(0)


def _refill(tensor: Tensor) -> None:
    """Allocate the memory of a freed tensor again; its content is undefined. No effect where it has memory."""
    storage = tensor.untyped_storage()
    # A resize to the same size would move the memory, under views and under streams that still read it.
    if not storage.nbytes():
        storage.resize_(tensor.numel() * tensor.element_size())


def _wait(work: dist.Work) -> None:
    work.wait()


def _nothing() -> None:
    """The result is there, or on the device's streams."""
