"""Weight gradients as operators of their own: which there are, and the slots behind which they run.

The backward pass of an operator is cut in two: the gradient of its input, which the critical path needs, and those of its
weights, which only the optimizer needs and which may run while tokens travel (Lancet, section 4). A slot is a backward all-to-all
of a layer, or the transfer with which a chunk sends its input's gradient.

Slots behind transfers. A stage waits for what the stage behind it sends. Work of a backward pass behind the send is not waited
for: it runs while the gradient travels, and where the stage would wait for its next micro-batch, in the bubble of the pipeline.
Behind the last micro-batches of a step every stage but the first hands on that much earlier. Such a slot is named by its transfer
(`send.S0>S1.backward`) and stands in the entry of any one layer of the chunk; it ends with the pass: the next micro-batch adds to
the same sums behind it.

Bound. What waits keeps the input and the output gradient of its product alive. `within_bound` computes early what the plan's
`max_deferred_bytes` does not let wait, from bytes in closed form (sizes.py): every rank of a stage has the same list, so that
collectives inside a weight gradient and those that its announcement starts meet. The runtime only checks the bytes.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2 (whose schedules also let weight gradients wait for longer).
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
"""Exchanges whose backward is a slot."""


def split_weights(part: OperatorKind, model: ModelDescription) -> tuple[str, ...]:
    """Weights of an operator whose gradient can be computed apart, in forward order; named with EXPERTS for a fused kernel.

    Norms, biases and the gate of a shared expert are not among them: their gradients cost nothing.
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
    """The operator that a weight gradient of a part is named with."""
    return EXPERTS if part in FUSED_KERNELS else part


def gradient_name(part: OperatorKind, weight: str, layer: int | None = None) -> str:
    """`L0.attention.qkv.dW`, or of the head where no layer is given."""
    if layer is not None:
        return weight_gradient(layer, part, weight)
    return str(OperatorId(part, weight=weight, phase=WEIGHT_GRADIENT))


def keeps_gradients(part: OperatorKind, deferred: Sequence[str], model: ModelDescription) -> bool:
    """Whether the backward pass still adds to the layer's gradients when these weights are deferred."""
    if set(deferred) != set(split_weights(part, model)):
        return True
    gated = part == SHARED and model.shared_expert_gate
    # The norm in front belongs to attention, MLP and gate. Its weight, like biases and the shared expert's gate, is not split.
    return part in (ATTENTION, MLP, GATE) or gated or model.linear_bias


def backward_of(gradient: str) -> str:
    """The backward instruction that leaves what a weight gradient is computed from."""
    return str(replace(parse_operator(gradient), weight="", phase=BACKWARD))


def gradients_of_pass(layers: Sequence[int], model: ModelDescription, holds_head: bool) -> tuple[str, ...]:
    """All weight gradients of a chunk that can be computed apart, in the order of its backward pass.

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
    """Program order: each weight gradient under the next backward exchange of its chunk; what has none stays inside.

    Args:
        layers: of one chunk.
        exchanges: whether tokens leave the rank.
        holds_head: whether the chunk ends in the head, and the head has a weight of its own.
    Returns:
        Layer -> backward exchange -> weight gradients.
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
    # What still waits has no later all-to-all in its chunk and stays whole inside its backward pass.
    return slots


def _names(part: OperatorKind, layer: int, model: ModelDescription) -> list[str]:
    # The backward pass meets the products of an operator from the last to the first.
    return [gradient_name(part, weight, layer) for weight in reversed(split_weights(part, model))]


def sends_of(plan: Plan, index: int) -> tuple[str, ...]:
    """By chunk of a stage, the transfer of its input's gradient; the empty string where the model begins."""
    stages = len(plan.stages)
    name = boundary_operator(OperatorKind.SEND, (index - 1) % stages, index, backward=True)
    # Interleaved 1F1B joins the first stage to the last: only chunk 0 of the embedding stage has nothing before it.
    begins = index == plan.embedding_stage
    return tuple("" if begins and chunk == 0 else name for chunk in range(len(plan.stages[index].chunks)))


def is_send(slot: OperatorId) -> bool:
    """Whether a slot is the transfer of an input's gradient."""
    return slot.kind is OperatorKind.SEND and slot.phase is BACKWARD


def behind_send(overlap: StageOverlap, layers: Sequence[int]) -> tuple[str, ...]:
    """Weight gradients behind the transfer of a chunk, in order.

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
    """A list in which what the next pass receives is asked for before what waits behind a send, not after it."""
    waiting: list[Draft] = []
    is_behind_send = False
    for draft in drafts:
        if draft.kind == "weight-gradient" and is_behind_send:
            waiting.append(draft)
            continue
        if not draft.receives:
            # A receive is posted where it stands in the list, and its peer's send waits for that: deferred gradients in
            # front of it would hold up the other stage. Communications keep their order among themselves, so that every
            # send still meets the same receive.
            yield from waiting
            waiting = []
        is_behind_send = draft.kind == "point-to-point"
        yield draft
    yield from waiting


def within_bound(drafts: Sequence[Draft], plan: Plan, stage: StagePlan, model: ModelDescription) -> Iterator[Draft]:
    """A list in which the weight gradients that wait never hold more than the plan's `max_deferred_bytes`.

    1. A backward operator leaves the operands of its products; the product that its backward pass meets first comes first.
    2. A gradient waits for its slot if all that wait then stay within the bound.
    3. Otherwise it is computed right behind the operator, behind those of its name that wait: sums over partitions keep their
       order, and stay bitwise equal.
    4. Its slot computes the partitions that are left; where none is left, the instruction is gone.
    """
    bound = stage.overlap.max_deferred_bytes
    saved = {buffer: parse_buffer(buffer) for draft in drafts for buffer in draft.writes}
    saved = {buffer: named for buffer, named in saved.items() if named.role is BufferRole.SAVED}
    partitions = Counter((named.gradient, named.micro_batch) for named in saved.values())
    waiting: dict[str, int] = {}
    held = 0
    for draft in drafts:
        if draft.kind == "weight-gradient":  # 4
            left = [buffer for buffer in draft.reads if buffer in waiting]
            if left:
                yield _computing(draft, left)
            held -= sum(waiting.pop(buffer) for buffer in left)
            continue
        yield draft
        operands = [buffer for buffer in draft.writes if buffer in saved]
        for buffer in sorted(operands, key=lambda buffer: _place_in_forward(saved[buffer]), reverse=True):  # 1
            gradient = saved[buffer].gradient
            whole = deferred_bytes(gradient, plan, stage, model)
            waiting[buffer] = -(-whole // partitions[gradient, saved[buffer].micro_batch])
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
    """Weight gradients that a list computes right behind the operator that left their operands, and not in their slot.

    Partitions of a gradient that waited are computed with it. Reductions of gradients among the passes are no operators.
    """
    early: list[Instruction] = []
    left: set[OperatorId] = set()
    for instruction in instructions:
        if instruction.kind == "weight-gradient":
            early += [instruction] if instruction.operator in left else []
        elif not instruction.operator.is_bucket:
            buffers = map(parse_buffer, instruction.writes)
            left = {buffer.gradient for buffer in buffers if buffer.role is BufferRole.SAVED}
    return early
