"""tools/show_plan.py: a plan as text, a list, and one line for every mistake."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from moe_overlap.commands import show_plan
from moe_overlap.plan.instructions import parse_list
from moe_overlap.plan.overlap import LoweredLimit, SearchLimits, StageOverlap
from moe_overlap.report.plan import stage_rows
from tests.unit.plan import plan_samples

TOOL = Path(__file__).resolve().parents[3] / "tools" / "show_plan.py"
PLAN = str(plan_samples.GOLDEN / "pp2_ep2.json")
MODEL = str(plan_samples.GOLDEN / "pp2_ep2_model.json")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return show_plan


def test_example_as_text(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(plan_samples.GOLDEN / "example_plan.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "model         tiny-mixtral-8x7b"
    assert "S0>S1         4 tiles" in lines
    table = [line.split() for line in lines[lines.index("") + 1 :]]
    assert ["stage", "0", "1"] in table
    assert ["micro-batch", "size", "2", "4"] in table
    assert ["overlap", "L0:partitioned*2", "-"] in table
    assert not any(row[0] == "offload" for row in table)


def test_a_range_that_memory_kept_from_more_parts_is_shown() -> None:
    lowered = LoweredLimit(first_operator="L0.attention", last_operator="L0.moe.merge", max_partitions=2)
    limits = SearchLimits(max_partitions=8, group_seconds=0.0, range_limit=4, lowered=(lowered,))
    for said, expected in ((limits, "L0.attention…L0.moe.merge*2"), (replace(limits, lowered=()), None)):
        plan = plan_samples.plan(stages=1, stage={"overlap": StageOverlap(search_limits=said)})
        rows = dict(stage_rows(plan))
        assert rows.get("fewer parts") == (None if expected is None else [expected])


def test_list_of_a_rank(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([PLAN, "--model", MODEL, "--list", "--rank", "2"]) == 0
    text = capsys.readouterr().out
    assert text == (plan_samples.GOLDEN / "pp2_ep2_rank2.txt").read_text()
    assert parse_list(text)[0].name == "receive.S0>S1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["none.json"],
            "error: none.json: cannot be read: No such file or directory; name a plan made by tools/autotune.py",
        ),
        ([PLAN, "--list"], "error: --list: the list depends on the model's layers; add --model M.json"),
        ([PLAN, "--list", "--model", MODEL, "--rank", "4"], "error: --rank 4: the plan has 4 ranks; name one of them"),
        ([PLAN, "--model", PLAN], f"error: {PLAN} schema_version: unknown key; use one of name, "),
    ],
)
def test_mistakes(tool: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert tool.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1


def test_command_line_without_torch(tmp_path: Path) -> None:
    code = "import runpy, sys; sys.argv = sys.argv[1:]\ntry: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "finally: assert 'torch' not in sys.modules"
    root = TOOL.parents[1]
    done = subprocess.run([sys.executable, "-c", code, TOOL, PLAN], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "bad.json").write_text("{")
    done = subprocess.run(
        [sys.executable, "-c", code, TOOL, tmp_path / "bad.json"], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path / 'bad.json'}: is no JSON")
