"""Layers for which one decision serves: the mixture-of-experts layers of a plan in classes, and what plans say about them.

Layers are of one class where all that an overlap sees of them is alike: what they compute and recompute, what stands before and
behind them in their chunk, whether they are the first or the last mixture of experts there, and whether their stage begins or
ends the pipeline, where memory and the head make a difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.operators import ATTENTION, GATE, MERGE, layer_operator
from moe_overlap.plan.overlap import LayerOverlap
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.ranges import order_of, part_order, range_ends
from moe_overlap.tuner.cost.prepare import layer_variant

Kind = tuple[str, ...]
Entries = Mapping[int, LayerOverlap]
"""Layer -> what a plan decides for it."""


@dataclass(frozen=True, slots=True)
class LayerClass:
    """Layers that are alike.

    Attributes:
        name: what they have in common, for a reader.
    """

    name: str
    layers: tuple[int, ...]


def layer_classes(plan: Plan, model: ModelDescription, kinds: Sequence[str]) -> tuple[LayerClass, ...]:
    """The classes, in order of their first layers.

    Args:
        kinds: of every layer, what it computes (`capture/layer_kinds.py`).
    """
    found: dict[Kind, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        of_stage = "first stage" if index == 0 else "last stage" if index == len(plan.stages) - 1 else "inner stage"
        role = of_stage if len(plan.stages) > 1 else ""
        for first, last in stage.chunks:
            experts = [layer for layer in range(first, last) if model.moe_layers[layer]]
            for layer in experts:
                before = "" if layer == first else kinds[layer - 1]
                behind = "" if layer + 1 == last else kinds[layer + 1]
                ends = ("first" if layer == experts[0] else "", "last" if layer == experts[-1] else "")
                again = _recomputed(stage, layer - first)
                found.setdefault((role, kinds[layer], before, behind, *ends, again), []).append(layer)
    return tuple(LayerClass(_name(kind), tuple(layers)) for kind, layers in found.items())


def _recomputed(stage: StagePlan, place: int) -> str:
    """What is recomputed of a layer at a place of its chunk, and where it stands in its group."""
    variant, group = layer_variant(stage, place), stage.recompute.layers
    if stage.recompute.granularity == "uniform" and group > 1:
        return f"recomputed as number {place % group} of {group}"
    return {"none": "", "full": "recomputed"}.get(variant, f"{variant} recomputed")


def _name(kind: Kind) -> str:
    """`inner stage, moe after dense, first`."""
    role, own, before, behind, first, last, again = kind
    neighbours = [f"after {before}"] if before not in ("", own) else []
    neighbours += [f"before {behind}"] if behind not in ("", own) else []
    where = "only" if first and last else first or last or "between"
    shown = [role, " ".join([own, *neighbours]), where, again]
    return ", ".join(word for word in shown if word)


def entries_of(plan: Plan) -> dict[int, LayerOverlap]:
    """What a plan decides, layer by layer: a range over several layers in pieces, one for each.

    Pieces of one range, neighbours with equally many partitions, run as the range does (plan/ranges.py).
    """
    return {layer: entry for stage in plan.stages for layer, entry in _entries_of(stage).items()}


def _entries_of(stage: StagePlan) -> dict[int, LayerOverlap]:
    entries = {one.layer: one for one in stage.overlap.layers}
    for owner in stage.overlap.layers:
        if owner.mechanism != "partitioned" or owner.axis != "batch":
            continue
        end = order_of(range_ends(owner)[1])
        held = [layer for layer in sorted(entries) if owner.layer < layer and (layer, part_order(GATE)) <= end]
        first = owner.first_operator
        for place, layer in enumerate([owner.layer, *held]):
            is_last = place == len(held)
            last = owner.last_operator if is_last else layer_operator(layer, MERGE)
            whole = entries[layer]
            entries[layer] = replace(
                whole,
                mechanism="partitioned",
                partitions=owner.partitions,
                first_operator=first,
                last_operator=last,
                axis=owner.axis,
            )
            first = layer_operator(layer + 1, ATTENTION)
    return entries


def with_entries(plan: Plan, entries: Entries) -> Plan:
    """A plan with other entries, and no prediction; those that say nothing are left out."""
    stages = []
    for stage in plan.stages:
        said = (entries[layer] for layer in stage.layers if layer in entries)
        layers = tuple(one for one in said if one != LayerOverlap(layer=one.layer))
        stages.append(replace(stage, overlap=replace(stage.overlap, layers=layers)))
    return replace(plan, stages=tuple(stages), predicted=None)


def described(entries: Sequence[LayerOverlap]) -> str:
    """`partitioned*4`: mechanism and pieces of layers, each once."""
    words = []
    for one in entries:
        pieces = one.partitions or one.tutel_degree
        words.append(one.mechanism + (f"*{pieces}" if pieces else ""))
    return ", ".join(dict.fromkeys(words))
