"""Bubble slots: weight gradients after the send of a chunk, so that the previous stage does not wait for them.

Problem. Of the weight gradients that no all-to-all hides, choose those that run after the send of their chunk.
Terms. The *bubble slot* of a chunk comes after its send of gradients; any weight gradient of the chunk's pass may run there. It
hides no all-to-all, but every earlier stage receives its gradients sooner by the same seconds. That shortens a step only at its
ends, where stages wait for each other, whereas an all-to-all saves time in every micro-batch. So all-to-alls are filled first.
Steps.
1. Add one slot of zero seconds to the problem of a chunk (`send_slots`).
2. Remove weight gradients from all-to-alls that hide less than a given share of them (`hiding`).
3. Fill the bubble slot (`fill_send_slot`). A weight gradient there holds its bytes during all all-to-alls after its pass; if not
   all fit, those with the most seconds per byte come first.

Source: not in Lancet; zero-bubble pipelines fill the same time with weight gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.lowering.deferral import gradients_of_pass, sends_of
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.search.layer.assignment import Assignment, AssignmentProblem, Gradient
from moe_overlap.tuner.search.layer.slots import DIGITS, ChunkProblem, Slots, holds_head


@dataclass(frozen=True, slots=True)
class SendSlot:
    """The bubble slot of a chunk.

    Attributes:
        name: name of the send.
        layer: the layer whose entry in the plan holds the slot.
        gradients: names of the problem's weight gradients.
        problem: the chunk's problem with all weight gradients of the chunk and with the bubble slot, of zero seconds, as last
            slot.
    """

    name: str
    layer: int
    gradients: tuple[str, ...]
    problem: AssignmentProblem

    @property
    def place(self) -> int:
        """Index of the bubble slot among the slots of the problem."""
        return len(self.problem.slots) - 1

    def named(self, assignment: Assignment) -> tuple[str, ...]:
        """Names of the weight gradients that an assignment puts into the bubble slot."""
        return tuple(n for n, place in zip(self.gradients, assignment, strict=True) if place == self.place)

    def seconds(self, assignment: Assignment) -> float:
        """Seconds of the weight gradients that an assignment puts into the bubble slot."""
        return self.problem.filled_seconds(assignment)[self.place]


def with_bubble_slots(slots: Slots, plan: Plan, index: int, model: ModelDescription) -> Slots:
    """Slots of a stage, extended by bubble slots that hold every weight gradient that is in no other slot."""
    filled = {layer: dict(of_layer) for layer, of_layer in slots.items()}
    placed = {name for of_layer in slots.values() for names in of_layer.values() for name in names}
    for chunk, (send, layer) in _sends(plan, index, model).items():
        names = gradients_of_pass(range(*chunk), model, holds_head(plan, index, model, chunk))
        if rest := tuple(name for name in names if name not in placed):
            filled.setdefault(layer, {})[send] = rest
    return filled


def send_slots(
    plan: Plan, index: int, model: ModelDescription, prices: StagePrices, problems: Mapping[int, ChunkProblem]
) -> dict[int, SendSlot]:
    """Step 1: the bubble slots of a stage, by chunk.

    Args:
        prices: prices of a list with every weight gradient in a slot.
        problems: chunk -> its assignment problem.
    """
    sends = _sends(plan, index, model)
    chunks = plan.stages[index].chunks
    return {n: _send_slot(*sends[chunk], prices, n, problems[n]) for n, chunk in enumerate(chunks) if chunk in sends}


def fill_send_slot(slot: SendSlot, gradients: Sequence[str], assignment: Assignment) -> Assignment:
    """Step 3: extend the assignment of a chunk's problem by unassigned weight gradients in the bubble slot, while they fit.

    Args:
        gradients: names of the weight gradients of the assignment.
    Returns:
        An assignment of the slot's problem.
    """
    problem, slot_of = slot.problem, dict(zip(gradients, assignment, strict=True))
    chosen = [slot_of.get(name) for name in slot.gradients]
    # Bytes of the gradients under all-to-alls are charged first: they save time in every micro-batch.
    held = problem.held_bytes(tuple(chosen))

    def worth(index: int) -> tuple[float, int]:
        gradient = problem.gradients[index]
        # The greedy order of a knapsack, most seconds per byte: all candidates are held up to the same slot.
        return -gradient.seconds / max(1, gradient.bytes), index

    for index in sorted((i for i, place in enumerate(chosen) if place is None), key=worth):
        held_slots = problem.held_at(index, slot.place)
        size = problem.gradients[index].bytes
        if problem.gradients[index].seconds > 0 and all(held[n] + size <= problem.max_bytes for n in held_slots):
            chosen[index] = slot.place
            for n in held_slots:
                held[n] += size
    return tuple(chosen)


def hiding(problem: AssignmentProblem, assignment: Assignment, share: float) -> Assignment:
    """Step 2: unassign each weight gradient whose slot hides less than `share` of it, the smallest hidden share first."""
    slot_of = list(assignment)
    filled = problem.filled_seconds(assignment)

    def hidden(index: int, slot: int) -> float:
        seconds = problem.gradients[index].seconds
        return max(0.0, seconds - max(0.0, filled[slot] - problem.slots[slot]))

    while True:
        shares = [
            (hidden(index, slot) / problem.gradients[index].seconds, -index)
            for index, slot in enumerate(slot_of)
            if slot is not None and problem.gradients[index].seconds > 0
        ]
        # One at a time: a removal raises the shares of the others in the slot. The default ends the loop when none remains.
        least, index = min(shares, default=(share, 0))
        if least >= share:
            return tuple(slot_of)
        slot = slot_of[-index]
        assert slot is not None
        filled[slot] -= problem.gradients[-index].seconds
        slot_of[-index] = None


def _sends(plan: Plan, index: int, model: ModelDescription) -> dict[tuple[int, int], tuple[str, int]]:
    """Chunk -> its send and its first MoE layer, whose entry holds the slot; chunks without an MoE layer are left out."""
    sends = {}
    for send, chunk in zip(sends_of(plan, index), plan.stages[index].chunks, strict=True):
        layer = next((n for n in range(*chunk) if model.moe_layers[n]), None)
        if send and layer is not None:
            sends[chunk] = send, layer
    return sends


def _send_slot(name: str, layer: int, prices: StagePrices, chunk: int, chunk_problem: ChunkProblem) -> SendSlot:
    last = len(chunk_problem.slots)
    gradient_of = dict(zip(chunk_problem.gradients, chunk_problem.problem.gradients, strict=True))
    instructions = [i for i in prices.instructions if (i.kind, i.chunk, i.micro_batch) == ("weight-gradient", chunk, 0)]
    gradients = []
    for i in instructions:
        if i.name in gradient_of:
            gradient = gradient_of[i.name]
            # Its all-to-alls stay allowed, so that assignments of the chunk's problem are feasible here, too.
            gradients.append(Gradient(gradient.seconds, gradient.bytes, gradient.first, (*gradient.under, last)))
        else:
            # No all-to-all may hide it, so the chunk's problem lacks it; it holds its bytes at the bubble slot only.
            seconds, size = round(prices.seconds(i), DIGITS), prices.bounded_bytes(i.name)
            gradients.append(Gradient(seconds, size, first=last, under=(last,)))
    # 0 seconds (step 1), so that the bubble slot adds nothing to hidden seconds, which are saved in every micro-batch.
    problem = AssignmentProblem(tuple(gradients), (*chunk_problem.problem.slots, 0.0), chunk_problem.problem.max_bytes)
    return SendSlot(name, layer, tuple(i.name for i in instructions), problem)
