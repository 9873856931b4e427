"""Operators bound to modules: what each compute and exchange instruction of a list does on this rank.

Binding decides nothing: which operator runs when, on which part of the batch, and what waits for what stands in the list. A
forward operator is an island (segments.py) under its layer, micro-batch and partition; its backward runs that island backward.
One that stands in the list a second time, as a recomputation, is an island there only.

Legend: S sequence, B batch (of the partition), H hidden, T = S · B tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from moe_overlap.plan.instructions import Instruction, parse_buffer, stem_of
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
from moe_overlap.runtime.dispatch.capacity_chunks import CapacityChunk, capacity_chunks, join_chunks
from moe_overlap.runtime.dispatch.irregular import Handle, IrregularDispatcher
from moe_overlap.runtime.executor.buffers import BATCH, Buffers, is_part
from moe_overlap.runtime.executor.segments import Island, LayerDraws, recompute_by_the_list
from moe_overlap.runtime.routing.gate import Gate
from moe_overlap.runtime.step import Batch

Place = tuple[OperatorKind, int | None, int, int]
"""Operator kind, layer, micro-batch, partition."""


@dataclass(slots=True)
class StepState:
    """Everything alive during one step."""

    buffers: Buffers
    batches: Sequence[Batch]
    loss_scale: float
    """Of every micro-batch's loss, auxiliary losses included, in the gradients; with fp16, times the optimizer's."""
    seed: int
    """Of the gates' draws."""
    first_micro_batch: int
    """Number of this step's first micro-batch in the run."""
    recomputed: frozenset[str] = frozenset()
    """Names of the operators that the backward pass runs a second time."""
    islands: dict[Place, Island] = field(default_factory=dict)
    handles: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    """Dispatcher handles by layer, micro-batch, partition."""
    chunks: dict[tuple[int, int], Sequence[CapacityChunk]] = field(default_factory=dict)
    """Capacity chunks of layers whose rows travel in them, by layer and micro-batch."""
    routing: dict[tuple[int, int], Any] = field(default_factory=dict)
    """Capacity used so far, by layer and micro-batch."""
    normed: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    """Input of a shared expert on the way forward, its gradient on the way back."""
    reports: list[Tensor] = field(default_factory=list)
    """Loss sum and token count of every micro-batch."""


Binding = Callable[[Instruction, OperatorId, StepState], None]
"""Runs one operator of a model chunk, forward or backward."""


class ChunkOperators:
    """The operators of one model chunk.

    Args:
        model: the GPTModel of the chunk, without wrappers around its pieces.
        loss: from per-token losses [B, S] and their micro-batch to (loss, [sum, tokens]).
    """

    def __init__(
        self,
        model: Any,
        sequence_length: int,
        loss: Callable[[Tensor, Batch], tuple[Tensor, Tensor]],
        dispatcher: IrregularDispatcher,
    ) -> None:
        self._model, self._loss, self._dispatcher = model, loss, dispatcher
        self._layers = {layer.layer_number - 1: layer for layer in model.decoder.layers}
        self._rotary = rotary_angles(model, sequence_length)
        self._draws = LayerDraws(model.config)
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
        operator = instruction.operator
        place = _place(instruction, operator)
        if operator.phase is BACKWARD:
            self._backward_of[operator.kind](instruction, operator, state)
            return
        run = partial(self._forward_of[operator.kind], instruction, operator, state)
        if operator.phase is RECOMPUTE:
            with self._draws.again(place):
                run()
            return
        has_backward = torch.is_grad_enabled()
        repeated = has_backward and instruction.name in state.recomputed
        with_graph = has_backward and not repeated
        drawing = self._draws.first(place, repeated) if operator.layer is not None else nullcontext()
        with drawing, torch.set_grad_enabled(with_graph):
            run()
        if not with_graph:
            del state.islands[place]
            if operator.kind is MERGE:
                del state.handles[(_layer(operator), *place[2:])]

    # Embedding, head

    def _embedding(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        batch = state.batches[_micro_batch(i)]
        island = Island(lambda: self._model.embedding(batch["tokens"], batch["position_ids"]), ())
        state.islands[_place(i, operator)] = island
        state.buffers.write(i, _written(i, "h"), island.outputs[0])

    def _embedding_backward(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        state.islands.pop(_place(i, operator)).backward(state.buffers.read(i, _read(i, "dh")))

    def _head_norm(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        self._forward(i, operator, state, self._model.decoder.final_layernorm, [_read(i, "h")], ["normed"])

    def _head_norm_backward(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        self._backward(i, operator, state, ["dnormed"], [_written(i, "dh")])

    def _head_loss(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        batch = state.batches[_micro_batch(i)]

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
            state.reports.append(report)
            return loss

        state.islands[_place(i, operator)] = Island(head, [state.buffers.read(i, "normed")])

    def _head_loss_backward(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        island = state.islands.pop(_place(i, operator))
        scale = torch.full_like(island.outputs[0], state.loss_scale)
        state.buffers.write(i, "dnormed", island.backward(scale)[0])

    # Attention, dense MLP

    def _attention(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        layer = self._layers[_layer(operator)]
        mask = state.batches[_micro_batch(i)].get("attention_mask")
        if mask is not None and i.partition:
            mask = mask.chunk(state.buffers.partitions(i))[i.partition[0]]

        def attend(hidden_SBH: Tensor) -> Tensor:
            return TransformerLayer._forward_attention(layer, hidden_SBH, mask, rotary_pos_emb=self._rotary)[0]

        self._forward(i, operator, state, attend, [_read(i, "h")], [_written(i, "a")])

    def _attention_backward(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        self._backward(i, operator, state, [_read(i, "da")], [_written(i, "dh")])

    def _mlp(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        layer = self._layers[_layer(operator)]
        run = lambda hidden_SBH: TransformerLayer._forward_mlp(layer, hidden_SBH)  # noqa: E731
        self._forward(i, operator, state, run, [_read(i, "a")], [_written(i, "h")])

    def _mlp_backward(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        self._backward(i, operator, state, [_read(i, "dh")], [_written(i, "da")])

    # Mixture of experts

    def _gate(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        n = _layer(operator)
        layer, keys = self._layers[n], travelling(i, n, i.writes, "rows")

        def route(hidden_SBH: Tensor) -> tuple[Tensor, ...]:
            normed_SBH = TransformerLayer._forward_pre_mlp_layernorm(layer, hidden_SBH)
            routed_TE = self._route(layer.mlp, normed_SBH, i, state, n)
            samples, rows = normed_SBH.shape[BATCH], []
            sent = layer.mlp.fc1_latent_proj(normed_SBH)[0] if layer.config.moe_latent_size else normed_SBH
            parts = zip(*(_cut(x, samples, len(keys)) for x in (sent, *routed_TE)), strict=True)
            for key, (x_TH, probs_TE, map_TE) in zip(keys, parts, strict=True):
                packed, state.handles[key] = self._dispatcher.permute(x_TH, probs_TE, map_TE, f"L{n}.moe")
                rows.append(packed)
            return (*rows, normed_SBH)

        island = Island(route, [state.buffers.read(i, _read(i, "a"))])
        *rows, normed_SBH = island.outputs
        if not _writes(i, "counts"):
            # Nothing leaves the rank: there is no count instruction, and the counts are known at once.
            self._dispatcher.start_counts(state.handles[keys[0]]).wait()
        state.islands[_place(i, operator)] = island
        state.buffers.write_each(i, _written(i, "rows"), rows)
        if layer.mlp.use_shared_expert:
            state.normed.update(zip(keys, normed_SBH.chunk(len(keys), dim=BATCH), strict=True))

    def _route(
        self, moe: Any, normed_SBH: Tensor, i: Instruction, state: StepState, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Probabilities [T, E] and map [T, E] of this part of the batch; what earlier parts took is taken."""
        if not isinstance(moe.router, Gate):
            assert not i.partition, "only our gates hand capacity from partition to partition"
            return moe.router(normed_SBH)
        routing = state.routing.get((layer, _micro_batch(i)))
        if routing is None:
            parts = state.buffers.partitions(i)
            samples, number = normed_SBH.shape[BATCH] * parts, state.first_micro_batch + _micro_batch(i)
            routing = moe.router.begin(normed_SBH.shape[0], samples, parts, seed=state.seed, micro_batch=number)
            state.routing[(layer, _micro_batch(i))] = routing
        return moe.router.route(normed_SBH, routing, _partition(i))

    def _gate_backward(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        n, m = _layer(operator), _micro_batch(i)
        drows = state.buffers.read_each(i, _read(i, "drows"))
        keys = travelling(i, n, i.reads, "drows")
        if (n, m) in state.chunks:
            keys = [(n, m, 0)]
            drows = [join_chunks(state.chunks.pop((n, m)), drows, state.handles[keys[0]].row_sources_N.shape[0])]
        dnormed = [state.normed.pop(key) for key in keys if key in state.normed]
        island = state.islands.pop(_place(i, operator))
        for key in keys:
            del state.handles[key]
        dnormed_SBH = torch.cat(dnormed, dim=BATCH) if dnormed else None
        state.buffers.add(i, _written(i, "da"), island.backward(*drows, dnormed_SBH)[0])

    def _shared(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        layer, key = self._layers[_layer(operator)], (_layer(operator), _micro_batch(i), _partition(i))
        normed = state.normed.pop(key, None)
        if normed is None:
            normed = _normed_of_gate(key, state)
        island = Island(lambda x: MoELayer.shared_experts_compute(layer.mlp, x), [normed])
        state.islands[_place(i, operator)] = island
        state.buffers.write(i, _written(i, "shared"), island.outputs[0])

    def _shared_backward(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        key = (_layer(operator), _micro_batch(i), _partition(i))
        gradient = state.islands.pop(_place(i, operator)).backward(state.buffers.read(i, _read(i, "dshared")))[0]
        assert gradient is not None
        state.normed[key] = gradient

    def _experts(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        n = _layer(operator)
        layer, handle = self._layers[n], handle_of(i, operator, state, self._dispatcher)
        dispatcher = self._dispatcher

        def experts(received: Tensor) -> Tensor:
            rows, tokens_per_expert, probs = dispatcher.sort(received, handle)
            output, _ = layer.mlp.experts(rows, tokens_per_expert, probs)
            return dispatcher.unsort(output, handle)

        source = next(stem for stem in ("received", "rows") if _reads(i, stem))
        self._forward(i, operator, state, experts, [_read(i, source)], [_written(i, "computed")])

    def _experts_backward(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        target = next(stem for stem in ("dreceived", "drows") if _writes(i, stem))
        self._backward(i, operator, state, [_read(i, "dcomputed")], [_written(i, target)])

    def _merge(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        n = _layer(operator)
        layer, handle = self._layers[n], handle_of(i, operator, state, self._dispatcher)

        def merge(returned: Tensor, residual_SBH: Tensor, shared_SBH: Tensor | None) -> Tensor:
            output_SBH = self._dispatcher.unpermute(returned, handle).view(*residual_SBH.shape[:-1], -1)
            if layer.config.moe_latent_size:
                output_SBH, _ = layer.mlp.fc2_latent_proj(output_SBH)
            if shared_SBH is not None:
                output_SBH = output_SBH + shared_SBH
            return TransformerLayer._forward_post_mlp(layer, (output_SBH, None), residual_SBH)

        source = next(stem for stem in ("returned", "computed") if _reads(i, stem))
        returned = state.buffers.read_each(i, _read(i, source))
        if (n, _micro_batch(i)) in state.chunks:
            returned = [join_chunks(state.chunks[n, _micro_batch(i)], returned)]
        shared_SBH = state.buffers.read(i, _read(i, "shared")) if _reads(i, "shared") else None
        island = Island(merge, [*returned, state.buffers.read(i, _read(i, "a")), shared_SBH])
        state.islands[_place(i, operator)] = island
        state.buffers.write(i, _written(i, "h"), island.outputs[0])

    def _merge_backward(self, i: Instruction, operator: OperatorId, state: StepState) -> None:
        target = next(stem for stem in ("dreturned", "dcomputed") if _writes(i, stem))
        stems = [_written(i, target), _written(i, "da"), _written(i, "dshared") if _writes(i, "dshared") else ""]
        self._backward(i, operator, state, [_read(i, "dh")], stems)

    def exchange(self, instruction: Instruction, state: StepState) -> Callable[[], None]:
        """Start an exchange of tokens or counts.

        Returns:
            What waits for it and stores what has arrived.
        """
        i, operator = instruction, instruction.operator
        if operator.kind is COUNT:
            counts = self._dispatcher.start_counts(handle_of(i, operator, state, self._dispatcher))
            return lambda: _discard(counts.wait())
        way = (operator.kind, BACKWARD if operator.phase is BACKWARD else FORWARD)
        source, target = _EXCHANGED[way]
        (outgoing,) = state.buffers.read_each(i, _read(i, source))
        handle = handle_of(i, operator, state, self._dispatcher)
        if i.partition and _reads_whole(i, source):
            outgoing = state.chunks[_layer(operator), _micro_batch(i)][_partition(i)].of(outgoing)
        start = {
            (DISPATCH, FORWARD): self._dispatcher.start_dispatch,
            (DISPATCH, BACKWARD): self._dispatcher.start_dispatch_backward,
            (COMBINE, FORWARD): self._dispatcher.start_combine,
            (COMBINE, BACKWARD): self._dispatcher.start_combine_backward,
        }[way]
        pending = start(outgoing.detach(), handle)
        return lambda: state.buffers.write(i, _written(i, target), pending.wait())

    def _forward(
        self,
        i: Instruction,
        operator: OperatorId,
        state: StepState,
        run: Callable[..., Any],
        reads: Sequence[str],
        writes: Sequence[str],
    ) -> None:
        island = Island(run, [state.buffers.read(i, stem) if stem else None for stem in reads])
        state.islands[_place(i, operator)] = island
        for stem, output in zip(writes, island.outputs, strict=True):
            state.buffers.write(i, stem, output)

    def _backward(
        self, i: Instruction, operator: OperatorId, state: StepState, reads: Sequence[str], writes: Sequence[str]
    ) -> None:
        island = state.islands.pop(_place(i, operator))
        gradients = island.backward(*(state.buffers.read(i, stem) for stem in reads))
        for stem, gradient in zip(writes, gradients, strict=True):
            if stem:
                state.buffers.write(i, stem, gradient)


def rotary_angles(model: Any, sequence_length: int) -> Tensor | None:
    """What a GPTModel hands to its layers as rotary positions; YaRN's scale of them stands in the configuration."""
    if not hasattr(model, "rotary_pos_emb"):
        return None
    found = model.rotary_pos_emb(sequence_length)
    angles: Tensor = found[0] if isinstance(found, tuple) else found
    return angles


def _normed_of_gate(key: tuple[int, int, int], state: StepState) -> Tensor:
    """Input of a shared expert that is recomputed alone: the gate's island, which is still there, holds it."""
    layer, micro_batch, partition = key
    gate = state.islands.get((GATE, *key)) or state.islands[GATE, layer, micro_batch, 0]
    *rows, normed_SBH = gate.outputs
    parts: tuple[Tensor, ...] = normed_SBH.chunk(len(rows), dim=BATCH)
    return parts[partition] if len(rows) > 1 else parts[0]


_EXCHANGED = {
    (DISPATCH, FORWARD): ("rows", "received"),
    (DISPATCH, BACKWARD): ("dreceived", "drows"),
    (COMBINE, FORWARD): ("computed", "returned"),
    (COMBINE, BACKWARD): ("dreturned", "dcomputed"),
}
"""What an exchange sends and what arrives, by part and direction."""


def _discard(value: object) -> None:
    """The counts stay in their handle."""


def set_aux_loss_scale(scale: float, device: torch.device) -> None:
    """Auxiliary losses are added in the routers' backward, at the scale of the loss."""
    MoEAuxLossAutoScaler.set_loss_scale(torch.full((1,), scale, device=device))


def _place(i: Instruction, operator: OperatorId) -> Place:
    return (operator.kind, operator.layer, _micro_batch(i), _partition(i))


def _cut(tokens: Tensor, samples: int, parts: int) -> list[Tensor]:
    """Tokens [T, X] or [S, B, X] of each of so many parts of the samples: [T of the part, X]."""
    width = tokens.shape[-1]
    return [part.reshape(-1, width) for part in tokens.reshape(-1, samples, width).chunk(parts, dim=BATCH)]


def travelling(i: Instruction, layer: int, names: Sequence[str], kind: str) -> list[tuple[int, int, int]]:
    """Layer, micro-batch and partition of everything that leaves a gate: a whole one may let its rows travel in parts."""
    count = 1 if i.partition else sum(parse_buffer(name).word == kind for name in names)
    return [(layer, _micro_batch(i), _partition(i) + part) for part in range(count)]


def handle_of(i: Instruction, operator: OperatorId, state: StepState, dispatcher: IrregularDispatcher) -> Handle:
    """Of the rows that an instruction handles: those of its part of the batch, or of its capacity chunk.

    Chunks are cut where a dispatch sends its share of rows that the gate left whole.
    """
    n, m = _layer(operator), _micro_batch(i)
    if i.partition and (n, m) not in state.chunks and operator.kind is DISPATCH and _reads_whole(i, "rows"):
        state.chunks[n, m] = capacity_chunks(dispatcher, state.handles[n, m, 0], state.buffers.partitions(i))
    if i.partition and (n, m) in state.chunks:
        return state.chunks[n, m][_partition(i)].handle
    handle: Handle = state.handles[n, m, _partition(i)]
    return handle


def _partition(i: Instruction) -> int:
    return i.partition[0] if i.partition else 0


def _micro_batch(i: Instruction) -> int:
    assert i.micro_batch is not None
    return i.micro_batch


def _layer(operator: OperatorId) -> int:
    assert operator.layer is not None
    return operator.layer


def _reads(i: Instruction, kind: str) -> bool:
    return any(parse_buffer(name).word == kind for name in i.reads)


def _writes(i: Instruction, kind: str) -> bool:
    return any(parse_buffer(name).word == kind for name in i.writes)


def _reads_whole(i: Instruction, kind: str) -> bool:
    """Whether it reads such a buffer that does not stand in parts."""
    return any(parse_buffer(name).word == kind and not is_part(name) for name in i.reads)


def _read(i: Instruction, kind: str) -> str:
    return _stem_of(i.reads, kind, i)


def _written(i: Instruction, kind: str) -> str:
    return _stem_of(i.writes, kind, i)


def _stem_of(names: Sequence[str], kind: str, i: Instruction) -> str:
    found = {stem_of(name) for name in names if parse_buffer(name).word == kind}
    assert len(found) == 1, f"{i.name}: one {kind} buffer expected, the list names {sorted(found)}"
    return found.pop()
