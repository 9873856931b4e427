"""Invariants of the ranges of operators that run in partitions.

A range stays in one chunk and holds the exchanges of its layer. Cut along the batch, it holds or leaves out the whole
mixture of experts of every layer: rows that travel are ordered by expert, and can be told apart by sample only between
the gate that ordered them and the merge that puts them back (Lancet, section 5.2). Ranges do not overlap.
"""

from __future__ import annotations

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import operators
from moe_overlap.plan.operators import COMBINE, DISPATCH, GATE, MERGE, Operator, layer_operator, parse_operator
from moe_overlap.plan.overlap import LayerOverlap
from moe_overlap.plan.plan import StagePlan
from moe_overlap.plan.ranges import needs_whole_batch, order_of, part_order, range_ends


def validate_ranges(stage: StagePlan, model: ModelDescription | None, subject: str) -> None:
    """Check the partitioned layers of one stage.

    Args:
        model: None checks what needs no model.
        subject: where the overlap stands, as `plan.json stages[0].overlap`.
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
    """An end is a forward operator of a layer of the chunk, not inside another layer's mixture of experts."""
    operator = parse_operator(name, f"{subject}.{field}")
    if operator.layer is None or operator.suffix:
        raise ConfigError(f"{subject}.{field}", name, "a range runs between forward operators of layers", "name one")
    if not chunk[0] <= operator.layer < chunk[1]:
        rule = f"layer {operator.layer} is not in the chunk of layer {layer.layer}"
        raise ConfigError(f"{subject}.{field}", name, rule, f"stay in layers {chunk[0]} to {chunk[1] - 1}")
    if model is not None and operator.layer < model.num_layers:
        _check_exists(operator, model, stage, f"{subject}.{field}")
    before, allowed = (GATE, "begin") if field == "first_operator" else (MERGE, "end")
    inside = operator.part in operators.MOE_PARTS and part_order(GATE) <= part_order(operator.part)
    if layer.axis == "batch" and operator.layer != layer.layer and inside and operator.part != before:
        rule = f"the range cuts through the mixture of experts of layer {operator.layer}"
        raise ConfigError(f"{subject}.{field}", name, rule, f"{allowed} at L{operator.layer}.{before}")


def _check_exists(operator: Operator, model: ModelDescription, stage: StagePlan, subject: str) -> None:
    assert operator.layer is not None
    exchanges = stage.expert * stage.expert_tensor > 1
    moe, shared = model.moe_layers[operator.layer], model.shared_expert_hidden_size > 0
    parts = operators.layer_parts(moe, shared, exchanges)
    if operator.part not in parts:
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
    """No operator is in two ranges, and no range holds a layer that something else is decided for."""
    layers = stage.overlap.layers
    cut = [index for index, layer in enumerate(layers) if layer.mechanism == "partitioned"]
    ends = {index: [order_of(operator) for operator in range_ends(layers[index])] for index in cut}
    cut.sort(key=ends.__getitem__)
    for before, behind in zip(cut, cut[1:], strict=False):
        if ends[behind][0] <= ends[before][1]:
            place, rule = f"{subject}.layers[{behind}].first_operator", f"the range overlaps that of layers[{before}]"
            raise ConfigError(place, layers[behind].first_operator, rule, "begin later, or end the other earlier")
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
