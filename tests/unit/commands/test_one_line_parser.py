"""Mistakes in the own flags of the tools that predict and tune: one line with the fix, status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_overlap.commands import autotune, predict, profile_cluster, show_plan

TOOLS = {
    "predict": predict.main,
    "autotune": autotune.main,
    "profile_cluster": profile_cluster.main,
    "show_plan": show_plan.main,
}
NEITHER = "this tool or of the training"


@pytest.mark.parametrize(
    ("tool", "words", "message"),
    [
        ("profile_cluster", [], "--output: is missing; add --output C.json"),
        ("show_plan", [], "FILE: is missing; give a plan.json"),
        ("predict", ["--frobnicate", "8"], f"--frobnicate: is no flag of {NEITHER}; see --help all"),
        ("predict", ["--gpus=H100"], f"--gpus: is no flag of {NEITHER}; did you mean --gpu?"),
        (
            "autotune",
            ["--lr", "-1", "--verbos", "--num-layer", "2", "--bf16"],
            f"--verbos, --num-layer: are no flags of {NEITHER}; did you mean --verbose for --verbos or --num-layers for",
        ),
        ("predict", ["job.args"], "job.args: a word that belongs to no flag; quote values with spaces"),
        ("predict", ["job.args", "--bf16"], "job.args: a word that belongs to no flag; quote values with spaces"),
        ("predict", ["-n", "8"], f"-n: is no flag of {NEITHER}; see --help all"),
        ("autotune", ["--output", "x", "--target", "nemo"], "--target: invalid choice: 'nemo'"),
        (
            "autotune",
            ["--output", "x", "--global-batch-size", "many"],
            "--global-batch-size: invalid int value: 'many'",
        ),
        ("predict", ["--gpu"], "--gpu: expected one argument; see --help"),
        (
            "predict",
            ["--megatron-args", "a.args", "--megatron-args", "b.args"],
            "--megatron-args: was given before as a.args; write the other flags behind it",
        ),
        ("profile_cluster", ["--output", "c.json", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
    ],
)
def test_a_mistake_is_one_line(tool: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        TOOLS[tool](words)
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith(f"error: {message}")


def test_a_file_of_flags_is_named_by_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.args").write_text("--bf16")
    with pytest.raises(SystemExit):
        predict.main([str(tmp_path / "job.args")])
    assert capsys.readouterr().err.endswith(f"write --megatron-args {tmp_path / 'job.args'} for the flags in it\n")
    with pytest.raises(SystemExit):
        predict.main(["@job.args"])
    assert capsys.readouterr().err.endswith("write --megatron-args job.args for the flags in it\n")


def test_a_value_of_a_training_flag_may_begin_with_a_dash() -> None:
    words = ["--window-size", "-1,0", "--lr", "-1e-4", "--save", "-x", "--bf16"]
    assert predict._parser().parse_args(["--gpu", "H100", *words]).training_flags == words
