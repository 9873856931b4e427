"""What a plan costs on a cluster: seconds of a step, their breakdown, and the peak memory of every stage.

1. Each part of the model (layer kinds, embedding, head) is priced alone from its captured graph (`layer.py`, `memory.py`).
2. Stages are sums of parts under what is decided for their states (`stage.py`).
3. A step is the pipeline of its stages and the optimizer (`pipeline.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_overlap.describe.cluster import GIB, Cluster, Gpu, NodeGroup
from moe_overlap.describe.flops import training_flops_per_token
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import PeakBytes, Plan, Predicted, PredictedStage, Provenance, StagePlan
from moe_overlap.tuner.cost.constants import Constants, GpuConstants, ReleaseConstants
from moe_overlap.tuner.cost.exchange_costs import ExchangeCosts
from moe_overlap.tuner.cost.features import Features
from moe_overlap.tuner.cost.groups import Group, boundary_group, stage_groups
from moe_overlap.tuner.cost.interference import Concurrent, Interference, partly_concurrent, slowed_down
from moe_overlap.tuner.cost.interference_hosts import interference_of
from moe_overlap.tuner.cost.layer import KINDS, PartCost, Setting, hide_exchanges, part_cost
from moe_overlap.tuner.cost.links import collective_seconds, host_seconds, point_to_point_seconds
from moe_overlap.tuner.cost.memory import PartBytes
from moe_overlap.tuner.cost.operators import LOW_PRECISIONS, Lookup, OpTable
from moe_overlap.tuner.cost.pipeline import step_seconds, transfer_waits
from moe_overlap.tuner.cost.prepare import Family
from moe_overlap.tuner.cost.refined import NOT_REFINED, Refined
from moe_overlap.tuner.cost.stage import (
    KindTerms,
    LayerTerms,
    StageCosts,
    StateRates,
    Strategy,
    layer_terms,
    stage_costs,
)

Floats = NDArray[np.float64]


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
    computed_early: tuple[str, ...] = ()
    """Deferred weight gradients that find no room to wait, by stage; they are counted where they are computed."""

    @property
    def fits(self) -> bool:
        """Whether every stage stays below the capacity of its GPU."""
        return not self.overflow

    @property
    def overflow(self) -> list[str]:
        """The stages that exceed the capacity, each with its largest category."""
        lines = []
        for index, stage in enumerate(self.predicted.stages):
            if stage.peak_bytes > self.capacity_bytes:
                peaks = dataclasses.asdict(stage.peak_bytes_by_category)
                most = max(peaks, key=lambda name: peaks[name])
                sizes = f"{stage.peak_bytes / GIB:.1f} GiB of {self.capacity_bytes / GIB:.1f}"
                lines.append(f"stage {index} needs {sizes}, most of it {most} ({peaks[most] / GIB:.1f})")
        return lines


@dataclass(frozen=True, slots=True)
class Priced:
    """A family of stages with its costs."""

    family: Family
    costs: StageCosts
    parts: tuple[PartCost, ...]
    terms: LayerTerms
    """Of the parts under the stages' strategy; [K, 1] each."""
    rates: StateRates
    setting: Setting

    def exposed(self, kind: str) -> Floats:
        """[M] exposed seconds of a kind of communication in one micro-batch."""
        both = [cost.forward.exposed.get(kind, 0.0) + cost.backward.exposed.get(kind, 0.0) for cost in self.parts]
        return np.array(both) @ self.family.counts

    @property
    def compute(self) -> Floats:
        """[M] seconds of computation of one micro-batch."""
        return (
            np.array([c.forward.compute_seconds + c.backward.compute_seconds for c in self.parts]) @ self.family.counts
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a prediction is made for.

    Attributes:
        load: rows of the busiest rank of an expert group over the mean.
        lookup: the database of measured operators.
        exchanges: what exchanges cost beside their rows; None where that was not measured.
        refined: what traces say of the prices of instructions; the closed form does not read it.
    """

    cluster: Cluster
    constants: GpuConstants
    release: ReleaseConstants
    fragmentation: float = 0.0
    load: float = 1.0
    lookup: Lookup | None = None
    exchanges: ExchangeCosts | None = None
    refined: Refined = NOT_REFINED

    @property
    def queue_seconds(self) -> float:
        """How much longer counts take that start while rows are on their way."""
        return self.exchanges.queue_seconds if self.exchanges is not None else 0.0


def machine_of(
    cluster: Cluster,
    constants: Constants,
    release: str | None = None,
    load: float = 1.0,
    lookup: Lookup | None = None,
) -> tuple[Machine, tuple[str, ...]]:
    """What a prediction is made for, and why it reaches beyond what was measured.

    Args:
        release: software release whose efficiencies count; the newest where None.
        load: rows of the busiest rank of an expert group over the mean.
        lookup: the database of measured operators.
    Raises:
        ConfigError: not a release's name.
    """
    gpu = cluster.group_of(0).gpu
    of_gpu, other_gpu = constants.of_gpu(gpu)
    of_release, other_release = constants.of_release(release)
    reasons = [f"no measured steps of {gpu.name}"] if other_gpu else []
    reasons += [f"no measured steps of release {release}"] if other_release else []
    machine = Machine(
        cluster=cluster,
        constants=of_gpu,
        release=of_release,
        fragmentation=constants.fragmentation,
        load=load,
        lookup=lookup,
    )
    return machine, tuple(reasons)


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
    return _whole(plan, model, machine, priced, features, extrapolating)


def price_family(plan: Plan, model: ModelDescription, family: Family, machine: Machine, features: Features) -> Priced:
    """Costs of stages of one layout."""
    constants, stage = machine.constants, family.stage
    links = machine.cluster.group_of(stage.devices.ranks[0])
    groups = stage_groups(plan, stage, machine.cluster)
    setting = Setting(
        gpu=links.gpu,
        groups=groups,
        features=features,
        constants=constants,
        release=machine.release,
        concurrent=concurrency(machine, groups["dp_cp"])[0],
        topk=max(1, model.router_topk),
        load=machine.load,
        lookup=machine.lookup,
    )
    parts = [cost_of(table, setting) for table in family.tables]
    rates = _state_rates(groups, links, constants, features)
    terms = layer_terms(_kind_terms(parts, family.sizes), _strategy(stage), rates, setting.concurrent)
    boundary = family.boundary_bytes if len(plan.stages) > 1 else 0.0
    summed = stage_costs(terms, family.counts, family.in_flight, boundary, machine.fragmentation, family.held_once)
    return Priced(family, summed, tuple(parts), terms, rates, setting)


def concurrency(machine: Machine, replicas: Group) -> tuple[Concurrent, Interference]:
    """What runs at the same time takes: by the factors of a host that was measured with these GPUs, else by one constant.

    Args:
        replicas: the ranks that share a stage's states, whose collectives run beside its computation.
    Returns:
        In closed form, and as factors for a simulation.
    """
    if machine.cluster.measured is None:
        fitted = interference_of(replicas.links.gpu.name, replicas.nodes, min(replicas.per_node, replicas.size))
        if fitted is not None:
            return fitted.seconds, fitted
    slowdown = machine.constants.overlap_slowdown
    return partly_concurrent(slowdown), slowed_down(slowdown)


def cost_of(table: OpTable, setting: Setting) -> PartCost:
    """Seconds of a part, its exchanges under another micro-batch where the run does that."""
    cost = part_cost(table, setting)
    return hide_exchanges(cost, setting.concurrent) if setting.features.overlap_experts else cost


def _state_rates(
    groups: Mapping[str, Group], links: NodeGroup, constants: GpuConstants, features: Features
) -> StateRates:
    one, unit, rates = np.ones(1), 1 << 30, constants.link_rates
    return StateRates(
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


def _kind_terms(costs: Sequence[PartCost], sizes: Sequence[PartBytes]) -> KindTerms:
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
    machine: Machine,
    priced: list[Priced],
    features: Features,
    extrapolating: tuple[str, ...],
) -> Prediction:
    """The step from its stages."""
    stage, cluster, constants = plan.stages[0], machine.cluster, machine.constants
    virtual, count = len(stage.chunks), stage.gradient_accumulation_steps
    place = {index: (one, column) for one in priced for column, index in enumerate(one.family.stages)}
    order = [place[index] for index in range(len(plan.stages))]
    one_way = one_way_seconds(plan, priced[0].family.boundary_bytes, machine) if len(plan.stages) > 1 else 0.0
    beside = constants.overlap_slowdown if features.overlap_transfers else None
    transfers, filling = transfer_waits(len(plan.stages), virtual, one_way, beside)
    stable = [
        float(one.costs.stable_seconds[0, m]) + transfer for (one, m), transfer in zip(order, transfers, strict=True)
    ]
    first = [float(one.costs.first_extra_seconds[0, m]) for one, m in order]
    last = [float(one.costs.last_extra_seconds[0, m]) for one, m in order]
    step = step_seconds(stable, first, last, count, virtual)
    update = max(float(one.costs.optimizer_seconds[0, m]) for one, m in order) + constants.step_seconds
    seconds = step.total + filling + update
    slowest, column = order[int(np.argmax(stable))]
    transfer = transfers[int(np.argmax(stable))]
    inside = {kind: count * float(slowest.exposed(kind)[column]) for kind in KINDS}
    compute = count * float(slowest.compute[column])
    # What sharded or offloaded states add to a stable micro-batch is communication of the data ranks, or copies.
    states = step.steady - compute - sum(inside.values()) - count * transfer
    tokens = plan.global_batch_size * plan.sequence_length / plan.world_size / seconds
    tflops = tokens * training_flops_per_token(model, plan.sequence_length) / 1e12
    gpu = cluster.group_of(0).gpu
    provenance = _provenance(priced)
    return Prediction(
        predicted=Predicted(
            step_seconds=seconds,
            tokens_per_second_per_gpu=tokens,
            model_tflops_per_gpu=tflops,
            stages=tuple(
                _stage(one, m, stable[i], first[i], last[i], transfers[i], provenance)
                for i, (one, m) in enumerate(order)
            ),
            provenance=provenance,
        ),
        breakdown={
            "compute_seconds": compute,
            "bubble_seconds": step.bubble,
            **{f"exposed_{kind}_seconds": value for kind, value in inside.items()},
            "exposed_data_seconds": step.edges + states,
            "exposed_transfer_seconds": count * transfer + filling,
            "optimizer_seconds": update,
        },
        mfu=tflops / peak_tflops(gpu, plan.precision),
        capacity_bytes=int(gpu.memory_gib * GIB),
        extrapolating=extrapolating,
        not_modelled=features.not_modelled,
    )


def peak_tflops(gpu: Gpu, precision: str) -> float:
    """Peak rate of the precision that the products run in; bf16's where the GPU has no such units."""
    if precision == "nvfp4" and gpu.fp4_tflops:
        return gpu.fp4_tflops
    return gpu.fp8_tflops if precision in LOW_PRECISIONS and gpu.fp8_tflops else gpu.bf16_tflops


def one_way_seconds(plan: Plan, boundary_bytes: float, machine: Machine) -> float:
    """Seconds of one transfer between neighbouring stages."""
    pair = boundary_group(plan, machine.cluster)
    return float(point_to_point_seconds(boundary_bytes, pair, machine.constants.link_rates))


def _stage(
    priced: Priced, column: int, stable: float, first: float, last: float, transfer: float, provenance: Provenance
) -> PredictedStage:
    peaks = {name: int(values[0, column]) for name, values in priced.costs.peaks.items()}
    return PredictedStage(
        stable_seconds=stable,
        first_seconds=stable + first,
        last_seconds=stable + last,
        peak_bytes=sum(peaks.values()),
        peak_bytes_by_category=PeakBytes(**peaks),
        exposed_communication_seconds=sum(float(priced.exposed(kind)[column]) for kind in KINDS) + transfer,
        provenance=provenance,
    )


def _provenance(priced: list[Priced]) -> Provenance:
    sums = {"measured": 0.0, "interpolated": 0.0, "roofline": 0.0}
    for one in priced:
        for cost, counts in zip(one.parts, one.family.counts, strict=True):
            for origin, seconds in cost.provenance.items():
                sums[origin] += seconds * float(counts.sum())
    total = sum(sums.values()) or 1.0
    return Provenance(**{origin: seconds / total for origin, seconds in sums.items()})
