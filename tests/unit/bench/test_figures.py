"""Formulas of the overlap benchmark."""

from __future__ import annotations

import pytest

from tools.bench.figures import MeasuredSteps, MeasuredTurn, table


def turns(*steps: float, exposed: float = 0.0) -> list[MeasuredTurn]:
    return [MeasuredTurn(step, exposed) for step in steps]


MEASURED = MeasuredSteps(
    limited={
        "plain": turns(4.0, 5.0, 3.0),
        "sequential": turns(3.0, 3.2, 2.8, exposed=1.1),
        "both": turns(2.0, 2.5, 2.25, exposed=0.3),
    },
    free={"plain": turns(2.0, 2.0, 2.0), "sequential": turns(2.1, 2.0, 1.9, exposed=0.1), "both": turns(2.2, 2.2, 2.2)},
    communication={"sequential": [1.0, 1.2, 1.1]},
)


def test_figures() -> None:
    plain, sequential, both = MEASURED.figures("sequential", "plain")
    assert [row.variant for row in (plain, sequential, both)] == ["plain", "sequential", "both"]
    totals = MEASURED.totals("sequential")
    assert totals.ratio == pytest.approx((3.0 - 2.0) / 2.0)
    assert (totals.computation, totals.communication, totals.bound) == (2.0, 1.1, 2.0)
    assert totals.bound_speedup == pytest.approx(1.5)
    assert sequential.hidden == pytest.approx(0.0) and both.hidden == pytest.approx(1 - 0.25 / 1.0)
    assert plain.hidden == pytest.approx(-1.0), "slower than the sequential step"
    assert (both.speedup.min, both.speedup.median, both.speedup.max) == pytest.approx(
        (2.8 / 2.25, 3.2 / 2.5, 3.0 / 2.0)
    )
    assert both.plain_speedup is not None and both.plain_speedup.max == pytest.approx(2.0)
    assert sequential.exposed_by_difference == pytest.approx(1.0)
    assert sequential.exposed_seconds.median - sequential.free_exposed_seconds == pytest.approx(1.0)
    assert sequential.alone_seconds == pytest.approx(1.1) and both.alone_seconds is None


def test_a_step_taken_apart() -> None:
    """Computation alone, both at once and exposed communication make up the median step."""
    _, sequential, both = MEASURED.figures("sequential", "plain")
    assert sequential.both_seconds == 0.0, "all of it is exposed"
    assert both.both_seconds == pytest.approx(1.1 - 0.3), "its own was not measured: the sequential variant's"
    for row in (sequential, both):
        parts = row.only_computation_seconds + row.both_seconds + row.exposed_seconds.median
        assert parts == pytest.approx(row.step_seconds.median)


def test_communication_that_was_not_measured_alone() -> None:
    totals = MeasuredSteps(MEASURED.limited, MEASURED.free, {}).totals("sequential")
    assert totals.communication == pytest.approx(3.0 - 2.0)
    bound = MeasuredSteps({"sequential": turns(5.0)}, {"sequential": turns(2.0)}, {}).totals("sequential").bound
    assert bound == pytest.approx(3.0), "communication is the longer one"


def test_nothing_to_hide() -> None:
    free = MeasuredSteps({"sequential": turns(2.0)}, {"sequential": turns(2.0)}, {})
    assert free.figures("sequential", None)[0].hidden is None


def test_table() -> None:
    lines = table(MEASURED.figures("sequential", "plain")).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0][:3] == ["variant", "step s", "computation s"] and set(lines[1]) == {"|", "-"}
    expected = ["both", "2.000 2.250 2.500", "1.150", "0.800", "0.300 0.300 0.300", "2.200", "1.244 1.280 1.500"]
    assert rows[4] == [*expected, "1.333 2.000 2.000", "75%"]
    assert len({len(line) for line in lines}) == 1, "aligned"
