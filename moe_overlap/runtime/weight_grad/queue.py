"""The queue of deferred weight gradients: closures by operator name, run where the instruction list says so.

One queue belongs to one stage of one rank and is passed to the modules that fill it. A gradient is computed (which frees its
operands) and then announced (DDP may start to reduce its bucket). Contract:

1. The queue decides nothing. The list says which gradients wait, and for how long (plan/lowering/deferral.py); ranks hold unequal
   bytes (their routed tokens differ), and ranks that decided for themselves would start collectives in different orders.
2. Gradients of one name are computed in the order they were put: sums over micro-batches keep their order and stay bitwise.
3. Gradients of one name are announced together, after a micro-batch has computed the last of them: DDP may reduce at once.
4. `begin_operator` raises where the tensors that the queue keeps alive, each storage counted once, exceed `max_bytes`: the list
   was made for a stated bound of routed rows (sizes.ROUTED_LOAD_BOUND), and this rank received more.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_overlap.plan.sizes import ROUTED_LOAD_BOUND

SHOWN = 8


class DeferralError(Exception):
    """A weight gradient was deferred and never computed, or computed before it was put: our own mistake, never a user's."""


class DeferredBytesExceeded(RuntimeError):
    """Waiting weight gradients hold more bytes on this rank than the plan allows; the message is one line for the user."""


@dataclass(slots=True)
class _Entry:
    name: str
    operator: int
    """Number of the operator that put it; an operator with separate experts puts a gradient for each of them."""
    compute: Callable[[], None]
    announce: Callable[[], None]
    held: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Put:
    """The arguments of `WeightGradQueue.put`."""

    name: str
    compute: Callable[[], None]
    held: tuple[Tensor, ...]
    announce: Callable[[], None]


class WeightGradQueue:
    """Computations of weight gradients by operator name (`L0.attention.qkv.dW`).

    Args:
        max_bytes: largest number of bytes that `begin_operator` accepts; None: no bound.
        computing: called with the name of every gradient before `run` or `run_all` computes it.
    Attributes:
        peak_bytes: largest number of bytes that `begin_operator` has met so far.
        early: number of gradients that the list has computed before their slot so far, because of the bound.
    """

    def __init__(self, max_bytes: int | None = None, computing: Callable[[str], None] = lambda name: None) -> None:
        self.peak_bytes = self.early = 0
        self._max_bytes, self._computing = max_bytes, computing
        self._next_number = self._operator = 0
        self._entries: dict[int, _Entry] = {}
        self._numbers: dict[str, deque[int]] = defaultdict(deque)  # of the entries of a name
        self._computed: dict[str, list[Callable[[], None]]] = defaultdict(list)  # and not announced
        self._held = _Storages()
        self._put: Counter[str] = Counter()
        self._announced: Counter[str] = Counter()
        self._aside: list[Put] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def figures(self) -> dict[str, int]:
        """For the log: largest number of bytes held so far, and number of gradients computed early."""
        return {"deferred_peak_bytes": self.peak_bytes, "deferred_early": self.early}

    def put(
        self,
        name: str,
        compute: Callable[[], None],
        held: Sequence[Tensor] = (),
        *,
        announce: Callable[[], None] = lambda: None,
    ) -> None:
        """Defer a weight gradient.

        Args:
            compute: adds the gradient to the sum of earlier micro-batches.
            held: tensors that `compute` keeps alive, without parameters.
            announce: called after `compute`; may start collectives.
        """
        if self._aside is not None:
            self._aside.append(Put(name, compute, tuple(held), announce))
            return
        self._put[name] += 1
        self._entries[self._next_number] = _Entry(name, self._operator, compute, announce, tuple(held))
        self._numbers[name].append(self._next_number)
        self._next_number += 1
        self._held.add(held)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[list[Put]]:
        """Collect into the yielded list what is put inside the block: a captured backward pass puts it again at every replay."""
        assert self._aside is None, "one capture at a time"
        self._aside = []
        try:
            yield self._aside
        finally:
            self._aside = None

    def begin_operator(self) -> None:
        """Check the bytes of all waiting gradients. Gradients put until the next call belong to one operator of the list.

        Raises:
            DeferredBytesExceeded: they exceed `max_bytes`.
        """
        self._operator += 1
        self.peak_bytes = max(self.peak_bytes, self._held.bytes)
        if self._max_bytes is not None and self._held.bytes > self._max_bytes:
            raise DeferredBytesExceeded(
                f"--max-deferred-bytes {self._max_bytes}: weight gradients that wait hold {self._held.bytes} bytes on this "
                f"rank; the list allows for {ROUTED_LOAD_BOUND:g} times the balanced rows; give {2 * self._held.bytes} or more"
            )

    def run(self, name: str, count: int | None = None, *, announce: bool = True, is_early: bool = False) -> int:
        """Compute gradients of one name, the oldest first.

        Args:
            count: number of operators (such as the partitions of one) whose gradients are computed; None: all that wait.
            announce: whether these are the last of their name in a micro-batch: then all computed ones are announced.
            is_early: whether they run before their slot; only for the figures.
        Returns:
            How many gradients were computed.
        Raises:
            DeferralError: gradients of fewer operators wait.
        """
        operators = list(dict.fromkeys(self._entries[number].operator for number in self._numbers[name]))
        chosen = set(operators[:count])
        if count is not None and count > len(operators):
            raise DeferralError(f"{name}: the list computes what {count} operators left, and {len(operators)} did")
        numbers = [number for number in self._numbers[name] if self._entries[number].operator in chosen]
        for number in numbers:
            self._compute(number)
        self.early += len(chosen) if is_early else 0
        if announce:
            self._announce(name)
        return len(numbers)

    def run_all(self) -> None:
        """Compute and announce every gradient, the oldest first.

        Raises:
            DeferredBytesExceeded: as `begin_operator`.
        """
        self.begin_operator()
        while self._entries:
            number = next(iter(self._entries))
            name = self._entries[number].name
            self._compute(number)
            self._announce(name)

    def assert_empty(self) -> None:
        """Check at the end of a step that every deferred gradient was computed and announced.

        Raises:
            DeferralError: names the missing ones with their number.
        """
        missing = self._put - self._announced
        if missing:
            named = [f"{name} ({count})" for name, count in list(missing.items())[:SHOWN]]
            more = [f"{len(missing) - SHOWN} more"] if len(missing) > SHOWN else []
            raise DeferralError(f"weight gradients put aside and not computed: {', '.join(named + more)}")
        self._put.clear()
        self._announced.clear()

    def _compute(self, number: int) -> None:
        entry = self._entries.pop(number)
        self._numbers[entry.name].remove(number)
        self._computing(entry.name)
        with torch.no_grad():
            entry.compute()
        # After the computation: until then its operands stay in memory, whatever the queue says.
        self._held.remove(entry.held)
        self._computed[entry.name].append(entry.announce)

    def _announce(self, name: str) -> None:
        with torch.no_grad():
            for announce in self._computed.pop(name, []):
                announce()
                self._announced[name] += 1


class _Storages:
    """Bytes of the storages of some tensors, each storage once: views of one storage keep all of it alive."""

    def __init__(self) -> None:
        self.bytes = 0
        self._users: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

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
