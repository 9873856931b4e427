"""Lowering: from a plan to the static instruction list of one rank. All decisions about execution are made here.

A list consists of the passes in the stage's pipeline order, each with its receives before and its sends after it, and of the
update. The plan decides whether
- ranges of operators inside a pass run in partitions (layers.py, interleave.py);
- weight gradients run under all-to-alls or after the send that ends a pass, or early where deferring more would exceed the
  bound on bytes (deferral.py);
- a backward pass is interleaved with the forward pass of another micro-batch (interleave.py);
- gradients are reduced in buckets, between all-to-alls or concurrently with them (gradient_buckets.py);
- weights are gathered under the first passes (weight_gathers.py);
- each parameter group is updated separately, with collectives and copies around the passes: ZeRO 2 and 3, offloading
  (optimizer_state.py).
A plan with a field that is not lowered yet is refused; the error names the field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.capabilities import refuse_what_cannot_be_lowered
from moe_overlap.plan.instructions import Instruction, parse_access, placed, saved_for
from moe_overlap.plan.lowering.deferral import receives_first, within_bound
from moe_overlap.plan.lowering.dependencies import Draft, ListBuilder, build_list, check_races, in_issue_order
from moe_overlap.plan.lowering.gradient_buckets import buckets_by_group, fill_gaps, lower_update, reduce_at_once
from moe_overlap.plan.lowering.interleave import counts_read_late, interleave
from moe_overlap.plan.lowering.layers import LayerLowering, recomputes_predictions
from moe_overlap.plan.lowering.optimizer_state import DecoupledLowering, PartDrafts
from moe_overlap.plan.lowering.pipeline_order import PipelineStep, pipeline_blocks
from moe_overlap.plan.lowering.rendezvous import check_rendezvous
from moe_overlap.plan.lowering.resharding import Pieces, TransferLowering, pieces_by_rank, readdressed, shape_of
from moe_overlap.plan.lowering.residency import check_residency
from moe_overlap.plan.lowering.weight_gathers import with_gathers
from moe_overlap.plan.operators import (
    BACKWARD,
    EMBEDDING,
    HEAD_LOSS,
    HEAD_NORM,
    LOSS,
    PROJECT,
    RECOMPUTE,
    OperatorKind,
    prediction_operator,
)
from moe_overlap.plan.plan import Plan


def lower(plan: Plan, model: ModelDescription, rank: int, updates: bool = True) -> tuple[Instruction, ...]:
    """The instruction list of one rank, as it will be executed: without races, and without deadlocks with the other stages'
    lists.

    Args, Raises: as `lower_together`.
    """
    return lower_together(plan, model, rank, updates)[rank]


def lower_updates(plan: Plan, model: ModelDescription, rank: int) -> tuple[Instruction, ...]:
    """The updates alone that a step has left to the next one; empty where a stage updates at the end of its own step."""
    index = plan.stage_of(rank)
    to = ListBuilder(index)
    if plan.stages[index].is_decoupled:
        DecoupledLowering(PartDrafts(plan, index, model, {}), to).write_updates()
    instructions = in_issue_order(plan, to.finish())
    check_races(instructions)
    return instructions


def lower_together(
    plan: Plan, model: ModelDescription, rank: int, updates: bool = True
) -> dict[int, tuple[Instruction, ...]]:
    """The lists of a rank and of those it exchanges transfers with; where stages are unlike, of all ranks.

    Every rank computes these lists from the plan, so agreeing on them needs no communication.

    Args:
        plan: a plan that `validate_plan` has accepted for this model.
        rank: global rank.
        updates: whether the step before has left updates to this one (optimizer_state.py).
    Raises:
        ConfigError: the plan uses a field that is not lowered yet.
        ScheduleError: a list has a race or a deadlock (rendezvous.py; residency.py, on GPUs): a bug of this project.
    """
    lists: dict[int, tuple[Instruction, ...]] = {}
    if plan.transfers:
        for index in range(len(plan.stages)):
            lists |= lower_stage(plan, model, index, updates=updates)
    else:
        # Equal stages: rank i of a stage communicates with rank i of the next, so one rank per stage represents them all.
        place = plan.stages[plan.stage_of(rank)].devices.ranks.index(rank)
        together = (stage.devices.ranks[place] for stage in plan.stages)
        lists = {other: lower_rank(plan, model, other, updates=updates) for other in together}
    check_rendezvous(lists)
    # Also for a plan made on CPUs: it may be run on GPUs, on streams.
    check_residency(lists)
    return lists


def lower_stage(
    plan: Plan,
    model: ModelDescription,
    index: int,
    saved_bytes: Mapping[str, int] = MappingProxyType({}),
    updates: bool = True,
) -> dict[int, tuple[Instruction, ...]]:
    """The lists of all ranks of a stage. Ranks with pieces of the same shape share one list, with other peers and regions.

    Args, Raises: as `lower_rank`.
    """
    pieces = pieces_by_rank(plan, index)
    written: dict[tuple[object, ...], int] = {}
    lists: dict[int, tuple[Instruction, ...]] = {}
    for rank in plan.stages[index].devices.ranks:
        first = written.setdefault(shape_of(plan, pieces, rank), rank)
        if first == rank:
            lists[rank] = lower_rank(plan, model, rank, saved_bytes, pieces=pieces, updates=updates)
        else:
            lists[rank] = readdressed(lists[first], plan, pieces, first, rank)
    return lists


def lower_rank(
    plan: Plan,
    model: ModelDescription,
    rank: int,
    saved_bytes: Mapping[str, int] = MappingProxyType({}),
    blocks: Sequence[Sequence[PipelineStep]] | None = None,
    pieces: Pieces | None = None,
    updates: bool = True,
) -> tuple[Instruction, ...]:
    """The instruction list of one rank, checked for races but not against the lists of other stages.

    Args:
        saved_bytes: as in optimizer_state.py, for stages whose parameter groups are updated separately.
        blocks: passes to lower instead of a full step, in the form of `pipeline_blocks`; for costs of a few passes.
        pieces: `pieces_by_rank` of its stage, if a caller that writes several lists has it already.
        updates: as `lower_together`.
    Raises:
        ConfigError, ScheduleError: as `lower`.
    """
    # The race check includes the waits of the runner, which order more than the buffers do.
    instructions = in_issue_order(plan, _written(plan, model, rank, saved_bytes, blocks, pieces, updates))
    check_races(instructions)
    return instructions


def _written(
    plan: Plan,
    model: ModelDescription,
    rank: int,
    saved_bytes: Mapping[str, int],
    blocks: Sequence[Sequence[PipelineStep]] | None,
    pieces: Pieces | None,
    updates: bool,
) -> tuple[Instruction, ...]:
    """The list with the dependencies of its buffers, without the waits of the runner."""
    refuse_what_cannot_be_lowered(plan)
    index = plan.stage_of(rank)
    # One object for the whole step: a backward pass needs the partitions in which a forward pass has written its buffers.
    layers = LayerLowering(plan, plan.stages[index], model)
    pieces = pieces_by_rank(plan, index) if pieces is None else pieces
    transfers = TransferLowering(plan, model, index, rank, layers.buffers, pieces, in_order=blocks is None)
    passes = _PassLowering(plan, model, index, layers, transfers)
    drafts: list[Draft] = []
    sends_late = plan.stages[index].overlap.sends_late
    for steps in pipeline_blocks(plan, index) if blocks is None else blocks:
        written = [list(passes.write(step)) for step in steps]
        drafts += interleave(*written, sends_late=sends_late) if len(written) == 2 else written[0]
    # On the list of all passes, because a receive and the slot before it belong to different passes.
    drafts = list(receives_first(drafts))
    if plan.host_runs_ahead:
        drafts = list(counts_read_late(drafts))
    drafts = list(within_bound(drafts, plan, plan.stages[index], model))
    to = ListBuilder(index)
    if plan.stages[index].is_decoupled:
        DecoupledLowering(PartDrafts(plan, index, model, saved_bytes), to).write(drafts, updates)
        return to.finish()
    drafts = list(with_gathers(drafts, plan, index, model))
    buckets = buckets_by_group(plan, index, model)
    if buckets:
        # Gaps lie between all-to-alls and the waits for them; the passes are built once to know those waits.
        write_buckets = reduce_at_once if plan.stages[index].overlap.reduce_at_once else fill_gaps
        write_buckets(build_list(index, drafts), buckets, to)
    else:
        to.extend(drafts)
    to.extend(lower_update(plan, index, model))
    return to.finish()


@dataclass(frozen=True, slots=True)
class _PassLowering:
    """Passes of one micro-batch through one chunk of one rank."""

    plan: Plan
    model: ModelDescription
    stage_index: int
    layers: LayerLowering
    transfers: TransferLowering

    def write(self, step: PipelineStep) -> Iterator[Draft]:
        """One pass."""
        write = self._forward if step.direction == "forward" else self._backward
        return write(step.chunk, step.micro_batch)

    def _forward(self, chunk: int, micro_batch: int) -> Iterator[Draft]:
        """Receive or embed, layers, send or loss."""
        first, last = self.layers.stage.chunks[chunk]
        place = (chunk, micro_batch)
        if self._is_first(chunk):
            yield self._compute(EMBEDDING, place, f"tokens -> h.L{first}")
        else:
            yield from self.transfers.write(OperatorKind.RECEIVE, -1, place, f"h.L{first}")
        yield from self.layers.forward(range(first, last), chunk, micro_batch)
        if self._is_last(chunk):
            yield self._compute(HEAD_NORM, place, f"h.L{last} -> normed")
            for depth in range(self.model.mtp_layers):
                yield from self._prediction(depth, place)
            yield self._compute(HEAD_LOSS, place, "normed labels -> loss")
        else:
            yield from self.transfers.write(OperatorKind.SEND, +1, place, f"h.L{last}")

    def _backward(self, chunk: int, micro_batch: int) -> Iterator[Draft]:
        """Receive or loss, layers, send or embedding: the mirror of `_forward`."""
        first, last = self.layers.stage.chunks[chunk]
        place = (chunk, micro_batch)
        if self._is_last(chunk):
            total = "gradient.head"
            deferred = self.layers.deferred(HEAD_LOSS)
            saved = " ".join(saved_for(gradient) for gradient in deferred)
            # If the output weight is deferred, only its weight-gradient instruction adds to the sum.
            added = "" if deferred else total
            yield self._compute(f"{HEAD_LOSS}.{BACKWARD}", place, f"loss {added} -> dnormed {added} {saved}")
            for depth in reversed(range(self.model.mtp_layers)):
                yield from self._prediction_backward(depth, place)
            yield self._compute(f"{HEAD_NORM}.{BACKWARD}", place, f"dnormed {total} -> dh.L{last} {total}")
        else:
            yield from self.transfers.write(OperatorKind.RECEIVE, +1, place, f"dh.L{last}", backward=True)
        yield from self.layers.backward(range(first, last), chunk, micro_batch)
        if self._is_first(chunk):
            total = "gradient.embedding"
            yield self._compute(f"{EMBEDDING}.{BACKWARD}", place, f"dh.L{first} {total} -> {total}")
        else:
            yield from self.transfers.write(OperatorKind.SEND, -1, place, f"dh.L{first}", backward=True)
            # After the send: the previous stage waits for the sent gradient, and nothing for weight gradients (Zero Bubble,
            # section 2).
            yield from self.layers.behind_send(range(first, last), chunk, micro_batch)

    def _prediction(self, depth: int, place: tuple[int, int]) -> Iterator[Draft]:
        """Projection of the previous hidden states and the embedding of shifted tokens, transformer layer, loss."""
        before = f"h.mtp{depth - 1}.loss" if depth else "normed"
        yield self._compute(prediction_operator(depth, PROJECT), place, f"{before} tokens -> h.mtp{depth}")
        yield from self.layers.prediction(depth, *place)
        yield self._compute(prediction_operator(depth, LOSS), place, f"h.mtp{depth}.loss labels -> loss.mtp{depth}")

    def _prediction_backward(self, depth: int, place: tuple[int, int]) -> Iterator[Draft]:
        """The mirror of `_prediction`; its input gradient is added to that of the previous prediction layer or of the head."""
        gradient, head, embedding = f"gradient.mtp{depth}", "gradient.head", "gradient.embedding"
        output = f"dh.mtp{depth}.loss"
        # The next prediction layer runs backward before this one and has initialised the output's gradient; the last has no next.
        added = f"{output} " if depth < self.model.mtp_layers - 1 else ""
        reads, writes = f"loss.mtp{depth} {added}{gradient} {head}", f"{output} {gradient} {head}"
        yield self._compute(prediction_operator(depth, LOSS, BACKWARD), place, f"{reads} -> {writes}")
        if recomputes_predictions(self.layers.stage.recompute):
            yield self._compute(prediction_operator(depth, PROJECT, RECOMPUTE), place, f" -> h.mtp{depth}")
        yield from self.layers.prediction_backward(depth, *place)
        before = f"dh.mtp{depth - 1}.loss" if depth else "dnormed"
        # The head's loss has initialised `dnormed`; between prediction layers the projection writes first.
        accumulated = f"{before} " if depth == 0 else ""
        reads, writes = f"dh.mtp{depth} {accumulated}{gradient} {embedding}", f"{before} {gradient} {embedding}"
        yield self._compute(prediction_operator(depth, PROJECT, BACKWARD), place, f"{reads} -> {writes}")

    def _is_first(self, chunk: int) -> bool:
        return self.stage_index == self.plan.embedding_stage and chunk == 0

    def _is_last(self, chunk: int) -> bool:
        return self.stage_index == self.plan.loss_stage and chunk == len(self.layers.stage.chunks) - 1

    def _compute(self, name: str, place: tuple[int, int], buffers: str) -> Draft:
        chunk, micro_batch = place
        reads, writes = ([placed(buffer, micro_batch) for buffer in side] for side in parse_access(buffers))
        reads, writes = self.layers.buffers.name(reads, writes)
        return Draft(
            kind="compute",
            name=str(name),
            chunk=chunk,
            micro_batch=micro_batch,
            reads=tuple(reads),
            writes=tuple(writes),
        )
