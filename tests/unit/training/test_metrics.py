"""Tests of a run's figures: documented JSON fields, the console's line, files per rank, TensorBoard, W&B, expert loads."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.training.cli.config import LoggingConfig
from megatron.training.report.metrics import MetricsLog, StepMetrics, mean_of, step_line
from moe_overlap.describe.expert_load import ExpertLoad, read_expert_loads

DOCUMENTED = {"step", "loss", "step_seconds", "tokens_per_second", "grad_norm", "comm_seconds", "exposed_comm_seconds"}
DOCUMENTED |= {"peak_bytes"}


def metrics(**changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": 1,
        "loss": 5.556123456789012,
        "step_seconds": 0.83,
        "tokens_per_second": 9841.0,
        "grad_norm": 3.2149,
        "learning_rate": 1e-5,
        "comm_seconds": 0.12,
        "exposed_comm_seconds": 0.0415,
        "comm_covered": ("ep", "pp", "dp"),
        "peak_bytes": 412 * 2**20,
        "resident_bytes": 900 * 2**20,
        "consumed_samples": 16,
        "optional": {},
        "predictions": (),
        "deferred": {},
    }
    return StepMetrics(**{**values, **changes})


def test_the_line_of_a_step() -> None:
    assert step_line(metrics(), 300) == (
        "step     1/300  loss 5.5561  grad 3.21  lr 1.0e-05    9.8k tok/s  0.83 s"
        "  comm 0.12 s, exposed 0.04 s (5%)  peak 412 MiB"
    )
    assert " 841 tok/s" in step_line(metrics(tokens_per_second=841.2), 300)
    assert step_line(metrics(optional={"params_norm": 12.3456}), 300).endswith("MiB  params_norm 12.35")
    held = {"deferred_peak_bytes": 3 * 2**19, "deferred_early": 2}
    assert step_line(metrics(deferred=held), 300).endswith("peak 412 MiB  deferred 1.5 MiB, 2 early")
    assert "(0%)" in step_line(metrics(step_seconds=0.0), 300)
    assert len({len(step_line(metrics(step=step), 300)) for step in (1, 10, 300)}) == 1


def test_a_line_is_the_mean_of_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    log = MetricsLog(LoggingConfig(log_interval=2), rank=0, total_steps=5)
    for step, loss in enumerate((9.0, 1.0, 4.0, 2.0, 7.0), 1):
        log.log(metrics(step=step, loss=loss))
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    # The first step has a line of its own, and the last one stands alone here.
    assert [(words[1], words[3]) for words in printed] == [
        ("1/5", "9.0000"),
        ("2/5", "1.0000"),
        ("4/5", "3.0000"),
        ("5/5", "7.0000"),
    ]


def test_means_of_steps() -> None:
    slow = metrics(step_seconds=3.0, tokens_per_second=100.0, grad_norm=8.0, comm_seconds=1.0, predictions=(4.0, 6.0))
    fast = metrics(step=2, step_seconds=1.0, tokens_per_second=300.0, comm_seconds=0.5, predictions=(2.0, 5.0))
    both = mean_of([slow, fast])
    assert (both.step, both.step_seconds, both.comm_seconds, both.predictions) == (2, 2.0, 0.75, (3.0, 5.5))
    assert both.tokens_per_second == 150.0  # of 600 tokens in 4 s, not 200
    assert both.grad_norm == fast.grad_norm
    assert mean_of([slow]) == slow
    unmeasured = metrics(comm_seconds=None, exposed_comm_seconds=None, predictions=(1.0, 1.0))
    assert mean_of([unmeasured, slow, unmeasured, fast]).comm_seconds == 0.75


def test_steps_whose_communication_is_shown(tmp_path: Path) -> None:
    def shown(**changes: Any) -> list[int]:
        log = MetricsLog(LoggingConfig(log_interval=4, **changes), rank=0, total_steps=9)
        return [step for step in range(1, 10) if log.shows(step)]

    assert shown() == [1, 4, 8, 9]
    assert shown(tensorboard_log_interval=3) == [1, 4, 8, 9], "no board is there"
    assert shown(tensorboard_log_interval=3, tensorboard_dir=str(tmp_path)) == [1, 3, 4, 6, 8, 9]
    assert shown(log_json=str(tmp_path / "log.json")) == list(range(1, 10))


def test_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "folder" / "log.jsonl"
    log = MetricsLog(LoggingConfig(log_json=str(path), log_interval=10), rank=0, total_steps=20)
    for step in range(1, 21):
        log.log(metrics(step=step, optional={"params_norm": 2.5}, predictions=(3.5,)))
        assert len(path.read_text().splitlines()) == step  # every line is there at once
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0]["loss"] == 5.556123456789012  # in full precision
    assert set(rows[0]) >= DOCUMENTED and rows[0]["params_norm"] == 2.5 and "optional" not in rows[0]
    always = {field.name for field in dataclasses.fields(StepMetrics)} - {"optional", "predictions", "deferred"}
    assert set(rows[0]) == always | {"params_norm", "mtp_1_loss"}
    assert all(isinstance(rows[0][name], int) for name in ("step", "peak_bytes", "resident_bytes", "consumed_samples"))
    printed = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert printed == ["1/20", "10/20", "20/20"]
    again = MetricsLog(LoggingConfig(log_json=str(path)), rank=0, total_steps=20)
    again.log(metrics(step=20))  # a resumed run appends
    again.close()
    log.close()
    assert len(path.read_text().splitlines()) == 21


def test_a_step_whose_gradients_overflowed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = MetricsLog(LoggingConfig(log_json=str(path)), rank=1, total_steps=2)
    figures = {"loss_scale": 2.0**32, "skipped_iterations": 1.0}
    log.log(metrics(grad_norm=float("nan"), optional=figures))
    log.close()
    (line,) = Path(f"{path}.rank1").read_text().splitlines()
    row = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert row["grad_norm"] is None and {name: row[name] for name in figures} == figures
    assert step_line(metrics(optional=figures), 2).endswith("  loss_scale 4.295e+09  skipped_iterations 1")


def test_other_ranks_write_their_own_file_and_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = LoggingConfig(
        log_json=str(tmp_path / "log.jsonl"), tensorboard_dir=str(tmp_path / "board"), log_interval=1
    )
    log = MetricsLog(config, rank=3, total_steps=2)
    log.log(metrics())
    log.log_evaluation("valid", 1.0, 2)
    log.say("saved", "nowhere")
    log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl.rank3"]
    assert capsys.readouterr().out == ""


def test_evaluation_and_remarks(capsys: pytest.CaptureFixture[str]) -> None:
    log = MetricsLog(LoggingConfig(), rank=0, total_steps=2)
    log.log_evaluation("valid", 1.90204, 300, " (start 5.5612, unigram entropy 3.40)")
    log.say("saved", "checkpoints/step-000300")
    log.close()
    assert capsys.readouterr().out.splitlines() == [
        "valid        loss 1.9020 (start 5.5612, unigram entropy 3.40)",
        "saved        checkpoints/step-000300",
    ]


def test_tensorboard(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = LoggingConfig(tensorboard_dir=str(tmp_path), tensorboard_log_interval=2, log_interval=100)
    log = MetricsLog(config, rank=0, total_steps=4)
    for step in range(1, 5):
        log.log(metrics(step=step, loss=float(step), optional={"params_norm": 2.0, "z_loss": 1.0}, predictions=(3.0,)))
    log.log_evaluation("valid", 0.5, 4)
    log.close()
    read = event_accumulator.EventAccumulator(str(tmp_path))
    read.Reload()
    tags = set(read.Tags()["scalars"])
    assert {
        "lm loss",
        "grad-norm",
        "learning-rate",
        "params-norm",
        "mtp_1 loss",
        "z_loss",
        "iteration-time",
        "lm loss validation",
    } <= tags and "step" not in tags
    assert [(event.step, event.value) for event in read.Scalars("lm loss")] == [(2, 2.0), (4, 4.0)]


@pytest.mark.parametrize("wanted", [True, False])
def test_the_curve_of_the_loss_scale(tmp_path: Path, wanted: bool) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = LoggingConfig(tensorboard_dir=str(tmp_path), log_loss_scale_to_tensorboard=wanted)
    log = MetricsLog(config, rank=0, total_steps=4)
    log.log(metrics(optional={"loss_scale": 64.0, "skipped_iterations": 0.0}))
    log.close()
    read = event_accumulator.EventAccumulator(str(tmp_path))
    read.Reload()
    assert ("loss-scale" in read.Tags()["scalars"]) == wanted and "skipped_iterations" in read.Tags()["scalars"]


LOADS = [
    ExpertLoad(1, 4, 0, 8, (5, 1, 0, 2), (0, 0, 0, 8), 1.3),
    ExpertLoad(1, 4, 2, 8, (4, 4, 4, 4), (0, 0, 0, 0), 1.2),
]


def test_expert_loads(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    path = tmp_path / "folder" / "load.jsonl"
    config = LoggingConfig(log_expert_load=str(path), tensorboard_dir=str(tmp_path), moe_per_layer_logging=True)
    for rank in (0, 1):
        log = MetricsLog(config, rank=rank, total_steps=4)
        log.log_loads(LOADS)
        assert rank or read_expert_loads(path) == tuple(LOADS)  # at once, for a reader beside the run
        log.close()
    assert read_expert_loads(path) == tuple(LOADS)  # one rank writes
    read = event_accumulator.EventAccumulator(str(tmp_path))
    read.Reload()
    (point,) = read.Scalars("router/L0/imbalance")
    assert (point.step, point.value) == (4, 2.5)
    assert read.Scalars("router/L0/dropped_share")[0].value == 0.5
    assert read.Scalars("router/L2/entropy")[0].value == pytest.approx(1.2)
    bars = read.Histograms("router/L0/load")[0].histogram_value
    assert bars.num == 8 and [bars.bucket[bars.bucket_limit.index(expert + 0.5)] for expert in (0, 1, 3)] == [5, 1, 2]


class FakeRun:
    """The run that wandb.init returns."""

    def __init__(self) -> None:
        self.points: list[tuple[dict[str, float], int]] = []
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.points.append((values, step))

    def finish(self) -> None:
        self.finished = True


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, run = list[dict[str, Any]](), FakeRun()

    def init(**words: Any) -> FakeRun:
        made.append(words)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    folder = tmp_path / "new"
    config = LoggingConfig(
        wandb_project="moe",
        wandb_exp_name="first",
        wandb_save_dir=str(folder),
        tensorboard_log_interval=2,
        log_validation_ppl_to_tensorboard=True,
        moe_per_layer_logging=True,
    )
    MetricsLog(config, rank=1, total_steps=4).close()
    log = MetricsLog(config, rank=0, total_steps=4, settings={"training": {"seed": 5}})
    for step in range(1, 5):
        log.log(metrics(step=step, loss=float(step)), {"iteration-time": 0.5})
    log.log_evaluation("valid", 0.0, 4)
    log.log_loads(LOADS)
    log.close()
    settings = {"training": {"seed": 5}}
    assert made == [{"project": "moe", "name": "first", "entity": None, "dir": str(folder), "config": settings}]
    assert folder.is_dir() and run.finished
    points = [(values["lm loss"], values["iteration-time"], step) for values, step in run.points[:2]]
    assert points == [(2.0, 0.5, 2), (4.0, 0.5, 4)]
    assert run.points[2] == ({"lm loss validation": 0.0, "lm loss validation ppl": 1.0}, 4)
    assert run.points[3][0]["router/L0/imbalance"] == 2.5
