"""Layers as drafts: the operators of a chunk's layers in program order, with the buffers they read and write.

Contract. `LayerLowering` writes the forward or the backward pass of a chunk of layers for one micro-batch:
1. `LayerSequence` puts the operators in program order; in a backward pass each layer begins with its recomputation.
2. interleave.py orders ranges that are cut into partitions stage-major: one partition communicates while the next computes.
3. Two tables (`forward_buffers`, `backward_buffers`) give each operator its buffers; names of cut buffers include the partition.
4. Deferred weight gradients follow the backward all-to-all of their slot.

Buffers (layer n, micro-batch m, partition p): `h.Ln.m.p` is the input of layer n, also across a stage boundary (of prediction
layer n: `h.mtpn`, its output `h.mtpn.loss`); `a` is the output of attention; `rows` are permuted for sending; `counts` and
`splits` are their numbers (absent with a static capacity); `capacity` hands a gate's state to the next partition; `received` and
`computed` are input and output of the experts; `returned` is the output of combine; `shared` that of the shared expert. A leading
`d` marks gradients. `gradient.Ln` sums weight gradients over micro-batches; `saved.Ln.part.weight` holds the operands of a
deferred weight gradient.

Fused kernels (COMET, section 3.1) pass each other only `inner`, the activated output of the first product, and `dinner`, its
gradient. The matrix between product and all-to-all, COMET's shared tensor, exists only while its kernel runs (`computed`,
`dcomputed`, `dreceived`); `received` is kept with the other saved tensors of a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import operators
from moe_overlap.plan import sizes as payload
from moe_overlap.plan.instructions import COMPUTE, EXPERT, parse_access, placed, saved_for
from moe_overlap.plan.lowering.deferral import behind_send, keeps_gradients, named_part, split_weights
from moe_overlap.plan.lowering.dependencies import Draft
from moe_overlap.plan.lowering.interleave import CutBuffers, Part, stage_major
from moe_overlap.plan.operators import (
    ATTENTION,
    BACKWARD,
    COMBINE,
    COUNT,
    DISPATCH,
    DISPATCH_FC1,
    EXPERTS,
    FC2_COMBINE,
    FORWARD,
    FUSED_KERNELS,
    GATE,
    MERGE,
    MLP,
    RECOMPUTE,
    SHARED,
    OperatorId,
    OperatorKind,
    Phase,
    parse_operator,
)
from moe_overlap.plan.overlap import partitions_of
from moe_overlap.plan.plan import Plan, Recompute, StagePlan


def forward_buffers(n: str, after: str, has_shared: bool, sent: bool, counted: bool) -> dict[str, str]:
    """Part -> `reads -> writes`, without micro-batch and partition.

    Args:
        n: layer, such as `L3`.
        after: the layer, or prediction loss, that reads its output.
        sent: whether tokens leave the rank.
        counted: whether counts of rows are sent before the rows; False with a static capacity.
    """
    shared = f"shared.{n}" if has_shared else ""
    splits = f" splits.{n}" if counted else ""
    return {
        ATTENTION: f"h.{n} -> a.{n}",
        MLP: f"a.{n} -> h.{after}",
        GATE: f"a.{n} -> rows.{n}" + (f" counts.{n}" if sent and counted else ""),
        COUNT: f"counts.{n} -> splits.{n}",
        DISPATCH: f"rows.{n}{splits} -> received.{n}",
        SHARED: f"a.{n} -> {shared}",
        EXPERTS: f"{'received' if sent else 'rows'}.{n} -> computed.{n}",
        COMBINE: f"computed.{n} -> returned.{n}",
        DISPATCH_FC1: f"rows.{n}{splits} -> received.{n} inner.{n}",
        FC2_COMBINE: f"inner.{n} -> computed.{n} returned.{n}",
        MERGE: f"{'returned' if sent else 'computed'}.{n} a.{n} {shared} -> h.{after}",
    }


def backward_buffers(n: str, after: str, has_shared: bool, sent: bool, total: str) -> dict[str, str]:
    """Part -> `reads -> writes`; a buffer on both sides is accumulated.

    Args:
        total: the buffer that sums weight gradients; empty if all of them are deferred.
    """
    shared = f"dshared.{n}" if has_shared else ""
    return {
        # Merge initialises the sum `da` with the residual's gradient; shared expert and gate add to it, so they also read it.
        MERGE: f"dh.{after} -> {'dreturned' if sent else 'dcomputed'}.{n} da.{n} {shared}",
        COMBINE: f"dreturned.{n} -> dcomputed.{n}",
        EXPERTS: f"dcomputed.{n} {total} -> {'dreceived' if sent else 'drows'}.{n} {total}",
        SHARED: f"dshared.{n} da.{n} {total} -> da.{n} {total}",
        DISPATCH: f"dreceived.{n} -> drows.{n}",
        FC2_COMBINE: f"dreturned.{n} {total} -> dcomputed.{n} dinner.{n} {total}",
        DISPATCH_FC1: f"dinner.{n} {total} -> dreceived.{n} drows.{n} {total}",
        GATE: f"drows.{n} da.{n} {total} -> da.{n} {total}",
        MLP: f"dh.{after} {total} -> da.{n} {total}",
        ATTENTION: f"da.{n} {total} -> dh.{n} {total}",
    }


@dataclass(frozen=True, slots=True)
class LayerOperator:
    """An operator of a layer; suffix `backward`, `recompute` or empty.

    Attributes:
        mtp: its prediction layer, if any; `layer` is then the layer of the model with the same form.
    """

    layer: int
    part: OperatorKind
    suffix: Phase = FORWARD
    mtp: int | None = None

    @property
    def name(self) -> str:
        """The name of its instruction."""
        return _name(self.part, None if self.mtp is not None else self.layer, self.mtp, self.suffix)

    @property
    def place(self) -> str:
        """`L3`, `mtp0`."""
        return f"L{self.layer}" if self.mtp is None else f"mtp{self.mtp}"

    @property
    def after(self) -> str:
        """The next place in forward order."""
        return f"L{self.layer + 1}" if self.mtp is None else f"mtp{self.mtp}.loss"

    @property
    def is_exchange(self) -> bool:
        """Whether it communicates."""
        return self.part in operators.EXCHANGE_PARTS


@cache
def _name(part: OperatorKind, layer: int | None, mtp: int | None, phase: Phase) -> str:
    return str(OperatorId(part, layer, mtp, phase=phase))


@dataclass(frozen=True, slots=True)
class LayerSequence:
    """Program order of the layers of one stage.

    Args:
        is_cut: whether a layer's mixture of experts runs in partitions.
        counts: whether counts of rows are sent before the rows; False with a static capacity.
    """

    stage: StagePlan
    model: ModelDescription
    is_cut: Callable[[int], bool]
    counts: bool = True

    @property
    def has_shared(self) -> bool:
        """Whether the model has shared experts."""
        return self.model.shared_expert_hidden_size > 0

    @property
    def exchanges(self) -> bool:
        """Whether tokens leave the rank."""
        return self.stage.expert * self.stage.expert_tensor > 1

    def parts(self, layer: int) -> tuple[OperatorKind, ...]:
        """Operators of a layer in forward order."""
        parts = operators.layer_parts(
            self.model.moe_layers[layer], self.has_shared, self.exchanges, self._is_fused(layer)
        )
        return parts if self.counts else tuple(part for part in parts if part != COUNT)

    def forward(self, layers: Sequence[int], suffix: Phase = FORWARD) -> Iterator[LayerOperator]:
        """Operators of layers, forward; with suffix `recompute` those that the backward pass runs again."""
        return (LayerOperator(layer, part, suffix) for layer in layers for part in self.parts(layer))

    def backward(self, layers: Sequence[int]) -> Iterator[LayerOperator]:
        """Operators of layers, backward; each layer begins with its recomputation."""
        for group in recompute_groups(self.stage.recompute, layers):
            if group.recomputes_all:
                yield from self.forward(group.layers, RECOMPUTE)
            for layer in reversed(group.layers):
                yield from self._layer_backward(layer, group.modules)

    def prediction(self, depth: int) -> Iterator[LayerOperator]:
        """Operators of the transformer layer inside a prediction layer, forward; it has the form of the model's last layer."""
        return (replace(operator, mtp=depth) for operator in self.forward([self.model.num_layers - 1]))

    def prediction_backward(self, depth: int) -> Iterator[LayerOperator]:
        """Operators of the transformer layer inside a prediction layer, backward."""
        last, recompute = self.model.num_layers - 1, self.stage.recompute
        operators_of = list(self._layer_backward(last, recompute.modules))
        if recomputes_predictions(recompute):
            operators_of = [*self.forward([last], RECOMPUTE), *operators_of]
        return (replace(operator, mtp=depth) for operator in operators_of)

    def _layer_backward(self, layer: int, modules: tuple[str, ...]) -> Iterator[LayerOperator]:
        for part in self._backward_parts(layer):
            # Merge is the first backward operator that reads saved tensors of the mixture of experts.
            if part == MERGE and "moe" in modules:
                recomputed = (other for other in self.parts(layer) if other != ATTENTION)
                yield from (LayerOperator(layer, other, RECOMPUTE) for other in recomputed)
            # As late as possible, so that recomputed tensors live only until their backward operator.
            if (part == MLP and "mlp" in modules) or (part == SHARED and "shared_experts" in modules):
                yield LayerOperator(layer, part, RECOMPUTE)
            yield LayerOperator(layer, part, BACKWARD)

    def _backward_parts(self, layer: int) -> tuple[OperatorKind, ...]:
        """Backward order. With partitions the shared expert moves before the experts, where it hides an all-to-all."""
        moe = self.model.moe_layers[layer]
        parts = list(operators.backward_parts(moe, self.has_shared, self.exchanges, self._is_fused(layer)))
        if SHARED in parts and self.is_cut(layer):
            parts.remove(SHARED)
            parts.insert(parts.index(EXPERTS), SHARED)
        return tuple(parts)

    def _is_fused(self, layer: int) -> bool:
        return layer in self.stage.overlap.fused_layers


@dataclass(frozen=True, slots=True)
class RecomputeGroup:
    """Layers that run backward together.

    Attributes:
        recomputes_all: whether all of them first run forward again.
        modules: the modules that each layer recomputes.
    """

    layers: tuple[int, ...]
    recomputes_all: bool
    modules: tuple[str, ...] = ()


def recomputes_predictions(recompute: Recompute) -> bool:
    """Whether prediction layers are recomputed, projections included; megatron-core's block method does not recompute them."""
    return recompute.granularity == "uniform"


def recompute_groups(recompute: Recompute, layers: Sequence[int]) -> list[RecomputeGroup]:
    """Groups of a chunk's layers in backward order."""
    size = recompute.layers if recompute.granularity == "uniform" else 1
    groups = []
    for first in range(0, len(layers), size):
        members = tuple(layers[first : first + size])
        # Granularity full is megatron-core's block method: the first layers of a chunk, one per group.
        chosen = first < recompute.layers
        if recompute.granularity == "uniform" or (recompute.granularity == "full" and chosen):
            groups.append(RecomputeGroup(members, recomputes_all=True))
        else:
            groups.append(RecomputeGroup(members, recomputes_all=False, modules=recompute.modules if chosen else ()))
    return groups[::-1]


EXPERT_CHANNEL, COUNT_CHANNEL = EXPERT, f"{EXPERT}.counts"
"""Counts have a separate process group and channel, so a wait for counts does not wait for rows of other partitions."""


class LayerLowering:
    """Writes the layers of one stage.

    Attributes:
        buffers: the partitions of the buffers written so far.
    """

    def __init__(self, plan: Plan, stage: StagePlan, model: ModelDescription) -> None:
        self.stage = stage
        self.buffers = CutBuffers()
        self._plan, self._model = plan, model
        self._partitions = partitions_of(stage.overlap, stage.layers)
        self._sequence = LayerSequence(
            stage,
            model,
            is_cut=lambda layer: (layer, EXPERTS) in self._partitions,
            counts=plan.static_capacity_factor is None,
        )
        slots = [slot for layer in stage.overlap.layers for slot in layer.weight_gradient_slots.items()]
        self._slots = dict(slots)
        self._deferred: dict[tuple[OperatorKind, int | None], list[OperatorId]] = {}
        for operator in (parse_operator(name) for _, names in slots for name in names):
            self._deferred.setdefault((operator.kind, operator.layer), []).append(operator)

    def forward(self, layers: Sequence[int], chunk: int, micro_batch: int) -> Iterator[Draft]:
        """The layers of a chunk forward."""
        return self._write(list(self._sequence.forward(layers)), chunk, micro_batch, last_first=False)

    def backward(self, layers: Sequence[int], chunk: int, micro_batch: int) -> Iterator[Draft]:
        """The layers of a chunk backward; each begins with its recomputation."""
        return self._write(list(self._sequence.backward(layers)), chunk, micro_batch, last_first=True)

    def prediction(self, depth: int, chunk: int, micro_batch: int) -> Iterator[Draft]:
        """The transformer layer inside a prediction layer forward."""
        return self._write(list(self._sequence.prediction(depth)), chunk, micro_batch, last_first=False)

    def prediction_backward(self, depth: int, chunk: int, micro_batch: int) -> Iterator[Draft]:
        """The transformer layer inside a prediction layer backward; it begins with its recomputation."""
        return self._write(list(self._sequence.prediction_backward(depth)), chunk, micro_batch, last_first=True)

    def behind_send(self, layers: Sequence[int], chunk: int, micro_batch: int) -> Iterator[Draft]:
        """Weight gradients in the slot of a chunk's send."""
        for name in behind_send(self.stage.overlap, layers):
            yield self._weight_gradient(parse_operator(name), chunk, micro_batch)

    def deferred(self, part: OperatorKind, layer: int | None = None) -> list[OperatorId]:
        """Weight gradients of an operator that are separate instructions."""
        # Weight gradients of both fused kernels are named with EXPERTS; each kernel takes the gradients of its own weight.
        gradients = self._deferred.get((named_part(part), layer), [])
        return [gradient for gradient in gradients if gradient.weight in split_weights(part, self._model)]

    def _write(self, sequence: list[LayerOperator], chunk: int, micro_batch: int, last_first: bool) -> Iterator[Draft]:
        for operator, part in stage_major(sequence, self._count, lambda operator: operator.is_exchange, last_first):
            yield self._operator(operator, part, chunk, micro_batch)
            # In a backward pass partition 0 starts its all-to-all last. After it, all operands of the slot are saved and no
            # part of that all-to-all has passed.
            if operator.name in self._slots and part.index == 0:
                for name in self._slots[operator.name]:
                    yield self._weight_gradient(parse_operator(name), chunk, micro_batch)

    def _count(self, operator: LayerOperator) -> int:
        return self._partitions.get((operator.layer, operator.part), 1)

    def _operator(self, operator: LayerOperator, part: Part, chunk: int, micro_batch: int) -> Draft:
        reads, writes = self._buffers(operator, part, micro_batch)
        if operator.part == COUNT:
            sent_bytes = payload.count_bytes(self.stage, self._model)
        else:
            exchanged_bytes = payload.exchange_bytes(self._plan, self.stage, self._model, part.count)
            sent_bytes = exchanged_bytes if operator.is_exchange or operator.part in FUSED_KERNELS else 0
        return Draft(
            kind="collective" if operator.is_exchange else "compute",
            name=operator.name,
            channel=_channel(operator),
            chunk=chunk,
            micro_batch=micro_batch,
            partition=part.partition,
            reads=tuple(reads),
            writes=tuple(writes),
            bytes=sent_bytes,
        )

    def _buffers(self, operator: LayerOperator, part: Part, micro_batch: int) -> tuple[list[str], list[str]]:
        """Names of the buffers that an operator reads and writes."""
        n, has_shared, sent = operator.layer, self._sequence.has_shared, self._sequence.exchanges
        ends = operator.place, operator.after
        deferred = self.deferred(operator.part, n) if operator.suffix == BACKWARD else []
        if operator.suffix == BACKWARD:
            # Only an operator that adds to the gradient sum lists it: the sum is reduced after its last writer.
            adds = keeps_gradients(operator.part, [gradient.weight for gradient in deferred], self._model)
            table = backward_buffers(*ends, has_shared, sent, f"gradient.{operator.place}" if adds else "")
        else:
            table = forward_buffers(*ends, has_shared, sent, self._sequence.counts)
        sides = parse_access(table[operator.part])
        reads, writes = ([placed(buffer, micro_batch) for buffer in side] for side in sides)
        writes += [saved_for(gradient, micro_batch) for gradient in deferred]
        if operator.part != GATE or operator.suffix == BACKWARD:
            return self.buffers.name(reads, writes, part)
        # A gate that needs the whole micro-batch writes its rows in the partitions of the dispatch.
        partitions = self._partitions.get((n, COUNT), 1)
        reads, writes = self.buffers.name(reads, writes, part, into=partitions)
        taken_over, handed_on = _capacity(operator, part, placed(f"capacity.L{n}", micro_batch))
        return [*reads, *taken_over], [*writes, *handed_on]

    def _weight_gradient(self, gradient: OperatorId, chunk: int, micro_batch: int) -> Draft:
        # One instruction for all partitions; `within_bound` removes those that are computed early.
        saved = self.buffers.parts(saved_for(gradient, micro_batch))
        total = "gradient.head" if gradient.layer is None else f"gradient.L{gradient.layer}"
        return Draft(
            kind="weight-gradient",
            name=str(gradient),
            chunk=chunk,
            micro_batch=micro_batch,
            partition=tuple(range(len(saved))) if len(saved) > 1 else (),
            reads=(*saved, total),
            writes=(total,),
        )


def _channel(operator: LayerOperator) -> str:
    if operator.part == COUNT:
        return COUNT_CHANNEL
    return EXPERT_CHANNEL if operator.is_exchange else COMPUTE


def _capacity(operator: LayerOperator, part: Part, buffer: str) -> tuple[Iterable[str], Iterable[str]]:
    """The capacity buffers that a gate reads from the previous partition and writes for the next; a recomputation writes none."""
    before = [f"{buffer}.p{part.index - 1}"] if part.index > 0 else []
    hands_on = part.index < part.count - 1 and not operator.suffix
    return before, [f"{buffer}.p{part.index}"] if hands_on else []
