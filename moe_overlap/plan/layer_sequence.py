"""The operators of a chunk's layers in program order: forward, and backward with what it recomputes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import operators
from moe_overlap.plan.operators import ATTENTION, BACKWARD, EXPERTS, MERGE, MLP, RECOMPUTE, SHARED, Operator
from moe_overlap.plan.plan import Recompute, StagePlan


@dataclass(frozen=True, slots=True)
class LayerOperator:
    """An operator of a layer; suffix `backward`, `recompute` or empty.

    Attributes:
        mtp: prediction layer that it stands in; `layer` is then the one whose form that has.
    """

    layer: int
    part: str
    suffix: str = ""
    mtp: int | None = None

    @property
    def name(self) -> str:
        """As it stands in an instruction."""
        return str(Operator(self.part, None if self.mtp is not None else self.layer, self.mtp, "", self.suffix))

    @property
    def place(self) -> str:
        """`L3`, `mtp0`."""
        return f"L{self.layer}" if self.mtp is None else f"mtp{self.mtp}"

    @property
    def after(self) -> str:
        """What follows that place in forward order."""
        return f"L{self.layer + 1}" if self.mtp is None else f"mtp{self.mtp}.loss"

    @property
    def is_exchange(self) -> bool:
        """Whether it communicates."""
        return self.part in operators.EXCHANGE_PARTS


@dataclass(frozen=True, slots=True)
class LayerSequence:
    """Program order of the layers of one stage.

    Args:
        is_cut: whether a layer's mixture of experts runs in partitions.
    """

    stage: StagePlan
    model: ModelDescription
    is_cut: Callable[[int], bool]

    @property
    def has_shared(self) -> bool:
        """Whether the model has shared experts."""
        return self.model.shared_expert_hidden_size > 0

    @property
    def exchanges(self) -> bool:
        """Whether tokens leave the rank."""
        return self.stage.expert * self.stage.expert_tensor > 1

    def parts(self, layer: int) -> tuple[str, ...]:
        """Operators of a layer in forward order."""
        return operators.layer_parts(
            self.model.moe_layers[layer], self.has_shared, self.exchanges, self._is_fused(layer)
        )

    def forward(self, layers: Sequence[int], suffix: str = "") -> Iterator[LayerOperator]:
        """Layers forward; suffix `recompute` where the backward pass runs them a second time."""
        return (LayerOperator(layer, part, suffix) for layer in layers for part in self.parts(layer))

    def backward(self, layers: Sequence[int]) -> Iterator[LayerOperator]:
        """Layers backward, each with what it recomputes first."""
        for group in recompute_groups(self.stage.recompute, layers):
            if group.whole:
                yield from self.forward(group.layers, RECOMPUTE)
            for layer in reversed(group.layers):
                yield from self._layer_backward(layer, group.modules)

    def prediction(self, depth: int) -> Iterator[LayerOperator]:
        """The transformer layer inside a prediction layer forward: one like the model's last."""
        return (replace(operator, mtp=depth) for operator in self.forward([self.model.num_layers - 1]))

    def prediction_backward(self, depth: int) -> Iterator[LayerOperator]:
        """The same backward."""
        last, recompute = self.model.num_layers - 1, self.stage.recompute
        operators_of = list(self._layer_backward(last, recompute.modules))
        if recomputes_predictions(recompute):
            operators_of = [*self.forward([last], RECOMPUTE), *operators_of]
        return (replace(operator, mtp=depth) for operator in operators_of)

    def _layer_backward(self, layer: int, modules: tuple[str, ...]) -> Iterator[LayerOperator]:
        for part in self._backward_parts(layer):
            if part == MERGE and "moe" in modules:
                again = (other for other in self.parts(layer) if other != ATTENTION)
                yield from (LayerOperator(layer, other, RECOMPUTE) for other in again)
            if (part == MLP and "mlp" in modules) or (part == SHARED and "shared_experts" in modules):
                yield LayerOperator(layer, part, RECOMPUTE)
            yield LayerOperator(layer, part, BACKWARD)

    def _backward_parts(self, layer: int) -> tuple[str, ...]:
        """In partitions the shared expert runs before the experts backward as it does forward: under an exchange."""
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
    """Layers that run backward together; `whole`: first all of them forward again; `modules`: parts again."""

    layers: tuple[int, ...]
    whole: bool
    modules: tuple[str, ...] = ()


def recomputes_predictions(recompute: Recompute) -> bool:
    """Whether prediction layers are computed a second time, projections included; megatron-core's block method spares them."""
    return recompute.granularity == "uniform"


def recompute_groups(recompute: Recompute, layers: Sequence[int]) -> list[RecomputeGroup]:
    """Groups of a chunk's layers in backward order."""
    size = recompute.layers if recompute.granularity == "uniform" else 1
    groups = []
    for first in range(0, len(layers), size):
        members = tuple(layers[first : first + size])
        chosen = first < recompute.layers
        if recompute.granularity == "uniform" or (recompute.granularity == "full" and chosen):
            groups.append(RecomputeGroup(members, whole=True))
        else:
            groups.append(RecomputeGroup(members, whole=False, modules=recompute.modules if chosen else ()))
    return groups[::-1]
