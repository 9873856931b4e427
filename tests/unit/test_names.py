"""Names of operators, buffers and spans are taken apart in two files alone; everything else asks their typed forms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_overlap.plan.instructions import DATA, EXPERT, INSIDE, PIPELINE, TO_DEVICE, TO_HOST, BufferRole, Home
from moe_overlap.plan.operators import Copied, OperatorKind, Phase

ROOT = Path(__file__).resolve().parents[2]
HOMES = ("moe_overlap/plan/operators.py", "moe_overlap/plan/instructions.py")
FOLDERS = (
    *(
        "moe_overlap/plan",
        "moe_overlap/runtime",
        "moe_overlap/report",
        "moe_overlap/plan_search",
        "moe_overlap/commands",
        "tools",
    ),
    *("moe_overlap/tuner/cost", "moe_overlap/tuner/search", "moe_overlap/tuner/calibrate"),
)
TAKES_APART = {
    *("startswith", "endswith", "partition", "rpartition", "removeprefix", "removesuffix"),
    *("split", "rsplit", "index", "rindex", "find", "rfind", "strip", "lstrip", "rstrip"),
}
EXPRESSIONS = {"match", "search", "fullmatch", "sub", "split", "findall", "finditer"}
NAMED = {"name", "channel"}
"""Attributes of instructions, drafts and spans that hold a name."""
VARIABLES = {"buffer", "slot", "operator", "gradient", "stem"}
OTHER_NAMES = {"path", "variant"}
"""Variables whose `name` is that of a file or of a benchmark's variant."""
CHANNELS = {EXPERT, DATA, PIPELINE, *INSIDE, TO_DEVICE, TO_HOST}
RECORDS = {"begin", "background"}
WORDS = {
    word
    for text in (*OperatorKind, *Phase, *Copied, *BufferRole, *Home)
    for word in text.split(".")
    if word not in ("", "project", "tokens", "labels", "norm", "moe", "weights", "embedding", "head")
} | {"p", "m", "L", "S"}


def names_taken_apart(source: str) -> Iterator[int]:
    """Lines on which a name is taken apart: by what it is called on, or by the words that are looked for."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        is_expression = isinstance(owner, ast.Name) and owner.id == "re" and node.func.attr in EXPRESSIONS
        subjects = node.args if is_expression else [owner] if node.func.attr in TAKES_APART else []
        constants = [] if is_expression else [n for a in node.args for n in ast.walk(a) if isinstance(n, ast.Constant)]
        sought = [str(constant.value) for constant in constants]
        if any(map(is_name, subjects)) or (subjects and any(is_word(text) for text in sought)):
            yield node.lineno


def is_name(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute) and node.attr in NAMED:
        return not (isinstance(node.value, ast.Name) and node.value.id in OTHER_NAMES)
    return isinstance(node, ast.Name) and node.id in VARIABLES


def is_word(text: str) -> bool:
    """Whether a text is a beginning or an end of names: `send.`, `.backward`, `gradient.`, `.p`."""
    words = [word for word in text.split(".") if word]
    return text != "." and "." in text and bool(words) and all(word in WORDS for word in words)


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_are_taken_apart_in_two_files_alone(folder: str) -> None:
    files = [path for path in sorted((ROOT / folder).rglob("*.py")) if str(path.relative_to(ROOT)) not in HOMES]
    assert files or folder == "moe_overlap/report"
    found = {str(path.relative_to(ROOT)): list(names_taken_apart(path.read_text())) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_names_are_taken_apart_in_no_file_beside_the_folders() -> None:
    found = {path.name: list(names_taken_apart(path.read_text())) for path in (ROOT / "moe_overlap").glob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "i.name.startswith('receive.')",
        "draft.name.endswith(('.backward', '.recompute'))",
        "span.name.partition('.')[0]",
        "name.removesuffix('.dW')",
        "name.startswith('gradient.')",
        "i.channel.partition('.')[0]",
        "buffer.rpartition('.p')",
        "re.sub(r'x', '', buffer)",
        "re.search('p', i.name)",
        "name.split('saved.')[1]",
        "instruction.name.removeprefix(PREFIX)",
    ],
)
def test_the_rule_can_be_broken(line: str) -> None:
    assert list(names_taken_apart(f"import re\n{line}")) == [2]


@pytest.mark.parametrize(
    "line", ["path.name.startswith('bed.')", "text.split('.')", "word.startswith('--')", "i.name == 'x'"]
)
def test_what_the_rule_allows(line: str) -> None:
    assert not list(names_taken_apart(line))


def channels_written_out(source: str) -> Iterator[int]:
    """Lines on which a recorder is handed, or a channel is compared with, the text of a channel in place of its constant."""
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in RECORDS:
            parts = node.args[1:]
        elif isinstance(node, ast.Compare) and any(map(is_channel, (node.left, *node.comparators))):
            parts = [node.left, *node.comparators]
        constants = [inner for part in parts for inner in ast.walk(part) if isinstance(inner, ast.Constant)]
        if any(constant.value in CHANNELS for constant in constants):
            yield node.lineno


def is_channel(node: ast.expr) -> bool:
    return "channel" in (getattr(node, "attr", ""), getattr(node, "id", ""))


@pytest.mark.parametrize("folder", FOLDERS)
def test_channels_are_written_as_their_constants(folder: str) -> None:
    found = {path.name: list(channels_written_out(path.read_text())) for path in (ROOT / folder).rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_bindings_are_named_in_a_dictionary() -> None:
    """No attribute of the executor is looked up by a name that is put together."""
    for path in sorted((ROOT / "moe_overlap/runtime/executor").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
                assert isinstance(node.args[1], ast.Constant), f"{path.name}:{node.lineno}"
