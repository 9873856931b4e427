"""Measured rows become jobs, constants stay few and come from calibration rows; the table itself is run by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moe_overlap.tuner.cost.hardware as owner
from moe_overlap.api import features_of, read_job
from moe_overlap.describe.cluster import GIB
from moe_overlap.plan.plan import PeakBytes, Predicted, PredictedStage, Provenance
from moe_overlap.tuner.calibrate.fit.grid import START, fit
from moe_overlap.tuner.calibrate.fit.left_out import memory_errors
from moe_overlap.tuner.calibrate.fit.priced_runs import PricedRuns
from moe_overlap.tuner.calibrate.fit.published_rows import published_rows, scored_rows
from moe_overlap.tuner.calibrate.fit.rows import MeasuredRow, measured_rows
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.feasibility import MemoryQuantiles
from moe_overlap.tuner.cost.hardware import (
    Constants,
    Features,
    GpuConstants,
    ReleaseConstants,
    constants_json,
    shipped_constants,
)
from tests.validation.errors import spearman
from tests.validation.feasibility import executed_runs, feasibility_lines
from tests.validation.ranking import SETS, best_found, wrong_pairs

FILE = Path(owner.__file__).with_name("constants.json")


def test_the_file_holds_few_constants_and_reads_back() -> None:
    constants = shipped_constants()
    assert constants_json(constants) == FILE.read_text(encoding="utf-8")
    assert len(dataclasses.fields(GpuConstants)) <= 15
    assert len(dataclasses.fields(ReleaseConstants)) <= 3
    fitted = {
        row.gpu_type for row in scored_rows() if row["split"] == "calibration" and row["metric"] != "peak_mem_gib"
    }
    assert set(constants.gpus) == fitted | {"L4"}
    assert set(json.loads(FILE.read_text(encoding="utf-8"))) == {
        "common",
        "fragmentation",
        "gpus",
        "memory",
        "memory_errors",
        "releases",
        "traits",
    }
    assert all(row.loss > 0 for rows in constants.releases.values() for row in rows.values())


@pytest.mark.parametrize("row", scored_rows()[::12], ids=lambda row: str(row.number))
def test_a_row_is_a_valid_job_of_its_size(row: MeasuredRow) -> None:
    job = read_job(row.flags, row.gpus)
    stage = job.plan.stages[0]
    assert job.plan.world_size == row.gpus
    assert (stage.tensor, stage.context, len(job.plan.stages)) == (int(row["tp"]), int(row["cp"]), int(row["pp"]))
    assert job.plan.global_batch_size == int(row["global_batch"])
    if row["ep"] not in ("", "1"):
        assert stage.expert == int(row["ep"])


def test_a_layout_has_the_rest_of_the_layers_with_prediction_and_loss() -> None:
    jobs = [(row, row.flags) for row in scored_rows() if row["model"] == "deepseek-v3" and row["pp"] == "16"]
    flag = "--pipeline-model-parallel-layout"
    row, words = next((row, words) for row, words in jobs if flag in words and "pp_layout" not in row["other_flags"])
    assert words[words.index(flag) + 1] == f"Etttt|{'tttt|' * 14}tmL"
    assert read_job(words, row.gpus).plan.mtp_stage == 15


def test_rows_of_gpt_oss_ask_for_windows_sinks_and_clamped_gates() -> None:
    row = next(row for row in scored_rows() if row["model"] == "gpt-oss-120b")
    job = read_job(row.flags, row.gpus)
    assert job.model.windows[:2] == (128, None)
    chosen = job.config.model
    assert (chosen.quick_geglu, chosen.swiglu, chosen.activation_func_clamp_value) == (True, False, 7.0)
    assert job.config.attention.softmax_type == "learnable"


def test_runs_of_the_model_zoo_switch_on_what_its_scripts_do() -> None:
    rows = [row for row in scored_rows() if row["source"].startswith("yanring/Megatron-MoE-ModelZoo")]
    features = {row["zero/fsdp"]: _features_of(row) for row in rows}
    assert set(features) == {"fsdp", "zero1"}
    assert {row["precision_class"] for row in rows} == {"bf16"}
    assert all(each.overlap_tensor and each.fused_router for each in features.values())
    # Only Megatron-FSDP's guide asks for gradients in bf16; the scripts do not.
    assert (features["fsdp"].gradient_bytes, features["zero1"].gradient_bytes) == (2, 4)


def test_megatron_fsdp_reduces_gradients_in_bf16_which_no_row_says_twice() -> None:
    rows = [row for row in scored_rows() if "fsdp" in row["zero/fsdp"]]
    assert {row["source"].split(":")[0] for row in rows} == {
        "NVIDIA-NeMo/Megatron-Bridge",
        "yanring/Megatron-MoE-ModelZoo",
    }
    assert all(row.flags.count("--grad-reduce-in-bf16") == 1 for row in rows)


def _features_of(row: MeasuredRow) -> Features:
    job = read_job(row.flags, row.gpus)
    return features_of(job.config, job.plan.precision, job.flags)


def test_every_set_has_rows_of_one_model_on_the_same_gpus() -> None:
    assert [len(one.rows()) for one in SETS] == [18, 30, 16, 2, 3, 6]
    for one in SETS:
        rows = one.rows()
        assert len({(row["model"], row["gpu"], row["n_gpus"], row["release"]) for row in rows}) == 1
        assert all(read_job(row.flags, row.gpus).plan.world_size == row.gpus for row in rows[:2])


def test_rankings_count_the_order_alone() -> None:
    measured = np.array([1.0, 2.0, 4.0, 3.0])
    assert (best_found(measured, measured**2), spearman(measured**2, measured)) == (0.0, 1.0)
    assert spearman(-measured, measured) == -1.0
    swapped = np.array([2.0, 1.0, 3.0, 3.5])
    assert best_found(measured, swapped) == 1.0
    assert wrong_pairs(swapped, measured) == "2 of 6"
    # Equal predictions stand for the mean of what they really cost, and share a rank.
    equal = np.array([1.0, 1.0, 5.0, 4.0])
    assert best_found(measured, equal) == 0.5
    assert wrong_pairs(equal, measured) == "0 of 5"
    assert spearman(equal, measured) == pytest.approx(np.corrcoef([0.5, 0.5, 3, 2], [0, 1, 3, 2])[0, 1])


def test_throughput_is_scored_as_seconds() -> None:
    row = next(row for row in scored_rows() if row["metric"] == "tokens_per_s_per_gpu")
    tokens = int(row["global_batch"]) * int(row["seq_len"])
    assert tokens / row.seconds / row.gpus == pytest.approx(float(row["value"]))
    assert len(measured_rows()) == 977


def test_rows_of_mlperf_and_of_recipes_say_their_routing_and_their_seconds() -> None:
    rows = {row.name: row for row in published_rows()}
    assert {row.routing for name, row in rows.items() if name.startswith("mlperf")} == {"natural"}
    assert {row["split"] for row in rows.values()} == {"test"}
    recipes = [row for name, row in rows.items() if name.startswith("recipe")]
    assert len(recipes) == 8
    for row in recipes:
        assert row.routing == "forced"
        assert row.seconds == pytest.approx(row.settings["derived"]["step_time_s"], rel=1e-4)
        stage = read_job(row.flags, row.gpus).plan.stages[0]
        assert (stage.expert, stage.micro_batch_size) == (int(row["ep"]), int(row["micro_batch"]))
    assert all(row.routing == "" for row in scored_rows() if not row.is_moe)


@dataclasses.dataclass
class Made:
    """A case whose step takes what its constants say."""

    truth: float
    gpu_type: str = "H100"
    release: str = "26.04"
    scope: str = "bf16 MoE"
    seconds: float = 1.0

    @property
    def configuration(self) -> str:
        return str(self.truth)

    def relative_error(self, constants: Constants) -> float:
        return self.truth / constants.gpus["H100"].gemm - 1.0


def test_the_fit_finds_a_constant_and_leaves_the_rest_alone() -> None:
    cases = [Made(0.6), Made(0.61), Made(0.6)]
    found, steps = fit(cases)
    assert found.gpus["H100"].gemm == pytest.approx(0.6, rel=0.03)
    assert dataclasses.replace(found.gpus["H100"], gemm=START.gemm) == START
    assert (found, steps) == fit(cases)
    assert found.releases == {"26.04": {"Hopper": ReleaseConstants(measured=("bf16 MoE",))}}


def test_processes_price_as_one_does() -> None:
    """Runs of one configuration share what is remembered; a fit asks for some of them, in any order."""
    cases = [Made(0.6), Made(0.61), Made(0.6), Made(0.7)]
    before = len(multiprocessing.active_children())
    with PricedRuns(cases, 3) as shared:
        assert len(multiprocessing.active_children()) == before + 3
        under = {
            gemm: dataclasses.replace(shipped_constants(), gpus={"H100": dataclasses.replace(START, gemm=gemm)})
            for gemm in (0.5, 0.6)
        }
        some = (cases, cases[::-1], cases[1:3], [cases[3], cases[0]], [])
        asked = [(runs, gemm) for runs in some for gemm in under]
        questions = [(runs, under[gemm]) for runs, gemm in asked]
        found = shared.errors(questions)
        assert found == PricedRuns(cases, 1).errors(questions) == shared.errors(questions)
        for (runs, gemm), errors in zip(asked, found, strict=True):
            assert [math.exp(error) for error in errors] == pytest.approx([run.truth / gemm for run in runs])


def test_quantiles_of_memory_are_those_of_one_more_run() -> None:
    """Thirteen ratios: Student's t with 12 degrees of freedom is 1.7823, and a new run adds a thirteenth to the variance."""
    logs = np.linspace(-0.01, 0.03, 13)
    found = memory_errors(list(enumerate(np.exp(logs).tolist()))).quantiles()
    spread = 1.7823 * logs.std(ddof=1) * np.sqrt(14 / 13)
    assert found.low == pytest.approx(np.exp(0.01 - spread), abs=6e-4)
    assert found.high == pytest.approx(np.exp(0.01 + spread), abs=6e-3)
    # A second run of a family changes its mean alone.
    twice = memory_errors([*enumerate(np.exp(logs).tolist()), (0, math.exp(logs[0]))])
    assert (twice.runs, twice.quantiles()) == (13, found)
    shipped = shipped_constants().memory
    assert 0.9 < shipped.low < shipped.high < 1.1


def test_peaks_that_nemo_logs_are_reserved_ones() -> None:
    reserved = {row.number for row in scored_rows() if row["metric"] == "peak_mem_gib" and row.is_reserved}
    assert 793 in reserved and 4 in reserved and 3 not in reserved


def test_runs_of_one_configuration_are_listed_once() -> None:
    runs = executed_runs()
    keys = [(row.gpu_type, row.gpus, *row.flags) for row in runs]
    assert len(keys) == len(set(keys)) > 200
    # Recipes publish TFLOP/s alone, with the operations that make seconds of them.
    assert {row["metric"] for row in runs if not row.name.startswith("recipe")} == {
        "step_time_s",
        "tokens_per_s_per_gpu",
    }


@dataclasses.dataclass
class Full:
    """A run whose prediction needs so much of a GPU."""

    row: MeasuredRow
    needed: float

    def predict(self, _: Constants) -> Prediction:
        peaks = PeakBytes(**dict.fromkeys((field.name for field in dataclasses.fields(PeakBytes)), 0))
        peaks = dataclasses.replace(peaks, activations=int(self.needed * GIB))
        whole = Provenance(measured=0.0, interpolated=0.0, roofline=1.0)
        stage = PredictedStage(
            stable_seconds=1.0,
            first_seconds=1.0,
            last_seconds=1.0,
            peak_bytes=peaks.activations,
            peak_bytes_by_category=peaks,
            exposed_communication_seconds=0.0,
            provenance=whole,
        )
        return Prediction(
            predicted=Predicted(
                step_seconds=1.0,
                tokens_per_second_per_gpu=1.0,
                model_tflops_per_gpu=1.0,
                stages=(stage,),
                provenance=whole,
            ),
            breakdown={},
            mfu=0.0,
            capacity_bytes=84 * GIB,
            reserved_bytes=4 * GIB,
            extrapolating=(),
            not_modelled=(),
            memory=MemoryQuantiles(0.98, 1.05),
        )


def test_runs_that_do_not_fit_are_listed_with_what_fills_them() -> None:
    rows = scored_rows()[:3]
    cases: Any = [Full(row, needed) for row, needed in zip(rows, (60.0, 79.0, 100.0), strict=True)]
    lines = feasibility_lines(cases, Constants({}, {}))
    assert len(lines) == 3 and lines[-1] == "3 runs: 1 fits, 1 may not fit, 1 does not fit"
    assert "does not fit   100.0 of  80.0 GiB (+25%), activations 100.0" in lines[0]
    assert "may not fit     79.0 of  80.0 GiB (-1%)" in lines[1]
