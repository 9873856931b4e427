"""Tests of the record writer: the tables that it makes of series, and that its command lines are understood."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest

from tools import record_overlap
from tools.bench.figures import MeasuredSteps, MeasuredTurn, table
from tools.benchmark_overlap import choose, parse_arguments
from tools.record_overlap import HEAD, SERIES, main

STEPS = {"alltoall": 4.0, "irregular": 3.0, "tutel 2": 2.5, "tutel 4": 2.4, "both 2 around": 2.2, "deferral": 2.8}


def series(name: str, words: list[str]) -> dict[str, Any]:
    """In the place of a run: constant steps."""
    measured = MeasuredSteps(
        {v: [MeasuredTurn(s, 0.1)] for v, s in STEPS.items()}, {v: [MeasuredTurn(2.0, 0.0)] for v in STEPS}, {}
    )
    rows, totals = measured.figures("irregular", "alltoall"), measured.totals("irregular")
    made = {
        "ranks": 2,
        "gate": "topk",
        "ratio": totals.ratio,
        "link_mbit": 100.0,
        "links": "emulator",
        "micro_batches": 4,
        "totals": {"bound_speedup": totals.bound_speedup},
        "summary": str(totals),
        "variants": [dataclasses.asdict(row) for row in rows],
        "table": table(rows),
    }
    head = {
        "started": "today",
        "load_average": 0.5,
        "commit": "abc",
        "machine": "a machine",
        "versions": {"torch": "2"},
    }
    return head | {"command": f"python x {shlex.join(words)}", "records": [made]}


@pytest.mark.parametrize("name", SERIES)
def test_command_lines(name: str) -> None:
    arguments, _ = parse_arguments(["--emulator", *shlex.split(SERIES[name].flags)])
    arguments.namespaces = True  # as the record is made; nothing is started here
    chosen = {variant.name for gate in arguments.gates for variant in choose(arguments, gate)}
    assert "irregular" in chosen and any(name.startswith("both") for name in chosen)


def test_tables_go_between_the_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_overlap, "measure", series)
    folder = tmp_path / "record"
    assert main([str(folder), "--series", "ratios", "--repeats", "7", "--emulator"]) == 0
    readme = folder / "README.md"
    assert readme.read_text().startswith(HEAD.partition("\n<!--")[0])
    assert "python x --repeats 7 --emulator" in readme.read_text()
    assert (
        "2 ranks, topk, 4 micro-batches, ratio 0.50, 100 Mbit/s (emulator): computation 2.000 s" in readme.read_text()
    )

    readme.write_text("before\n" + readme.read_text() + "What it shows: much.\n")
    main([str(folder), "--series", "gates"])
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("What it shows: much.\n")
    expected = "2 | topk | 0.50 | 1.25× (tutel 4) | 1.36× (both 2 around) | 80% | 1.50× |"
    assert [line for line in text.splitlines() if expected in line] == [
        f"| {name} | {expected}" for name in ("ratios", "gates")
    ]
    assert text.count("| both 2 around |") == 2, "a table per series"

    main([str(folder), "--series"])
    assert readme.read_text() == text, "written again from the files"
