"""The stretches of a part's forward pass that a variant of recomputation runs again. Standard library only.

megatron-core 0.16.1 defines which operators a module's checkpoint wraps, and where its hook is: `transformer_layer.py` (norms),
`moe/experts.py` (activation function), `multi_latent_attention.py` (projections from latent vectors), `transformer_block.py` and
`multi_token_prediction.py` (whole layers). Here stretches are identified by the modules of the operators, so a stretch has the
operators that a layout gives it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moe_overlap.plan.operators import COMBINE, MERGE
from moe_overlap.tuner.capture.graph import CapturedPart, Op
from moe_overlap.tuner.capture.request import AHEAD, FULL

Place = tuple[str, str]
"""Operator and module."""


class NotRewrittenError(LookupError):
    """No rule here derives the graph of a variant from the graph without recomputation: it is captured."""


def forward_count(part: CapturedPart) -> int:
    """Number of operators in the forward pass."""
    return sum(op.phase == "forward" for op in part.ops)


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Operators that run again.

    Attributes:
        forward: indices of the forward operators in `CapturedPart.ops`.
        backward: indices of their backward operators.
        place: operator of the stretch -> its place when the stretch runs again. None: a hook's operator outside of all modules
            has the place of the backward operator that the hook is on, or of the one that ran before.
        hook: for a checkpoint without output, the forward operator that makes the tensor whose gradient fires the hook, and the
            index of the backward operator before which it fires; else None.
        function_place: the place that the recorder gives to the checkpoint's own autograd function: that of the first operator
            inside, unless that belongs to another function. None: its operators have the place of the operator before.
    """

    forward: range
    backward: range
    place: Callable[[Op], Place | None]
    hook: tuple[Op, int] | None = None
    function_place: Place | None = None

    @property
    def starts(self) -> int:
        """The backward operator before which the stretch runs again."""
        return self.backward.start if self.hook is None else self.hook[1]


def stretches(part: CapturedPart, variant: str) -> list[Stretch]:
    """The stretches of a part, in the order of the forward pass.

    Raises:
        NotRewrittenError: there is no rule for a module of the variant.
    """
    modules = [FULL] if variant == FULL else variant.split("+")
    unknown = set(modules) - _FINDERS.keys()
    if unknown:
        raise NotRewrittenError(f"recomputation of {', '.join(sorted(unknown))} is captured")
    all_stretches = [stretch for module in modules for stretch in _FINDERS[module](part)]
    return sorted(all_stretches, key=lambda stretch: stretch.forward.start)


def _complete_layer(part: CapturedPart) -> list[Stretch]:
    """The complete layer; of a prediction layer its projection, layer and final norm, without embedding and loss."""
    count = forward_count(part)
    if not part.kind.startswith(AHEAD):
        return [Stretch(range(count), range(count, len(part.ops)), place_of)]
    forward = _inside(part, lambda op: op.module in ("enorm", "final_layernorm"))
    return [Stretch(forward, _backward_of(part, forward, count), place_of)]


def _norms(part: CapturedPart) -> list[Stretch]:
    """Norms that are modules of their own; norms inside Transformer Engine's linears are not recomputed.

    The hook of the first is on the output of attention, that of the second on the output of the MLP (transformer_layer.py).
    """
    norms = []
    for module, source in (("input_layernorm", "self_attention"), ("pre_mlp_layernorm", "mlp")):
        inside = _inside(part, lambda op, name=module: op.module == _prefix(part) + name)  # type: ignore[misc]
        if inside:
            norms.append(_without_output(part, inside, lambda op, name=source: _is_in(op, part, name)))  # type: ignore[misc]
            hooked, fires = norms[-1].hook or (None, 0)
            if hooked is not None and hooked.operator in (COMBINE, MERGE):
                # Whatever the last kernel is, the MoE layer returns a view that its `postprocess` makes.
                norms[-1] = dataclasses.replace(norms[-1], hook=(dataclasses.replace(hooked, operator=MERGE), fires))
    return norms


def _activation(part: CapturedPart) -> list[Stretch]:
    """The activation function of the routed experts, between their products; the hook is on the second one's output."""
    owner = f"{_prefix(part)}mlp.experts"
    first, second = (_inside(part, lambda op, n=n: op.module == f"{owner}.linear_fc{n}") for n in (1, 2))  # type: ignore[misc]
    if not first or not second:
        return []
    inside = range(first.stop, second.start)
    return [_without_output(part, inside, lambda op: op.module == f"{owner}.linear_fc2", owner)]


def _latent_projections(part: CapturedPart) -> list[Stretch]:
    """The projections from latent queries, keys and values, and the rotation; the hook is on the output of core attention."""
    owner = f"{_prefix(part)}self_attention"
    ups = [f"{owner}.linear_{name}" for name in ("q_up_proj", "q_proj", "kv_up_proj")]
    first = _inside(part, lambda op: op.module in ups)
    core = _inside(part, lambda op: op.module == f"{owner}.core_attention")
    if not first or not core:
        raise NotRewrittenError(f"{part.kind}: no latent projections in front of core attention")
    inside = range(first.start, core.start)
    return [_without_output(part, inside, lambda op: op.module == f"{owner}.core_attention", owner)]


def _prefix(part: CapturedPart) -> str:
    return "transformer_layer." if part.kind.startswith(AHEAD) else ""


def _is_in(op: Op, part: CapturedPart, module: str) -> bool:
    name = _prefix(part) + module
    return op.module == name or op.module.startswith(f"{name}.")


def _inside(part: CapturedPart, belongs: Callable[[Op], bool]) -> range:
    """From the first forward operator of a stretch to the last; empty if there is none."""
    ids = [op.id for op in part.ops if op.phase == "forward" and belongs(op)]
    return range(min(ids), max(ids) + 1) if ids else range(0)


def _without_output(part: CapturedPart, forward: range, is_hooked: Callable[[Op], bool], owner: str = "") -> Stretch:
    """A stretch whose outputs are emptied.

    Args:
        is_hooked: selects operators; the last of them makes the tensor with the hook.
    """
    count = forward_count(part)
    hooked = next(op for op in reversed(part.ops[:count]) if is_hooked(op))
    # Autograd traverses the forward pass backwards: the hook fires before the first operator that no later one caused.
    later_places = _places(part.ops[hooked.id + 1 : count])
    fires = next(op.id for op in part.ops[count:] if place_of(op) not in later_places)

    def place_again(op: Op) -> Place | None:
        return None if owner and op.module == owner else ("", op.module)

    first = part.ops[forward.start]
    function_place = place_of(first) if first.module == owner and not first.library else None
    return Stretch(forward, _backward_of(part, forward, fires, owner), place_again, (hooked, fires), function_place)


def _module(part: CapturedPart, module: str) -> list[Stretch]:
    """A module that a checkpoint calls as a whole, outside of the method that names its operators."""
    forward = _inside(part, lambda op: _is_in(op, part, module))
    if not forward:
        return []
    return [Stretch(forward, _backward_of(part, forward, forward_count(part)), lambda op: ("", op.module))]


def _is_moe(part: CapturedPart) -> bool:
    return any(_is_in(op, part, "mlp.router") for op in part.ops)


def _dense_mlp(part: CapturedPart) -> list[Stretch]:
    return [] if _is_moe(part) else _module(part, "mlp")


def _moe(part: CapturedPart) -> list[Stretch]:
    """The whole of a MoE layer: its checkpoint is inside the module, whose own code has no module when it runs again."""
    owner = f"{_prefix(part)}mlp"

    def place_again(op: Op) -> Place:
        return op.operator, "" if op.module == owner else op.module

    stretches = _module(part, "mlp") if _is_moe(part) else []
    first = [part.ops[stretch.forward.start] for stretch in stretches]
    # Shared experts, if there are any, run before the router, and begin with a linear's own function.
    function_places = [place_of(op) if _is_in(op, part, "mlp.router") else None for op in first]
    return [
        dataclasses.replace(stretch, place=place_again, function_place=of)
        for stretch, of in zip(stretches, function_places, strict=True)
    ]


def _core_attention(part: CapturedPart) -> list[Stretch]:
    """Core attention; the code of attention reads the kind of its mask before the call."""
    stretches = _module(part, "self_attention.core_attention")
    owner = f"{_prefix(part)}self_attention"
    return [
        dataclasses.replace(stretch, function_place=(part.ops[stretch.forward.start].operator, owner))
        for stretch in stretches
    ]


def place_of(op: Op) -> Place:
    """The place of an operator."""
    return op.operator, op.module


def _places(ops: Iterable[Op]) -> set[Place]:
    return {place_of(op) for op in ops}


def _backward_of(part: CapturedPart, forward: range, start: int, owner: str = "") -> range:
    """The backward operators of some forward ones: they have the same places and run consecutively.

    Args:
        start: the backward operator before which none of them runs.
        owner: a module whose own code also runs before the stretch: its place ends no stretch that has other places.
    """
    count = forward_count(part)
    inside = _places(part.ops[place] for place in forward)
    own_places = inside - _places(op for op in part.ops[:count] if op.id not in forward)
    own_places = {place for place in own_places if not owner or place[1] != owner}
    later = part.ops[start:]
    certain = [op.id for op in later if place_of(op) in own_places]
    if not certain:
        # Code before and after the stretch may have its place: the stretch's is the first run after the hook.
        first = next((op.id for op in later if place_of(op) in inside), None)
        if first is None:
            raise NotRewrittenError(f"{part.kind}: a recomputed stretch without backward pass")
        after = next((op.id for op in part.ops[first:] if place_of(op) not in inside), len(part.ops))
        return range(first, after)
    first = certain[0]
    while first > start and place_of(part.ops[first - 1]) in inside:
        first -= 1
    return range(first, certain[-1] + 1)


_FINDERS: dict[str, Callable[[CapturedPart], list[Stretch]]] = {
    FULL: _complete_layer,
    "layernorm": _norms,
    "moe_act": _activation,
    "mla_up_proj": _latent_projections,
    "core_attn": _core_attention,
    "mlp": _dense_mlp,
    "shared_experts": lambda part: _module(part, "mlp.shared_experts"),
    "moe": _moe,
}
"""Variant, or module of a list -> its stretches in a part."""
