"""The end of a step, shared by the runners.

1. Gradients are reduced over every group that shares a parameter (`finalize_gradients`).
2. Norm and loss become known to all ranks; the gradients are clipped.
3. The optimizer steps one parameter group after the other, in the order of the instruction list.
4. The updated weights are made visible to every replica.

Steps 1, 2 and 4 are collective, in this order on every rank. `finalize_gradients` is the sequence of megatron-core's
`finalize_model_grads` with the groups handed over: megatron-core's own reads `parallel_state` for the routers' expert bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

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

from moe_overlap.plan.instructions import Instruction
from moe_overlap.runtime.context import RunContext
from moe_overlap.runtime.step import StepResult, naming


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
        token_count: with a per-token loss, the tokens of this rank's micro-batches (right on the last stage only).
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
    if config.moe_router_enable_expert_bias:
        update_expert_bias(chunks, groups.tp_dp_cp, config.moe_router_bias_update_rate)
    reset_model_temporary_tensors(config, list(chunks))
    if token_count is not None:
        # Only the last stage sees losses; every stage must divide its gradients by the same number of tokens.
        dist.broadcast(token_count, group_src=groups.pp.size() - 1, group=groups.pp)
        dist.all_reduce(token_count, group=groups.dp_cp)
        if token_count > 0:
            for chunk in chunks:
                chunk.scale_gradients(1.0 / token_count)


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


class StepUpdate:
    """The operations that follow the last backward pass.

    Args:
        context: chunks, optimizer, groups and recorder of this rank.
    """

    def __init__(self, context: RunContext) -> None:
        self._chunks, self._optimizer = context.chunks, context.optimizer
        self._groups, self._recorder = context.groups, context.recorder
        self._device = context.device

    def reduce(self, token_count: Tensor | None = None, over_replicas: Callable[[], None] | None = None) -> None:
        """Reduce the gradients over every group that shares a parameter; arguments as `finalize_gradients`."""
        # Buckets have spans of their own among the passes: what is left is completed here and sends nothing over replicas.
        in_buckets = over_replicas is not None
        span = nullcontext() if in_buckets else self._replica_span("gradients")
        with naming("gradients"), span:
            config = self._chunks[0].config
            finalize_gradients(self._chunks, token_count, self._groups.collection, config, over_replicas)

    def finish(self, instructions: Sequence[Instruction], reports: Sequence[Tensor]) -> StepResult:
        """Norm, clipping and the list's optimizer instructions; the weights stay when loss or norm is not finite.

        Args:
            reports: [sum of the losses, tokens] of this rank's micro-batches, followed by the same of every prediction
                layer; empty off the last stage.
        """
        with self._recorder.span("optimizer.norm", "dp"):
            # Step 2. Both are collective, hence on every rank in this order, whatever the first one finds.
            gradients = self._optimizer.prepare()
            loss, tokens, predictions = self.mean_losses(reports)
        # Equal on all ranks, as both numbers are: a rank that updated alone would hold other weights for good.
        updated = math.isfinite(loss) and math.isfinite(gradients.norm)
        if updated:
            # Step 3.
            for instruction in instructions:
                if instruction.kind == "optimizer":
                    with self._recorder.span(instruction.name, "compute"):
                        self._optimizer.step(instruction.operator.group)
            # Step 4.
            with self._replica_span("parameters"):
                self._optimizer.publish()
        spans = tuple(self._recorder.spans())
        return StepResult(loss, tokens, gradients.norm, updated, gradients.zeros, spans, predictions)

    def mean_losses(self, reports: Sequence[Tensor]) -> tuple[float, int, tuple[float, ...]]:
        """Compute the mean loss over the tokens of the global batch, their number, and the means of the prediction layers.

        The last stage knows them and tells every rank, so that all ranks decide alike whether the weights move. Collective.
        """
        width = 2 + 2 * (self._chunks[0].config.mtp_num_layers or 0)
        nothing = torch.zeros(width, dtype=torch.double, device=self._device)
        total = torch.stack(list(reports)).double().sum(0) if reports else nothing
        if reports:
            dist.all_reduce(total, group=self._groups.collection.dp_cp)
        dist.broadcast(total, group_src=dist.get_world_size() - 1, group=self._groups.world)
        loss, *predictions = (total[0::2] / total[1::2].clamp(min=1)).tolist()
        return loss, int(total[1]), tuple(predictions)

    def _replica_span(self, name: str) -> AbstractContextManager[None]:
        """Open a span on the replicas' channel; without replicas nothing is sent and nothing recorded."""
        collection = self._groups.collection
        if collection.dp_cp.size() == collection.expt_dp.size() == 1:
            self._recorder.end()
            return nullcontext()
        return self._recorder.span(name, "dp")


def micro_batch_loss(losses_BS: Tensor, mask_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the losses of one micro-batch that count; returns the sum and their number."""
    mask = mask_BS.reshape(-1).float()
    return torch.sum(losses_BS.reshape(-1).float() * mask), mask.sum()


def micro_batches_of(instructions: Sequence[Instruction]) -> int:
    """Number of micro-batches of an instruction list."""
    return 1 + max(i.micro_batch for i in instructions if i.micro_batch is not None)
