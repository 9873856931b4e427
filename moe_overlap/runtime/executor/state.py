"""The state that the instructions of a step share, and the keys under which each of them finds its part.

Terms. A place is an operator kind with its layer, micro-batch and partition: the key of a forward operator's autograd segment
until its backward has run. A stem is the name of a buffer without micro-batch and partition (`rows.L3`): an instruction names
the buffers it uses, and the bindings ask for them by role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moe_overlap.plan.instructions import BufferRole, Instruction, parse_buffer, stem_of
from moe_overlap.plan.instructions import BufferRole as R
from moe_overlap.plan.operators import DISPATCH, OperatorId, OperatorKind
from moe_overlap.runtime.dispatch.capacity_chunks import CapacityChunk, capacity_chunks
from moe_overlap.runtime.dispatch.irregular import Handle, IrregularDispatcher
from moe_overlap.runtime.executor.buffers import Buffers, is_part
from moe_overlap.runtime.executor.graphs import ReplayedSegment
from moe_overlap.runtime.executor.segments import Segment
from moe_overlap.runtime.state.update import UpdateState
from moe_overlap.runtime.step import Batch

Place = tuple[OperatorKind, int | None, int, int]
"""Operator kind, layer, micro-batch, partition."""


@dataclass(slots=True)
class StepState:
    """Everything alive during one step."""

    buffers: Buffers
    batches: Sequence[Batch]
    loss_scale: float
    """Scale of every micro-batch's main loss in the gradients; with fp16, times the optimizer's."""
    seed: int
    """Seed of the gates' draws."""
    first_micro_batch: int
    """Number of this step's first micro-batch in the run."""
    recomputed: frozenset[str] = frozenset()
    """Names of the operators that the backward pass runs a second time."""
    segments: dict[Place, Segment | ReplayedSegment] = field(default_factory=dict)
    handles: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    """Dispatcher handles by layer, micro-batch, partition."""
    chunks: dict[tuple[int, int], Sequence[CapacityChunk]] = field(default_factory=dict)
    """Capacity chunks of layers whose rows travel in them, by layer and micro-batch."""
    routing: dict[tuple[int, int], Any] = field(default_factory=dict)
    """Capacity used so far, by layer and micro-batch."""
    normed: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    """Input of a shared expert on the way forward, its gradient on the way back."""
    update: UpdateState = field(default_factory=UpdateState)


def place_of(i: Instruction, operator: OperatorId) -> Place:
    """The key of an instruction's autograd segment."""
    return (operator.kind, operator.layer, micro_batch_of(i), partition_of(i))


def travelling(i: Instruction, layer: int, names: Sequence[str], role: BufferRole) -> list[tuple[int, int, int]]:
    """Layer, micro-batch and partition of all rows that leave a gate: one of the whole micro-batch may send them in parts."""
    count = 1 if i.partition else sum(parse_buffer(name).word == role for name in names)
    return [(layer, micro_batch_of(i), partition_of(i) + part) for part in range(count)]


def handle_of(i: Instruction, operator: OperatorId, state: StepState, dispatcher: IrregularDispatcher) -> Handle:
    """The dispatcher's handle of the rows of an instruction: those of its partition of the batch, or of its capacity chunk.

    Capacity chunks are cut at the first dispatch that sends a share of the rows of a whole micro-batch.
    """
    n, m = layer_of(operator), micro_batch_of(i)
    if i.partition and (n, m) not in state.chunks and operator.kind is DISPATCH and reads_whole(i, R.ROWS):
        state.chunks[n, m] = capacity_chunks(dispatcher, state.handles[n, m, 0], state.buffers.partitions(i))
    if i.partition and (n, m) in state.chunks:
        return state.chunks[n, m][partition_of(i)].handle
    handle: Handle = state.handles[n, m, partition_of(i)]
    return handle


def partition_of(i: Instruction) -> int:
    """The partition that an instruction handles; 0 if it handles the whole micro-batch."""
    return i.partition[0] if i.partition else 0


def micro_batch_of(i: Instruction) -> int:
    """The micro-batch of an instruction of a pass."""
    assert i.micro_batch is not None
    return i.micro_batch


def layer_of(operator: OperatorId) -> int:
    """The layer of an operator inside the layers."""
    assert operator.layer is not None
    return operator.layer


def reads(i: Instruction, role: BufferRole) -> bool:
    """Whether an instruction reads a buffer of this role."""
    return any(parse_buffer(name).word == role for name in i.reads)


def writes(i: Instruction, role: BufferRole) -> bool:
    """Whether an instruction writes a buffer of this role."""
    return any(parse_buffer(name).word == role for name in i.writes)


def reads_whole(i: Instruction, role: BufferRole) -> bool:
    """Whether an instruction reads a buffer of this role that is not cut into partitions."""
    return any(parse_buffer(name).word == role and not is_part(name) for name in i.reads)


def read_stem(i: Instruction, role: BufferRole) -> str:
    """The stem of the only buffer of this role that an instruction reads."""
    return _stem_of(i.reads, role, i)


def written_stem(i: Instruction, role: BufferRole) -> str:
    """The stem of the only buffer of this role that an instruction writes."""
    return _stem_of(i.writes, role, i)


def _stem_of(names: Sequence[str], role: BufferRole, i: Instruction) -> str:
    stems = {stem_of(name) for name in names if parse_buffer(name).word == role}
    assert len(stems) == 1, f"{i.name}: one {role} buffer expected, the list names {sorted(stems)}"
    return stems.pop()
