"""Identical layers are solved once: one period of them as a cyclic problem, whose assignment is repeated.

1. Find the longest run of layers in which every `length` layers repeat the ones before: same seconds, bytes and order of weight
   gradients and slots.
2. One period of the run is a problem of its own; behind its last slot comes the first of the next period.
3. Repeat its assignment along the run. What would run behind the end of the run stays free, as do the other layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_overlap.tuner.search.layer.assignment import Assignment, Gradient, Problem

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
    """`periods` times `length` layers from `first` on, all periods alike."""

    first: int
    length: int
    periods: int


def longest_run(problem: Problem, layers: Sequence[LayerSpan]) -> Run | None:
    """Step 1.

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
            first = max(first + 1, end - length + 1)
    return best


def one_period(problem: Problem, layers: Sequence[LayerSpan], run: Run) -> Problem:
    """Step 2."""
    gradients, slots = _of_period(layers, run, 0)
    everywhere = tuple(range(len(slots)))
    return Problem(
        gradients=tuple(
            Gradient(one.seconds, one.bytes, one.first - slots.start, everywhere)
            for one in (problem.gradients[i] for i in gradients)
        ),
        slots=tuple(problem.slots[j] for j in slots),
        max_bytes=problem.max_bytes,
        cyclic=True,
    )


def repeat(problem: Problem, layers: Sequence[LayerSpan], run: Run, assignment: Assignment) -> Assignment:
    """Step 3.

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
            last = period == run.periods - 1
            if start == slots.start or not last:
                whole[index] = start + slot
    return tuple(whole)


def _of_period(layers: Sequence[LayerSpan], run: Run, period: int) -> tuple[range, range]:
    """Gradients and slots of one period."""
    members = layers[run.first + period * run.length : run.first + (period + 1) * run.length]
    first, last = members[0], members[-1]
    return range(first.gradients[0], last.gradients[1]), range(first.slots[0], last.slots[1])


def _look(problem: Problem, span: LayerSpan) -> tuple[tuple[tuple[float, int, int], ...], tuple[float, ...]]:
    """What must be equal in layers that are alike: weight gradients with the slots in front of them, and slots."""
    gradients = problem.gradients[slice(*span.gradients)]
    return tuple((one.seconds, one.bytes, one.first - span.slots[0]) for one in gradients), problem.slots[
        slice(*span.slots)
    ]
