"""Activations that wait on the host between the forward and the backward pass of a micro-batch through a parameter group.

Contract.
1. `saving` surrounds the forward operators of a use. What autograd saves there is recorded by storage, in the order in which
   autograd saves it; weights stay. Autograd holds the records instead of the tensors.
2. `store` copies the first storages to the host, as many as the share allows, and drops them. The memory of one that nobody else
   holds is free then. `fetch` allocates them again before the backward operators, which get the tensors from the records.
3. The memory on the host belongs to a place, (group, micro-batch, number of the storage), and is kept for the next step.

A storage moves as a whole, since others may hold it: what moves is at most the share, and less where storages are few and large.
On CUDA copies run on the current stream, from and to pinned memory. Not yet run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moe_overlap.runtime.state.host_memory import HostMemory

Use = tuple[str, int]
"""A parameter group and a micro-batch."""


@dataclass(slots=True)
class _Record:
    """One storage: as bytes [n] on the device, on the host, or both."""

    size: int
    device: torch.device
    present: Tensor | None
    host: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor, as a view of its storage."""

    record: _Record
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class SavedActivations:
    """The offloaded activations of one rank.

    Args:
        share: of the saved bytes that waits on the host.
        weights_of: the storages of a parameter group that hold weights.
    """

    def __init__(self, share: float, host: HostMemory, weights_of: Callable[[str], Iterable[Tensor]]) -> None:
        self._share, self._host, self._weights_of = share, host, weights_of
        self._records: dict[Use, dict[int, _Record]] = {}
        self._memory: dict[tuple[str, int, int], Tensor] = {}

    def saving(self, group: str, micro_batch: int) -> AbstractContextManager[None]:
        """The context of a forward operator of a use."""
        records = self._records.setdefault((group, micro_batch), {})
        weights = {weight.untyped_storage()._cdata for weight in self._weights_of(group)}

        def pack(tensor: Tensor) -> Tensor | _View:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in weights or isinstance(tensor, torch.nn.Parameter) or not storage.nbytes():
                return tensor
            if key not in records:
                content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[call-overload]
                records[key] = _Record(storage.nbytes(), tensor.device, content)
            return _View(records[key], tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

        return saved_tensors_hooks(pack, _unpacked)

    def store(self, group: str, micro_batch: int) -> None:
        """Move the share of what a use has saved to the host."""
        records = list(self._records.get((group, micro_batch), {}).values())
        room = self._share * sum(record.size for record in records)
        for number, record in enumerate(records):
            if record.size > room:
                break
            room -= record.size
            assert record.present is not None
            record.host = self._memory_of((group, micro_batch, number), record.size)
            record.host.copy_(record.present, non_blocking=True)
            if record.present.is_cuda:
                record.present.record_stream(torch.cuda.current_stream())
            record.present = None

    def fetch(self, group: str, micro_batch: int) -> None:
        """Bring back what a use has saved. The records belong to autograd from now on, which drops them as it passes."""
        for record in self._records.pop((group, micro_batch), {}).values():
            if record.host is not None:
                record.present = torch.empty(record.size, dtype=torch.uint8, device=record.device)
                record.present.copy_(record.host, non_blocking=True)

    def _memory_of(self, place: tuple[str, int, int], size: int) -> Tensor:
        """[size] bytes of the place's memory; larger memory where a step saves more than those before, as routed rows may."""
        memory = self._memory.get(place)
        if memory is None or memory.numel() < size:
            memory = self._memory[place] = self._host.allocate(size, torch.uint8)
        return memory[:size]


def _unpacked(saved: Tensor | _View) -> Tensor:
    """A saved tensor, for the backward pass."""
    if isinstance(saved, Tensor):
        return saved
    present = saved.record.present
    assert present is not None, "a backward operator runs before its activations are back"
    if present.is_cuda:
        present.record_stream(torch.cuda.current_stream())
    content = torch.empty(0, dtype=saved.dtype, device=present.device)
    return content.set_(present.untyped_storage(), saved.offset, saved.shape, saved.stride)  # type: ignore[call-overload,no-any-return]
