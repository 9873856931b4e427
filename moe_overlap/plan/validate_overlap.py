"""Invariants of a stage's overlap: a field that its mechanism does not read is refused, not ignored."""

from __future__ import annotations

from collections.abc import Sequence

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.operators import parse_operator
from moe_overlap.plan.overlap import TUTEL_DEGREES, LayerOverlap, Mechanism, StageOverlap
from moe_overlap.plan.plan import StagePlan
from moe_overlap.plan.validate_ranges import validate_ranges
from moe_overlap.plan.validate_slots import validate_slots

FIELDS_OF: dict[Mechanism, tuple[str, ...]] = {
    "none": (),
    "tutel": ("tutel_degree",),
    "partitioned": ("partitions", "first_operator", "last_operator", "axis"),
    "cross_micro_batch": (),
    "fused": ("kernel_blocks",),
}
"""What each mechanism reads, all of it needed but OPTIONAL_FIELDS."""
OPTIONAL_FIELDS = ("kernel_blocks",)
"""Null: the best is taken."""
ALL_FIELDS = ("tutel_degree", "partitions", "first_operator", "last_operator", "axis", "kernel_blocks")


def validate_overlap(
    stage: StagePlan, model: ModelDescription | None, subject: str, sends: Sequence[str], head_apart: bool = False
) -> None:
    """Check the overlap of one stage.

    Args:
        model: None checks what needs no model.
        subject: where the overlap stands, as `plan.json stages[0].overlap`.
        sends: as `sends_of` gives them.
        head_apart: whether the stage ends in a head with a weight of its own, not tied to an embedding of the stage.
    Raises:
        ConfigError: for the first invariant that does not hold.
    """
    overlap = stage.overlap
    for field, least in (("gradient_chunk_bytes", 0), ("max_deferred_bytes", 0), ("micro_batches_in_flight", 1)):
        if getattr(overlap, field) < least:
            raise ConfigError(
                f"{subject}.{field}", getattr(overlap, field), f"must be at least {least}", f"write {least}"
            )
    _check_limits(stage, subject)
    seen: set[int] = set()
    for index, layer in enumerate(overlap.layers):
        place = f"{subject}.layers[{index}]"
        if layer.layer not in stage.layers:
            raise ConfigError(
                f"{place}.layer", layer.layer, "not a layer of this stage", "move it to the layer's stage"
            )
        if layer.layer in seen:
            raise ConfigError(f"{place}.layer", layer.layer, "stands twice", "remove one")
        if model is not None and layer.layer < model.num_layers and not model.moe_layers[layer.layer]:
            raise ConfigError(f"{place}.layer", layer.layer, "not a mixture-of-experts layer", "remove the entry")
        seen.add(layer.layer)
        _check_layer(layer, stage, place)
    validate_ranges(stage, model, subject)
    validate_slots(stage, model, head_apart, sends, subject)
    _check_stage_sums(overlap, subject)


def _check_limits(stage: StagePlan, subject: str) -> None:
    limits = stage.overlap.search_limits
    if limits is None:
        return
    for field, least in (("max_partitions", 1), ("group_seconds", 0), ("range_limit", 1)):
        value = getattr(limits, field)
        if value < least:
            raise ConfigError(f"{subject}.search_limits.{field}", value, f"must be at least {least}", f"write {least}")
    for index, one in enumerate(limits.lowered):
        place = f"{subject}.search_limits.lowered[{index}]"
        for field in ("first_operator", "last_operator"):
            if parse_operator(getattr(one, field), f"{place}.{field}").layer not in stage.layers:
                rule = "no operator of a layer of this stage"
                raise ConfigError(f"{place}.{field}", getattr(one, field), rule, "name one")
        if not 1 <= one.max_partitions < limits.max_partitions:
            rule = f"must be at least 1 and below the limit of the search ({limits.max_partitions})"
            raise ConfigError(f"{place}.max_partitions", one.max_partitions, rule, "write 1 or remove the entry")


def _check_stage_sums(overlap: StageOverlap, subject: str) -> None:
    """What the layers and the stage say together."""
    deferred = any(layer.weight_gradient_slots for layer in overlap.layers)
    if deferred and overlap.max_deferred_bytes == 0:
        rule = "weight gradients are deferred (weight_gradient_slots)"
        raise ConfigError(f"{subject}.max_deferred_bytes", 0, rule, "allow bytes for them or remove the slots")
    if overlap.max_deferred_bytes > 0 and not deferred:
        rule = "has no effect: no layer has weight_gradient_slots"
        raise ConfigError(f"{subject}.max_deferred_bytes", overlap.max_deferred_bytes, rule, "write 0 or add slots")
    for index, layer in enumerate(overlap.layers):
        crosses, several = layer.mechanism == "cross_micro_batch", overlap.micro_batches_in_flight > 1
        if crosses and not several:
            rule = "mechanism cross_micro_batch needs at least 2 micro-batches in flight"
            raise ConfigError(f"{subject}.micro_batches_in_flight", 1, rule, "write 2 or use another mechanism")
        if several and not crosses and layer.mechanism != "partitioned":
            rule = "with several micro-batches in flight a layer runs among them, in partitions or whole"
            fix = "write cross_micro_batch or partitioned, or 1 micro-batch in flight"
            raise ConfigError(f"{subject}.layers[{index}].mechanism", layer.mechanism, rule, fix)


def _check_layer(layer: LayerOverlap, stage: StagePlan, subject: str) -> None:
    read = FIELDS_OF[layer.mechanism]
    for field in ALL_FIELDS:
        given = getattr(layer, field) is not None
        if given and field not in read:
            rule = f"mechanism {layer.mechanism} does not read it"
            raise ConfigError(f"{subject}.{field}", "", rule, "write null")
        if not given and field in read and field not in OPTIONAL_FIELDS:
            raise ConfigError(f"{subject}.{field}", "null", f"mechanism {layer.mechanism} needs it", "give a value")
    if layer.mechanism != "none" and stage.expert * stage.expert_tensor == 1:
        rule = "nothing to overlap: the stage has one expert rank"
        raise ConfigError(f"{subject}.mechanism", layer.mechanism, rule, "write none")
    if layer.tutel_degree is not None and layer.tutel_degree not in TUTEL_DEGREES:
        raise ConfigError(f"{subject}.tutel_degree", layer.tutel_degree, "must be 1, 2, 4 or 8", "choose one of them")
    if layer.partitions is not None and layer.partitions < 2:
        raise ConfigError(f"{subject}.partitions", layer.partitions, "must be at least 2", "write mechanism none for 1")
    if layer.mechanism == "fused":
        _check_fused(layer, subject)
    if layer.kernel_blocks is not None:
        for field in ("dispatch", "combine"):
            blocks = getattr(layer.kernel_blocks, field)
            if blocks < 1:
                raise ConfigError(f"{subject}.kernel_blocks.{field}", blocks, "must be at least 1", "write 1")


def _check_fused(layer: LayerOverlap, subject: str) -> None:
    """The kernels exchange by themselves, and leave no exchange to compute under."""
    if layer.dispatcher is not None:
        rule = "mechanism fused does not read it: its kernels dispatch"
        raise ConfigError(f"{subject}.dispatcher", layer.dispatcher, rule, "write null")
    if layer.weight_gradient_slots:
        rule = "nothing to compute under: the layer's exchanges run inside its fused kernels"
        fix = "write {} or use slots of other layers"
        raise ConfigError(f"{subject}.weight_gradient_slots", f"({len(layer.weight_gradient_slots)} slots)", rule, fix)
