"""When a step uses the weights of which part, and when a part's gradient of a micro-batch is complete.

A part is what is stored, moved and stepped as one: `embedding`, `L3`, `mtp0`, `head`. A use is one pass of one micro-batch
through it: from its first computation in the list to its last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_overlap.plan.list_builder import Draft
from moe_overlap.plan.operators import BACKWARD, RECOMPUTE, parse_operator


@dataclass(frozen=True, slots=True)
class Use:
    """One use.

    Attributes:
        first, last: places in the list.
        adds_to: parts whose gradient sums a backward use needs: its own, and those that prediction layers add to.
    """

    part: str
    backward: bool
    chunk: int | None
    micro_batch: int
    first: int
    last: int
    adds_to: tuple[str, ...]

    @property
    def is_layer(self) -> bool:
        """Whether it saves activations that are worth moving."""
        return self.part not in ("embedding", "head")


def part_of(draft: Draft) -> str:
    """The part that an instruction of a pass computes; the empty string for what is no computation."""
    if draft.kind != "compute":
        return ""
    operator = parse_operator(draft.name)
    if operator.layer is not None:
        return f"L{operator.layer}"
    return f"mtp{operator.mtp}" if operator.mtp is not None else operator.part.partition(".")[0]


def uses_of(drafts: Sequence[Draft]) -> list[Use]:
    """All uses, in order of their first computation."""
    found: dict[tuple[str, bool, int], list[int]] = {}
    for place, draft in enumerate(drafts):
        if part := part_of(draft):
            assert draft.micro_batch is not None
            found.setdefault((part, is_backward(draft), draft.micro_batch), []).append(place)
    return [
        Use(
            part,
            backward,
            drafts[places[0]].chunk,
            micro_batch,
            places[0],
            places[-1],
            tuple(dict.fromkeys([part, *(other for place in places for other in gradients_of(drafts[place]))])),
        )
        for (part, backward, micro_batch), places in found.items()
    ]


def is_backward(draft: Draft) -> bool:
    """Whether an instruction belongs to a backward pass; what is recomputed does."""
    return draft.name.endswith((f".{BACKWARD}", f".{RECOMPUTE}"))


def gradients_of(draft: Draft) -> list[str]:
    """Parts whose gradient an instruction adds to."""
    return [name.removeprefix("gradient.") for name in draft.writes if name.startswith("gradient.")]


def gradient_ends(drafts: Sequence[Draft]) -> dict[tuple[str, int], int]:
    """(part, micro-batch) -> place of the last instruction that adds to its gradient, deferred weight gradients included."""
    ends: dict[tuple[str, int], int] = {}
    for place, draft in enumerate(drafts):
        for part in gradients_of(draft):
            assert draft.micro_batch is not None
            ends[part, draft.micro_batch] = place
    return ends
