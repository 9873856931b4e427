"""Seconds and bytes of a uniform layout under many decisions about memory at once.

1. The parts of the model are priced for the ranks and the micro-batch of a layout (`_Prices`); layouts that differ in their
   pipelines only share them.
2. `UniformCosts.evaluate` counts the parts of every stage under every choice of recomputation, prices all stages under all
   strategies by one `StageEvaluator`, and makes steps of them by `pipeline_seconds`: the numbers are those of `analytic.price`
   for each plan alone.

Legend: S stages, N strategies about states, R choices of recomputation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product

import numpy as np
from numpy.typing import NDArray

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Offload, Plan, StagePlan
from moe_overlap.plan.sizes import boundary_bytes
from moe_overlap.tuner.capture.graph import CapturedModel, Part
from moe_overlap.tuner.cost.analytic import (
    CAPTURED_BYTES,
    WORDS,
    Family,
    cost_of,
    evaluator_of,
    holding_words,
    one_way_seconds,
    setting_of,
)
from moe_overlap.tuner.cost.evaluate import PlayKey, StageCosts, StageEvaluator, StageShapes, play_together
from moe_overlap.tuner.cost.hardware import Features
from moe_overlap.tuner.cost.interference import Interference
from moe_overlap.tuner.cost.layer import PartCost, Setting
from moe_overlap.tuner.cost.links import axis_group
from moe_overlap.tuner.cost.machine import Machine
from moe_overlap.tuner.cost.memory import PartBytes, part_bytes
from moe_overlap.tuner.cost.operators import OpTable, tabulate
from moe_overlap.tuner.cost.pipeline import PipelineRules, StageTimes, in_flight, pipeline_seconds
from moe_overlap.tuner.cost.slots import Part as StagePart
from moe_overlap.tuner.cost.stage import Strategy, is_decoupled
from moe_overlap.tuner.cost.uneven_chunks import chunk_seconds, unevenness
from moe_overlap.tuner.search.bounds import pipelined
from moe_overlap.tuner.search.space import ON_HOST, MemoryChoice, SearchSpace, UniformLayout, recompute_of, uniform_plan

Floats = NDArray[np.float64]
ROUNDED = 1.0 - 1e-9
"""Factor of a bound whose sizes are computed in another order than those of the plan, which rounding must not put above it."""
StagePlace = tuple[UniformLayout, Plan, int, Sequence[MemoryChoice]]
"""A stage of a plan of a layout, by its index, with choices of recomputation."""
SHARES = (0.0, 0.5, 1.0)
"""Shares of a state that may wait in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UniformTask:
    """A run whose uniform plans are searched.

    Attributes:
        templates: number of tensor ranks -> a plan that names model, machines, batch and precision, and its model: the rows of a
            vocabulary are padded to a multiple of the ranks.
        graphs: the captured models of the stages of a plan.
        space: what is free beside the layout.
        modules: the sets of modules that may be recomputed.
        load: expert ranks -> rows of the busiest of them over the mean.
        averages: whether the objective takes all micro-batches of a stage for their mean, as tuners do that tell none from
            another; what it decides is then predicted as everything is.
        operators: a layout -> its model's parts without recomputation, as `PartTables.of`; default none, and graphs are asked.
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
    """Every decision about the memory of one layout."""

    layout: UniformLayout
    choices: tuple[tuple[MemoryChoice, ...], ...]
    """[N][R]"""
    seconds: Floats
    """[N, R] of a step."""
    needed_bytes: Floats
    """[N, R] of the fullest stage, without what the allocator reserves in vain."""


class UniformCosts:
    """Prices layouts of a task, and remembers what they share."""

    def __init__(self, task: UniformTask) -> None:
        self.task = task
        self.stages_priced = 0
        """Complete stages that were priced: stages by strategies by choices of recomputation."""
        self.strategies: list[tuple[int, Offload]] = list(_strategies(task.space))
        """[N] ZeRO levels with shares on the host."""
        self._graphs: dict[tuple[tuple[int, ...], tuple[MemoryChoice, ...]], CapturedModel] = {}
        self._tables: dict[tuple[int, int], OpTable] = {}
        self._sizes: dict[tuple[int, int, int], PartBytes] = {}
        self._costs: dict[tuple[object, ...], PartCost] = {}
        self._through: dict[tuple[object, ...], float] = {}
        self._prices: dict[tuple[object, ...], _Prices] = {}

    def step_bound(self, layout: UniformLayout) -> float:
        """Seconds that no plan of the layout stays below: all stages compute what is least of every part.

        Tighter than `Bounds.step_seconds`, and dearer: the parts are priced, but no stage is.
        """
        template, _ = self.task.templates(layout.tensor)
        data = template.world_size // (layout.tensor * layout.context * layout.pipeline)
        count = template.global_batch_size // (data * layout.micro_batch)
        return pipelined(self.through_seconds(layout), layout, count)

    def through_seconds(self, layout: UniformLayout) -> float:
        """Seconds of a micro-batch through all parts, of which nothing is recomputed."""
        template, model = self.task.templates(layout.tensor)
        ranks, links = template.world_size // layout.pipeline, self.task.machine.cluster.group_of(0)
        key = (
            layout.ranks,
            layout.micro_batch,
            axis_group(ranks // layout.tensor, layout.tensor, template.world_size, links),
        )
        if key not in self._through:
            self._through[key] = self._through_seconds(layout, template, model)
        return self._through[key]

    def part_table(self, table: OpTable) -> OpTable:
        """The operators of a part that count in `through_seconds`: all of them."""
        return table

    def _through_seconds(self, layout: UniformLayout, template: Plan, model: ModelDescription) -> float:
        plan = uniform_plan(template, model.num_layers, layout)
        setting, tables = self._setting(layout, plan, model), self.task.operators(layout)
        if tables is None:
            graph = self._graph(layout, plan, model, [MemoryChoice()])
            kinds = Counter(("embedding", "head", *graph.layer_kinds, *graph.mtp_kinds))
            parts = [(graph.part(kind, samples=layout.micro_batch), count) for kind, count in kinds.items()]
            tables = [(self._table(part, layout, plan), count) for part, count in parts]
        seconds = (count * self._cost(self.part_table(table), layout, setting).seconds for table, count in tables)
        return ROUNDED * sum(seconds)

    def evaluate(self, layout: UniformLayout, of_modules: bool = False) -> Evaluated:
        """Steps and bytes of a layout under every decision about memory.

        Args:
            of_modules: modules are recomputed; else nothing or whole layers.
        """
        task, (template, model) = self.task, self.task.templates(layout.tensor)
        plan = uniform_plan(template, model.num_layers, layout)
        recomputes = module_choices(task) if of_modules else recompute_choices(task, plan)
        costs = self._all_stages(layout, plan, recomputes)
        self.stages_priced += len(plan.stages) * costs[0].forward_seconds.size
        counts = [stage.gradient_accumulation_steps for stage in plan.stages]
        step = pipeline_seconds(
            [self.times(cost, count) for cost, count in zip(costs, counts, strict=True)],
            [cost.optimizer_seconds for cost in costs],
            [self.sent_seconds(layout, plan)] * (len(plan.stages) - 1),
            counts,
            replace(self.rules(layout), uneven=self._unevenness(layout, plan, recomputes)),
        )
        return Evaluated(
            layout=layout,
            choices=tuple(
                tuple(replace(choice, zero_level=level, offload=offload) for choice in recomputes)
                for level, offload in self.strategies
            ),
            seconds=np.asarray(step.total),
            needed_bytes=np.max([needed_bytes(cost) for cost in costs], axis=0),
        )

    @property
    def plays(self) -> bool:
        """Whether some strategy's stages are played: pricing them takes long, and less for many layouts at once."""
        return bool(is_decoupled(_strategy_arrays(self.strategies)).any())

    def play_ahead(self, layouts: Sequence[UniformLayout]) -> None:
        """Play the stages of several layouts in one go; `evaluate` of each then plays nothing."""
        places: list[StagePlace] = []
        for layout in layouts:
            template, model = self.task.templates(layout.tensor)
            plan = uniform_plan(template, model.num_layers, layout)
            choices = recompute_choices(self.task, plan)
            places += [(layout, plan, index, choices) for index in range(len(plan.stages))]
        self.play_stages(places)

    def play_stages(self, places: Sequence[StagePlace]) -> None:
        """The same of single stages, each with what `stage_costs` will be asked for."""
        wanted: dict[StageEvaluator, dict[PlayKey, None]] = {}
        for layout, plan, index, recomputes in places:
            prices = self._priced(layout, plan, self.task.templates(layout.tensor)[1], recomputes)
            keys = prices.evaluator.unplayed(_shapes(prices, plan, index, recomputes, self.held(plan, index)))
            wanted.setdefault(prices.evaluator, {}).update(dict.fromkeys(keys))
        play_together([(evaluator, [*keys]) for evaluator, keys in wanted.items()])

    def stage_costs(
        self, layout: UniformLayout, plan: Plan, index: int, recomputes: Sequence[MemoryChoice]
    ) -> StageCosts:
        """[N, R] costs of one stage of a plan of the layout, whose chunks may be any.

        Args:
            plan: what it says of recomputation and of states is not looked at.
        """
        prices = self._priced(layout, plan, self.task.templates(layout.tensor)[1], recomputes)
        return prices.evaluator.costs(_shapes(prices, plan, index, recomputes, self.held(plan, index)))

    def many_stage_costs(
        self,
        layout: UniformLayout,
        places: Sequence[tuple[Plan, int]],
        recomputes: Sequence[Sequence[MemoryChoice]],
        flying: Sequence[int],
    ) -> tuple[list[StageCosts], float]:
        """Costs of many stages of one shape at once, and the bytes that one of them sends.

        Args:
            layout: its pipeline is only a name for the devices of the stages.
            places: each stage in a plan of the ranks of the run, whose stages have its shape; what the plans say of
                recomputation and of states is not looked at.
            recomputes: [places] of [R_i] choices.
            flying: [F] micro-batches that a stage may hold at once.
        Returns:
            [places] of [N, R_i · F]: all of the first number, then those of the next.
        """
        # One recomputed layer stands for any number of them.
        prices = self._priced(layout, places[0][0], self.task.templates(layout.tensor)[1], [MemoryChoice(layers=1)])
        lots: dict[object, list[tuple[int, StageShapes]]] = {}
        for place, ((plan, index), choices) in enumerate(zip(places, recomputes, strict=True)):
            shapes = _shapes(prices, plan, index, choices, self.held(plan, index))
            key = (shapes.runs, shapes.is_first, shapes.is_last, shapes.boundary_bytes)
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

    def layer_kinds(self, layout: UniformLayout, plan: Plan) -> tuple[str, ...]:
        """The kind of every layer of the model."""
        return self._priced(layout, plan, self.task.templates(layout.tensor)[1], ()).kinds

    def layer_seconds(self, layout: UniformLayout, plan: Plan, recomputes: Sequence[MemoryChoice]) -> dict[str, float]:
        """Kind of a layer -> seconds of a micro-batch that is not recomputed, under the strategy that takes least."""
        prices = self._priced(layout, plan, self.task.templates(layout.tensor)[1], recomputes)
        terms = prices.evaluator.terms
        seconds = (terms.forward_seconds + terms.backward_seconds).min(axis=1)
        return {kind: float(seconds[prices.rows[kind, "none"]]) for kind in dict.fromkeys(prices.kinds)}

    def sent_seconds(self, layout: UniformLayout, plan: Plan) -> float:
        """Seconds of one transfer between two stages."""
        sent = boundary_bytes(plan, plan.stages[0], self.task.templates(layout.tensor)[1])
        return one_way_seconds(plan, sent, self.task.machine_of(layout))

    def rules(self, layout: UniformLayout) -> PipelineRules:
        """The rules that hold for all stages of a layout's pipeline."""
        constants = self.task.machine_of(layout).constants
        beside = constants.overlap_slowdown if self.task.features.overlap_transfers else None
        return PipelineRules(virtual=layout.virtual, beside=beside, fixed=constants.step_seconds)

    def _unevenness(self, layout: UniformLayout, plan: Plan, recomputes: Sequence[MemoryChoice]) -> Floats:
        """[R] How many times as long a step takes because chunks are unlike."""
        prices = self._priced(layout, plan, self.task.templates(layout.tensor)[1], recomputes)
        if layout.virtual == 1:
            return np.ones(len(recomputes))
        shapes = (_shapes(prices, plan, index, recomputes, 1.0) for index in range(len(plan.stages)))
        seconds, virtual = prices.evaluator.pass_seconds, layout.virtual
        chunks = [chunk_seconds(each.runs, each.counts, seconds, virtual) for each in shapes]
        return unevenness(chunks, plan.stages[0].gradient_accumulation_steps)

    def times(self, costs: StageCosts, micro_batches: int) -> StageTimes:
        """Seconds of a stage in the objective."""
        times = StageTimes(**costs.times)
        return averaged(times, micro_batches) if self.task.averages else times

    def _all_stages(self, layout: UniformLayout, plan: Plan, recomputes: Sequence[MemoryChoice]) -> list[StageCosts]:
        """[S] costs of every stage, [N, R] each."""
        prices = self._priced(layout, plan, self.task.templates(layout.tensor)[1], recomputes)
        return _stage_costs(prices, plan, recomputes, [self.held(plan, index) for index in range(len(plan.stages))])

    def _priced(
        self, layout: UniformLayout, plan: Plan, model: ModelDescription, recomputes: Sequence[MemoryChoice]
    ) -> _Prices:
        """The parts of the model at the ranks and the micro-batch of a layout, in the variants of some choices."""
        # One recomputed layer stands for any number of them.
        choices = _variants([MemoryChoice(), *recomputes])
        # Stages of as many ranks have the same groups; a single stage reduces over all of them and sends nothing.
        key = (layout.ranks, layout.pipeline, layout.micro_batch, *choices)
        if key not in self._prices:
            graph = self._graph(layout, plan, model, choices)
            setting = self._setting(layout, plan, model)
            named = list(_parts_of(graph, plan, self.task, layout.micro_batch))
            parts = [part for _, part in named]
            tables = [self._table(part, layout, plan) for part in parts]
            sizes = [self._bytes(part, layout, plan) for part in parts]
            family = _family_of(plan, model, tables, sizes)
            evaluator = evaluator_of(
                family,
                [self._cost(table, layout, setting) for table in tables],
                *setting,
                self.task.machine_of(layout),
                _strategy(plan.stages[0], self.strategies),
            )
            self._prices[key] = _Prices(
                evaluator=evaluator,
                rows={name: row for row, (name, _) in enumerate(named)},
                kinds=graph.layer_kinds,
                predictions=graph.mtp_kinds,
                boundary_bytes=family.boundary_bytes,
                parts=tuple(parts),
            )
        return self._prices[key]

    def _setting(self, layout: UniformLayout, plan: Plan, model: ModelDescription) -> tuple[Setting, Interference]:
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

    def _cost(self, table: OpTable, layout: UniformLayout, setting: tuple[Setting, Interference]) -> PartCost:
        """Seconds of a part; ranks that share states count by the links they use, as these run beside computation."""
        groups = setting[0].groups
        axes = {collective.axis for _, collective, _ in table.collectives}
        # What sends to nobody costs the same whatever ranks the other parts have.
        sent = tuple((axis, groups[axis]) for axis in sorted(axes))
        replicas = groups["dp_cp"]
        key = (id(table), layout.expert, replicas.nodes, min(replicas.per_node, replicas.size), sent)
        if key not in self._costs:
            self._costs[key] = cost_of(table, setting[0])
        return self._costs[key]

    def _table(self, part: Part, layout: UniformLayout, plan: Plan) -> OpTable:
        key = (id(part), layout.micro_batch)
        if key not in self._tables:
            self._tables[key] = tabulate(part, layout.micro_batch, plan.sequence_length)
        return self._tables[key]

    def _bytes(self, part: Part, layout: UniformLayout, plan: Plan) -> PartBytes:
        key = (id(part), layout.micro_batch, layout.expert)
        if key not in self._sizes:
            samples, length, features = layout.micro_batch, plan.sequence_length, self.task.features
            captured, load = CAPTURED_BYTES.get(plan.precision, 2.0), self.task.load(layout.expert)
            table = self._table(part, layout, plan)
            self._sizes[key] = part_bytes(table, samples, length, captured, features, load)
        return self._sizes[key]


Row = tuple[str, str]
"""Kind and variant of recomputation of a part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prices:
    """The parts of a model at some ranks and a micro-batch."""

    evaluator: StageEvaluator
    rows: Mapping[Row, int]
    kinds: tuple[str, ...]
    """Kind of every layer."""
    predictions: tuple[str, ...]
    """Kinds of the multi-token-prediction layers."""
    boundary_bytes: float
    parts: tuple[Part, ...]
    """The parts behind the rows; kept alive, as costs are cached by the identity of their parts."""


def recompute_choices(task: UniformTask, plan: Plan) -> list[MemoryChoice]:
    """[R] Nothing, and whole layers of every chunk: as many as the shortest has, or all."""
    # megatron-core refuses whole layers beside its overlap of two micro-batches.
    if not task.space.recomputes or task.features.overlap_experts:
        return [MemoryChoice()]
    sizes = {last - first for stage in plan.stages for first, last in stage.chunks if last > first}
    every = [MemoryChoice(every_layer=True)] if len(sizes) > 1 else []
    most = min(sizes, default=0)
    if task.space.all_layers:
        return [MemoryChoice(), *(every or [MemoryChoice(layers=most)])]
    return [*(MemoryChoice(layers=layers) for layers in range(most + 1)), *every]


def _variants(choices: Sequence[MemoryChoice]) -> list[MemoryChoice]:
    """The choices that differ in what a single layer recomputes.

    All layers are variants of the same parts as one; those that predict further tokens are captured in all variants.
    """
    again = (replace(each, layers=int(each.layers > 0 or each.every_layer), every_layer=False) for each in choices)
    return list(dict.fromkeys(again))


def module_choices(task: UniformTask) -> list[MemoryChoice]:
    """[R] Sets of modules."""
    return [MemoryChoice(modules=modules) for modules in task.modules]


def variant_plans(task: UniformTask, plan: Plan) -> Iterator[Plan]:
    """One-stage plans, whose graphs together hold every variant of recomputation at the ranks of a plan."""
    return _variant_plans(plan, _variants([*recompute_choices(task, plan), *module_choices(task)]))


def _variant_plans(plan: Plan, choices: Sequence[MemoryChoice]) -> Iterator[Plan]:
    """A one-stage plan for every choice of recomputation."""
    stage = plan.stages[0]
    last = max(last for stage in plan.stages for _, last in stage.chunks)
    whole = replace(plan, stages=(replace(stage, chunks=((0, last),)),), loss_stage=0)
    whole = replace(whole, mtp_stage=None if plan.mtp_stage is None else 0)
    for choice in choices:
        yield replace(whole, stages=(replace(whole.stages[0], recompute=recompute_of(choice, ((0, last),))),))


def _parts_of(graph: CapturedModel, plan: Plan, task: UniformTask, samples: int) -> Iterator[tuple[Row, Part]]:
    """The parts that stages of a plan may hold."""
    variants = list(dict.fromkeys(part.variant for part in graph.parts))
    for kind in dict.fromkeys(graph.layer_kinds):
        for variant in variants:
            yield (kind, variant), graph.part(kind, variant, samples)
    head = graph.part("head", samples=samples)
    yield ("embedding", "none"), graph.part("embedding", samples=samples)
    for number, kind in enumerate(graph.mtp_kinds):
        for variant in variants:
            part = graph.part(kind, variant, samples)
            apart = number == 0 and plan.mtp_stage != plan.embedding_stage and head.holds(WORDS) is None
            yield (prediction_row(number, kind), variant), holding_words(part) if apart else part
    yield ("head", "none"), head


def prediction_row(number: int, kind: str) -> str:
    """The row of a prediction layer: the first may hold the words of the embedding."""
    return kind if number else f"first {kind}"


def _family_of(plan: Plan, model: ModelDescription, tables: Sequence[OpTable], sizes: Sequence[PartBytes]) -> Family:
    """The parts as stages of a layout, of which none is counted yet."""
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
    """[N] ZeRO levels with shares on the host."""
    shares = [SHARES if name in space.offloads else (0.0,) for name in ON_HOST]
    for level in space.zero_levels:
        for of_each in product(*shares):
            yield level, Offload(**dict(zip(ON_HOST, of_each, strict=True)))


def _strategy(stage: StagePlan, strategies: Sequence[tuple[int, Offload]]) -> Strategy:
    return _strategy_arrays(strategies, stage.data * stage.context, stage.expert_data)


def _strategy_arrays(
    strategies: Sequence[tuple[int, Offload]], data: float = 1.0, expert_data: float = 1.0
) -> Strategy:
    one = np.ones(len(strategies))
    offloads = [offload for _, offload in strategies]
    return Strategy(
        data=one * data,
        expert_data=one * expert_data,
        zero_level=np.array([float(level) for level, _ in strategies]),
        offload_weights=np.array([offload.weights for offload in offloads]),
        offload_gradients=np.array([offload.gradients for offload in offloads]),
        offload_optimizer=np.array([offload.optimizer for offload in offloads]),
        offload_activations=np.array([offload.activations for offload in offloads]),
    )


def _stage_costs(
    prices: _Prices, plan: Plan, recomputes: Sequence[MemoryChoice], held: Sequence[float]
) -> list[StageCosts]:
    """[S] costs of every stage, [N, R] each.

    Args:
        held: [S] micro-batches whose activations a stage holds at once.
    """
    costs: list[StageCosts] = []
    known: dict[object, StageCosts] = {}
    for index in range(len(plan.stages)):
        shapes = _shapes(prices, plan, index, recomputes, held[index])
        key = (shapes.runs, shapes.counts.tobytes(), shapes.in_flight.tobytes(), shapes.is_first, shapes.is_last)
        if key not in known:
            known[key] = prices.evaluator.costs(shapes)
        costs.append(known[key])
    return costs


def _shapes(prices: _Prices, plan: Plan, index: int, recomputes: Sequence[MemoryChoice], held: float) -> StageShapes:
    """A stage under every choice of recomputation: its parts in the order of a forward pass."""
    stage, last = plan.stages[index], len(plan.stages[index].chunks) - 1
    runs: list[StagePart] = []
    counts: list[list[float]] = []

    def add(part: StagePart, count: Sequence[float]) -> None:
        runs.append(part)
        counts.append(list(count))

    everywhere = [1.0] * len(recomputes)
    if index == plan.embedding_stage:
        add(StagePart(prices.rows["embedding", "none"], is_layer=False, is_embedding=True), everywhere)
    for chunk, (first, end) in enumerate(stage.chunks):
        place = first
        for kind, layers in groupby(prices.kinds[first:end]):
            size = len(list(layers))
            # The first layers of a chunk are recomputed: so many of this run.
            again = [
                size if choice.every_layer else min(size, max(0, choice.layers - (place - first)))
                for choice in recomputes
            ]
            for variant, count in _by_variant(size, again, recomputes):
                if any(count):
                    add(StagePart(prices.rows[kind, variant], chunk), count)
            place += size
    if index == plan.mtp_stage:
        for number, kind in enumerate(prices.predictions):
            for variant, count in _by_variant(1, [int(choice.every_layer) for choice in recomputes], recomputes):
                if any(count):
                    row = prices.rows[prediction_row(number, kind), variant]
                    add(StagePart(row, last, held_once=True), count)
    if index == plan.loss_stage:
        add(StagePart(prices.rows["head", "none"], last, is_layer=False, held_once=True), everywhere)
    return StageShapes(
        runs=tuple(runs),
        counts=np.array(counts),
        in_flight=np.full(len(recomputes), held),
        is_first=index == 0,
        is_last=index == len(plan.stages) - 1,
        # The only stage of a pipeline sends no hidden states.
        boundary_bytes=prices.boundary_bytes if len(plan.stages) > 1 else 0.0,
    )


def _by_variant(
    size: int, again: Sequence[int], recomputes: Sequence[MemoryChoice]
) -> Iterator[tuple[str, list[float]]]:
    """How many of a run of layers have each variant, for every choice.

    Args:
        again: [R] layers of the run that are recomputed as a whole.
    """
    yield "full", [float(layers) for layers in again]
    yield (
        "none",
        [float(size - layers) if not choice.modules else 0.0 for layers, choice in zip(again, recomputes, strict=True)],
    )
    for modules in dict.fromkeys(choice.modules for choice in recomputes if choice.modules):
        yield "+".join(sorted(modules)), [float(size) * (choice.modules == modules) for choice in recomputes]


def needed_bytes(costs: StageCosts) -> Floats:
    """[N, R] peaks without what the allocator reserves in vain."""
    return costs.peak_bytes - costs.peaks["fragmentation"]


def averaged(times: StageTimes, micro_batches: int) -> StageTimes:
    """The seconds of a stage whose micro-batches all take their mean."""
    return StageTimes(
        forward=times.forward + times.first / micro_batches,
        backward=times.backward + (times.turn + times.drain + times.tail) / micro_batches,
    )
