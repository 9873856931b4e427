"""Seconds and bytes of a uniform layout under many memory choices at once.

1. The parts of the model are priced for the ranks and the micro-batch of a layout (`PricedParts`); layouts that differ only in
   their pipelines share the prices.
2. `UniformCosts.evaluate` counts the parts of every stage under every choice of recomputation (stage_shapes.py), prices all
   stages under all strategies by one `StageEvaluator`, and computes their steps by `pipeline_seconds`. The numbers equal those of
   `analytic.price` for each single plan.

Legend: S stages, N strategies about states, R choices of recomputation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Offload, Plan, StagePlan
from moe_overlap.plan.sizes import boundary_bytes
from moe_overlap.tuner.capture.graph import CapturedModel, CapturedPart
from moe_overlap.tuner.cost.analytic import (
    CAPTURED_BYTES,
    Family,
    evaluator_of,
    one_way_seconds,
    setting_of,
)
from moe_overlap.tuner.cost.evaluate import StageCosts, StageShapes
from moe_overlap.tuner.cost.hardware import Features
from moe_overlap.tuner.cost.layer import DevicePart, PartCost, Setting, device_part, launched, overlapped
from moe_overlap.tuner.cost.links import Group, axis_group
from moe_overlap.tuner.cost.machine import Machine
from moe_overlap.tuner.cost.memory import PartBytes, part_bytes
from moe_overlap.tuner.cost.operators import OpTable, tabulate
from moe_overlap.tuner.cost.pipeline import PipelineRules, StageTimes, averaged, in_flight, lone_share, pipeline_seconds
from moe_overlap.tuner.cost.stage import Strategy
from moe_overlap.tuner.cost.uneven_chunks import chunk_seconds, unevenness
from moe_overlap.tuner.search.bounds import pipelined
from moe_overlap.tuner.search.space import ON_HOST, MemoryChoice, SearchSpace, UniformLayout, recompute_of, uniform_plan
from moe_overlap.tuner.search.stage_shapes import PricedParts, StageLot, parts_of

Floats = NDArray[np.float64]
ROUNDED = 1.0 - 1e-9
"""Factor of a bound, which must not exceed the plan's seconds by rounding: it sums in another order."""
SHARES = (0.0, 0.5, 1.0)
"""Searched shares of a state in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UniformTask:
    """A run whose uniform plans are searched.

    Attributes:
        templates: number of tensor ranks -> a plan with model, machines, batch and precision, and its model, whose vocabulary is
            padded to a multiple of the ranks.
        graphs: (plan, model) -> the captured models of the plan's stages.
        space: the free decisions in addition to the layout.
        modules: the sets of modules that may be recomputed.
        load: number of expert ranks -> rows of the busiest rank over the mean.
        averages: True if the objective gives every micro-batch of a stage their mean seconds, as some tuners do; the resulting
            plan is predicted as any other.
        operators: layout -> tables and counts of its model's parts without recomputation, as `PartTables.of`; None: the graphs
            are tabulated.
    """

    templates: Callable[[int], tuple[Plan, ModelDescription]]
    graphs: Callable[[Plan, ModelDescription], Mapping[int, CapturedModel]]
    machine: Machine
    features: Features
    space: SearchSpace
    modules: tuple[tuple[str, ...], ...] = ()
    load: Callable[[int], float] = lambda expert: 1.0
    averages: bool = False
    operators: Callable[[UniformLayout], Sequence[tuple[OpTable, int]] | None] = lambda layout: None

    def machine_of(self, layout: UniformLayout) -> Machine:
        """The machine with the load of a layout's busiest expert rank."""
        return replace(self.machine, load=self.load(layout.expert))


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """All memory choices of one layout, with their steps and bytes."""

    layout: UniformLayout
    choices: tuple[tuple[MemoryChoice, ...], ...]
    """[N][R]"""
    seconds: Floats
    """[N, R] seconds of a step."""
    needed_bytes: Floats
    """[N, R] bytes of the fullest stage, without fragmentation."""


class UniformCosts:
    """Prices of the layouts of a task, with caches of everything that layouts share."""

    def __init__(self, task: UniformTask, like: UniformCosts | None = None) -> None:
        """Costs of a task.

        Args:
            like: costs of a task that differs only in host work and in the overlap of micro-batches; both share graphs, sizes
                and device seconds.
        """
        self.task = task
        self.stages_priced = 0
        """Number of priced stages: stages × strategies × choices of recomputation."""
        self.strategies: list[tuple[int, Offload]] = list(_strategies(task.space))
        """[N] ZeRO levels with shares on the host."""
        self._graphs: dict[tuple[tuple[int, ...], tuple[MemoryChoice, ...]], CapturedModel] = (
            like._graphs if like else {}
        )
        self._tables: dict[tuple[int, int], OpTable] = like._tables if like else {}
        self._sizes: dict[tuple[int, int, float], PartBytes] = like._sizes if like else {}
        self._devices: dict[tuple[object, ...], DevicePart] = like._devices if like else {}
        self._costs: dict[tuple[object, ...], PartCost] = {}
        self._through: dict[tuple[object, ...], list[float]] = {}
        self._prices: dict[tuple[object, ...], PricedParts] = {}

    def step_bound(self, layout: UniformLayout) -> float:
        """Lower bound of the seconds of the layout's plans; tighter and slower than `Bounds.step_seconds` (prices parts)."""
        return pipelined(self.through_seconds(layout), layout, pipeline_sizes(layout, self.task)[-1])

    def through_seconds(self, layout: UniformLayout) -> float:
        """Seconds of a micro-batch through all parts, without recomputation."""
        template, model = self.task.templates(layout.tensor)
        ranks, links = template.world_size // layout.pipeline, self.task.machine.cluster.group_of(0)
        axis = axis_group(ranks // layout.tensor, layout.tensor, template.world_size, links)
        key, pairs = (layout.ranks, layout.micro_batch, _ranks_of(axis)), self.paired_passes(layout)
        if key not in self._through:
            shares = (0.0, 1.0) if pairs else (0.0,)
            self._through[key] = [
                self._through_seconds(layout, template, model, unpaired_share) for unpaired_share in shares
            ]
        # The pipeline determines only the share of unpaired passes, not the seconds of paired and unpaired ones.
        return float(np.interp(lone_share(*pairs), (0.0, 1.0), self._through[key])) if pairs else self._through[key][0]

    def part_table(self, table: OpTable) -> OpTable:
        """The operators of a part that count in `through_seconds`: all of them."""
        return table

    def _through_seconds(
        self, layout: UniformLayout, template: Plan, model: ModelDescription, unpaired_share: float
    ) -> float:
        plan = uniform_plan(template, model.num_layers, layout)
        setting = replace(self._setting(layout, plan, model), unpaired_share=unpaired_share)
        tables = self.task.operators(layout)
        if tables is None:
            graph = self._graph(layout, plan, model, [MemoryChoice()])
            kinds = Counter(("embedding", "head", *graph.layer_kinds, *graph.mtp_kinds))
            parts = [(graph.part(kind, samples=layout.micro_batch), count) for kind, count in kinds.items()]
            tables = [(self._table(part, layout, plan), count) for part, count in parts]
        seconds = (count * self._cost(self.part_table(table), layout, setting).seconds for table, count in tables)
        return ROUNDED * sum(seconds)

    def evaluate(self, layout: UniformLayout, of_modules: bool = False) -> Evaluated:
        """Steps and bytes of a layout under every memory choice.

        Args:
            of_modules: True for the choices that recompute modules; False for those that recompute nothing or complete layers.
        """
        task, (template, model) = self.task, self.task.templates(layout.tensor)
        plan = uniform_plan(template, model.num_layers, layout)
        recomputes = module_choices(task) if of_modules else recompute_choices(task, plan)
        prices, count = self._priced(layout, plan, model, recomputes), plan.stages[0].gradient_accumulation_steps
        lots = prices.lots(plan, recomputes, [self.held(plan, index) for index in range(len(plan.stages))])
        needed: list[Floats] = []
        seconds: dict[int, tuple[StageTimes, Floats]] = {}
        for lot in lots:
            costs, choices = prices.evaluator.costs(lot.all), len(recomputes)
            # Held micro-batches do not change seconds: the first stage of a lot has those of all.
            first = costs.some(slice(0, choices))
            seconds |= dict.fromkeys(lot.stages, (self.times(first, count), first.optimizer_seconds))
            needed.append(needed_bytes(costs).reshape(len(self.strategies), len(lot.stages), choices).max(axis=1))
        self.stages_priced += len(plan.stages) * needed[0].size
        times, optimizer = zip(*(seconds[index] for index in range(len(plan.stages))), strict=True)
        step = pipeline_seconds(
            times,
            optimizer,
            [self.sent_seconds(layout, plan)] * (len(plan.stages) - 1),
            [count] * len(plan.stages),
            replace(self.rules(layout), uneven=_unevenness(prices, lots, layout.virtual, count)),
        )
        return Evaluated(
            layout=layout,
            choices=tuple(
                tuple(replace(choice, zero_level=level, offload=offload) for choice in recomputes)
                for level, offload in self.strategies
            ),
            seconds=np.asarray(step.total),
            needed_bytes=np.max(needed, axis=0),
        )

    def stage_costs(
        self, layout: UniformLayout, plan: Plan, index: int, recomputes: Sequence[MemoryChoice]
    ) -> StageCosts:
        """[N, R] costs of one stage of a plan of the layout, with any chunks.

        Args:
            plan: its recomputation and strategies are not read.
        """
        prices = self._priced(layout, plan, self.task.templates(layout.tensor)[1], recomputes)
        return prices.evaluator.costs(prices.shapes(plan, index, recomputes, self.held(plan, index)))

    def many_stage_costs(
        self,
        layout: UniformLayout,
        places: Sequence[tuple[Plan, int]],
        recomputes: Sequence[Sequence[MemoryChoice]],
        flying: Sequence[int],
    ) -> tuple[list[StageCosts], float]:
        """Costs of many stages of one shape at once, and the bytes that one of them sends.

        Args:
            layout: its pipeline is only a key for the devices of the stages.
            places: each stage as (plan, index), in a plan on all ranks of the run whose stages have its shape; recomputation and
                strategies of the plans are not read.
            recomputes: [places] of [R_i] choices.
            flying: [F] numbers of micro-batches that a stage may hold at once.
        Returns:
            [places] of [N, R_i · F]: R_i columns for the first number of micro-batches, then those for the next.
        """
        # One recomputed layer stands for any number of them.
        prices = self._priced(layout, places[0][0], self.task.templates(layout.tensor)[1], [MemoryChoice(layers=1)])
        lots: dict[object, list[tuple[int, StageShapes]]] = {}
        for place, ((plan, index), choices) in enumerate(zip(places, recomputes, strict=True)):
            shapes = prices.shapes(plan, index, choices, self.held(plan, index))
            key = (shapes.runs, shapes.boundary_bytes)
            lots.setdefault(key, []).append((place, shapes))
        result: list[StageCosts | None] = [None] * len(places)
        for members in lots.values():
            counts = np.concatenate([np.tile(shapes.counts, (1, len(flying))) for _, shapes in members], axis=1)
            held = np.concatenate(
                [np.repeat(np.asarray(flying, float), shapes.counts.shape[1]) for _, shapes in members]
            )
            costs = prices.evaluator.costs(replace(members[0][1], counts=counts, in_flight=held))
            self.stages_priced += costs.forward_seconds.size
            first = 0
            for place, shapes in members:
                columns = slice(first, first + shapes.counts.shape[1] * len(flying))
                result[place], first = costs.some(columns), columns.stop
        return [costs for costs in result if costs is not None], prices.boundary_bytes

    def held(self, plan: Plan, index: int) -> float:
        """Micro-batches whose activations a stage holds at once."""
        stage = plan.stages[index]
        sizes = tuple(end - first for first, end in stage.chunks)
        return in_flight(len(plan.stages), index, stage.gradient_accumulation_steps, sizes)

    def paired_passes(self, layout: UniformLayout) -> tuple[int, int, int] | None:
        """(stages, chunks, micro-batches), which determine the share of unpaired passes; None if all passes are unpaired."""
        return pipeline_sizes(layout, self.task) if self.task.features.overlap_experts else None

    def layer_kinds(self, layout: UniformLayout, plan: Plan) -> tuple[str, ...]:
        """The kind of every layer of the model."""
        return self._priced(layout, plan, self.task.templates(layout.tensor)[1], ()).kinds

    def sent_seconds(self, layout: UniformLayout, plan: Plan) -> float:
        """Seconds of one transfer between two stages."""
        sent = boundary_bytes(plan, plan.stages[0], self.task.templates(layout.tensor)[1])
        return one_way_seconds(plan, sent, self.task.machine_of(layout))

    def rules(self, layout: UniformLayout) -> PipelineRules:
        """The rules of a layout's pipeline."""
        constants = self.task.machine_of(layout).constants
        transfer_slowdown = constants.overlap_slowdown if self.task.features.overlap_transfers else None
        return PipelineRules(virtual=layout.virtual, transfer_slowdown=transfer_slowdown, fixed=constants.step_seconds)

    def times(self, costs: StageCosts, micro_batches: int) -> StageTimes:
        """Seconds of a stage in the objective."""
        times = StageTimes(**costs.times)
        return averaged(times, micro_batches) if self.task.averages else times

    def _priced(
        self, layout: UniformLayout, plan: Plan, model: ModelDescription, recomputes: Sequence[MemoryChoice]
    ) -> PricedParts:
        """The parts of the model at the ranks and the micro-batch of a layout, in the variants of some choices."""
        # One recomputed layer stands for any number of them.
        choices = _variants([MemoryChoice(), *recomputes])
        # Stages with the same number of ranks have the same groups; a single stage reduces over all ranks and sends nothing.
        key = (layout.ranks, layout.pipeline, layout.micro_batch, self.paired_passes(layout), *choices)
        if key not in self._prices:
            graph = self._graph(layout, plan, model, choices)
            setting = self._setting(layout, plan, model)
            named = list(parts_of(graph, plan, layout.micro_batch))
            parts = [part for _, part in named]
            tables = [self._table(part, layout, plan) for part in parts]
            sizes = [self._bytes(part, layout, plan) for part in parts]
            family = _family_of(plan, model, tables, sizes)
            evaluator = evaluator_of(
                family,
                [self._cost(table, layout, setting) for table in tables],
                setting,
                self.task.machine_of(layout),
                _strategy(plan.stages[0], self.strategies),
            )
            self._prices[key] = PricedParts(
                evaluator=evaluator,
                rows={name: row for row, (name, _) in enumerate(named)},
                kinds=graph.layer_kinds,
                predictions=graph.mtp_kinds,
                boundary_bytes=family.boundary_bytes,
                parts=tuple(parts),
            )
        return self._prices[key]

    def _setting(self, layout: UniformLayout, plan: Plan, model: ModelDescription) -> Setting:
        return setting_of(plan, model, plan.stages[0], self.task.machine_of(layout), self.task.features)

    def _graph(
        self, layout: UniformLayout, plan: Plan, model: ModelDescription, choices: Sequence[MemoryChoice]
    ) -> CapturedModel:
        """The captured parts of a layout's ranks in the variants of some choices of recomputation."""
        key = (layout.ranks, tuple(choices))
        if key not in self._graphs:
            captured = [self.task.graphs(variant, model)[0] for variant in _variant_plans(plan, choices)]
            parts = {(part.kind, part.variant, part.one_sample): part for graph in captured for part in graph.parts}
            self._graphs[key] = replace(captured[0], parts=tuple(parts.values()))
        return self._graphs[key]

    def _cost(self, table: OpTable, layout: UniformLayout, setting: Setting) -> PartCost:
        """Seconds of a part. Ranks that share states count by the links of their transfers, which slow computation down."""
        groups, axes = setting.groups, {collective.axis for _, collective, _ in table.collectives}
        # Only the axes of the part's own collectives are in the key.
        sent, replicas = tuple((axis, _ranks_of(groups[axis])) for axis in sorted(axes)), groups["dp_cp"]
        key = (id(table), setting.load, replicas.nodes, min(replicas.per_node, replicas.size), sent)
        if key not in self._costs:
            if key not in self._devices:
                self._devices[key] = device_part(table, setting)
            self._costs[key] = launched(self._devices[key], table, setting)
        if not self.task.features.overlap_experts:
            return self._costs[key]
        # The share of unpaired passes depends on the pipeline; the seconds of a pass do not.
        paired = (*key, setting.unpaired_share)
        if paired not in self._costs:
            self._costs[paired] = overlapped(self._costs[key], setting)
        return self._costs[paired]

    def _table(self, part: CapturedPart, layout: UniformLayout, plan: Plan) -> OpTable:
        key = (id(part), layout.micro_batch)
        if key not in self._tables:
            self._tables[key] = tabulate(part, layout.micro_batch, plan.sequence_length)
        return self._tables[key]

    def _bytes(self, part: CapturedPart, layout: UniformLayout, plan: Plan) -> PartBytes:
        load = self.task.load(layout.expert)
        key = (id(part), layout.micro_batch, load)
        if key not in self._sizes:
            samples, length, features = layout.micro_batch, plan.sequence_length, self.task.features
            captured = CAPTURED_BYTES.get(plan.precision, 2.0)
            table = self._table(part, layout, plan)
            self._sizes[key] = part_bytes(table, samples, length, captured, features, load)
        return self._sizes[key]


def _ranks_of(group: Group) -> tuple[int, int, int]:
    """Key of a group within one cluster; hashing a group with its links takes many times as long."""
    return group.size, group.per_domain, group.per_node


def recompute_choices(task: UniformTask, plan: Plan) -> list[MemoryChoice]:
    """[R] No recomputation, and that of complete layers of every chunk: from 1 to those of the shortest chunk, and all."""
    # megatron-core refuses recomputation of complete layers together with its overlap of two micro-batches.
    if not task.space.recomputes or task.features.overlap_experts:
        return [MemoryChoice()]
    sizes = {last - first for stage in plan.stages for first, last in stage.chunks if last > first}
    every = [MemoryChoice(every_layer=True)] if len(sizes) > 1 else []
    most = min(sizes, default=0)
    if task.space.all_layers:
        return [MemoryChoice(), *(every or [MemoryChoice(layers=most)])]
    return [*(MemoryChoice(layers=layers) for layers in range(most + 1)), *every]


def _variants(choices: Sequence[MemoryChoice]) -> list[MemoryChoice]:
    """The choices reduced to the recomputation of a single layer, without repetition.

    Any number of recomputed layers needs the same captured parts; multi-token-prediction layers are captured in all variants.
    """
    again = (
        replace(choice, layers=int(choice.layers > 0 or choice.every_layer), every_layer=False) for choice in choices
    )
    return list(dict.fromkeys(again))


def module_choices(task: UniformTask) -> list[MemoryChoice]:
    """[R] The choices that recompute a set of modules."""
    return [MemoryChoice(modules=modules) for modules in task.modules]


def variant_plans(task: UniformTask, plan: Plan) -> Iterator[Plan]:
    """One-stage plans whose graphs together contain every variant of recomputation at the ranks of a plan."""
    return _variant_plans(plan, _variants([*recompute_choices(task, plan), *module_choices(task)]))


def _variant_plans(plan: Plan, choices: Sequence[MemoryChoice]) -> Iterator[Plan]:
    """A one-stage plan for every choice of recomputation."""
    stage = plan.stages[0]
    last = max(last for stage in plan.stages for _, last in stage.chunks)
    one_stage = replace(plan, stages=(replace(stage, chunks=((0, last),)),), loss_stage=0)
    one_stage = replace(one_stage, mtp_stage=None if plan.mtp_stage is None else 0)
    for choice in choices:
        yield replace(one_stage, stages=(replace(one_stage.stages[0], recompute=recompute_of(choice, ((0, last),))),))


def _family_of(plan: Plan, model: ModelDescription, tables: Sequence[OpTable], sizes: Sequence[PartBytes]) -> Family:
    """A family of the given parts without any stage."""
    nothing = np.zeros(0)
    return Family(
        stage=plan.stages[0],
        stages=(),
        tables=tuple(tables),
        sizes=tuple(sizes),
        counts=np.zeros((len(tables), 0)),
        in_flight=nothing,
        parts=(),
        boundary_bytes=float(boundary_bytes(plan, plan.stages[0], model)),
    )


def _strategies(space: SearchSpace) -> Iterator[tuple[int, Offload]]:
    """[N] ZeRO levels with offloaded shares."""
    shares = [SHARES if name in space.offloads else (0.0,) for name in ON_HOST]
    for level in space.zero_levels:
        for of_each in product(*shares):
            yield level, Offload(**dict(zip(ON_HOST, of_each, strict=True)))


def _strategy(stage: StagePlan, strategies: Sequence[tuple[int, Offload]]) -> Strategy:
    return _strategy_arrays(strategies, stage.data * stage.context, stage.expert_data)


def _strategy_arrays(
    strategies: Sequence[tuple[int, Offload]], data: float = 1.0, expert_data: float = 1.0
) -> Strategy:
    ones = np.ones(len(strategies))
    offloads = [offload for _, offload in strategies]
    return Strategy(
        data=ones * data,
        expert_data=ones * expert_data,
        zero_level=np.array([float(level) for level, _ in strategies]),
        offload_weights=np.array([offload.weights for offload in offloads]),
        offload_gradients=np.array([offload.gradients for offload in offloads]),
        offload_optimizer=np.array([offload.optimizer for offload in offloads]),
        offload_activations=np.array([offload.activations for offload in offloads]),
    )


def _unevenness(prices: PricedParts, lots: Sequence[StageLot], virtual: int, micro_batches: int) -> Floats | float:
    """[R] Factor by which a step is longer because its chunks differ.

    Args:
        lots: all stages of a pipeline.
        virtual: number of chunks per stage.
    """
    if virtual == 1:
        return 1.0
    chunks: dict[int, Floats] = {}
    for lot in lots:
        of_one = chunk_seconds(lot.shape.runs, lot.shape.counts, prices.evaluator.pass_seconds, virtual)
        chunks.update(dict.fromkeys(lot.stages, of_one))
    return unevenness([chunks[index] for index in range(len(chunks))], micro_batches)


def pipeline_sizes(layout: UniformLayout, task: UniformTask) -> tuple[int, int, int]:
    """(stages, model chunks per stage, micro-batches of a step), which determine the share of unpaired passes."""
    template, _ = task.templates(layout.tensor)
    data = template.world_size // (layout.tensor * layout.context * layout.pipeline)
    return layout.pipeline, layout.virtual, template.global_batch_size // (data * layout.micro_batch)


def needed_bytes(costs: StageCosts) -> Floats:
    """[N, R] peak bytes without fragmentation."""
    return costs.peak_bytes - costs.peaks["fragmentation"]
