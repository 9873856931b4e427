"""Peak memory of a step: the allocator's figure on a GPU, tracked tensor storages on a CPU."""

from __future__ import annotations

import resource
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of tensor storages that are alive; a storage counts from the operator that first returns it.

    It slows the operators down, so one step is tracked and its peak stands for the run (dropless routing moves it a little).

    Args:
        held: tensors that are alive from the start: parameters, gradients, optimizer state.
    """

    def __init__(self, held: list[torch.Tensor]) -> None:
        super().__init__()
        self._alive: dict[int, int] = {}
        self.bytes = self.peak_bytes = 0
        for tensor in held:
            self._count(tensor)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or storage.nbytes() == 0:
            return
        self._alive[key] = storage.nbytes()
        self.bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.bytes -= self._alive.pop(key, 0)


def resident_bytes() -> int:
    """Largest resident set of this process so far (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_memory() -> dict[str, float]:
    """The CUDA allocator's figures under the names of Megatron-LM's curves; nothing on a CPU. Not yet run on hardware."""
    if not torch.cuda.is_available():
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "mem-reserved-bytes": float(stats["reserved_bytes.all.current"]),
        "mem-allocated-bytes": float(stats["allocated_bytes.all.current"]),
        "mem-allocated-count": float(stats["allocation.all.current"]),
    }


def held_tensors(chunks: Any, optimizer: Any) -> list[torch.Tensor]:
    """Parameters, gradient buffers and optimizer state of this rank."""
    tensors = [tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.module.buffers())]
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            tensors += [part for part in (buffer.param_data, buffer.grad_data) if part is not None]
    for inner in optimizer.chained_optimizers:
        for state in inner.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return tensors
