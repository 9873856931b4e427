"""Predictions for measured rows: each row is prepared once, and priced under any constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_overlap.describe.cluster import GIB, Cluster, shipped_cluster
from moe_overlap.describe.expert_load import NATURAL_LOAD
from moe_overlap.job import Job, features_of, read_job
from moe_overlap.plan.plan import PredictedStage
from moe_overlap.tuner.calibrate.fit.published_rows import scored_rows
from moe_overlap.tuner.calibrate.fit.rows import MeasuredRow, calibration_rows
from moe_overlap.tuner.capture.cache import CaptureFiles, cache_folder, joined, stage_requests
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.analytic import Family, Prediction, prepare, price
from moe_overlap.tuner.cost.coverage import traits, uncovered
from moe_overlap.tuner.cost.hardware import Constants, Features, scope
from moe_overlap.tuner.cost.machine import Machine, machine_of


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A measured row with everything about its run that does not depend on constants."""

    row: MeasuredRow
    job: Job
    features: Features
    cluster: Cluster
    families: tuple[Family, ...]
    configuration: str
    """Equal for rows that differ in their release alone."""
    load: float = 1.0
    """Rows of the busiest rank of an expert group over the mean."""

    @property
    def gpu_type(self) -> str:
        """The GPU type, as constants name it."""
        return self.row.gpu_type

    @property
    def release(self) -> str:
        """The release of its software."""
        return self.row["release"]

    @property
    def scope(self) -> str:
        """Precision, and dense or MoE: the scope of releases and errors."""
        return scope(self.job.plan.precision, self.row.is_moe)

    @property
    def seconds(self) -> float:
        """The measured seconds of a step."""
        return self.row.seconds

    def predict(self, constants: Constants) -> Prediction:
        """The row's run under these constants."""
        machine, reasons = self._machine(constants)
        reasons = (*reasons, *self.features.not_modelled)
        return price(self.job.plan, self.job.model, self.families, machine, self.features, reasons)

    def reasons(self, constants: Constants) -> tuple[str, ...]:
        """Reasons why the run extrapolates beyond those of the fit."""
        had = traits(self.job.plan, self.features, self.row.is_moe)
        _, reasons = self._machine(constants)
        return (*reasons, *uncovered(constants.traits, self.cluster.group_of(0).gpu.architecture, had))

    def _machine(self, constants: Constants) -> tuple[Machine, tuple[str, ...]]:
        precision, release = self.job.plan.precision, self.row["release"] or None
        return machine_of(self.cluster, constants, release, self.load, precision=precision, is_moe=self.row.is_moe)

    def relative_error(self, constants: Constants) -> float:
        """The relative error of the predicted step."""
        logged = constants.common.logged_seconds if self.row.is_logged else 0.0
        return (self.predict(constants).predicted.step_seconds + logged) / self.row.seconds - 1.0

    def memory_error(self, constants: Constants) -> float:
        """The relative error of the predicted peak, without fragmentation if allocated and not reserved bytes were measured."""
        stage = self.measured_stage(constants)
        vain = 0 if self.row.is_reserved else stage.peak_bytes_by_category.fragmentation
        return (stage.peak_bytes - vain) / GIB / self.row.gib - 1.0

    def measured_stage(self, constants: Constants) -> PredictedStage:
        """The stage whose peak was measured: of Megatron's tests the last one, else the largest."""
        stages = self.predict(constants).predicted.stages
        return stages[-1] if "LAST RANK" in self.row["other_flags"] else max(stages, key=lambda stage: stage.peak_bytes)


def prepared_runs(rows: Sequence[MeasuredRow], cache_dir: Path) -> list[MeasuredRun]:
    """Prepare rows; one process captures the graphs that are not in the cache."""
    jobs = [read_job(row.flags, row.gpus) for row in rows]
    requests_of_jobs = [stage_requests(job.config, job.model, job.plan)[0] for job in jobs]
    distinct = {request.sha256(): request for requests in requests_of_jobs for request in requests}
    captured = dict(zip(distinct, CaptureFiles(cache_dir).captures(list(distinct.values())), strict=True))
    return [
        _prepared(row, job, joined([captured[request.sha256()] for request in requests], job.model))
        for row, job, requests in zip(rows, jobs, requests_of_jobs, strict=True)
    ]


def calibration_runs(times: bool) -> list[MeasuredRun]:
    """Runs that constants may be fitted to: their step times, with those of small models, or their peaks of memory."""
    return prepared_runs(calibration_rows(times), cache_folder())


def runs_of_test_rows() -> list[MeasuredRun]:
    """Timed runs that no constant may be fitted to."""
    rows = [row for row in scored_rows() if row["split"] == "test" and row.is_time]
    return prepared_runs(rows, cache_folder())


def _prepared(row: MeasuredRow, job: Job, graph: CapturedModel) -> MeasuredRun:
    features = features_of(job.config, job.plan.precision, job.flags)
    graphs = dict.fromkeys(range(len(job.plan.stages)), graph)
    cluster = shipped_cluster(row["gpu"], row.gpus)
    load = load_of(row, job)
    families = prepare(job.plan, job.model, graphs, features, load)
    configuration = " ".join((row.gpu_type, str(row.gpus), *row.flags))
    return MeasuredRun(row, job, features, cluster, families, configuration, load)


def load_of(row: MeasuredRow, job: Job) -> float:
    """Rows of the busiest rank of an expert group over the mean: an assumption where the router decides."""
    return NATURAL_LOAD if row.routing == "natural" and job.plan.stages[0].expert > 1 else 1.0
