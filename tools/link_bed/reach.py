"""Ranges of any number of operators around a MoE layer: the horizontal axis of Lancet's figure 6.

Reach n: the mixture of experts with up to n operators before it and up to n behind it. An operator is an attention or a dense
MLP. A range ends at its neighbours' mixtures of experts and at its chunk; where two ranges meet, what lies between them
belongs to the later one first, and both become one pipeline.
"""

from __future__ import annotations

import dataclasses

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.operators import ATTENTION, EXPERTS, GATE, MERGE, MLP, layer_operator
from moe_overlap.plan.overlap import LayerOverlap
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.ranges import Place, needs_whole_batch


def reaching(plan: Plan, model: ModelDescription, reach: int) -> Plan:
    """The plan with the ranges of all its partitioned layers replaced.

    Args:
        reach: most operators on each side.
    """
    return dataclasses.replace(plan, stages=tuple(_stage(stage, model, reach) for stage in plan.stages))


def _stage(stage: StagePlan, model: ModelDescription, reach: int) -> StagePlan:
    layers = {layer.layer: layer for layer in stage.overlap.layers}
    for chunk in stage.chunks:
        places = [(n, part) for n in range(*chunk) for part in (ATTENTION, EXPERTS if model.moe_layers[n] else MLP)]
        taken: set[Place] = set()
        cut = [n for n in range(*chunk) if n in layers and layers[n].mechanism == "partitioned"]
        for number in reversed(cut):
            at = places.index((number, EXPERTS))
            before = 0 if needs_whole_batch(layers[number]) else _free(places[:at][::-1], reach, taken)
            behind = _free(places[at + 1 :], reach, taken)
            taken.update(places[at - before : at + behind + 1])
            layers[number] = _range(layers[number], places[at - before], places[at + behind])
    overlap = dataclasses.replace(stage.overlap, layers=tuple(layers.values()))
    return dataclasses.replace(stage, overlap=overlap)


def _free(places: list[Place], reach: int, taken: set[Place]) -> int:
    """How many of the next operators can be had, up to `reach`."""
    count = 0
    for place in places[:reach]:
        if place in taken or place[1] == EXPERTS:
            break
        count += 1
    return count


def _range(layer: LayerOverlap, first: Place, last: Place) -> LayerOverlap:
    begins = layer_operator(first[0], GATE if first[1] == EXPERTS else first[1])
    ends = layer_operator(last[0], MERGE if last[1] == EXPERTS else last[1])
    return dataclasses.replace(layer, first_operator=begins, last_operator=ends)
