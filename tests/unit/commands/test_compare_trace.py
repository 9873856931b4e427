"""Two traces laid over each other: kinds of spans, further ranks, errors, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_overlap.commands.compare import compare_traces as main
from moe_overlap.plan.instructions import Span
from moe_overlap.plan.operators import kind_of
from moe_overlap.plan.trace import write_trace
from moe_overlap.report.trace import read_trace, rows_of


def spans(scale: float, *further: Span) -> list[Span]:
    """A step of 10 ms: attention of two layers, an exchange under the second."""
    made = [
        Span("L0.attention", "compute", 0, 0, 1.000, 1.000 + 4e-3 * scale),
        Span("L1.attention", "compute", 0, 0, 1.004, 1.004 + 2e-3 * scale),
        Span("L0.moe.dispatch", "ep", 0, 0, 1.006, 1.006 + 4e-3 * scale),
    ]
    return [*made, *further]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("L12.moe.experts.backward", "moe.experts.backward"),
        ("L3.attention.qkv.dW", "attention.dW"),
        ("mtp0.attention.recompute", "attention.recompute"),
        ("head.loss.backward", "head.loss.backward"),
        ("gradients.L3", "gradients"),
        ("optimizer.L3", "optimizer"),
        ("optimizer.norm", "optimizer.norm"),
        ("send.S0>S1.backward", "send.backward"),
        ("L0.moe.dispatch.p1", "L0.moe.dispatch.p1"),
    ],
)
def test_kinds_are_names_without_places(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_errors_by_kind_and_of_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "predicted.json", spans(0.5), 0)
    write_trace(tmp_path / "measured.json", spans(1.0, Span("optimizer.L0", "compute", 0, 0, 1.010, 1.011)), 0)
    assert main([str(tmp_path / "predicted.json"), str(tmp_path / "measured.json"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["step"]["predicted_seconds"] == pytest.approx(8e-3)
    assert answer["step"]["measured_seconds"] == pytest.approx(11e-3)
    assert answer["step"]["error"] == pytest.approx(8 / 11 - 1)
    assert [(row["kind"], row["channel"]) for row in answer["kinds"]] == [
        ("attention", "compute"),
        ("moe.dispatch", "ep"),
        ("optimizer", "compute"),
    ]
    assert [row["error"] for row in answer["kinds"]] == [pytest.approx(error) for error in (-0.5, -0.5, -1.0)]


def test_ranks_beside_a_file_are_averaged_and_the_slowest_is_the_step(tmp_path: Path) -> None:
    write_trace(tmp_path / "run.json", spans(1.0), 0)
    write_trace(tmp_path / "run.json.rank1", spans(2.0), 1)
    trace = read_trace(tmp_path / "run.json")
    assert trace.seconds[("attention", "compute")] == pytest.approx(9e-3)
    assert trace.step_seconds == pytest.approx(14e-3)


def test_ranks_in_one_file_are_the_same(tmp_path: Path) -> None:
    events = []
    for rank, scale in ((0, 1.0), (1, 2.0)):
        write_trace(tmp_path / "one.json", spans(scale), rank)
        events += json.loads((tmp_path / "one.json").read_text())["traceEvents"]
        write_trace(tmp_path / f"apart.json{'.rank1' * rank}", spans(scale), rank)
    (tmp_path / "one.json").write_text(json.dumps({"traceEvents": events}))
    assert read_trace(tmp_path / "one.json") == read_trace(tmp_path / "apart.json")


def test_what_was_not_measured_has_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "predicted.json", spans(1.0, Span("L0.mlp", "compute", 0, 0, 1.0, 1.001)), 0)
    write_trace(tmp_path / "measured.json", spans(1.0), 0)
    predicted, measured = read_trace(tmp_path / "predicted.json"), read_trace(tmp_path / "measured.json")
    assert {row["kind"]: row["error"] for row in rows_of(predicted, measured)}["mlp"] is None
    assert main([str(tmp_path / "predicted.json"), str(tmp_path / "measured.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["step", "10.00", "10.00", "+0.0%"]
    assert [line.split()[-1] for line in lines if line.startswith("mlp")] == ["-"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "is no trace"),
        ('{"traceEvents": [{"ph": "X"}]}', "is no trace"),
        ('{"traceEvents": []}', "has no spans"),
    ],
)
def test_files_that_are_no_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    write_trace(tmp_path / "predicted.json", spans(1.0), 0)
    if text is not None:
        (tmp_path / "measured.json").write_text(text)
    assert main([str(tmp_path / "predicted.json"), str(tmp_path / "measured.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'measured.json'}: ") and message in error and error.count("\n") == 1
