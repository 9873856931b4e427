"""Operators bound to modules: what each compute and all-to-all instruction of a list does on this rank.

Contract. Two dictionaries name the bound function of every operator kind, forward and backward. A binding decides nothing: the
list says which operator runs when, on which partition of the batch, and what it waits for.
1. A forward operator runs as an autograd segment (segments.py), stored under its place (state.py) until its backward operator
   runs that segment backward.
2. An operator that is recomputed keeps no graph the first time; its recomputation, an instruction of the list, makes the
   segment.
3. All-to-alls run outside autograd: `start_all_to_all` starts one; the function it returns waits and stores the received rows.

Legend: S sequence, B batch (of the partition), H hidden, T = S · B tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from moe_overlap.plan.instructions import BufferRole as R
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.operators import (
    ATTENTION,
    BACKWARD,
    COMBINE,
    COUNT,
    DISPATCH,
    EMBEDDING,
    EXPERTS,
    FORWARD,
    GATE,
    HEAD_LOSS,
    HEAD_NORM,
    MERGE,
    MLP,
    RECOMPUTE,
    SHARED,
    OperatorId,
    OperatorKind,
)
from moe_overlap.runtime.dispatch.capacity_chunks import join_chunks
from moe_overlap.runtime.dispatch.irregular import IrregularDispatcher
from moe_overlap.runtime.executor.buffers import BATCH
from moe_overlap.runtime.executor.graphs import ReplayedSegment, SegmentGraphs
from moe_overlap.runtime.executor.precision import LayerPrecision
from moe_overlap.runtime.executor.rotary import rotary_table, rotate_projection
from moe_overlap.runtime.executor.segments import LayerDraws, Segment, recompute_by_the_list
from moe_overlap.runtime.executor.state import (
    StepState,
    handle_of,
    layer_of,
    micro_batch_of,
    partition_of,
    place_of,
    read_stem,
    reads,
    reads_whole,
    travelling,
    writes,
    written_stem,
)
from moe_overlap.runtime.routing.gate import Gate
from moe_overlap.runtime.routing.state import RoutingState
from moe_overlap.runtime.spans import SpanRecorder
from moe_overlap.runtime.step import Batch

ROUTING = "routing"
"""Key under which a gate leaves its routing state, which a captured graph writes, beside the handles of its partitions."""
Binding = Callable[[Instruction, OperatorId, StepState], None]
"""Runs one operator of a model chunk, forward or backward."""
Saving = Callable[[str, int], AbstractContextManager[None]]
"""(parameter group, micro-batch) -> the context of a forward operator whose activations wait on the host."""


class ChunkOperators:
    """The operators of one model chunk.

    Args:
        model: the GPTModel of the chunk, without wrappers around its modules.
        loss: from per-token losses [B, S] and their micro-batch to (loss, [sum, tokens]).
        graphs: captures the segments that the list says; None: none is captured.
        saving: None if no activations wait on the host.
    """

    def __init__(
        self,
        model: Any,
        sequence_length: int,
        loss: Callable[[Tensor, Batch], tuple[Tensor, Tensor]],
        dispatcher: IrregularDispatcher,
        recorder: SpanRecorder,
        graphs: SegmentGraphs | None = None,
        saving: Saving | None = None,
    ) -> None:
        self._recorder, self._graphs, self._saving = recorder, graphs, saving
        self._model, self._loss, self._dispatcher = model, loss, dispatcher
        self._layers = {layer.layer_number - 1: layer for layer in model.decoder.layers}
        self._rotary = rotary_angles(model, sequence_length)
        self._rotated = _rotated_projections(model, self._rotary)
        self._draws, self._precision = LayerDraws(model.config), LayerPrecision(model.config)
        for layer in model.decoder.layers:
            recompute_by_the_list(layer)
        self._forward_of: dict[OperatorKind, Binding] = {
            EMBEDDING: self._embedding,
            HEAD_NORM: self._head_norm,
            HEAD_LOSS: self._head_loss,
            ATTENTION: self._attention,
            MLP: self._mlp,
            GATE: self._gate,
            SHARED: self._shared,
            EXPERTS: self._experts,
            MERGE: self._merge,
        }
        self._backward_of: dict[OperatorKind, Binding] = {
            EMBEDDING: self._embedding_backward,
            HEAD_NORM: self._head_norm_backward,
            HEAD_LOSS: self._head_loss_backward,
            ATTENTION: self._attention_backward,
            MLP: self._mlp_backward,
            GATE: self._gate_backward,
            SHARED: self._shared_backward,
            EXPERTS: self._experts_backward,
            MERGE: self._merge_backward,
        }

    def compute(self, instruction: Instruction, state: StepState) -> None:
        """Run a compute instruction."""
        self._recorder.computing(instruction)
        operator = instruction.operator
        place = place_of(instruction, operator)
        if operator.phase is BACKWARD:
            self._backward_of[operator.kind](instruction, operator, state)
            self._copy_out(instruction, state)
            return
        run = partial(self._forward_of[operator.kind], instruction, operator, state)
        if operator.phase is RECOMPUTE:
            with self._draws.again(place), self._precision.again(operator.layer):
                run()
            return
        has_backward = torch.is_grad_enabled()
        # 2. of the contract: what runs again in the backward pass saves nothing now.
        repeated = has_backward and instruction.name in state.recomputed
        with_graph = has_backward and not repeated
        drawing = self._draws.first(place, repeated) if operator.layer is not None else nullcontext()
        precision = self._precision.first(operator.layer, repeated)
        saving: AbstractContextManager[None] = nullcontext()
        if self._saving is not None and with_graph and operator.layer is not None:
            saving = self._saving(operator.group, micro_batch_of(instruction))
        with drawing, precision, saving, torch.set_grad_enabled(with_graph):
            run()
        self._copy_out(instruction, state)
        if not with_graph:
            del state.segments[place]
            # The recomputation opens its own handle. In a pass without graph, merge is the last reader of the handle and of
            # its capacity chunks.
            if operator.kind is MERGE:
                del state.handles[(layer_of(operator), *place[2:])]
                state.chunks.pop((layer_of(operator), micro_batch_of(instruction)), None)

    def _segment(
        self,
        i: Instruction,
        run: Callable[..., Any],
        inputs: Sequence[Tensor | None],
        aside: dict[Any, Any] | None = None,
    ) -> Segment | ReplayedSegment:
        """One forward operator; the list may have it replayed by a graph."""
        if self._graphs is None or not torch.is_grad_enabled():
            return Segment(run, inputs, aside)
        return self._graphs.segment(i, run, inputs, {} if aside is None else aside)

    def _copy_out(self, i: Instruction, state: StepState) -> None:
        """Copy a sent buffer out of a graph's memory: the next micro-batch may overwrite it before the transfer has ended."""
        for name in self._graphs.sent(i) if self._graphs is not None else ():
            state.buffers.replace(name, torch.clone)

    # Embedding, head

    def _embedding(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        batch = state.batches[micro_batch_of(i)]
        segment = Segment(lambda: self._model.embedding(batch["tokens"], batch["position_ids"]), ())
        state.segments[place_of(i, operator)] = segment
        state.buffers.write(i, written_stem(i, R.HIDDEN), segment.take()[0])

    def _embedding_backward(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        state.segments.pop(place_of(i, operator)).backward(state.buffers.read(i, read_stem(i, R.D_HIDDEN)))

    def _head_norm(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        self._forward(i, operator, state, self._model.decoder.final_layernorm, [read_stem(i, R.HIDDEN)], [R.NORMED])

    def _head_norm_backward(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        self._backward(i, operator, state, [R.D_NORMED], [written_stem(i, R.D_HIDDEN)])

    def _head_loss(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        batch = state.batches[micro_batch_of(i)]

        def head(hidden_SBH: Tensor) -> Tensor:
            losses_BS = self._model._postprocess(
                hidden_states=hidden_SBH,
                input_ids=None,
                position_ids=None,
                labels=batch["labels"],
                rotary_pos_emb=None,
                rotary_pos_cos=None,
                rotary_pos_sin=None,
            )
            loss, report = self._loss(losses_BS, batch)
            state.update.reports.append(report)
            return loss

        state.segments[place_of(i, operator)] = Segment(head, [state.buffers.read(i, R.NORMED)])

    def _head_loss_backward(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        segment = state.segments.pop(place_of(i, operator))
        # The scale enters as the loss's gradient: the reported loss stays unscaled.
        (loss,) = segment.take()
        scale = torch.full_like(loss, state.loss_scale)
        state.buffers.write(i, R.D_NORMED, segment.backward(scale)[0])

    # Attention, dense MLP

    def _attention(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        n = layer_of(operator)
        layer, angles = self._layers[n], None if n in self._rotated else self._rotary
        mask = state.batches[micro_batch_of(i)].get("attention_mask")
        if mask is not None and i.partition:
            mask = mask.chunk(state.buffers.partitions(i))[i.partition[0]]

        def attend(hidden_SBH: Tensor, mask: Tensor | None) -> Tensor:
            return TransformerLayer._forward_attention(layer, hidden_SBH, mask, rotary_pos_emb=angles)[0]

        segment = self._segment(i, attend, [state.buffers.read(i, read_stem(i, R.HIDDEN)), mask])
        state.segments[place_of(i, operator)] = segment
        state.buffers.write(i, written_stem(i, R.ATTENDED), segment.take()[0])

    def _attention_backward(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        # The mask, an input like the hidden states, has no gradient.
        self._backward(i, operator, state, [read_stem(i, R.D_ATTENDED)], [written_stem(i, R.D_HIDDEN), ""])

    def _mlp(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        layer = self._layers[layer_of(operator)]
        run = lambda hidden_SBH: TransformerLayer._forward_mlp(layer, hidden_SBH)  # noqa: E731
        self._forward(i, operator, state, run, [read_stem(i, R.ATTENDED)], [written_stem(i, R.HIDDEN)])

    def _mlp_backward(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        self._backward(i, operator, state, [read_stem(i, R.D_HIDDEN)], [written_stem(i, R.D_ATTENDED)])

    # Mixture of experts

    def _gate(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        n = layer_of(operator)
        layer, keys = self._layers[n], travelling(i, n, i.writes, R.ROWS)
        opened: dict[Any, Any] = {}

        def route(hidden_SBH: Tensor) -> tuple[Tensor, ...]:
            normed_SBH = TransformerLayer._forward_pre_mlp_layernorm(layer, hidden_SBH)
            routed_TE = self._route(layer.mlp, normed_SBH, i, state, n)
            opened[ROUTING] = state.routing.get((n, micro_batch_of(i)))
            samples, rows = normed_SBH.shape[BATCH], []
            sent = layer.mlp.fc1_latent_proj(normed_SBH)[0] if layer.config.moe_latent_size else normed_SBH
            # A gate may decide on the whole micro-batch while its rows travel in partitions: samples are told apart
            # only up to here, since permuted rows are ordered by expert.
            parts = zip(*(_cut(x, samples, len(keys)) for x in (sent, *routed_TE)), strict=True)
            for key, (x_TH, probs_TE, map_TE) in zip(keys, parts, strict=True):
                # The gate bounds its rows, so that the host does not ask the device how many there are.
                routing = state.routing.get((n, micro_batch_of(i)))
                most_rows = self._most_rows(layer.mlp, map_TE.shape[0], routing)
                capacity = self._static_capacity(layer.mlp, routing)
                packed, opened[key[2]] = self._dispatcher.permute(
                    x_TH, probs_TE, map_TE, f"L{n}.moe", most_rows, capacity
                )
                rows.append(packed)
            if layer.mlp.use_shared_expert:
                # The router saves it anyway; a shared expert that is recomputed without its gate reads it from here.
                opened[R.NORMED] = normed_SBH.detach().chunk(len(keys), dim=BATCH)
            # An output, too: the shared expert's gradient returns through it, and the norm runs backward once for both.
            return (*rows, normed_SBH)

        segment = self._segment(i, route, [state.buffers.read(i, read_stem(i, R.ATTENDED))], opened)
        *rows, normed_SBH = segment.take()
        for key in keys:
            handle = segment.aside[key[2]]
            state.handles[key] = handle if segment.aside is opened else self._dispatcher.opened_again(handle)
        if not (writes(i, R.COUNTS) or self._dispatcher.static_capacity):
            # Nothing leaves the rank: there is no count instruction, and the counts are known at once.
            self._dispatcher.start_counts(state.handles[keys[0]]).wait()
        state.segments[place_of(i, operator)] = segment
        state.buffers.write_each(i, written_stem(i, R.ROWS), rows)
        if layer.mlp.use_shared_expert:
            # Copies: a view would keep the whole micro-batch in memory while a partition's deferred weight gradient waits.
            parts = (part.contiguous() for part in normed_SBH.chunk(len(keys), dim=BATCH))
            state.normed.update(zip(keys, parts, strict=True))

    def _route(
        self, moe: Any, normed_SBH: Tensor, i: Instruction, state: StepState, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Probabilities [T, E] and map [T, E] of this part of the batch; earlier parts have used some of the capacity."""
        if not isinstance(moe.router, Gate):
            assert not i.partition, "only our gates hand capacity from partition to partition"
            return moe.router(normed_SBH)
        routing = state.routing.get((layer, micro_batch_of(i)))
        if routing is None:
            parts = state.buffers.partitions(i)
            samples, number = normed_SBH.shape[BATCH] * parts, state.first_micro_batch + micro_batch_of(i)
            sizes = (normed_SBH.shape[0], samples, parts)
            # A captured gate would write its losses to where no later step reads them.
            logs = self._graphs is None
            routing = moe.router.begin(*sizes, seed=state.seed, micro_batch=number, logs=logs)
            state.routing[(layer, micro_batch_of(i))] = routing
        return moe.router.route(normed_SBH, routing, partition_of(i))

    def _most_rows(self, moe: Any, tokens: int, routing: RoutingState | None) -> int:
        """The largest number of rows that a gate sends for so many tokens of a micro-batch."""
        if routing is None:
            most: int = tokens * moe.router.topk
            return most
        gate: Gate = moe.router
        return gate.most_rows(tokens, routing)

    def _static_capacity(self, moe: Any, routing: RoutingState | None) -> int | None:
        """Rows of a micro-batch for every expert under a static capacity; None if the routed rows are counted."""
        if not self._dispatcher.static_capacity:
            return None
        assert routing is not None, "only our gates keep within a static capacity"
        gate: Gate = moe.router
        return gate.capacity(routing)

    def _gate_backward(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        n, m = layer_of(operator), micro_batch_of(i)
        drows = state.buffers.read_each(i, read_stem(i, R.D_ROWS))
        keys = travelling(i, n, i.reads, R.D_ROWS)
        if (n, m) in state.chunks:
            # Capacity chunks are slices of one permutation, whose backward pass takes their gradients joined.
            keys = [(n, m, 0)]
            drows = [join_chunks(state.chunks.pop((n, m)), drows, state.handles[keys[0]].row_sources_N.shape[0])]
        dnormed = [state.normed.pop(key) for key in keys if key in state.normed]
        segment = state.segments.pop(place_of(i, operator))
        for key in keys:
            del state.handles[key]
        dnormed_SBH = None if not dnormed else dnormed[0] if len(dnormed) == 1 else torch.cat(dnormed, dim=BATCH)
        state.buffers.add(i, written_stem(i, R.D_ATTENDED), segment.backward(*drows, dnormed_SBH)[0])

    def _shared(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        layer, key = self._layers[layer_of(operator)], (layer_of(operator), micro_batch_of(i), partition_of(i))
        normed = state.normed.pop(key, None)
        if normed is None:
            normed = _normed_of_gate(key, state)
        segment = self._segment(i, lambda x: MoELayer.shared_experts_compute(layer.mlp, x), [normed])
        state.segments[place_of(i, operator)] = segment
        state.buffers.write(i, written_stem(i, R.SHARED), segment.take()[0])

    def _shared_backward(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        key = (layer_of(operator), micro_batch_of(i), partition_of(i))
        gradient = state.segments.pop(place_of(i, operator)).backward(state.buffers.read(i, read_stem(i, R.D_SHARED)))[
            0
        ]
        assert gradient is not None
        state.normed[key] = gradient

    def _experts(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        n = layer_of(operator)
        layer, handle = self._layers[n], handle_of(i, operator, state, self._dispatcher)
        dispatcher = self._dispatcher

        def experts(received: Tensor) -> Tensor:
            rows, tokens_per_expert, probs = dispatcher.sort(received, handle)
            output, _ = layer.mlp.experts(rows, tokens_per_expert, probs)
            return dispatcher.unsort(output, handle)

        source = next(stem for stem in (R.RECEIVED, R.ROWS) if reads(i, stem))
        self._forward(i, operator, state, experts, [read_stem(i, source)], [written_stem(i, R.COMPUTED)])

    def _experts_backward(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        target = next(stem for stem in (R.D_RECEIVED, R.D_ROWS) if writes(i, stem))
        self._backward(i, operator, state, [read_stem(i, R.D_COMPUTED)], [written_stem(i, target)])

    def _merge(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        n = layer_of(operator)
        layer, handle = self._layers[n], handle_of(i, operator, state, self._dispatcher)

        def merge(returned: Tensor, residual_SBH: Tensor, shared_SBH: Tensor | None) -> Tensor:
            output_SBH = self._dispatcher.unpermute(returned, handle).view(*residual_SBH.shape[:-1], -1)
            if layer.config.moe_latent_size:
                output_SBH, _ = layer.mlp.fc2_latent_proj(output_SBH)
            if shared_SBH is not None:
                output_SBH = output_SBH + shared_SBH
            return TransformerLayer._forward_post_mlp(layer, (output_SBH, None), residual_SBH)

        source = next(stem for stem in (R.RETURNED, R.COMPUTED) if reads(i, stem))
        returned = state.buffers.read_each(i, read_stem(i, source))
        if (n, micro_batch_of(i)) in state.chunks:
            returned = [join_chunks(state.chunks[n, micro_batch_of(i)], returned)]
        shared_SBH = state.buffers.read(i, read_stem(i, R.SHARED)) if reads(i, R.SHARED) else None
        segment = self._segment(i, merge, [*returned, state.buffers.read(i, read_stem(i, R.ATTENDED)), shared_SBH])
        state.segments[place_of(i, operator)] = segment
        state.buffers.write(i, written_stem(i, R.HIDDEN), segment.take()[0])

    def _merge_backward(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        target = next(stem for stem in (R.D_RETURNED, R.D_COMPUTED) if writes(i, stem))
        stems = [
            written_stem(i, target),
            written_stem(i, R.D_ATTENDED),
            written_stem(i, R.D_SHARED) if writes(i, R.D_SHARED) else "",
        ]
        self._backward(i, operator, state, [read_stem(i, R.D_HIDDEN)], stems)

    def start_all_to_all(self, instruction: Instruction, state: StepState) -> Callable[[], None]:
        """Start an all-to-all of tokens or counts.

        Returns:
            A function that waits for it and stores what has arrived.
        """
        i, operator = instruction, instruction.operator
        if operator.kind is COUNT:
            handle = handle_of(i, operator, state, self._dispatcher)
            span = self._recorder.started(i)
            counts = self._dispatcher.start_counts(handle)
            return self._recorder.ending(span, lambda: _discard(counts.wait()))
        way = (operator.kind, BACKWARD if operator.phase is BACKWARD else FORWARD)
        source, target = _SENT_AND_STORED[way]
        (outgoing,) = state.buffers.read_each(i, read_stem(i, source))
        handle = handle_of(i, operator, state, self._dispatcher)
        if i.partition and reads_whole(i, source):
            outgoing = state.chunks[layer_of(operator), micro_batch_of(i)][partition_of(i)].of(outgoing)
        start = {
            (DISPATCH, FORWARD): self._dispatcher.start_dispatch,
            (DISPATCH, BACKWARD): self._dispatcher.start_dispatch_backward,
            (COMBINE, FORWARD): self._dispatcher.start_combine,
            (COMBINE, BACKWARD): self._dispatcher.start_combine_backward,
        }[way]
        span = self._recorder.started(i)
        # 3. of the contract: under autograd the backward all-to-all would start when autograd gets there, which may be
        # another order on another rank.
        pending = start(outgoing.detach(), handle)
        return self._recorder.ending(span, lambda: state.buffers.write(i, written_stem(i, target), pending.wait()))

    def _forward(
        self,
        i: Instruction,
        operator: OperatorId,
        state: StepState,
        run: Callable[..., Any],
        reads: Sequence[str],
        writes: Sequence[str],
    ) -> None:
        segment = self._segment(i, run, [state.buffers.read(i, stem) if stem else None for stem in reads])
        state.segments[place_of(i, operator)] = segment
        for stem, output in zip(writes, segment.take(), strict=True):
            state.buffers.write(i, stem, output)

    def _backward(
        self, i: Instruction, operator: OperatorId, state: StepState, reads: Sequence[str], writes: Sequence[str]
    ) -> None:
        segment = state.segments.pop(place_of(i, operator))
        gradients = segment.backward(*(state.buffers.read(i, stem) for stem in reads))
        for stem, gradient in zip(writes, gradients, strict=True):
            if stem:
                state.buffers.write(i, stem, gradient)


def rotary_angles(model: Any, sequence_length: int) -> Tensor | None:
    """The rotary angles that a GPTModel passes to its layers; YaRN's scale of them is in the configuration."""
    if not hasattr(model, "rotary_pos_emb"):
        return None
    angles_or_pair = model.rotary_pos_emb(sequence_length)
    angles: Tensor = angles_or_pair[0] if isinstance(angles_or_pair, tuple) else angles_or_pair
    return angles


def _rotated_projections(model: Any, angles: Tensor | None) -> frozenset[int]:
    """Make attention rotate queries and keys by one table where it can; returns the numbers of those layers."""
    if angles is None:
        return frozenset()
    table = rotary_table(angles, model.config)
    layers = model.decoder.layers
    return frozenset(layer.layer_number - 1 for layer in layers if rotate_projection(layer.self_attention, table))


def _normed_of_gate(key: tuple[int, int, int], state: StepState) -> Tensor:
    """Input of a shared expert that is recomputed without its gate: the gate's segment still holds it."""
    layer, micro_batch, partition = key
    gate = state.segments.get((GATE, *key)) or state.segments[GATE, layer, micro_batch, 0]
    parts: tuple[Tensor, ...] = gate.aside[R.NORMED]
    return parts[partition].contiguous() if len(parts) > 1 else parts[0]


_SENT_AND_STORED = {
    (DISPATCH, FORWARD): (R.ROWS, R.RECEIVED),
    (DISPATCH, BACKWARD): (R.D_RECEIVED, R.D_ROWS),
    (COMBINE, FORWARD): (R.COMPUTED, R.RETURNED),
    (COMBINE, BACKWARD): (R.D_RETURNED, R.D_COMPUTED),
}
"""Buffers that an all-to-all sends and writes, by operator kind and phase."""


def _discard(value: object) -> None:
    """The counts stay in their handle."""


def _cut(tokens: Tensor, samples: int, parts: int) -> list[Tensor]:
    """Cut tokens [T, X] or [S, B, X] into `parts` along the samples; each is [T of the part, X]."""
    width = tokens.shape[-1]
    if parts == 1:
        return [tokens.reshape(-1, width)]
    return [part.reshape(-1, width) for part in tokens.reshape(-1, samples, width).chunk(parts, dim=BATCH)]
