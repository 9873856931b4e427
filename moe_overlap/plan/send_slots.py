"""Slots behind transfers between stages: weight gradients that run when a chunk has sent its input's gradient.

A stage waits for what the stage behind it sends. What of a backward pass stands behind the send is not waited for: it runs while
the gradient travels, and where the stage would wait for its next micro-batch, in the bubble of the pipeline. Behind the last
micro-batches of a step every stage but the first hands on that much earlier.

A slot is named by its transfer (`send.S0>S1.backward`) and stands in the entry of any one layer of the chunk; it ends with the
pass: the next micro-batch adds to the same sums behind it.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2 (whose schedules also let weight gradients wait for longer).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from moe_overlap.plan.list_builder import Draft
from moe_overlap.plan.operators import BACKWARD, Operator, boundary_operator, parse_operator
from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.plan.plan import Plan


def sends_of(plan: Plan, index: int) -> tuple[str, ...]:
    """By chunk of a stage, the transfer of its input's gradient; the empty string where the model begins."""
    stages = len(plan.stages)
    name = boundary_operator("send", (index - 1) % stages, index, backward=True)
    begins = index == plan.embedding_stage
    return tuple("" if begins and chunk == 0 else name for chunk in range(len(plan.stages[index].chunks)))


def is_send(slot: Operator) -> bool:
    """Whether a slot is the transfer of an input's gradient."""
    return slot.part.startswith("send.") and slot.suffix == BACKWARD


def behind_send(overlap: StageOverlap, layers: Sequence[int]) -> tuple[str, ...]:
    """Weight gradients behind the transfer of a chunk, in order.

    Args:
        layers: of the chunk.
    """
    return tuple(
        name
        for entry in overlap.layers
        if entry.layer in layers
        for slot, names in entry.weight_gradient_slots.items()
        if is_send(parse_operator(slot))
        for name in names
    )


def receives_first(drafts: Iterable[Draft]) -> Iterator[Draft]:
    """A list in which what the next pass receives is asked for before what waits behind a send, not after it."""
    waiting: list[Draft] = []
    is_behind_send = False
    for draft in drafts:
        if draft.kind == "weight-gradient" and is_behind_send:
            waiting.append(draft)
            continue
        if draft.kind != "point-to-point" or not draft.name.startswith("receive."):
            yield from waiting
            waiting = []
        is_behind_send = draft.kind == "point-to-point"
        yield draft
    yield from waiting
