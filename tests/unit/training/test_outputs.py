"""Outputs are proven before the first step, and a report that fails later costs one warning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron.training.cli.config import CheckpointConfig, Config, LoggingConfig, ModelConfig, OverlapConfig
from megatron.training.report.metrics import MetricsLog
from megatron.training.report.outputs import Sink, _probe, places, prove_outputs
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.expert_load import ExpertLoad
from tests.unit.training.test_metrics import metrics

FIX = "free space, correct permissions, or choose another place"


def test_what_is_proven_leaves_nothing_but_folders(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("kept\n")
    config = Config(
        model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
        checkpoint=CheckpointConfig(save=str(tmp_path / "a/saved"), non_persistent_save_interval=1),
        logging=LoggingConfig(log_json=str(tmp_path / "log.jsonl"), tensorboard_dir=str(tmp_path / "board")),
        overlap=OverlapConfig(trace=str(tmp_path / "b/trace.json")),
    )
    prove_outputs(config, 0)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        *("a", "a/saved", "a/saved/non_persistent", "b", "board", "log.jsonl")
    ]
    assert (tmp_path / "log.jsonl").read_text() == "kept\n"


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (Config(checkpoint=CheckpointConfig(save="F/file/saved")), "--save F/file/saved: cannot be written: Not a dir"),
        (Config(checkpoint=CheckpointConfig(save="F/file")), "--save F/file: cannot be written: File exists"),
        (Config(logging=LoggingConfig(log_json="F/folder")), "--log-json F/folder: cannot be written: Is a directory"),
        (Config(logging=LoggingConfig(log_expert_load="F/file/x")), "--log-expert-load F/file/x: cannot be written: "),
        (Config(logging=LoggingConfig(tensorboard_dir="F/file")), "--tensorboard-dir F/file: cannot be written: File "),
        (Config(logging=LoggingConfig(log_json="F/pipe")), "--log-json F/pipe: cannot be written: No such device or "),
        (Config(overlap=OverlapConfig(trace="F/pipe")), "--trace F/pipe: cannot be written: No such device or "),
        (Config(overlap=OverlapConfig(trace="F/file/t")), "--trace F/file/t: cannot be written: "),
        (Config(overlap=OverlapConfig(trace="/proc/no/trace")), "--trace /proc/no/trace: cannot be written: No such "),
    ],
)
def test_a_place_that_cannot_be_written_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Config, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("F/folder").mkdir(parents=True)
    Path("F/file").write_text("")
    os.mkfifo("F/pipe")  # nobody reads it
    with pytest.raises(ConfigError) as caught:
        prove_outputs(config, 0)
    assert str(caught.value).startswith(line) and str(caught.value).endswith(f"; {FIX}")


def test_a_probe_follows_no_link_and_has_a_name_that_nobody_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len({_probe(tmp_path).name for _ in range(3)}) == 3
    (tmp_path / "other").write_text("kept")
    monkeypatch.setattr("megatron.training.report.outputs.secrets.token_hex", lambda length: "guessed")
    (tmp_path / ".probe-guessed").symlink_to(tmp_path / "other")
    with pytest.raises(FileExistsError):
        _probe(tmp_path)
    assert (tmp_path / "other").read_text() == "kept"


def test_a_full_disk_is_seen_by_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="^--save .*: cannot be written: No space left on device;"):
        prove_outputs(Config(checkpoint=CheckpointConfig(save=str(tmp_path))), 0)
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_prove_their_own_places() -> None:
    logging = LoggingConfig(
        log_json="log", log_expert_load="loads", profile=True, use_pytorch_profiler=True, profile_ranks=(1,)
    )
    config = Config(checkpoint=CheckpointConfig(save="saved"), logging=logging, overlap=OverlapConfig(trace="trace"))
    flags = {rank: [(flag, str(path)) for flag, path, _ in places(config, rank)] for rank in (0, 1)}
    assert flags[0] == [
        ("--save", "saved"),
        ("--log-json", "log"),
        ("--trace", "trace"),
        ("--log-expert-load", "loads"),
    ]
    assert flags[1][1:] == [("--log-json", "log.rank1"), ("--use-pytorch-profiler", ".")]


class Broken:
    """A board that fails at every call."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}\nsecond line")


def test_failing_reports_cost_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    config = LoggingConfig(
        log_json="/dev/full", log_expert_load="/dev/full", moe_per_layer_logging=True, log_interval=1
    )
    log = MetricsLog(config, rank=0, total_steps=2)
    log._boards = Broken()  # type: ignore[assignment]
    for step in (1, 2):
        log.log(metrics(step=step))
        log.log_evaluation("valid", 1.0, step)
        log.log_loads([ExpertLoad(1, step, 0, 8, (5, 1, 0, 2), (0, 0, 0, 8), 1.3)])
    log.close()
    out, err = capsys.readouterr()
    rule = "cannot be written: No space left on device; training goes on without it"
    assert err.splitlines() == [
        f"warning: --log-json /dev/full: {rule}",
        "warning: --wandb-project: cannot be written: no scalars second line; training goes on without it",
        f"warning: --log-expert-load /dev/full: {rule}",
    ]
    assert len(out.splitlines()) == 4


def test_a_sink_that_failed_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    sink, calls = Sink("--trace", "t.json"), []

    def work() -> None:
        calls.append(1)
        raise ValueError

    sink.attempt(work)
    sink.attempt(work)
    assert len(calls) == 1 and not sink.works
    assert capsys.readouterr().err == (
        "warning: --trace t.json: cannot be written: ValueError; training goes on without it\n"
    )


def test_names_in_reports_do_not_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    log = MetricsLog(LoggingConfig(), rank=0, total_steps=1)
    log.say("saved", "runs/\x1b[2J\nsecond × line")
    Sink("--trace", "\x1b[2J.json").attempt(lambda: 1 / 0)
    out, err = capsys.readouterr()
    assert out == "saved        runs/?[2J\nsecond × line\n"
    assert err.startswith("warning: --trace ?[2J.json: cannot be written: division by zero")
