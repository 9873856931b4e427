"""The one vocabulary of operator names: capture, plans, instructions, spans and the range words of the flags use it.

    embedding   head.norm   head.loss   L3.attention   L3.mlp   L3.moe.gate   …   mtp0.attention   …
    L3.moe.dispatch_fc1   L3.moe.fc2_combine
    send.S0>S1   receive.S0>S1   gather.S0>S1   gradients[.L3]   parameters[.L3]   optimizer.L3   optimizer.norm
    offload.L3.weights   prefetch.L3.weights

Suffixes: `.backward`; `.dW`, after the weight where the operator has several (`L3.attention.qkv.dW`); `.recompute`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from moe_overlap.describe.errors import ConfigError

ATTENTION = "attention"
"""Norm, attention, bias-dropout-add."""
MLP = "mlp"
GATE = "moe.gate"
"""Norm, gate, permutation."""
COUNT, DISPATCH, SHARED, EXPERTS, COMBINE = "moe.count", "moe.dispatch", "moe.shared", "moe.experts", "moe.combine"
DISPATCH_FC1, FC2_COMBINE = "moe.dispatch_fc1", "moe.fc2_combine"
"""Fused kernels, in place of dispatch, experts and combine. The activation between them runs behind the first of a pass; a
weight gradient that is not deferred is computed in the backward of its product's kernel, as a kernel of its own."""
MERGE = "moe.merge"
"""Unpermutation, sum with the residual."""

DENSE_PARTS = (ATTENTION, MLP)
MOE_PARTS = (ATTENTION, GATE, COUNT, DISPATCH, SHARED, EXPERTS, COMBINE, MERGE)
"""Forward order. The shared expert stands behind the dispatch, under which it can run."""
FUSED_KERNELS = (DISPATCH_FC1, FC2_COMBINE)
FUSED_PARTS = (ATTENTION, GATE, COUNT, SHARED, *FUSED_KERNELS, MERGE)
"""Forward order of a fused layer. The shared expert runs under the exchange of counts, for which the kernel waits."""
EXCHANGE_PARTS = (COUNT, DISPATCH, COMBINE)
"""Collectives over the ranks that share the experts."""
NO_BACKWARD_PARTS = (COUNT,)

EMBEDDING, HEAD_NORM, HEAD_LOSS = "embedding", "head.norm", "head.loss"
PROJECT, LOSS = MTP_PARTS = ("project", "loss")
"""What a multi-token-prediction layer has beside a layer's parts."""
NORM = "optimizer.norm"
"""Gradient norm and NaN check, over the whole world."""

BACKWARD, WEIGHT_GRADIENT, RECOMPUTE = "backward", "dW", "recompute"
SUFFIXES = (BACKWARD, WEIGHT_GRADIENT, RECOMPUTE)

WEIGHTS: dict[str, tuple[str, ...]] = {
    ATTENTION: ("norm", "qkv", "q", "q_down", "q_up", "kv_down", "kv_up", "proj"),
    MLP: ("norm", "fc1", "fc2"),
    GATE: ("norm", "router"),
    SHARED: ("fc1", "fc2", "gate"),
    EXPERTS: ("fc1", "fc2"),
    EMBEDDING: ("word", "position"),
    HEAD_NORM: ("norm",),
    HEAD_LOSS: ("output",),
    "project": ("norm", "fc"),
    "loss": ("norm", "output"),
}
"""Weights whose gradient can be an operator of its own."""

STATE_PREFIXES = ("gradients", "parameters", "optimizer")
COPY_PREFIXES = ("offload", "prefetch")
COPIED = ("weights", "gradients", "optimizer", "activations")

_LAYER = re.compile(r"(L|mtp)(\d+)\.(.+)")
_BOUNDARY = re.compile(r"(send|receive|gather)\.S(0|[1-9]\d*)>S(0|[1-9]\d*)(\.backward)?")
_STATE = re.compile(rf"({'|'.join(STATE_PREFIXES)})\.(L\d+|mtp\d+|embedding|head)")
_COPY = re.compile(rf"({'|'.join(COPY_PREFIXES)})\.(L\d+|mtp\d+|embedding|head)\.({'|'.join(COPIED)})")

_OF_STATES = frozenset((*STATE_PREFIXES, *(f"{prefix}.{copied}" for prefix in COPY_PREFIXES for copied in COPIED)))


@dataclass(frozen=True, slots=True)
class Operator:
    """A name, taken apart.

    Attributes:
        part: what it does, without place and suffix (`moe.dispatch`, `embedding`, `send.S0>S1`, `gradients`).
        layer: layer of the model; None outside the layers.
        mtp: multi-token-prediction layer; None outside them.
        weight: the weight of a weight gradient; the empty string where all weights are meant.
        suffix: one of SUFFIXES, or the empty string for the forward operator.
    """

    part: str
    layer: int | None = None
    mtp: int | None = None
    weight: str = ""
    suffix: str = ""

    def __str__(self) -> str:
        place = f"L{self.layer}." if self.layer is not None else f"mtp{self.mtp}." if self.mtp is not None else ""
        if self.part in _OF_STATES:
            head, _, tail = self.part.partition(".")
            return ".".join(piece for piece in (head, place.rstrip("."), tail) if piece)
        return ".".join(piece for piece in (place + self.part, self.weight, self.suffix) if piece)

    @property
    def is_collective(self) -> bool:
        """Whether it communicates inside a process group; a weight gradient never does."""
        head = self.part.partition(".")[0]
        return self.part in EXCHANGE_PARTS or head in ("gradients", "parameters", "gather") or self.part == NORM

    @property
    def is_point_to_point(self) -> bool:
        """Whether it crosses a stage boundary."""
        return self.part.startswith(("send.", "receive."))

    @property
    def is_copy(self) -> bool:
        """Whether it moves state between device and host."""
        return self.part.partition(".")[0] in COPY_PREFIXES

    @property
    def is_compute(self) -> bool:
        """Whether it occupies the compute channel."""
        return not (self.is_collective or self.is_point_to_point or self.is_copy)


def layer_operator(layer: int, part: str, suffix: str = "") -> str:
    """`L3.moe.dispatch`, with `.backward` or `.recompute` where given."""
    assert part in MOE_PARTS or part == MLP, part
    return str(Operator(part, layer=layer, suffix=suffix))


def prediction_operator(depth: int, part: str, suffix: str = "") -> str:
    """`mtp0.project`, with `.backward` or `.recompute` where given."""
    assert part in MTP_PARTS, part
    return str(Operator(part, mtp=depth, suffix=suffix))


def weight_gradient(layer: int, part: str, weight: str) -> str:
    """`L3.attention.qkv.dW`."""
    assert weight in WEIGHTS[part], (part, weight)
    return str(Operator(part, layer=layer, weight=weight, suffix=WEIGHT_GRADIENT))


def boundary_operator(action: str, source: int, target: int, backward: bool = False) -> str:
    """`send.S0>S1`: the transfer of the activations from stage 0 to 1; `.backward`: of their gradients from 1 to 0.

    `gather.S0>S1`: ranks of stage 1 complete what each has received a part of.

    Stages are physical; with virtual stages the last one sends to the first (`send.S1>S0`).
    """
    return f"{action}.S{source}>S{target}" + (".backward" if backward else "")


def layer_parts(moe: bool, shared_expert: bool, exchanges: bool, fused: bool = False) -> tuple[str, ...]:
    """Forward order of one layer.

    Args:
        moe: whether the MLP is a mixture of experts.
        shared_expert: whether it has shared experts.
        exchanges: whether tokens leave the rank.
        fused: whether fused kernels do that.
    """
    if not moe:
        return DENSE_PARTS
    left_out = (() if shared_expert else (SHARED,)) + (() if exchanges else EXCHANGE_PARTS)
    return tuple(part for part in (FUSED_PARTS if fused else MOE_PARTS) if part not in left_out)


def backward_parts(moe: bool, shared_expert: bool, exchanges: bool, fused: bool = False) -> tuple[str, ...]:
    """Backward order of one layer: the mirror, without the exchange of counts."""
    parts = layer_parts(moe, shared_expert, exchanges, fused)
    return tuple(part for part in reversed(parts) if part not in NO_BACKWARD_PARTS)


def parse_operator(name: str, subject: str = "operator") -> Operator:
    """Take a name apart.

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


def kind_of(name: str) -> str:
    """An operator's name without its layer, stages, weight and parts; a name that is not in the vocabulary as it is."""
    try:
        operator = parse_operator(name)
    except ConfigError:
        return name
    part = operator.part.partition(".S")[0] if operator.part.startswith(("send.", "receive.")) else operator.part
    return ".".join(piece for piece in (part, operator.suffix) if piece)


@cache
def _parsed(name: str) -> Operator | None:
    """None for what is no name; a list of instructions has few names, each many times."""
    operator = _state_or_boundary(name) or _model_operator(name)
    return operator if operator is not None and str(operator) == name else None


def _state_or_boundary(name: str) -> Operator | None:
    if _BOUNDARY.fullmatch(name):
        backward = name.endswith("." + BACKWARD)
        return Operator(name.removesuffix("." + BACKWARD), suffix=BACKWARD if backward else "")
    if name in ("gradients", "parameters", NORM):
        return Operator(name)
    if found := _STATE.fullmatch(name) or _COPY.fullmatch(name):
        action, place, *copied = found.groups()
        if place in (EMBEDDING, "head"):
            return Operator(name)
        part = ".".join((action, *copied))
        number = int(place.lstrip("Lmtp"))
        return Operator(part, layer=number) if place.startswith("L") else Operator(part, mtp=number)
    return None


def _model_operator(name: str) -> Operator | None:
    """Operators of the model, forward, backward, recomputed, and their weight gradients."""
    layer = mtp = None
    rest = name
    allowed: tuple[str, ...] = (EMBEDDING, HEAD_NORM, HEAD_LOSS)
    if found := _LAYER.fullmatch(name):
        kind, number, rest = found.groups()
        layer, mtp = (int(number), None) if kind == "L" else (None, int(number))
        allowed = (*MOE_PARTS, MLP, *(FUSED_KERNELS if kind == "L" else MTP_PARTS))
    suffix = next((known for known in SUFFIXES if rest.endswith("." + known)), "")
    rest = rest.removesuffix("." + suffix) if suffix else rest
    if rest in allowed:
        legal = (suffix != BACKWARD or rest not in NO_BACKWARD_PARTS) and (suffix != WEIGHT_GRADIENT or rest in WEIGHTS)
        return Operator(rest, layer, mtp, "", suffix) if legal else None
    part, _, weight = rest.rpartition(".")
    if suffix == WEIGHT_GRADIENT and part in allowed and weight in WEIGHTS.get(part, ()):
        return Operator(part, layer, mtp, weight, suffix)
    return None
