"""Invariants of a stage's overlap: of its layers' mechanisms, ranges and weight-gradient slots.

Fields (`validate_overlap`). A field that its mechanism does not read is refused, not ignored.

Ranges (`validate_ranges`). A range of operators that run in partitions stays in one chunk and contains the all-to-alls of its
layer. A range that is cut along the batch contains all or nothing of each layer's mixture of experts: between gate and merge rows
are ordered by expert, so a range cannot begin or end there and still separate samples (Lancet, section 5.2). Ranges do not
overlap.

Slots (`validate_slots`). A weight-gradient slot is a backward all-to-all, or the send that ends the backward pass of a chunk. The
operands of a weight gradient are saved before its slot.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import operators
from moe_overlap.plan.lowering.deferral import SLOT_PARTS, gradient_name, is_send, split_weights
from moe_overlap.plan.operators import (
    ATTENTION,
    BACKWARD,
    COMBINE,
    DISPATCH,
    EXPERTS,
    GATE,
    HEAD_LOSS,
    MERGE,
    MLP,
    SHARED,
    WEIGHT_GRADIENT,
    OperatorId,
    layer_operator,
    parse_operator,
)
from moe_overlap.plan.overlap import (
    TUTEL_DEGREES,
    LayerOverlap,
    Mechanism,
    StageOverlap,
    needs_whole_batch,
    order_of,
    part_order,
    range_ends,
)
from moe_overlap.plan.plan import StagePlan


def validate_ranges(stage: StagePlan, model: ModelDescription | None, subject: str) -> None:
    """Check the partitioned layers of one stage.

    Args:
        model: None skips the invariants that need a model.
        subject: the path of the overlap, such as `plan.json stages[0].overlap`.
    Raises:
        ConfigError: for the first invariant that does not hold.
    """
    for index, layer in enumerate(stage.overlap.layers):
        if layer.mechanism == "partitioned":
            _check_range(layer, stage, model, f"{subject}.layers[{index}]")
    _check_neighbours(stage, subject)


def _check_range(layer: LayerOverlap, stage: StagePlan, model: ModelDescription | None, subject: str) -> None:
    chunk = next(layers for layers in stage.chunks if layers[0] <= layer.layer < layers[1])
    for field in ("first_operator", "last_operator"):
        _check_end(getattr(layer, field), field, layer, chunk, model, stage, subject)
    first, last = range_ends(layer)
    # Capacity chunks cut the rows of every expert and need not separate samples: dispatch to combine is enough.
    outer = (GATE, MERGE) if layer.axis == "batch" else (DISPATCH, COMBINE)
    if order_of(first) > (layer.layer, part_order(outer[0])):
        rule = f"the range must begin at L{layer.layer}.{outer[0]} or earlier"
        raise ConfigError(f"{subject}.first_operator", layer.first_operator, rule, "begin earlier")
    if order_of(last) < (layer.layer, part_order(outer[1])):
        rule = f"the range must end at L{layer.layer}.{outer[1]} or later"
        raise ConfigError(f"{subject}.last_operator", layer.last_operator, rule, "end later")
    if needs_whole_batch(layer) and str(first) != layer_operator(layer.layer, GATE):
        rule = f"the gate {layer.gate} needs the whole micro-batch: nothing before it can run in partitions"
        fix = f"begin at L{layer.layer}.{GATE} or choose another gate"
        raise ConfigError(f"{subject}.first_operator", layer.first_operator, rule, fix)
    if layer.axis == "batch":
        _check_divides(layer, stage, subject)


def _check_end(
    name: str,
    field: str,
    layer: LayerOverlap,
    chunk: tuple[int, int],
    model: ModelDescription | None,
    stage: StagePlan,
    subject: str,
) -> None:
    """Check that an end of a range is a forward operator of the chunk, not inside another layer's mixture of experts."""
    operator = parse_operator(name, f"{subject}.{field}")
    if operator.layer is None or operator.phase:
        raise ConfigError(f"{subject}.{field}", name, "a range runs between forward operators of layers", "name one")
    if not chunk[0] <= operator.layer < chunk[1]:
        rule = f"layer {operator.layer} is not in the chunk of layer {layer.layer}"
        raise ConfigError(f"{subject}.{field}", name, rule, f"stay in layers {chunk[0]} to {chunk[1] - 1}")
    if model is not None and operator.layer < model.num_layers:
        _check_exists(operator, model, stage, f"{subject}.{field}")
    before, allowed = (GATE, "begin") if field == "first_operator" else (MERGE, "end")
    inside = operator.kind in operators.MOE_PARTS and part_order(GATE) <= part_order(operator.kind)
    if layer.axis == "batch" and operator.layer != layer.layer and inside and operator.kind != before:
        rule = f"the range cuts through the mixture of experts of layer {operator.layer}"
        raise ConfigError(f"{subject}.{field}", name, rule, f"{allowed} at L{operator.layer}.{before}")


def _check_exists(operator: OperatorId, model: ModelDescription, stage: StagePlan, subject: str) -> None:
    assert operator.layer is not None
    exchanges = stage.expert * stage.expert_tensor > 1
    moe, shared = model.moe_layers[operator.layer], model.shared_expert_hidden_size > 0
    parts = operators.layer_parts(moe, shared, exchanges)
    if operator.kind not in parts:
        shown = ", ".join(f"L{operator.layer}.{part}" for part in parts)
        raise ConfigError(subject, str(operator), f"{model.name} has no such operator", f"use one of {shown}")


def _check_divides(layer: LayerOverlap, stage: StagePlan, subject: str) -> None:
    assert layer.partitions is not None
    if stage.micro_batch_size % layer.partitions != 0:
        rule, fix = indivisible(stage.micro_batch_size)
        raise ConfigError(f"{subject}.partitions", layer.partitions, rule, fix)


def indivisible(micro_batch_size: int) -> tuple[str, str]:
    """Rule and fix for a number of partitions that does not divide the micro-batch."""
    fits = [str(n) for n in range(2, micro_batch_size + 1) if micro_batch_size % n == 0]
    fix = f"use {' or '.join(fits)}" if fits else "enlarge the micro-batch"
    return f"does not divide the micro-batch of {micro_batch_size}", fix


def _check_neighbours(stage: StagePlan, subject: str) -> None:
    """Check that ranges are disjoint, and that layers inside a range of another layer have mechanism none."""
    layers = stage.overlap.layers
    cut = [index for index, layer in enumerate(layers) if layer.mechanism == "partitioned"]
    ends = {index: [order_of(operator) for operator in range_ends(layers[index])] for index in cut}
    # Ranges sorted by their beginning are disjoint if and only if adjacent ones are.
    cut.sort(key=ends.__getitem__)
    for first, second in zip(cut, cut[1:], strict=False):
        if ends[second][0] <= ends[first][1]:
            place, rule = f"{subject}.layers[{second}].first_operator", f"the range overlaps that of layers[{first}]"
            raise ConfigError(place, layers[second].first_operator, rule, "begin later, or end the other earlier")
    for owner in cut:
        for index, layer in enumerate(layers):
            if index == owner or not ends[owner][0] <= (layer.layer, part_order(GATE)) <= ends[owner][1]:
                continue
            place, rule = f"{subject}.layers[{index}]", f"the layer runs in the partitions of layers[{owner}]"
            if layer.mechanism != "none":
                fix = "write none or end that range before it"
                raise ConfigError(f"{place}.mechanism", layer.mechanism, rule, fix)
            if needs_whole_batch(layer):
                fix = "choose another gate or end that range before it"
                raise ConfigError(f"{place}.gate", layer.gate, f"needs the whole micro-batch, and {rule}", fix)


def validate_slots(
    stage: StagePlan, model: ModelDescription | None, head_apart: bool, sends: Sequence[str], subject: str
) -> None:
    """Check the slots of one stage.

    Args:
        model: None skips the invariants that need a model.
        head_apart: whether the stage ends in a head whose weight is not tied to an embedding of the stage.
        sends: for each chunk the send of its input's gradient, or the empty string.
        subject: the path of the overlap, such as `plan.json stages[0].overlap`.
    Raises:
        ConfigError: for the first invariant that does not hold.
    """
    placed: dict[str, str] = {}
    sent: dict[int, str] = {}
    for number, layer in enumerate(stage.overlap.layers):
        field = f"{subject}.layers[{number}].weight_gradient_slots"
        chunk = next(place for place, (first, last) in enumerate(stage.chunks) if first <= layer.layer < last)
        for slot, names in layer.weight_gradient_slots.items():
            place = f'{field}["{slot}"]'
            operator = _slot(slot, layer, sends[chunk], place)
            # Only one layer of a chunk may have the slot of its send, because its weight gradients need one order.
            if is_send(operator):
                if chunk in sent:
                    raise ConfigError(place, "", f"stands already in {sent[chunk]}, for its chunk", "join them")
                sent[chunk] = f"{subject}.layers[{number}]"
            elif stage.expert * stage.expert_tensor == 1:
                rule = "nothing to compute under: the stage has one expert rank and exchanges nothing"
                raise ConfigError(field, f"({len(layer.weight_gradient_slots)} slots)", rule, "write {}")
            if not names:
                raise ConfigError(place, "[]", "has no effect", "remove the slot or name weight gradients")
            for index, name in enumerate(names):
                subject_of_name = f"{place}[{index}]"
                gradient = parse_operator(name, subject_of_name)
                _check_gradient(gradient, model, subject_of_name)
                _check_chunk(gradient, layer.layer, stage, head_apart, subject_of_name)
                # The send comes after the chunk's whole backward pass, so all operands of the chunk are saved.
                if not is_send(operator):
                    _check_order(gradient, operator, subject_of_name)
                if name in placed:
                    raise ConfigError(subject_of_name, name, f"stands already in {placed[name]}", "place it once")
                placed[name] = slot


def _slot(slot: str, layer: LayerOverlap, send: str, subject: str) -> OperatorId:
    operator = parse_operator(slot, subject)
    if is_send(operator):
        if slot != send:
            rule = f"the chunk of layer {layer.layer} sends its input's gradient {f'by {send}' if send else 'nowhere'}"
            raise ConfigError(subject, "", rule, "write that" if send else "remove the slot")
        return operator
    if operator.kind not in SLOT_PARTS or operator.phase != BACKWARD:
        rule = "a slot is a backward all-to-all such as L0.moe.dispatch.backward, or the chunk's send of gradients"
        raise ConfigError(subject, "", rule, "name one")
    if operator.layer != layer.layer:
        rule = f"a slot of layer {operator.layer} in the entry of layer {layer.layer}"
        raise ConfigError(subject, "", rule, "move it")
    return operator


def _check_gradient(gradient: OperatorId, model: ModelDescription | None, subject: str) -> None:
    """Check that a name belongs to a weight gradient that is a separate operator in this model."""
    if gradient.phase != WEIGHT_GRADIENT:
        raise ConfigError(subject, str(gradient), "not a weight gradient", "use a name that ends in .dW")
    if gradient.layer is None and gradient.kind != HEAD_LOSS:
        raise ConfigError(subject, str(gradient), "its gradient is not computed apart", "remove it")
    if model is None or (gradient.layer is not None and gradient.layer >= model.num_layers):
        return
    if gradient.layer is not None:
        has_part = gradient.kind == ATTENTION or (gradient.kind != MLP) == model.moe_layers[gradient.layer]
        if not has_part or (gradient.kind == SHARED and model.shared_expert_hidden_size == 0):
            rule = f"layer {gradient.layer} of {model.name} has no such operator"
            raise ConfigError(subject, str(gradient), rule, "remove it")
    weights = split_weights(gradient.kind, model)
    if gradient.weight not in weights:
        fix = f"use {' or '.join(gradient_name(gradient.kind, weight, gradient.layer) for weight in weights)}"
        raise ConfigError(subject, str(gradient), f"{model.name} computes no such gradient apart", fix)


def _check_chunk(gradient: OperatorId, layer: int, stage: StagePlan, head_apart: bool, subject: str) -> None:
    """Check that the operands of a weight gradient are saved in the backward pass of the slot's chunk.

    Args:
        layer: the layer whose entry has the slot.
    """
    chunk = next(layers for layers in stage.chunks if layers[0] <= layer < layers[1])
    if gradient.layer is None:
        if not head_apart or chunk != stage.chunks[-1]:
            rule = "no head with a weight of its own ends the chunk of the slot"
            raise ConfigError(subject, str(gradient), rule, "remove it")
        return
    if gradient.layer not in stage.layers:
        raise ConfigError(subject, str(gradient), "not a layer of this stage", "remove it")
    if not chunk[0] <= gradient.layer < chunk[1]:
        rule = f"runs in another pass than layer {layer}: not a layer of its chunk"
        raise ConfigError(subject, str(gradient), rule, "move it to a slot of its own chunk")


def _check_order(gradient: OperatorId, slot: OperatorId, subject: str) -> None:
    """Check that the backward pass that saves the operands of a weight gradient runs before its slot."""
    assert slot.layer is not None
    # The head runs backward before every layer of its chunk.
    if gradient.layer is None:
        return
    # In the slot's own layer, only experts and shared expert run backward
    # before the backward of dispatch, and nothing before that of combine.
    same_layer_first = slot.kind == DISPATCH and gradient.kind in (EXPERTS, SHARED)
    if gradient.layer < slot.layer or (gradient.layer == slot.layer and not same_layer_first):
        rule = "its backward pass has not run when the all-to-all starts"
        raise ConfigError(subject, str(gradient), rule, "move it to an all-to-all that starts later")


FIELDS_OF: dict[Mechanism, tuple[str, ...]] = {
    "none": (),
    "tutel": ("tutel_degree",),
    "partitioned": ("partitions", "first_operator", "last_operator", "axis"),
    "cross_micro_batch": (),
    "fused": ("kernel_blocks",),
}
"""Mechanism -> fields that it reads. All are required except OPTIONAL_FIELDS."""
OPTIONAL_FIELDS = ("kernel_blocks",)
"""Fields for which null means that the runtime chooses the value."""
ALL_FIELDS = ("tutel_degree", "partitions", "first_operator", "last_operator", "axis", "kernel_blocks")


def validate_overlap(
    stage: StagePlan, model: ModelDescription | None, subject: str, sends: Sequence[str], head_apart: bool = False
) -> None:
    """Check the overlap of one stage.

    Args:
        model: None skips the invariants that need a model.
        subject: the path of the overlap, such as `plan.json stages[0].overlap`.
        sends: from `sends_of`.
        head_apart: whether the stage ends in a head whose weight is not tied to an embedding of the stage.
    Raises:
        ConfigError: for the first invariant that does not hold.
    """
    overlap = stage.overlap
    for field, least in (("gradient_chunk_bytes", 0), ("max_deferred_bytes", 0), ("micro_batches_in_flight", 1)):
        if getattr(overlap, field) < least:
            raise ConfigError(
                f"{subject}.{field}", getattr(overlap, field), f"must be at least {least}", f"write {least}"
            )
    for field, rule in (
        ("reduce_at_once", "gradients are reduced at the end of the step (gradient_chunk_bytes 0)"),
        ("overlap_param_gather", "weights are gathered by the parameter groups that gradient_chunk_bytes reduces"),
    ):
        if getattr(overlap, field) and overlap.gradient_chunk_bytes == 0:
            raise ConfigError(f"{subject}.{field}", True, rule, "write false, or the bytes of a reduction")
    if overlap.sends_late and overlap.micro_batches_in_flight == 1:
        rule = "micro-batches run one after the other (micro_batches_in_flight 1)"
        raise ConfigError(f"{subject}.sends_late", True, rule, "write false, or two micro-batches at a time")
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
    # After `_check_layer`: ranges and slots need the fields that it requires.
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
    for index, limit in enumerate(limits.lowered):
        place = f"{subject}.search_limits.lowered[{index}]"
        for field in ("first_operator", "last_operator"):
            if parse_operator(getattr(limit, field), f"{place}.{field}").layer not in stage.layers:
                rule = "no operator of a layer of this stage"
                raise ConfigError(f"{place}.{field}", getattr(limit, field), rule, "name one")
        if not 1 <= limit.max_partitions < limits.max_partitions:
            rule = f"must be at least 1 and below the limit of the search ({limits.max_partitions})"
            raise ConfigError(f"{place}.max_partitions", limit.max_partitions, rule, "write 1 or remove the entry")


def _check_stage_sums(overlap: StageOverlap, subject: str) -> None:
    """Check fields of the stage against those of its layers."""
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
        is_set = getattr(layer, field) is not None
        if is_set and field not in read:
            rule = f"mechanism {layer.mechanism} does not read it"
            raise ConfigError(f"{subject}.{field}", "", rule, "write null")
        if not is_set and field in read and field not in OPTIONAL_FIELDS:
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
    """Check that a fused layer has no dispatcher and no slots: its kernels send tokens and leave no all-to-all to fill."""
    if layer.dispatcher is not None:
        rule = "mechanism fused does not read it: its kernels dispatch"
        raise ConfigError(f"{subject}.dispatcher", layer.dispatcher, rule, "write null")
    if layer.weight_gradient_slots:
        rule = "nothing to compute under: the layer's exchanges run inside its fused kernels"
        fix = "write {} or use slots of other layers"
        raise ConfigError(f"{subject}.weight_gradient_slots", f"({len(layer.weight_gradient_slots)} slots)", rule, fix)
