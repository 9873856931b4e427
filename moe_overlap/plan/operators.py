"""Operator names: the only file that formats and parses the names of operators.

    embedding   head.norm   head.loss   L3.attention   L3.mlp   L3.moe.gate   …   mtp0.attention   …
    L3.moe.dispatch_fc1   L3.moe.fc2_combine
    send.S0>S1   receive.S0>S1   gather.S0>S1   gradients[.L3]   parameters[.L3]   optimizer.L3   optimizer.norm
    offload.L3.weights   prefetch.L3.weights

Suffixes: `.backward`; `.dW`, after the weight where the operator has several (`L3.attention.qkv.dW`); `.recompute`.

Contract. `OperatorId` is the typed name. `str` of it is the print form that plans, instruction lists, spans and the flags share;
`parse_operator` is the inverse, and both round trips are the identity. All other code reads the fields of `OperatorId` and parses
no name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import MOST_WHOLE_DIGITS


class OperatorKind(StrEnum):
    """The work of an operator, without its place and its phase."""

    ATTENTION = "attention"
    """Norm, attention, bias-dropout-add."""
    MLP = "mlp"
    GATE = "moe.gate"
    """Norm, gate, permutation."""
    COUNT = "moe.count"
    DISPATCH = "moe.dispatch"
    SHARED = "moe.shared"
    EXPERTS = "moe.experts"
    COMBINE = "moe.combine"
    DISPATCH_FC1 = "moe.dispatch_fc1"
    """Fused kernel: with FC2_COMBINE it replaces dispatch, experts and combine. The activation runs after the first of the two
    kernels of a pass; a weight gradient that is not deferred runs as a separate product after its kernel's backward."""
    FC2_COMBINE = "moe.fc2_combine"
    MERGE = "moe.merge"
    """Unpermutation, sum with the residual."""
    EMBEDDING = "embedding"
    HEAD_NORM = "head.norm"
    HEAD_LOSS = "head.loss"
    PROJECT = "project"
    LOSS = "loss"
    SEND = "send"
    RECEIVE = "receive"
    GATHER = "gather"
    """All-gather inside the receiving stage: each rank has received a share of the boundary tensor."""
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    NORM = "optimizer.norm"
    """Gradient norm and NaN check, over the whole world."""
    OFFLOAD = "offload"
    PREFETCH = "prefetch"


class Phase(StrEnum):
    """The pass an operator belongs to; its value is the suffix of the name."""

    FORWARD = ""
    BACKWARD = "backward"
    WEIGHT_GRADIENT = "dW"
    RECOMPUTE = "recompute"


class Copied(StrEnum):
    """The state that an offload or a prefetch moves."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"


ATTENTION, MLP = OperatorKind.ATTENTION, OperatorKind.MLP
GATE, COUNT, DISPATCH = OperatorKind.GATE, OperatorKind.COUNT, OperatorKind.DISPATCH
SHARED, EXPERTS, COMBINE = OperatorKind.SHARED, OperatorKind.EXPERTS, OperatorKind.COMBINE
DISPATCH_FC1, FC2_COMBINE, MERGE = OperatorKind.DISPATCH_FC1, OperatorKind.FC2_COMBINE, OperatorKind.MERGE
EMBEDDING, HEAD_NORM, HEAD_LOSS = OperatorKind.EMBEDDING, OperatorKind.HEAD_NORM, OperatorKind.HEAD_LOSS
NORM = OperatorKind.NORM
FORWARD, BACKWARD, WEIGHT_GRADIENT, RECOMPUTE = Phase

DENSE_PARTS = (ATTENTION, MLP)
MOE_PARTS = (ATTENTION, GATE, COUNT, DISPATCH, SHARED, EXPERTS, COMBINE, MERGE)
"""Forward order. The shared expert follows the dispatch, so that it can hide it."""
FUSED_KERNELS = (DISPATCH_FC1, FC2_COMBINE)
FUSED_PARTS = (ATTENTION, GATE, COUNT, SHARED, *FUSED_KERNELS, MERGE)
"""Forward order of a fused layer. The shared expert hides the all-to-all of counts, for which the kernel waits."""
EXCHANGE_PARTS = (COUNT, DISPATCH, COMBINE)
"""Collectives over the ranks that share the experts."""
NO_BACKWARD_PARTS = (COUNT,)
PROJECT, LOSS = MTP_PARTS = (OperatorKind.PROJECT, OperatorKind.LOSS)
"""Operators of a multi-token-prediction layer in addition to those of its transformer layer."""

WEIGHTS: dict[str, tuple[str, ...]] = {
    ATTENTION: ("norm", "qkv", "q", "q_down", "q_up", "kv_down", "kv_up", "proj"),
    MLP: ("norm", "fc1", "fc2"),
    GATE: ("norm", "router"),
    SHARED: ("fc1", "fc2", "gate"),
    EXPERTS: ("fc1", "fc2"),
    EMBEDDING: ("word", "position"),
    HEAD_NORM: ("norm",),
    HEAD_LOSS: ("output",),
    PROJECT: ("norm", "fc"),
    LOSS: ("norm", "output"),
}
"""Weights whose gradient can be a separate operator."""

STATE_KINDS = (OperatorKind.GRADIENTS, OperatorKind.PARAMETERS, OperatorKind.OPTIMIZER)
"""Reductions of gradients, gathers of parameters and optimizer steps: of the whole stage or of one parameter group."""
COPY_KINDS = (OperatorKind.OFFLOAD, OperatorKind.PREFETCH)
TRANSFER_KINDS = (OperatorKind.SEND, OperatorKind.RECEIVE)
_BOUNDARY_KINDS = (*TRANSFER_KINDS, OperatorKind.GATHER)
_OUTSIDE_LAYERS = (EMBEDDING, HEAD_NORM, HEAD_LOSS)
_MODEL_KINDS = frozenset((*MOE_PARTS, MLP, *FUSED_KERNELS, *MTP_PARTS, *_OUTSIDE_LAYERS))
_COLLECTIVE_KINDS = frozenset(
    (*EXCHANGE_PARTS, OperatorKind.GRADIENTS, OperatorKind.PARAMETERS, OperatorKind.GATHER, NORM)
)


class GroupKind(StrEnum):
    """Kinds of parameter groups, in the order of the model."""

    EMBEDDING = "embedding"
    LAYER = "L"
    PREDICTION = "mtp"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that are stored, moved and updated together: `embedding`, `L3`, `mtp0`, `head`.

    Attributes:
        number: of the layer or the prediction layer; None for the embedding and the head.
    """

    kind: GroupKind
    number: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}{'' if self.number is None else self.number}"

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: embedding, layers by number, prediction layers, head."""
        return list(GroupKind).index(self.kind), self.number or 0


NUMBER = rf"(0|[1-9][0-9]{{,{MOST_WHOLE_DIGITS - 1}}})"
"""Pattern of the numbers in names of operators and buffers: no leading zeros, and small enough for a machine word."""
_GROUP = re.compile(rf"(L|mtp){NUMBER}|embedding|head")


@cache
def parse_group(name: str) -> ParameterGroup:
    """The parameter group of a name.

    Raises:
        ConfigError: not the name of a parameter group.
    """
    match = _GROUP.fullmatch(name)
    if match is None:
        raise ConfigError("parameter group", name, "not a parameter group", "use embedding, L0, mtp0 or head")
    return ParameterGroup(GroupKind(match[1]), int(match[2])) if match[1] else ParameterGroup(GroupKind(name))


@dataclass(frozen=True, slots=True)
class OperatorId:
    """The typed name of an operator.

    Attributes:
        layer: layer of the model; None outside the layers.
        mtp: multi-token-prediction layer; None outside them.
        weight: the weight of a weight gradient; the empty string: all weights of the operator.
        stages: pipeline stages at the two ends of a boundary, in forward direction.
        end: `embedding` or `head`, for gradients, parameters, optimizer steps and copies of these groups.
        copied: the state that an offload or a prefetch moves.
    """

    kind: OperatorKind
    layer: int | None = None
    mtp: int | None = None
    weight: str = ""
    phase: Phase = FORWARD
    stages: tuple[int, int] | None = None
    end: str = ""
    copied: Copied | None = None

    def __str__(self) -> str:
        fields: tuple[str | None, ...]
        if self.stages is not None:
            fields = (self.kind, f"S{self.stages[0]}>S{self.stages[1]}", self.phase)
        elif self.kind in _MODEL_KINDS:
            fields = (self._place, self.kind, self.weight, self.phase)
        else:
            fields = (self.kind, self._place or self.end, self.copied)
        return ".".join(word for word in fields if word)

    @property
    def _place(self) -> str:
        return f"L{self.layer}" if self.layer is not None else f"mtp{self.mtp}" if self.mtp is not None else ""

    @property
    def group(self) -> str:
        """Its parameter group: `L3`, `mtp0`, `embedding` or `head`; empty for operators of no group or of all."""
        if self.kind is EMBEDDING:
            return GroupKind.EMBEDDING.value
        return GroupKind.HEAD.value if self.kind in (HEAD_NORM, HEAD_LOSS) else self._place or self.end

    @property
    def boundary(self) -> str:
        """The stage boundary it crosses, with the direction: `S0>S1`, `S0>S1.backward`; empty if it crosses none."""
        return "" if self.stages is None else str(self).removeprefix(f"{self.kind}.")

    @property
    def in_backward_pass(self) -> bool:
        """Whether it runs in a backward pass: a backward operator, a weight gradient or a recomputation."""
        return self.phase is not FORWARD

    @property
    def is_of_model(self) -> bool:
        """Whether it computes or routes the model's tokens; not transfers between stages, state and copies."""
        return self.kind in _MODEL_KINDS

    @property
    def is_collective(self) -> bool:
        """Whether it is a collective of a process group; the gathers inside a weight gradient are part of that operator."""
        return self.kind in _COLLECTIVE_KINDS

    @property
    def is_point_to_point(self) -> bool:
        """Whether it crosses a stage boundary."""
        return self.kind in TRANSFER_KINDS

    @property
    def is_bucket(self) -> bool:
        """Whether it reduces gradients of one parameter group, between the passes."""
        return self.kind is OperatorKind.GRADIENTS and bool(self.group)

    @property
    def is_part_gather(self) -> bool:
        """Whether it gathers the weights of one parameter group, before their first use."""
        return self.kind is OperatorKind.PARAMETERS and bool(self.group)

    @property
    def is_update(self) -> bool:
        """Whether it belongs to the update after the passes: reduction of all gradients, norm, optimizer steps, gather of all
        parameters."""
        return (self.kind in STATE_KINDS or self.kind is NORM) and not (self.is_bucket or self.is_part_gather)

    def on(self, layers: dict[int, int] | None = None, shift: int = 0) -> OperatorId:
        """The corresponding operator of another stage.

        Args:
            layers: layers of this stage -> layers of the other one; None keeps the layer.
            shift: added to the stages of a boundary.
        """
        layer = self.layer if self.layer is None or layers is None else layers[self.layer]
        stages = None if self.stages is None else (self.stages[0] + shift, self.stages[1] + shift)
        return replace(self, layer=layer, stages=stages)


def layer_operator(layer: int, part: OperatorKind, phase: Phase = FORWARD) -> str:
    """`L3.moe.dispatch`, with `.backward` or `.recompute` for these phases."""
    assert part in MOE_PARTS or part == MLP, part
    return str(OperatorId(part, layer=layer, phase=phase))


def prediction_operator(depth: int, part: OperatorKind, phase: Phase = FORWARD) -> str:
    """`mtp0.project`, with `.backward` or `.recompute` for these phases."""
    assert part in MTP_PARTS, part
    return str(OperatorId(part, mtp=depth, phase=phase))


def weight_gradient(layer: int, part: OperatorKind, weight: str) -> str:
    """`L3.attention.qkv.dW`."""
    assert weight in WEIGHTS[part], (part, weight)
    return str(OperatorId(part, layer=layer, weight=weight, phase=WEIGHT_GRADIENT))


def boundary_operator(action: OperatorKind, source: int, target: int, backward: bool = False) -> str:
    """`send.S0>S1`: the transfer of the activations from stage 0 to 1; `.backward`: of their gradients from 1 to 0.

    Stages are physical; with virtual stages the last one sends to the first (`send.S1>S0`).
    """
    assert action in _BOUNDARY_KINDS, action
    return str(OperatorId(action, stages=(source, target), phase=BACKWARD if backward else FORWARD))


def state_operator(kind: OperatorKind, group: str, copied: Copied | None = None) -> str:
    """`gradients.L3`, `optimizer.head`, `offload.L3.weights`: an operator on the state of one parameter group."""
    assert kind in STATE_KINDS or (kind in COPY_KINDS and copied is not None), (kind, copied)
    return str(OperatorId(kind, **_where(parse_group(group)), copied=copied))  # type: ignore[arg-type]


def layer_parts(moe: bool, shared_expert: bool, exchanges: bool, fused: bool = False) -> tuple[OperatorKind, ...]:
    """Forward order of one layer.

    Args:
        moe: whether the MLP is a mixture of experts.
        shared_expert: whether it has shared experts.
        exchanges: whether tokens leave the rank.
        fused: whether fused kernels dispatch and combine.
    """
    if not moe:
        return DENSE_PARTS
    left_out = (() if shared_expert else (SHARED,)) + (() if exchanges else EXCHANGE_PARTS)
    return tuple(part for part in (FUSED_PARTS if fused else MOE_PARTS) if part not in left_out)


def backward_parts(moe: bool, shared_expert: bool, exchanges: bool, fused: bool = False) -> tuple[OperatorKind, ...]:
    """Backward order of one layer: the mirror, without the all-to-all of counts."""
    parts = layer_parts(moe, shared_expert, exchanges, fused)
    return tuple(part for part in reversed(parts) if part not in NO_BACKWARD_PARTS)


def parse_operator(name: str, subject: str = "operator") -> OperatorId:
    """The operator of a name; the inverse of `str`.

    Args:
        subject: the field or flag the name was written in, for the error.
    Raises:
        ConfigError: the name is not in the vocabulary.
    """
    operator = _parsed(name)
    if operator is None:
        raise ConfigError(
            subject,
            name,
            "not an operator name",
            "use a name such as L0.attention, L3.moe.dispatch.backward or head.loss",
        )
    return operator


@cache
def kind_of(name: str) -> str:
    """An operator's name without layer, weight and stages: the key that measurements of equal work share.

    A name outside the vocabulary is returned unchanged.
    """
    operator = _parsed(name)
    if operator is None:
        return name
    if operator.is_point_to_point:
        return ".".join(word for word in (operator.kind, operator.phase) if word)
    return str(replace(operator, layer=None, mtp=None, weight=""))


def in_backward_operator(kind: str) -> str | None:
    """The key of the backward operator whose span includes this work; None if the work has a span of its own.

    Args:
        kind: a key of `kind_of`. Weight gradients and recomputations that are not instructions run inside backward operators.
    """
    for phase in (WEIGHT_GRADIENT, RECOMPUTE):
        if kind.endswith(f".{phase}"):
            return kind.removesuffix(phase) + BACKWARD
    return None


def is_state_key(kind: str) -> bool:
    """Whether a key of `kind_of` names a reduction of gradients, a gather of parameters, an optimizer step or the norm."""
    return kind.startswith(STATE_KINDS)


_LAYER = re.compile(rf"(?:(L|mtp){NUMBER}\.)?(.+)")
_BOUNDARY = re.compile(rf"({'|'.join(_BOUNDARY_KINDS)})\.S{NUMBER}>S{NUMBER}(\.{BACKWARD})?")
_STATE = re.compile(rf"({'|'.join(STATE_KINDS)})(?:\.({_GROUP.pattern}))?")
_COPY = re.compile(rf"({'|'.join(COPY_KINDS)})\.({_GROUP.pattern})\.({'|'.join(Copied)})")


@cache
def _parsed(name: str) -> OperatorId | None:
    """The operator of a name, or None. Cached: a list repeats few names many times."""
    operator = _boundary(name) or _state(name) or _model_operator(name)
    # The round trip refuses suffixes that the operator's print form does not have, for all forms at once.
    return operator if operator is not None and str(operator) == name else None


def _where(group: ParameterGroup) -> dict[str, int | str | None]:
    """The fields of an `OperatorId` that name its parameter group."""
    fields = {GroupKind.LAYER: "layer", GroupKind.PREDICTION: "mtp"}
    return {fields[group.kind]: group.number} if group.kind in fields else {"end": str(group.kind)}


def _boundary(name: str) -> OperatorId | None:
    match = _BOUNDARY.fullmatch(name)
    if match is None:
        return None
    phase = BACKWARD if match[4] else FORWARD
    return OperatorId(OperatorKind(match[1]), stages=(int(match[2]), int(match[3])), phase=phase)


def _state(name: str) -> OperatorId | None:
    if name == NORM:
        return OperatorId(NORM)
    if match := _COPY.fullmatch(name):
        where = _where(parse_group(match[2]))
        return OperatorId(OperatorKind(match[1]), **where, copied=Copied(match[match.lastindex or 0]))  # type: ignore[arg-type]
    match = _STATE.fullmatch(name)
    if match is None or name == OperatorKind.OPTIMIZER:
        return None
    return OperatorId(OperatorKind(match[1]), **(_where(parse_group(match[2])) if match[2] else {}))  # type: ignore[arg-type]


def _model_operator(name: str) -> OperatorId | None:
    """Operators of the model, forward, backward, recomputed, and their weight gradients."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    place, number, rest = match.groups()
    layer, mtp = (int(number) if place == letters else None for letters in ("L", "mtp"))
    allowed: tuple[OperatorKind, ...] = _OUTSIDE_LAYERS
    if place:
        allowed = (*MOE_PARTS, MLP, *(FUSED_KERNELS if place == "L" else MTP_PARTS))
    phase = next((suffix for suffix in Phase if suffix and rest.endswith(f".{suffix}")), FORWARD)
    rest = rest.removesuffix(f".{phase}")
    part, _, weight = ("" if rest in allowed else rest).rpartition(".")
    kind = next((candidate for candidate in allowed if candidate == (part or rest)), None)
    if kind is None or (phase is BACKWARD and kind in NO_BACKWARD_PARTS):
        return None
    if phase is WEIGHT_GRADIENT:
        return (
            OperatorId(kind, layer, mtp, weight, phase)
            if weight in ("", *WEIGHTS.get(kind, ())) and kind in WEIGHTS
            else None
        )
    return OperatorId(kind, layer, mtp, phase=phase) if not weight else None
