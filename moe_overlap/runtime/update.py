"""The end of a step, shared by the runners: loss of the global batch, gradients reduced, optimizer stepped part by part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_overlap.plan.instructions import Instruction
from moe_overlap.runtime.gradients import finalize_gradients
from moe_overlap.runtime.groups import StageGroups
from moe_overlap.runtime.optimizer import LayerwiseOptimizer
from moe_overlap.runtime.spans import SpanRecorder
from moe_overlap.runtime.step import StepResult, naming


class StepUpdate:
    """What follows the last backward pass.

    Args:
        chunks: this rank's DDP-wrapped model chunks.
    """

    def __init__(
        self, chunks: Sequence[Any], optimizer: LayerwiseOptimizer, groups: StageGroups, recorder: SpanRecorder
    ) -> None:
        self._chunks, self._optimizer, self._groups, self._recorder = chunks, optimizer, groups, recorder

    def reduce(self, token_count: Tensor | None = None, over_replicas: Callable[[], None] | None = None) -> None:
        """Reduce the gradients over every group that shares a parameter; arguments as `finalize_gradients`."""
        with naming("gradients"), self._replica_span("gradients"):
            config = self._chunks[0].config
            finalize_gradients(self._chunks, token_count, self._groups.collection, config, over_replicas)

    def finish(self, instructions: Sequence[Instruction], reports: Sequence[Tensor]) -> StepResult:
        """Norm, clipping and the list's optimizer instructions; the weights stay when loss or norm is not finite.

        Args:
            reports: [sum of the losses, tokens] of this rank's micro-batches, followed by the same of every prediction
                layer; empty off the last stage.
        """
        with self._recorder.span("optimizer.norm", "dp"):
            gradients = self._optimizer.prepare()
            loss, tokens, predictions = self.mean_losses(reports)
        updated = math.isfinite(loss) and math.isfinite(gradients.norm)
        if updated:
            for instruction in instructions:
                if instruction.kind == "optimizer":
                    with self._recorder.span(instruction.name, "compute"):
                        self._optimizer.step(instruction.name.removeprefix("optimizer."))
            with self._replica_span("parameters"):
                self._optimizer.publish()
        spans = tuple(self._recorder.spans())
        return StepResult(loss, tokens, gradients.norm, updated, gradients.zeros, spans, predictions)

    def mean_losses(self, reports: Sequence[Tensor]) -> tuple[float, int, tuple[float, ...]]:
        """Mean over the tokens of the global batch and their number, and the means of the prediction layers.

        Known to the last stage, told to every rank.
        """
        device = next(self._chunks[0].parameters()).device
        width = 2 + 2 * (self._chunks[0].config.mtp_num_layers or 0)
        nothing = torch.zeros(width, dtype=torch.double, device=device)
        total = torch.stack(list(reports)).double().sum(0) if reports else nothing
        if reports:
            dist.all_reduce(total, group=self._groups.collection.dp_cp)
        dist.broadcast(total, group_src=dist.get_world_size() - 1, group=self._groups.world)
        loss, *predictions = (total[0::2] / total[1::2].clamp(min=1)).tolist()
        return loss, int(total[1]), tuple(predictions)

    def _replica_span(self, name: str) -> AbstractContextManager[None]:
        """A span of the replicas' channel; without replicas nothing is sent and nothing recorded."""
        collection = self._groups.collection
        if collection.dp_cp.size() == collection.expt_dp.size() == 1:
            self._recorder.end()
            return nullcontext()
        return self._recorder.span(name, "dp")


def micro_batch_loss(losses_BS: Tensor, mask_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the losses of one micro-batch that count, and their number."""
    mask = mask_BS.reshape(-1).float()
    return torch.sum(losses_BS.reshape(-1).float() * mask), mask.sum()


def micro_batches_of(instructions: Sequence[Instruction]) -> int:
    """Micro-batches of a list."""
    return 1 + max(i.micro_batch for i in instructions if i.micro_batch is not None)
