"""`TrainingJob`, the input of the training loop: built by the caller and never changed.

The loop sees the runtime through protocols, `StepRunner` (plan/step.py) and those here: this package imports neither the runtime
nor the tuner. Each protocol lists only what the loop calls; megatron-core's objects and the runtime's satisfy them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron.training.checkpoint.checkpointing import Progress
from megatron.training.cli.config import Config
from megatron.training.cli.sizes import BatchSizes
from megatron.training.data.datasets import BatchSource
from megatron.training.report.metrics import MetricsLog
from megatron.training.report.reports import Reports
from moe_overlap.plan.instructions import Instruction, Span
from moe_overlap.plan.step import StepRunner


class Optimizer(Protocol):
    """megatron-core's optimizer, as far as the loop and its reports read it."""

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """torch's parameter groups, with their learning rate `lr`."""

    @property
    def chained_optimizers(self) -> Sequence[Any]:
        """One distributed optimizer for each kind of weights."""

    def get_loss_scale(self) -> Tensor:
        """The present loss scale."""


class Scheduler(Protocol):
    """Learning rate and weight decay by trained samples."""

    def step(self, increment: int) -> None:
        """Advance by a number of samples."""


class Checkpoints(Protocol):
    """Saves of a run."""

    def claimed(self) -> AbstractContextManager[None]:
        """Hold the folders of the saves, so that no other job writes there; collective."""

    def save(self, progress: Progress, persistent: bool = True) -> None:
        """Save everything completely or not at all, or start to; the next save that is not persistent replaces the last such."""

    def completed(self, wait: bool) -> Path | None:
        """The checkpoint that was completed since the last call; with `wait` a save under way is completed first."""


@dataclass(frozen=True, slots=True)
class Machinery:
    """The runner of this rank, and the state that a step moves.

    Attributes:
        chunks: this rank's model chunks, wrapped in DDP or in parameter stores.
        parameter_norm: norm of all parameters of the model; collective.
        deferral_figures: figures of the deferred weight gradients so far, by the log's names; empty if none are deferred.
        operation: the operator or communication that runs on this rank, or ran last; None before the first.
        record_spans: told whether anybody reads the spans of the next steps; returns whether they are recorded.
    """

    runner: StepRunner[dict[str, Tensor]]
    chunks: Sequence[DistributedDataParallel]
    optimizer: Optimizer
    scheduler: Scheduler
    parameter_norm: Callable[[], float]
    deferral_figures: Callable[[], dict[str, int]]
    operation: Callable[[], str | None]
    record_spans: Callable[[bool], bool]


@dataclass(frozen=True, slots=True)
class LearningSchedule:
    """The number and the sizes of a run's steps, and this rank's instructions for each.

    Attributes:
        global_batch_size: samples of the largest step.
        batch_sizes: number of samples trained before a step -> samples of the step.
        lowered: samples of a step, and whether it begins with the updates that the step before has left -> this rank's
            instructions; the same list for the same arguments.
        left_updates: only the updates that a step leaves to the next one, on this rank; None if no rank leaves any.
    """

    total_steps: int
    global_batch_size: int
    batch_sizes: BatchSizes
    lowered: Callable[[int, bool], Sequence[Instruction]]
    left_updates: Sequence[Instruction] | None = None

    @property
    def instructions(self) -> Sequence[Instruction]:
        """This rank's instructions of the largest step, if it is the first."""
        return self.lowered(self.global_batch_size, False)


@dataclass(frozen=True, slots=True)
class Reporting:
    """The log of a run, and its other reports.

    Attributes:
        log: takes the figures of every step.
        reports: the other reports, each at its interval.
        covered_channels: channels whose communication the spans cover.
        flops_per_token: floating-point operations of the model per token, forward and backward.
        write_trace: writes the spans of the last step, by rank, for --trace.
    """

    log: MetricsLog
    reports: Reports
    covered_channels: tuple[str, ...]
    flops_per_token: float
    write_trace: Callable[[Mapping[int, Sequence[Span]]], None]


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """All parts of a run.

    Attributes:
        batches: micro-batches of a split ("train", "valid", "test") from a number of consumed samples on; None without samples.
    """

    config: Config
    machinery: Machinery
    schedule: LearningSchedule
    batches: BatchSource
    checkpoints: Checkpoints
    reporting: Reporting
