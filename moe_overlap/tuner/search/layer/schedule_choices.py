"""Ways to fill the slots of a plan, of which the weight-gradient schedule takes the fastest.

Under exchanges: as solved, as solved with the rest in program order, all in program order. In a pipeline each also with the
rest behind the sends. A weight gradient that overshoots its exchange saves what it hides in every micro-batch; behind the send
it saves all it takes, but only at the ends of a step. So it stays under its exchange only if that hides a share of it. With P
equal stages and M micro-batches a step takes M + P - 1 times what a micro-batch takes, and what runs behind the sends is saved
P - 1 times: the share is (P - 1) / (M + P - 1). Of a stage that does less than others it is up to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from moe_overlap.tuner.search.layer.assignment import Assignment
from moe_overlap.tuner.search.layer.behind_sends import SendSlot, behind, hiding
from moe_overlap.tuner.search.layer.plan_slots import Slots, named_slots
from moe_overlap.tuner.search.layer.slot_times import ChunkProblem
from moe_overlap.tuner.search.layer.solve_assignment import Solution

Place = tuple[int, int]
"""Stage, chunk."""
Choice = Literal[
    "without",
    "solved",
    "solved, rest in program order",
    "program order",
    "solved, rest behind sends",
    "solved, rest in program order, then behind sends",
    "program order, then behind sends",
    "what saves more there behind sends",
    "what overshoots behind sends",
    "all behind sends",
]


@dataclass(frozen=True, slots=True)
class Filled:
    """A chunk's assignment, and where it has a slot behind its send the assignment of that slot's problem."""

    problem: ChunkProblem
    assignment: Assignment
    send: SendSlot | None = None
    behind: Assignment = ()


def choices(
    problems: Mapping[Place, ChunkProblem],
    sends: Mapping[Place, SendSlot],
    solutions: Mapping[Place, Solution],
    share: float,
) -> dict[Choice, dict[Place, Filled]]:
    """The ways that keep the bytes, beside the plan without deferral; of equal ones the first.

    Args:
        share: as above, of equal stages.
    """
    solved = {place: solution.assignment for place, solution in solutions.items()}
    in_order: dict[Place, Assignment] = {
        place: tuple(gradient.first for gradient in one.problem.gradients) for place, one in problems.items()
    }
    completed: dict[Place, Assignment] = {
        place: tuple(
            first if slot is None else slot for slot, first in zip(solved[place], in_order[place], strict=True)
        )
        for place in problems
    }
    found: dict[Choice, dict[Place, Filled]] = {}
    named: list[dict[int, Slots]] = []

    def add(choice: Choice, assignments: Mapping[Place, Assignment], least: float | None = None) -> None:
        if all(one.problem.is_feasible(assignments[place]) for place, one in problems.items()):
            filled = {
                place: _filled(one, sends.get(place), assignments[place], least) for place, one in problems.items()
            }
            slots = {stage: slots_of(filled, stage) for stage, _ in problems}
            if any(slots.values()) and slots not in named:
                found[choice] = filled
                named.append(slots)

    add("solved", solved)
    add("solved, rest in program order", completed)
    add("program order", in_order)
    if sends:
        add("solved, rest behind sends", solved, 0.0)
        add("solved, rest in program order, then behind sends", completed, 0.0)
        add("program order, then behind sends", in_order, 0.0)
        add("what saves more there behind sends", solved, share)
        add("what overshoots behind sends", solved, 1.0)
        add("all behind sends", solved, float("inf"))
    return found


def slots_of(filled: Mapping[Place, Filled], stage: int) -> Slots:
    """Of a stage, by name."""
    mine = [one for place, one in filled.items() if place[0] == stage]
    slots = {layer: dict(named) for layer, named in named_slots((one.problem, one.assignment) for one in mine).items()}
    for one in mine:
        if one.send is not None and (names := one.send.named(one.behind)):
            slots.setdefault(one.send.layer, {})[one.send.name] = names
    return slots


def seconds_behind(filled: Mapping[Place, Filled], stage: int) -> float:
    """Of a stage, what one micro-batch computes behind its sends."""
    mine = (one for place, one in filled.items() if place[0] == stage)
    return sum((one.send.seconds(one.behind) for one in mine if one.send is not None), 0.0)


def _filled(one: ChunkProblem, send: SendSlot | None, assignment: Assignment, least: float | None) -> Filled:
    """An assignment of a chunk, and with a share the rest behind its send."""
    if send is None or least is None:
        return Filled(one, assignment)
    kept = hiding(one.problem, assignment, least)
    return Filled(one, kept, send, behind(send, one.gradients, kept))
