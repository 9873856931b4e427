"""The pages for readers name what exists: links, headings, programs, and every flag of every command they show."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.training.cli.flags.table import help_text
from moe_overlap.describe.readers.upstream_flags import load_upstream_flags
from tools import write_flag_reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\[[^]]*]\(([^)\s]+)\)")
PROGRAM = re.compile(r"\b(?:pretrain_moe|tools/\w+|tools/\w+/\w+)\.py\b")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
TRAINING = "pretrain_moe.py"

page = pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])


def blocks(text: str) -> Iterator[str]:
    """The commands of all code blocks, a line each; lines that end in a backslash go on."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub writes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(path: Path, text: str) -> list[str]:
    """Links of a page that lead to no file, or to no heading of it."""
    broken = []
    for link in LINK.findall(text):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        headings = (
            re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if target.suffix == ".md" and anchor else []
        )
        if not target.exists() or (anchor and anchor not in map(slug, headings)):
            broken.append(link)
    return broken


@functools.cache
def options(program: str) -> frozenset[str]:
    """All flags that a program's help shows."""
    if program == TRAINING:
        return frozenset(FLAG.findall(help_text()))
    shown = io.StringIO()
    # In this process, where its imports are mostly there. A program without topics prints all of them anyway.
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(shown),
        pytest.MonkeyPatch.context() as given,
        pytest.raises(SystemExit) as ended,
    ):
        given.setattr(sys, "argv", [program, "--help", "all"])
        # A module that a program runs may have been imported by a test.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
        runpy.run_path(str(ROOT / program), run_name="__main__")
    assert not ended.value.code, program
    return frozenset(FLAG.findall(shown.getvalue()))


def unknown_flags(line: str) -> list[str]:
    """Flags behind a program of ours on a command line that the program does not have; those before it are torchrun's."""
    programs = list(PROGRAM.finditer(line))
    if not programs:
        return []
    first = programs[0]
    known = set(options(first[0]))
    if first[0].startswith(("tools/benchmark_", "tools/predict", "tools/autotune")):
        known |= options(TRAINING)  # these hand the flags they do not know on to the job
    words = shlex.split(line[first.end() :], comments=True)
    return [word for word in words if FLAG.fullmatch(word) and word not in known]


@page
def test_links(path: Path) -> None:
    assert broken_links(path, path.read_text()) == []


def test_the_walks_name_what_the_files_define() -> None:
    """`name` in [file](path), or `name` ([file](path)): the file has a function, a class or a field of that name."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(
        r"`(?:\w+\.)?(\w+)`s?\s+(?:in\s+|\()(?:\[[^]]*]\(\.\./([^)]+)\)|`(moe_overlap/[\w/]+\.py)`)", text
    )
    assert len(named) > 40
    lacking = []
    for name, linked, bare in named:
        source = (ROOT / (linked or bare)).read_text()
        if not re.search(rf"^\s*(?:(?:def|class) {name}\b|{name}\s*[:=])", source, re.MULTILINE):
            lacking.append((name, linked or bare))
    assert lacking == []


@page
def test_programs_exist(path: Path) -> None:
    named = {match[0] for match in PROGRAM.finditer(path.read_text())}
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


@page
def test_argument_files_exist(path: Path) -> None:
    named = set(re.findall(r"@(examples/[\w./-]+\.args)", path.read_text()))
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


@page
def test_flags_of_commands_exist(path: Path) -> None:
    assert {line: unknown for line in blocks(path.read_text()) if (unknown := unknown_flags(line))} == {}


@page
def test_flags_in_sentences_exist(path: Path) -> None:
    """A flag in a sentence belongs to training, to a program that the page names, or to upstream, whose runs are predicted."""
    text = path.read_text()
    prose = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^### Removed\n.*?(?=^##)", "", prose, flags=re.MULTILINE | re.DOTALL)
    codes = [
        code for code in re.findall(r"`([^`]+)`", prose) if not code.startswith(("make ", "torchrun --standalone"))
    ]
    unknown = {flag for code in codes for flag in FLAG.findall(code)} - options(TRAINING)
    for program in sorted({match[0] for match in PROGRAM.finditer(text)}):
        if unknown:  # asking a program costs a process
            unknown -= options(program)
    if "tools/predict.py" in text:
        unknown -= load_upstream_flags().keys()
    assert unknown == set()


def test_paths_of_contributing_exist() -> None:
    """The files that CONTRIBUTING.md names as places to edit are there."""
    named = re.findall(r"`((?:moe_overlap|megatron|tests|tools)/[\w./-]+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_what_is_wrong_is_found() -> None:
    text = "[a](docs/none.md) [b](README.md#no-such-heading) [c](https://example.org) [d](docs) [e](README.md#start)"
    assert broken_links(ROOT / "README.md", text) == ["docs/none.md", "README.md#no-such-heading"]
    line = "torchrun --nproc-per-node 2 pretrain_moe.py @a.args --num-layers 2 --no-such-flag"
    assert unknown_flags(line) == ["--no-such-flag"]
    assert list(blocks("```\na \\\n  b\n```\nc\n")) == ["a    b"]


def test_flag_reference_is_current() -> None:
    assert write_flag_reference.page() == write_flag_reference.PAGE.read_text(), "run tools/write_flag_reference.py"


SYMPTOM = re.compile(r"\*\*`([^`]+)`\*\*")
SHORTEST = 8
"""Fragments of a line that are shorter say too little to be looked for."""


def fragments(symptom: str) -> list[str]:
    """The parts of a printed line that the source holds: the line joins subject, rule and fix, with values between them."""
    parts = re.split(r"…|: |; |\?$|^error: |(?<=-size) 1\b", symptom)
    return [part.strip(" ()") for part in parts if len(part.strip(" ()")) >= SHORTEST]


@functools.cache
def sources() -> str:
    """The code of everything that prints, with strings that go on in the next line joined."""
    paths = [path for folder in ("moe_overlap", "megatron/training", "tools") for path in (ROOT / folder).rglob("*.py")]
    text = "\n".join(path.read_text() for path in (*paths, ROOT / "Makefile"))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def unprinted(text: str) -> list[str]:
    """Fragments of the symptoms of a page that no source holds."""
    return [part for line in SYMPTOM.findall(text) for part in fragments(line) if part not in sources()]


def test_symptoms_are_lines_of_the_source() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    assert len(SYMPTOM.findall(text)) > 25
    assert [line for line in SYMPTOM.findall(text) if not fragments(line)] == []
    assert unprinted(text) == []


def test_a_symptom_that_nobody_prints_is_found() -> None:
    assert unprinted("**`--load …: holds no cheque; start one job for each folder`**") == ["holds no cheque"]
