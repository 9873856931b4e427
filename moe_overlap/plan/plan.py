"""The plan of a run: every decision about it, as frozen data. The JSON form has the same field names.

Ranges are half open, `(first, last)` -> first, …, last - 1. Ranks are global; layers are numbered in the model, from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby
from math import lcm
from typing import Literal

from moe_overlap.plan.overlap import MAY_BE_MISSING, NO_OVERLAP, StageOverlap

SCHEMA_VERSION = 1

Precision = Literal["fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
PipelineSchedule = Literal["1f1b", "interleaved-1f1b"]
Granularity = Literal["none", "selective", "full", "uniform"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """The model or the cluster of a plan."""

    name: str
    sha256: str
    """Hash of its content."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """The devices of a stage."""

    mesh: tuple[int, int]
    """Nodes, devices per node."""
    ranks: tuple[int, ...]
    """Row by row; fastest axis first: tensor, context, data (experts: expert-tensor, expert, expert-data)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """The part of the forward pass that the backward pass recomputes.

    Granularity `full`: the first `layers` layers of every chunk, one by one (Megatron's block method); `uniform`: every
    layer, in groups of `layers` (Megatron's uniform method); `selective`: `modules` of the first `layers` layers of
    every chunk.
    """

    layers: int = 0
    granularity: Granularity = "none"
    modules: tuple[str, ...] = ()
    """Names of Megatron's `--recompute-modules`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """Share of each kind of state that is kept in host memory, in [0, 1]."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0


OFFLOADED = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
}
"""Field of `Offload` -> what it moves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One pipeline stage. Sizes are numbers of ranks."""

    chunks: tuple[tuple[int, int], ...]
    """Layer range of every model chunk (virtual stage)."""
    devices: Devices
    micro_batch_size: int
    """Samples of a micro-batch on each data rank."""
    gradient_accumulation_steps: int
    """Micro-batches of a step."""
    tensor: int
    """With more than one tensor rank the stage is sequence-parallel."""
    context: int
    data: int
    expert: int
    expert_tensor: int
    zero_level: int
    recompute: Recompute
    offload: Offload
    overlap: StageOverlap = NO_OVERLAP

    @property
    def expert_data(self) -> int:
        """Number of replicas of every expert."""
        return self.tensor * self.context * self.data // (self.expert * self.expert_tensor)

    @property
    def is_decoupled(self) -> bool:
        """Whether each parameter group is updated separately, before its first forward pass (optimizer_state.py)."""
        return self.zero_level > 1 or self.offload != Offload()

    @property
    def is_replicated(self) -> bool:
        """Whether another rank holds a copy of a parameter."""
        return self.data * self.context > 1 or self.expert_data > 1

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the stage's layers, chunk after chunk."""
        return tuple(layer for first, last in self.chunks for layer in range(first, last))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """A rectangle of a boundary tensor [batch, sequence, hidden] that one rank sends to another."""

    source: int
    target: int
    batch: tuple[int, int]
    sequence: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class AllGather:
    """All-gather inside the receiving stage, after the tiles have arrived: each group completes the tensor along `axis`."""

    axis: Literal["batch", "sequence"]
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """The transfer of the boundary tensor between two stages of unlike shape (Alpa, section 6)."""

    from_stage: int
    to_stage: int
    tiles: tuple[Tile, ...]
    all_gather: AllGather | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Shares of the predicted seconds by origin; they add up to 1."""

    measured: float
    interpolated: float
    roofline: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakBytes:
    """Peak memory of a rank, by category."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int
    communication: int
    fragmentation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStage:
    """The prediction for a stage; seconds of one micro-batch, forward and backward."""

    stable_seconds: float
    first_seconds: float
    last_seconds: float
    peak_bytes: int
    peak_bytes_by_category: PeakBytes
    exposed_communication_seconds: float
    provenance: Provenance


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """The prediction for a step."""

    step_seconds: float
    tokens_per_second_per_gpu: float
    model_tflops_per_gpu: float
    stages: tuple[PredictedStage, ...]
    provenance: Provenance


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All decisions about a run."""

    schema_version: int = SCHEMA_VERSION
    model: Named
    cluster: Named
    sequence_length: int
    """Tokens of a sample."""
    global_batch_size: int
    """Samples of a step."""
    precision: Precision
    pipeline_schedule: PipelineSchedule
    embedding_stage: int
    mtp_stage: int | None
    loss_stage: int
    stages: tuple[StagePlan, ...]
    transfers: tuple[Transfer, ...]
    """One entry per boundary between stages of unlike shape; between equal stages rank i sends to rank i."""
    predicted: Predicted | None
    host_runs_ahead: bool = field(default=False, metadata=MAY_BE_MISSING)
    """True for GPUs, which execute asynchronously: instructions that need counts on the host are placed later, so that the host
    does not stall the queue. False for CPUs, where delaying them loses overlap."""
    static_capacity_factor: float | None = field(default=None, metadata=MAY_BE_MISSING)
    """Capacity factor of the gates if every rank sends every expert exactly its capacity, padding included: all sizes are known
    in advance, so no counts are sent and no host waits for them. Null: counts are sent, and only the routed rows."""

    @property
    def is_listed(self) -> bool:
        """Whether a stage overlaps by its instruction list, so that the executor runs the step."""
        return any(stage.overlap.is_listed for stage in self.stages)

    @property
    def follows_lists(self) -> bool:
        """Whether the lists have the waits of the executor: the plan overlaps, or has stages of unlike shape, which
        megatron-core's schedules do not support. Predictions of such a plan simulate its lists; its closed form only orders
        candidates."""
        return self.is_listed or bool(self.transfers)

    @property
    def has_stores(self) -> bool:
        """Whether parameter stores (runtime/state/store.py) hold the states of every stage, not DDP and its optimizer: a stage
        has another ZeRO level than 1, or offloads."""
        return any(stage.zero_level != 1 or stage.is_decoupled for stage in self.stages)

    @property
    def runs_lists(self) -> bool:
        """Whether the executor runs the step, and no schedule of megatron-core."""
        return self.follows_lists or self.has_stores

    @property
    def is_decoupled(self) -> bool:
        """Whether a step leaves updates of a stage to the next one."""
        return any(stage.is_decoupled for stage in self.stages)

    @property
    def sums_gradients(self) -> bool:
        """Whether replicas sum gradients instead of averaging them: stages of unlike shape have unequal numbers of replicas."""
        return bool(self.transfers)

    @property
    def tied_blocks(self) -> int:
        """Number of row blocks of a tied embedding: every tensor rank of the first and of the loss stage holds whole blocks."""
        return lcm(self.stages[0].tensor, self.stages[self.loss_stage].tensor)

    @property
    def has_pairs(self) -> bool:
        """Whether a stage interleaves the backward pass of one micro-batch with the forward pass of another."""
        return any(stage.overlap.micro_batches_in_flight > 1 for stage in self.stages)

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return sum(len(stage.devices.ranks) for stage in self.stages)

    def with_micro_batches(self, count: int) -> Plan:
        """The plan with `count` micro-batches per step on the first stage, and proportionally many on the others."""
        samples, rest = divmod(self.global_batch_size * count, self.stages[0].gradient_accumulation_steps)
        assert not rest, (count, self.global_batch_size)
        return self.with_global_batch(samples)

    def with_global_batch(self, samples: int) -> Plan:
        """The plan with a global batch of `samples`, which must be whole micro-batches on every stage."""
        assert all(samples % (stage.micro_batch_size * stage.data) == 0 for stage in self.stages), samples
        stages = (
            replace(stage, gradient_accumulation_steps=samples // (stage.micro_batch_size * stage.data))
            for stage in self.stages
        )
        return replace(self, global_batch_size=samples, stages=tuple(stages))

    def stage_of(self, rank: int) -> int:
        """Index of the stage that holds a rank; ValueError if none does."""
        for index, stage in enumerate(self.stages):
            if rank in stage.devices.ranks:
                return index
        raise ValueError(f"no stage holds rank {rank}")


def states_of_stages(plan: Plan) -> list[str]:
    """The ZeRO levels, and the shares on the host: `ZeRO-1`, `weights on the host: 50 % in stages 0-7, 100 % in stage 8`."""
    levels = [str(stage.zero_level) for stage in plan.stages]
    texts = [f"ZeRO-{levels[0] if len(set(levels)) == 1 else '+'.join(levels)}"]
    for name, described in OFFLOADED.items():
        shares = [getattr(stage.offload, name) for stage in plan.stages]
        if len(set(shares)) == 1:
            texts += [f"{100 * shares[0]:.0f} % of {described} on the host"] if shares[0] else []
            continue
        parts = []
        for share, run in groupby(range(len(shares)), key=shares.__getitem__):
            first, *others = run
            stages = f"stages {first}-{others[-1]}" if others else f"stage {first}"
            parts += [f"{100 * share:.0f} % in {stages}"] if share else []
        texts.append(f"{described} on the host: {', '.join(parts)}")
    return texts
