"""Ctrl-C ends every command but training, which has signals of its own, with one line and the status of shells."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_overlap.commands import (
    autotune,
    compare,
    exits,
    import_flags,
    predict,
    preprocess_data,
    profile_cluster,
    show_plan,
)

ROOT = Path(__file__).resolve().parents[3]
ENDS: list[tuple[Callable[..., int], list[str]]] = [
    (predict.main, ["--megatron-args", "none"]),
    (autotune.main, ["--megatron-args", "none", "--output", "none"]),
    (show_plan.main, ["none"]),
    (import_flags.main, ["none"]),
    (preprocess_data.main, ["--input", "none.txt", "--output-prefix", "none"]),
    (profile_cluster.main, ["--output", "none.json"]),
    (compare.compare_losses, ["none", "none"]),
    (compare.compare_traces, ["none", "none"]),
]


def test_the_status_is_said_once() -> None:
    said = []
    for path in sorted([*(ROOT / "moe_overlap").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]):
        numbers = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        said += [path.name for number in numbers if number.value == exits.INTERRUPTED]
    assert said == ["exits.py"]


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("main", "words"), ENDS, ids=lambda value: getattr(value, "__module__", ""))
def test_one_line(
    main: Callable[..., int], words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (predict, "cluster_of"),
        (autotune, "clusters_of"),
        (show_plan, "load_plan"),
        (import_flags, "bounded_text"),
        (preprocess_data, "check_inputs"),
        (profile_cluster, "this_device"),
        (compare, "read_losses"),
        (compare, "read_trace"),
    ):
        monkeypatch.setattr(module, name, interrupt)
    assert main(words) == 130
    said = capsys.readouterr()
    assert said.err.startswith("error: interrupted") and said.err.count("\n") == 1 and said.out == ""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    if main is profile_cluster.main:
        assert main(words) == 130 and capsys.readouterr().err == ""
