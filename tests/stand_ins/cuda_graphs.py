"""CUDA graphs without CUDA: operators are recorded at the capture and run again in the same memory at every replay.

As on a device:
- a capture runs nothing that can be seen: what it wrote is destroyed when it ends, and what lies outside of it is not written;
- what is allocated in a capture comes from a pool, which hands memory out again as soon as nobody refers to it. Memory that
  nobody refers to is destroyed behind every capture and every replay;
- a graph keeps nothing alive: one that reads memory outside of the pool that has been freed fails;
- a number that the host would read, and a draw, fail in a capture.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

T = TypeVar("T")
READ_BY_THE_HOST = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal"}
)
ALLOCATES = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
RELABELS = frozenset({"_reshape_alias", "_unsafe_view", "lift_fresh", "set_", "detach", "alias"})
ALIGNMENT, DESTROYED = 64, 0xFF


class CaptureError(RuntimeError):
    """The error of a capture or a replay that does what it must not."""


class _Tracked(np.ndarray):
    """Memory of a storage: it is free when the storage has gone."""


class _Block:
    """Memory of the pool, which is never given back."""

    def __init__(self, size: int) -> None:
        memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        self.bytes = memory[start : start + size]
        self.storage = torch.from_numpy(self.bytes).untyped_storage()


class _Place:
    """The place an operator reads or writes: a view of a block, or of a storage outside of the pool, which it keeps not alive."""

    def __init__(self, tensor: Tensor, block: _Block | None) -> None:
        self._layout = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self._dtype, self._block = tensor.dtype, block
        self._outside = None if block is not None else StorageWeakRef(tensor.untyped_storage())

    def tensor(self) -> Tensor:
        if self._block is not None:
            storage = self._block.storage
        else:
            storage = torch.UntypedStorage._new_with_weak_ptr(self._outside.cdata)  # type: ignore[union-attr]
            if storage is None:
                raise CaptureError("a graph reads memory that has been freed since its capture")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)


class RecordedGraphs:
    """A `GraphLibrary` of the executor.

    Args:
        on_launch: is called once per replay.
    Attributes:
        captures, replays: how many there were.
    """

    def __init__(self, on_launch: Callable[[], None] = lambda: None) -> None:
        self.captures = self.replays = self.prepared = 0
        self.on_launch = on_launch
        self._free: dict[tuple[int, int], list[_Block]] = defaultdict(list)  # by pool and size
        self._pools = 0
        self._live: dict[int, _Block] = {}  # by address

    def prepare(self) -> None:
        self.prepared += 1

    def new_pool(self) -> int:
        self._pools += 1
        return self._pools

    def capture(self, run: Callable[[], T], pool: int) -> tuple[Callable[[], None], T]:
        self.captures += 1
        recording = _Recording(self, pool)
        with recording:
            result = run()
        for block in recording.written:
            block.bytes.fill(DESTROYED)
        self._destroy_free()
        entries = recording.entries

        def replay() -> None:
            self.replays += 1
            self.on_launch()
            with _disable_current_modes(), torch.no_grad():
                for function, arguments, named, results in entries:
                    found = function(*_there(arguments), **_there(named))
                    for place, value in zip(results, _tensors(found), strict=True):
                        if place is not None:
                            place.tensor().copy_(value)
                self._destroy_free()

        return replay, result

    def block_of(self, tensor: Tensor) -> _Block | None:
        return self._live.get(tensor.untyped_storage().data_ptr())

    def allocate(self, like: Tensor, pool: int) -> tuple[Tensor, _Block]:
        """An empty tensor of a pool in the layout of another one."""
        size = max(1, like.untyped_storage().nbytes() if like.numel() else 0)
        block = self._free[pool, size].pop() if self._free[pool, size] else _Block(size)
        tracked = block.bytes.view(_Tracked)
        tensor = torch.from_numpy(tracked)
        address = block.storage.data_ptr()
        self._live[address] = block
        weakref.finalize(tracked, self._release, address, (pool, size))
        del tracked
        return tensor.new_empty(0, dtype=like.dtype).set_(
            tensor.untyped_storage(), like.storage_offset(), like.size(), like.stride()
        ), block

    def _release(self, address: int, kind: tuple[int, int]) -> None:
        self._free[kind].append(self._live.pop(address))

    def _destroy_free(self) -> None:
        for blocks in self._free.values():
            for block in blocks:
                block.bytes.fill(DESTROYED)


class _Recording(TorchDispatchMode):
    def __init__(self, graphs: RecordedGraphs, pool: int) -> None:
        super().__init__()
        self._graphs, self._pool = graphs, pool
        self.entries: list[tuple[Any, Any, Any, list[_Place | None]]] = []
        self.written: list[_Block] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named, name = named or {}, function.overloadpacket.__name__
        bound = _bound(function, arguments, named)
        draws = torch.Tag.nondeterministic_seeded in function.tags
        # Attention without dropout draws nothing.
        draws &= not any(argument.name == "dropout_p" and value == 0.0 for argument, value in bound)
        if name in READ_BY_THE_HOST or draws:
            raise CaptureError(f"{name} in a capture")
        if function.is_view or name in RELABELS:
            return function(*arguments, **named)
        changed = [
            value for argument, value in bound if argument.alias_info is not None and argument.alias_info.is_write
        ]
        places = self._places(arguments), self._places(named)
        if changed:
            self.entries.append((function, *places, [None] * len(function._schema.returns)))
            # What others have left is not changed by a capture.
            if all(self._graphs.block_of(x) in self.written for x in changed):
                return function(*arguments, **named)
            assert len(changed) == len(function._schema.returns), name
            return changed[0] if len(changed) == 1 else tuple(changed)
        found = function(*arguments, **named)
        known = {x.untyped_storage().data_ptr() for x in _tensors((arguments, named))}
        results: list[_Place | None] = []

        def moved(x: Tensor) -> Tensor:
            if x.numel() and x.untyped_storage().data_ptr() in known:
                results.append(None)
                return x
            own, block = self._graphs.allocate(x, self._pool)
            self.written.append(block)
            own.copy_(x)
            results.append(_Place(own, block))
            return own

        found = tree_map_only(Tensor, moved, found)
        if name not in ALLOCATES:
            self.entries.append((function, *places, results))
        return found

    def _places(self, values: Any) -> Any:
        return tree_map_only(Tensor, lambda x: _Place(x, self._graphs.block_of(x)), values)


def _bound(function: Any, arguments: Sequence[Any], named: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Every argument of an operator's schema that is given, with its value."""
    schema = function._schema.arguments
    pairs = list(zip(schema, arguments, strict=False))
    return pairs + [(argument, named[argument.name]) for argument in schema[len(arguments) :] if argument.name in named]


def _there(values: Any) -> Any:
    return tree_map_only(_Place, lambda place: place.tensor(), values)


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, values)
    return found
