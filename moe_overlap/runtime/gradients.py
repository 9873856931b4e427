"""The end of a backward pass: gradients reduced over every group that shares a parameter.

megatron-core's `finalize_model_grads` reads `parallel_state` for the routers' expert bias; this is the same sequence with the
groups handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
    _allreduce_word_embedding_grads,
    reset_model_temporary_tensors,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor


def finalize_gradients(
    chunks: Sequence[Any],
    token_count: Tensor | None,
    groups: ProcessGroupCollection,
    config: Any,
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
        dist.broadcast(token_count, group_src=groups.pp.size() - 1, group=groups.pp)
        dist.all_reduce(token_count, group=groups.dp_cp)
        if token_count > 0:
            for chunk in chunks:
                chunk.scale_gradients(1.0 / token_count)


@torch.no_grad()
def update_expert_bias(chunks: Sequence[Any], group: Any, rate: float) -> None:
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
