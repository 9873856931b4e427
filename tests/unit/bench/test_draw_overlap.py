"""The picture of a step: its intervals add up, and the one in docs/ is drawn from the traces of its record."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_overlap.plan.instructions import Span, communication_seconds
from moe_overlap.plan.trace import read_traces, write_trace
from moe_overlap.report.picture import (
    EXPOSED,
    HIDDEN,
    UPDATE,
    WEIGHTS,
    kind_of_work,
    step_of,
    subtract,
    tick_seconds,
)
from tools.draw_overlap import main

ROOT = Path(__file__).resolve().parents[3]
RECORD = ROOT / "examples" / "records" / "2026-11-22_overlap_picture_2cpu"


def test_picture_of_the_record(tmp_path: Path) -> None:
    output = tmp_path / "overlap.svg"
    assert main([str(RECORD / "without.json"), str(RECORD / "with.json"), "--output", str(output)]) == 0
    assert output.read_text() == (ROOT / "docs" / "overlap.svg").read_text()


@pytest.mark.parametrize("name", ["without.json", "with.json"])
def test_lanes_add_up(name: str) -> None:
    (file,) = read_traces(RECORD / name)
    step = step_of(file.spans[0], "step")
    total, exposed = communication_seconds(file.spans[0])
    drawn = {kind: sum(end - start for start, end in step.communication[kind]) for kind in (HIDDEN, EXPOSED)}
    assert drawn[EXPOSED] == pytest.approx(exposed)
    assert drawn[HIDDEN] == pytest.approx(total - exposed, abs=1e-9)
    assert (WEIGHTS in step.compute) == (name == "with.json") and UPDATE in step.compute


def test_subtract() -> None:
    assert subtract([(0.0, 4.0), (6.0, 8.0)], [(1.0, 2.0), (3.0, 7.0)]) == [(0.0, 1.0), (2.0, 3.0), (7.0, 8.0)]


def test_kinds_of_work() -> None:
    names = (
        "L0.attention",
        "L0.moe.experts.backward",
        "L0.moe.experts.recompute",
        "L0.moe.experts.fc1.dW",
        "optimizer.L0",
    )
    assert [kind_of_work(name) for name in names] == [
        "forward",
        "backward",
        "backward",
        "weight gradients",
        "optimizer",
    ]


@pytest.mark.parametrize(("longest", "expected"), [(0.96, 0.1), (1.01, 0.2), (3.0, 0.5), (0.09, 0.01), (7.0, 1.0)])
def test_ticks(longest: float, expected: float) -> None:
    assert tick_seconds(longest) == pytest.approx(expected)


def test_a_rank_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "trace.json", [Span("L0.attention", "compute", 0, 0, 0.0, 1.0)], 0)
    path = str(tmp_path / "trace.json")
    assert main([path, path, "--rank", "3", "--output", str(tmp_path / "overlap.svg")]) == 2
    assert "choose among 0" in capsys.readouterr().err
