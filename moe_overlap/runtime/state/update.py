"""The update of a step: every update instruction of a list bound to its implementation, for both runners.

1. `gradients` completes the reduction over every group that shares a parameter (`finalize_gradients`). Every list has it, even
   without replicas or after the replicas' reduction in buckets: tied embeddings, gradients that tensor ranks share, expert
   biases and the division by tokens belong to it.
2. `optimizer.norm`: norm and losses become known to all ranks; the loss scale is undone and the gradients are clipped.
3. `optimizer.<group>`: this rank's shard of one parameter group steps.
4. `parameters`: every replica gets the updated weights.

Contract. A runner passes the update instructions of its list one by one, in list order; no other call updates weights.
Preconditions are asserted, never repaired. Steps 3 and 4 change no weight if loss or norm is not finite.

Decoupled stages (ZeRO 2 and 3) leave step 3 to the next list: it begins with it, by the gradients, the norm and the rates of the
step before, or a list of updates alone has it. Their weights have no step 4: the list gathers them group by group.

Steps 1, 2 and 4 are collective, in this order on every rank. `finalize_gradients` repeats megatron-core's `finalize_model_grads`
with explicit groups: megatron-core's own reads `parallel_state` for the routers' expert bias. Stores complete their sums by
`Stores.complete`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
    _allreduce_word_embedding_grads,
    reset_model_temporary_tensors,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moe_overlap.describe.model import TOKEN_COUNT
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.operators import Copied, OperatorKind
from moe_overlap.plan.step import StepResult
from moe_overlap.runtime.context import RunContext
from moe_overlap.runtime.routing.balance_report import forget_balance_losses, mean_balance_losses
from moe_overlap.runtime.state.optimizer import PreparedGradients
from moe_overlap.runtime.state.tied_embedding import TiedEmbedding
from moe_overlap.runtime.step import Batch, naming

WHOLE_STAGE, ONE_GROUP = False, True
"""Whether an instruction belongs to one parameter group."""


def finalize_gradients(
    chunks: Sequence[DistributedDataParallel],
    token_count: Tensor | None,
    groups: ProcessGroupCollection,
    config: TransformerConfig,
    over_replicas: Callable[[], None] | None = None,
) -> None:
    """Reduce the gradients of one rank's chunks.

    Args:
        chunks: DDP-wrapped model chunks whose backward passes are over.
        token_count: with a per-token loss, the tokens of the step that count.
        groups: the stage's groups.
        config: the chunks' TransformerConfig.
        over_replicas: completes the reduction over data-parallel replicas; DDP's own unless given.
    """
    if over_replicas is None:
        for chunk in chunks:
            chunk.finish_grad_sync()
    else:
        over_replicas()
    _allreduce_non_tensor_model_parallel_grads(list(chunks), config, groups.tp)
    _allreduce_word_embedding_grads(list(chunks), config, groups.embd, groups.pp)
    finish_routers(chunks, groups, config)
    if token_count is not None and token_count > 0:
        for chunk in chunks:
            chunk.scale_gradients(1.0 / token_count)


def finish_routers(
    chunks: Sequence[DistributedDataParallel], groups: ProcessGroupCollection, config: TransformerConfig
) -> None:
    """Move the expert biases, and forget what routers have counted in the step. Collective over the stage."""
    if config.moe_router_enable_expert_bias:
        update_expert_bias(chunks, groups.tp_dp_cp, config.moe_router_bias_update_rate)
    reset_model_temporary_tensors(config, list(chunks))


@torch.no_grad()
def update_expert_bias(chunks: Sequence[DistributedDataParallel], group: dist.ProcessGroup, rate: float) -> None:
    """Move each router's bias by `rate` toward its under-used experts (auxiliary-loss-free balancing, DeepSeek-V3, 2.1.2)."""
    routers = [
        module for chunk in chunks for module in chunk.modules() if getattr(module, "expert_bias", None) is not None
    ]
    if not routers:
        return
    counts_RE = torch.stack([router.local_tokens_per_expert for router in routers])
    dist.all_reduce(counts_RE, group=group)
    for router, counts_E in zip(routers, counts_RE, strict=True):
        router.expert_bias += torch.sign(counts_E.mean() - counts_E) * rate


@dataclass(slots=True)
class UpdateState:
    """Progress of one step's update.

    Attributes:
        reports: [sum of the losses, tokens] of this rank's micro-batches, followed by the same of every prediction layer; empty
            off the last stage. Complete when the norm begins.
        token_count: with a per-token loss, the tokens of the step that count (attached_losses.py); None without.
        micro_batches: of this rank.
        is_reduced: whether `gradients` has run.
        gradients: set by `optimizer.norm`, as the losses are.
        loss, tokens, predictions, balance: see `StepResult`.
        is_published: whether `parameters` has run.
    """

    reports: list[Tensor] = field(default_factory=list)
    token_count: Tensor | None = None
    micro_batches: int = 1
    is_reduced: bool = False
    gradients: PreparedGradients | None = None
    loss: float = math.nan
    tokens: int = 0
    predictions: tuple[float, ...] = ()
    balance: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    is_published: bool = False

    @property
    def moves_weights(self) -> bool:
        """Whether the weights move: loss and norm are finite. Both are equal on all ranks, and so is the answer."""
        # If one rank alone updated, its weights would differ from then on.
        assert self.gradients is not None, "the optimizer steps only after the norm of all gradients"
        return math.isfinite(self.loss) and math.isfinite(self.gradients.norm)


Binding = Callable[[Instruction, UpdateState], None]
"""Runs one update instruction to its end."""


class StepUpdate:
    """The update instructions of one rank's list.

    Args:
        context: chunks, optimizer, groups and recorder of this rank.
    """

    def __init__(self, context: RunContext) -> None:
        self._chunks, self._optimizer = context.chunks, context.optimizer
        self._groups, self._recorder = context.groups, context.recorder
        self._queue, self._buckets = context.weight_gradients, context.bucket_reduction
        self._device, self._model = context.device, context.model
        # Stores share the sums of a tied embedding themselves.
        is_tied = bool(context.groups.ends) and context.model.tied_embeddings and context.stores is None
        self._tied = TiedEmbedding(self._chunks, context.groups) if is_tied else None
        self._stores, stage = context.stores, context.stage
        self._is_decoupled = stage.is_decoupled
        # The parameter groups whose update the last step has left, and whether it moves weights.
        self._pending: set[str] = set()
        self._pending_moves = False
        # Only with ZeRO 1 the replicas have to publish what each of them has stepped.
        self._publishes = stage.zero_level == 1 and not stage.is_decoupled
        self._loss_rank = context.plan.stages[context.plan.loss_stage].devices.ranks[-1]
        # A replayed graph adds to the tracker's tensors of the step in which it was captured.
        self._reports_balance = context.graph_stream is None
        self._bound: dict[tuple[OperatorKind, bool], Binding] = {
            (OperatorKind.GRADIENTS, WHOLE_STAGE): self._complete_gradients,
            (OperatorKind.NORM, WHOLE_STAGE): self._take_norm,
            (OperatorKind.OPTIMIZER, ONE_GROUP): self._step_group,
            (OperatorKind.PARAMETERS, WHOLE_STAGE): self._publish,
        }

    def run(self, instruction: Instruction, state: UpdateState) -> None:
        """Run one update instruction.

        Raises:
            ValueError: the instruction has no binding.
            CommunicationFailed: a peer is gone.
        """
        operator = instruction.operator
        binding = self._bound.get((operator.kind, bool(operator.group)))
        if binding is None:
            raise ValueError(f"no binding for {instruction}")
        with naming(instruction.name) if instruction.kind == "collective" else nullcontext():
            binding(instruction, state)

    def result(self, state: UpdateState) -> StepResult:
        """The result of a step after all of its list."""
        assert state.gradients is not None, "the list has ended without the norm of the gradients"
        updated = state.moves_weights
        published = state.is_published or not self._publishes
        assert published or not updated, "the list has ended before the replicas have the updated weights"
        assert not self._pending, f"updates of the step before that the list lacks: {sorted(self._pending)}"
        if self._is_decoupled:
            assert self._stores is not None
            self._pending, self._pending_moves = set(self._stores.groups), updated
        spans = tuple(self._recorder.spans())
        norm, zeros = state.gradients.norm, state.gradients.zeros
        return StepResult(state.loss, state.tokens, norm, updated, zeros, spans, state.predictions, state.balance)

    def _complete_gradients(self, instruction: Instruction, state: UpdateState) -> None:
        """Step 1."""
        # A gradient still in the queue would miss the reduction.
        self._queue.assert_empty()
        config, tokens = self._chunks[0].config, state.token_count
        # Buckets have been reduced where the list placed them: the replicas have nothing left to send.
        over_replicas = self._buckets.finish if self._buckets is not None else None
        with self._recorded(instruction):
            if self._stores is not None:
                self._stores.complete()
                if tokens is not None and tokens > 0:
                    self._stores.scale(1.0 / tokens)
                finish_routers(self._chunks, self._groups.collection, config)
            else:
                if self._tied is not None:
                    self._tied.exchange()
                finalize_gradients(self._chunks, tokens, self._groups.collection, config, over_replicas)
        state.is_reduced = True

    def _take_norm(self, instruction: Instruction, state: UpdateState) -> None:
        """Step 2. Norm and loss are collective, so every rank computes both in this order, even if the first is not finite."""
        assert state.is_reduced, "the norm is taken of reduced gradients"
        # The host waits for the norm next.
        self._recorder.read_reached()
        with self._recorded(instruction):
            state.gradients = self._optimizer.prepare()
            state.loss, state.tokens, state.predictions = self.mean_losses(state.reports)
            if self._reports_balance:
                config, micro_batches = self._chunks[0].config, state.micro_batches
                state.balance = mean_balance_losses(config, self._model, self._groups, micro_batches, self._device)
            forget_balance_losses()

    def _step_group(self, instruction: Instruction, state: UpdateState) -> None:
        """Step 3."""
        group = instruction.operator.group
        if not self._is_decoupled:
            if state.moves_weights:
                with self._recorded(instruction):
                    self._optimizer.step(group)
            return
        assert group in self._pending and self._stores is not None, f"no step has left an update of {group}"
        self._pending.remove(group)
        with self._recorded(instruction):
            if self._pending_moves:
                self._optimizer.step(group)
            else:
                # The list expects on the device what a step writes there.
                self._stores.fetch(group, Copied.WEIGHTS)
            self._stores.clear(group)

    def _publish(self, instruction: Instruction, state: UpdateState) -> None:
        """Step 4. megatron-core copies the master weights of all groups in one call, so the group steps leave it to this one.

        With --overlap-param-gather the next step's first passes gather the weights: only the copies are made here.
        """
        if state.moves_weights:
            with self._recorded(instruction):
                self._optimizer.publish()
        state.is_published = True

    def _recorded(self, instruction: Instruction) -> AbstractContextManager[None]:
        """A span from the start of an instruction's work to its end."""
        self._recorder.place_at(instruction)
        return self._recorder.span(instruction.name, instruction.channel_group)

    def mean_losses(self, reports: Sequence[Tensor]) -> tuple[float, int, tuple[float, ...]]:
        """Compute the mean loss over the tokens of the global batch, their number, and the means of the prediction layers.

        The last stage knows them and sends them to every rank, so that all ranks agree whether the weights move. Collective.
        """
        width = 2 + 2 * (self._chunks[0].config.mtp_num_layers or 0)
        nothing = torch.zeros(width, dtype=torch.double, device=self._device)
        total = torch.stack(list(reports)).double().sum(0) if reports else nothing
        if reports:
            dist.all_reduce(total, group=self._groups.collection.dp_cp)
        dist.broadcast(total, group_src=self._loss_rank, group=self._groups.world)
        loss, *predictions = (total[0::2] / total[1::2].clamp(min=1)).tolist()
        return loss, int(total[1]), tuple(predictions)


def micro_batch_loss(losses_BS: Tensor, batch: Batch, per_token: bool) -> tuple[Tensor, Tensor]:
    """Compute the loss from which the backward pass of a micro-batch starts, and its report.

    Args:
        per_token: --calculate-per-token-loss: the loss is a sum, since gradients are divided by the tokens of the step when all
            are summed. Else it is the mean over the tokens of the micro-batch; ranks that share its sequences each divide the sum
            of their own part by the tokens of all parts.
    Returns:
        The loss, and [sum of the losses that count, their number], which make the mean over the global batch.
    """
    mask = batch["loss_mask"].reshape(-1).float()
    total, tokens = torch.sum(losses_BS.reshape(-1).float() * mask), mask.sum()
    report = torch.stack([total.detach(), tokens.detach()])
    return total if per_token else total / batch.get(TOKEN_COUNT, tokens).clamp(min=1), report


def micro_batches_of(instructions: Sequence[Instruction]) -> int:
    """Number of micro-batches of an instruction list."""
    return 1 + max((i.micro_batch for i in instructions if i.micro_batch is not None), default=-1)
