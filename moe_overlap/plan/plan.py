"""The plan of a run: everything that was decided, as frozen data. Its JSON has the field names that stand here.

Ranges are half open, `(first, last)` -> first, …, last - 1. Ranks are global; layers are numbered in the model, from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import lcm
from typing import Literal

from moe_overlap.plan.overlap import MAY_BE_MISSING, NO_OVERLAP, StageOverlap

SCHEMA_VERSION = 1

Precision = Literal["fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
PipelineSchedule = Literal["1f1b", "interleaved-1f1b"]
Granularity = Literal["none", "selective", "full", "uniform"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """A description the plan was made for."""

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
    """The part of the forward pass that the backward pass computes a second time.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One pipeline stage. Sizes are numbers of ranks."""

    chunks: tuple[tuple[int, int], ...]
    """Layer range of every virtual stage."""
    devices: Devices
    micro_batch_size: int
    """Samples per rank of the data axis and micro-batch."""
    gradient_accumulation_steps: int
    """Micro-batches of a step."""
    tensor: int
    """With more than one rank the stage is sequence-parallel."""
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
        """Replicas of every expert."""
        return self.tensor * self.context * self.data // (self.expert * self.expert_tensor)

    @property
    def is_decoupled(self) -> bool:
        """Whether every part steps by itself, in front of its first forward pass (optimizer_state.py)."""
        return self.zero_level > 1 or self.offload != Offload()

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the stage's layers, chunk after chunk."""
        return tuple(layer for first, last in self.chunks for layer in range(first, last))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """A rectangle of a boundary tensor [batch, sequence, hidden] that goes from rank to rank."""

    source: int
    target: int
    batch: tuple[int, int]
    sequence: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class AllGather:
    """After the tiles have arrived, every group completes the tensor along an axis."""

    axis: Literal["batch", "sequence"]
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """How the boundary tensor of two stages of unlike shape crosses (Alpa, section 6)."""

    from_stage: int
    to_stage: int
    tiles: tuple[Tile, ...]
    all_gather: AllGather | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Origins of predicted seconds, as shares that add up to 1."""

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
    """A run, decided."""

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
    """Boundaries between stages of unlike shape; equal stages send rank i to rank i."""
    predicted: Predicted | None
    host_runs_ahead: bool = field(default=False, metadata=MAY_BE_MISSING)
    """Whether the lists are for devices that queue what the host gives them (GPUs): what needs numbers that the host must read
    then stands behind further computation. On a CPU, which computes where the list stands, that would cost overlap."""
    static_capacity_factor: float | None = field(default=None, metadata=MAY_BE_MISSING)
    """Capacity factor of the gates, where every rank sends every expert as many rows as it takes: empty places travel, too, and
    all ranks know all sizes, so that no counts are sent and no host waits for them. Null: the routed rows travel, and counts."""

    @property
    def is_listed(self) -> bool:
        """Whether a stage overlaps by its instruction list, so that the executor runs the plan."""
        return any(stage.overlap.is_listed for stage in self.stages)

    @property
    def follows_lists(self) -> bool:
        """Whether the executor runs it: it overlaps, or has stages of unlike shape, which megatron-core's schedules do not
        join. No closed form knows the seconds of its step, which are simulated."""
        return self.is_listed or bool(self.transfers)

    @property
    def sums_gradients(self) -> bool:
        """Whether replicas add up gradients: a mean over them would be another one on stages with other numbers of them."""
        return bool(self.transfers)

    @property
    def tied_blocks(self) -> int:
        """Blocks of a tied embedding's rows: each tensor rank of the first stage, and of that of the loss, holds whole ones."""
        return lcm(self.stages[0].tensor, self.stages[self.loss_stage].tensor)

    @property
    def has_pairs(self) -> bool:
        """Whether a stage runs the backward pass of one micro-batch beside the forward pass of another."""
        return any(stage.overlap.micro_batches_in_flight > 1 for stage in self.stages)

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return sum(len(stage.devices.ranks) for stage in self.stages)

    def with_micro_batches(self, count: int) -> Plan:
        """The plan with so many micro-batches of a step on the first stage, and as many fewer or more on the others."""
        samples, rest = divmod(self.global_batch_size * count, self.stages[0].gradient_accumulation_steps)
        assert not rest, (count, self.global_batch_size)
        return self.with_global_batch(samples)

    def with_global_batch(self, samples: int) -> Plan:
        """The plan with the micro-batches of a step that so many samples need; whole ones on every stage."""
        assert all(samples % (stage.micro_batch_size * stage.data) == 0 for stage in self.stages), samples
        stages = (
            replace(stage, gradient_accumulation_steps=samples // (stage.micro_batch_size * stage.data))
            for stage in self.stages
        )
        return replace(self, global_batch_size=samples, stages=tuple(stages))

    def stage_of(self, rank: int) -> int:
        """Index of the stage that holds a rank; ValueError where none does."""
        for index, stage in enumerate(self.stages):
            if rank in stage.devices.ranks:
                return index
        raise ValueError(f"no stage holds rank {rank}")
