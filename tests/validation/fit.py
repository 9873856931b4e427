"""Fit the constants of the time model to the rows marked `calibration`, and write them: python -m tests.validation.fit

The search walks a grid of steps in the logarithm, one constant at a time, and takes a step where the loss falls; it is a
sequence of comparisons, so the same rows give the same file, bit for bit. The loss is the mean size of the rows' logarithmic
errors, plus a little for every step that a constant is away from its start: what the rows do not show stays where it was.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

import moe_overlap.tuner.cost.hardware as owner
from moe_overlap.describe.cluster import GIB, known_gpus
from moe_overlap.tuner.capture.cache import cache_folder
from moe_overlap.tuner.cost.feasibility import MemoryQuantiles
from moe_overlap.tuner.cost.hardware import Constants, GpuConstants, ReleaseConstants, constants_json
from tests.validation.evaluate import Case

TARGET = Path(owner.__file__).with_name("constants.json")
STEP = 1.04
ROUNDS = 8
PULLS = {"architecture": 0.0001, "gpu": 0.0006, "release": 0.0003}
"""Loss per step, times the number of rows: GPUs of one architecture share what their rows do not tell apart."""
START = GpuConstants(
    gemm=0.75,
    grouped_gemm=0.6,
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
    host_seconds=1.2e-5,
    overlap_slowdown=0.15,
    step_seconds=0.02,
)
MOST = {
    **dict.fromkeys(("gemm", "grouped_gemm", "attention_forward", "attention_backward", "fp8", "fp4", "memory"), 1.0),
    **dict.fromkeys(("domain", "network", "all_to_all_domain", "all_to_all_network", "overlap_slowdown"), 1.0),
}
"""A fraction of a peak rate stays below it."""
REFERENCE_RELEASE = "25.04"
"""The release whose scales are 1: without one the scales of GPUs and releases would not be told apart."""


class Fitted(Protocol):
    """A run that constants are fitted to."""

    @property
    def gpu_type(self) -> str:
        """As constants name it."""

    @property
    def release(self) -> str:
        """Of its software; empty where it is none of the table."""

    def relative_error(self, constants: Constants) -> float:
        """Of its seconds."""


Steps = dict[tuple[str, str, str], int]
"""(architecture, gpu or release; its name; constant) -> steps away from the start."""


def architecture_of(gpu: str) -> str:
    """Of a GPU type of the table."""
    return str(known_gpus()[gpu]["architecture"])


def constants_at(steps: Steps, gpus: Sequence[str], releases: Sequence[str], start: GpuConstants = START) -> Constants:
    """The constants at a point of the grid, to three digits."""

    def of_gpu(gpu: str, field: str, start: float) -> float:
        count = steps.get(("architecture", architecture_of(gpu), field), 0) + steps.get(("gpu", gpu, field), 0)
        return _rounded(min(start * STEP**count, MOST.get(field, math.inf)))

    def of_release(release: str, field: str, start: float) -> float:
        return _rounded(start * STEP ** steps.get(("release", release, field), 0))

    start_gpu, start_release = dataclasses.asdict(start), dataclasses.asdict(ReleaseConstants())
    return Constants(
        {gpu: GpuConstants(**{f: of_gpu(gpu, f, v) for f, v in start_gpu.items()}) for gpu in gpus},
        {r: ReleaseConstants(**{f: of_release(r, f, v) for f, v in start_release.items()}) for r in releases},
    )


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def fit(
    cases: Sequence[Fitted], report: Callable[[str], None] = lambda line: None, start: GpuConstants = START
) -> Constants:
    """The constants that fit the cases, from where the search starts."""
    gpus = sorted({case.gpu_type for case in cases})
    releases = sorted({case.release for case in cases if case.release})
    moves = _moves(gpus, releases)
    concerned = {key[:2]: [case for case in cases if _concerns(key, case)] for key in moves}
    steps: Steps = {}

    def loss(key: tuple[str, str, str], count: int) -> float:
        constants = constants_at({**steps, key: count}, gpus, releases, start)
        errors = sum(abs(math.log1p(case.relative_error(constants))) for case in concerned[key[:2]])
        return errors + PULLS[key[0]] * len(cases) * abs(count)

    for number in range(ROUNDS):
        stride = max(1, 8 >> number)
        changed = 0
        for key in moves:
            here = steps.get(key, 0)
            candidates = [here, here - stride, here + stride]
            losses = [loss(key, count) for count in candidates]
            best = min(range(3), key=lambda i: (losses[i], i))
            if best:
                steps[key] = candidates[best]
                changed += 1
        constants = constants_at(steps, gpus, releases, start)
        mean = sum(abs(case.relative_error(constants)) for case in cases) / len(cases)
        report(f"round {number + 1}, steps of {stride}: {changed} moved, mean error {mean:.2%}")
        if not changed and stride == 1:
            break
    return constants_at(steps, gpus, releases, start)


def _moves(gpus: Sequence[str], releases: Sequence[str]) -> list[tuple[str, str, str]]:
    architectures = sorted({architecture_of(gpu) for gpu in gpus})
    fields = [field.name for field in dataclasses.fields(GpuConstants)]
    scales = [field.name for field in dataclasses.fields(ReleaseConstants)]
    moves = [("architecture", name, field) for name in architectures for field in fields]
    moves += [("gpu", gpu, field) for gpu in gpus for field in fields]
    return moves + [("release", name, field) for name in releases if name != REFERENCE_RELEASE for field in scales]


def _concerns(key: tuple[str, str, str], case: Fitted) -> bool:
    if key[0] == "release":
        return case.release == key[1]
    return case.gpu_type == key[1] if key[0] == "gpu" else architecture_of(case.gpu_type) == key[1]


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


def memory_quantiles(ratios: Sequence[float]) -> MemoryQuantiles:
    """The 5 % and the 95 % quantile of measured over predicted peaks, for one more run.

    Logarithms of ratios are taken for normally distributed. Few are known, so their spread is uncertain itself: Student's t,
    by the expansion of Cornish and Fisher (Abramowitz and Stegun, 26.7.5), takes the place of the normal quantile.
    """
    logs = np.log(np.array(ratios))
    z, free = statistics.NormalDist().inv_cdf(0.95), len(logs) - 1
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    spread = t * float(logs.std(ddof=1)) * math.sqrt(1 + 1 / len(logs))
    low, high = (math.exp(float(logs.mean()) + sign * spread) for sign in (-1, 1))
    return MemoryQuantiles(_rounded(low), _rounded(high))


def main() -> None:
    """Fit and write: GPU types of the table of steps, and apart from them L4, of which recorded runs alone tell."""
    from tests.validation.recorded_cases import calibration_peaks, calibration_steps
    from tests.validation.recorded_runs import measured_links
    from tests.validation.table import calibration_cases

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    of_steps = fit(calibration_cases(times=True), report)
    of_runs = fit(calibration_steps(cache_folder()), report, dataclasses.replace(START, **measured_links()))
    constants = dataclasses.replace(of_steps, gpus=of_steps.gpus | of_runs.gpus)
    peaks = calibration_cases(times=False)
    constants = dataclasses.replace(constants, fragmentation=fragmentation(peaks, constants))
    ratios = [1.0 / (1.0 + case.memory_error(constants)) for case in peaks if not case.row.is_reserved]
    ratios += calibration_peaks(cache_folder(), constants)
    constants = dataclasses.replace(constants, memory=memory_quantiles(ratios))
    TARGET.write_text(constants_json(constants), encoding="utf-8")


if __name__ == "__main__":
    main()
