"""Errors of runs that nothing was fitted to, which give the interval of a prediction, and errors of peaks of memory.

Step times: the constants are fitted once for each of `FOLDS` parts of the calibration runs, without that part; the errors of the
runs in it go to errors.json with those of test runs (`cost/expected_error.py`). Peaks: no constant is fitted to them, so their
errors count as they are.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from moe_overlap.describe.cluster import GIB, shipped_cluster
from moe_overlap.tuner.calibrate.fit.grid import Steps, fit
from moe_overlap.tuner.calibrate.fit.measured_runs import MeasuredRun
from moe_overlap.tuner.calibrate.fit.priced_runs import PricedRuns, architecture_of
from moe_overlap.tuner.cost.coverage import traits
from moe_overlap.tuner.cost.expected_error import ComparedRun, errors_of, shape_of
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


def compared_runs(
    left_out: Sequence[LeftOutRun], tests: Sequence[MeasuredRun], constants: Constants
) -> list[ComparedRun]:
    """The runs of errors.json: every test run, and every scored calibration run, repetitions of a configuration as one.

    Args:
        left_out: calibration runs, with their errors under constants that were fitted without them.
        tests: runs that nothing is fitted to.
        constants: those of the fit to all calibration runs.
    """
    repetitions: dict[str, list[LeftOutRun]] = {}
    for case, error, beyond in left_out:
        if case.row["scored"] == "yes":
            repetitions.setdefault(case.configuration, []).append((case, error, beyond))
    runs = [_compared(repeated, is_test=False) for repeated in repetitions.values()]
    of_tests = [(case, case.relative_error(constants), bool(case.reasons(constants))) for case in tests]
    return [*runs, *(_compared([run], is_test=True) for run in of_tests)]


def _compared(repeated: Sequence[LeftOutRun], is_test: bool) -> ComparedRun:
    case = repeated[0][0]
    return ComparedRun(
        rows=" ".join(run.row.name for run, *_ in repeated),
        gpu=case.gpu_type,
        architecture=architecture_of(case.gpu_type),
        precision=case.job.plan.precision,
        routing=case.row.routing,
        model=case.row["model"],
        shape=shape_of(case.job.model),
        release=" ".join(sorted({run.release for run, *_ in repeated if run.release})),
        is_test=is_test,
        relative=round(statistics.mean(error for _, error, _ in repeated), 4),
        is_beyond=any(beyond for *_, beyond in repeated),
    )


def held(runs: Sequence[ComparedRun]) -> dict[ComparedRun, bool]:
    """Run -> whether it lies in the interval that the runs of all other families give; without runs that give none."""
    families: dict[Hashable, list[ComparedRun]] = {}
    for run in runs:
        families.setdefault(run.family, []).append(run)
    answers = {}
    for family, members in families.items():
        others = errors_of(run for run in runs if run.family != family)
        gpu = shipped_cluster(members[0].gpu, 1).group_of(0).gpu
        for run in members:
            expected = others.expected(gpu, bool(run.routing), run.routing == "natural")
            if expected is not None:
                wide = expected.widened(others.beyond) if run.is_beyond else expected
                answers[run] = wide.holds(run.relative)
    return answers


def held_lines(runs: Sequence[ComparedRun]) -> list[str]:
    """How many dense and MoE runs lie in the intervals that runs of other families give, a line each."""
    counts: dict[str, list[bool]] = {"dense": [], "MoE": []}
    for run, is_held in held(runs).items():
        counts["MoE" if run.routing else "dense"].append(is_held)
    return [
        f"{sum(inside)} of {len(inside)} {kind} runs lie in the intervals that runs of other families give"
        for kind, inside in counts.items()
    ]


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
