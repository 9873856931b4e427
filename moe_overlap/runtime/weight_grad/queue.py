"""Weight gradients put aside: closures by operator name, held within a bound of bytes, run where the instruction list says so.

One queue belongs to one stage of one rank and is passed to the modules that fill it. A gradient is computed (which frees what
it was computed from) and then announced (DDP may start to reduce its bucket). What holds:

1. Gradients of one name are computed in the order they were put: sums over micro-batches keep their order and stay bitwise.
2. The tensors the queue keeps alive never exceed `max_bytes`, each storage counted once. What has no room is computed at once.
3. Ranks may hold unequal bytes (their routed tokens differ), yet collectives must start in one order on all of them. So
   gradients are announced only by `run` and `run_all`, whenever they were computed; and whether a gradient whose computation
   itself communicates finds room depends only on the bytes of its kind, which are equal on every rank: where the sum is too
   large, the others give way.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SHOWN = 8


class DeferralError(Exception):
    """A weight gradient was put aside and never computed: our own mistake, never a user's."""


@dataclass(slots=True)
class InlineRuns:
    """Gradients the bound left no room for and that were computed early, and the bytes of the tensors they came from."""

    count: int = 0
    bytes: int = 0


@dataclass(slots=True)
class _Entry:
    name: str
    compute: Callable[[], None]
    announce: Callable[[], None]
    held: tuple[Tensor, ...]
    communicates: bool


class WeightGradQueue:
    """Computations of weight gradients by operator name (`L0.attention.qkv.dW`).

    Args:
        max_bytes: most bytes that may be held; None is no bound, 0 computes every gradient at once. A gradient it has no room
            for is computed at once and counted in `inline`.
        computing: is told the name of every gradient that `run` and `run_all` begin to compute.
    Attributes:
        peak_bytes: most bytes held so far.
        inline: gradients that were computed early so far.
    """

    def __init__(self, max_bytes: int | None = None, computing: Callable[[str], None] = lambda name: None) -> None:
        self.peak_bytes = 0
        self.inline = InlineRuns()
        self._max_bytes, self._computing = max_bytes, computing
        self._next_number = 0
        self._entries: dict[int, _Entry] = {}  # not announced
        self._waiting: dict[int, _Entry] = {}  # of these, not computed
        self._numbers: dict[str, deque[int]] = {}  # of the entries of a name
        self._held, self._held_by_communicating = _Storages(), _Storages()
        self._put: Counter[str] = Counter()
        self._announced: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def figures(self) -> dict[str, int]:
        """For the log: most bytes held so far, and how many gradients were computed early."""
        return {"deferred_peak_bytes": self.peak_bytes, "deferred_early": self.inline.count}

    def put(
        self,
        name: str,
        compute: Callable[[], None],
        held: Sequence[Tensor] = (),
        *,
        announce: Callable[[], None] = lambda: None,
        communicates: bool = False,
    ) -> None:
        """Put a weight gradient aside.

        Args:
            compute: adds the gradient to what earlier micro-batches have left.
            held: tensors that `compute` keeps alive, parameters left out.
            announce: is called after `compute`, in `run` or `run_all`; may start collectives.
            communicates: whether `compute` contains a collective; all ranks of its group then put it at the same place.
        """
        entry = _Entry(name, compute, announce, tuple(held), communicates)
        self._put[name] += 1
        self._entries[self._next_number] = entry
        names = self._numbers.setdefault(name, deque())
        if self._has_room(entry):
            self._hold(self._next_number, entry)
            # Rule 3. There always is another one to give way: `_has_room` has found that those that communicate fit.
            while self._max_bytes is not None and self._held.bytes > self._max_bytes:
                oldest = next(number for number, other in self._waiting.items() if not other.communicates)
                self._compute_early(self._release(oldest))
        else:
            # Rule 1: sums of floating-point numbers depend on their order.
            for number in names:
                if number in self._waiting:
                    self._compute_early(self._release(number))
            self._compute_early(entry)
        names.append(self._next_number)
        self._next_number += 1
        self.peak_bytes = max(self.peak_bytes, self._held.bytes)

    def run(self, name: str) -> int:
        """Compute and announce all gradients of one name, the oldest first.

        Returns:
            Their number.
        """
        numbers = list(self._numbers.get(name, ()))
        for number in numbers:
            self._finish(number)
        return len(numbers)

    def run_all(self) -> None:
        """Compute and announce every gradient, the oldest first."""
        while self._entries:
            self._finish(next(iter(self._entries)))

    def assert_empty(self) -> None:
        """Check at the end of a step that every gradient put aside in it was computed.

        Raises:
            DeferralError: some were not; names them with their number.
        """
        left = self._put - self._announced
        if left:
            named = [f"{name} ({count})" for name, count in list(left.items())[:SHOWN]]
            more = [f"{len(left) - SHOWN} more"] if len(left) > SHOWN else []
            raise DeferralError(f"weight gradients put aside and not computed: {', '.join(named + more)}")
        self._put.clear()
        self._announced.clear()

    def _has_room(self, entry: _Entry) -> bool:
        if self._max_bytes is None:
            return True
        # Rule 3: bytes that differ by rank must not decide when a collective runs.
        held = self._held_by_communicating if entry.communicates else self._held
        return held.bytes + held.new_bytes(entry.held) <= self._max_bytes

    def _hold(self, number: int, entry: _Entry) -> None:
        self._waiting[number] = entry
        self._held.add(entry.held)
        if entry.communicates:
            self._held_by_communicating.add(entry.held)

    def _release(self, number: int) -> _Entry:
        entry = self._waiting.pop(number)
        self._held.remove(entry.held)
        if entry.communicates:
            self._held_by_communicating.remove(entry.held)
        return entry

    def _compute_early(self, entry: _Entry) -> None:
        self.inline.count += 1
        self.inline.bytes += sum(tensor.nbytes for tensor in entry.held)
        _compute(entry)

    def _finish(self, number: int) -> None:
        entry = self._entries.pop(number)
        self._numbers[entry.name].remove(number)
        if number in self._waiting:
            self._computing(entry.name)
            _compute(self._release(number))
        with torch.no_grad():
            # Rule 3: also where the gradient was computed early, since DDP may start a collective.
            entry.announce()
        self._announced[entry.name] += 1


def _compute(entry: _Entry) -> None:
    with torch.no_grad():
        entry.compute()
    # An announcement may still wait: it must not keep alive what the gradient was computed from.
    entry.compute, entry.held = _computed, ()


def _computed() -> None:
    raise AssertionError("a weight gradient is computed once")


class _Storages:
    """Bytes of the storages behind some tensors, each storage once: views of one storage keep all of it alive."""

    def __init__(self) -> None:
        self.bytes = 0
        self._users: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def new_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Bytes that these tensors would add."""
        sizes = {key: size for key, size in map(_storage, tensors) if key not in self._users}
        return sum(sizes.values())

    def add(self, tensors: Sequence[Tensor]) -> None:
        for key, size in map(_storage, tensors):
            if key not in self._users:
                self._users[key], self._sizes[key] = 0, size
                self.bytes += size
            self._users[key] += 1

    def remove(self, tensors: Sequence[Tensor]) -> None:
        for key, _ in map(_storage, tensors):
            self._users[key] -= 1
            if self._users[key] == 0:
                del self._users[key]
                self.bytes -= self._sizes.pop(key)


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    # The address identifies a storage while it is held, and an entry holds it until it is computed.
    return storage.data_ptr(), storage.nbytes()


def drain_after_backward(chunk: torch.nn.Module, queue: WeightGradQueue) -> None:
    """Have the queue run empty at the end of every backward pass of a chunk.

    For runners that know no instruction for weight gradients. The closures run inside the backward call of the schedule, hence
    under the same `no_sync` as the gradients that were not put aside, and before the gradients are reduced.

    Args:
        chunk: a model chunk, wrapped or not; its output is where a backward pass begins.
    """
    engine: Any = torch.autograd.Variable._execution_engine

    def at_output(_module: Any, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            # At the output, not in a layer: inside a recomputed layer the callback would belong to its nested backward pass.
            output.register_hook(lambda _gradient: engine.queue_callback(queue.run_all))

    chunk.register_forward_hook(at_output)
