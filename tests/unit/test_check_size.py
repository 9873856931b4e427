"""The size check: what is too long, or a folder over its budget, fails; what is short is only counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_size import (
    FILE_LINES,
    FUNCTION_LINES,
    SHORT_LINES,
    SLACK_LINES,
    Size,
    count_sources,
    over_budget,
    oversized,
    unclear_subjects,
)


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


def test_a_folder_over_its_budget_fails_and_so_does_a_budget_that_is_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [Path("src/a.py"), Path("src/inner/b.py"), Path("src/__init__.py"), Path("srcs/c.py")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n" * 200)
    assert over_budget(paths, {"src": Size(2, 400)}) == []
    assert over_budget(paths, {"src": Size(2, 400 + SLACK_LINES)}) == []
    assert over_budget(paths, {"src": Size(2, 399)})[0].startswith("src: 2 files, 400 lines, at most 2 and 399: remove")
    assert over_budget(paths, {"src": Size(1, 400)})[0].startswith("src: 2 files, 400 lines, at most 1 and 400: remove")
    for loose in (Size(3, 400), Size(2, 401 + SLACK_LINES)):
        assert over_budget(paths, {"src": loose}) == ["src: 2 files, 400 lines: lower BUDGET in check_size.py to that"]


@pytest.mark.parametrize(
    ("subject", "is_clear"),
    [
        ("search: prune layouts by host launches", True),
        ("data, captures: no pickles; a file must match its request", True),
        ("tools/autotune.py: one table of spaces", True),
        ("search: " + "x" * 64, True),
        ("search: " + "x" * 65, False),
        ("Search: prune layouts", False),
        ("prune layouts by host launches", False),
        ("search:", False),
    ],
)
def test_subjects_name_an_area_and_are_short(subject: str, is_clear: bool) -> None:
    assert (unclear_subjects([subject]) == []) == is_clear
