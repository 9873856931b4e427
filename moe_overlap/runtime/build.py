"""The machinery of a run, built from a plan: `build_context`, then `make_runner`.

The runtime imports nothing of the training package, which hands in its builders of model, DDP and optimizer as `Builders`. Code
that overlaps is imported only where the plan asks for it: a run without overlap holds none of it in memory, and a fault in it
cannot reach such a run.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol, cast

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.expert_load import ExpertLoad
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.lowering.residency import BlockLimits
from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.step import StepRunner
from moe_overlap.runtime.context import BucketReduction, RunContext, WeightGathering, language_model
from moe_overlap.runtime.dispatch.wire import AllToAll
from moe_overlap.runtime.groups import StageGroups, build_groups
from moe_overlap.runtime.layer_collectives import channels_inside
from moe_overlap.runtime.megatron_core.moe_layer import AdaptLayer, MakeDispatcher, MakeGate, adapt_layer
from moe_overlap.runtime.megatron_core.runner import MegatronStepRunner
from moe_overlap.runtime.routing.state import DrawClock
from moe_overlap.runtime.spans import SpanRecorder
from moe_overlap.runtime.state.host_memory import HostMemory
from moe_overlap.runtime.state.optimizer import MegatronLayerwiseOptimizer
from moe_overlap.runtime.state.stored_chunk import StoredChunk, Stores
from moe_overlap.runtime.state.tied_embedding import TiedEmbedding
from moe_overlap.runtime.step import Batch
from moe_overlap.runtime.weight_grad.queue import WeightGradQueue


@dataclass(frozen=True, slots=True)
class Settings:
    """Training settings that a plan does not hold.

    Attributes:
        seed: seed of the gates' draws; `Builders.seed` seeds everything else.
        gate: value of --moe-gate; None keeps megatron-core's router.
        dispatcher: value of --moe-token-dispatcher-type.
        clip_grad: bound of the gradient norm; 0: no clipping.
        counts_zero_gradients: whether every step counts its zero gradients, for the log.
        timeout: time after which a collective of the run's groups fails.
        captures_graphs: whether segments of static shapes run as captured CUDA graphs.
        block_limits: largest number of thread blocks of an NCCL kernel that runs concurrently with others; None: NCCL's default.
    """

    seed: int
    gate: str | None
    dispatcher: str
    clip_grad: float
    counts_zero_gradients: bool
    timeout: datetime.timedelta
    captures_graphs: bool = False
    block_limits: BlockLimits | None = None


class WrapChunks(Protocol):
    """Wraps model chunks in DDP."""

    def __call__(
        self,
        modules: Sequence[torch.nn.Module],
        groups: ProcessGroupCollection,
        bucket_marks: Sequence[torch.nn.Parameter],
        *,
        weight_gradients_come_later: bool,
        wrapper: Callable[..., Any],
    ) -> Sequence[DistributedDataParallel]:
        """Wrap them.

        Args:
            bucket_marks: parameters that begin a gradient bucket each.
            weight_gradients_come_later: whether some modules announce their gradients themselves, after their backward pass.
            wrapper: DDP, or what takes its place and the arguments of its constructor.
        """


@dataclass(frozen=True, slots=True)
class Builders:
    """Builders of the training package, bound to the plan and the flags of the run.

    Attributes:
        seed: seeds every generator of this process, by its place in the groups.
        model: builds one module per model chunk of this rank's stage, and applies the `AdaptLayer` function to every layer's
            spec.
        wrap: wraps the chunks in DDP.
        optimizer: megatron-core's chained distributed optimizers of the wrapped chunks.
    """

    seed: Callable[[ProcessGroupCollection], None]
    model: Callable[[StageGroups, AdaptLayer], Sequence[torch.nn.Module]]
    wrap: WrapChunks
    optimizer: Callable[[Sequence[DistributedDataParallel], ProcessGroupCollection], ChainedOptimizer]


def build_context(plan: Plan, model: ModelDescription, settings: Settings, builders: Builders) -> RunContext:
    """Build this rank's part of a run. Collective over the default process group.

    1. Groups: every rank creates all groups of the plan in one order, as NCCL and gloo demand.
    2. Model: seeded by the rank's place in its groups, because stages, tensor ranks and expert ranks draw different weights.
    3. Weight gradients: linear layers are split before DDP wraps them, because DDP registers its hooks when it is built.
    4. DDP: a gradient bucket begins at every parameter group that the plan reduces separately. Gradients are summed, not
       averaged, where stages have different numbers of replicas. DDP is built on the stream that captures graphs later.
       Parameter stores take its place where a stage has another ZeRO level than 1.
    5. Optimizer: shards the buffers of DDP or of the stores, hence last.
    """
    groups = build_groups(plan, settings.timeout, settings.block_limits)  # 1
    overlap = plan.stages[groups.stage].overlap
    builders.seed(groups.collection)  # 2
    inside = tuple(dict.fromkeys(channels_inside(groups.collection).values()))
    recorder, clock = SpanRecorder(inside=inside), DrawClock(settings.seed)
    make_gate, make_dispatcher = gate_and_dispatcher(settings.gate, settings.dispatcher, clock)
    adapt = adapt_layer(recorder, groups.collection, make_gate, make_dispatcher)
    modules = builders.model(groups, adapt)
    if groups.ends and model.tied_embeddings:
        TiedEmbedding(modules, groups).share()
    queue = WeightGradQueue(overlap.max_deferred_bytes or None, recorder.begin)  # 3
    deferred = _split_deferred_products(modules, overlap, queue)
    marks = _bucket_marks(modules, overlap)  # 4
    stream = torch.cuda.Stream() if settings.captures_graphs else None
    wrapper: Callable[..., Any] = DistributedDataParallel
    if plan.has_stores:
        stage = plan.stages[groups.stage]
        wrapper = partial(
            StoredChunk,
            zero_level=stage.zero_level,
            offload=stage.offload,
            host=HostMemory(),
            sums_gradients=plan.sums_gradients,
            wire_of=cache(partial(AllToAll, on_current_stream=True)),
        )
    with _current(stream):
        chunks = builders.wrap(modules, groups.collection, marks, weight_gradients_come_later=deferred, wrapper=wrapper)
    stores: Stores | None = None
    if plan.has_stores:
        stores = Stores(cast(Sequence[StoredChunk], chunks), groups, plan.stages[groups.stage].is_decoupled)
    elif plan.sums_gradients:
        _sum_gradients(chunks)
    gathers = _weight_gathers(overlap, chunks)
    optimizer = MegatronLayerwiseOptimizer(  # 5
        builders.optimizer(chunks, groups.collection),
        chunks,
        settings.clip_grad,
        settings.counts_zero_gradients,
        gathers_later=gathers is not None or any(chunk.ddp_config.overlap_param_gather for chunk in chunks),
        stores=stores,
    )
    return RunContext(
        plan=plan,
        model=model,
        groups=groups,
        chunks=chunks,
        models=[language_model(chunk) for chunk in chunks],
        optimizer=optimizer,
        recorder=recorder,
        clock=clock,
        weight_gradients=queue,
        bucket_reduction=_bucket_reduction(plan, chunks),
        weight_gathers=gathers,
        stores=stores,
        graph_stream=stream,
    )


@contextlib.contextmanager
def _current(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Make a stream current inside: it starts after the work queued on the present stream, which waits for it at the end."""
    if stream is None:
        yield
        return
    present = torch.cuda.current_stream()
    stream.wait_stream(present)
    with torch.cuda.stream(stream):
        yield
    present.wait_stream(stream)


def make_runner(context: RunContext) -> StepRunner[Batch]:
    """The runner of a plan: megatron-core's schedules without overlap, the executor of instruction lists with it or with
    parameter stores.

    If one stage needs the executor, every stage uses it: the two runners name and order their transfers differently, so stages
    on different runners would wait for each other for ever.
    """
    if not context.plan.runs_lists:
        if context.graph_stream is not None:
            rule = "captures the operators of instruction lists, and this run follows none"
            raise ConfigError("--moe-overlap-cuda-graphs", "", rule, "drop it, or overlap something")
        return MegatronStepRunner(context)
    from moe_overlap.runtime.executor.execute import PlanExecutor

    return PlanExecutor(context)


def gate_and_dispatcher(
    gate: str | None, dispatcher: str, clock: DrawClock
) -> tuple[MakeGate | None, MakeDispatcher | None]:
    """Constructors of the gate and the dispatcher of a MoE layer; None keeps megatron-core's.

    Args:
        gate: value of --moe-gate.
        dispatcher: value of --moe-token-dispatcher-type.
        clock: seed and micro-batch number for the gates that draw.
    """
    make_gate: MakeGate | None = None
    make_dispatcher: MakeDispatcher | None = None
    if gate is not None:
        from moe_overlap.runtime.routing.gates import gate_maker

        make_gate = gate_maker(gate, clock)
    if dispatcher == "irregular":
        from moe_overlap.runtime.dispatch.plug_in import IrregularTokenDispatcher

        make_dispatcher = IrregularTokenDispatcher
    return make_gate, make_dispatcher


def count_expert_loads(context: RunContext) -> Callable[[int, int], list[ExpertLoad]]:
    """Make the routers count the rows of every expert.

    Returns:
        A collective that sums the counts of all ranks since its last call: (first step, last step) -> loads by layer.
    """
    from moe_overlap.runtime.routing.meter import RouterMeters

    model = context.model
    assert model.num_experts is not None
    layers = model.num_layers + model.mtp_layers
    return RouterMeters(context.models, layers, model.num_experts, context.device).collect


def _sum_gradients(chunks: Sequence[DistributedDataParallel]) -> None:
    """Make DDP sum the gradients of replicas instead of averaging them."""
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1.0


def _split_deferred_products(modules: Sequence[torch.nn.Module], overlap: StageOverlap, queue: WeightGradQueue) -> bool:
    """Split the products whose weight gradients the plan defers; returns whether there are any."""
    if not any(layer.weight_gradient_slots for layer in overlap.layers):
        return False
    from moe_overlap.runtime.weight_grad.split_linear import defer_planned

    return defer_planned(modules, overlap, queue)


def _bucket_marks(modules: Sequence[torch.nn.Module], overlap: StageOverlap) -> list[torch.nn.Parameter]:
    """Parameters that must begin a gradient bucket, so that each parameter group of the plan is reduced separately."""
    if overlap.gradient_chunk_bytes == 0:
        return []
    from moe_overlap.runtime.state.buckets import bucket_marks

    return bucket_marks(modules)


def _bucket_reduction(plan: Plan, chunks: Sequence[DistributedDataParallel]) -> BucketReduction | None:
    """The reductions that the list places between passes; None if every stage reduces its gradients after its last pass."""
    if not any(stage.overlap.gradient_chunk_bytes for stage in plan.stages):
        return None
    from moe_overlap.runtime.state.buckets import GradientBuckets

    return GradientBuckets(chunks)


def _weight_gathers(overlap: StageOverlap, chunks: Sequence[DistributedDataParallel]) -> WeightGathering | None:
    """The weight gathers that the list places before passes; None if the update or DDP's hooks gather."""
    if not overlap.overlap_param_gather:
        return None
    from moe_overlap.runtime.state import weight_gathers

    return weight_gathers.WeightGathers(chunks)
