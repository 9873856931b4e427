"""Constants of the time model on a grid of steps of one per cent, and the errors of runs at its points.

Levels. Constants of hosts and of a step have one value for all GPUs (`common`); an efficiency has one value per architecture,
with deviations of GPU types; a release has one loss for each architecture with rows of this release.

`fit` moves on the grid from the start to the point where no move lowers the loss (`descent.py`). The loss is the weighted sum of
the runs' logarithmic errors, plus a pull for each step that a constant is away from its start, so that constants without
influence on any run keep their start. A configuration that several releases repeat weighs as the root of its repetitions.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.calibrate.fit.descent import COARSE, Floats, Point, descend
from moe_overlap.tuner.calibrate.fit.priced_runs import FittedRun, PricedRuns, ScopedRun, architecture_of
from moe_overlap.tuner.cost.hardware import (
    LOSSY,
    CommonConstants,
    Constants,
    GpuConstants,
    ReleaseConstants,
)

STEP = 1.01
FAR = (-160, 0, 320)
"""Steps of a constant at which a run is priced, to test if it depends on the constant."""
PULLS = {"common": 0.00001, "architecture": 0.00001, "gpu": 0.00002, "release": 0.00002}
"""Loss per step and row. The larger pull of a GPU keeps the shared value of its architecture unless its rows contradict it."""
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
    extra_kernel=0.5,
    tail=0.5,
    grouped_low=0.93,
    logged_seconds=0.02,
)
DEVIATING = ("gemm", "grouped_gemm", "attention_backward", "fp8", "fp4", "memory", "network", "host_seconds")
"""Constants in which a GPU type may differ from its architecture."""
COMMON = ("kernel_seconds", "host_seconds", "overlap_slowdown", "step_seconds")
"""Constants that no architecture explains."""
FRACTIONS = (*LOSSY, "domain", "network", "overlap_slowdown", "grouped_low")
"""Constants that are fractions and must stay below 1."""


Key = tuple[str, str, str]
"""(level, name of the architecture, GPU or release, constant); the name of a release is `release architecture`."""
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
    def of(cls, cases: Sequence[ScopedRun], start: GpuConstants, common: CommonConstants) -> Grid:
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
    cases: Sequence[FittedRun],
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
        steps: where the search starts; constants on which no case depends return to their start.
        prices: of these cases and maybe of others, shared by several fits; without it this process prices them.
    Raises:
        RuntimeError: constants still move after the last round.
    """
    priced = PricedGrid.of(cases, start, common, prices)
    point = priced.point(steps or {})
    end = descend(priced, point, report, () if steps else COARSE)
    return priced.grid.constants(priced.steps(end)), priced.steps(end)


@dataclasses.dataclass(frozen=True)
class PricedGrid:
    """The errors of runs over the grid of their constants: what `descent.py` walks on.

    Attributes:
        keys: the constants that move any run, in the order of coordinates.
        concerned: for each of them the indices of these runs.
    """

    cases: Sequence[FittedRun]
    grid: Grid
    prices: PricedRuns
    keys: tuple[Key, ...]
    concerned: tuple[NDArray[np.int64], ...]

    @classmethod
    def of(
        cls,
        cases: Sequence[FittedRun],
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


def _concerned(key: Key, cases: Sequence[FittedRun], grid: Grid, prices: PricedRuns) -> list[int]:
    """Indices of the runs whose seconds change with a constant: nothing else is priced again when it moves."""
    level, name, field = key
    within = {
        "common": lambda case: True,
        "architecture": lambda case: architecture_of(case.gpu_type) == name,
        "gpu": lambda case: case.gpu_type == name,
        "release": lambda case: f"{case.release} {architecture_of(case.gpu_type)}" == name,
    }[level]
    # Far enough that a host which keeps pace with its device at the start becomes slower than it.
    candidates = [index for index, case in enumerate(cases) if within(case)]
    runs = [cases[index] for index in candidates]
    far = prices.errors([(runs, grid.constants({key: count})) for count in FAR])
    return [index for index, errors in zip(candidates, zip(*far, strict=True), strict=True) if len(set(errors)) > 1]
