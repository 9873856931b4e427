"""Weight gradients put aside: closures by operator name, run where the instruction list says so.

One queue belongs to one stage of one rank and is passed to the modules that fill it. A gradient is computed (which frees what
it was computed from) and then announced (DDP may start to reduce its bucket). What holds:

1. The queue decides nothing. The list says which gradients wait, and for how long (plan/lowering/deferral.py); ranks hold unequal
   bytes (their routed tokens differ), and a rank that decided for itself would start collectives in an order of its own.
2. Gradients of one name are computed in the order they were put: sums over micro-batches keep their order and stay bitwise.
3. Gradients of one name are announced together, behind the last of them that a micro-batch computes: DDP may reduce at once.
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
    """A weight gradient was put aside and never computed, or computed before it was put: our own mistake, never a user's."""


class DeferredBytesExceeded(RuntimeError):
    """Weight gradients that wait hold more bytes on this rank than the plan allows; the message is one line for the user."""


@dataclass(slots=True)
class _Entry:
    name: str
    operator: int
    """Number of the operator that put it; an operator of experts one by one puts a gradient for each of them."""
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
        max_bytes: most bytes that `begin_operator` accepts; None is no bound.
        computing: is told the name of every gradient that `run` and `run_all` begin to compute.
    Attributes:
        peak_bytes: most bytes that `begin_operator` has found held so far.
        early: gradients that the list had computed before their slot so far, because the bound did not let them wait.
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
        """For the log: most bytes held so far, and how many gradients were computed early."""
        return {"deferred_peak_bytes": self.peak_bytes, "deferred_early": self.early}

    def put(
        self,
        name: str,
        compute: Callable[[], None],
        held: Sequence[Tensor] = (),
        *,
        announce: Callable[[], None] = lambda: None,
    ) -> None:
        """Put a weight gradient aside.

        Args:
            compute: adds the gradient to what earlier micro-batches have left.
            held: tensors that `compute` keeps alive, parameters left out.
            announce: is called after `compute`; may start collectives.
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
        """Inside, what is put goes to the list that this yields: who captures a backward pass puts it at every replay."""
        assert self._aside is None, "one capture at a time"
        self._aside = []
        try:
            yield self._aside
        finally:
            self._aside = None

    def begin_operator(self) -> None:
        """Check the bytes of all that waits. What is put until the next call belongs to one operator of the list.

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
            count: those of how many operators, such as the partitions of one; None is all that wait.
            announce: whether they are the last of their name in a micro-batch: all that were computed are announced.
            is_early: whether they do not wait for their slot; for the figures alone.
        Returns:
            How many gradients were computed.
        Raises:
            DeferralError: those of fewer operators wait.
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
        """Check at the end of a step that every gradient put aside in it was computed and announced.

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

    def _compute(self, number: int) -> None:
        entry = self._entries.pop(number)
        self._numbers[entry.name].remove(number)
        self._computing(entry.name)
        with torch.no_grad():
            entry.compute()
        # Behind the computation: until then its operands are there, whatever the queue says.
        self._held.remove(entry.held)
        self._computed[entry.name].append(entry.announce)

    def _announce(self, name: str) -> None:
        with torch.no_grad():
            for announce in self._computed.pop(name, []):
                announce()
                self._announced[name] += 1


class _Storages:
    """Bytes of the storages behind some tensors, each storage once: views of one storage keep all of it alive."""

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
