"""Predictions for the runs of `recorded_runs.py`: seconds of the step and of each stage, and each stage's peak of memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moe_overlap.describe.cluster import Cluster
from moe_overlap.job import Job, features_of
from moe_overlap.tuner.calibrate.fit.recorded_runs import RecordedRun, Value, job_of, layers_of_stages, recorded_runs
from moe_overlap.tuner.capture.cache import CaptureFiles, joined, stage_requests
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.analytic import Family, Prediction, one_way_seconds, prepare, price
from moe_overlap.tuner.cost.hardware import Constants, Features, scope
from moe_overlap.tuner.cost.machine import Machine

MIB = 1 << 20
PASSES = ("fwd_compute_total_per_iter_mean_over_ranks", "bwd_compute_total_per_iter_mean_over_ranks")
PEAKS = {"allocated": ("peak_allocated", "peak_allocated_max_over_ranks"),
         "reserved": ("peak_reserved", "peak_reserved_max_over_ranks", "peak_reserved_max_rank")}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RecordedFigure:
    """One recorded figure and the predicted one."""

    what: str
    """step, stage (forward and backward passes of a step), allocated, reserved."""
    stage: int | None
    split: str
    measured: float
    """Seconds or MiB."""
    predicted: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class RunCase:
    """A recorded run with everything that does not depend on constants."""

    run: RecordedRun
    job: Job
    features: Features
    cluster: Cluster
    families: tuple[Family, ...]

    def predict(self, constants: Constants) -> Prediction:
        """The run under these constants; its software is no release of the table, so no release counts."""
        return price(self.job.plan, self.job.model, self.families, self.machine(constants), self.features)

    def machine(self, constants: Constants) -> Machine:
        """The machine of the run under these constants."""
        of_gpu, _ = constants.of_gpu(self.cluster.group_of(0).gpu)
        return Machine(
            cluster=self.cluster, constants=of_gpu, common=constants.common, fragmentation=constants.fragmentation
        )

    def compared(self, constants: Constants) -> list[RecordedFigure]:
        """Every recorded figure that is predicted."""
        predicted, values = self.predict(constants).predicted, self.run.values
        figures = []
        transfer = one_way_seconds(self.job.plan, self.families[0].boundary_bytes, self.machine(constants))
        transfer *= len(predicted.stages) > 1
        if "iteration_time" in values:
            step = values["iteration_time"]
            figures.append(RecordedFigure("step", None, step.split, step.value, predicted.step_seconds))
        for index, (stage, plan) in enumerate(zip(predicted.stages, self.job.plan.stages, strict=True)):
            passes = [values.get(f"stage{index}_{name}") for name in PASSES]
            if passes[0] is not None and passes[1] is not None:
                seconds = plan.gradient_accumulation_steps * (stage.stable_seconds - 2.0 * transfer)
                measured = passes[0].value + passes[1].value
                figures.append(RecordedFigure("stage", index, _split(passes), measured, seconds))
            vain = stage.peak_bytes_by_category.fragmentation
            for what, bytes_ in (("allocated", stage.peak_bytes - vain), ("reserved", stage.peak_bytes)):
                peak = next((values[n] for name in PEAKS[what] if (n := f"stage{index}_{name}") in values), None)
                if peak is not None:
                    figures.append(RecordedFigure(what, index, peak.split, peak.value, bytes_ / MIB))
        return figures


def _split(values: Iterable[Value | None]) -> str:
    """`test` where one of them is."""
    return "test" if any(value is not None and value.split == "test" for value in values) else "calibration"


def recorded_cases(cache_dir: Path, harness: str = "") -> list[RunCase]:
    """Every recorded run, or those of one harness, prepared; one process captures the graphs that are not in the cache."""
    runs = [run for run in recorded_runs() if harness in ("", run.harness)]
    jobs = [job_of(run) for run in runs]
    requests_of_jobs = [stage_requests(job.config, job.model, job.plan) for job in jobs]
    requests = {
        request.sha256(): request for stages in requests_of_jobs for several in stages.values() for request in several
    }
    captured = dict(zip(requests, CaptureFiles(cache_dir).captures(list(requests.values())), strict=True))
    cases = []
    for run, job, stages in zip(runs, jobs, requests_of_jobs, strict=True):
        graphs = {
            index: joined([captured[request.sha256()] for request in several], job.model)
            for index, several in stages.items()
        }
        cases.append(_case(run, job, graphs))
    return cases


def _case(run: RecordedRun, job: Job, graphs: Mapping[int, CapturedModel]) -> RunCase:
    features = features_of(job.config, job.plan.precision, job.flags)
    families = prepare(job.plan, job.model, graphs, features)
    if run.harness == "Aceso":
        families = tuple(_with_parts_of_layers(family, job, layers_of_stages(run)) for family in families)
    return RunCase(run, job, features, run.cluster, families)


def _with_parts_of_layers(family: Family, job: Job, layers: Sequence[float]) -> Family:
    """The family with the true numbers of layers of its stages."""
    scale = np.array([layers[index] / len(job.plan.stages[index].layers) for index in family.stages])
    of_layers = np.array([table.part.kind not in ("embedding", "head") for table in family.tables])
    return replace(family, counts=np.where(of_layers[:, None], family.counts * scale, family.counts))


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded step that constants are fitted to."""

    case: RunCase
    release: str = ""

    @property
    def scope(self) -> str:
        """Precision, and dense or MoE."""
        return scope(self.case.job.plan.precision, self.case.job.model.num_experts > 0)

    @property
    def configuration(self) -> str:
        """The recorded run: none is repeated."""
        return self.case.run.name

    @property
    def seconds(self) -> float:
        """The measured seconds of a step."""
        return self.case.run.values["iteration_time"].value

    @property
    def gpu_type(self) -> str:
        """The GPU type, as constants name it."""
        return self.case.run.gpu_type

    def relative_error(self, constants: Constants) -> float:
        """The relative error of the predicted step."""
        return next(figure.error for figure in self.case.compared(constants) if figure.what == "step")


def calibration_steps(cache_dir: Path) -> list[RecordedStep]:
    """Mist's own steps on L4, of which the table of steps has none. What Aceso recomputes is not known well enough to fit to."""
    cases = [case for case in recorded_cases(cache_dir) if (case.run.harness, case.run.gpu_type) == ("Mist", "L4")]
    return [RecordedStep(case) for case in cases if case.run.is_calibration]


def calibration_peaks(cache_dir: Path, constants: Constants) -> list[tuple[tuple[str, str], float]]:
    """Model and GPU of Mist's own calibration runs, and measured over predicted allocated peaks.

    What Aceso recomputes is not known well enough.
    """
    return [
        ((case.run.model, case.run.gpu), 1.0 / (1.0 + compared.error))
        for case in recorded_cases(cache_dir, "Mist")
        for compared in case.compared(constants)
        if compared.what == "allocated" and compared.split == "calibration"
    ]
