"""The assignment of weight gradients to slots: the problem, the value of an assignment, the best-fit greedy, and repetition.

Problem. Give each weight gradient a slot or none, so that the hidden seconds are most and the bytes that are held fit.
Terms.
- A *slot* is time in which nothing computes: under a backward all-to-all, or any other gap. A weight gradient runs in one slot at
  most; one that runs in none stays inside the backward pass it came from.
- The *hidden seconds* of an assignment: sum over slots of min(seconds of the slot, seconds of the weight gradients in it).
- A weight gradient *holds* its bytes from the first slot behind the pass that saves what it is computed from up to the slot it
  runs in; what is held at the start of a slot is within `max_bytes`.
- In a *cyclic* problem the slots are those of one period of endlessly many equal ones: behind the last one the first follows.
Two heuristics stand here; solve_assignment.py puts them in order and adds an exact solver.
- `best_fit`: slot after slot, the weight gradient that fits best into what is left of it.
- Identical layers are solved once: `longest_run` finds the longest run of layers in which every `length` layers repeat the ones
  before; `one_period` makes one period a cyclic problem of its own; `repeat` writes its assignment along the run. What would run
  behind the end of the run stays free, as do the other layers.

Source: Lancet, section 4.2 and algorithm 1. Not in the paper: bytes, periods, and the rule for what overshoots (`best_fit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Assignment = tuple[int | None, ...]
"""By weight gradient, its slot."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """A weight gradient.

    Attributes:
        seconds: of its computation, alone.
        bytes: that it keeps alive.
        first: the first slot behind the pass that saves them; in a cyclic problem the number of slots, where it is the next
            period's first.
        under: slots it may run in, ascending; in a problem that is not cyclic none before `first`.
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
        slots: seconds of each, in program order.
        max_bytes: most bytes that may be held.
    """

    gradients: tuple[Gradient, ...]
    slots: tuple[float, ...]
    max_bytes: int
    cyclic: bool = False

    def held_at(self, gradient: int, slot: int) -> tuple[int, ...]:
        """Slots at whose start a gradient that runs in `slot` holds its bytes; each once: it waits a period at most."""
        first = self.gradients[gradient].first
        if self.cyclic and slot < first:
            return (*range(first, len(self.slots)), *range(slot + 1))
        # The slot stands behind the pass of the same period (or of the one pass, where nothing repeats).
        return tuple(range(first, slot + 1))

    def held_bytes(self, assignment: Assignment) -> list[int]:
        """By slot, the bytes that are held at its start."""
        held = [0] * len(self.slots)
        for index, slot in enumerate(assignment):
            for other in self.held_at(index, slot) if slot is not None else ():
                held[other] += self.gradients[index].bytes
        return held

    def hidden_seconds(self, assignment: Assignment) -> float:
        """The value of an assignment."""
        filled = self.filled_seconds(assignment)
        return sum(min(seconds, there) for seconds, there in zip(self.slots, filled, strict=True))

    def filled_seconds(self, assignment: Assignment) -> list[float]:
        """By slot, the seconds of what runs in it."""
        filled = [0.0] * len(self.slots)
        for gradient, slot in zip(self.gradients, assignment, strict=True):
            if slot is not None:
                filled[slot] += gradient.seconds
        return filled

    def is_feasible(self, assignment: Assignment) -> bool:
        """Whether everything runs where it may, within the bytes."""
        placed = zip(self.gradients, assignment, strict=True)
        legal = all(slot is None or slot in gradient.under for gradient, slot in placed)
        return legal and max(self.held_bytes(assignment), default=0) <= self.max_bytes


def best_fit(problem: AssignmentProblem, start: Assignment | None = None) -> Assignment:
    """Algorithm 1: slot after slot, what fits best into what is left of it.

    1. Of the weight gradients that are free, may run in the slot and fit into the bytes, the one whose seconds are nearest
       to what is left of the slot is next; of several the first in program order.
    2. It is passed over if it overshoots and could hide more in a later slot, alone (in a cyclic problem: in any other).
       The paper takes it: a slot with 5 us left then swallows a gradient of 1000 us that another slot was waiting for.
    3. A slot is done when nothing is left of it, or nothing can be taken.

    Args:
        start: slots that are decided already.
    """
    chosen: list[int | None] = list(start or [None] * len(problem.gradients))
    held = problem.held_bytes(tuple(chosen))
    filled = problem.filled_seconds(tuple(chosen))
    for slot, seconds in enumerate(problem.slots):
        # Line 15: t_u, the seconds of the all-to-all that nothing hides yet.
        left = seconds - filled[slot]
        free = [i for i, other in enumerate(chosen) if other is None and slot in problem.gradients[i].under]
        while left > 0 and (pick := _next(problem, slot, left, free, held)) is not None:
            # Lines 19 to 21, and the bytes that the paper does not count.
            chosen[pick] = slot
            free.remove(pick)
            left -= problem.gradients[pick].seconds
            for other in problem.held_at(pick, slot):
                held[other] += problem.gradients[pick].bytes
    # A later pick may overshoot and fill the slot alone: the earlier ones then hide nothing and only hold bytes.
    return without_idlers(problem, tuple(chosen))


def _next(problem: AssignmentProblem, slot: int, left: float, free: Sequence[int], held: Sequence[int]) -> int | None:
    """Steps 1 and 2."""

    def misfit(index: int) -> tuple[float, int]:
        return abs(left - problem.gradients[index].seconds), index

    # Line 18's argmin. Sorted rather than a minimum, because bytes or step 2 may rule the nearest out.
    for index in sorted(free, key=misfit):
        gradient = problem.gradients[index]
        fits = _fits(problem, index, slot, held)
        if fits and (gradient.seconds <= left or not _hides_more_later(problem, gradient, slot, left)):
            return index
    return None


def _fits(problem: AssignmentProblem, index: int, slot: int, held: Sequence[int]) -> bool:
    """Whether the bytes allow a weight gradient in a slot beside what is held."""
    more = [0] * len(held)
    for other in problem.held_at(index, slot):
        more[other] += problem.gradients[index].bytes
    return all(there + new <= problem.max_bytes for there, new in zip(held, more, strict=True) if new)


def _hides_more_later(problem: AssignmentProblem, gradient: Gradient, slot: int, left: float) -> bool:
    return any(
        min(problem.slots[other], gradient.seconds) > left
        for other in gradient.under
        if other > slot or (problem.cyclic and other != slot)
    )


def without_idlers(problem: AssignmentProblem, assignment: Assignment) -> Assignment:
    """The assignment without weight gradients that hide nothing: a slot that is full without it; the largest holders go first."""
    kept = list(assignment)
    filled = problem.filled_seconds(assignment)
    # Each removal empties the slot a little, so that the next one there may be needed: hence the order.
    for index in sorted(range(len(kept)), key=lambda index: -problem.gradients[index].bytes):
        slot, seconds = kept[index], problem.gradients[index].seconds
        if slot is not None and (seconds == 0 or filled[slot] - seconds >= problem.slots[slot]):
            kept[index] = None
            filled[slot] -= seconds
    return tuple(kept)


def held_shortly(problem: AssignmentProblem, assignment: Assignment) -> Assignment:
    """The assignment with weight gradients of equal seconds exchanged, so that slots take those whose pass came last.

    Which of them runs makes no difference to what is hidden; what waits longer holds its bytes for longer.

    Args:
        problem: not cyclic.
    """
    assert not problem.cyclic
    # Seconds are rounded when the problem is made (slots.py), so that those of equal layers are equal as floats.
    of_equal_seconds: dict[float, list[int]] = {}
    for index, gradient in enumerate(problem.gradients):
        of_equal_seconds.setdefault(gradient.seconds, []).append(index)
    changed = list(assignment)
    for members in of_equal_seconds.values():
        wanted = sorted(slot for slot in (assignment[i] for i in members) if slot is not None)
        free = sorted(members, key=lambda i: problem.gradients[i].first)
        for i in members:
            changed[i] = None
        for slot in wanted:
            there = [i for i in free if slot in problem.gradients[i].under]
            if not there:
                return assignment
            # The latest pass that may run here. Earlier passes wait for a later slot, or for none and hold nothing.
            changed[there[-1]] = slot
            free.remove(there[-1])
    swapped = tuple(changed)
    # Equal seconds need not mean equal bytes, so the exchange is not a gain by itself.
    is_shorter = sum(problem.held_bytes(swapped)) < sum(problem.held_bytes(assignment))
    return swapped if is_shorter and problem.is_feasible(swapped) else assignment


# Repetition.


LONGEST_PERIOD = 4
"""Layers; models repeat every layer, every second, third or fourth."""
FEWEST_PERIODS = 3


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """The weight gradients and slots of one layer in a problem: half-open ranges of their indices."""

    gradients: tuple[int, int]
    slots: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Run:
    """`periods` times `length` layers from `first` on, all periods equal."""

    first: int
    length: int
    periods: int


def longest_run(problem: AssignmentProblem, layers: Sequence[LayerSpan]) -> Run | None:
    """The longest run of layers that repeat: same seconds, bytes and order of weight gradients and slots.

    Args:
        layers: in program order; they share the problem's gradients and slots among them.
    Returns:
        None where nothing repeats often enough, or without slots.
    """
    looks = [_look(problem, span) for span in layers]
    best: Run | None = None
    for length in range(1, LONGEST_PERIOD + 1):
        first = 0
        while first + length < len(looks):
            end = first + length
            while end < len(looks) and looks[end] == looks[end - length]:
                end += 1
            run = Run(first, length, (end - first) // length)
            has_slots = any(look[1] for look in looks[first : first + length])
            covers = best.length * best.periods if best else 0
            if run.periods >= FEWEST_PERIODS and has_slots and run.length * run.periods > covers:
                best = run
            # The repetition breaks at `end` for every start up to end - length: their runs would only be shorter.
            first = max(first + 1, end - length + 1)
    return best


def one_period(problem: AssignmentProblem, layers: Sequence[LayerSpan], run: Run) -> AssignmentProblem:
    """One period of a run as a cyclic problem."""
    gradients, slots = _of_period(layers, run, 0)
    # A slot in front of a pass is meant in the next period, so that all are allowed. What labels forbid between two
    # periods is checked on the whole problem, when the answer has been repeated (`_repeated`).
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


def repeat(problem: AssignmentProblem, layers: Sequence[LayerSpan], run: Run, assignment: Assignment) -> Assignment:
    """An assignment of one period, along the whole run.

    Args:
        assignment: of `one_period`.
    """
    whole: list[int | None] = [None] * len(problem.gradients)
    for period in range(run.periods):
        gradients, slots = _of_period(layers, run, period)
        for index, slot in zip(gradients, assignment, strict=True):
            if slot is None:
                continue
            start = slots.start if slots.start + slot >= problem.gradients[index].first else slots.stop
            # The last period has no next one: what would run there stays free, for the greedy to place.
            last = period == run.periods - 1
            if start == slots.start or not last:
                whole[index] = start + slot
    return tuple(whole)


def _of_period(layers: Sequence[LayerSpan], run: Run, period: int) -> tuple[range, range]:
    """Gradients and slots of one period."""
    members = layers[run.first + period * run.length : run.first + (period + 1) * run.length]
    first, last = members[0], members[-1]
    return range(first.gradients[0], last.gradients[1]), range(first.slots[0], last.slots[1])


def _look(problem: AssignmentProblem, span: LayerSpan) -> tuple[tuple[tuple[float, int, int], ...], tuple[float, ...]]:
    """Equivalence key of a layer: its weight gradients with the slots in front of them, and its slots."""
    # Places count from the layer on, so that layers anywhere compare equal. `under` is left out: layers near the end
    # have fewer slots behind them, and equal ones would differ by that alone.
    gradients = problem.gradients[slice(*span.gradients)]
    return tuple(
        (gradient.seconds, gradient.bytes, gradient.first - span.slots[0]) for gradient in gradients
    ), problem.slots[slice(*span.slots)]
