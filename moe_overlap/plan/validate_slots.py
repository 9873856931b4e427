"""Invariants of weight-gradient slots: a slot is a backward exchange, or the send that ends the backward pass of a chunk; what
runs in it has been saved before."""

from __future__ import annotations

from collections.abc import Sequence

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.operators import (
    ATTENTION,
    BACKWARD,
    DISPATCH,
    EXPERTS,
    HEAD_LOSS,
    MLP,
    SHARED,
    WEIGHT_GRADIENT,
    Operator,
    parse_operator,
)
from moe_overlap.plan.overlap import LayerOverlap
from moe_overlap.plan.plan import StagePlan
from moe_overlap.plan.send_slots import is_send
from moe_overlap.plan.weight_gradients import SLOT_PARTS, gradient_name, split_weights


def validate_slots(
    stage: StagePlan, model: ModelDescription | None, head_apart: bool, sends: Sequence[str], subject: str
) -> None:
    """Check the slots of one stage.

    Args:
        model: None checks what needs no model.
        head_apart: whether the stage ends in a head with a weight of its own, not tied to an embedding of the stage.
        sends: by chunk, the transfer of its input's gradient, or the empty string.
        subject: where the overlap stands, as `plan.json stages[0].overlap`.
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
                if not is_send(operator):
                    _check_order(gradient, operator, subject_of_name)
                if name in placed:
                    raise ConfigError(subject_of_name, name, f"stands already in {placed[name]}", "place it once")
                placed[name] = slot


def _slot(slot: str, layer: LayerOverlap, send: str, subject: str) -> Operator:
    operator = parse_operator(slot, subject)
    if is_send(operator):
        if slot != send:
            rule = f"the chunk of layer {layer.layer} sends its input's gradient {f'by {send}' if send else 'nowhere'}"
            raise ConfigError(subject, "", rule, "write that" if send else "remove the slot")
        return operator
    if operator.part not in SLOT_PARTS or operator.suffix != BACKWARD:
        rule = "a slot is a backward exchange such as L0.moe.dispatch.backward, or the chunk's send of gradients"
        raise ConfigError(subject, "", rule, "name one")
    if operator.layer != layer.layer:
        rule = f"a slot of layer {operator.layer} in the entry of layer {layer.layer}"
        raise ConfigError(subject, "", rule, "move it")
    return operator


def _check_gradient(gradient: Operator, model: ModelDescription | None, subject: str) -> None:
    """The name is that of a weight gradient that the model computes apart."""
    if gradient.suffix != WEIGHT_GRADIENT:
        raise ConfigError(subject, str(gradient), "not a weight gradient", "use a name that ends in .dW")
    if gradient.layer is None and gradient.part != HEAD_LOSS:
        raise ConfigError(subject, str(gradient), "its gradient is not computed apart", "remove it")
    if model is None or (gradient.layer is not None and gradient.layer >= model.num_layers):
        return
    if gradient.layer is not None:
        has_part = gradient.part == ATTENTION or (gradient.part != MLP) == model.moe_layers[gradient.layer]
        if not has_part or (gradient.part == SHARED and model.shared_expert_hidden_size == 0):
            rule = f"layer {gradient.layer} of {model.name} has no such operator"
            raise ConfigError(subject, str(gradient), rule, "remove it")
    weights = split_weights(gradient.part, model)
    if gradient.weight not in weights:
        fix = f"use {' or '.join(gradient_name(gradient.part, weight, gradient.layer) for weight in weights)}"
        raise ConfigError(subject, str(gradient), f"{model.name} computes no such gradient apart", fix)


def _check_chunk(gradient: Operator, layer: int, stage: StagePlan, head_apart: bool, subject: str) -> None:
    """The pass that saves what it is computed from is that of the slot, which stands in the entry of a layer."""
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


def _check_order(gradient: Operator, exchange: Operator, subject: str) -> None:
    """The backward pass that saves what it is computed from runs before the exchange."""
    assert exchange.layer is not None
    if gradient.layer is None:
        return
    same_layer_first = exchange.part == DISPATCH and gradient.part in (EXPERTS, SHARED)
    if gradient.layer < exchange.layer or (gradient.layer == exchange.layer and not same_layer_first):
        rule = "its backward pass has not run when the exchange starts"
        raise ConfigError(subject, str(gradient), rule, "move it to an exchange that starts later")
