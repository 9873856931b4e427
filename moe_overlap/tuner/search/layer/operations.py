"""What the operators of a plan are made of, line by line, for the tables of axes.

A line is `kind | reads -> writes`, the kind one of axis_tables.TABLES. Tensors that operators hand to each other have a place in
braces and the names of plan/layer_buffers.py, beside them the gate's `weights` and `places` of rows; all others stay inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import operators
from moe_overlap.plan.gate_rules import GATE_FACTS
from moe_overlap.plan.operators import Operator
from moe_overlap.plan.plan import StagePlan
from moe_overlap.tuner.search.layer.axis_tables import PREFIX_GATE, WHOLE_GATE

Lines = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of an operator.

    Attributes:
        operator: its name in a plan.
        kind: key of TABLES.
        reads, writes: tensors, in the order of the table's letters.
    """

    operator: str
    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """What of a model and a layout decides about axes.

    Attributes:
        latent, compressed: latent attention, with a compressed query.
        shared, shared_gate: shared experts, with a gate.
        exchanges: tokens leave the rank.
        gathers: tensor-parallel ranks gather the tokens.
        gates: layer -> gate; the gate of a layer that is not there takes samples one after the other.
    """

    latent: bool = False
    compressed: bool = False
    shared: bool = False
    shared_gate: bool = False
    exchanges: bool = True
    gathers: bool = False
    gates: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: ModelDescription, stage: StagePlan) -> Form:
        """Of a stage of a plan."""
        latent = model.latent_attention
        return cls(
            latent=latent is not None,
            compressed=latent is not None and latent.q_lora_rank is not None,
            shared=model.shared_expert_hidden_size > 0,
            shared_gate=model.shared_expert_gate,
            exchanges=stage.expert * stage.expert_tensor > 1,
            gathers=stage.tensor > 1,
            gates={one.layer: one.gate for one in stage.overlap.layers if one.gate is not None},
        )

    def takes_samples(self, layer: int | None) -> bool:
        """Whether the gate of a layer decides on samples one after the other."""
        gate = None if layer is None else self.gates.get(layer)
        return gate is None or GATE_FACTS[gate].partitionable_before


def operations_of(operator: Operator, form: Form) -> tuple[Operation, ...]:
    """The lines of a forward operator of the model."""
    assert not operator.suffix, operator
    place = f"L{operator.layer}" if operator.layer is not None else f"mtp{operator.mtp}"
    after = f"L{operator.layer + 1}" if operator.layer is not None else f"mtp{operator.mtp}.loss"
    if operator.part == operators.GATE:
        lines = _gate(form.takes_samples(operator.layer))
    else:
        lines = LINES[operator.part](form)
    found = []
    for line in lines:
        kind, _, tensors = line.partition(" | ")
        reads, writes = (
            tuple(word.format(n=place, next=after) if "{" in word else f"{operator}:{word}" for word in side.split())
            for side in tensors.split("->")
        )
        found.append(Operation(str(operator), kind, reads, writes))
    return tuple(found)


def _gathered(source: str, form: Form, into: str = "gathered") -> tuple[str, Lines]:
    """A tensor that products read, and what brings it there."""
    return (into, (f"gather | {source} -> {into}",)) if form.gathers else (source, ())


def _given(target: str, form: Form) -> tuple[str, Lines]:
    """What a product writes, and what brings the result from there."""
    return ("partial", (f"gather | partial -> {target}",)) if form.gathers else (target, ())


def _attention(form: Form) -> Lines:
    written, given = _given("projected", form)
    return (
        "norm | h.{n} norm_weight -> normed",
        *(_latent(form) if form.latent else _heads(form)),
        f"product | context proj_weight -> {written}",
        *given,
        "sum | projected h.{n} -> a.{n}",
    )


def _heads(form: Form) -> Lines:
    source, gathered = _gathered("normed", form)
    return (*gathered, f"product | {source} qkv_weight -> qkv", "attention | qkv -> context")


def _latent(form: Form) -> Lines:
    """DeepSeek-V2, section 2.1: query and keys over narrow tensors, which are gathered."""
    low = ("product | normed q_down_weight -> q_low", "norm | q_low q_norm_weight -> q_normed")
    source, query = ("q_normed", low) if form.compressed else ("normed", ())
    read, gathered = _gathered(source, form, "q_gathered")
    keys, keys_gathered = _gathered("kv_normed", form, "kv_gathered")
    return (
        *query,
        *gathered,
        f"product | {read} q_weight -> q",
        "product | normed kv_down_weight -> kv_low",
        "norm | kv_low kv_norm_weight -> kv_normed",
        *keys_gathered,
        f"product | {keys} kv_up_weight -> kv",
        "latent attention | q kv -> context",
    )


def _mlp(form: Form) -> Lines:
    return (
        "norm | a.{n} norm_weight -> normed",
        *_feed_forward("normed", "narrow", form),
        "sum | narrow a.{n} -> h.{next}",
    )


def _feed_forward(source: str, target: str, form: Form) -> Lines:
    read, gathered = _gathered(source, form)
    written, given = _given(target, form)
    return (
        *gathered,
        f"product | {read} fc1_weight -> wide",
        "activation | wide -> active",
        f"product | active fc2_weight -> {written}",
        *given,
    )


def _gate(takes_samples: bool) -> Lines:
    kind = PREFIX_GATE if takes_samples else WHOLE_GATE
    return (
        "norm | a.{n} norm_weight -> normed",
        "product | normed router_weight -> scores",
        f"{kind} | normed scores used -> weights.{{n}} places.{{n}} counts.{{n}} rows.{{n}} left",
    )


def _shared(form: Form) -> Lines:
    if not form.shared_gate:
        return _feed_forward("a.{n}", "shared.{n}", form)
    opening = ("product | a.{n} gate_weight -> opening", "scale | ungated opening -> shared.{n}")
    return (*_feed_forward("a.{n}", "ungated", form), *opening)


def _experts(form: Form) -> Lines:
    return (
        f"experts' product | {'received' if form.exchanges else 'rows'}.{{n}} fc1_weight -> wide",
        "experts' activation | wide -> active",
        "experts' product | active fc2_weight -> computed.{n}",
    )


def _merge(form: Form) -> Lines:
    source = "returned.{n}" if form.exchanges else "computed.{n}"
    unpermuted = f"unpermute | {source} weights.{{n}} places.{{n}} -> routed"
    if not form.shared:
        return (unpermuted, "sum | routed a.{n} -> h.{next}")
    return (unpermuted, "sum | routed shared.{n} -> mixed", "sum | mixed a.{n} -> h.{next}")


def _project(form: Form) -> Lines:
    source, gathered = _gathered("joined", form)
    return (
        "norm | before hidden_norm_weight -> hidden",
        "norm | shifted embedded_norm_weight -> embedded",
        "join | hidden embedded -> joined",
        *gathered,
        f"product | {source} fc_weight -> h.{{n}}",
    )


def _head(source: str, form: Form) -> Lines:
    read, gathered = _gathered(source, form)
    return (
        *gathered,
        f"product | {read} output_weight -> logits",
        "loss per token | logits -> losses",
        "mean | losses -> loss",
    )


LINES: Mapping[str, Callable[[Form], Lines]] = {
    operators.ATTENTION: _attention,
    operators.MLP: _mlp,
    operators.COUNT: lambda form: ("exchange of counts | counts.{n} -> splits.{n}",),
    operators.DISPATCH: lambda form: ("exchange with counts | rows.{n} splits.{n} -> received.{n}",),
    operators.SHARED: _shared,
    operators.EXPERTS: _experts,
    operators.COMBINE: lambda form: ("exchange | computed.{n} -> returned.{n}",),
    operators.MERGE: _merge,
    operators.PROJECT: _project,
    operators.LOSS: lambda form: ("norm | h.{next} norm_weight -> normed", *_head("normed", form)),
    operators.EMBEDDING: lambda form: ("lookup | tokens word_weight -> embedded",),
    operators.HEAD_NORM: lambda form: ("norm | entering norm_weight -> left",),
    operators.HEAD_LOSS: lambda form: _head("entering", form),
}
"""Of every operator but the gate."""
