"""Signatures of a library's classes and functions, read from its Python sources; nothing of the library is imported.

A name is looked up as Python would: its definition in the module, else what the module imports or assigns under it.
The signature of a class is that of its `__init__`, or of the fields of a dataclass; those of its bases count where it has none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ANYTHING = "*values, **names"
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Library:
    """The sources of one release of a library.

    Args:
        root: the folder that holds its packages.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tree = cache(self._parse)

    def signature(self, path: str) -> str | None:
        """The parameters of `package.module.Name`, or of `package.module.Name.method`; None if there is no such name.

        As in `a, b=1, *rest, c, **more`: without types. What is compiled, or computed at import, is ANYTHING; the method `apply`
        of an autograd function has the parameters of its `forward`.
        """
        module, found = self._split(path)
        if module is None:
            return None
        place = self._definition(module, found[0])
        if place is None:
            return ANYTHING if self._is_bound(module, found[0]) else None
        home, node = place
        for name in found[1:]:
            member = self._member(home, node, "forward" if name == "apply" else name)
            if member is None:
                return ANYTHING if name in _assigned(node) else None
            home, node = member
        if isinstance(node, ast.ClassDef):
            return self._constructor(home, node)
        return _parameters(node.args, is_method=len(found) > 1)

    def mentions(self, text: str, under: str) -> bool:
        """Whether a text stands in a source below a package."""
        return any(text in source.read_text() for source in self._root.joinpath(*under.split(".")).rglob("*.py"))

    def _parse(self, module: str) -> ast.Module | None:
        base = self._root.joinpath(*module.split("."))
        for source in (base / "__init__.py", base.with_suffix(".py")):
            if source.is_file():
                return ast.parse(source.read_text())
        return None

    def _split(self, path: str) -> tuple[str | None, list[str]]:
        """The longest module of a dotted path, and the names in it."""
        words = path.split(".")
        for length in range(len(words) - 1, 0, -1):
            module = ".".join(words[:length])
            if self._tree(module) is not None:
                return module, words[length:]
        return None, []

    def _definition(self, module: str, name: str, depth: int = 0) -> tuple[str, Definition] | None:
        """The module and node of a definition, through imports and assignments."""
        tree = self._tree(module)
        if tree is None or depth > 8:
            return None
        for node in _statements(tree):
            if isinstance(node, Definition) and node.name == name:
                return module, node
        for node in _statements(tree):
            if isinstance(node, ast.ImportFrom):
                source = self._source(module, node)
                for alias in node.names:
                    if (alias.asname or alias.name) == name or alias.name == "*":
                        target = name if alias.name == "*" else alias.name
                        if place := self._definition(source, target, depth + 1):
                            return place
            targets = [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and name in targets:
                return self._definition(module, node.value.id, depth + 1)
        return None

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        """The module that a statement imports from."""
        if not node.level:
            return node.module or ""
        is_package = self._root.joinpath(*module.split("."), "__init__.py").is_file()
        words = module.split(".")
        kept = len(words) - node.level + is_package
        return ".".join([*words[:kept], *([node.module] if node.module else [])])

    def _is_bound(self, module: str, name: str) -> bool:
        """Whether a module assigns a name, or imports it from a compiled library."""
        tree = self._tree(module)
        assert tree is not None
        compiled = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and self._tree(self._source(module, node)) is None
            for alias in node.names
        }
        through = any(
            self._is_bound(source, name)
            for node in _statements(tree)
            if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}
            if self._tree(source := self._source(module, node)) is not None
        )
        return name in _assigned(tree) or name in compiled or through

    def _bases(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        for base in node.bases:
            if isinstance(base, ast.Name) and (place := self._definition(module, base.id)):
                home, definition = place
                if isinstance(definition, ast.ClassDef):
                    yield home, definition

    def _member(self, module: str, node: Definition, name: str) -> tuple[str, Definition] | None:
        """A method of a class or of its bases."""
        for child in node.body:
            if isinstance(child, Definition) and child.name == name:
                return module, child
        bases = self._bases(module, node) if isinstance(node, ast.ClassDef) else iter(())
        return next((member for home, base in bases if (member := self._member(home, base, name))), None)

    def _constructor(self, module: str, node: ast.ClassDef) -> str:
        if _is_dataclass(node):
            return ", ".join(self._fields(module, node).values())
        member = self._member(module, node, "__init__")
        return (
            _parameters(member[1].args, is_method=True)
            if member and isinstance(member[1], ast.FunctionDef)
            else ANYTHING
        )

    def _fields(self, module: str, node: ast.ClassDef) -> dict[str, str]:
        """The fields of a dataclass, those of its bases first."""
        fields: dict[str, str] = {}
        for home, base in self._bases(module, node):
            fields |= self._fields(home, base) if _is_dataclass(base) else {}
        for child in node.body:
            if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                if "init=False" in ast.unparse(child) or "ClassVar" in ast.unparse(child.annotation):
                    continue
                default = f"={ast.unparse(child.value)}" if child.value else ""
                fields[child.target.id] = child.target.id + default
        return fields


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """The statements that run at import: of the module, and of its branches."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, Definition):
            yield from _statements(node)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _assigned(scope: ast.AST) -> set[str]:
    """Names that a module or a class assigns."""
    return {node.id for node in ast.walk(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _parameters(arguments: ast.arguments, is_method: bool) -> str:
    """`a, b=1, *rest, c, **more`, without `self`."""
    bare = ast.arguments(
        posonlyargs=[ast.arg(a.arg) for a in arguments.posonlyargs],
        args=[ast.arg(a.arg) for a in arguments.args],
        vararg=ast.arg(arguments.vararg.arg) if arguments.vararg else None,
        kwonlyargs=[ast.arg(a.arg) for a in arguments.kwonlyargs],
        kw_defaults=arguments.kw_defaults,
        kwarg=ast.arg(arguments.kwarg.arg) if arguments.kwarg else None,
        defaults=arguments.defaults,
    )
    first = bare.args[0].arg if bare.args else ""
    if is_method and first in ("self", "cls", "ctx"):
        bare.args = bare.args[1:]
    return ast.unparse(bare)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a signature.

    Attributes:
        names: all that can be passed by name.
        positional: those that can be passed by position, in order.
        required: those without a default.
        takes_more_values, takes_more_names: whether it ends with `*rest`, with `**more`.
    """

    names: tuple[str, ...]
    positional: tuple[str, ...]
    required: tuple[str, ...]
    takes_more_values: bool
    takes_more_names: bool


def parameters_of(signature: str) -> Parameters:
    """Read a signature as `Library.signature` writes it."""
    node = ast.parse(f"lambda {signature}: 0", mode="eval").body
    assert isinstance(node, ast.Lambda)
    a = node.args
    positional = [x.arg for x in (*a.posonlyargs, *a.args)]
    required = positional[: len(positional) - len(a.defaults)]
    required += [x.arg for x, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default is None]
    by_name = [x.arg for x in (*a.args, *a.kwonlyargs)]
    return Parameters(tuple(by_name), tuple(positional), tuple(required), a.vararg is not None, a.kwarg is not None)
