"""What a plan costs on a cluster: seconds of a step, their breakdown, and the peak memory of every stage.

1. Each part of the model (layer kinds, embedding, head) is priced alone from its captured graph (`layer.py`, `memory.py`).
2. Stages are sums of parts under what is decided for their states (`stage.py`).
3. A step is the pipeline of its stages and the optimizer (`pipeline.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_overlap.describe.cluster import GIB, Cluster, known_gpus
from moe_overlap.describe.flops import training_flops_per_token
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import PeakBytes, Plan, Predicted, PredictedStage, Provenance, StagePlan
from moe_overlap.tuner.capture.graph import CapturedModel, Part
from moe_overlap.tuner.cost.constants import Constants, GpuConstants, ReleaseConstants
from moe_overlap.tuner.cost.features import Features
from moe_overlap.tuner.cost.groups import boundary_is_in_domain, stage_groups
from moe_overlap.tuner.cost.layer import KINDS, PartCost, Setting, hide_exchanges, part_cost
from moe_overlap.tuner.cost.links import collective_seconds, host_seconds, point_to_point_seconds
from moe_overlap.tuner.cost.memory import PartBytes, part_bytes
from moe_overlap.tuner.cost.operators import Lookup, tabulate
from moe_overlap.tuner.cost.pipeline import in_flight, step_seconds
from moe_overlap.tuner.cost.stage import (
    KindTerms,
    StageCosts,
    StateRates,
    Strategy,
    layer_terms,
    partly_concurrent,
    stage_costs,
)

Floats = NDArray[np.float64]
FRAGMENTATION = 0.0
"""Part of activations that the allocator reserves in vain: 0 predicts what is allocated, as torch counts its peak."""
CAPTURED_BYTES = {"fp32": 4.0}
"""Of a captured parameter; 2 in every other precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What is expected of a plan."""

    predicted: Predicted
    breakdown: dict[str, float]
    """Seconds by what they are spent on; they add up to the step."""
    mfu: float
    capacity_bytes: int
    extrapolating: tuple[str, ...]
    """Why the figures reach beyond what was measured; empty where they do not."""
    not_modelled: tuple[str, ...]
    """Flags that change seconds or bytes and are not counted."""

    @property
    def fits(self) -> bool:
        """Whether every stage stays below the capacity of its GPU."""
        return all(stage.peak_bytes <= self.capacity_bytes for stage in self.predicted.stages)


@dataclass(frozen=True, slots=True)
class PricedStage:
    """One stage: its parts with their numbers, and its costs."""

    costs: StageCosts
    parts: tuple[tuple[PartCost, float], ...]

    def sum_of(self, kind: str) -> float:
        """Exposed seconds of a kind of communication in one micro-batch."""
        both = ((cost.forward.exposed.get(kind, 0.0) + cost.backward.exposed.get(kind, 0.0), n) for cost, n in self.parts)
        return sum(seconds * count for seconds, count in both)

    @property
    def compute(self) -> float:
        """Seconds of computation of one micro-batch."""
        return sum((cost.forward.compute_seconds + cost.backward.compute_seconds) * n for cost, n in self.parts)


def predict(
    plan: Plan,
    model: ModelDescription,
    graphs: Mapping[int, CapturedModel],
    cluster: Cluster,
    features: Features,
    constants: Constants,
    release: str | None = None,
    load: float = 1.0,
    lookup: Lookup | None = None,
) -> Prediction:
    """Seconds and bytes of a plan.

    Args:
        graphs: the captured model of every stage, by stage.
        release: software release whose efficiencies count; the newest where None.
        load: rows of the busiest rank of an expert group over the mean.
        lookup: the database of measured operators.
    """
    gpu = cluster.group_of(0).gpu
    rates = {name: row["bf16_tflops"] for name, row in known_gpus().items()}
    of_gpu, other_gpu = constants.of_gpu(gpu, rates)
    of_release, other_release = constants.of_release(release)
    priced = [
        _price(plan, index, model, graphs[index], cluster, features, of_gpu, of_release, load, lookup)
        for index in range(len(plan.stages))
    ]
    reasons = [f"no measurements of {gpu.name}"] if other_gpu else []
    reasons += [f"no measurements of release {release}"] if other_release else []
    return _whole(plan, model, cluster, priced, of_gpu, features, tuple(reasons))


def _price(
    plan: Plan,
    index: int,
    model: ModelDescription,
    graph: CapturedModel,
    cluster: Cluster,
    features: Features,
    constants: GpuConstants,
    release: ReleaseConstants,
    load: float,
    lookup: Lookup | None,
) -> PricedStage:
    stage, links = plan.stages[index], cluster.group_of(plan.stages[index].devices.ranks[0])
    groups, rates = stage_groups(plan, stage, cluster), constants.link_rates
    setting = Setting(
        gpu=links.gpu,
        groups=groups,
        features=features,
        constants=constants,
        release=release,
        topk=max(1, model.router_topk),
        load=load,
        lookup=lookup,
    )
    counted = part_counts(plan, index, graph)
    size, length = stage.micro_batch_size, plan.sequence_length
    captured = CAPTURED_BYTES.get(plan.precision, 2.0)
    costs = [part_cost(tabulate(part, size, length), setting) for part, _ in counted]
    if features.overlap_experts:
        costs = [hide_exchanges(cost, constants.overlap_slowdown) for cost in costs]
    sizes = [part_bytes(part, size, length, captured, load) for part, _ in counted]
    boundary = 2.0 * size * length / stage.context * model.hidden_size / (stage.tensor if stage.tensor > 1 else 1)
    virtual = len(stage.chunks)
    one = np.ones(1)
    unit = 1 << 30
    state = StateRates(
        dense_scatter=one * collective_seconds("all_gather", unit, groups["dp_cp"], rates) / unit,
        expert_scatter=one * collective_seconds("all_gather", unit, groups["edp"], rates) / unit,
        latency_seconds=rates.latency_seconds,
        host_copy=float(host_seconds(unit, links, rates)) / unit,
        optimizer_sweep=1.0 / (links.gpu.memory_gb_per_s * 1e9 * constants.memory),
        weight_bytes=features.weight_bytes,
        gradient_bytes=features.gradient_bytes,
        optimizer_bytes=features.optimizer_bytes,
        gathered_bytes=features.gathered_bytes,
        overlap_grad_reduce=features.overlap_grad_reduce,
        overlap_param_gather=features.overlap_param_gather,
    )
    terms = layer_terms(
        _kind_terms(costs, sizes), _strategy(stage), state, partly_concurrent(constants.overlap_slowdown)
    )
    flying = in_flight(virtual, len(plan.stages), index, stage.gradient_accumulation_steps)
    summed = stage_costs(
        terms,
        np.array([[count] for _, count in counted], dtype=np.float64),
        np.array([flying]),
        boundary if len(plan.stages) > 1 else 0.0,
        FRAGMENTATION,
        [part.kind == "head" for part, _ in counted],
    )
    return PricedStage(summed, tuple(zip(costs, (count for _, count in counted), strict=True)))


def part_counts(plan: Plan, index: int, graph: CapturedModel) -> list[tuple[Part, float]]:
    """The parts of a stage and how often each is there."""
    stage = plan.stages[index]
    variants: dict[tuple[str, str], int] = {}
    for first, last in stage.chunks:
        for place, layer in enumerate(range(first, last)):
            key = (graph.layer_kinds[layer], layer_variant(stage, place))
            variants[key] = variants.get(key, 0) + 1
    samples = stage.micro_batch_size
    counted = [(graph.part(kind, variant, samples), float(count)) for (kind, variant), count in variants.items()]
    if index == plan.embedding_stage:
        counted.append((graph.part("embedding", samples=samples), 1.0))
    if index == (plan.loss_stage if plan.mtp_stage is None else plan.mtp_stage):
        for kind in graph.mtp_kinds:
            counted.append((graph.part(kind, layer_variant(stage, 0), samples), 1.0))
    if index == plan.loss_stage:
        counted.append((graph.part("head", samples=samples), 1.0))
    return counted


def layer_variant(stage: StagePlan, place: int) -> str:
    """What the layer at a place of its chunk recomputes, as the capture names it."""
    recompute = stage.recompute
    if recompute.granularity == "none" or (recompute.granularity != "uniform" and place >= recompute.layers):
        return "none"
    return "+".join(sorted(recompute.modules)) if recompute.granularity == "selective" else "full"


def _kind_terms(costs: list[PartCost], sizes: list[PartBytes]) -> KindTerms:
    return KindTerms(
        forward_seconds=np.array([cost.forward.seconds for cost in costs]),
        backward_seconds=np.array([cost.backward.seconds for cost in costs]),
        saved_bytes=np.array([size.saved for size in sizes]),
        working_bytes=np.array([size.working for size in sizes]),
        dense_parameters=np.array([size.dense_parameters for size in sizes]),
        expert_parameters=np.array([size.expert_parameters for size in sizes]),
    )


def _strategy(stage: StagePlan) -> Strategy:
    one, offload = np.ones(1), stage.offload
    return Strategy(
        data=one * stage.data * stage.context,
        expert_data=one * stage.expert_data,
        zero_level=one * stage.zero_level,
        offload_weights=one * offload.weights,
        offload_gradients=one * offload.gradients,
        offload_optimizer=one * offload.optimizer,
        offload_activations=one * offload.activations,
    )


def _whole(
    plan: Plan,
    model: ModelDescription,
    cluster: Cluster,
    priced: list[PricedStage],
    constants: GpuConstants,
    features: Features,
    extrapolating: tuple[str, ...],
) -> Prediction:
    """The step from its stages."""
    stages, stage = len(plan.stages), plan.stages[0]
    virtual, count = len(stage.chunks), stage.gradient_accumulation_steps
    transfer = _transfer_seconds(plan, model, cluster, constants, features)
    costs = [one.costs for one in priced]
    stable = [float(cost.stable_seconds[0, 0]) + transfer for cost in costs]
    first = [float(cost.first_extra_seconds[0, 0]) for cost in costs]
    last = [float(cost.last_extra_seconds[0, 0]) for cost in costs]
    step = step_seconds(stable, first, last, count, virtual)
    update = max(float(cost.optimizer_seconds[0, 0]) for cost in costs) + constants.step_seconds
    seconds = step.total + update
    slowest = int(np.argmax(stable))
    inside = {kind: count * priced[slowest].sum_of(kind) for kind in KINDS}
    compute = count * priced[slowest].compute
    # What sharded or offloaded states add to a stable micro-batch is communication of the data ranks, or copies.
    states = step.steady - compute - sum(inside.values()) - count * transfer
    breakdown = {
        "compute_seconds": compute,
        "bubble_seconds": step.bubble,
        **{f"exposed_{kind}_seconds": value for kind, value in inside.items()},
        "exposed_data_seconds": step.edges + states,
        "exposed_transfer_seconds": count * transfer,
        "optimizer_seconds": update,
    }
    tokens = plan.global_batch_size * plan.sequence_length / plan.world_size / seconds
    tflops = tokens * training_flops_per_token(model, plan.sequence_length) / 1e12
    provenance = _provenance(priced)
    described = tuple(_stage(priced[i], stable[i], first[i], last[i], transfer, provenance) for i in range(stages))
    gpu = cluster.group_of(0).gpu
    return Prediction(
        predicted=Predicted(
            step_seconds=seconds,
            tokens_per_second_per_gpu=tokens,
            model_tflops_per_gpu=tflops,
            stages=described,
            provenance=provenance,
        ),
        breakdown=breakdown,
        mfu=tflops / gpu.bf16_tflops,
        capacity_bytes=int(gpu.memory_gib * GIB),
        extrapolating=extrapolating,
        not_modelled=features.not_modelled,
    )


def _transfer_seconds(
    plan: Plan, model: ModelDescription, cluster: Cluster, constants: GpuConstants, features: Features
) -> float:
    """Exposed seconds of a stage's transfers in one micro-batch: one each way, between passes that wait for them."""
    stage = plan.stages[0]
    if len(plan.stages) == 1:
        return 0.0
    bytes_sent = 2.0 * stage.micro_batch_size * plan.sequence_length / stage.context / stage.tensor * model.hidden_size
    links = cluster.group_of(0)
    one_way = float(
        point_to_point_seconds(bytes_sent, links, boundary_is_in_domain(plan, cluster), constants.link_rates)
    )
    chunks = len(stage.chunks)
    exposed = constants.overlap_slowdown if chunks > 1 and features.overlap_transfers else 1.0
    return 2.0 * one_way * chunks * exposed


def _stage(
    priced: PricedStage, stable: float, first: float, last: float, transfer: float, provenance: Provenance
) -> PredictedStage:
    peaks = {name: int(values[0, 0]) for name, values in priced.costs.peaks.items()}
    return PredictedStage(
        stable_seconds=stable,
        first_seconds=stable + first,
        last_seconds=stable + last,
        peak_bytes=sum(peaks.values()),
        peak_bytes_by_category=PeakBytes(**peaks),
        exposed_communication_seconds=sum(priced.sum_of(kind) for kind in KINDS) + transfer,
        provenance=provenance,
    )


def _provenance(priced: list[PricedStage]) -> Provenance:
    sums = {"measured": 0.0, "interpolated": 0.0, "roofline": 0.0}
    for stage in priced:
        for cost, count in stage.parts:
            for origin, seconds in cost.provenance.items():
                sums[origin] += seconds * count
    total = sum(sums.values()) or 1.0
    return Provenance(**{origin: seconds / total for origin, seconds in sums.items()})
