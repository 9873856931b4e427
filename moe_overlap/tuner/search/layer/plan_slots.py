"""Weight-gradient slots of a plan, by name: those it would have in program order, and the plan with others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.operators import parse_operator
from moe_overlap.plan.overlap import NO_OVERLAP, LayerOverlap, Mechanism, StageOverlap
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.weight_gradients import default_slots
from moe_overlap.tuner.search.layer.assignment import Assignment
from moe_overlap.tuner.search.layer.slot_times import ChunkProblem

Slots = Mapping[int, Mapping[str, tuple[str, ...]]]
"""Layer -> backward exchange, or send of a chunk -> weight gradients."""


def program_order(plan: Plan, index: int, model: ModelDescription) -> Slots:
    """Every weight gradient of a stage under the next exchange."""
    stage = plan.stages[index]
    found: dict[int, dict[str, tuple[str, ...]]] = {}
    for chunk in stage.chunks:
        exchanges = stage.expert * stage.expert_tensor > 1
        found |= default_slots(range(*chunk), model, exchanges, holds_head(plan, index, model, chunk))
    return found


def holds_head(plan: Plan, index: int, model: ModelDescription, chunk: tuple[int, int]) -> bool:
    """Whether a chunk of a stage ends in a head with a weight of its own."""
    is_tied = model.tied_embeddings and index == plan.embedding_stage
    return index == plan.loss_stage and not is_tied and chunk == plan.stages[index].chunks[-1]


def without_pieces(plan: Plan) -> Plan:
    """Gradients reduced at the end: their pieces are placed anew behind what completes them, and decide nothing here."""
    stages = (replace(stage, overlap=replace(stage.overlap, gradient_chunk_bytes=0)) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))


def shortened(plan: Plan, micro_batches: int) -> Plan:
    """The plan with fewer micro-batches a step, for simulations; the same where it has no more."""
    whole = plan.stages[0].gradient_accumulation_steps
    count = min(whole, micro_batches)
    stages = tuple(replace(stage, gradient_accumulation_steps=count) for stage in plan.stages)
    return replace(plan, stages=stages, global_batch_size=plan.global_batch_size // whole * count)


def with_slots(plan: Plan, slots: Sequence[Slots], max_deferred_bytes: int) -> Plan:
    """The plan with other slots in place of those that it has.

    Args:
        slots: by stage.
        max_deferred_bytes: of stages that have any.
    """
    stages = (
        replace(stage, overlap=_with_slots(stage, of_stage, max_deferred_bytes))
        for stage, of_stage in zip(plan.stages, slots, strict=True)
    )
    return replace(plan, stages=tuple(stages))


def _with_slots(stage: StagePlan, slots: Slots, max_deferred_bytes: int) -> StageOverlap:
    overlap = stage.overlap
    whole: Mechanism = "cross_micro_batch" if overlap.micro_batches_in_flight > 1 else "none"
    layers = {layer: LayerOverlap(layer=layer, mechanism=whole) for layer in slots}
    layers |= {layer.layer: layer for layer in overlap.layers}
    decided = (replace(layers[n], weight_gradient_slots=dict(slots.get(n, {}))) for n in stage.layers if n in layers)
    return replace(
        overlap,
        max_deferred_bytes=max_deferred_bytes if slots else NO_OVERLAP.max_deferred_bytes,
        layers=tuple(layer for layer in decided if layer != LayerOverlap(layer=layer.layer)),
    )


def named_slots(assigned: Iterable[tuple[ChunkProblem, Assignment]]) -> Slots:
    """What assignments of the chunks of a stage say; in program order inside a slot."""
    found: dict[int, dict[str, tuple[str, ...]]] = {}
    for one, assignment in assigned:
        for name, place in zip(one.gradients, assignment, strict=True):
            if place is not None:
                slot = one.slots[place]
                layer = parse_operator(slot).layer
                assert layer is not None, slot
                of_layer = found.setdefault(layer, {})
                of_layer[slot] = (*of_layer.get(slot, ()), name)
    return found
