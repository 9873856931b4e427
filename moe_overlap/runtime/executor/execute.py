"""Runs an instruction list, and decides nothing.

For each instruction in turn: wait for its `after`, then run it. Compute runs synchronously. Communication starts asynchronously;
an instruction that lists it, or a later one on its channel, in `after` waits for it. A channel may have any number in flight.
The list alone decides which operations of two ranks meet: transfers by their order on the communicator of their boundary and
direction, which plan/lowering/rendezvous.py has checked, all-to-alls by their order in the expert group. The update is part of
the list: its instructions run synchronously (state/update.py), after the communication in flight on their channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_overlap.plan.instructions import BufferRole, Home, Instruction, parse_buffer, stem_of
from moe_overlap.plan.lowering.deferral import early_gradients
from moe_overlap.plan.lowering.dependencies import COMMUNICATION, last_uses
from moe_overlap.plan.operators import FORWARD, RECOMPUTE, Copied
from moe_overlap.plan.step import StepResult
from moe_overlap.runtime.context import RunContext
from moe_overlap.runtime.dispatch.irregular import IrregularDispatcher, Wires
from moe_overlap.runtime.executor.bindings import ChunkOperators, Saving
from moe_overlap.runtime.executor.buffers import Buffers
from moe_overlap.runtime.executor.graphs import CudaGraphs, SegmentGraphs, leave_generators_alone, refuse_uncapturable
from moe_overlap.runtime.executor.state import StepState
from moe_overlap.runtime.executor.streams import ChannelStreams, HostOrder, Streams
from moe_overlap.runtime.groups import StageGroups
from moe_overlap.runtime.layer_collectives import LayerCollectives, channels_inside
from moe_overlap.runtime.routing.balance_report import forget_balance_losses
from moe_overlap.runtime.routing.state import first_micro_batch
from moe_overlap.runtime.spans import SpanRecorder
from moe_overlap.runtime.state.attached_losses import micro_batch_share, set_attached_scales
from moe_overlap.runtime.state.update import StepUpdate, UpdateState, micro_batch_loss, micro_batches_of
from moe_overlap.runtime.step import Batch, computes_later, naming

COMPUTATION = ("compute", "weight-gradient")


class StageTransfers:
    """Point-to-point transfers of one rank's boundary tensors [sequence, batch, hidden].

    The list says who sends what to whom; nothing is recomputed from ranks. The n-th transfer of a communicator meets its peer's
    n-th: NCCL has no tags, so each direction of each boundary has a communicator of its own. Between stages of different shape a
    transfer moves one piece of the tensor, its `region`; the pieces of a tensor fill one storage, and its reader waits for the
    last of them.

    Args:
        config: the chunks' TransformerConfig; gives width, precision and whether the sequence is split over tensor ranks.
    """

    def __init__(
        self, groups: StageGroups, recorder: SpanRecorder, config: Any, sequence_length: int, micro_batch_size: int
    ) -> None:
        self._recorder = recorder
        self._communicators = groups.transfers
        split = config.tensor_model_parallel_size if config.sequence_parallel else 1
        split *= config.context_parallel_size
        self._shape = (sequence_length // split, micro_batch_size, config.hidden_size)
        self._dtype = config.pipeline_dtype

    def start(self, i: Instruction, buffers: Buffers) -> Callable[[], None]:
        """Start one transfer; returns a function that waits for it and, for a receive, stores the tensor.

        Call that function with the channel's stream current: this stream waits for NCCL's, the host does not block. Until then
        the function holds the tensor, as the allocator knows nothing of NCCL's stream.
        """
        (peer,) = i.peers
        communicator = self._communicators[i.channel, peer]
        if i.sends:
            tensor = buffers.read(i, stem_of(i.reads[0]))
            assert tensor is not None
            moved = _piece(tensor.detach(), i).contiguous()
            span = self._recorder.started(i)
            request = dist.isend(moved, dst=peer, group=communicator)
        else:
            boundary = buffers.filled_by_pieces(i.writes[0], self._empty) if i.region else self._empty()
            piece = _piece(boundary, i)
            moved = piece if piece.is_contiguous() else torch.empty_like(piece, memory_format=torch.contiguous_format)
            span = self._recorder.started(i)
            request = dist.irecv(moved, src=peer, group=communicator)
        assert request is not None

        def finish() -> None:
            request.wait()
            self._recorder.finish_background(span)
            if i.receives:
                if moved is not piece:
                    piece.copy_(moved)
                if not i.region:
                    buffers.write(i, stem_of(i.writes[0]), boundary)

        return finish

    def _empty(self) -> Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=torch.cuda.current_device())


def _piece(tensor_SBH: Tensor, i: Instruction) -> Tensor:
    """Returns the part of a boundary tensor that a transfer moves: its region of samples and tokens, or all of it."""
    if not i.region:
        return tensor_SBH
    first, last, begin, end = i.region
    return tensor_SBH[begin:end, first:last]


class PlanExecutor:
    """A StepRunner that follows the list of any plan it can bind.

    Args:
        context: this rank's part of the run.
        waits: whether to wait for every all-to-all where it starts, so that nothing overlaps; the baseline of a benchmark.
        streams: the streams of the instructions; None: those of the device.
        graphs: captures segments; None: CUDA's where the run asks for it.
    Attributes:
        context: this rank's part of the run.
        dispatcher: carries every all-to-all of tokens, of all chunks.
    """

    def __init__(
        self,
        context: RunContext,
        waits: bool = False,
        streams: Streams | None = None,
        graphs: SegmentGraphs | None = None,
    ) -> None:
        self.context, self._waits = context, waits
        self._chunks, self._optimizer, self._recorder = list(context.chunks), context.optimizer, context.recorder
        self._update = StepUpdate(context)
        self._queue, self._clock, self._buckets = context.weight_gradients, context.clock, context.bucket_reduction
        self._gathers, self._stores = context.weight_gathers, context.stores
        config, sequence_length = context.chunks[0].config, context.plan.sequence_length
        self._lists: dict[int, _ListFacts] = {}
        self._streams = streams or (ChannelStreams() if context.device.type == "cuda" else HostOrder())
        # One for all chunks: its tags, and on NCCL the order of its all-to-alls, belong to the expert group, not to a chunk.
        self.dispatcher = IrregularDispatcher(
            Wires(context.groups.collection, on_current_stream=True),
            # With a bound the host need not ask the device how many rows there are; on a CPU asking is free.
            takes_bounds=computes_later(context.device),
            in_order=config.deterministic_mode,
            static_capacity=context.plan.static_capacity_factor is not None,
        )
        if config.num_moe_experts and not self.dispatcher.static_capacity:
            overlap = context.stage.overlap
            partitions = max((layer.partitions or 1 for layer in overlap.layers), default=1)
            in_flight = partitions * overlap.micro_batches_in_flight + 1
            self.dispatcher.wires.counts.prepare(context.device, config.num_moe_experts, in_flight)
        self._per_token = config.calculate_per_token_loss
        loss = partial(micro_batch_loss, per_token=self._per_token)
        self._graphs = graphs
        if graphs is None and context.graph_stream is not None:
            refuse_uncapturable(context)
            leave_generators_alone(module for chunk in context.chunks for module in chunk.modules())
            self._graphs = SegmentGraphs(CudaGraphs(context.graph_stream), self._queue, self.dispatcher.static_capacity)
        self._operators = [
            ChunkOperators(model, sequence_length, loss, self.dispatcher, self._recorder, self._graphs, self._saving())
            for model in context.models
        ]
        self._collectives = LayerCollectives(self._recorder, channels_inside(context.groups.collection))
        self._transfers = StageTransfers(
            context.groups, context.recorder, config, sequence_length, context.stage.micro_batch_size
        )

    def _saving(self) -> Saving | None:
        """The contexts of forward operators whose activations wait on the host; None if none do."""
        activations = self._stores.activations if self._stores and self.context.stage.offload.activations else None
        return None if activations is None else activations.saving

    @property
    def recorder(self) -> SpanRecorder:
        """The recorder of the spans of its steps."""
        return self._recorder

    def run(self, instructions: Sequence[Instruction], batches: Iterator[Batch], step: int) -> StepResult:
        """One training step."""
        self._recorder.start_step()
        self._optimizer.zero_grad()
        self._begin(trains=True)
        state = self._state(instructions, batches, step)
        state.update.token_count = set_attached_scales(self.context, state.batches, self._optimizer.loss_scale)
        if self._graphs is not None:
            self._graphs.begin(instructions)
        with self._collectives.recorded():
            self._follow(instructions, state)
        return self._update.result(state.update)

    @torch.no_grad()
    def evaluate(self, instructions: Sequence[Instruction], batches: Iterator[Batch], step: int) -> StepResult:
        """One evaluation step: only the forward instructions of the list."""
        self._recorder.start_step()
        self._begin(trains=False)
        state = self._state(instructions, batches, step)
        with self._collectives.recorded():
            self._follow(self._facts_of(instructions).forward, state)
        loss, tokens, _ = self._update.mean_losses(state.update.reports)
        forget_balance_losses()
        return StepResult(loss, tokens, math.nan, False, None, tuple(self._recorder.spans()))

    @torch.no_grad()
    def flush(self, instructions: Sequence[Instruction]) -> None:
        """The updates alone that the last step has left."""
        self._recorder.start_step()
        nothing = Buffers(lambda i: 1)
        self._follow(instructions, StepState(nothing, [], 1.0, self._clock.seed, 0, frozenset(), update=UpdateState()))

    def _begin(self, trains: bool) -> None:
        for chunk in self._chunks:
            chunk.train(trains)
            # Weights in 8 bits are copies that modules keep from one micro-batch to the next: the weights have moved since.
            chunk.set_is_first_microbatch()

    def _state(self, instructions: Sequence[Instruction], batches: Iterator[Batch], step: int) -> StepState:
        facts = self._facts_of(instructions)
        # All at once: chunks of an interleaved pipeline read the same micro-batch at different times.
        arrived = [next(batches) for _ in range(facts.micro_batches)]
        # With --calculate-per-token-loss losses are sums, and the update divides by the tokens of the step: no share here.
        share = 1.0 if self._per_token else micro_batch_share(self.context, facts.micro_batches)
        return StepState(
            Buffers(lambda i: facts.partitions.get(i.name, 1)),
            arrived,
            self._optimizer.loss_scale * share,
            self._clock.seed,
            first_micro_batch(step),
            facts.recomputed,
            update=UpdateState(micro_batches=facts.micro_batches),
        )

    def _facts_of(self, instructions: Sequence[Instruction]) -> _ListFacts:
        """The facts of a list, read once: reading it in every step would leave the device idle."""
        facts = self._lists.get(id(instructions))
        if facts is None:
            facts = self._lists[id(instructions)] = _ListFacts.of(instructions)
        return facts

    def _follow(self, instructions: Sequence[Instruction], state: StepState) -> None:
        started: dict[int, _Started] = {}
        facts = self._facts_of(instructions)
        self._streams.begin(instructions)
        for i in instructions:
            for number in i.after:
                self._wait(number, started)
            if is_update(i) or self._streams.queues and i.kind == "point-to-point":
                # The host reads the results of the channel in an update, so the channel must be empty first. A transfer on a
                # device holds its tensor until it is waited for; waiting here delays nothing, since the transfers of a channel
                # run one after another.
                self._wait_for_channel(i.channel, started)
            if self._stores is not None and i.operator.is_bucket:
                # A reduction in flight holds what it sends: one at a time leaves room for two groups' gradients, on CPUs, where
                # the host waits for it.
                for number in [n for n, under_way in started.items() if under_way.instruction.operator.is_bucket]:
                    self._wait(number, started)
            with self._streams.running(i):
                self._streams.uses(i, state.buffers.named)
                for group in facts.opens[i.id]:
                    assert self._stores is not None
                    self._stores.open_sums(group)
                if i.kind != "weight-gradient":
                    self._queue.begin_operator()
                if is_update(i):
                    self._update.run(i, state.update)
                elif i.kind == "compute":
                    self._operators[i.chunk or 0].compute(i, state)
                elif i.kind in COMMUNICATION:
                    started[i.id] = _Started(i, self._start(i, state, facts))
                elif i.kind == "copy" and self._stores is not None:
                    self._recorder.place_at(i)
                    with self._recorder.span(i.name, i.channel_group):
                        self._stores.copy(i)
                elif i.kind == "weight-gradient":
                    self._recorder.place_at(i)
                    is_last = facts.announcing[i.name, i.micro_batch] == i.id
                    self._queue.run(i.name, len(i.partition) or 1, announce=is_last, is_early=i.id in facts.early)
                else:
                    raise ValueError(f"no binding for {i}")
                if self._recorder.clock.queues and i.kind not in COMMUNICATION:
                    # On its own stream: the next instruction may make another one current.
                    self._recorder.end()
                for group in facts.closes[i.id]:
                    # This stream used the group last before another gather.
                    assert self._stores is not None
                    self._stores.close_weights(group)
                if self._streams.queues or i.kind not in COMMUNICATION:
                    self._release(i, facts)
            if self._waits and i.kind == "collective":
                self._wait(i.id, started)
            # A communication in flight holds the tensors that it reads.
            for buffer in facts.ends[i.id]:
                state.buffers.drop(buffer)
        # The forward part of a list, which an evaluation runs, ends with sends that nothing in it waits for.
        for number in list(started):
            self._wait(number, started)
        self._streams.finish()
        self._recorder.end()
        assert not state.segments or not torch.is_grad_enabled(), f"left without backward: {list(state.segments)[:3]}"

    def _start(self, i: Instruction, state: StepState, facts: _ListFacts) -> Callable[[], None]:
        """Start a communication; returns a function that waits for it. Its span begins here and ends with the wait."""
        with naming(_error_name(i)):
            if self._stores is not None and (i.operator.is_bucket or i.operator.is_part_gather):
                start = self._stores.start_reduction if i.operator.is_bucket else self._stores.start_gather
                span = self._recorder.started(i)
                wait = self._recorder.ending(span, start(i.operator.group))
            elif i.operator.is_bucket:
                assert self._buckets is not None
                (bucket,) = i.partition
                span = self._recorder.started(i)
                wait = self._recorder.ending(
                    span, self._buckets.start(i.operator.group, bucket, state.buffers.partitions(i))
                )
            elif i.operator.is_part_gather:
                assert self._gathers is not None
                span = self._recorder.started(i)
                wait = self._recorder.ending(span, self._gathers.start(i.operator.group))
            elif i.kind == "collective":
                wait = self._operators[i.chunk or 0].start_all_to_all(i, state)
            else:
                wait = self._transfers.start(i, state.buffers)

        def finish() -> None:
            with naming(_error_name(i)):
                wait()
            if not self._streams.queues:
                # gloo reads what it sends until now.
                self._release(i, facts)

        return finish

    def _release(self, i: Instruction, facts: _ListFacts) -> None:
        """Free the offloaded shares that an instruction uses last."""
        for group, what in facts.leaves[i.id]:
            assert self._stores is not None
            self._stores.release(group, what)

    def _wait(self, number: int, started: dict[int, _Started]) -> None:
        """Wait for a communication, and for all that started before it on its channel, which runs in order."""
        if number not in started:
            return
        channel = started[number].instruction.channel
        for earlier in [n for n, other in started.items() if n <= number and other.instruction.channel == channel]:
            if not self._recorder.clock.queues:
                self._recorder.end()
            under_way = started.pop(earlier)
            with self._streams.ending(under_way.instruction):
                under_way.finish()

    def _wait_for_channel(self, channel: str, started: dict[int, _Started]) -> None:
        """Wait for everything that is under way on a channel."""
        for number in [n for n, under_way in started.items() if under_way.instruction.channel == channel]:
            self._wait(number, started)


def _error_name(i: Instruction) -> str:
    """A communication as an error names it: a transfer with the rank at its other end, and with its piece where it is one."""
    if i.kind != "point-to-point":
        return i.name
    return f"{i.name}{f' piece {i.partition[0]}' if i.region else ''} with rank {i.peers[0]}"


def is_update(i: Instruction) -> bool:
    """Whether an instruction belongs to the update, which an evaluation leaves out."""
    return i.operator.is_update


@dataclass(frozen=True, slots=True)
class _ListFacts:
    """Facts that the instructions of a list imply.

    Attributes:
        instructions: the list; kept because its identity is the key.
        ends: buffers by the id of the instruction that uses them last and frees them, so that the peak memory is that of the
            list's order.
        opens: parameter groups to whose gradient of a micro-batch an instruction adds, by its id.
        closes: parameter groups whose gathered weights an instruction uses last, by its id.
        leaves: (parameter group, state) whose offloaded share an instruction uses last on the device, by its id.
        announcing: the last weight gradient of each name and micro-batch, which tells DDP that the gradient is complete.
        early: weight gradients whose operands exceed the plan's bound.
        partitions: number of partitions of each operator.
        recomputed: names of operators that run again in backward passes.
        forward: the instructions of an evaluation.
    """

    instructions: Sequence[Instruction]
    ends: Mapping[int, Sequence[str]]
    opens: Mapping[int, Sequence[str]]
    closes: Mapping[int, Sequence[str]]
    leaves: Mapping[int, Sequence[tuple[str, Copied]]]
    announcing: Mapping[tuple[str, int | None], int]
    early: frozenset[int]
    partitions: Mapping[str, int]
    recomputed: frozenset[str]
    micro_batches: int
    forward: Sequence[Instruction]

    @staticmethod
    def of(instructions: Sequence[Instruction]) -> _ListFacts:
        """Read a list."""
        partitions: dict[str, int] = {}
        for i in instructions:
            for partition in i.partition if i.kind != "point-to-point" else ():
                partitions[i.name] = max(partitions.get(i.name, 0), partition + 1)
        ends = last_uses(instructions)
        again = (str(replace(i.operator, phase=FORWARD)) for i in instructions if i.operator.phase is RECOMPUTE)
        return _ListFacts(
            instructions=instructions,
            ends=ends,
            opens={
                i.id: _groups(i.writes, BufferRole.D_WEIGHTS) if i.kind in COMPUTATION else () for i in instructions
            },
            closes={i.id: _groups(ends[i.id], BufferRole.WEIGHTS) for i in instructions},
            leaves={i.id: _leaving(ends[i.id]) for i in instructions},
            announcing={(i.name, i.micro_batch): i.id for i in instructions if i.kind == "weight-gradient"},
            early=frozenset(i.id for i in early_gradients(instructions)),
            partitions=partitions,
            recomputed=frozenset(again),
            micro_batches=micro_batches_of(instructions),
            forward=_forward(instructions),
        )


@dataclass(frozen=True, slots=True)
class _Started:
    """A communication under way; `finish` waits for it and ends its span."""

    instruction: Instruction
    finish: Callable[[], None]


def _groups(buffers: Sequence[str], role: BufferRole) -> tuple[str, ...]:
    """The parameter groups of those buffers that have a role."""
    named = map(parse_buffer, buffers)
    return tuple(buffer.subject for buffer in named if buffer.role is role and buffer.home is Home.DEVICE)


MOVING = {BufferRole.WEIGHTS: Copied.WEIGHTS, BufferRole.STATE: Copied.OPTIMIZER}


def _leaving(buffers: Sequence[str]) -> tuple[tuple[str, Copied], ...]:
    """The parameter groups and states of those buffers that hold an offloaded share on the device."""
    moved = (buffer for buffer in map(parse_buffer, buffers) if buffer.home is Home.MOVED)
    return tuple((buffer.subject, MOVING[buffer.role]) for buffer in moved if buffer.role in MOVING)


def _forward(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The instructions of an evaluation: without gathers and copies for passes that it leaves out."""
    forward: list[Instruction] = []
    read: set[str] = set()
    for i in reversed(instructions):
        loads = i.operator.is_part_gather or i.kind == "copy"
        if is_update(i) or _is_backward(i) or (loads and read.isdisjoint(i.writes)):
            continue
        read -= set(i.writes) if loads else set()
        read.update(i.reads)
        forward.append(i)
    return tuple(reversed(forward))


def _is_backward(i: Instruction) -> bool:
    """Whether an evaluation skips an instruction: one of a backward pass, or a reduction of gradients between passes."""
    return i.in_backward_pass or i.operator.is_bucket
