"""Whether a range of operators can run in partitions, and along which axis every tensor is then cut.

Problem. One variable per tensor: its axis (axis_tables.Axis). A tensor that exists before the range is sliced by each operation
that reads it on its own, so it has one variable per reader, without the axes that no slicing makes (irregular rows, places).
Constraints. For each operation the axes of its tensors are a row of its table. Each leaves something cut; the operations of a
gate, which may decide on all tokens, at least together.
Objective. The smallest sum of axes, in the order of Axis: the batch where possible, whole tensors last.

A range that cannot be cut names a smallest set of operators that already cannot: without any one of them the others can.

Source: Lancet, section 5.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from moe_overlap.plan import overlap
from moe_overlap.plan.operators import GATE, Operator
from moe_overlap.tuner.search.layer.axis_tables import REAL, Axis, rows_of
from moe_overlap.tuner.search.layer.operations import Form, Operation, operations_of

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
        """What the partitions cut: what travels, where something does, else what is computed."""
        travels = {axis for (tensor, _), axis in self.axes.items() if tensor.startswith(("received.", "returned."))}
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
class Problem:
    """The operations of a range with their variables.

    Attributes:
        operations: each with the variables of what it reads and writes.
        outside: variables of what exists before the range.
    """

    operations: tuple[tuple[Operation, tuple[Variable, ...]], ...]
    outside: frozenset[Variable]

    @classmethod
    def of(cls, operators: Sequence[Operator], form: Form) -> Problem:
        """Of a range, in forward order."""
        made: set[str] = set()
        outside: set[Variable] = set()
        found = []
        for operation in (one for operator in operators for one in operations_of(operator, form)):
            reader = f"{operation.operator} {operation.kind}"
            read = tuple((tensor, "" if tensor in made else reader) for tensor in operation.reads)
            outside |= {variable for variable in read if variable[1]}
            made |= set(operation.writes)
            found.append((operation, (*read, *((tensor, "") for tensor in operation.writes))))
        return cls(tuple(found), frozenset(outside))

    @property
    def operators(self) -> tuple[str, ...]:
        """Names, in order."""
        return tuple(dict.fromkeys(operation.operator for operation, _ in self.operations))

    def without(self, operator: str) -> Problem:
        """The same without what one operator asks for."""
        return Problem(tuple(one for one in self.operations if one[0].operator != operator), self.outside)

    def left(self) -> list[tuple[Variable, ...]]:
        """What each operation leaves, the operations of a gate together."""
        gates: dict[str, tuple[Variable, ...]] = {}
        found = []
        for operation, variables in self.operations:
            written = variables[len(operation.reads) :]
            if operation.operator.endswith(GATE):
                gates[operation.operator] = (*gates.get(operation.operator, ()), *written)
            else:
                found.append(written)
        return [*found, *gates.values()]


def cut_axes(operators: Sequence[Operator], form: Form) -> CutAxes | Conflict:
    """The axes of a range, or why it has none.

    Args:
        operators: forward operators in order.
    Raises:
        UndecidedError: the solver ran out of time.
    """
    problem = Problem.of(operators, form)
    found = solve(problem)
    if found is not None:
        return found
    for operator in reversed(problem.operators):
        fewer = problem.without(operator)
        if solve(fewer) is None:
            problem = fewer
    return Conflict(problem.operators, _words(problem))


def solve(problem: Problem, fixed: tuple[Variable, Axis] | None = None) -> CutAxes | None:
    """The axes of a problem; None where there are none.

    Args:
        fixed: the axis of one variable.
    """
    model = cp_model.CpModel()
    real = cp_model.Domain.from_values([*REAL, Axis.WHOLE])
    # axis of each tensor
    axes: dict[Variable, cp_model.IntVar] = {}
    for _, variables in problem.operations:
        for variable in variables:
            if variable not in axes:
                domain = real if variable in problem.outside else cp_model.Domain(min(Axis), max(Axis))
                axes[variable] = model.new_int_var_from_domain(domain, " ".join(variable))
    # each operation follows its table
    for operation, variables in problem.operations:
        model.add_allowed_assignments([axes[variable] for variable in variables], rows_of(operation.kind))
    # each leaves something cut
    for written in problem.left():
        model.add(sum(axes[variable] for variable in written) < Axis.WHOLE * len(written))
    if fixed is not None:
        model.add(axes[fixed[0]] == fixed[1])
    # batch first, whole last
    model.minimize(sum(axes.values()))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = SECONDS
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status != cp_model.OPTIMAL:
        raise UndecidedError(f"{problem.operators[0]} … {problem.operators[-1]}: {solver.status_name(status)}")
    return CutAxes({one: Axis(solver.value(axis)) for one, axis in axes.items()}, round(solver.best_objective_bound))


def _words(conflict: Problem) -> str:
    """`L0.attention cuts a.L0 along batch; L0.moe.gate cuts a.L0 along nothing`: over which tensors operators disagree."""
    allowed: dict[Variable, dict[str, set[Axis]]] = {}
    for operator in conflict.operators:
        alone = Problem(tuple(one for one in conflict.operations if one[0].operator == operator), frozenset())
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
