"""The ranges of a plan: which operators of every stage run in partitions, from the prices of its instructions.

1. Operators of a chunk are grouped, and ranges of groups priced: forward and backward pass of a micro-batch, what is recomputed
   and weight gradients under exchanges included; one part at its own size, not at its share of the whole.
2. A range may be cut if it holds an exchange, if the plan's rules and the runtime accept it, and if its tensors have axes.
3. The best ranges (partition_range.py) become the plan's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.overlap import Gate, LayerOverlap, LoweredLimit, SearchLimits
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.tuner.search.layer.found_ranges import LoweredRange, StageRanges, with_ranges
from moe_overlap.tuner.search.layer.range_prices import Prices, RangePrices
from moe_overlap.tuner.search.layer.stage_search import HeldBytes, StageSearch


@dataclass(frozen=True, slots=True)
class PartitionedPlan:
    """A plan with its ranges, and what was found for each stage."""

    plan: Plan
    stages: tuple[StageRanges, ...]


def partition_ranges(
    plan: Plan,
    model: ModelDescription,
    prices: Mapping[int, Prices],
    limits: SearchLimits,
    free_bytes: Sequence[float],
    gate: Gate | None = None,
    held_bytes: HeldBytes | None = None,
) -> PartitionedPlan:
    """Cut the micro-batches of a plan where that is predicted to be shorter.

    Args:
        plan: ranges and other mechanisms of its layers are replaced; gates, dispatchers and slots of weight gradients stay.
        prices: first rank of every stage -> prices of this plan, as `SimulatedStep` has them.
        free_bytes: of a device of every stage, beyond what the plan without ranges holds.
        gate: of the run, for layers to which the plan gives none; None leaves them whole.
        held_bytes: None charges the hidden states twice: what is cut beside its parts, what is joined beside them.
    Raises:
        ConfigError: a limit makes no sense, or micro-batches of the plan are interleaved.
        UndecidedError: the solver of axes ran out of time.
    """
    _check(plan, limits)
    gated = dataclasses.replace(plan, stages=tuple(_with_gate(stage, model, gate) for stage in plan.stages))
    answers, stages = [], []
    for index, stage in enumerate(gated.stages):
        priced = RangePrices(gated, stage, model, prices[stage.devices.ranks[0]])
        search = StageSearch(gated, index, model, priced, limits, free_bytes[index], held_bytes)
        answer = search.solve()
        answers.append(answer)
        # Gates are written down where something is cut.
        said = dataclasses.replace(limits, lowered=tuple(map(_limit, answer.lowered)))
        stages.append(with_ranges(stage if answer.ranges else plan.stages[index], answer.ranges, said))
    return PartitionedPlan(dataclasses.replace(plan, stages=tuple(stages), predicted=None), tuple(answers))


def _with_gate(stage: StagePlan, model: ModelDescription, gate: Gate | None) -> StagePlan:
    """A stage with a gate in every entry, and an entry for every mixture of experts."""
    entries = {one.layer: one for one in stage.overlap.layers}
    experts = (layer for layer in stage.layers if model.moe_layers[layer])
    found = (entries.get(layer, LayerOverlap(layer=layer)) for layer in experts)
    layers = tuple(dataclasses.replace(one, gate=one.gate or gate) for one in found)
    return dataclasses.replace(stage, overlap=dataclasses.replace(stage.overlap, layers=layers))


def _limit(lowered: LoweredRange) -> LoweredLimit:
    return LoweredLimit(
        first_operator=lowered.first_operator,
        last_operator=lowered.last_operator,
        max_partitions=lowered.most_partitions,
    )


def check_limits(limits: SearchLimits) -> None:
    """ConfigError for a limit that makes no sense."""
    for flag, value, least in (
        ("--overlap-max-partitions", limits.max_partitions, 1),
        ("--overlap-group-seconds", limits.group_seconds, 0),
        ("--overlap-range-limit", limits.range_limit, 1),
    ):
        if not least <= value < math.inf:
            raise ConfigError(flag, value, f"must be at least {least} and finite", f"use {least}")


def _check(plan: Plan, limits: SearchLimits) -> None:
    check_limits(limits)
    for index, stage in enumerate(plan.stages):
        if stage.overlap.micro_batches_in_flight > 1:
            rule = "ranges are priced for one micro-batch after the other"
            subject = f"plan stages[{index}].overlap.micro_batches_in_flight"
            raise ConfigError(subject, stage.overlap.micro_batches_in_flight, rule, "write 1")
