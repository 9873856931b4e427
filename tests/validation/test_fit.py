"""The shipped constants are those of the last fit, and under today's prices the fit would end where it ended."""

from __future__ import annotations

import pytest

from moe_overlap.tuner.calibrate.fit.descent import is_settled, loss_of
from moe_overlap.tuner.calibrate.fit.grid import START, PricedGrid
from moe_overlap.tuner.calibrate.fit.measured_runs import calibration_runs
from moe_overlap.tuner.calibrate.fit.rows import calibration_rows
from moe_overlap.tuner.calibrate.fit.steps import STEPS_FILE, constants_of, fit_json, last_fit
from moe_overlap.tuner.cost.hardware import shipped_constants


def test_shipped_constants_are_those_of_the_last_fit() -> None:
    """A constant that was changed by hand, or a fit of which one file alone was kept, shows without a price."""
    found, shipped = constants_of(last_fit(), calibration_rows(times=True)), shipped_constants()
    assert found.gpus == shipped.gpus
    assert found.common == shipped.common
    assert found.releases == shipped.releases
    assert STEPS_FILE.read_text(encoding="utf-8") == fit_json(last_fit())


@pytest.mark.slow
def test_the_last_fit_is_one_of_the_prices_of_today() -> None:
    """Prices that changed since then ask for another fit: the loss differs, or constants would move."""
    last = last_fit()
    surface = PricedGrid.of(calibration_runs(times=True), START, None)
    point = surface.point(last.table)
    assert surface.steps(point) == last.table
    assert loss_of(surface, point) == pytest.approx(last.loss, rel=1e-6)
    assert is_settled(surface, point)
