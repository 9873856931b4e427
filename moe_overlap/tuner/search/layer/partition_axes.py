"""Whether a range of operators can run in partitions, and the axis along which each tensor is cut.

Problem. Choose the axis of every tensor of a range so that each operation, applied to partitions of its inputs, computes
partitions of its outputs.
Terms.
- An *operation* is one line of an operator: `kind | reads -> writes` (`LINES`).
- An *axis* says how a tensor is cut (`Axis`); `WHOLE` means uncut. `IRREGULAR` cuts the rows sent by the gate: a partition has
  the rows of its samples.
- A *table* lists, for a kind of operation, the axes along which its tensors can be cut together (`TABLES`).
Steps.
1. Write the operators of the range as operations (`operations_of`). A tensor that exists before the range is sliced separately by
   each operation that reads it. So it has one variable per reader, limited to the axes that slicing can produce.
2. Solve a constraint program (`solve`). Variables: the axis of each tensor. Constraints: the axes of an operation are a row of
   its table; each operation writes at least one cut tensor (a gate's operations together at least one). Objective: the smallest
   sum of axes in the order of `Axis`, which prefers the batch and uses uncut tensors last.
3. For a range that cannot be cut, name an irreducible set of operators that cannot be cut together: without any one of them the
   others can.

Why the tables are as they are. The contracted axis of a product is never cut, because partial products must be summed. Attention
needs all keys. With tensor parallelism the tokens are gathered along the sequence, which then cannot be cut. Tokens are ordered
by sample, then by position: a gate that passes its used capacity on can process samples one after the other, but not partitions
of sequences; a gate that needs all tokens stays uncut, and its rows travel in partitions. All-to-alls keep the axis of experts,
which is that of the ranks. Partitions of capacity mix the samples, so no merge can follow them. A mean over tokens needs all of
them. Dropout must draw random numbers per token, or be off.

Source: Lancet, section 5.2; the irregular axis is that of figure 5c.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from itertools import chain

from ortools.sat.python import cp_model

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import operators, overlap
from moe_overlap.plan.gates import GATE_FACTS
from moe_overlap.plan.instructions import BufferRole, buffer_role
from moe_overlap.plan.operators import GATE, OperatorId, parse_operator
from moe_overlap.plan.plan import StagePlan


class Axis(IntEnum):
    """How a tensor is cut; smaller values are preferred."""

    BATCH = 0
    SEQUENCE = 1
    HIDDEN = 2
    EXPERT = 3
    CAPACITY = 4
    IRREGULAR = 5
    INDEX = 6
    WHOLE = 7


LETTERS = dict(zip("bshECix-", Axis, strict=True))
"""Letters of the tables: b batch, s sequence, h hidden or a column of a weight, E expert, C capacity, i irregular rows, x places
of such rows, - uncut."""
REAL = (Axis.BATCH, Axis.SEQUENCE, Axis.HIDDEN, Axis.EXPERT, Axis.CAPACITY)
"""The axes along which an existing uncut tensor can be sliced."""

PREFIX_GATE, WHOLE_GATE = "gate by samples", "gate of all tokens"
TABLES = {
    "norm": "b-:b s-:s",
    "product": "b-:b s-:s -h:h",
    "lookup": "b-:b s-:s -h:h",
    "attention": "b:b",
    "latent attention": "bb:b",
    "activation": "b:b s:s h:h",
    "sum": "bb:b ss:s hh:h",
    "scale": "bb:b ss:s h-:h",
    "join": "bb:b ss:s",
    "gather": "b:b",
    # tokens, scores, used capacity : weights, places, counts, rows, used capacity
    # Used capacity is uncut on both sides: each partition passes it to the next (capacity passing).
    PREFIX_GATE: "bb-:bxii-",
    # Only its outputs are cut: it may begin a range, but not stand inside one (Lancet, section 5.1).
    WHOLE_GATE: "---:bxii-",
    "exchange of counts": "i:i",
    "exchange with counts": "ii:i C-:C",
    "exchange": "i:i C:C",
    "experts' product": "i-:i C-:C EE:E -h:h",
    "experts' activation": "i:i C:C E:E h:h",
    # rows, weights, places
    "unpermute": "ibx:b",
    "loss per token": "b:b s:s",
    "mean": "",
}
"""Kind of operation -> the rows of its table. Inputs stand before the colon, in the order of the operation's line. Every table
also has the row in which all tensors are uncut (the operation runs once); it is not written. `gather` stands for every collective
over tensor-parallel ranks: gathering, scattering, reducing."""


@cache
def rows_of(operation: str) -> tuple[tuple[Axis, ...], ...]:
    """The table of an operation, with the row in which all tensors are uncut."""
    rows = [tuple(LETTERS[letter] for letter in row.replace(":", "")) for row in TABLES[operation].split()]
    # Only `mean` has no other row; it reads one tensor and writes one.
    size = len(rows[0]) if rows else 2
    uncut = (Axis.WHOLE,) * size
    return tuple(dict.fromkeys([*rows, uncut]))


# Operators as operations.

Lines = tuple[str, ...]
"""An operator, one line per operation: `kind | reads -> writes`. Names with braces are tensors that operators pass to each other:
those of plan/lowering/layers.py, and the gate's `weights` and `places` of rows. Other names are local to the operator."""
TRAVELLING = (BufferRole.RECEIVED, BufferRole.RETURNED)


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of an operator.

    Attributes:
        operator: its name in a plan.
        kind: key of TABLES.
        reads, writes: tensors, in the order of the letters of the table.
    """

    operator: str
    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """The properties of a model and a layout on which axes depend.

    Attributes:
        latent, compressed: latent attention, with a compressed query.
        shared, shared_gate: shared experts, with a gate.
        exchanges: tokens leave the rank.
        gathers: tensor-parallel ranks gather the tokens.
        gates: layer -> gate; layers that are absent have a gate that processes samples one after the other.
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
        """The properties of a stage of a plan."""
        latent = model.latent_attention
        return cls(
            latent=latent is not None,
            compressed=latent is not None and latent.q_lora_rank is not None,
            shared=model.shared_expert_hidden_size > 0,
            shared_gate=model.shared_expert_gate,
            exchanges=stage.expert * stage.expert_tensor > 1,
            gathers=stage.tensor > 1,
            gates={entry.layer: entry.gate for entry in stage.overlap.layers if entry.gate is not None},
        )

    def takes_samples(self, layer: int | None) -> bool:
        """Whether the gate of a layer processes samples one after the other."""
        gate = None if layer is None else self.gates.get(layer)
        return gate is None or GATE_FACTS[gate].partitionable_before


def operations_of(operator: OperatorId, form: Form) -> tuple[Operation, ...]:
    """The operations of a forward operator of the model."""
    assert not operator.phase, operator
    place = operator.group
    after = f"L{operator.layer + 1}" if operator.layer is not None else f"mtp{operator.mtp}.loss"
    if operator.kind == operators.GATE:
        lines = _gate(form.takes_samples(operator.layer))
    else:
        lines = LINES[operator.kind](form)
    operations = []
    for line in lines:
        kind, _, tensors = line.partition(" | ")
        reads, writes = (
            tuple(word.format(n=place, next=after) if "{" in word else f"{operator}:{word}" for word in side.split())
            for side in tensors.split("->")
        )
        operations.append(Operation(str(operator), kind, reads, writes))
    return tuple(operations)


def _gathered(source: str, form: Form, into: str = "gathered") -> tuple[str, Lines]:
    """The tensor that products read instead of `source`, and the collective that gathers it."""
    return (into, (f"gather | {source} -> {into}",)) if form.gathers else (source, ())


def _summed(target: str, form: Form) -> tuple[str, Lines]:
    """The tensor that a product writes, and the collective that sums it into `target`."""
    return ("partial", (f"gather | partial -> {target}",)) if form.gathers else (target, ())


def _attention(form: Form) -> Lines:
    written, summed = _summed("projected", form)
    return (
        "norm | h.{n} norm_weight -> normed",
        *(_latent(form) if form.latent else _heads(form)),
        f"product | context proj_weight -> {written}",
        *summed,
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
    written, summed = _summed(target, form)
    return (
        *gathered,
        f"product | {read} fc1_weight -> wide",
        "activation | wide -> active",
        f"product | active fc2_weight -> {written}",
        *summed,
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
"""Part of a layer -> its operations; the gate is not here, because its operations depend on its kind (`_gate`)."""


SECONDS = 5.0
"""Time limit of one solution; a range takes milliseconds."""
Variable = tuple[str, str]
"""A tensor, and its reader if the tensor exists before the range (empty otherwise)."""


class UndecidedError(Exception):
    """The solver did not finish in its time."""


@dataclass(frozen=True, slots=True)
class CutAxes:
    """How a range can be cut.

    Attributes:
        axes: variable -> its axis.
        bound: lower bound that the solver proved for the sum of axes.
    """

    axes: dict[Variable, Axis]
    bound: int

    @property
    def axis(self) -> overlap.Axis:
        """The axis of the partitions in a plan: that of the tensors between ranks if there are any, else of the computation."""
        travels = {axis for (tensor, _), axis in self.axes.items() if buffer_role(tensor) in TRAVELLING}
        # Partitions of capacity mix samples, so they name the range even if its other tensors are cut by sample.
        if Axis.CAPACITY in travels:
            return "capacity"
        return "batch" if travels or Axis.BATCH in self.axes.values() else "sequence"


@dataclass(frozen=True, slots=True)
class Conflict:
    """Why a range cannot be cut.

    Attributes:
        operators: an irreducible set that cannot be cut together, in the order of the range.
        reason: the axes that each of them allows, as a sentence.
    """

    operators: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class AxisProblem:
    """The operations of a range with their variables.

    Attributes:
        operations: each with the variables of the tensors that it reads and writes.
        outside: variables of tensors that exist before the range.
    """

    operations: tuple[tuple[Operation, tuple[Variable, ...]], ...]
    outside: frozenset[Variable]

    @classmethod
    def of(cls, operators: Sequence[OperatorId], form: Form) -> AxisProblem:
        """The problem of a range, whose operators stand in forward order."""
        written: set[str] = set()
        outside: set[Variable] = set()
        operations = []
        for operation in chain.from_iterable(operations_of(operator, form) for operator in operators):
            reader = f"{operation.operator} {operation.kind}"
            read = tuple((tensor, "" if tensor in written else reader) for tensor in operation.reads)
            outside |= {variable for variable in read if variable[1]}
            # After the reads, because an operation that reads and writes one name reads the earlier value.
            written |= set(operation.writes)
            operations.append((operation, (*read, *((tensor, "") for tensor in operation.writes))))
        return cls(tuple(operations), frozenset(outside))

    @property
    def operators(self) -> tuple[str, ...]:
        """Names, in order."""
        return tuple(dict.fromkeys(operation.operator for operation, _ in self.operations))

    def without(self, operator: str) -> AxisProblem:
        """The problem without the operations of one operator."""
        return AxisProblem(tuple(line for line in self.operations if line[0].operator != operator), self.outside)

    def written(self) -> list[tuple[Variable, ...]]:
        """The variables that each operation writes, the operations of a gate together."""
        gates: dict[str, tuple[Variable, ...]] = {}
        written_together = []
        for operation, variables in self.operations:
            written = variables[len(operation.reads) :]
            if parse_operator(operation.operator).kind is GATE:
                gates[operation.operator] = (*gates.get(operation.operator, ()), *written)
            else:
                written_together.append(written)
        return [*written_together, *gates.values()]


def cut_axes(operators: Sequence[OperatorId], form: Form) -> CutAxes | Conflict:
    """The axes of a range, or why it has none.

    Args:
        operators: forward operators in order.
    Raises:
        UndecidedError: the solver ran out of time.
    """
    problem = AxisProblem.of(operators, form)
    cut = solve(problem)
    if cut is not None:
        return cut
    # Step 3, a deletion filter with one solution per operator: leave out one operator after the other, and put it back if the
    # others can be cut without it. The result is irreducible, though another set may be smaller.
    for operator in reversed(problem.operators):
        fewer = problem.without(operator)
        if solve(fewer) is None:
            problem = fewer
    return Conflict(problem.operators, _explanation(problem))


def solve(problem: AxisProblem, fixed: tuple[Variable, Axis] | None = None) -> CutAxes | None:
    """Step 2: the axes of a problem; None if it is infeasible.

    Args:
        fixed: a variable and the axis that it must have.
    """
    model = cp_model.CpModel()
    real = cp_model.Domain.from_values([*REAL, Axis.WHOLE])
    # Variables: the axis of each tensor; tensors that exist before the range can only be sliced along `REAL` axes.
    axes: dict[Variable, cp_model.IntVar] = {}
    for _, variables in problem.operations:
        for variable in variables:
            if variable not in axes:
                domain = real if variable in problem.outside else cp_model.Domain(min(Axis), max(Axis))
                axes[variable] = model.new_int_var_from_domain(domain, " ".join(variable))
    # Constraint 1: each operation follows its table.
    for operation, variables in problem.operations:
        model.add_allowed_assignments([axes[variable] for variable in variables], rows_of(operation.kind))
    # Constraint 2: each operation writes at least one cut tensor. WHOLE is the largest axis, so the sum is smaller than that of
    # uncut tensors only if one of them is cut.
    for written in problem.written():
        model.add(sum(axes[variable] for variable in written) < Axis.WHOLE * len(written))
    if fixed is not None:
        model.add(axes[fixed[0]] == fixed[1])
    # Objective: prefer the batch, and leave as few tensors uncut as possible.
    model.minimize(sum(axes.values()))
    solver = cp_model.CpSolver()
    # One worker searches in a fixed order, so that among several optimal answers every run returns the same.
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = SECONDS
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status != cp_model.OPTIMAL:
        raise UndecidedError(f"{problem.operators[0]} … {problem.operators[-1]}: {solver.status_name(status)}")
    return CutAxes(
        {variable: Axis(solver.value(axis)) for variable, axis in axes.items()}, round(solver.best_objective_bound)
    )


def _explanation(conflict: AxisProblem) -> str:
    """The tensors over which operators disagree: `L0.attention cuts a.L0 along batch; L0.moe.gate cuts a.L0 along nothing`."""
    allowed: dict[Variable, dict[str, set[Axis]]] = {}
    for operator in conflict.operators:
        # Solved with this operator only: the axes it allows for each tensor that it shares with the others.
        single = AxisProblem(tuple(line for line in conflict.operations if line[0].operator == operator), frozenset())
        for variable in dict.fromkeys(variable for _, variables in single.operations for variable in variables):
            if ":" not in variable[0]:
                allowed.setdefault(variable, {})[operator] = {
                    axis for axis in Axis if solve(single, (variable, axis)) is not None
                }
    sliceable = {*REAL, Axis.WHOLE}
    disputed = {
        variable: users
        for variable, users in allowed.items()
        if not set.intersection(*users.values(), sliceable if variable in conflict.outside else {*Axis})
    }
    clauses = []
    for variable, users in (disputed or allowed).items():
        before = ", which is made before the range" if variable in conflict.outside else ""
        for operator, axes in users.items():
            along = " or ".join(axis.name.lower() for axis in sorted(axes - {Axis.WHOLE})) or "nothing"
            clauses.append(f"{operator} cuts {variable[0]} along {along}{before}")
    return "; ".join(dict.fromkeys(clauses)) or f"{conflict.operators[0]} leaves nothing that is cut"
