"""Recorded runs as plans: what they hold, and one of them against its prediction; the table itself is run by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.tuner.calibrate.fit.recorded_figures import recorded_cases
from moe_overlap.tuner.calibrate.fit.recorded_runs import (
    RecordedRun,
    job_of,
    layers_of_stages,
    left_out,
    measured_links,
    recorded_runs,
)
from moe_overlap.tuner.cost.hardware import shipped_constants


def runs_of(harness: str) -> list[RecordedRun]:
    return [run for run in recorded_runs() if run.harness == harness]


def test_every_run_is_there_once_and_what_has_no_prediction_is_named() -> None:
    assert {harness: len(runs_of(harness)) for harness in ("Mist", "Megatron", "Aceso")} == {
        "Mist": 10,
        "Megatron": 7,
        "Aceso": 20,
    }
    assert len(left_out()) == 7 and all(name.startswith("DeepSpeed") for name in left_out())
    assert sum(run.is_calibration for run in runs_of("Mist")) == 2


@pytest.mark.parametrize("run", recorded_runs(), ids=lambda run: run.name)
def test_a_run_is_a_plan_of_its_size(run: RecordedRun) -> None:
    job = job_of(run)
    plan = job.plan
    assert plan.world_size == run.gpus == run.cluster.gpus
    assert [layer for stage in plan.stages for layer in stage.layers] == list(range(job.model.num_layers))
    for stage in plan.stages:
        assert stage.micro_batch_size * stage.data * stage.gradient_accumulation_steps == run.batch
        assert stage.recompute.layers <= len(stage.layers)
    if run.harness == "Aceso":
        exact = layers_of_stages(run)
        assert sum(exact) == pytest.approx(job.model.num_layers)
        assert all(abs(len(stage.layers) - count) < 1 for stage, count in zip(plan.stages, exact, strict=True))
    else:
        validate_plan(plan, job.model)


def test_offloading_and_sharding_are_mists() -> None:
    (run,) = (run for run in runs_of("Mist") if run.model == "gpt-7b" and not run.flash)
    plan = job_of(run).plan
    assert [stage.offload.optimizer for stage in plan.stages] == [0.125, 0.875, 0.875, 0.375]
    assert [stage.recompute.layers for stage in plan.stages] == [5, 1, 0, 0]
    assert {(stage.data, stage.zero_level) for stage in plan.stages} == {(2, 1)}


def test_links_are_those_that_mist_measured() -> None:
    """4.68 GB/s of 32 in a node; between two of them 3.32 GB/s of all 16, of which 1.6 for each GPU are the description's."""
    links = measured_links()
    assert links["domain"] == pytest.approx(4.6832 / 32)
    assert links["network"] == pytest.approx(3.3215 / 8 * 8 / 15 / 1.6)


@pytest.mark.slow
def test_peaks_of_a_run_are_the_recorded_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mist's GPT of 1.3B without a fused kernel: within 1.5 % of both stages' peaks."""
    (run,) = (run for run in runs_of("Mist") if run.gpus == 2 and run.settings["G"] == 32)
    monkeypatch.setattr("moe_overlap.tuner.calibrate.fit.recorded_figures.recorded_runs", lambda: (run,))
    (case,) = recorded_cases(tmp_path)
    found = {(one.what, one.stage): one for one in case.compared(shipped_constants())}
    assert set(found) == {("step", None), *((what, stage) for what in ("allocated", "reserved") for stage in (0, 1))}
    assert all(abs(found["allocated", stage].error) < 0.015 for stage in (0, 1))
    assert dataclasses.replace(found["allocated", 0], predicted=9253.0).error == -0.5
