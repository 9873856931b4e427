"""Cross entropy of logits whose vocabulary is split over the tensor-parallel ranks, and the model that trains by it.

The steps are megatron-core's (tensor_parallel/cross_entropy.py). Its own functions around them do not do: one reads a global
group, the fused one rounds the logits' gradient to bf16 whatever their type (fusions/fused_cross_entropy.py:82).

Legend: S sequence (this rank's part of it), B batch, V vocabulary (this rank's part of it).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy as Steps
from megatron.core.tensor_parallel.utils import VocabUtility
from torch import Tensor


def cross_entropy(logits_SBV: Tensor, labels_SB: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Losses [S, B] in fp32, nats; the logits get a gradient of their own type, rounded once from fp32.

    Args:
        logits_SBV: fp32 ones are used up: the probabilities take their memory, as in megatron-core.
        labels_SB: numbers in the whole vocabulary.
        group: the tensor-parallel ranks, in the order of their parts of the vocabulary.
    """
    losses: Tensor = _CrossEntropy.apply(logits_SBV, labels_SB, group)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_SBV: Tensor, labels_SB: Tensor, group: dist.ProcessGroup) -> Tensor:
        wide_SBV, largest_SB = Steps.calculate_logits_max(logits_SBV)
        dist.all_reduce(largest_SB, op=dist.ReduceOp.MAX, group=group)
        first, end = VocabUtility.vocab_range_from_per_partition_vocab_size(
            logits_SBV.size(-1), group.rank(), group.size()
        )
        elsewhere_SB, columns, chosen_SB, sums_SB, wide_SBV = Steps.calculate_predicted_logits(
            wide_SBV, labels_SB, largest_SB, first, end
        )
        both = torch.stack((chosen_SB, sums_SB))
        dist.all_reduce(both, group=group)
        probabilities_SBV, losses_SB = Steps.calculate_cross_entropy_loss(wide_SBV, *both.unbind())
        ctx.save_for_backward(probabilities_SBV, elsewhere_SB, columns)
        ctx.logits_type = logits_SBV.dtype
        return losses_SB

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (of_losses_SB,) = gradients
        probabilities_SBV, elsewhere_SB, columns = ctx.saved_tensors
        flat, rows, here, wide_SBV = Steps.prepare_gradient_calculation_operands(probabilities_SBV, elsewhere_SB)
        gradient_SBV = Steps.calculate_gradients(flat, rows, columns, here, wide_SBV, of_losses_SB)
        return gradient_SBV.to(ctx.logits_type), None, None


class LanguageModel(GPTModel):
    """megatron-core's model with this loss. The runtime's executor reaches it through the same method."""

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Losses [B, S] of labels [B, S] and logits [S, B, V]. Megatron-core's name, which its forward calls."""
        losses_SB = cross_entropy(logits, labels.transpose(0, 1).contiguous(), self.pg_collection.tp)
        return losses_SB.transpose(0, 1).contiguous()
