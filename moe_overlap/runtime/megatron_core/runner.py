"""The step runner over megatron-core's pipeline schedules (1F1B and interleaved), for uniform plans without overlap.

megatron-core's schedule executes the passes; the instruction list states their order, and a test compares the recorded order
with it. The number of micro-batches and the update come from the list.

Three sections: transfers between stages with spans; the runner; spans of the operators outside the layers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moe_overlap.plan.instructions import PIPELINE, Instruction
from moe_overlap.plan.step import StepResult
from moe_overlap.runtime.context import RunContext
from moe_overlap.runtime.layer_collectives import LayerCollectives, channels_inside
from moe_overlap.runtime.routing.balance_report import forget_balance_losses
from moe_overlap.runtime.routing.state import first_micro_batch
from moe_overlap.runtime.spans import SpanRecorder
from moe_overlap.runtime.state.attached_losses import set_attached_scales
from moe_overlap.runtime.state.update import StepUpdate, UpdateState, micro_batch_loss, micro_batches_of
from moe_overlap.runtime.step import Batch


class RecordedTransfers(P2PCommunicator):
    """P2PCommunicator that names its transfers `send.S0>S1`, `receive.S0>S1`, with `.backward` for gradients."""

    def __init__(self, pp_group: dist.ProcessGroup, config: TransformerConfig, recorder: SpanRecorder) -> None:
        super().__init__(pp_group, config)
        self._recorder = recorder
        stage, stages = pp_group.rank(), pp_group.size()
        before, after = (stage - 1) % stages, (stage + 1) % stages
        self._into, self._out = f"S{before}>S{stage}", f"S{stage}>S{after}"

    def _communicate(self, **transfer: Any) -> Any:
        names = [
            name
            for name, is_sent in (
                (f"send.{self._out}", transfer["tensor_send_next"] is not None),
                (f"send.{self._into}.backward", transfer["tensor_send_prev"] is not None),
                (f"receive.{self._into}", transfer["recv_prev"]),
                (f"receive.{self._out}.backward", transfer["recv_next"]),
            )
            if is_sent
        ]
        if not names:
            return super()._communicate(**transfer)
        # A blocking transfer holds up the rank, so the compute span ends; one in the background runs beside it.
        blocking = transfer.get("wait_on_reqs", True)
        if blocking:
            self._recorder.end()
        opened = [self._recorder.background(name, PIPELINE) for name in names]
        received_previous, received_next, requests = super()._communicate(**transfer)
        if blocking or not requests:
            for span in opened:
                self._recorder.finish_background(span)
            return received_previous, received_next, requests
        pending = _PendingSpans(self._recorder, opened, len(requests))
        if isinstance(requests, dict):
            requests = {key: _RecordedRequest(request, pending) for key, request in requests.items()}
        else:
            requests = [_RecordedRequest(request, pending) for request in requests]
        return received_previous, received_next, requests


class _PendingSpans:
    """The spans of one call of the communicator; they end when its last request has been waited for."""

    def __init__(self, recorder: SpanRecorder, opened: list[Any], requests: int) -> None:
        self.recorder, self.opened, self.waiting = recorder, opened, requests

    def finish_request(self) -> None:
        self.waiting -= 1
        if self.waiting == 0:
            for span in self.opened:
                self.recorder.finish_background(span)


class _RecordedRequest:
    """A request of torch.distributed; waiting for it ends the compute span before it."""

    def __init__(self, request: Any, pending: _PendingSpans) -> None:
        self._request, self._pending = request, pending

    def wait(self) -> None:
        self._pending.recorder.end()
        self._request.wait()
        self._pending.finish_request()


class ScheduledChunk(torch.nn.Module):
    """A model chunk as megatron-core's schedule sees it.

    The schedules read their callbacks (loss scale, gradient reduction) from the configuration of the outermost module. The model
    was built from its TransformerConfig and shares it with every layer; this module carries a copy for the schedule instead.
    """

    def __init__(self, chunk: DistributedDataParallel, config: TransformerConfig) -> None:
        super().__init__()
        self.module, self.config = chunk, config

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Forward pass of the chunk."""
        output: Tensor = self.module(*inputs, **options)
        return output


class MegatronStepRunner:
    """Executes uniform plans without overlap on megatron-core's 1F1B and interleaved schedules.

    Args:
        context: this rank's part of the run.
    Attributes:
        context: the same.
    """

    def __init__(self, context: RunContext) -> None:
        self.context, self._recorder, self._optimizer = context, context.recorder, context.optimizer
        self._update = StepUpdate(context)
        self._loss_scale = 1.0
        self._ending: tuple[Instruction, UpdateState] | None = None
        pipeline, chunks = context.groups.collection.pp, context.chunks
        config = self._schedule_config()
        self._scheduled = [ScheduledChunk(chunk, config) for chunk in chunks]
        self._schedule = get_forward_backward_func(
            pp_size=pipeline.size(), vp_size=len(chunks) if len(chunks) > 1 else None
        )
        self._transfers = RecordedTransfers(pipeline, config, self._recorder) if pipeline.size() > 1 else None
        self._collectives = LayerCollectives(self._recorder, channels_inside(context.groups.collection))
        for model in context.models:
            _record_ends(model, self._recorder)

    def _schedule_config(self) -> TransformerConfig:
        """The chunks' configuration with the callbacks of the schedule, as a copy."""
        chunks = self.context.chunks
        config = copy.copy(chunks[0].config)
        config.finalize_model_grads_func = self._finalize
        config.grad_scale_func = self._scaled
        # Without these the schedule leaves the scales of attached losses as `run` has set them.
        config.num_moe_experts = config.mtp_num_layers = None
        # Without overlapped reduction DDP reduces in `finish_grad_sync` only: nothing is held back between micro-batches.
        config.no_sync_func = None
        if chunks[0].ddp_config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in chunks]
            # Only the last micro-batch may start a reduction: earlier ones would send incomplete gradients.
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
            if len(chunks) > 1:
                config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
        return config

    def run(self, instructions: Sequence[Instruction], batches: Iterator[Batch], step: int) -> StepResult:
        """Forward and backward of every micro-batch, gradient reduction, optimizer step."""
        self._recorder.start_step()
        # Read once: an overflow changes the scale at the step's end, and all micro-batches must share one.
        self._loss_scale = self._optimizer.loss_scale
        self._optimizer.zero_grad()
        for chunk in self.context.chunks:
            chunk.train()
        # megatron-core's schedule ends with the reduction of gradients: it runs the first update instruction (`_finalize`).
        completing, *update = (i for i in instructions if i.operator.is_update)
        arrived = self._arrived(instructions, batches)
        state = UpdateState(micro_batches=len(arrived))
        state.token_count = set_attached_scales(self.context, arrived, self._loss_scale)
        self._ending = completing, state
        state.reports = self._pass(arrived, step, forward_only=False)
        for instruction in update:
            self._update.run(instruction, state)
        return self._update.result(state)

    def flush(self, instructions: Sequence[Instruction]) -> None:
        """Nothing to do: this runner's steps leave no updates."""
        assert not instructions

    @torch.no_grad()
    def evaluate(self, instructions: Sequence[Instruction], batches: Iterator[Batch], step: int) -> StepResult:
        """Forward of every micro-batch of the list, without gradients."""
        self._recorder.start_step()
        for chunk in self.context.chunks:
            chunk.eval()
        reports = self._pass(self._arrived(instructions, batches), step, forward_only=True)
        loss, tokens, predictions = self._update.mean_losses(reports)
        forget_balance_losses()
        return StepResult(loss, tokens, math.nan, False, None, tuple(self._recorder.spans()), predictions)

    @staticmethod
    def _arrived(instructions: Sequence[Instruction], batches: Iterator[Batch]) -> list[Batch]:
        return [next(batches) for _ in range(micro_batches_of(instructions))]

    def _pass(self, arrived: Sequence[Batch], step: int, forward_only: bool) -> list[Tensor]:
        """Run the schedule over micro-batches; returns [loss sum, tokens, …] of each, on the last stage only."""
        # Every chunk of an interleaved pipeline reads the same micro-batches, each at its own pace.
        feeds = [enumerate(arrived) for _ in self._scheduled]
        several = len(self._scheduled) > 1
        for chunk in self.context.chunks:
            # The schedule calls this on the wrapper, which does not pass it on: 8-bit weights would stay those of the first
            # step.
            chunk.set_is_first_microbatch()
        with self._collectives.recorded():
            reports: list[Tensor] = self._schedule(
                forward_step_func=partial(self._forward_step, step),
                data_iterator=feeds if several else feeds[0],
                model=self._scheduled if several else self._scheduled[0],
                num_microbatches=len(arrived),
                seq_length=self.context.plan.sequence_length,
                micro_batch_size=self.context.stage.micro_batch_size,
                forward_only=forward_only,
                p2p_communicator=self._transfers,
                pg_collection=self.context.groups.collection,
            )
        return reports

    def _forward_step(
        self, step: int, feed: Iterator[tuple[int, Batch]], chunk: ScheduledChunk
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
        micro_batch, batch = next(feed)
        # The schedule hands over the module, not the number of its chunk.
        chunk_index = next(index for index, scheduled in enumerate(self._scheduled) if scheduled is chunk)
        self._recorder.forward(chunk_index, micro_batch)
        self.context.clock.micro_batch = first_micro_batch(step) + micro_batch
        inputs = batch["tokens"], batch["position_ids"], batch.get("attention_mask")
        output = chunk(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"])
        predicted = getattr(self.context.models[chunk_index], "prediction_report", None)
        return output, partial(self._loss, batch, predicted)

    def _loss(self, batch: Batch, predicted: Tensor | None, losses_BS: Tensor) -> tuple[Tensor, ...]:
        """Loss of one micro-batch and its report; with a per-token loss, the number of its tokens between them.

        Args:
            predicted: the reports of the prediction layers, where there are any.
        """
        per_token = self.context.chunks[0].config.calculate_per_token_loss
        loss, sums = micro_batch_loss(losses_BS, batch, per_token)
        report = sums if predicted is None else torch.cat([sums, predicted])
        return (loss, sums[1].to(torch.int), report) if per_token else (loss, report)

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss * self._loss_scale

    def _finalize(self, *_: Any, **__: Any) -> None:
        """Reduce the gradients; the schedule's own arguments name what the context and the step's state hold."""
        assert self._ending is not None
        self._update.run(*self._ending)


def _record_ends(model: GPTModel, recorder: SpanRecorder) -> None:
    """Record spans of the operators outside the layers: embedding, final norm, head and loss, prediction layers."""

    def begins(name: str) -> Any:
        return lambda *_: recorder.begin(name)

    def marks(name: str) -> Any:
        return lambda _module, _inputs, output: recorder.on_backward(name, output)

    if model.pre_process:
        model.embedding.register_forward_pre_hook(begins("embedding"))
        model.embedding.register_forward_hook(marks("embedding.backward"))
    if model.post_process:
        if model.decoder.final_layernorm is not None:
            model.decoder.final_layernorm.register_forward_pre_hook(begins("head.norm"))
            model.decoder.final_layernorm.register_forward_hook(marks("head.norm.backward"))
        predicting = model.mtp.layers if model.mtp_process else ()
        for depth, layer in enumerate(predicting):
            _record_prediction(layer, f"mtp{depth}", recorder)
        if predicting:
            predicting[-1].loss.register_forward_hook(begins("head.loss"))
        else:
            model.output_layer.register_forward_pre_hook(begins("head.loss"))
        model.register_forward_hook(marks("head.loss.backward"))


def _record_prediction(layer: Any, operator: str, recorder: SpanRecorder) -> None:
    """Record spans of a prediction layer around the transformer layer inside it."""

    def projected(_module: Any, _inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return recorder.on_backward(f"{operator}.project.backward", output[0]), output[1]

    # Its first norm begins a recomputation, which leaves the embedding out.
    for module in (layer, layer.enorm):
        module.register_forward_pre_hook(lambda *_: recorder.begin(f"{operator}.project"))
    layer.eh_proj.register_forward_hook(projected)
    layer.loss.register_forward_pre_hook(lambda *_: recorder.begin(f"{operator}.loss"))
    layer.loss.register_forward_hook(lambda _m, _i, loss: recorder.on_backward(f"{operator}.loss.backward", loss))
