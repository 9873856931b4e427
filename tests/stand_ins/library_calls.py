"""What megatron-core, which builds our layers and optimizers, takes of Transformer Engine and apex: read from its sources.

- every name that it imports or reads as an attribute of the package;
- every call of such a class or function, also as the base of a class of its own, with the arguments that it passes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tests.stand_ins.library_sources import parameters_of

Packages = tuple[str, ...]
ENGINE: Packages = ("transformer_engine",)
APEX: Packages = ("apex", "amp_C", "fused_weight_gradient_mlp_cuda")
"""The last two are compiled parts of apex."""
EXTENSIONS = "extensions/transformer_engine.py"
"""The module of megatron-core by whose names others call Transformer Engine."""
ELSEWHERE = tuple(
    "post_training inference export ssm distributed/fsdp transformer/custom_layers transformer/heterogeneous models/multimodal "
    "models/T5 models/bert models/vision models/mamba models/retro models/gpt/heterogeneous tensor_parallel/inference_layers.py "
    "transformer/cuda_graphs.py transformer/fsdp_dtensor_checkpoint.py".split()
)
"""Parts of megatron-core that no run of this fork calls: other models, inference, exports, Megatron-FSDP, its own CUDA graphs."""

Sources = Mapping[str, ast.Module]


@dataclass(frozen=True, order=True)
class Call:
    """One call.

    Attributes:
        name: what is called, as `transformer_engine.pytorch.Linear`.
        positional: how many arguments it passes by position.
        keywords: what it may pass by name, under whatever condition of the release.
        is_complete: whether these are all arguments that it passes.
        source: file and line in megatron-core.
    """

    name: str
    source: str
    positional: int
    keywords: frozenset[str]
    is_complete: bool

    def mismatches(self, signature: str) -> list[str]:
        """The arguments that a signature does not take, and those that it requires and the call does not pass."""
        parameters = parameters_of(signature)
        unknown = [] if parameters.takes_more_names else sorted(self.keywords - set(parameters.names))
        many = self.positional > len(parameters.positional) and not parameters.takes_more_values
        passed = {*parameters.positional[: self.positional], *self.keywords}
        missing = [name for name in parameters.required if name not in passed] if self.is_complete else []
        return [*unknown, *(["too many"] if many else []), *(f"without {name}" for name in missing)]


@cache
def core_sources(packages: Packages) -> Sources:
    """The modules of megatron-core that name a library and that a run of this fork may use."""
    spec = find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations)))
    named = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*.py"))}
    texts = {name: path.read_text() for name, path in named.items() if not name.startswith(ELSEWHERE)}
    return {name: ast.parse(text) for name, text in texts.items() if any(package in text for package in packages)}


def imported_names(packages: Packages) -> set[str]:
    """Every name of the libraries that megatron-core reads."""
    names: set[str] = set()
    for tree in core_sources(packages).values():
        aliases = _imports(tree, packages)
        reads = {_resolved(node, aliases) for node in ast.walk(tree) if isinstance(node, (ast.Attribute, ast.Name))}
        names |= {path for path in {*reads, *aliases.values()} if path}
    return {name for name in names if "." in name} - {longer.rpartition(".")[0] for longer in names}


@cache
def calls(packages: Packages) -> list[Call]:
    """Every call of a class or function of the libraries."""
    sources = core_sources(packages)
    exported = _aliases(sources[EXTENSIONS], {}, packages) if EXTENSIONS in sources else {}
    aliases = {source: _aliases(tree, exported, packages) for source, tree in sources.items()}
    return sorted({call for source, tree in sources.items() for call in _calls_of(source, tree, aliases[source])})


def _imports(tree: ast.Module, packages: Packages) -> dict[str, str]:
    """Name in a module -> what it is of a library. Of several imports under one name the first counts."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in packages:
            for alias in node.names:
                aliases.setdefault(alias.asname or alias.name, f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.partition(".")[0]
                if package in packages:
                    aliases.setdefault(alias.asname or package, alias.name if alias.asname else package)
    return aliases


def _aliases(tree: ast.Module, exported: Mapping[str, str], packages: Packages) -> dict[str, str]:
    """The imports of a module, those by way of EXTENSIONS, and names that it gives to what it has imported."""
    aliases = _imports(tree, packages)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("extensions.transformer_engine"):
            aliases |= {a.asname or a.name: exported[a.name] for a in node.names if a.name in exported}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _resolved(node.value, aliases):
            aliases.setdefault(node.targets[0].id, str(_resolved(node.value, aliases)))
    return aliases


def _resolved(node: ast.AST, aliases: Mapping[str, str]) -> str | None:
    """The dotted path of an expression, if it leads into a library."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        before = _resolved(node.value, aliases)
        return f"{before}.{node.attr}" if before else None
    return None


def _calls_of(source: str, tree: ast.Module, aliases: Mapping[str, str]) -> Iterator[Call]:
    # Helpers that collect keywords in a dictionary of such a name.
    defined = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and "kwargs" in node.name)
    helpers = {node.name: _collected(node) for node in defined}
    for base, function in _functions(tree, aliases):
        for node in ast.walk(function):
            if not isinstance(node, ast.Call):
                continue
            called = _resolved(node.func, aliases)
            if base and (text := ast.unparse(node.func)).startswith("super()."):
                called = base + text.removeprefix("super()").removesuffix(".__init__")
            if called:
                stars = any(isinstance(argument, ast.Starred) for argument in node.args)
                is_complete = not stars and all(keyword.arg for keyword in node.keywords)
                keywords = _keywords(node, function, helpers)
                yield Call(called, f"{source}:{node.lineno}", len(node.args) - stars, keywords, is_complete)


def _functions(tree: ast.Module, aliases: Mapping[str, str]) -> Iterator[tuple[str | None, ast.AST]]:
    """Every function with the class of a library that its own class derives from, and the statements outside of functions."""

    def walk(node: ast.AST, base: str | None) -> Iterator[tuple[str | None, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield base, child
            elif isinstance(child, ast.ClassDef):
                bases = [path for expression in child.bases if (path := _resolved(expression, aliases))]
                yield from walk(child, bases[0] if bases else None)
            else:
                yield from walk(child, base)

    return walk(tree, None)


def _keywords(node: ast.Call, function: ast.AST, helpers: Mapping[str, frozenset[str]]) -> frozenset[str]:
    keywords = {keyword.arg for keyword in node.keywords if keyword.arg}
    expanded = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg is None]
    if any("kwargs" in text for text in expanded) and "kwargs" not in _arguments(function):
        keywords |= _collected(function)
        inner = (child.func for child in ast.walk(function) if isinstance(child, ast.Call))
        names = [name.id for name in inner if isinstance(name, ast.Name) and "kwargs" in name.id]
        keywords = keywords.union(*(helpers.get(name, frozenset()) for name in names))
    return frozenset(keywords)


def _arguments(function: ast.AST) -> set[str]:
    """The parameters of a function: what it hands on is no dictionary of its own."""
    return {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}


def _collected(function: ast.AST) -> frozenset[str]:
    """The keys that a function puts into its dictionaries of keyword arguments."""
    keys: set[str] = set()
    for node in ast.walk(function):
        written = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
        if written and "kwargs" in ast.unparse(node.value) and isinstance(node.slice, ast.Constant):
            keys.add(str(node.slice.value))
        target, value = None, None
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.Call) and node.args:
            target, value = node.func, node.args[0]
        if target is not None and isinstance(value, ast.Dict) and "kwargs" in ast.unparse(target):
            keys |= {str(key.value) for key in value.keys if isinstance(key, ast.Constant)}
    return frozenset(keys)
