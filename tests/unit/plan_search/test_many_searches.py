"""`tools/autotune.py --target both` and `--num-gpus 4,8`: several searches of one job in one answer."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest

import moe_overlap.plan_search.several as scaling
from megatron.training.cli.arguments import expand_files
from moe_overlap.commands import autotune
from moe_overlap.describe.cluster import Cluster, shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan_search.flags import Target
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.results import BothTargets, PlanSearch
from moe_overlap.plan_search.search import search_plan
from moe_overlap.plan_search.several import NOT_SEARCHED, search_numbers
from moe_overlap.report.scaling import scaling_json, scaling_lines
from moe_overlap.report.search_folder import write_answer
from moe_overlap.report.targets import gain_sentence
from moe_overlap.tuner.capture.library import Libraries
from moe_overlap.tuner.search.solution import Status
from tests.unit.plan_search.test_plan_search import H100, OPTIONS, SMALL, searched

QUICK = SearchSettings(target="megatron-lm", solver_seconds=0.5)
FILES = {"megatron_args.txt", "launch.sbatch", "plan.json", "report.html", "trace.json"}


@functools.cache
def search_of(gpus: int, target: Target) -> PlanSearch:
    if gpus == 8:
        return searched(target)
    return search_plan(SMALL, shipped_cluster("H100", gpus), SearchSettings(target=target), **OPTIONS)


def searched_once(
    words: list[str], cluster: Cluster, settings: SearchSettings, libraries: Libraries | None = None, **options: object
) -> PlanSearch:
    """A search of these tests' job, which is not repeated."""
    assert settings.has_baseline or settings.target == "megatron-lm"
    assert list(expand_files(words))[: len(SMALL)] == SMALL
    return search_of(cluster.gpus, settings.target)


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    flags = tmp_path / "job.args"
    flags.write_text("\n".join(SMALL))
    return ["--megatron-args", str(flags), "--gpu", "H100", "--output", str(tmp_path / "tuned")]


def test_both_targets_and_the_gain(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "search_plan", searched_once)
    assert autotune.main([*job, "--num-gpus", "8", "--target", "both", "--train-tokens", "1T"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines[:11]] == [
        *("megatron-lm", "step", "speed", "training", "memory"),
        *("moe-overlap", "step", "speed", "training", "memory"),
        "gain",
    ]
    assert len(lines) <= 17 and lines[-1].startswith("next ")
    tuned = tmp_path / "tuned"
    assert f"; the same for Megatron-LM in {tuned / 'megatron-lm'}" in lines[-2]
    assert {path.name for path in tuned.iterdir()} == {*FILES, "megatron-lm"}
    assert {path.name for path in (tuned / "megatron-lm").iterdir()} == FILES
    assert autotune.main([*job, "--num-gpus", "8", "--target", "both", "--json", "--train-tokens", "1T"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["train_tokens"] == values["megatron_lm"]["train_tokens"] == 1e12
    assert values["train_seconds"] == pytest.approx(1e12 / values["tokens_per_second_per_gpu"] / 8)
    assert (values["target"], values["megatron_lm"]["target"]) == ("moe-overlap", "megatron-lm")
    assert values["gain"] == values["megatron_lm"]["step_seconds"] / values["step_seconds"]
    assert values["baseline_step_seconds"] is not None


def test_without_a_folder_the_answer_is_only_printed(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "search_plan", searched_once)
    monkeypatch.setattr("moe_overlap.plan_search.search.search_plan", searched_once)
    monkeypatch.chdir(tmp_path)
    files = sorted(tmp_path.rglob("*"))
    for targets in ("8 --target megatron-lm", "8 --target both", "8,4 --target megatron-lm"):
        assert autotune.main([*job[:-2], "--num-gpus", *targets.split()]) == 0
        *_, last = capsys.readouterr().out.splitlines()
        assert last == "written     nothing; --output DIR writes the flags, a script, the plan and a report"
    assert sorted(tmp_path.rglob("*")) == files


def slower(search: PlanSearch, by: float) -> PlanSearch:
    prediction = search.prediction
    seconds = prediction.predicted.step_seconds * by
    predicted = dataclasses.replace(prediction.predicted, step_seconds=seconds)
    chosen = dataclasses.replace(search.chosen, prediction=dataclasses.replace(prediction, predicted=predicted))
    return dataclasses.replace(search, chosen=chosen)


def test_the_gain_is_said_as_far_as_predictions_tell() -> None:
    search = searched("megatron-lm")

    def sentence(by: float) -> str:
        return gain_sentence(BothTargets(upstream=slower(search, by), runtime=search, tie=0.01))

    assert sentence(1.25).startswith("1.25 times as fast, ") and sentence(1.25).endswith("the reason to use this fork")
    assert sentence(1.005).startswith("none that predictions can tell: ")
    assert sentence(0.8).startswith("none: unmodified Megatron-LM is 1.25 times as fast")


def test_numbers_of_gpus_make_a_table(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """7 GPUs divide neither model nor batch: a row with the reason."""
    monkeypatch.setattr(scaling, "search_plan", searched_once)
    words = [*job, "--num-gpus", "8,7,4", "--target", "megatron-lm", "--train-tokens", "1T"]
    write_answer(tmp_path / "tuned" / "7-gpus", search_of(4, "megatron-lm"), print)
    assert autotune.main(words) == 0
    head, four, seven, eight, *rest = capsys.readouterr().out.splitlines()
    assert head.split() == "GPUs step tokens/s per GPU efficiency days GPU-hours plan".split()
    assert four.split()[0] == "4" and " 100.0 % " in four and "DP" in four
    assert seven.split()[0] == "7" and "no layout of 7 GPUs divides the batch and the model" in seven
    assert eight.split()[0] == "8" and eight.index("DP") > 0
    assert rest[0].startswith("efficiency  tokens/s per GPU relative to 4 × H100; ")
    tuned = tmp_path / "tuned"
    assert {path.name for path in tuned.iterdir()} == {"4-gpus", "7-gpus", "8-gpus"}
    # A plan of other flags is none of this table.
    assert {path.name for path in (tuned / "7-gpus").iterdir()} == {f"{name}.old" for name in FILES}
    assert {path.name for path in (tuned / "8-gpus").iterdir()} == FILES
    assert autotune.main([*words, "--json"]) == 0
    fewest, refused, most = json.loads(capsys.readouterr().out)
    assert set(refused) == {"num_gpus", "reason"} and (fewest["num_gpus"], most["num_gpus"]) == (4, 8)
    rates = [row["tokens_per_second_per_gpu"] for row in (fewest, most)]
    assert most["scaling_efficiency"] == rates[1] / rates[0] and fewest["scaling_efficiency"] == 1
    assert most["train_tokens"] == 1e12
    assert most["train_gpu_hours"] == pytest.approx(1e12 / rates[1] / 3600)
    assert most["train_seconds"] == pytest.approx(1e12 / rates[1] / 8)


def test_an_interrupted_table_ends_with_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = searched("megatron-lm")
    stopped = dataclasses.replace(found.uniform.solution, status=Status.TIME_LIMIT)
    calls: list[int] = []
    by_ctrl_c = True

    def stops(words: list[str], cluster: Cluster, *_: object, **__: object) -> PlanSearch:
        calls.append(cluster.gpus)
        early = dataclasses.replace(found.uniform, solution=stopped)
        return dataclasses.replace(found, uniform=early, is_interrupted=by_ctrl_c)

    monkeypatch.setattr(scaling, "search_plan", stops)
    clusters = [H100, shipped_cluster("H100", 16)]
    rows = search_numbers(SMALL, clusters, QUICK)
    assert calls == [8] and [row.reason for row in rows] == ["", NOT_SEARCHED]
    assert "stopped early" in scaling_lines(rows, Path("tuned"), None)[1]
    # A limit of time holds for every search.
    by_ctrl_c = False
    assert len(search_numbers(SMALL, clusters, QUICK)) == 2 and calls == [8, 8, 16]
    assert scaling_json(rows, None)[1] == {"num_gpus": 16, "reason": NOT_SEARCHED}
    assert scaling_lines(rows, Path("tuned"), None)[2] == f"  16  {NOT_SEARCHED}"


def test_ctrl_c_before_an_answer_keeps_the_rows_before(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = [searched("megatron-lm"), KeyboardInterrupt()]

    def next_answer(*_: object, **__: object) -> object:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(scaling, "search_plan", next_answer)
    clusters = [shipped_cluster("H100", count) for count in (8, 16, 32)]
    assert [row.reason for row in search_numbers(SMALL, clusters, QUICK)] == ["", NOT_SEARCHED, NOT_SEARCHED]
    answers.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        search_numbers(SMALL, clusters, QUICK)


def test_where_no_number_has_a_plan_the_last_reason_is_the_error() -> None:
    clusters = [shipped_cluster("H100", count) for count in (5, 7)]
    with pytest.raises(ConfigError, match="no layout of 7 GPUs divides"):
        search_numbers(SMALL, clusters, QUICK, **OPTIONS)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--num-gpus", "0,8"], "--num-gpus 0,8: 0 is no number of GPUs; give for example 64"),
        (["--num-gpus", "8,8"], "--num-gpus 8,8: 8 is given twice; give every number once"),
        (["--num-gpus", "8,"], "--num-gpus 8,: nothing is no number of GPUs"),
        (["--num-gpus", "8,-8"], "--num-gpus 8,-8: -8 is no number of GPUs"),
        (["--num-gpus", "8,12"], "--num-gpus 12: nodes of H100 have 8 GPUs"),
        (["--num-gpus", "many"], "--num-gpus many: must be a whole number from 1"),
        (["--num-gpus", "8,16", "--target", "both"], "--target both: several numbers of GPUs are compared for one"),
        (["--num-gpus", "8,16", "--overlap-only"], "--num-gpus 8,16: --overlap-only keeps one layout"),
        (["--num-gpus", "8", "--target", "both", "--overlap-only"], "--target both: has no effect with --overlap-only"),
    ],
)
def test_mistakes(
    job: list[str], words: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert autotune.main([*job, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and expected in error and error.count("\n") == 1
    assert not (tmp_path / "tuned").exists()
