"""The size check: what is too long fails, what is short is only counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_size import FILE_LINES, FUNCTION_LINES, SHORT_LINES, count_sources, oversized


def test_too_long(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text("def f():\n" + "    x = 1\n" * FUNCTION_LINES)
    assert [line.partition("long.py")[2] for line in oversized(path)] == [":1 f: 101 lines, at most 100"]
    path.write_text("x = 1\n" * (FILE_LINES + 1))
    assert [line.partition("long.py")[2] for line in oversized(path)] == [": 601 lines, at most 600"]
    path.write_text("x = 1\n" * FILE_LINES)
    assert oversized(path) == []


def test_short_sources_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = {"a.py": SHORT_LINES, "b.py": SHORT_LINES - 1, "__init__.py": 1, "tests/test_a.py": 1}
    for name, count in lines.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("x = 1\n" * count)
    assert count_sources([Path(name) for name in lines]) == "sources: 2 files, 1 of them under 60 lines"
