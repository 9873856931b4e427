"""Weight gradients as separate operators: which ones exist, and the slots in which they run.

The backward pass of an operator is split in two: the gradient of its input, which is on the critical path, and the gradients of
its weights, which only the optimizer needs and which can run while tokens travel (Lancet, section 4). A slot is a backward
all-to-all of a layer, or the send of a chunk's input gradient; its weight gradients run right after it has started.

Slots of sends. The previous stage waits for the gradient that this stage sends. Weight gradients after the send do not delay it:
they run while the gradient travels, or in a bubble slot of the pipeline before the next micro-batch arrives. In the cool-down of
a step every stage but the first therefore sends earlier. Such a slot has the name of its transfer (`send.S0>S1.backward`) and
belongs to the entry of any one layer of the chunk. It ends with the pass: the next micro-batch adds to the same sums afterwards.

Bound. A deferred weight gradient keeps the input and the output gradient of its product alive. `within_bound` computes weight
gradients early if deferring them would exceed the plan's `max_deferred_bytes`. It uses bytes in closed form (sizes.py), so every
rank of a stage has the same list, and collectives inside weight gradients match. The runtime only checks the bytes.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2 (their schedules can also defer weight gradients for longer).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import operators
from moe_overlap.plan.instructions import BufferId, BufferRole, Instruction, parse_buffer
from moe_overlap.plan.lowering.dependencies import Draft
from moe_overlap.plan.operators import (
    ATTENTION,
    BACKWARD,
    COMBINE,
    DISPATCH,
    DISPATCH_FC1,
    EXPERTS,
    FC2_COMBINE,
    FUSED_KERNELS,
    GATE,
    HEAD_LOSS,
    MLP,
    SHARED,
    WEIGHT_GRADIENT,
    WEIGHTS,
    OperatorId,
    OperatorKind,
    boundary_operator,
    layer_operator,
    parse_operator,
    weight_gradient,
)
from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.sizes import deferred_bytes

SLOT_PARTS = (COMBINE, DISPATCH)
"""All-to-alls whose backward is a slot."""


def split_weights(part: OperatorKind, model: ModelDescription) -> tuple[str, ...]:
    """Weights of an operator whose gradient can be a separate operator, in forward order. Those of fused kernels are named with
    EXPERTS.

    Norms, biases and the gate of a shared expert are left out: their gradients are cheap.
    """
    if part == ATTENTION and model.latent_attention is not None:
        query = ("q",) if model.latent_attention.q_lora_rank is None else ("q_down", "q_up")
        return (*query, "kv_down", "kv_up", "proj")
    weights = {
        ATTENTION: ("qkv", "proj"),
        MLP: ("fc1", "fc2"),
        GATE: ("router",),
        SHARED: ("fc1", "fc2"),
        EXPERTS: ("fc1", "fc2"),
        DISPATCH_FC1: ("fc1",),
        FC2_COMBINE: ("fc2",),
        HEAD_LOSS: ("output",),
    }
    return weights.get(part, ())


def named_part(part: OperatorKind) -> OperatorKind:
    """The operator in the names of an operator's weight gradients: EXPERTS for fused kernels."""
    return EXPERTS if part in FUSED_KERNELS else part


def gradient_name(part: OperatorKind, weight: str, layer: int | None = None) -> str:
    """`L0.attention.qkv.dW`; without a layer the weight gradient of the head."""
    if layer is not None:
        return weight_gradient(layer, part, weight)
    return str(OperatorId(part, weight=weight, phase=WEIGHT_GRADIENT))


def keeps_gradients(part: OperatorKind, deferred: Sequence[str], model: ModelDescription) -> bool:
    """Whether an operator's backward still adds to the layer's gradients if the gradients of these weights are deferred."""
    if set(deferred) != set(split_weights(part, model)):
        return True
    gated = part == SHARED and model.shared_expert_gate
    # Attention, MLP and gate begin with a norm. Its weight, like biases and the shared expert's gate, is never deferred.
    return part in (ATTENTION, MLP, GATE) or gated or model.linear_bias


def backward_of(gradient: str) -> str:
    """The backward instruction that saves the operands of a weight gradient."""
    return str(replace(parse_operator(gradient), weight="", phase=BACKWARD))


def gradients_of_pass(layers: Sequence[int], model: ModelDescription, holds_head: bool) -> tuple[str, ...]:
    """All weight gradients of a chunk that can be separate operators, in the order of its backward pass.

    Args:
        layers, holds_head: as in `default_slots`.
    """
    shared = model.shared_expert_hidden_size > 0
    names = [gradient_name(HEAD_LOSS, "output")] if holds_head else []
    for layer in reversed(layers):
        for part in operators.backward_parts(model.moe_layers[layer], shared, exchanges=False):
            names += _names(part, layer, model)
    return tuple(names)


def default_slots(
    layers: Sequence[int], model: ModelDescription, exchanges: bool, holds_head: bool
) -> dict[int, dict[str, tuple[str, ...]]]:
    """Program order: each weight gradient runs under the next backward all-to-all of its chunk; without one it is not deferred.

    Args:
        layers: of one chunk.
        exchanges: whether tokens leave the rank.
        holds_head: whether the chunk ends in the head, and the head's weight is not tied to the chunk's embedding.
    Returns:
        Layer -> backward all-to-all -> weight gradients.
    """
    slots: dict[int, dict[str, tuple[str, ...]]] = {}
    waiting = [gradient_name(HEAD_LOSS, "output")] if holds_head else []
    shared = model.shared_expert_hidden_size > 0
    for layer in reversed(layers):
        for part in operators.backward_parts(model.moe_layers[layer], shared, exchanges):
            if part not in SLOT_PARTS:
                waiting += _names(part, layer, model)
            elif waiting:
                slots.setdefault(layer, {})[layer_operator(layer, part, BACKWARD)] = tuple(waiting)
                waiting = []
    # No later all-to-all in the chunk: the remaining weight gradients stay inside their backward operators.
    return slots


def _names(part: OperatorKind, layer: int, model: ModelDescription) -> list[str]:
    # The backward pass runs the products of an operator from the last to the first.
    return [gradient_name(part, weight, layer) for weight in reversed(split_weights(part, model))]


def sends_of(plan: Plan, index: int) -> tuple[str, ...]:
    """For each chunk of a stage, the send of its input's gradient; the empty string for the first chunk of the model."""
    stages = len(plan.stages)
    name = boundary_operator(OperatorKind.SEND, (index - 1) % stages, index, backward=True)
    # Interleaved 1F1B connects the first stage to the last: only chunk 0 of the embedding stage has no predecessor.
    begins = index == plan.embedding_stage
    return tuple("" if begins and chunk == 0 else name for chunk in range(len(plan.stages[index].chunks)))


def is_send(slot: OperatorId) -> bool:
    """Whether a slot is the send of an input's gradient."""
    return slot.kind is OperatorKind.SEND and slot.phase is BACKWARD


def behind_send(overlap: StageOverlap, layers: Sequence[int]) -> tuple[str, ...]:
    """Weight gradients in the slot of a chunk's send, in order.

    Args:
        layers: of the chunk.
    """
    return tuple(
        name
        for entry in overlap.layers
        if entry.layer in layers
        for slot, names in entry.weight_gradient_slots.items()
        if is_send(parse_operator(slot))
        for name in names
    )


def receives_first(drafts: Iterable[Draft]) -> Iterator[Draft]:
    """The list with the receives of the next pass moved before the weight gradients of a send slot."""
    waiting: list[Draft] = []
    is_behind_send = False
    for draft in drafts:
        if draft.kind == "weight-gradient" and is_behind_send:
            waiting.append(draft)
            continue
        if not draft.receives:
            # A receive is posted at its place in the list, and the peer's send waits for it: weight gradients before it
            # would delay the other stage. Communications keep their relative order, so every send meets the same receive.
            yield from waiting
            waiting = []
        is_behind_send = draft.kind == "point-to-point"
        yield draft
    yield from waiting


def within_bound(drafts: Sequence[Draft], plan: Plan, stage: StagePlan, model: ModelDescription) -> Iterator[Draft]:
    """The list with weight gradients computed early where the deferred ones would exceed the plan's `max_deferred_bytes`.

    1. A backward operator saves the operands of its products, in the order in which its backward pass runs them.
    2. A weight gradient is deferred to its slot if all deferred ones then fit the bound.
    3. Otherwise it is computed right after the operator, together with the deferred partitions of the same name: sums over
       partitions keep their order and stay bitwise equal.
    4. The slot computes the remaining partitions; without any, its instruction is dropped.
    """
    bound = stage.overlap.max_deferred_bytes
    saved = {buffer: parse_buffer(buffer) for draft in drafts for buffer in draft.writes}
    saved = {buffer: named for buffer, named in saved.items() if named.role is BufferRole.SAVED}
    partitions = Counter((named.gradient, named.micro_batch) for named in saved.values())
    waiting: dict[str, int] = {}
    held = 0
    for draft in drafts:
        if draft.kind == "weight-gradient":  # 4
            uncomputed = [buffer for buffer in draft.reads if buffer in waiting]
            if uncomputed:
                yield _computing(draft, uncomputed)
            held -= sum(waiting.pop(buffer) for buffer in uncomputed)
            continue
        yield draft
        operands = [buffer for buffer in draft.writes if buffer in saved]
        for buffer in sorted(operands, key=lambda buffer: _place_in_forward(saved[buffer]), reverse=True):  # 1
            gradient = saved[buffer].gradient
            gradient_bytes = deferred_bytes(gradient, plan, stage, model)
            waiting[buffer] = -(-gradient_bytes // partitions[gradient, saved[buffer].micro_batch])
            held += waiting[buffer]
            if held <= bound:  # 2
                continue
            for early in [other for other in waiting if saved[other].gradient == gradient]:  # 3
                held -= waiting.pop(early)
                yield _computing(replace(draft, kind="weight-gradient", name=str(gradient), bytes=0), [early])


def _computing(draft: Draft, saved: Sequence[str]) -> Draft:
    """A draft that computes one weight gradient from these operands."""
    layer = draft.operator.layer
    total = "gradient.head" if layer is None else f"gradient.L{layer}"
    partitions = (parse_buffer(buffer).partition for buffer in saved)
    partition = tuple(number for number in partitions if number is not None)
    return replace(draft, partition=partition, reads=(*saved, total), writes=(total,))


def _place_in_forward(saved: BufferId) -> int:
    return WEIGHTS[saved.gradient.kind].index(saved.gradient.weight)


def early_gradients(instructions: Iterable[Instruction]) -> list[Instruction]:
    """Weight gradients that a list computes right after the operator that saved their operands, instead of in their slot.

    Includes deferred partitions of such a gradient. Reductions of gradients between the two instructions are ignored.
    """
    early: list[Instruction] = []
    saved: set[OperatorId] = set()
    for instruction in instructions:
        if instruction.kind == "weight-gradient":
            early += [instruction] if instruction.operator in saved else []
        elif not instruction.operator.is_bucket:
            buffers = map(parse_buffer, instruction.writes)
            saved = {buffer.gradient for buffer in buffers if buffer.role is BufferRole.SAVED}
    return early
