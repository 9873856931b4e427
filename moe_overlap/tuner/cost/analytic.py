"""The analytic cost of a plan on a cluster: seconds of a step, their breakdown, and the peak memory of every stage.

Terms. A *part* of the model is a captured kind of layer, the embedding or the head. A *family* is a set of stages that differ
only in their layers and ranks; a plan of equal stages has one.
1. `prepare` evaluates operators and bytes of the parts, and counts the parts of each stage. It needs no rates.
2. `price` applies rates. Each part is priced separately (`layer.py`, `memory.py`); a stage is the sum of its parts under its
   strategy about states (`evaluate.py`); a step is the pipeline of its stages and the optimizer (`pipeline.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_overlap.describe.cluster import GIB, NodeGroup
from moe_overlap.describe.model import ModelDescription, training_flops_per_token
from moe_overlap.plan.lowering.pipeline_order import held_in_pairs, most_in_flight, pipeline_blocks
from moe_overlap.plan.overlap import NO_OVERLAP
from moe_overlap.plan.plan import PeakBytes, Plan, Predicted, PredictedStage, Provenance, StagePlan
from moe_overlap.plan.sizes import boundary_bytes
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.coverage import traits, uncovered
from moe_overlap.tuner.cost.evaluate import StageCosts, StageEvaluator, StageShapes, joined, runs_of
from moe_overlap.tuner.cost.expected_error import ExpectedError, Neighbours
from moe_overlap.tuner.cost.feasibility import (
    Alternative,
    FullestStage,
    MemoryChange,
    MemoryQuantiles,
    Remedy,
    Verdict,
    fullest_stage,
    overflow_lines,
    verdict_of,
)
from moe_overlap.tuner.cost.hardware import REFERENCE, Features, Software
from moe_overlap.tuner.cost.host import UNLISTED, Launching, replays_of
from moe_overlap.tuner.cost.layer import KINDS, PartCost, Setting, cost_of, token_use
from moe_overlap.tuner.cost.links import (
    boundary_group,
    collective_seconds,
    host_seconds,
    link_use,
    pair_group,
    point_to_point_seconds,
    stage_groups,
)
from moe_overlap.tuner.cost.machine import Machine, concurrency
from moe_overlap.tuner.cost.memory import PartBytes, part_bytes, stage_sizes
from moe_overlap.tuner.cost.operators import OpTable, peak_tflops, tabulate
from moe_overlap.tuner.cost.pipeline import PipelineRules, StageTimes, in_flight, lone_share, pipeline_seconds, spent_on
from moe_overlap.tuner.cost.stage import KindTerms, LayerTerms, StateRates, Strategy
from moe_overlap.tuner.cost.stage_parts import StagePart, ordered_parts, part_counts
from moe_overlap.tuner.cost.uneven_chunks import chunk_seconds, unevenness

Floats = NDArray[np.float64]
CAPTURED_BYTES = {"fp32": 4.0}
"""Precision -> bytes of a captured parameter; 2 for all other precisions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Stages of one layout: K parts, M stages."""

    stage: StagePlan
    """The plan of the first stage."""
    stages: tuple[int, ...]
    tables: tuple[OpTable, ...]
    sizes: tuple[PartBytes, ...]
    counts: Floats
    """[K, M]"""
    in_flight: Floats
    """[M]"""
    parts: tuple[tuple[StagePart, ...], ...]
    """[M] parts of every stage in the order of its forward pass; their rows index `tables`."""
    boundary_bytes: float
    """Bytes of hidden states between two stages, per micro-batch and rank."""


def prepare(
    plan: Plan,
    model: ModelDescription,
    graphs: Mapping[int, CapturedModel],
    features: Features,
    load: float = 1.0,
) -> tuple[Family, ...]:
    """Evaluate the graphs of every stage at its micro-batch and sequence.

    Args:
        graphs: the captured model of every stage.
        load: rows of the busiest rank of an expert group over the mean.
    """
    families: dict[StagePlan, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        # Erase the fields in which stages of one family may differ; the analytic cost has no overlap inside a stage.
        chunks = tuple((0, 0) for _ in stage.chunks)
        layout = replace(stage, chunks=chunks, devices=plan.stages[0].devices, overlap=NO_OVERLAP)
        families.setdefault(layout, []).append(index)
    return tuple(_family(plan, model, graphs, features, indices, load) for indices in families.values())


def _family(
    plan: Plan,
    model: ModelDescription,
    graphs: Mapping[int, CapturedModel],
    features: Features,
    indices: list[int],
    load: float,
) -> Family:
    stage, length = plan.stages[indices[0]], plan.sequence_length
    counted = [part_counts(plan, index, graphs[index]) for index in indices]
    # By identity: a capture returns the same object for the same part, and comparing complete graphs would be slow.
    parts = {id(part): part for of_stage in counted for part, _ in of_stage}
    rows = {key: row for row, key in enumerate(parts)}
    counts = np.zeros((len(parts), len(indices)))
    for column, of_stage in enumerate(counted):
        for part, count in of_stage:
            counts[rows[id(part)], column] += count
    rows_by_kind = [{(part.kind, part.variant): rows[id(part)] for part, _ in of_stage} for of_stage in counted]
    captured = CAPTURED_BYTES.get(plan.precision, 2.0)
    flying = [_flying(plan, index) for index in indices]
    size = stage.micro_batch_size
    tables = tuple(tabulate(part, size, length) for part in parts.values())
    sizes = (part_bytes(table, size, length, captured, features, load) for table in tables)
    return Family(
        stage=stage,
        stages=tuple(indices),
        tables=tables,
        sizes=tuple(sizes),
        counts=counts,
        in_flight=np.array(flying),
        parts=tuple(
            ordered_parts(plan, index, graphs[index], of_kind)
            for index, of_kind in zip(indices, rows_by_kind, strict=True)
        ),
        boundary_bytes=float(boundary_bytes(plan, stage, model)),
    )


def _flying(plan: Plan, index: int) -> float:
    """Micro-batches whose activations a stage holds at once."""
    stage = plan.stages[index]
    layers = tuple(end - first for first, end in stage.chunks)
    if stage.overlap.micro_batches_in_flight > 1:
        return held_in_pairs(len(plan.stages), index, stage.gradient_accumulation_steps, layers)
    if plan.transfers:
        # The closed form holds only for megatron-core's orders; here the executed order is counted.
        return most_in_flight(pipeline_blocks(plan, index), layers)
    return in_flight(len(plan.stages), index, stage.gradient_accumulation_steps, layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The expected seconds and bytes of a plan."""

    predicted: Predicted
    breakdown: Mapping[str, float]
    """Seconds by cause; they add up to the step."""
    mfu: float
    capacity_bytes: int
    """Memory of a GPU on its data sheet."""
    extrapolating: tuple[str, ...]
    """Reasons why the figures extrapolate beyond measurements; empty if they do not."""
    not_modelled: tuple[str, ...]
    """Flags that change seconds or bytes and that the cost model ignores."""
    software: Software = REFERENCE
    """The software release of the constants."""
    expected_error: ExpectedError | None = None
    """The error of such predictions; None if the machine was measured, or too few similar runs are known."""
    missed: Neighbours | None = None
    """The most similar published runs, if the mean of their measured steps lies outside the interval; else None."""
    computed_early: tuple[str, ...] = ()
    """By stage, deferred weight gradients that run early because their operands exceed the bound."""
    assumed: tuple[str, ...] = ()
    """Sentences on values that the flags leave open, or that are of another release."""
    not_run: tuple[str, ...] = ()
    """Rules of the software that refuse the predicted flags."""
    reserved_bytes: int = 0
    """The part of the capacity that the driver, CUDA and NCCL take."""
    memory: MemoryQuantiles = MemoryQuantiles()
    """Quantiles of measured peaks over predicted ones."""
    remedy: Remedy | None = None
    """The fastest single change that makes the plan fit; None if it fits, no change does, or none was searched."""
    tried: tuple[MemoryChange, ...] = ()
    """The changes that were tried."""
    alternatives: tuple[Alternative, ...] = ()
    """Single changes of the job that were predicted, the fastest of those that fit first."""
    launching: Launching | None = None
    """Seconds of the step due to launches; None if they were not computed."""

    @property
    def available_bytes(self) -> int:
        """The part of the capacity that a plan may have."""
        return self.capacity_bytes - self.reserved_bytes

    @property
    def fits(self) -> bool:
        """True if every stage fits in the available bytes of its GPU, at the quantile of the margin."""
        return self.memory_verdict == "fits"

    @property
    def memory_verdict(self) -> Verdict:
        """The verdict that the plan fits, may not fit, or does not fit (feasibility.py)."""
        return verdict_of(self.predicted.stages, self.available_bytes, self.memory)

    @property
    def fullest(self) -> FullestStage:
        """The stage that needs the most memory."""
        return fullest_stage(self.predicted.stages, self.memory)

    @property
    def overflow(self) -> list[str]:
        """Lines on the stages that may not fit, the fullest first; its verdict is the plan's."""
        return overflow_lines(self.predicted.stages, self.available_bytes, self.memory)


@dataclass(frozen=True, slots=True)
class Priced:
    """A family of stages with its costs."""

    family: Family
    costs: StageCosts
    parts: tuple[PartCost, ...]
    terms: LayerTerms
    """[K, 1] costs of the parts under the stages' strategy."""
    rates: StateRates
    setting: Setting

    def exposed(self, kind: str) -> Floats:
        """[M] exposed seconds of a kind of communication in one micro-batch."""
        both = [cost.forward.exposed.get(kind, 0.0) + cost.backward.exposed.get(kind, 0.0) for cost in self.parts]
        return np.array(both) @ self.family.counts

    def chunk_seconds(self, column: int) -> Floats:
        """[2, chunks, 1] seconds of the passes of a stage."""
        forward, backward = np.array([(cost.forward.seconds, cost.backward.seconds) for cost in self.parts]).T
        parts, virtual = self.family.parts[column], len(self.family.stage.chunks)
        return chunk_seconds(parts, np.ones((len(parts), 1)), (forward, backward), virtual)

    @property
    def gathered(self) -> Floats:
        """[M] seconds of an update that gather weights after the optimizer."""
        if self.family.stage.is_decoupled:
            return np.zeros(len(self.family.stages))
        return self.terms.gathered_seconds[:, 0] @ self.family.counts

    @property
    def compute(self) -> Floats:
        """[M] seconds of computation of one micro-batch."""
        return (
            np.array([c.forward.compute_seconds + c.backward.compute_seconds for c in self.parts]) @ self.family.counts
        )


def price(
    plan: Plan,
    model: ModelDescription,
    families: tuple[Family, ...],
    machine: Machine,
    features: Features,
    extrapolating: tuple[str, ...] = (),
) -> Prediction:
    """Seconds and bytes from prepared numbers."""
    priced = [price_family(plan, model, family, machine, features) for family in families]
    gpu, of_run = machine.cluster.group_of(0).gpu, traits(plan, features, model.num_experts > 0)
    reasons = (*extrapolating, *uncovered(machine.traits, gpu.architecture, of_run))
    expected = machine.expected_error
    if expected is not None and reasons:
        expected = expected.widened(machine.beyond)
    prediction = _predict_step(plan, model, machine, priced, features, reasons)
    nearest = machine.neighbours
    missed = nearest if nearest is not None and expected is not None and nearest.are_missed(expected) else None
    return replace(prediction, software=machine.software, expected_error=expected, missed=missed)


def price_family(plan: Plan, model: ModelDescription, family: Family, machine: Machine, features: Features) -> Priced:
    """Costs of stages of one layout."""
    setting = setting_of(plan, model, family.stage, machine, features)
    parts = [cost_of(table, setting) for table in family.tables]
    evaluator = evaluator_of(family, parts, setting, machine, _strategy(family.stage))
    # A single stage sends no hidden states.
    boundary = family.boundary_bytes if len(plan.stages) > 1 else 0.0
    shapes = (
        StageShapes(
            runs=runs,
            counts=np.array(counts)[:, None],
            in_flight=family.in_flight[column : column + 1],
            boundary_bytes=boundary,
        )
        for column in range(len(family.stages))
        for runs, counts in [runs_of(family.parts[column])]
    )
    summed = joined([evaluator.costs(shape) for shape in shapes])
    return Priced(family, summed, tuple(parts), evaluator.terms, evaluator.rates, setting)


def stage_evaluator(
    plan: Plan, model: ModelDescription, family: Family, machine: Machine, features: Features, strategy: Strategy
) -> StageEvaluator:
    """The evaluator of stages of a family's layout and micro-batch under other strategies.

    Args:
        strategy: [N] strategies with the layout's `data` and `expert_data`.
    """
    setting = setting_of(plan, model, family.stage, machine, features)
    parts = [cost_of(table, setting) for table in family.tables]
    return evaluator_of(family, parts, setting, machine, strategy)


def setting_of(plan: Plan, model: ModelDescription, stage: StagePlan, machine: Machine, features: Features) -> Setting:
    """The hardware and the settings of a stage."""
    links = machine.cluster.group_of(stage.devices.ranks[0])
    groups = stage_groups(plan, stage, machine.cluster)
    concurrent, _ = concurrency(machine, groups["dp_cp"])
    return Setting(
        gpu=links.gpu,
        groups=groups,
        features=features,
        constants=machine.constants,
        common=machine.common,
        concurrent=concurrent,
        topk=max(1, model.router_topk),
        experts=max(1, model.num_experts),
        load=machine.load,
        lookup=machine.lookup,
        replays=replays_of(plan, features) if plan.is_listed else UNLISTED,
        unpaired_share=lone_share(len(plan.stages), len(stage.chunks), stage.gradient_accumulation_steps),
        two_at_work=features.overlap_experts or plan.has_pairs,
    )


def evaluator_of(
    family: Family,
    parts: Sequence[PartCost],
    setting: Setting,
    machine: Machine,
    strategy: Strategy,
) -> StageEvaluator:
    """The evaluator of stages of a family whose parts are priced.

    Args:
        parts: costs of the family's tables.
        strategy: [N] strategies with the layout's `data` and `expert_data`.
    """
    links = machine.cluster.group_of(family.stage.devices.ranks[0])
    rates = _state_rates(setting, links, len(strategy.data))
    return StageEvaluator(
        _kind_terms(parts, family, setting), strategy, rates, setting.concurrent, machine.fragmentation
    )


def _state_rates(setting: Setting, links: NodeGroup, strategies: int) -> StateRates:
    groups, constants, features = setting.groups, setting.constants, setting.features
    # Rates are evaluated at many bytes, so that the latency, which is added once per collective, is negligible.
    ones, unit, rates = np.ones(strategies), 1 << 30, constants.link_rates
    return StateRates(
        dense_scatter=ones * collective_seconds("all_gather", unit, groups["dp_cp"], rates) / unit,
        expert_scatter=ones * collective_seconds("all_gather", unit, groups["edp"], rates) / unit,
        reduce_scatter=rates.reduce_scatter,
        latency_seconds=rates.latency("all_gather"),
        dense_use=link_use("all_gather", groups["dp_cp"], rates),
        expert_use=link_use("all_gather", groups["edp"], rates),
        token_use=token_use(setting),
        host_copy=float(host_seconds(unit, links, rates)) / unit,
        optimizer_sweep=1.0 / (links.gpu.memory_gb_per_s * 1e9 * constants.memory),
        weight_bytes=features.weight_bytes,
        gradient_bytes=features.gradient_bytes,
        optimizer_bytes=features.optimizer_bytes,
        gathered_bytes=features.gathered_bytes,
        overlap_grad_reduce=features.overlap_grad_reduce,
        overlap_param_gather=features.overlap_param_gather,
    )


def _kind_terms(costs: Sequence[PartCost], family: Family, setting: Setting) -> KindTerms:
    """Costs of the parts before any strategy."""
    sizes = family.sizes
    heads = [table.part.kind == "head" for table in family.tables]
    saved, working = stage_sizes(sizes, heads, setting.two_at_work)
    kinds = [table.part.kind for table in family.tables]
    return KindTerms(
        forward_seconds=np.array([cost.forward.seconds for cost in costs]),
        backward_seconds=np.array([cost.backward.seconds for cost in costs]),
        saved_bytes=saved,
        working_bytes=working,
        dense_parameters=np.array([size.dense_parameters for size in sizes]),
        expert_parameters=np.array([size.expert_parameters for size in sizes]),
        is_layer=np.array([kind not in ("embedding", "head") for kind in kinds]),
    )


def _strategy(stage: StagePlan) -> Strategy:
    ones, offload = np.ones(1), stage.offload
    return Strategy(
        data=ones * stage.data * stage.context,
        expert_data=ones * stage.expert_data,
        zero_level=ones * stage.zero_level,
        offload_weights=ones * offload.weights,
        offload_gradients=ones * offload.gradients,
        offload_optimizer=ones * offload.optimizer,
        offload_activations=ones * offload.activations,
    )


def _predict_step(
    plan: Plan,
    model: ModelDescription,
    machine: Machine,
    priced: list[Priced],
    features: Features,
    extrapolating: tuple[str, ...],
) -> Prediction:
    """The prediction of a step from the costs of its stages."""
    cluster, constants, virtual = machine.cluster, machine.constants, len(plan.stages[0].chunks)
    place = {index: (family, column) for family in priced for column, index in enumerate(family.family.stages)}
    order = [place[index] for index in range(len(plan.stages))]
    sent = [family.family.boundary_bytes for family, _ in order]
    # Between stages of different shape the end that sends or receives more bytes decides.
    one_way = [
        boundary_seconds(plan, index, max(pair), machine)
        for index, pair in enumerate(zip(sent, sent[1:], strict=False))
    ]
    transfer_slowdown = constants.overlap_slowdown if features.overlap_transfers else None
    counts = [stage.gradient_accumulation_steps for stage in plan.stages]
    uneven = float(unevenness([family.chunk_seconds(m) for family, m in order], counts[0])[0])
    rules = PipelineRules(
        virtual=virtual, transfer_slowdown=transfer_slowdown, fixed=constants.step_seconds, uneven=uneven
    )
    updates = [float(family.costs.optimizer_seconds[0, m]) for family, m in order]
    pipeline = pipeline_seconds([_times(family.costs, m) for family, m in order], updates, one_way, counts, rules)
    times, step = pipeline.stages, spent_on(pipeline.stages, counts, virtual, uneven)
    transfers, filling = [float(transfer) for transfer in pipeline.transfers], float(pipeline.filling)
    steady, update, seconds = float(step.steady), float(pipeline.update), float(pipeline.total)
    # The gather of weights in the slowest update is communication of the data ranks.
    last, m = order[int(np.argmax(updates))]
    gathered = min(float(last.gathered[m]), update)
    slowest_stage = int(step.slowest)
    slowest, column = order[slowest_stage]
    transfer, count = transfers[slowest_stage], counts[slowest_stage]
    inside = {kind: count * float(slowest.exposed(kind)[column]) for kind in KINDS}
    compute = count * float(slowest.compute[column])
    # The rest of a stable micro-batch: communication of sharded states, and copies of offloaded ones.
    states = steady - compute - sum(inside.values()) - count * transfer
    tokens = plan.global_batch_size * plan.sequence_length / plan.world_size / seconds
    tflops = tokens * training_flops_per_token(model, plan.sequence_length) / 1e12
    gpu = cluster.group_of(0).gpu
    provenance = _provenance(priced)
    return Prediction(
        predicted=Predicted(
            step_seconds=seconds,
            tokens_per_second_per_gpu=tokens,
            model_tflops_per_gpu=tflops,
            stages=tuple(_stage(family, m, times[i], transfers[i], provenance) for i, (family, m) in enumerate(order)),
            provenance=provenance,
        ),
        breakdown={
            "compute_seconds": compute,
            "bubble_seconds": float(step.bubble),
            **{f"exposed_{kind}_seconds": value for kind, value in inside.items()},
            "exposed_data_seconds": float(step.edges) + states + gathered,
            "exposed_transfer_seconds": count * transfer + filling,
            "optimizer_seconds": update - gathered,
        },
        mfu=tflops / peak_tflops(gpu, plan.precision),
        capacity_bytes=int(gpu.memory_gib * GIB),
        reserved_bytes=machine.reserved_bytes,
        extrapolating=extrapolating,
        not_modelled=features.not_modelled,
        memory=machine.memory,
    )


def one_way_seconds(plan: Plan, boundary_bytes: float, machine: Machine) -> float:
    """Seconds of one transfer between neighbouring stages."""
    pair = boundary_group(plan, machine.cluster)
    return float(point_to_point_seconds(boundary_bytes, pair, machine.constants.link_rates))


def boundary_seconds(plan: Plan, index: int, boundary_bytes: float, machine: Machine) -> float:
    """Seconds of one transfer from a stage to the next; stages of different shape use the slowest of their links."""
    if not plan.transfers:
        return one_way_seconds(plan, boundary_bytes, machine)
    transfer = next((crossing for crossing in plan.transfers if crossing.from_stage == index), None)
    if transfer is None:  # Neighbours of equal shape send rank to rank.
        pairs = set(zip(plan.stages[index].devices.ranks, plan.stages[index + 1].devices.ranks, strict=True))
    else:
        pairs = {(tile.source, tile.target) for tile in transfer.tiles}
    return max(pair_seconds(plan, source, target, boundary_bytes, machine) for source, target in pairs)


def pair_seconds(plan: Plan, source: int, target: int, sent_bytes: float, machine: Machine) -> float:
    """Seconds of one transfer between two ranks, by the link between them."""
    pair = pair_group(source, target, plan.world_size, machine.cluster.group_of(0))
    return float(point_to_point_seconds(sent_bytes, pair, machine.constants.link_rates))


def _times(costs: StageCosts, column: int) -> StageTimes:
    """Times of a stage without transfers."""
    return StageTimes(**{name: float(seconds[0, column]) for name, seconds in costs.times.items()})


def _stage(priced: Priced, column: int, times: StageTimes, transfer: float, provenance: Provenance) -> PredictedStage:
    peaks = {name: int(values[0, column]) for name, values in priced.costs.peaks.items()}
    return PredictedStage(
        stable_seconds=float(times.stable),
        first_seconds=float(times.stable + times.first),
        last_seconds=float(times.stable + times.tail),
        peak_bytes=sum(peaks.values()),
        peak_bytes_by_category=PeakBytes(**peaks),
        exposed_communication_seconds=sum(float(priced.exposed(kind)[column]) for kind in KINDS) + transfer,
        provenance=provenance,
    )


def _provenance(priced: list[Priced]) -> Provenance:
    sums = {"measured": 0.0, "interpolated": 0.0, "roofline": 0.0}
    for family in priced:
        for cost, counts in zip(family.parts, family.family.counts, strict=True):
            for origin, seconds in cost.provenance.items():
                sums[origin] += seconds * float(counts.sum())
    total = sum(sums.values()) or 1.0
    return Provenance(**{origin: seconds / total for origin, seconds in sums.items()})
