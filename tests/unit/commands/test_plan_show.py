"""tools/show_plan.py: a plan as text, a list, and one line for every mistake."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moe_overlap.commands import show_plan
from moe_overlap.job import model_of_plan, read_job
from moe_overlap.plan.instructions import format_list
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.overlap import LayerOverlap, LoweredLimit, SearchLimits, StageOverlap
from moe_overlap.plan.plan import Devices, Plan
from moe_overlap.plan.serialize import save_plan
from moe_overlap.report.plan import format_columns, format_plan, stage_rows
from tests.unit.plan import plan_samples
from tests.unit.plan.printed_lists import parse_list

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "show_plan.py"
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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a plan of the tiny Mixtral, with the flags that lie beside it."""
    folder = tmp_path_factory.mktemp("tiny")
    flags = ROOT / "examples/tiny-mixtral-8x7b.args"
    save_plan(read_job([f"@{flags}", "--use-distributed-optimizer"], 4).plan, folder / "plan.json")
    of_model = [
        line for line in flags.read_text().splitlines() if not line.startswith(("--seq", "--micro", "--global"))
    ]
    (folder / "beside.args").write_text("\n".join([*of_model, "--plan plan.json"]))
    return folder


@pytest.mark.parametrize(
    "model",
    [
        ["--model", str(ROOT / "examples/models/tiny-mixtral-8x7b.json")],
        ["--megatron-args", str(ROOT / "examples/tiny-mixtral-8x7b.args")],
        ["--megatron-args", "beside.args"],
    ],
    ids=["model file", "flags", "flags that the plan completes"],
)
def test_a_list_needs_no_more_than_what_a_prediction_is_given(
    tool: ModuleType, tiny: Path, model: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny)
    assert tool.main(["plan.json", "--list", "--rank", "3", *model]) == 0
    job = read_job([f"@{ROOT / 'examples/tiny-mixtral-8x7b.args'}", "--use-distributed-optimizer"], 4)
    assert capsys.readouterr().out == format_list(lower(job.plan, job.model, 3))
    assert tool.main(["plan.json", "--megatron-args", str(ROOT / "examples/tiny-phi-3.5-moe.args")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_layout_of_the_flags_is_not_that_of_the_plan(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A search answers for any number of GPUs, whatever layout the flags of the model say: 32 of them for one replica here."""
    flags, path = str(ROOT / "examples/mixtral-8x7b.args"), tmp_path / "plan.json"
    layout = "--pipeline-model-parallel-size 1 --tensor-model-parallel-size 1 --use-distributed-optimizer".split()
    job = read_job([f"@{flags}", *layout], 8)
    save_plan(job.plan, path)
    for model in (["--megatron-args", flags], ["--model", str(ROOT / "examples/models/mixtral-8x7b.json")]):
        assert tool.main([str(path), "--list", *model]) == 0
        assert capsys.readouterr().out == format_list(lower(job.plan, job.model, 0))
    # The rows of the embedding are padded for the plan's tensor ranks, one, and not for the two of the flags.
    odd = [f"@{flags}", "--vocab-size", "32001"]
    job = read_job([*odd, *layout], 8)
    assert model_of_plan(odd, job.plan, "plan.json") == job.model != read_job(odd, 64).model


def test_a_plan_without_stages_is_one_line(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    save_plan(replace(plan_samples.plan(), stages=()), path)
    assert tool.main([str(path), "--megatron-args", str(ROOT / "examples/mixtral-8x7b.args")]) == 2
    assert capsys.readouterr().err == f"error: {path} stages []: a plan has at least one stage; add a stage\n"


def with_stage(**changes: Any) -> Plan:
    plan = plan_samples.plan(stages=1)
    return replace(plan, stages=(replace(plan.stages[0], **changes),))


def test_a_table_stays_as_wide_as_a_screen() -> None:
    """Layers of sixteen chunks and their mechanisms stood in one cell each: 408 columns for two stages."""
    layers = tuple(LayerOverlap(layer=number, mechanism="partitioned", partitions=2) for number in range(32))
    chunks = tuple((first, first + 1) for first in range(32))
    plan = with_stage(overlap=StageOverlap(layers=layers), chunks=chunks)
    rows = dict(stage_rows(plan))
    assert rows["overlap"] == ["partitioned*2"]
    ranks = tuple(range(3, 800, 50))
    scattered = with_stage(devices=Devices(mesh=(1, len(ranks)), ranks=ranks))
    shown = format_columns(stage_rows(scattered)).replace(",", " ").split()
    assert shown[shown.index("ranks") + 1 :][: len(ranks)] == [str(rank) for rank in ranks]
    text = format_plan(plan)
    assert max(map(len, text.splitlines())) < 80
    shown = " ".join(line[18:].strip() for line in text.splitlines())
    assert " ".join(f"{first}-{last - 1}" for first, last in chunks) in shown
    mixed = (*layers[:-1], replace(layers[-1], mechanism="none", partitions=0))
    plan = with_stage(overlap=StageOverlap(layers=mixed), chunks=chunks)
    assert dict(stage_rows(plan))["overlap"] == ["L0-30:partitioned*2 L31:none"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["none.json"],
            "error: none.json: cannot be read: No such file or directory; name a plan made by tools/autotune.py",
        ),
        ([PLAN, "--list"], "error: --list: the list depends on the model's layers; add --model or --megatron-args"),
        ([PLAN, "--list", "--model", MODEL, "--rank", "4"], "error: --rank 4: the plan has 4 ranks; name one of them"),
        ([PLAN, "--model", PLAN], f"error: --model {PLAN}: has neither flags nor a model_type; give a file "),
        ([PLAN, "--model", "bad.json"], "error: bad.json hidden: unknown key; use one of name, "),
    ],
)
def test_mistakes(
    tool: ModuleType,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text('{"num_layers": 2, "hidden": 8}')
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
