"""`RunContext`: one frozen object per rank that every part of the runtime receives; built once (build.py), complete when built.

The runners (megatron_core/runner.py, executor/execute.py) and the update (state/update.py) take it in place of many arguments.
It holds no state of a step: what belongs to one step is an argument of `run` or lives inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.runtime.groups import StageGroups
from moe_overlap.runtime.routing.state import DrawClock
from moe_overlap.runtime.spans import SpanRecorder
from moe_overlap.runtime.state.optimizer import MegatronLayerwiseOptimizer
from moe_overlap.runtime.state.stored_chunk import Stores
from moe_overlap.runtime.weight_grad.queue import WeightGradQueue


class BucketReduction(Protocol):
    """Reduces gradients over their replicas bucket by bucket, where the instruction list says so (state/buckets.py)."""

    def start(self, parameter_group: str, bucket: int, buckets: int) -> Callable[[], None]:
        """Start the reduction of one bucket, after the backward passes of its group; the returned function waits for the sum."""

    def finish(self) -> None:
        """End the step's reductions, after the list has waited for every bucket."""


class WeightGathering(Protocol):
    """Gathers updated weights one parameter group at a time, where the instruction list says so (state/weight_gathers.py)."""

    def start(self, parameter_group: str) -> Callable[[], None]:
        """Start the gather of a parameter group; the returned function waits until this rank has all of its weights."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """One rank of one run.

    Attributes:
        plan: the plan that is executed; `stage` is this rank's share of it.
        model: sizes of the whole model.
        groups: this rank's place in the plan and its process groups.
        chunks: this rank's model chunks (virtual stages), wrapped in DDP or in `StoredChunk`.
        models: the GPTModel inside each of them.
        optimizer: steps the parameters of the chunks layer by layer.
        recorder: records the spans of layers, transfers, runner and optimizer.
        clock: seed and micro-batch of the gates' draws; gates that draw hold the same object.
        weight_gradients: queue of the weight gradients that the list computes later; stays empty if none are deferred.
        bucket_reduction: reduces gradients between passes; None if DDP reduces them after the last pass.
        weight_gathers: gathers weights during the first passes of a step; None if the update or DDP's hooks gather them.
        stores: hold the states of this rank instead of DDP; None: DDP and megatron-core's distributed optimizer hold them.
        graph_stream: stream on which DDP was built and segments of static shapes are captured as CUDA graphs; None: no captures.
    """

    plan: Plan
    model: ModelDescription
    groups: StageGroups
    chunks: Sequence[DistributedDataParallel]
    models: Sequence[GPTModel]
    optimizer: MegatronLayerwiseOptimizer
    recorder: SpanRecorder
    clock: DrawClock
    weight_gradients: WeightGradQueue
    bucket_reduction: BucketReduction | None
    weight_gathers: WeightGathering | None = None
    stores: Stores | None = None
    graph_stream: torch.cuda.Stream | None = None

    @property
    def stage(self) -> StagePlan:
        """The plan of this rank's stage."""
        return self.plan.stages[self.groups.stage]

    @property
    def device(self) -> torch.device:
        """The device that holds this rank's parameters."""
        parameter: torch.nn.Parameter = next(self.chunks[0].parameters())
        return parameter.device

    def deferral_figures(self) -> dict[str, int]:
        """Figures of the deferred weight gradients so far, by the log's names; empty if the plan defers none."""
        deferred = any(layer.weight_gradient_slots for layer in self.stage.overlap.layers)
        return self.weight_gradients.figures() if deferred else {}


def language_model(chunk: torch.nn.Module) -> GPTModel:
    """The GPTModel inside DDP and precision wrappers."""
    module: GPTModel = chunk
    while not hasattr(module, "decoder"):
        module = module.module
    return module
