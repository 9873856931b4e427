"""Layers as drafts: the operators of layer_sequence.py, in the order of partition_order.py, with their buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import payload
from moe_overlap.plan.instructions import COMPUTE
from moe_overlap.plan.layer_buffers import backward_buffers, forward_buffers, placed
from moe_overlap.plan.layer_sequence import LayerOperator, LayerSequence
from moe_overlap.plan.list_builder import Draft
from moe_overlap.plan.operators import BACKWARD, COUNT, EXPERTS, FUSED_KERNELS, GATE, Operator, parse_operator
from moe_overlap.plan.partition_order import CutBuffers, Part, stage_major
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.ranges import partitions_of
from moe_overlap.plan.send_slots import behind_send
from moe_overlap.plan.weight_gradients import keeps_gradients, named_part, saved_buffer, split_weights

EXPERT_CHANNEL, COUNT_CHANNEL = "ep", "ep.counts"
"""Counts travel in a group of their own, beside the rows of other parts: whoever waits for them waits for no rows."""


class LayerLowering:
    """Writes the layers of one stage.

    Attributes:
        buffers: what stands in parts so far.
    """

    def __init__(self, plan: Plan, stage: StagePlan, model: ModelDescription) -> None:
        self.stage = stage
        self.buffers = CutBuffers()
        self._plan, self._model = plan, model
        self._partitions = partitions_of(stage.overlap, stage.layers)
        self._sequence = LayerSequence(stage, model, is_cut=lambda layer: (layer, EXPERTS) in self._partitions)
        slots = [slot for layer in stage.overlap.layers for slot in layer.weight_gradient_slots.items()]
        self._slots = dict(slots)
        self._deferred: dict[tuple[str, int | None], list[Operator]] = {}
        for operator in (parse_operator(name) for _, names in slots for name in names):
            self._deferred.setdefault((operator.part, operator.layer), []).append(operator)

    def forward(self, layers: Sequence[int], chunk: int, micro_batch: int) -> Iterator[Draft]:
        """The layers of a chunk forward."""
        return self._write(list(self._sequence.forward(layers)), chunk, micro_batch, last_first=False)

    def backward(self, layers: Sequence[int], chunk: int, micro_batch: int) -> Iterator[Draft]:
        """The layers of a chunk backward, each with what it recomputes first."""
        return self._write(list(self._sequence.backward(layers)), chunk, micro_batch, last_first=True)

    def prediction(self, depth: int, chunk: int, micro_batch: int) -> Iterator[Draft]:
        """The transformer layer inside a prediction layer forward."""
        return self._write(list(self._sequence.prediction(depth)), chunk, micro_batch, last_first=False)

    def prediction_backward(self, depth: int, chunk: int, micro_batch: int) -> Iterator[Draft]:
        """The same backward, with what it recomputes first."""
        return self._write(list(self._sequence.prediction_backward(depth)), chunk, micro_batch, last_first=True)

    def behind_send(self, layers: Sequence[int], chunk: int, micro_batch: int) -> Iterator[Draft]:
        """Weight gradients that wait until a chunk has sent its input's gradient."""
        for name in behind_send(self.stage.overlap, layers):
            yield self._weight_gradient(parse_operator(name), chunk, micro_batch)

    def deferred(self, part: str, layer: int | None = None) -> list[Operator]:
        """Weight gradients of an operator that are instructions of their own."""
        mine = self._deferred.get((named_part(part), layer), [])
        return [one for one in mine if one.weight in split_weights(part, self._model)]

    def _write(self, sequence: list[LayerOperator], chunk: int, micro_batch: int, last_first: bool) -> Iterator[Draft]:
        for operator, part in stage_major(sequence, self._count, lambda operator: operator.is_exchange, last_first):
            yield self._operator(operator, part, chunk, micro_batch)
            # Slots of layers are backward exchanges: partition 0 is the last to start.
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
            whole = payload.exchange_bytes(self._plan, self.stage, self._model, part.count)
            sent_bytes = whole if operator.is_exchange or operator.part in FUSED_KERNELS else 0
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
        """Names of what an operator reads and writes."""
        n, has_shared, sent = operator.layer, self._sequence.has_shared, self._sequence.exchanges
        ends = operator.place, operator.after
        deferred = self.deferred(operator.part, n) if operator.suffix == BACKWARD else []
        if operator.suffix == BACKWARD:
            kept = keeps_gradients(operator.part, [gradient.weight for gradient in deferred], self._model)
            table = backward_buffers(*ends, has_shared, sent, f"gradient.{operator.place}" if kept else "")
        else:
            table = forward_buffers(*ends, has_shared, sent)
        sides = table[operator.part].split("->")
        reads, writes = ([placed(b, micro_batch) for b in side.split()] for side in sides)
        writes += [placed(saved_buffer(str(gradient)), micro_batch) for gradient in deferred]
        if operator.part != GATE or operator.suffix == BACKWARD:
            return self.buffers.name(reads, writes, part)
        # A gate that decides on the whole micro-batch leaves its rows in the parts that travel.
        travelling = self._partitions.get((n, COUNT), 1)
        reads, writes = self.buffers.name(reads, writes, part, into=travelling)
        before, behind = _capacity(operator, part, placed(f"capacity.L{n}", micro_batch))
        return [*reads, *before], [*writes, *behind]

    def _weight_gradient(self, gradient: Operator, chunk: int, micro_batch: int) -> Draft:
        saved = self.buffers.parts(placed(saved_buffer(str(gradient)), micro_batch))
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
    """What a gate takes from the partition before and leaves to the next; again, it finds what it left."""
    before = [f"{buffer}.p{part.index - 1}"] if part.index > 0 else []
    hands_on = part.index < part.count - 1 and not operator.suffix
    return before, [f"{buffer}.p{part.index}"] if hands_on else []
