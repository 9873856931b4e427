"""Host memory of offloaded shares, and flat storages whose last elements wait there.

Contract.
1. A flat storage keeps its identity while its tail is on the host: its memory is cut, and extended again, by `resize_`. So views
   of it are valid again when the tail is back; meanwhile nothing may touch the tail's elements.
2. `fetch` and `store` copy, `release` gives the device memory back: content is lost only if it was changed since the last copy.
3. Copies are asynchronous on CUDA and run on the current stream, from and to pinned memory. The instruction list orders them.

`resize_` moves the elements that stay to another block: for that moment the storage exists twice, up to the tail. Memory is
pinned when a store is built; that of activations in the first step, and again where more is saved than before.
Not yet run on hardware.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes at whose multiples a tail begins."""


class HostMemory:
    """The pinned host memory of one rank.

    Attributes:
        storages: identities of its storages, which are no memory of a device although a CPU run computes in host memory, too.
        bytes: allocated so far.
    """

    def __init__(self) -> None:
        self.storages: set[int] = set()
        self.bytes = 0
        self._blocks: list[Tensor] = []

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Pinned memory [elements] for the rest of the run: pinning takes longer than a step may wait."""
        memory = torch.empty(elements, dtype=dtype)
        if torch.cuda.is_available() and elements:
            # torch's own allocator of pinned memory rounds up to a power of two.
            error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
            if error:
                raise RuntimeError(f"{memory.nbytes} bytes of host memory cannot be pinned: CUDA's error {error}")
        self._blocks.append(memory)
        self.storages.add(memory.untyped_storage()._cdata)
        self.bytes += memory.nbytes
        return memory

    def settle(self) -> None:
        """Wait until copies have ended, before the host itself reads or writes: outside of lists all streams precede this one."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


class OffloadedTail:
    """The last elements of a flat storage, which are on the host between their uses.

    Args:
        flat: [n], all of its storage; on the device.
        share: of the elements, above 0 and at most 1.
    """

    def __init__(self, flat: Tensor, share: float, host: HostMemory) -> None:
        step = max(1, ALIGNMENT // flat.element_size())
        self._flat, self._memory = flat, host
        self._boundary = min(round((1.0 - share) * flat.numel() / step) * step, flat.numel())
        self._host = host.allocate(flat.numel() - self._boundary, flat.dtype)
        self.is_on_device = True

    @property
    def flat(self) -> Tensor:
        """The storage."""
        return self._flat

    @torch.no_grad()
    def make_room(self) -> None:
        """Make room for the tail on the device; its content is undefined."""
        if not self.is_on_device:
            self._resize(self._flat.numel())
            self.is_on_device = True

    @torch.no_grad()
    def fetch(self) -> None:
        """Bring the tail back."""
        self.make_room()
        self._flat[self._boundary :].copy_(self._host, non_blocking=True)

    @torch.no_grad()
    def store(self) -> None:
        """Copy the tail to the host. No effect where it is only there: nothing has changed it."""
        if self.is_on_device:
            self._host.copy_(self._flat[self._boundary :], non_blocking=True)

    @torch.no_grad()
    def release(self) -> None:
        """Give back the device memory of the tail."""
        if self.is_on_device:
            self._resize(self._boundary)
            self.is_on_device = False

    def replace(self, flat: Tensor) -> None:
        """Take another storage with the same content, whose tail is on the device."""
        self._flat, self.is_on_device = flat, True

    def holds(self, part: Tensor) -> bool:
        """Whether a tensor is a view of the storage."""
        return part.untyped_storage()._cdata == self._flat.untyped_storage()._cdata

    @torch.no_grad()
    def read(self, part: Tensor) -> Tensor:
        """A copy on the host of a view [m] of the storage, wherever its elements are."""
        self._memory.settle()
        staying, moved = self._cut(part)
        tail = self._flat[self._boundary :].cpu() if self.is_on_device else self._host
        return torch.cat([self._flat[staying].cpu(), tail[moved]])

    @torch.no_grad()
    def write(self, part: Tensor, values: Tensor) -> None:
        """Store the values of a view [m] of the storage, wherever its elements are."""
        self._memory.settle()
        staying, moved = self._cut(part)
        stay = staying.stop - staying.start
        self._flat[staying].copy_(values[:stay])
        self._host[moved].copy_(values[stay:])
        if self.is_on_device:
            self._flat[self._boundary :][moved].copy_(values[stay:])

    def _cut(self, part: Tensor) -> tuple[slice, slice]:
        """The elements of a view that stay, and its elements of the tail, which are counted from the tail's first."""
        first = part.storage_offset()
        last = first + part.numel()
        between = min(max(first, self._boundary), last)
        return slice(first, between), slice(max(0, between - self._boundary), max(0, last - self._boundary))

    def _resize(self, elements: int) -> None:
        if self._flat.is_cuda:
            # Work that this stream has been given may still use the block.
            self._flat.record_stream(torch.cuda.current_stream())
        self._flat.untyped_storage().resize_(elements * self._flat.element_size())
