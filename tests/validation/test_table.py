"""Tables of errors tell MoE from dense and forced from natural routing, and list the rows of small groups."""

from __future__ import annotations

import statistics
from pathlib import Path

import pandas as pd
import pytest

from moe_overlap.tuner.calibrate.fit import __main__ as fitting
from moe_overlap.tuner.calibrate.fit.left_out import held, held_lines
from moe_overlap.tuner.cost.expected_error import ComparedRun, errors_of, read_errors, shipped_errors
from tests.validation.table import FEW_ROWS, GROUP, group_figures, summary

GROUPS = {("MoE", "forced"): FEW_ROWS, ("MoE", "natural"): FEW_ROWS - 1, ("dense", "-"): FEW_ROWS + 1}
ROOT = Path(__file__).resolve().parents[2]
GPUS = ("A100", "B200", "GB200", "GB300", "H100")


def errors() -> pd.DataFrame:
    records = [
        {
            **dict(zip(GROUP, ("step s", "test", "H100", kind, routing), strict=True)),
            **dict.fromkeys(("model", "layout", "precision", "release"), ""),
            "row": f"{kind}.{routing}.{number}",
            "measured": 1.0 + number,
            "predicted": 1.1 + number,
            "error %": -30.0 if number == 0 else 10.0,
            "held": "yes",
        }
        for (kind, routing), count in GROUPS.items()
        for number in range(count)
    ]
    return pd.DataFrame(records)


def test_each_kind_and_routing_is_a_group_of_its_own() -> None:
    figures = group_figures(errors()).set_index(["kind", "routing"])
    assert dict(figures["n"]) == GROUPS
    natural = figures.loc["MoE", "natural"]
    assert (natural["mean |error| %"], natural["worst %"], natural["held"]) == (12.9, 30.0, "7/7")
    assert natural["bias %"] == 4.3


def test_rows_of_small_groups_are_listed_and_of_others_not() -> None:
    text = summary(errors())
    for (kind, routing), count in GROUPS.items():
        listed = [f"{kind}.{routing}.{number} " in text for number in range(count)]
        assert set(listed) == {count < FEW_ROWS}, (kind, routing)
    assert FEW_ROWS == 8


def compared(model: str, relative: float, is_test: bool = True) -> ComparedRun:
    """A dense run on H100."""
    return ComparedRun(
        rows=f"{model} {relative}",
        gpu="H100",
        architecture="Hopper",
        precision="bf16",
        routing="",
        model=model,
        shape=(),
        release="",
        is_test=is_test,
        relative=relative,
    )


def test_a_run_does_not_widen_the_interval_that_it_is_held_against() -> None:
    """Three runs of one model miss by half: their own interval holds them, that of the other models does not."""
    far = [compared("far", 0.5 + share / 100) for share in range(3)]
    runs = [*far, *(compared(f"near {number}", 0.01 * number) for number in range(10))]
    assert errors_of(runs).groups["dense models on H100"].holds(0.51)
    assert [run for run, is_held in held(runs).items() if not is_held] == far
    assert held_lines(runs)[0] == "10 of 13 dense runs lie in the intervals that runs of other families give"


def test_renewing_the_errors_of_test_rows_prints_how_many_intervals_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fitting, "ERRORS_FILE", tmp_path / "errors.json")
    monkeypatch.setattr(fitting, "runs_of_test_rows", list)
    fitting.renew_test_errors()
    kept = read_errors((tmp_path / "errors.json").read_text(encoding="utf-8")).runs
    assert kept == tuple(run for run in shipped_errors().runs if not run.is_test)
    assert capsys.readouterr().out.splitlines() == held_lines(kept)


def test_the_pages_have_the_errors_of_test_rows() -> None:
    """docs/results.md by GPU type, and the sums of its text; README.md of MoE models."""
    page = " ".join((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split())
    runs = shipped_errors().runs
    answers = held(runs)
    tests = [run for run in runs if run.is_test]
    inside, means = [], {}
    for kind, is_moe in (("dense", False), ("MoE", True)):
        cells = []
        for gpu in GPUS:
            relative = [abs(run.relative) for run in tests if run.gpu == gpu and bool(run.routing) == is_moe]
            means[kind, gpu] = f"{100 * statistics.mean(relative):.1f} %"
            cells.append(f"{means[kind, gpu]} ({len(relative)})")
        assert f"| {kind}: step time, mean error (rows) | {' | '.join(cells)} |" in page
    for gpu in GPUS:
        of_gpu = [answers[run] for run in tests if run.gpu == gpu]
        inside.append(f"{sum(of_gpu)} of {len(of_gpu)}")
    assert f"| in the intervals that other runs give, of all step times | {' | '.join(inside)} |" in page
    assert f"it holds {sum(answers.values())} of {len(answers)}" in page
    for line in held_lines(runs):
        assert line in page
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    shown = [f"{means['MoE', gpu]} ({gpu})" for gpu in ("GB300", "B200", "H100", "GB200")]
    assert f"MoE models {', '.join(shown[:3])} and {shown[3]}" in readme
    assert f"dense models {means['dense', 'H100']} (H100) to {means['dense', 'GB200']} (GB200)" in readme
