"""The weight of losses beside the main one: balancing losses, z-loss, and the losses of prediction layers.

Contract. In every layout, and with --calculate-per-token-loss as without, the gradient of a step is that of

    main loss + Σ coefficient · mean of the attached loss over the step's micro-batches and data-parallel replicas.

The reference is one process that has the global batch in one micro-batch.

- `seq_aux_loss`, a mean over samples, and the z-loss, a mean over the router's tokens, have its gradient however the batch is
  split.
- `aux_loss` is a product of two means over a micro-batch, and `global_aux_loss` counts what the micro-batches of the step so
  far have sent to each expert: their values depend on the split, their weights do not.
- The loss of a prediction layer is averaged as the main loss: over those tokens of a micro-batch that count, or, with a loss
  per token, over those of the step.

How. A router or prediction layer attaches the share of its rank: the shares of all ranks that hold a micro-batch (tensor and
context ranks) add up to coefficient · loss. The backward pass multiplies every share by one scale, which is set here before
the step's first micro-batch. Behind the passes all gradients are divided by the replicas, or by the tokens of the step: the
scale undoes that, and divides by micro-batches and replicas.

megatron-core would set scales of its own in every micro-batch. With a loss per token they lack the number of tensor and
context ranks and the samples of a micro-batch (`seq_aux_loss`), and take tokens that a mask hides for such that count; in
every form the `global_aux_loss` lacks the number of replicas (`stage_config.py` puts it into the coefficient).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, roll_tensor
from torch import Tensor

from moe_overlap.runtime.context import RunContext
from moe_overlap.runtime.step import Batch, naming


def micro_batch_share(context: RunContext, micro_batches: int) -> float:
    """The factor of a micro-batch's loss in a rank's sum of gradients, with which the step's gradient is that of the mean.

    Args:
        micro_batches: of this rank.
    """
    config = context.chunks[0].config
    if config.calculate_per_token_loss or context.plan.sums_gradients:
        # Replicas add up: those of one stage are not those of another.
        return 1.0 / (micro_batches * context.stage.data)
    # DDP takes the mean over the ranks that share a sequence, too; each has a part of the sum.
    return context.groups.collection.cp.size() / micro_batches


def set_attached_scales(context: RunContext, batches: Sequence[Batch], loss_scale: float) -> Tensor | None:
    """Set the scale of every attached loss for one step. Collective over the stage's replicas with a per-token loss.

    Args:
        batches: all micro-batches of this rank in the step.
        loss_scale: the optimizer's.
    Returns:
        Tokens of the step that count, int64; None without a per-token loss.
    Raises:
        CommunicationFailed: a peer is gone.
    """
    share, tokens = micro_batch_share(context, len(batches)), None
    scale = torch.full((1,), loss_scale * share, device=context.device)
    if context.chunks[0].config.calculate_per_token_loss:
        model: Any = context.models[-1]
        layers = model.config.mtp_num_layers if getattr(model, "mtp_process", False) else 0
        counts = _count_tokens(batches, layers or 0, context.groups.collection)
        # The update divides all gradients by the tokens of the step.
        tokens, scale = counts[0], scale * counts[0]
        if layers:
            model.mean_counts = counts[1:].clamp(min=1) * share
    MoEAuxLossAutoScaler.set_loss_scale(scale)
    MTPLossAutoScaler.set_loss_scale(scale)
    return tokens


def _count_tokens(batches: Sequence[Batch], layers: int, collection: Any) -> Tensor:
    """[1 + layers] tokens of the step that count in the main loss and in the loss of each prediction layer, int64."""
    mask_BS = torch.cat([batch["loss_mask"] for batch in batches])
    masks = [mask_BS]
    for _ in range(layers):
        masks.append(roll_tensor(masks[-1], cp_group=collection.cp)[0])
    counts = torch.stack([mask.sum(dtype=torch.double) for mask in masks]).long()
    with naming("tokens of the step"):
        dist.all_reduce(counts, group=collection.dp_cp)
    return counts
