"""Two traces laid over each other: kinds of spans, further ranks, errors, and files that are none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_overlap.commands.compare import compare_traces as main
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.instructions import Span
from moe_overlap.plan.operators import kind_of
from moe_overlap.plan.trace import PREDICTED, lanes_of, read_traces, write_ranks, write_trace
from moe_overlap.report import trace as report_trace
from moe_overlap.report.trace import read_trace, rows_of


def spans(scale: float, *further: Span) -> list[Span]:
    """A step of 10 ms: attention of two layers, an all-to-all under the second."""
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
        (f"L{'9' * 5000}.attention", f"L{'9' * 5000}.attention"),
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


def test_communications_at_the_same_time_have_lanes_of_their_own(tmp_path: Path) -> None:
    """Perfetto keeps a slice if no other one of its lane, which it does not lie in, overlaps it by a nanosecond."""
    tick = 1.0006e-6  # not a whole number of nanoseconds
    overlapping = [Span("L0.moe.dispatch", "ep", 0, b, b * tick, (b + 2.5) * tick) for b in range(40)]
    following = [Span("L0.attention", "compute", 0, b, b * tick, (b + 1) * tick) for b in range(40)]
    tensor = [Span("L0.attention", "tp", 0, 0, 0.0, 2 * tick)]
    step = [*overlapping, *following, *tensor]
    assert max(lanes_of(overlapping)) == 2 and set(lanes_of(following)) == {0}
    write_ranks(tmp_path / "trace.json", {0: step, 1: step})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            begin, end = round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)
            lanes.setdefault((event["pid"], event["tid"]), []).append((begin, end))
    assert len(lanes) == 2 * (3 + 1 + 1) and sum(map(len, lanes.values())) == 2 * len(step)
    for slices in lanes.values():
        assert all(end <= begin for (_, end), (begin, _) in zip(sorted(slices), sorted(slices)[1:], strict=False))
    (file,) = read_traces(tmp_path / "trace.json")
    for rank in (0, 1):
        assert sorted((s.name, s.channel, s.micro_batch) for s in file.spans[rank]) == sorted(
            (s.name, s.channel, s.micro_batch) for s in step
        )


def test_a_trace_goes_to_a_pipe_where_its_path_names_one() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe:
        write_trace(Path(f"/dev/fd/{writing}"), [Span("L0.attention", "compute", 0, 0, 0.0, 1.0)], 0)
        os.close(writing)
        assert json.loads(pipe.read())["traceEvents"]


def test_files_of_an_earlier_run_beside_a_whole_one_are_not_read(tmp_path: Path) -> None:
    write_ranks(tmp_path / "run.json", {0: spans(1.0), 1: spans(1.0)})
    write_trace(tmp_path / "run.json.rank1", spans(9.0), 1)
    assert [sorted(file.spans) for file in read_traces(tmp_path / "run.json")] == [[0, 1]]


def about(hidden: int = 64, tensor: int = 1, micro_batches: int = 4, overlap: str = "none") -> dict[str, Any]:
    stage = {"tensor": tensor, "gradient_accumulation_steps": micro_batches, "overlap": overlap}
    plan = {"precision": "bf16", "global_batch_size": 2 * micro_batches, "stages": [stage]}
    return {"model": {"name": "a", "hidden_size": hidden}, "plan": plan}


@pytest.mark.parametrize(
    ("other", "refused"),
    [
        (about(), None),
        (about(micro_batches=8, overlap="tutel"), None),
        ({}, None),
        (about(hidden=32), "model hidden_size 32: the prediction is of 64"),
        (about(tensor=2), "stages[0] tensor 2: the prediction is of 1"),
    ],
)
def test_traces_of_unlike_jobs_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: dict[str, Any], refused: str | None
) -> None:
    first, second = tmp_path / "predicted.json", tmp_path / "measured.json"
    write_trace(first, spans(1.0), 0, about() | {PREDICTED: True})
    write_trace(second, spans(1.0), 0, other)
    status, error = main([str(first), str(second)]), capsys.readouterr().err
    if refused is None:
        assert (status, error) == (0, "")
    else:
        rule = "the traces are of unlike jobs; compare traces of the same flags"
        assert (status, error) == (2, f"error: {second} {refused}: {rule}\n")


def test_collectives_inside_operators_count_as_computation_where_one_trace_does_not_tell_them_apart(
    tmp_path: Path,
) -> None:
    parts = [("compute", 1.0, 1.3), ("tp", 1.3, 1.4), ("compute", 1.4, 1.75)]
    split = [Span("L0.attention", channel, 0, 0, start, end) for channel, start, end in parts]
    for name, made in (("split", split), ("whole", [Span("L0.attention", "compute", 0, 0, 1.0, 1.6)])):
        write_trace(tmp_path / f"{name}.json", made, 0)
    predicted, measured = read_trace(tmp_path / "whole.json"), read_trace(tmp_path / "split.json")
    (row,) = rows_of(predicted, measured)
    assert (row["kind"], row["channel"]) == ("attention", "compute")
    assert row["error"] == pytest.approx(0.6 / 0.75 - 1)
    apart = {row["channel"]: row["measured_seconds"] for row in rows_of(measured, measured)}
    assert apart == {"compute": pytest.approx(0.65), "tp": pytest.approx(0.1)}


@pytest.mark.parametrize("flag", ["--trace", "--output"])
def test_a_trace_that_cannot_be_written_names_the_flag_that_asks_for_it(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise IsADirectoryError(21, "Is a directory")

    step: Any = SimpleNamespace(prices={0: SimpleNamespace(plan=None, model=None)})
    monkeypatch.setattr(report_trace, "about_run", lambda *_: {})
    monkeypatch.setattr(report_trace, "write_ranks", refuse)
    step.spans = step.kept_bytes = lambda rank: []
    with pytest.raises(ConfigError, match=f"{flag} t.json: cannot be written: Is a directory"):
        report_trace.write_trace("t.json", step, flag)


def test_a_prediction_and_a_measurement_are_not_exchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors would be those of a measurement."""
    for name, mark in (("predicted.json", {PREDICTED: True}), ("measured.json", {})):
        write_ranks(tmp_path / name, {0: spans(1.0)}, about=about() | mark)
    predicted, measured = (str(tmp_path / name) for name in ("predicted.json", "measured.json"))
    assert main([predicted, measured]) == 0
    capsys.readouterr()
    order = "give the trace of tools/predict.py --trace, then that of pretrain_moe.py --trace"
    for words, wrong, rule in (
        ([predicted, predicted], predicted, "is a prediction, not a measurement"),
        ([measured, measured], measured, "is a measurement, not a prediction"),
        ([measured, predicted], measured, "is a measurement, not a prediction"),
    ):
        assert main(words) == 2
        assert capsys.readouterr().err == f"error: {wrong}: {rule}; {order}\n"


def test_a_missing_trace_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["predicted.json"])
    assert capsys.readouterr().err.endswith("error: measured: is missing; give a trace of pretrain_moe.py --trace\n")
