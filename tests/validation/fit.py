"""Fit the constants of the time model to the rows marked `calibration`, and write them: python -m tests.validation.fit

The search (`descent.py`) walks a grid of steps of one per cent, one constant at a time or all at once, until no move lowers
the loss; it is a sequence of comparisons, so the same rows give the same file, bit for bit. The loss is the weighted sum of the
rows' logarithmic errors, plus a little for every step that a constant is away from its start: what the rows do not show stays
where it was. A configuration that several releases repeat weighs as the root of its repetitions. The steps go into
tests/golden/fit.json (`fitted_steps.py`).

Levels. Constants of hosts and of a step are one for all GPUs (`common`); efficiencies are one for each architecture, with
deviations of its GPU types; a release has one loss on each architecture that has rows of it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import moe_overlap.tuner.cost.hardware as owner
from moe_overlap.describe.cluster import GIB
from moe_overlap.tuner.capture.cache import cache_folder
from moe_overlap.tuner.cost.coverage import traits
from moe_overlap.tuner.cost.expected_error import Errors, LeftOut, errors_json, errors_of, group_names
from moe_overlap.tuner.cost.hardware import (
    CommonConstants,
    Constants,
    GpuConstants,
    ReleaseConstants,
    Traits,
    constants_json,
)
from moe_overlap.tuner.cost.memory_errors import MemoryErrors
from tests.validation.descent import COARSE, Floats, Point, descend, loss_of
from tests.validation.evaluate import Case
from tests.validation.priced_runs import Fitted, PricedRuns, Scoped, architecture_of

TARGET = Path(owner.__file__).with_name("constants.json")
STEP = 1.01
FAR = (-160, 0, 320)
"""Steps at which a run is asked whether a constant concerns it."""
FOLDS = 4
PULLS = {"common": 0.00001, "architecture": 0.00001, "gpu": 0.00002, "release": 0.00002}
"""Loss per step, times the number of rows: GPUs of one architecture share what their rows do not tell apart."""
START = GpuConstants(
    gemm=0.75,
    grouped_gemm=0.7,
    attention_forward=0.6,
    attention_backward=0.5,
    fp8=0.6,
    fp4=0.4,
    memory=0.8,
    domain=0.75,
    network=0.8,
    all_to_all_domain=0.6,
    all_to_all_network=0.6,
    kernel_seconds=3e-6,
    host_seconds=1e-5,
    overlap_slowdown=0.15,
    step_seconds=0.02,
)
START_COMMON = CommonConstants(
    transformer_engine=10.0,
    fused=4.0,
    low_precision=1.5,
    further=0.5,
    tail=0.5,
    grouped_low=0.93,
    logged_seconds=0.02,
)
DEVIATING = ("gemm", "grouped_gemm", "attention_backward", "fp8", "fp4", "memory", "network", "host_seconds")
"""Constants in which a GPU type may differ from its architecture."""
COMMON = ("kernel_seconds", "host_seconds", "overlap_slowdown", "step_seconds")
"""Constants that no architecture explains."""
FRACTIONS = (*owner.LOSSY, "domain", "network", "overlap_slowdown", "grouped_low")
"""Parts of a whole: a fraction of a peak rate stays below it."""


Key = tuple[str, str, str]
"""Level, name of what it is about, constant; the name of a release is `release architecture`."""
Steps = dict[Key, int]
"""Steps away from the start."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """The constants that a set of runs has, and their values at a point of the grid."""

    gpus: tuple[str, ...]
    scopes: dict[str, dict[str, tuple[str, ...]]]
    """Release -> architecture -> what was measured under it."""
    start: GpuConstants
    common: CommonConstants

    @classmethod
    def of(cls, cases: Sequence[Scoped], start: GpuConstants, common: CommonConstants) -> Grid:
        """The grid of these runs."""
        scopes: dict[str, dict[str, set[str]]] = {}
        for case in cases:
            if case.release:
                rows = scopes.setdefault(case.release, {})
                rows.setdefault(architecture_of(case.gpu_type), set()).add(case.scope)
        return cls(
            tuple(sorted({case.gpu_type for case in cases})),
            {name: {a: tuple(sorted(s)) for a, s in sorted(rows.items())} for name, rows in sorted(scopes.items())},
            start,
            common,
        )

    def names(self) -> list[Key]:
        """Every constant that may move, coarse levels first."""
        fields = [field.name for field in dataclasses.fields(GpuConstants)]
        shared = [name for name in fields if name not in COMMON]
        keys = [("common", "", name) for name in COMMON]
        keys += [("common", "all", field.name) for field in dataclasses.fields(CommonConstants)]
        keys += [
            ("architecture", name, field) for name in sorted(set(map(architecture_of, self.gpus))) for field in shared
        ]
        keys += [("gpu", gpu, field) for gpu in self.gpus for field in DEVIATING]
        return keys + [("release", f"{name} {a}", "loss") for name, rows in self.scopes.items() for a in rows]

    def constants(self, steps: Steps) -> Constants:
        """The constants at a point, to four digits: three would bend the slopes that the search takes."""

        def moved(start: float, field: str, *keys: Key) -> float:
            value = start * STEP ** sum(steps.get(key, 0) for key in keys)
            return _rounded(min(value, 1.0) if field in FRACTIONS else value)

        def of_gpu(gpu: str) -> GpuConstants:
            values = {}
            for field, start in dataclasses.asdict(self.start).items():
                wide = ("common", "", field) if field in COMMON else ("architecture", architecture_of(gpu), field)
                values[field] = moved(start, field, wide, ("gpu", gpu, field))
            return GpuConstants(**values)

        common = {f: moved(v, f, ("common", "all", f)) for f, v in dataclasses.asdict(self.common).items()}
        releases = {
            name: {
                a: ReleaseConstants(loss=moved(1.0, "loss", ("release", f"{name} {a}", "loss")), measured=scopes)
                for a, scopes in rows.items()
            }
            for name, rows in self.scopes.items()
        }
        return Constants({gpu: of_gpu(gpu) for gpu in self.gpus}, releases, common=CommonConstants(**common))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def fit(
    cases: Sequence[Fitted],
    report: Callable[[str], None] = lambda line: None,
    start: GpuConstants = START,
    common: CommonConstants | None = None,
    steps: Steps | None = None,
    prices: PricedRuns | None = None,
) -> tuple[Constants, Steps]:
    """The constants that fit the cases, and their steps.

    Args:
        start: the constants of a GPU at no step.
        common: the common constants, which then do not move, nor do those of GPUs that no architecture explains.
        steps: where the search starts; what nothing in the cases holds there walks back to no step.
        prices: of these cases and maybe others, which fits share; this process prices them where there are none.
    Raises:
        RuntimeError: constants still move after the last round.
    """
    priced = PricedGrid.of(cases, start, common, prices)
    point = priced.point(steps or {})
    found = descend(priced, point, report, () if steps else COARSE)
    return priced.grid.constants(priced.steps(found)), priced.steps(found)


@dataclasses.dataclass(frozen=True)
class PricedGrid:
    """The errors of runs over the grid of their constants: what `descent.py` walks on.

    Attributes:
        keys: the constants that move any run, in the order of coordinates.
        concerned: for each of them the indices of these runs.
    """

    cases: Sequence[Fitted]
    grid: Grid
    prices: PricedRuns
    keys: tuple[Key, ...]
    concerned: tuple[NDArray[np.int64], ...]

    @classmethod
    def of(
        cls,
        cases: Sequence[Fitted],
        start: GpuConstants,
        common: CommonConstants | None,
        prices: PricedRuns | None = None,
    ) -> PricedGrid:
        """The grid of these runs; common constants that are given do not move."""
        grid, prices = Grid.of(cases, start, common or START_COMMON), prices or PricedRuns(cases, 1)
        movable = [key for key in grid.names() if common is None or key[0] != "common"]
        concerned = {key: _concerned(key, cases, grid, prices) for key in movable}
        keys = tuple(key for key in movable if concerned[key])
        return cls(cases, grid, prices, keys, tuple(np.array(concerned[key]) for key in keys))

    @cached_property
    def weights(self) -> Floats:
        """[N] of the runs."""
        repeats = Counter(case.configuration for case in self.cases)
        return np.array([repeats[case.configuration] ** -0.5 for case in self.cases])

    @cached_property
    def pulls(self) -> Floats:
        """[K] loss per step."""
        return np.array([PULLS[level] * len(self.cases) for level, *_ in self.keys])

    def errors(self, moves: Sequence[tuple[Point, NDArray[np.int64] | None]]) -> list[Floats]:
        """Logarithms of predicted over measured seconds at points, of some runs each or of all."""
        questions = [
            (self.cases if runs is None else [self.cases[run] for run in runs], self.grid.constants(self.steps(point)))
            for point, runs in moves
        ]
        return [np.array(errors) for errors in self.prices.errors(questions)]

    def point(self, steps: Steps) -> Point:
        """Steps as coordinates; those of constants that nothing here depends on are left out."""
        return np.array([steps.get(key, 0) for key in self.keys], dtype=np.int64)

    def steps(self, point: Point) -> Steps:
        """Coordinates as steps, without those that are none."""
        return {key: int(count) for key, count in zip(self.keys, point, strict=True) if count}


def _concerned(key: Key, cases: Sequence[Fitted], grid: Grid, prices: PricedRuns) -> list[int]:
    """Indices of the runs whose seconds change with a constant: nothing else is priced again when it moves."""
    level, name, field = key
    within = {
        "common": lambda case: True,
        "architecture": lambda case: architecture_of(case.gpu_type) == name,
        "gpu": lambda case: case.gpu_type == name,
        "release": lambda case: f"{case.release} {architecture_of(case.gpu_type)}" == name,
    }[level]
    # Far enough that a host which keeps up with its device at the start falls behind.
    asked = [index for index, case in enumerate(cases) if within(case)]
    runs = [cases[index] for index in asked]
    far = prices.errors([(runs, grid.constants({key: count})) for count in FAR])
    return [index for index, errors in zip(asked, zip(*far, strict=True), strict=True) if len(set(errors)) > 1]


def fragmentation(cases: Sequence[Case], constants: Constants) -> float:
    """What is reserved beyond what is allocated, as a part of activations and temporaries: the median over runs that say both."""
    peaks: dict[str, dict[bool, Case]] = {}
    for case in cases:
        peaks.setdefault(case.row["source"], {})[case.row.is_reserved] = case
    shares = []
    for both in peaks.values():
        if len(both) == 2:
            parts = both[True].measured_stage(constants).peak_bytes_by_category
            shares.append((both[True].row.gib - both[False].row.gib) * GIB / (parts.activations + parts.temporaries))
    return _rounded(statistics.median(shares)) if shares else 0.0


def left_out_errors(
    cases: Sequence[Case], steps: Steps, prices: PricedRuns, report: Callable[[str], None]
) -> list[tuple[Case, float, bool]]:
    """The relative error of every run under constants fitted without its fold, and whether it reaches beyond the others.

    A fold has all runs of a model on a GPU type in a precision, whatever their layout and release: none of them has a twin among
    the runs that the constants are fitted to. Each search starts from the fit to all runs; what only the fold held in its place
    walks back, as every step away from the start costs.
    """
    families = sorted({family_of(case) for case in cases})
    errors = []
    for fold in range(FOLDS):
        out = set(families[fold::FOLDS])
        report(f"without {', '.join(' '.join(family) for family in sorted(out))}")
        kept = [case for case in cases if family_of(case) not in out]
        constants, _ = fit(kept, report, steps=steps, prices=prices)
        constants = dataclasses.replace(constants, traits=traits_of(kept))
        for case in cases:
            if family_of(case) in out:
                beyond = bool(case.reasons(constants))
                errors.append((case, case.relative_error(constants), beyond))
    return errors


def traits_of(cases: Sequence[Case]) -> Traits:
    """What runs that count in tables of errors had, by architecture."""
    found: dict[str, set[str]] = {}
    for case in cases:
        if case.row["scored"] == "yes":
            had = traits(case.job.plan, case.features, case.row.is_moe)
            found.setdefault(architecture_of(case.gpu_type), set()).update(had)
    return {architecture: tuple(sorted(names)) for architecture, names in sorted(found.items())}


def family_of(case: Case) -> tuple[str, str, str]:
    """The model, GPU type and precision of a run."""
    return case.row["model"], case.gpu_type, case.row["precision_class"]


def errors_left_out(errors: Sequence[tuple[Case, float, bool]]) -> Errors:
    """What errors.json says: of runs that count in tables of errors, each configuration with the mean of its repetitions."""
    found: dict[str, list[tuple[Case, float, bool]]] = {}
    for case, error, beyond in errors:
        if case.row["scored"] == "yes":
            found.setdefault(case.configuration, []).append((case, error, beyond))
    runs = []
    for each in found.values():
        case = each[0][0]
        precision, architecture = case.job.plan.precision, architecture_of(case.gpu_type)
        groups = group_names(case.gpu_type, architecture, precision, case.row.is_moe)
        mean = statistics.mean(error for _, error, _ in each)
        runs.append(LeftOut(groups, family_of(case), mean, any(beyond for *_, beyond in each)))
    return errors_of(runs)


def held(errors: Sequence[tuple[Case, float, bool]]) -> dict[str, tuple[int, int]]:
    """Kind -> left-out runs that lie in their intervals, and all of them, where intervals know nothing of a run's family."""
    counts: dict[str, list[bool]] = {"dense": [], "MoE": []}
    scored = [each for each in errors if each[0].row["scored"] == "yes"]
    for family in sorted({family_of(case) for case, *_ in scored}):
        others = errors_left_out([each for each in scored if family_of(each[0]) != family])
        for case, error, beyond in scored:
            if family_of(case) != family:
                continue
            gpu = case.cluster.group_of(0).gpu
            expected = others.expected(gpu, case.job.plan.precision, case.row.is_moe)
            if expected is not None:
                wide = expected.widened(others.beyond) if beyond else expected
                counts["MoE" if case.row.is_moe else "dense"].append(wide.holds(error))
    return {kind: (sum(found), len(found)) for kind, found in counts.items()}


def memory_errors(ratios: Sequence[tuple[Hashable, float]]) -> MemoryErrors:
    """Mean and deviation of the logarithms of measured over predicted peaks.

    Args:
        ratios: a run's family, which counts once, with its mean, and the ratio.
    """
    families: dict[Hashable, list[float]] = {}
    for family, ratio in ratios:
        families.setdefault(family, []).append(math.log(ratio))
    logs = np.array([statistics.mean(each) for each in families.values()])
    mean, deviation = float(f"{logs.mean():.4g}"), float(f"{logs.std(ddof=1):.4g}")
    return MemoryErrors(mean=mean, deviation=deviation, runs=len(logs))


def main() -> None:
    """Fit and write: GPU types of the table of steps, and apart from them L4, of which recorded runs alone tell."""
    from tests.validation.fitted_steps import FILE, Fit, fit_json, l4_start
    from tests.validation.recorded_cases import calibration_peaks, calibration_steps
    from tests.validation.table import calibration_cases

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    cases = calibration_cases(times=True)
    with PricedRuns(cases) as prices:
        of_steps, steps = fit(cases, report, prices=prices)
        surface = PricedGrid.of(cases, START, None, prices)
        loss = loss_of(surface, surface.point(steps))
        found = left_out_errors(cases, steps, prices, report)
    of_runs, steps_of_runs = fit(calibration_steps(cache_folder()), report, l4_start(of_steps), of_steps.common)
    constants = dataclasses.replace(of_steps, gpus=of_steps.gpus | of_runs.gpus, traits=traits_of(cases))
    peaks = calibration_cases(times=False)
    constants = dataclasses.replace(constants, fragmentation=fragmentation(peaks, constants))
    ratios: list[tuple[Hashable, float]] = [
        (family_of(case)[:2], 1.0 / (1.0 + case.memory_error(constants))) for case in peaks if not case.row.is_reserved
    ]
    errors = memory_errors([*ratios, *calibration_peaks(cache_folder(), constants)])
    constants = dataclasses.replace(constants, memory=errors.quantiles(), memory_errors=errors)
    TARGET.write_text(constants_json(constants), encoding="utf-8")
    FILE.write_text(fit_json(Fit(loss=loss, table=steps, l4=steps_of_runs)), encoding="utf-8")
    TARGET.with_name("errors.json").write_text(errors_json(errors_left_out(found)), encoding="utf-8")
    for kind, (inside, all_of_them) in held(found).items():
        report(f"{inside} of {all_of_them} {kind} runs that were left out lie in the intervals of the others")


if __name__ == "__main__":
    main()
