"""Seconds of ranges of one stage: every operator at the size of a part, each pipeline simulated once.

What cuts the hidden states that enter a pipeline, and joins those that leave it, reads and writes them once and takes a kernel
for every part. Equal pipelines, those of repeated layers, are simulated once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import payload
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.weight_gradients import backward_of
from moe_overlap.tuner.cost.interference import Interference
from moe_overlap.tuner.cost.predict import Machine
from moe_overlap.tuner.cost.simulate import BETWEEN_DEVICES, COMPUTING
from moe_overlap.tuner.search.layer.chunk_order import Step, gap_to_best, pipeline_seconds
from moe_overlap.tuner.search.layer.chunk_passes import Pipeline

Priced = tuple[tuple[Step, ...], tuple[float, ...], int]
"""Steps of a pipeline, seconds of a part of each, parts: all that its time depends on."""


class Prices(Protocol):
    """Of the operators of one stage: instruction_seconds.StagePrices, once it has read the stage's list."""

    @property
    def machine(self) -> Machine: ...
    @property
    def slowed(self) -> Interference: ...
    def piece_seconds(self, name: str, pieces: int) -> float: ...


class RangePrices:
    """Prices of the ranges of one stage.

    Attributes:
        hidden_bytes: of the hidden states between operators.
    """

    def __init__(self, plan: Plan, stage: StagePlan, model: ModelDescription, prices: Prices) -> None:
        self.hidden_bytes = payload.boundary_bytes(plan, stage, model)
        self._prices = prices
        together = (COMPUTING, BETWEEN_DEVICES)
        self._slowdown = sum(prices.slowed.factor(stream, together) for stream in together) / 2.0 - 1.0
        self._pieces: dict[tuple[str, int], float] = {}
        self._simulated: dict[Priced, float] = {}
        self._gaps: dict[Priced, float | None] = {}

    @property
    def simulated(self) -> int:
        """Pipelines so far, equal ones counted once."""
        return len(self._simulated)

    def operator_seconds(self, name: str, pieces: int = 1) -> float:
        """Of one of so many pieces of an operator."""
        key = name, pieces
        if key not in self._pieces:
            self._pieces[key] = self._prices.piece_seconds(name, pieces)
        return self._pieces[key]

    def seconds(self, pipelines: Iterable[Pipeline], parts: int) -> float:
        """P of a range."""
        return sum(self._simulate(self._price(one, parts)) for one in pipelines)

    def order_gap(self, pipeline: Pipeline, parts: int) -> float | None:
        """How much longer it takes than in the best order, as a share; None where there are too many orders."""
        priced = self._price(pipeline, parts)
        if priced not in self._gaps:
            self._gaps[priced] = gap_to_best(*priced)
        return self._gaps[priced]

    def _price(self, pipeline: Pipeline, parts: int) -> Priced:
        named = tuple(zip(pipeline.names, pipeline.steps, strict=True))
        cut = {name for name, step in named if not step.whole}

        def seconds(name: str, whole: bool) -> float:
            if whole and backward_of(name) in cut:  # a weight gradient runs whole, but as a product for each part
                return parts * self.operator_seconds(name, parts)
            return self.operator_seconds(name, 1 if whole else parts)

        return pipeline.steps, tuple(seconds(name, step.whole) for name, step in named), parts

    def _simulate(self, priced: Priced) -> float:
        if priced not in self._simulated:
            edge = self._edge_seconds(priced[2])
            self._simulated[priced] = pipeline_seconds(*priced, self._slowdown, edge, edge)
        return self._simulated[priced]

    def _edge_seconds(self, parts: int) -> float:
        """What cuts, or joins, the hidden states."""
        if parts == 1:
            return 0.0
        machine = self._prices.machine
        rate = machine.cluster.group_of(0).gpu.memory_gb_per_s * 1e9 * machine.constants.memory
        return 2.0 * self.hidden_bytes / rate + parts * machine.constants.kernel_seconds
