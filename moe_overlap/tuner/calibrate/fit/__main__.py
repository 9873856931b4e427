"""Fit the constants of the time model to the calibration rows, and write them: python -m moe_overlap.tuner.calibrate.fit

1. Prepare the calibration rows of data/measured.csv.gz (`rows.py`, `measured_runs.py`).
2. Fit all constants to their step times (`grid.py`, `descent.py`), and once without each fold of them (`left_out.py`).
3. Fit the constants of L4 to the recorded steps of data/mist_runs.csv.gz (`recorded_runs.py`, `recorded_figures.py`).
4. Take the errors of peak memory under these constants.
5. Write cost/constants.json, cost/errors.json and steps.json.

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
    errors_left_out,
    family_of,
    fragmentation,
    held,
    left_out_errors,
    memory_errors,
    traits_of,
)
from moe_overlap.tuner.calibrate.fit.measured_runs import calibration_runs
from moe_overlap.tuner.calibrate.fit.priced_runs import PricedRuns
from moe_overlap.tuner.calibrate.fit.recorded_figures import calibration_peaks, calibration_steps
from moe_overlap.tuner.calibrate.fit.steps import STEPS_FILE, Fit, fit_json, l4_start
from moe_overlap.tuner.capture.cache import cache_folder
from moe_overlap.tuner.cost.expected_error import errors_json
from moe_overlap.tuner.cost.hardware import constants_json

CONSTANTS_FILE = Path(cost.__file__).with_name("constants.json")


def main() -> None:
    """Fit and write: GPU types of the table of steps, then L4, which only recorded runs measure."""
    parser = argparse.ArgumentParser(prog="python -m moe_overlap.tuner.calibrate.fit", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.parse_args()

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
    CONSTANTS_FILE.with_name("errors.json").write_text(errors_json(errors_left_out(left_out)), encoding="utf-8")
    for kind, (inside, all_of_them) in held(left_out).items():
        report(f"{inside} of {all_of_them} {kind} runs that were left out lie in the intervals of the others")


if __name__ == "__main__":
    main()
