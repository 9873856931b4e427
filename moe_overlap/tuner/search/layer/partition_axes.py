"""Whether a range of operators can run in partitions, and along which axis every tensor is then cut.

Problem. Choose the axis of every tensor of a range so that every operation, run on the parts, gives the parts of its outputs.
Terms.
- An *operation* is one line of an operator: `kind | reads -> writes` (`LINES`).
- An *axis* is how a tensor is cut (`Axis`); `WHOLE` is not at all. *Irregular* are the rows that the gate sent out for the
  samples of a partition.
- A *table* lists, for a kind of operation, the axes along which its tensors are cut together (`TABLES`).
Steps.
1. Write the operators of the range as operations (`operations_of`). A tensor that exists before the range is sliced by each
   operation that reads it on its own, so it has one variable per reader, without the axes that no slicing makes.
2. Solve a constraint program (`solve`). Variables: the axis of each tensor. Constraints: the axes of an operation are a row of
   its table; each operation leaves something cut, the operations of a gate at least together. Objective: the smallest sum of
   axes in the order of `Axis`: the batch where possible, whole tensors last.
3. A range that cannot be cut names a smallest set of operators that already cannot: without any one of them the others can.

Why the tables are as they are. The contracted axis of a product is never cut: parts would be sums. Attention needs all keys. With
tensor parallelism the tokens are gathered along the sequence, which then cannot be cut. Tokens are ordered by sample, then by
place: a gate that passes its used capacity on can take samples one after the other, but no partitions of sequences; one that
looks at all tokens stays whole, and its rows travel in partitions. All-to-alls keep the axis of experts, which is that of the
ranks. Partitions of capacity mix the samples, so that no merge can follow them. A mean over tokens needs them all. Dropout must
draw by token, or is left out.

Source: Lancet, section 5.2; the irregular axis is that of figure 5c.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache

from ortools.sat.python import cp_model

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import operators, overlap
from moe_overlap.plan.gates import GATE_FACTS
from moe_overlap.plan.instructions import BufferRole, buffer_role
from moe_overlap.plan.operators import GATE, OperatorId, parse_operator
from moe_overlap.plan.plan import StagePlan


class Axis(IntEnum):
    """How a tensor is cut, what is preferred first."""

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
of such rows, - whole."""
REAL = (Axis.BATCH, Axis.SEQUENCE, Axis.HIDDEN, Axis.EXPERT, Axis.CAPACITY)
"""Axes that a tensor has by itself: what exists whole can be sliced along them, and along no other."""

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
    # Used capacity is whole on both sides: it is handed from partition to partition (capacity passing), not cut.
    PREFIX_GATE: "bb-:bxii-",
    # Only its outputs are cut: it may be the first operation of a range, never stand inside one (Lancet, section 5.1).
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
"""Kind of operation -> the rows of its table. Inputs stand before the colon, in the order in which a line names them; the row
that leaves everything whole is in every table (the operation then runs once) and is not written. `gather` is every collective
over tensor-parallel ranks: gathering, scattering, reducing."""


@cache
def rows_of(operation: str) -> tuple[tuple[Axis, ...], ...]:
    """The table of an operation, the row that leaves everything whole included."""
    rows = [tuple(LETTERS[letter] for letter in row.replace(":", "")) for row in TABLES[operation].split()]
    # Only `mean` has no row of its own: one tensor in, one out.
    size = len(rows[0]) if rows else 2
    whole = (Axis.WHOLE,) * size
    return tuple(dict.fromkeys([*rows, whole]))


# inside.

Lines = tuple[str, ...]
"""An operator, a line per operation: `kind | reads -> writes`. Tensors that operators hand to each other have a place in braces
and the names of plan/lowering/layers.py, beside them the gate's `weights` and `places` of rows; all others stay inside."""
TRAVELLING = (BufferRole.RECEIVED, BufferRole.RETURNED)


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
    """The facts of a model and a layout on which axes depend.

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
        """The facts of a stage of a plan."""
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


def operations_of(operator: OperatorId, form: Form) -> tuple[Operation, ...]:
    """The lines of a forward operator of the model."""
    assert not operator.phase, operator
    place = operator.group
    after = f"L{operator.layer + 1}" if operator.layer is not None else f"mtp{operator.mtp}.loss"
    if operator.kind == operators.GATE:
        lines = _gate(form.takes_samples(operator.layer))
    else:
        lines = LINES[operator.kind](form)
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
    """The tensor that a product writes, and the lines that bring the result from there to the target."""
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
"""Part of a layer -> its lines; the gate's depend on its kind."""


SECONDS = 5.0
"""Most time of one solution; a range takes milliseconds."""
Variable = tuple[str, str]
"""A tensor, and the operation that reads it where it exists before the range, else the empty string."""


class UndecidedError(Exception):
    """The solver did not finish in its time."""


@dataclass(frozen=True, slots=True)
class CutAxes:
    """How a range can be cut.

    Attributes:
        axes: of every variable.
        bound: least sum of axes that the solver proved.
    """

    axes: dict[Variable, Axis]
    bound: int

    @property
    def axis(self) -> overlap.Axis:
        """The axis that partitions cut: that of the tensors that travel if any do, else that of the computation."""
        travels = {axis for (tensor, _), axis in self.axes.items() if buffer_role(tensor) in TRAVELLING}
        # The rows of a capacity partition belong to many samples, whatever else of the range is cut by sample.
        if Axis.CAPACITY in travels:
            return "capacity"
        return "batch" if travels or Axis.BATCH in self.axes.values() else "sequence"


@dataclass(frozen=True, slots=True)
class Conflict:
    """Why a range cannot be cut.

    Attributes:
        operators: a smallest set that disagrees, in the order of the range.
        reason: what each of them cuts how, in words.
    """

    operators: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class AxisProblem:
    """The operations of a range with their variables.

    Attributes:
        operations: each with the variables of what it reads and writes.
        outside: variables of what exists before the range.
    """

    operations: tuple[tuple[Operation, tuple[Variable, ...]], ...]
    outside: frozenset[Variable]

    @classmethod
    def of(cls, operators: Sequence[OperatorId], form: Form) -> AxisProblem:
        """The problem of a range, whose operators stand in forward order."""
        written: set[str] = set()
        outside: set[Variable] = set()
        operations = []
        for operation in (one for operator in operators for one in operations_of(operator, form)):
            reader = f"{operation.operator} {operation.kind}"
            read = tuple((tensor, "" if tensor in written else reader) for tensor in operation.reads)
            outside |= {variable for variable in read if variable[1]}
            # Behind the reads: an operation that reads and writes one name reads what is there before.
            written |= set(operation.writes)
            operations.append((operation, (*read, *((tensor, "") for tensor in operation.writes))))
        return cls(tuple(operations), frozenset(outside))

    @property
    def operators(self) -> tuple[str, ...]:
        """Names, in order."""
        return tuple(dict.fromkeys(operation.operator for operation, _ in self.operations))

    def without(self, operator: str) -> AxisProblem:
        """The same without what one operator asks for."""
        return AxisProblem(tuple(line for line in self.operations if line[0].operator != operator), self.outside)

    def left(self) -> list[tuple[Variable, ...]]:
        """The variables that each operation writes, the operations of a gate together."""
        gates: dict[str, tuple[Variable, ...]] = {}
        left = []
        for operation, variables in self.operations:
            written = variables[len(operation.reads) :]
            if parse_operator(operation.operator).kind is GATE:
                gates[operation.operator] = (*gates.get(operation.operator, ()), *written)
            else:
                left.append(written)
        return [*left, *gates.values()]


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
    # A deletion filter, a solution per operator: the set is irreducible, though another one may be smaller.
    # Step 3: leave out one operator after the other; those without which the others can be cut stay.
    for operator in reversed(problem.operators):
        fewer = problem.without(operator)
        if solve(fewer) is None:
            problem = fewer
    return Conflict(problem.operators, _words(problem))


def solve(problem: AxisProblem, fixed: tuple[Variable, Axis] | None = None) -> CutAxes | None:
    """The axes of a problem; None where there are none.

    Args:
        fixed: the axis of one variable.
    """
    model = cp_model.CpModel()
    real = cp_model.Domain.from_values([*REAL, Axis.WHOLE])
    # Variables: the axis of each tensor; what exists before the range is sliced along real axes alone.
    axes: dict[Variable, cp_model.IntVar] = {}
    for _, variables in problem.operations:
        for variable in variables:
            if variable not in axes:
                domain = real if variable in problem.outside else cp_model.Domain(min(Axis), max(Axis))
                axes[variable] = model.new_int_var_from_domain(domain, " ".join(variable))
    # Constraint 1: each operation follows its table.
    for operation, variables in problem.operations:
        model.add_allowed_assignments([axes[variable] for variable in variables], rows_of(operation.kind))
    # Constraint 2: each operation leaves something cut.
    # WHOLE is the largest axis, so the sum stays below only if at least one of the tensors is cut.
    for written in problem.left():
        model.add(sum(axes[variable] for variable in written) < Axis.WHOLE * len(written))
    if fixed is not None:
        model.add(axes[fixed[0]] == fixed[1])
    # Objective: the batch first, whole tensors last.
    model.minimize(sum(axes.values()))
    solver = cp_model.CpSolver()
    # One worker searches in the same order every time: of several optimal answers all runs find the same.
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = SECONDS
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status != cp_model.OPTIMAL:
        raise UndecidedError(f"{problem.operators[0]} … {problem.operators[-1]}: {solver.status_name(status)}")
    return CutAxes({one: Axis(solver.value(axis)) for one, axis in axes.items()}, round(solver.best_objective_bound))


def _words(conflict: AxisProblem) -> str:
    """`L0.attention cuts a.L0 along batch; L0.moe.gate cuts a.L0 along nothing`: over which tensors operators disagree."""
    allowed: dict[Variable, dict[str, set[Axis]]] = {}
    for operator in conflict.operators:
        # Each operator by itself: the axes it allows for the tensors that it shares with the others.
        alone = AxisProblem(tuple(one for one in conflict.operations if one[0].operator == operator), frozenset())
        for variable in dict.fromkeys(variable for _, variables in alone.operations for variable in variables):
            if ":" not in variable[0]:
                allowed.setdefault(variable, {})[operator] = {
                    axis for axis in Axis if solve(alone, (variable, axis)) is not None
                }
    sliceable = {*REAL, Axis.WHOLE}
    disputed = {
        variable: users
        for variable, users in allowed.items()
        if not set.intersection(*users.values(), sliceable if variable in conflict.outside else {*Axis})
    }
    said = []
    for variable, users in (disputed or allowed).items():
        before = ", which is made before the range" if variable in conflict.outside else ""
        for operator, axes in users.items():
            along = " or ".join(axis.name.lower() for axis in sorted(axes - {Axis.WHOLE})) or "nothing"
            said.append(f"{operator} cuts {variable[0]} along {along}{before}")
    return "; ".join(dict.fromkeys(said)) or f"{conflict.operators[0]} leaves nothing that is cut"
