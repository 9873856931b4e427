"""Errors of runs that were left out of a fit, which give the interval of a prediction, and errors of peaks of memory.

Step times: the constants are fitted once for each of `FOLDS` parts of the runs, without that part; the errors of the runs in it
go to errors.json (`cost/expected_error.py`). Peaks: no constant is fitted to them, so their errors count as they are.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from moe_overlap.describe.cluster import GIB
from moe_overlap.tuner.calibrate.fit.grid import Steps, fit
from moe_overlap.tuner.calibrate.fit.measured_runs import MeasuredRun
from moe_overlap.tuner.calibrate.fit.priced_runs import PricedRuns, architecture_of
from moe_overlap.tuner.cost.coverage import traits
from moe_overlap.tuner.cost.expected_error import Errors, LeftOut, errors_of, group_names
from moe_overlap.tuner.cost.hardware import Constants, Traits
from moe_overlap.tuner.cost.memory_errors import MemoryErrors

FOLDS = 4
LeftOutRun = tuple[MeasuredRun, float, bool]
"""A run, its relative error under constants fitted without its fold, and True if it extrapolates beyond the runs of that fit."""


def left_out_errors(
    cases: Sequence[MeasuredRun], steps: Steps, prices: PricedRuns, report: Callable[[str], None]
) -> list[LeftOutRun]:
    """The relative error of every run under constants fitted without its fold, and True if it extrapolates beyond the others.

    A fold has all runs of a model on a GPU type in a precision, of all layouts and releases, so no similar run is in the fit.
    Each search starts from the fit to all runs; constants that only runs of the fold determine return to their start, because of
    the pull.
    """
    families = sorted({family_of(case) for case in cases})
    errors = []
    for fold in range(FOLDS):
        out = set(families[fold::FOLDS])
        report(f"without {', '.join(' '.join(family) for family in sorted(out))}")
        fitted = [case for case in cases if family_of(case) not in out]
        constants, _ = fit(fitted, report, steps=steps, prices=prices)
        constants = dataclasses.replace(constants, traits=traits_of(fitted))
        for case in cases:
            if family_of(case) in out:
                beyond = bool(case.reasons(constants))
                errors.append((case, case.relative_error(constants), beyond))
    return errors


def traits_of(cases: Sequence[MeasuredRun]) -> Traits:
    """Traits of the scored runs, by architecture."""
    traits_of_architectures: dict[str, set[str]] = {}
    for case in cases:
        if case.row["scored"] == "yes":
            of_run = traits(case.job.plan, case.features, case.row.is_moe)
            traits_of_architectures.setdefault(architecture_of(case.gpu_type), set()).update(of_run)
    return {architecture: tuple(sorted(names)) for architecture, names in sorted(traits_of_architectures.items())}


def family_of(case: MeasuredRun) -> tuple[str, str, str]:
    """The model, GPU type and precision of a run."""
    return case.row["model"], case.gpu_type, case.row["precision_class"]


def errors_left_out(errors: Sequence[LeftOutRun]) -> Errors:
    """The content of errors.json: scored runs, each configuration with the mean error of its repetitions."""
    repetitions: dict[str, list[LeftOutRun]] = {}
    for case, error, beyond in errors:
        if case.row["scored"] == "yes":
            repetitions.setdefault(case.configuration, []).append((case, error, beyond))
    runs = []
    for repeated in repetitions.values():
        case = repeated[0][0]
        precision, architecture = case.job.plan.precision, architecture_of(case.gpu_type)
        groups = group_names(case.gpu_type, architecture, precision, case.row.is_moe)
        mean = statistics.mean(error for _, error, _ in repeated)
        runs.append(LeftOut(groups, family_of(case), mean, any(beyond for *_, beyond in repeated)))
    return errors_of(runs)


def held(errors: Sequence[LeftOutRun]) -> dict[str, tuple[int, int]]:
    """Kind -> number of left-out runs inside their interval, and of all; the interval comes from runs of other families."""
    counts: dict[str, list[bool]] = {"dense": [], "MoE": []}
    scored = [run for run in errors if run[0].row["scored"] == "yes"]
    for family in sorted({family_of(case) for case, *_ in scored}):
        others = errors_left_out([run for run in scored if family_of(run[0]) != family])
        for case, error, beyond in scored:
            if family_of(case) != family:
                continue
            gpu = case.cluster.group_of(0).gpu
            expected = others.expected(gpu, case.job.plan.precision, case.row.is_moe)
            if expected is not None:
                wide = expected.widened(others.beyond) if beyond else expected
                counts["MoE" if case.row.is_moe else "dense"].append(wide.holds(error))
    return {kind: (sum(inside), len(inside)) for kind, inside in counts.items()}


def fragmentation(cases: Sequence[MeasuredRun], constants: Constants) -> float:
    """(reserved - allocated) memory as a share of activations and temporaries: the median over runs with both peaks."""
    peaks: dict[str, dict[bool, MeasuredRun]] = {}
    for case in cases:
        peaks.setdefault(case.row["source"], {})[case.row.is_reserved] = case
    shares = []
    for both in peaks.values():
        if len(both) == 2:
            parts = both[True].measured_stage(constants).peak_bytes_by_category
            shares.append((both[True].row.gib - both[False].row.gib) * GIB / (parts.activations + parts.temporaries))
    return float(f"{statistics.median(shares):.4g}") if shares else 0.0


def memory_errors(ratios: Sequence[tuple[Hashable, float]]) -> MemoryErrors:
    """Mean and deviation of the logarithms of measured over predicted peaks.

    Args:
        ratios: family of a run, and its ratio; a family counts once, with the mean of its runs.
    """
    families: dict[Hashable, list[float]] = {}
    for family, ratio in ratios:
        families.setdefault(family, []).append(math.log(ratio))
    logs = np.array([statistics.mean(of_family) for of_family in families.values()])
    mean, deviation = float(f"{logs.mean():.4g}"), float(f"{logs.std(ddof=1):.4g}")
    return MemoryErrors(mean=mean, deviation=deviation, runs=len(logs))
