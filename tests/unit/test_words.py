"""Locals and parameters are nouns of the field: `overlapped_step`, never `found`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("moe_overlap", "megatron/training", "tools", "pretrain_moe.py")
VAGUE = frozenset(
    (
        "one found made mine here words own given said told beside behind anew whole alone taken kept asked left still"
        " each among away apart further wanted there"
    ).split()
)


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Every name that a source binds: variables, parameters, attributes, functions, and names of `except`, `case` and `as`."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.MatchMapping(rest=str(name))
                | ast.alias(asname=str(name))
            ):
                yield name


def vague_names(source: str) -> list[str]:
    """The bound names of a source that could be about anything."""
    return [name for name in bound_names(ast.parse(source)) if name.lstrip("_") in VAGUE]


def test_no_name_is_vague() -> None:
    """A name says what it holds."""
    paths = [
        path
        for top in SOURCES
        for path in ([ROOT / top] if top.endswith(".py") else sorted((ROOT / top).rglob("*.py")))
    ]
    names = {str(path.relative_to(ROOT)): vague_names(path.read_text(encoding="utf-8")) for path in paths}
    assert len(paths) > 300 and {path: vague for path, vague in names.items() if vague} == {}


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "found: int = 1",
        "found += 1",
        "print(found := 1)",
        "first, (found, *rest) = row",
        "for found in rows: pass",
        "rows = [found for found in values]",
        "rows = {key: found for key, found in values}",
        "with open(path) as found: pass",
        "def price(found): pass",
        "def price(*found): pass",
        "def price(*, found=None): pass",
        "def price(**found): pass",
        "price = lambda found: found",
        "def found(): pass",
        "async def found(): pass",
        "class found: pass",
        "class Step:\n    found: int",
        "step.found = 1",
        "self._found = 1",
        "try: pass\nexcept OSError as found: pass",
        "match step:\n    case [found]: pass",
        "match step:\n    case [*found]: pass",
        "match step:\n    case {'key': 1, **found}: pass",
        "match step:\n    case int() as found: pass",
        "import json as found",
        "from json import loads as found",
    ],
)
def test_every_binding_is_seen(source: str) -> None:
    """The counter sees each way to bind a name."""
    assert len(vague_names(source)) == 1


@pytest.mark.parametrize("source", ["step = found", "print(found)", "founder = step.found", 'rows["found"] = 1'])
def test_use_is_no_binding(source: str) -> None:
    """Names that are only read, longer names and strings are not counted."""
    assert vague_names(source) == []
