"""The first run: what it starts, the rate of its link, and the table of what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.training.cli.arguments import parse
from moe_overlap.describe.errors import ConfigError
from tools import first_run
from tools.bench.first_report import Facts, RunFacts, facts_json, facts_of, page, table
from tools.bench.launch import ROOT, RankFailed
from tools.bench.training import command_of_training, train
from tools.first_run import Probe, link_mbit, only, plain_words, probe_of, read_command, without


def row(step: int, loss: float, seconds: float, exposed: float) -> dict[str, Any]:
    return {"step": step, "loss": loss, "step_seconds": seconds, "exposed_comm_seconds": exposed}


def facts(tuned_seconds: float = 1.0, loss_factor: float = 1.0, tuned_predicted: float = 0.9) -> Facts:
    plain = [row(step, 6.0 / step, 9.0 if step < 3 else 1.5, 0.5) for step in range(1, 6)]
    tuned = [row(step, 6.0 / step * loss_factor, tuned_seconds, 0.1) for step in range(1, 9)]
    return Facts(("two ranks",), "partitions", RunFacts(1.4, 0.4, plain), RunFacts(tuned_predicted, 0.05, tuned))


def test_the_rate_gives_the_wanted_share_of_computation() -> None:
    """24 MB in half of 0.96 s are 50 MB/s."""
    assert link_mbit(Probe(compute_seconds=0.96, exchange_seconds=0.1, sent_bytes=24e6)) == 400.0
    assert link_mbit(Probe(0.96, 0.1, 24e6), ratio=1.0) == 200.0


def test_a_probe_is_the_median_step_of_the_mean_rank() -> None:
    def answers(step: float) -> list[dict[str, float]]:
        return [
            {"step": step, "exposed": 0.2, "exchanges": 0.3, "sent_bytes": 10.0},
            {"step": step + 0.2, "exposed": 0.2, "exchanges": 0.5, "sent_bytes": 30.0},
        ]

    probe = probe_of([answers(1.0), answers(50.0), answers(1.1)])
    assert probe.compute_seconds == pytest.approx(1.0) and probe.sent_bytes == 20.0
    assert probe.ratio == pytest.approx(0.4)


def test_the_job_grows_with_the_processes(tmp_path: Path) -> None:
    run = read_command(["--link", "emulator", "--processes", "4", "--folder", str(tmp_path), "--train-iters", "7"])
    config = parse(list(run.flags)).config
    assert (config.parallel.expert_model_parallel_size, config.training.global_batch_size) == (4, 32)
    assert (run.train_steps, run.plain_steps, run.emulated) == (7, 7, True)


def test_the_plain_run_leaves_files_to_the_tuned_one(tmp_path: Path) -> None:
    outputs = ["--save", "a b", "--log-json", "mine.jsonl"]
    run = read_command(["--link", "none", "--folder", str(tmp_path), *outputs, "--lr", "0.01"])
    config = parse(plain_words(run)).config
    assert config.checkpoint.save is None and config.logging.log_json == str(tmp_path / "plain.jsonl")
    assert config.optimizer.lr == 0.01 and config.training.exit_interval == run.plain_steps == 12
    assert config.training.train_iters == run.train_steps
    assert only(run.flags, first_run.OUTPUTS) == outputs and "--lr" in without(run.flags, first_run.OUTPUTS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--link", "wifi"], "--link wifi: unknown"),
        (["--processes", "1"], "--processes 1: one process has no link"),
        (["--processes", "3"], "3"),
        (["--plain-steps", "0"], "--plain-steps 0: must be positive"),
        (["--expert-model-parallel-size", "1"], "--expert-model-parallel-size 1: 2 processes share one link"),
        (["--moe-overlap-partitions", "2"], "--moe-overlap-*: how to overlap is what this run finds out"),
        (["--load", "checkpoints"], "--load: plain and tuned training begin at step 1"),
        (["--log-interval", "10"], "--log-interval: the comparison reads every step"),
        (["--dry-run"], "--dry-run: the first run trains"),
        (["--log-interval=10"], "--log-interval: the comparison reads every step"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--folder", "/dev/null/first", "--link", "none"], "--folder /dev/null/first: cannot be written"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert first_run.main(words) == 2
    printed = capsys.readouterr()
    assert (
        printed.out == "" and printed.err.count("\n") == 1 and printed.err.startswith("error: ") and said in printed.err
    )


def test_emulation_is_taken_where_there_are_no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(hosts: int, rate: float | None) -> None:
        raise ConfigError("--namespaces", 1000, "network namespaces need root", "use --emulator")

    monkeypatch.setattr(first_run, "Bed", refuse)
    reason = "network namespaces need root"
    assert [first_run.settled_link(asked) for asked in ("auto", "emulator", "none")] == [
        ("emulator", reason),
        ("emulator", ""),
        ("none", ""),
    ]
    with pytest.raises(ConfigError, match="namespaces need root"):
        first_run.settled_link("namespaces")


def test_ranks_are_pretrain_moe_itself_unless_the_link_is_emulated() -> None:
    assert command_of_training(["--lr", "1"], None)[1:] == [str(ROOT / "pretrain_moe.py"), "--lr", "1"]
    assert command_of_training(["--lr", "1"], 4e7)[1:6] == [
        "-P",
        "-m",
        "tools.bench.training",
        "--bytes-per-second",
        "40000000.0",
    ]


def test_a_machine_without_util_linux_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_run.shutil, "which", lambda program: None)
    with pytest.raises(ConfigError, match="setpriv, taskset: not installed"):
        read_command([])


def test_the_table_says_what_was_gained() -> None:
    lines = table(facts())
    assert lines[2].split() == ["step,", "measured", "1.500", "s", "1.000", "s", "1.50"], (
        "the first two steps do not count"
    )
    assert lines[3].split()[-2:] == ["-7%", "-10%"]
    assert lines[6].split() == ["loss", "of", "step", "5", "1.20000", "1.20000"]
    assert lines[7:] == [
        "faster: 50% more steps in the same time",
        "same training: over 5 steps losses differ by at most 0e+00 of their value (limit 1e-05)",
    ]


@pytest.mark.parametrize(
    ("seconds", "said"), [(2.0, "NOT faster on this machine: 25% fewer"), (1.51, "no difference on this machine")]
)
def test_the_table_is_honest_about_speed(seconds: float, said: str) -> None:
    assert table(facts(tuned_seconds=seconds))[7].startswith(said)


def test_the_table_says_when_there_was_nothing_to_gain() -> None:
    assert table(facts(tuned_predicted=1.4))[7].startswith("nothing is predicted to be faster than plain here")


def test_the_table_is_honest_about_losses() -> None:
    assert table(facts(loss_factor=1.001))[8].startswith(
        "NOT the same training: over 5 steps losses differ by at most 1e-03"
    )


def test_facts_survive_their_file_and_stand_on_the_page() -> None:
    again = facts_of(json.loads(json.dumps(facts_json(facts()))))
    assert table(again) == table(facts())
    text = page(again, "<svg></svg>")
    assert "step, measured" in text and "<svg></svg>" in text and "http" not in text


def test_the_record_shows_the_table_of_its_figures() -> None:
    folder = ROOT / "examples" / "records" / "2026-11-22_make_train_2cpu"
    lines = table(facts_of(json.loads((folder / "result.json").read_text())))
    shown = (folder / "README.md").read_text()
    assert [line for line in lines if line.strip() not in shown] == []


def test_what_ranks_print_is_handed_on_and_their_failure_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import os, sys; print('step 1'); print('step 2'); sys.stderr.write('error: no\\n'); sys.exit(2)"
    shown: list[str] = []
    with pytest.raises(RankFailed, match="rank 0 of the training ended with status 2") as raised:
        train(["python3", "-c", program], 2, None, tmp_path / "a run.log", shown.append)
    assert shown == ["step 1", "step 2"] and raised.value.status == 2
    assert capsys.readouterr().err == "error: no\n"
