"""The assignment of weight gradients to slots: the problem, the value of an assignment, the best-fit greedy, and repetition.

Problem. Assign each weight gradient to one slot or to none, so that the hidden seconds are maximal and the held bytes fit.
Terms.
- A *slot* is time in which nothing computes: under a backward all-to-all, or any other gap. An unassigned weight gradient runs
  inside its backward pass.
- The *hidden seconds* of an assignment: sum over slots of min(seconds of the slot, seconds of the weight gradients in it).
- A weight gradient *holds* the bytes of its operands from the first slot after the pass that saves them up to its own slot. The
  bytes held at the start of a slot must not exceed `max_bytes`.
- In a *cyclic* problem the slots are one period of an endless repetition: the first slot follows the last.
This file has two heuristics; solve_assignment.py combines them and adds an exact solver.
- `best_fit`: fill slot after slot, each time with the weight gradient that fits best into its unhidden seconds.
- Identical layers are solved once: `longest_run` finds the longest run of layers that repeats with a period of `length` layers;
  `one_period` turns one period into a cyclic problem; `repeat` copies its assignment along the run. Weight gradients that would
  leave the end of the run stay unassigned, as do the layers outside it; greedy filling places them.

Source: Lancet, section 4.2 and algorithm 1. Not in the paper: bytes, periods, and the rule for overshooting (`best_fit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Assignment = tuple[int | None, ...]
"""Slot of each weight gradient; None: it stays inside its backward pass."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """A weight gradient.

    Attributes:
        seconds: of its computation, without interference.
        bytes: size of the operands that it keeps alive.
        first: the first slot after the pass that saves the operands; in a cyclic problem equal to the number of slots if that
            is the first slot of the next period.
        under: slots that may hold it, ascending; in a problem that is not cyclic none before `first`.
    """

    seconds: float
    bytes: int
    first: int
    under: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AssignmentProblem:
    """Weight gradients, slots and bytes.

    Attributes:
        gradients: in program order.
        slots: seconds of each slot, in program order.
        max_bytes: most bytes that may be held at once.
    """

    gradients: tuple[Gradient, ...]
    slots: tuple[float, ...]
    max_bytes: int
    cyclic: bool = False

    def held_at(self, gradient: int, slot: int) -> tuple[int, ...]:
        """Slots at whose start a gradient assigned to `slot` holds its bytes; at most one period, so each slot once."""
        first = self.gradients[gradient].first
        if self.cyclic and slot < first:
            return (*range(first, len(self.slots)), *range(slot + 1))
        # The slot comes after the pass of the same period (or after the only pass of a problem that is not cyclic).
        return tuple(range(first, slot + 1))

    def held_bytes(self, assignment: Assignment) -> list[int]:
        """[slots] bytes held at the start of each."""
        held = [0] * len(self.slots)
        for index, slot in enumerate(assignment):
            for other in self.held_at(index, slot) if slot is not None else ():
                held[other] += self.gradients[index].bytes
        return held

    def hidden_seconds(self, assignment: Assignment) -> float:
        """The objective: seconds of weight gradients that slots hide."""
        filled = self.filled_seconds(assignment)
        return sum(min(seconds, used) for seconds, used in zip(self.slots, filled, strict=True))

    def filled_seconds(self, assignment: Assignment) -> list[float]:
        """[slots] seconds of the weight gradients assigned to each."""
        filled = [0.0] * len(self.slots)
        for gradient, slot in zip(self.gradients, assignment, strict=True):
            if slot is not None:
                filled[slot] += gradient.seconds
        return filled

    def is_feasible(self, assignment: Assignment) -> bool:
        """Whether every weight gradient is in an allowed slot and the held bytes fit."""
        placed = zip(self.gradients, assignment, strict=True)
        legal = all(slot is None or slot in gradient.under for gradient, slot in placed)
        return legal and max(self.held_bytes(assignment), default=0) <= self.max_bytes


def best_fit(problem: AssignmentProblem, start: Assignment | None = None) -> Assignment:
    """Algorithm 1: fill slot after slot, each time with the weight gradient that fits best into its unhidden seconds.

    1. Candidates are the unassigned weight gradients that are allowed in the slot and fit the bytes. The next one is the one
       whose seconds are nearest to the slot's unhidden seconds; among equals the first in program order.
    2. A candidate that overshoots is skipped if a later slot (in a cyclic problem: any other) could hide more of it. The paper
       does not skip: a slot with 5 us unhidden would take a gradient of 1000 us that a long slot needs.
    3. A slot is done when it has no unhidden seconds, or no candidate remains.

    Args:
        start: an assignment to extend; its slots are not changed.
    """
    chosen: list[int | None] = list(start or [None] * len(problem.gradients))
    held = problem.held_bytes(tuple(chosen))
    filled = problem.filled_seconds(tuple(chosen))
    for slot, seconds in enumerate(problem.slots):
        # Line 15: t_u, the seconds of the all-to-all that are not hidden yet.
        unhidden = seconds - filled[slot]
        free = [i for i, other in enumerate(chosen) if other is None and slot in problem.gradients[i].under]
        while unhidden > 0 and (pick := _next(problem, slot, unhidden, free, held)) is not None:
            # Lines 19 to 21, and the held bytes, which the paper ignores.
            chosen[pick] = slot
            free.remove(pick)
            unhidden -= problem.gradients[pick].seconds
            for other in problem.held_at(pick, slot):
                held[other] += problem.gradients[pick].bytes
    # A later pick may fill the slot by itself: the earlier ones then hide nothing and only hold bytes.
    return without_idlers(problem, tuple(chosen))


def _next(
    problem: AssignmentProblem, slot: int, unhidden: float, free: Sequence[int], held: Sequence[int]
) -> int | None:
    """Steps 1 and 2."""

    def misfit(index: int) -> tuple[float, int]:
        return abs(unhidden - problem.gradients[index].seconds), index

    # Line 18's argmin. All candidates are sorted, because bytes or step 2 may exclude the nearest.
    for index in sorted(free, key=misfit):
        gradient = problem.gradients[index]
        fits = _fits(problem, index, slot, held)
        if fits and (gradient.seconds <= unhidden or not _hides_more_later(problem, gradient, slot, unhidden)):
            return index
    return None


def _fits(problem: AssignmentProblem, index: int, slot: int, held: Sequence[int]) -> bool:
    """Whether a weight gradient can be assigned to a slot within the bytes, given the bytes held so far."""
    more = [0] * len(held)
    for other in problem.held_at(index, slot):
        more[other] += problem.gradients[index].bytes
    return all(held_here + new <= problem.max_bytes for held_here, new in zip(held, more, strict=True) if new)


def _hides_more_later(problem: AssignmentProblem, gradient: Gradient, slot: int, unhidden: float) -> bool:
    return any(
        min(problem.slots[other], gradient.seconds) > unhidden
        for other in gradient.under
        if other > slot or (problem.cyclic and other != slot)
    )


def without_idlers(problem: AssignmentProblem, assignment: Assignment) -> Assignment:
    """Unassign weight gradients that hide nothing because their slot is full without them; largest bytes first."""
    slot_of = list(assignment)
    filled = problem.filled_seconds(assignment)
    # The order matters: after a removal the slot may need the next one.
    for index in sorted(range(len(slot_of)), key=lambda index: -problem.gradients[index].bytes):
        slot, seconds = slot_of[index], problem.gradients[index].seconds
        if slot is not None and (seconds == 0 or filled[slot] - seconds >= problem.slots[slot]):
            slot_of[index] = None
            filled[slot] -= seconds
    return tuple(slot_of)


def held_shortly(problem: AssignmentProblem, assignment: Assignment) -> Assignment:
    """Swap weight gradients of equal seconds so that each slot gets the one with the latest pass.

    Hidden seconds stay equal; bytes are held for a shorter time.

    Args:
        problem: not cyclic.
    """
    assert not problem.cyclic
    # Seconds were rounded when the problem was built (slots.py), so those of equal layers are equal as floats.
    of_equal_seconds: dict[float, list[int]] = {}
    for index, gradient in enumerate(problem.gradients):
        of_equal_seconds.setdefault(gradient.seconds, []).append(index)
    changed = list(assignment)
    for members in of_equal_seconds.values():
        used_slots = sorted(slot for slot in (assignment[i] for i in members) if slot is not None)
        free = sorted(members, key=lambda i: problem.gradients[i].first)
        for i in members:
            changed[i] = None
        for slot in used_slots:
            allowed = [i for i in free if slot in problem.gradients[i].under]
            if not allowed:
                return assignment
            # The latest pass that is allowed here. Earlier passes wait for a later slot, or stay unassigned and hold nothing.
            changed[allowed[-1]] = slot
            free.remove(allowed[-1])
    swapped = tuple(changed)
    # Equal seconds need not mean equal bytes, so a swap may also hold more.
    is_shorter = sum(problem.held_bytes(swapped)) < sum(problem.held_bytes(assignment))
    return swapped if is_shorter and problem.is_feasible(swapped) else assignment


# Repetition.


LONGEST_PERIOD = 4
"""Layers of the longest period that is looked for; models repeat every layer, or every second, third or fourth."""
FEWEST_PERIODS = 3


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """The weight gradients and slots of one layer in a problem, as half-open ranges of indices."""

    gradients: tuple[int, int]
    slots: tuple[int, int]


@dataclass(frozen=True, slots=True)
class OperatorRun:
    """`periods` equal periods of `length` layers, starting at layer `first`."""

    first: int
    length: int
    periods: int


def longest_run(problem: AssignmentProblem, layers: Sequence[LayerSpan]) -> OperatorRun | None:
    """The longest run of layers that repeat: same seconds, bytes and order of weight gradients and slots.

    Args:
        layers: in program order; together they hold all gradients and slots of the problem.
    Returns:
        None if no run has `FEWEST_PERIODS` periods, or the repeating layers have no slots.
    """
    looks = [_look(problem, span) for span in layers]
    best: OperatorRun | None = None
    for length in range(1, LONGEST_PERIOD + 1):
        first = 0
        while first + length < len(looks):
            end = first + length
            while end < len(looks) and looks[end] == looks[end - length]:
                end += 1
            run = OperatorRun(first, length, (end - first) // length)
            has_slots = any(look[1] for look in looks[first : first + length])
            covers = best.length * best.periods if best else 0
            if run.periods >= FEWEST_PERIODS and has_slots and run.length * run.periods > covers:
                best = run
            # For every start up to end - length the repetition breaks at `end`: those runs are shorter.
            first = max(first + 1, end - length + 1)
    return best


def one_period(problem: AssignmentProblem, layers: Sequence[LayerSpan], run: OperatorRun) -> AssignmentProblem:
    """One period of a run as a cyclic problem."""
    gradients, slots = _of_period(layers, run, 0)
    # A slot before the pass means the same slot in the next period, so all slots are allowed. Labels between two periods are
    # checked on the complete problem, after the answer has been repeated (`_repeated` in solve_assignment.py).
    everywhere = tuple(range(len(slots)))
    return AssignmentProblem(
        gradients=tuple(
            Gradient(gradient.seconds, gradient.bytes, gradient.first - slots.start, everywhere)
            for gradient in (problem.gradients[i] for i in gradients)
        ),
        slots=tuple(problem.slots[j] for j in slots),
        max_bytes=problem.max_bytes,
        cyclic=True,
    )


def repeat(
    problem: AssignmentProblem, layers: Sequence[LayerSpan], run: OperatorRun, assignment: Assignment
) -> Assignment:
    """Copy the assignment of one period along the run.

    Args:
        assignment: a solution of `one_period`.
    """
    slot_of: list[int | None] = [None] * len(problem.gradients)
    for period in range(run.periods):
        gradients, slots = _of_period(layers, run, period)
        for index, slot in zip(gradients, assignment, strict=True):
            if slot is None:
                continue
            start = slots.start if slots.start + slot >= problem.gradients[index].first else slots.stop
            # The last period has no next one: gradients that would run there stay unassigned, for `best_fit` to place.
            last = period == run.periods - 1
            if start == slots.start or not last:
                slot_of[index] = start + slot
    return tuple(slot_of)


def _of_period(layers: Sequence[LayerSpan], run: OperatorRun, period: int) -> tuple[range, range]:
    """Gradients and slots of one period."""
    members = layers[run.first + period * run.length : run.first + (period + 1) * run.length]
    first, last = members[0], members[-1]
    return range(first.gradients[0], last.gradients[1]), range(first.slots[0], last.slots[1])


def _look(problem: AssignmentProblem, span: LayerSpan) -> tuple[tuple[tuple[float, int, int], ...], tuple[float, ...]]:
    """Equivalence key of a layer: its weight gradients with their first slots, and its slots."""
    # Slots count from the layer on, so that layers at any depth compare equal. `under` is left out: equal layers differ in it,
    # because those near the end have fewer slots after them.
    gradients = problem.gradients[slice(*span.gradients)]
    return tuple(
        (gradient.seconds, gradient.bytes, gradient.first - span.slots[0]) for gradient in gradients
    ), problem.slots[slice(*span.slots)]
