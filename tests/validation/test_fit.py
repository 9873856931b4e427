"""The shipped constants are those of the last fit, and under today's prices the fit would end where it ended."""

from __future__ import annotations

import pytest

from moe_overlap.tuner.calibrate.fit.descent import is_settled, loss_of
from moe_overlap.tuner.calibrate.fit.grid import START, PricedGrid
from moe_overlap.tuner.calibrate.fit.left_out import compared_runs
from moe_overlap.tuner.calibrate.fit.measured_runs import calibration_runs, runs_of_test_rows
from moe_overlap.tuner.calibrate.fit.published_rows import scored_rows
from moe_overlap.tuner.calibrate.fit.rows import calibration_rows
from moe_overlap.tuner.calibrate.fit.steps import STEPS_FILE, constants_of, fit_json, last_fit
from moe_overlap.tuner.cost.expected_error import shipped_errors
from moe_overlap.tuner.cost.hardware import shipped_constants


def test_shipped_constants_are_those_of_the_last_fit() -> None:
    """A constant that was changed by hand, or a fit of which one file alone was kept, shows without a price."""
    found, shipped = constants_of(last_fit(), calibration_rows(times=True)), shipped_constants()
    assert found.gpus == shipped.gpus
    assert found.common == shipped.common
    assert found.releases == shipped.releases
    assert STEPS_FILE.read_text(encoding="utf-8") == fit_json(last_fit())


def test_every_timed_row_is_compared_as_its_table_has_it() -> None:
    """A row that was added, or another split of the rows, asks for errors.json to be written again."""
    rows = {row.name: row for row in scored_rows() if row.is_time}
    compared = {name: run for run in shipped_errors().runs for name in run.rows.split()}
    assert set(compared) == set(rows)
    for name, run in compared.items():
        row = rows[name]
        assert run.is_test == (row["split"] == "test")
        assert (run.gpu, run.precision) == (row.gpu_type, row["precision_class"])
        assert run.routing == row.routing
        assert set(row["release"].split()) <= set(run.release.split())


@pytest.mark.slow
def test_errors_of_test_rows_are_those_of_the_prices_of_today() -> None:
    """Where prices changed: `python -m moe_overlap.tuner.calibrate.fit --test-rows`."""
    today = compared_runs([], runs_of_test_rows(), shipped_constants())
    assert [run for run in shipped_errors().runs if run.is_test] == today


@pytest.mark.slow
def test_the_last_fit_is_one_of_the_prices_of_today() -> None:
    """Prices that changed since then ask for another fit: the loss differs, or constants would move."""
    last = last_fit()
    surface = PricedGrid.of(calibration_runs(times=True), START, None)
    point = surface.point(last.table)
    assert surface.steps(point) == last.table
    assert loss_of(surface, point) == pytest.approx(last.loss, rel=1e-6)
    assert is_settled(surface, point)
