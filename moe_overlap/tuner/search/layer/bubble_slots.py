"""Bubble slots: weight gradients behind the send of a chunk, so that the stage before need not wait for them.

Problem. Of the weight gradients that no all-to-all hides, choose those that run behind the send of a chunk.
Terms. The *bubble slot* of a chunk stands behind its send of gradients; any weight gradient of its pass may run there. It hides
nothing there by itself; but at the ends of a step, where stages wait for each other, every stage before gets its gradients that
much earlier, once a step. Under an all-to-all it saves time in every micro-batch, so that all-to-alls are filled first.
Steps.
1. The problem of a chunk gets one more slot, of no seconds (`send_slots`).
2. A weight gradient that its all-to-all hides by less than a given share leaves it (`hiding`).
3. What waits for the send holds its bytes under all all-to-alls that come after its pass. Where not everything fits, what takes
   longest for its bytes is taken first (`behind`).

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
        name: of the send.
        layer: in whose entry the slot stands.
        gradients: names of the problem's weight gradients.
        problem: the chunk's, with every weight gradient of it and, behind its slots, this one, in which nothing is hidden.
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
        """Names of the weight gradients that an assignment has in the bubble slot."""
        return tuple(n for n, place in zip(self.gradients, assignment, strict=True) if place == self.place)

    def seconds(self, assignment: Assignment) -> float:
        """Seconds of the weight gradients that an assignment has in the bubble slot."""
        return self.problem.filled_seconds(assignment)[self.place]


def with_rest_behind(slots: Slots, plan: Plan, index: int, model: ModelDescription) -> Slots:
    """Slots of a stage, and behind every send the weight gradients that the chunk computes in none of them."""
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
        prices: of a list with every weight gradient in a slot.
        problems: by chunk.
    """
    sends = _sends(plan, index, model)
    chunks = plan.stages[index].chunks
    return {n: _send_slot(*sends[chunk], prices, n, problems[n]) for n, chunk in enumerate(chunks) if chunk in sends}


def behind(slot: SendSlot, gradients: Sequence[str], assignment: Assignment) -> Assignment:
    """Step 3: an assignment of a chunk's problem, and in its bubble slot those of the rest that fit.

    Args:
        gradients: names of those that the assignment is of.
    Returns:
        An assignment of the slot's problem.
    """
    problem, known = slot.problem, dict(zip(gradients, assignment, strict=True))
    chosen = [known.get(name) for name in slot.gradients]
    # What all-to-alls take is charged first: it saves time in every micro-batch, the bubble slot once a step.
    held = problem.held_bytes(tuple(chosen))

    def worth(index: int) -> tuple[float, int]:
        gradient = problem.gradients[index]
        # The greedy order of a knapsack: most seconds for a byte. All of these are held up to the same slot.
        return -gradient.seconds / max(1, gradient.bytes), index

    for index in sorted((i for i, place in enumerate(chosen) if place is None), key=worth):
        there = problem.held_at(index, slot.place)
        size = problem.gradients[index].bytes
        if problem.gradients[index].seconds > 0 and all(held[n] + size <= problem.max_bytes for n in there):
            chosen[index] = slot.place
            for n in there:
                held[n] += size
    return tuple(chosen)


def hiding(problem: AssignmentProblem, assignment: Assignment, share: float) -> Assignment:
    """Step 2: an assignment without weight gradients of which their slot hides less than a share; what hides least goes first."""
    kept = list(assignment)
    filled = problem.filled_seconds(assignment)

    def hidden(index: int, slot: int) -> float:
        seconds = problem.gradients[index].seconds
        return max(0.0, seconds - max(0.0, filled[slot] - problem.slots[slot]))

    while True:
        shares = [
            (hidden(index, slot) / problem.gradients[index].seconds, -index)
            for index, slot in enumerate(kept)
            if slot is not None and problem.gradients[index].seconds > 0
        ]
        # One at a time: what leaves a slot makes room for the others in it, whose shares grow. Without any, the default
        # ends the loop.
        least, index = min(shares, default=(share, 0))
        if least >= share:
            return tuple(kept)
        slot = kept[-index]
        assert slot is not None
        filled[slot] -= problem.gradients[-index].seconds
        kept[-index] = None


def _sends(plan: Plan, index: int, model: ModelDescription) -> dict[tuple[int, int], tuple[str, int]]:
    """Chunk -> its send and its first MoE layer, whose entry holds the slot; without one there is no entry."""
    sends = {}
    for send, chunk in zip(sends_of(plan, index), plan.stages[index].chunks, strict=True):
        layer = next((n for n in range(*chunk) if model.moe_layers[n]), None)
        if send and layer is not None:
            sends[chunk] = send, layer
    return sends


def _send_slot(name: str, layer: int, prices: StagePrices, chunk: int, one: ChunkProblem) -> SendSlot:
    last = len(one.slots)
    known = dict(zip(one.gradients, one.problem.gradients, strict=True))
    made = [i for i in prices.made if (i.kind, i.chunk, i.micro_batch) == ("weight-gradient", chunk, 0)]
    gradients = []
    for i in made:
        if i.name in known:
            before = known[i.name]
            # Its all-to-alls stay allowed beside the bubble slot, so that assignments of the chunk's problem are
            # feasible here.
            gradients.append(Gradient(before.seconds, before.bytes, before.first, (*before.under, last)))
        else:
            # No all-to-all may hide it, so the chunk's problem does not have it; it holds its bytes at this slot alone.
            seconds, size = round(prices.seconds(i), DIGITS), prices.bounded_bytes(i.name)
            gradients.append(Gradient(seconds, size, first=last, under=(last,)))
    # 0 seconds (step 1): an assignment's hidden seconds count what saves time in every micro-batch, and nothing else.
    problem = AssignmentProblem(tuple(gradients), (*one.problem.slots, 0.0), one.problem.max_bytes)
    return SendSlot(name, layer, tuple(i.name for i in made), problem)
