"""Fit the constants of the time model to the calibration rows, and write them: python -m moe_overlap.tuner.calibrate.fit

1. Prepare the calibration rows of data/measured.csv.gz (`rows.py`, `measured_runs.py`).
2. Fit all constants to their step times (`grid.py`, `descent.py`), and once without each fold of them (`left_out.py`).
3. Fit the constants of L4 to the recorded steps of data/mist_runs.csv.gz (`recorded_runs.py`, `recorded_figures.py`).
4. Take the errors of peak memory, and of the steps of all test rows, under these constants.
5. Write cost/constants.json, cost/errors.json and steps.json.

`--test-rows` fits nothing: it renews the errors of test rows in cost/errors.json, after a price changed or rows were added, and
prints how many runs lie in the intervals that runs of other families give. A full fit prints the same.

The descent is a sequence of comparisons: the same rows give the same files, bit for bit. docs/adding_a_gpu.md says when to fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Hashable
from pathlib import Path

import moe_overlap.tuner.cost.hardware as cost
from moe_overlap.tuner.calibrate.fit.descent import loss_of
from moe_overlap.tuner.calibrate.fit.grid import START, PricedGrid, fit
from moe_overlap.tuner.calibrate.fit.left_out import (
    compared_runs,
    family_of,
    fragmentation,
    held_lines,
    left_out_errors,
    memory_errors,
    traits_of,
)
from moe_overlap.tuner.calibrate.fit.measured_runs import calibration_runs, runs_of_test_rows
from moe_overlap.tuner.calibrate.fit.priced_runs import PricedRuns
from moe_overlap.tuner.calibrate.fit.recorded_figures import calibration_peaks, calibration_steps
from moe_overlap.tuner.calibrate.fit.steps import STEPS_FILE, Fit, fit_json, l4_start
from moe_overlap.tuner.capture.cache import cache_folder
from moe_overlap.tuner.cost.expected_error import errors_json, shipped_errors
from moe_overlap.tuner.cost.hardware import constants_json, shipped_constants

CONSTANTS_FILE = Path(cost.__file__).with_name("constants.json")
ERRORS_FILE = CONSTANTS_FILE.with_name("errors.json")


def main() -> None:
    """Fit and write: GPU types of the table of steps, then L4, which only recorded runs measure."""
    parser = argparse.ArgumentParser(prog="python -m moe_overlap.tuner.calibrate.fit", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--test-rows", action="store_true", help="fit nothing: only renew the errors of test rows")
    if parser.parse_args().test_rows:
        renew_test_errors()
        return

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    cases = calibration_runs(times=True)
    with PricedRuns(cases) as prices:
        of_steps, steps = fit(cases, report, prices=prices)
        surface = PricedGrid.of(cases, START, None, prices)
        loss = loss_of(surface, surface.point(steps))
        left_out = left_out_errors(cases, steps, prices, report)
    of_runs, steps_of_runs = fit(calibration_steps(cache_folder()), report, l4_start(of_steps), of_steps.common)
    constants = dataclasses.replace(of_steps, gpus=of_steps.gpus | of_runs.gpus, traits=traits_of(cases))
    peaks = calibration_runs(times=False)
    constants = dataclasses.replace(constants, fragmentation=fragmentation(peaks, constants))
    ratios: list[tuple[Hashable, float]] = [
        (family_of(case)[:2], 1.0 / (1.0 + case.memory_error(constants))) for case in peaks if not case.row.is_reserved
    ]
    errors = memory_errors([*ratios, *calibration_peaks(cache_folder(), constants)])
    constants = dataclasses.replace(constants, memory=errors.quantiles(), memory_errors=errors)
    CONSTANTS_FILE.write_text(constants_json(constants), encoding="utf-8")
    STEPS_FILE.write_text(fit_json(Fit(loss=loss, table=steps, l4=steps_of_runs)), encoding="utf-8")
    compared = compared_runs(left_out, runs_of_test_rows(), constants)
    ERRORS_FILE.write_text(errors_json(compared), encoding="utf-8")
    for line in held_lines(compared):
        report(line)


def renew_test_errors() -> None:
    """Write the errors of test runs under the shipped constants to errors.json, and print how many runs their intervals hold;
    the errors of left-out runs stay."""
    left_out = [run for run in shipped_errors().runs if not run.is_test]
    compared = [*left_out, *compared_runs([], runs_of_test_rows(), shipped_constants())]
    ERRORS_FILE.write_text(errors_json(compared), encoding="utf-8")
    for line in held_lines(compared):
        print(line)


if __name__ == "__main__":
    main()
