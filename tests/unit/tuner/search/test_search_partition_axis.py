"""Axes of ranges against plain backtracking over the tables, for every gate, and why ranges cannot be cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_overlap.plan import operators
from moe_overlap.plan.gates import GATE_FACTS
from moe_overlap.plan.operators import OperatorId, parse_operator
from moe_overlap.tuner.search.layer.partition_axes import (
    LINES,
    REAL,
    TABLES,
    Axis,
    AxisProblem,
    Conflict,
    CutAxes,
    Form,
    Variable,
    cut_axes,
    operations_of,
    rows_of,
    solve,
)

CHUNK = [
    parse_operator(f"L{layer}.{part}")
    for layer, parts in ((0, operators.MOE_PARTS), (1, operators.DENSE_PARTS))
    for part in parts
]
RANGES = [CHUNK[first:last] for last in range(len(CHUNK) + 1) for first in range(last)]
FORMS = {
    **{gate: Form(gates={0: gate}) for gate in GATE_FACTS},
    "latent, shared, tensor-parallel": Form(
        latent=True, compressed=True, shared=True, shared_gate=True, gathers=True, gates={0: "topk"}
    ),
    "latent, shared, all tokens": Form(latent=True, shared=True, gates={0: "expert_choice"}),
    "no exchange": Form(exchanges=False),
}


def solutions(problem: AxisProblem) -> Iterator[dict[Variable, Axis]]:
    """The twin: row after row, whatever fits to what was chosen before."""

    def extend(place: int, chosen: dict[Variable, Axis]) -> Iterator[dict[Variable, Axis]]:
        if place == len(problem.operations):
            if all(any(chosen[one] != Axis.WHOLE for one in written) for written in problem.written()):
                yield chosen
            return
        operation, variables = problem.operations[place]
        for row in rows_of(operation.kind):
            taken = dict(zip(variables, row, strict=True))
            sliced = all(axis in (*REAL, Axis.WHOLE) for variable, axis in taken.items() if variable in problem.outside)
            if sliced and all(chosen.get(variable, axis) == axis for variable, axis in taken.items()):
                yield from extend(place + 1, {**chosen, **taken})

    return extend(0, {})


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_solver_agrees_with_backtracking(form: Form) -> None:
    """On every range of a mixture of experts and a dense layer: whether it can be cut, and how well."""
    feasible = 0
    for members in RANGES:
        problem = AxisProblem.of(members, form)
        best = min((sum(found.values()) for found in solutions(problem)), default=None)
        answer = solve(problem)
        assert (answer is None) == (best is None), members
        if answer is not None:
            assert sum(answer.axes.values()) == best == answer.bound
            assert answer.axes in list(solutions(problem))
            feasible += 1
    assert 0 < feasible < len(RANGES)


def axis(first: str, last: str, form: Form) -> str:
    """The partition axis of the range with these ends; empty where it cannot be cut."""
    places = [str(one) for one in CHUNK]
    answer = solve(AxisProblem.of(CHUNK[places.index(first) : places.index(last) + 1], form))
    return "" if answer is None else answer.axis


def test_ranges_of_gates() -> None:
    """Lancet, section 2.3 and figure 8: gates of all tokens begin a range, others may stand inside."""
    for gate, facts in GATE_FACTS.items():
        form = Form(shared=True, gates={0: gate})
        around = "batch" if facts.partitionable_before else ""
        assert axis("L0.attention", "L0.moe.merge", form) == around
        assert axis("L0.attention", "L1.mlp", form) == around
        assert axis("L0.moe.gate", "L0.moe.merge", form) == axis("L0.moe.gate", "L1.mlp", form) == "batch"
        assert axis("L0.moe.dispatch", "L0.moe.combine", form) == "capacity"
        assert axis("L0.moe.dispatch", "L0.moe.merge", form) == ""


def test_sequences_are_cut_where_nothing_gathers_them() -> None:
    mlp = [parse_operator("L1.mlp")]
    for gathers, axes in ((False, {Axis.BATCH, Axis.SEQUENCE}), (True, {Axis.BATCH})):
        found = solutions(AxisProblem.of(mlp, Form(gathers=gathers)))
        assert {one["L1.mlp:normed", ""] for one in found} == axes


@pytest.mark.parametrize(
    ("first", "last", "gate", "operators_named", "reason"),
    [
        ("L0.attention", "L1.mlp", "batch_prioritized", ("L0.attention", "L0.moe.gate"), "L0.moe.gate cuts a.L0"),
        (
            "L0.moe.combine",
            "L0.moe.merge",
            "topk",
            ("L0.moe.merge",),
            "L0.moe.merge cuts places.L0 along index, which is made before the range",
        ),
        (
            "L0.moe.count",
            "L0.moe.dispatch",
            "topk",
            ("L0.moe.count",),
            "L0.moe.count cuts counts.L0 along irregular, which is made before the range",
        ),
    ],
)
def test_a_conflict_is_named_and_smallest(
    first: str, last: str, gate: str, operators_named: tuple[str, ...], reason: str
) -> None:
    places = [str(one) for one in CHUNK]
    members = CHUNK[places.index(first) : places.index(last) + 1]
    form = Form(gates={0: gate})
    conflict = cut_axes(members, form)
    assert isinstance(conflict, Conflict)
    assert conflict.operators == operators_named and reason in conflict.reason
    core = AxisProblem.of(members, form)
    for operator in core.operators:
        if operator not in conflict.operators:
            core = core.without(operator)
    assert not list(solutions(core))
    for operator in conflict.operators:
        rest = core.without(operator)
        assert not rest.operations or list(solutions(rest))


def test_losses_need_all_tokens() -> None:
    head = [parse_operator("head.norm"), parse_operator("head.loss")]
    conflict = cut_axes(head, Form())
    assert isinstance(conflict, Conflict)
    assert conflict.operators == ("head.loss",) and conflict.reason == "head.loss leaves nothing that is cut"
    for name, cut in (("embedding", True), ("mtp0.project", True), ("mtp0.loss", False), ("head.norm", True)):
        for gathers in (False, True):
            assert isinstance(cut_axes([parse_operator(name)], Form(gathers=gathers)), CutAxes) == cut


def test_every_forward_operator_has_a_table() -> None:
    """And every table is used."""
    parts = {*operators.MOE_PARTS, operators.MLP, *operators.MTP_PARTS}
    parts |= {operators.EMBEDDING, operators.HEAD_NORM, operators.HEAD_LOSS}
    assert {*LINES, operators.GATE} == parts
    used = set()
    for form in FORMS.values():
        for part in parts:
            inside = part in (*operators.MOE_PARTS, operators.MLP)
            place = (
                OperatorId(part, layer=0)
                if inside
                else OperatorId(part, mtp=0 if part in operators.MTP_PARTS else None)
            )
            for operation in operations_of(place, form):
                used.add(operation.kind)
                assert {len(operation.reads + operation.writes)} == {len(row) for row in rows_of(operation.kind)}
    assert used == {*TABLES}
