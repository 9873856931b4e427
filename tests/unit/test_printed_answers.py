"""The answers in docs/answer.md are what its commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from moe_overlap.commands.predict import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "answer.md"
COMMAND = re.compile(r"(?:`|tools/predict\.py )(--megatron-args [^`\n]*)")
BLOCK = re.compile(r"```\n(.*?)```", re.DOTALL)
LABEL = re.compile(r"\bline\(\s*\"([a-z][a-z -]*)\"")
NAMED = re.compile(r"(plan|step|speed|training|memory|waiting|beware|try next) +")


def printed_blocks() -> list[tuple[str, list[str]]]:
    """The arguments of each command of the page, and the lines of its answer that the page shows."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = []
    for block in BLOCK.finditer(text):
        lines = block[1].splitlines()
        if all(NAMED.match(line) for line in lines):
            blocks.append((COMMAND.findall(text[: block.start()])[-1], lines))
    return blocks


def test_every_answer_of_the_page_has_a_command() -> None:
    assert len(printed_blocks()) == 3
    assert len({command for command, _ in printed_blocks()}) == 3


def test_the_page_explains_every_line() -> None:
    """Each label that a report writes is in the first column of a table."""
    reports = [path.read_text(encoding="utf-8") for path in (ROOT / "moe_overlap" / "report").glob("*.py")]
    labels = {label for text in reports for label in LABEL.findall(text)}
    rows = re.findall(r"^\| ([a-z ,-]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    explained = {label for row in rows for label in row.split(", ")} - {"line"}
    assert len(labels) > 20 and labels - explained == set()
    assert [label for label in explained if f'"{label}' not in "".join(reports)] == []


@pytest.mark.slow
@pytest.mark.parametrize("command, lines", printed_blocks(), ids=["mixtral", "qwen3", "deepseek"])
def test_the_page_shows_what_the_command_prints(
    command: str, lines: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)) == 0
    answer = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line not in answer] == [], "\n".join(answer)
