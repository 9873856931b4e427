"""The flags that the dataclasses of `config.py` define: names, value types and choices, read from their annotations."""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

from megatron.training.config import Config
from moe_overlap.describe.errors import ConfigError

ValueKind = Literal["switch", "int", "float", "str", "layers", "pair"]
_WHAT = {"int": "a whole number", "float": "a number"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One field of the configuration as a flag."""

    group: str
    """The field of Config it stands in."""
    field: str
    names: tuple[str, ...]
    off: str | None
    """The flag that turns it off, for a switch that is on by default."""
    kind: ValueKind
    choices: tuple[str, ...] | None
    many: bool
    """Takes one or more values."""
    default: Any
    needs: str | None = None
    """What a machine must have for another value than the default."""
    of: str | None = None
    """The field ("group.field") whose setting this is."""

    def value(self, name: str, texts: tuple[str, ...]) -> Any:
        """The field's value.

        Args:
            name: the flag as it was written.
            texts: its values as they were written.
        Raises:
            ConfigError: a value of the wrong type, or none of the choices.
        """
        if self.kind == "switch":
            return name != self.off
        if self.many:
            return tuple(self._one(name, text) for text in texts)
        return self._one(name, texts[0])

    def _one(self, name: str, text: str) -> Any:
        if self.kind == "layers":
            return layer_pattern(name, text)
        if self.kind == "pair":
            return _pair(name, text)
        if self.kind in _WHAT:
            return _number(name, text, self.kind)
        if self.choices is not None and text not in self.choices:
            raise ConfigError(name, text, "unknown choice", f"use {one_of(self.choices)}")
        return text


def _number(name: str, text: str, kind: ValueKind) -> int | float:
    """A number that 64 bits hold."""
    try:
        value = int(text) if kind == "int" else float(text)
    except ValueError:
        raise ConfigError(name, text or '""', f"must be {_WHAT[kind]}", "correct the value") from None
    if not math.isfinite(value) or (kind == "int" and abs(value) >= 2**63):
        raise ConfigError(name, text, f"must be {_WHAT[kind]} of 64 bits", "correct the value")
    return value


def one_of(choices: tuple[str, ...]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


@functools.cache
def config_flags() -> tuple[Flag, ...]:
    """Every flag of the configuration, in the order of its dataclasses."""
    groups = typing.get_type_hints(Config)
    return tuple(flag for group, cls in groups.items() for flag in _flags_of(group, cls))


def _flags_of(group: str, cls: Any) -> list[Flag]:
    hints = typing.get_type_hints(cls)
    flags = []
    for field in dataclasses.fields(cls):
        kind, choices, many = _value_of(hints[field.name])
        names = field.metadata.get("names") or ("--" + field.name.replace("_", "-"),)
        flags.append(
            Flag(
                group=group,
                field=field.name,
                names=names,
                off=field.metadata.get("off"),
                kind=kind,
                choices=choices,
                many=many,
                default=field.default,
                needs=field.metadata.get("needs"),
                of=field.metadata.get("of"),
            )
        )
    return flags


def _value_of(hint: Any) -> tuple[ValueKind, tuple[str, ...] | None, bool]:
    """Value type, choices, and whether there are several values."""
    if hint in (int | tuple[int, ...], int | tuple[int, ...] | None):
        return "layers", None, False
    if hint == tuple[int, int] | None:
        return "pair", None, False
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    many = typing.get_origin(hint) is tuple
    if many:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is Literal:
        return "str", typing.get_args(hint), many
    kinds: dict[Any, ValueKind] = {bool: "switch", int: "int", float: "float", str: "str"}
    return kinds[hint], None, many


def _pair(name: str, text: str) -> tuple[int, int]:
    """`128,0` or `(128, 0)`."""
    try:
        first, second = (int(part) for part in text.strip().removeprefix("(").removesuffix(")").split(","))
    except ValueError:
        raise ConfigError(name, text, "must be two whole numbers", "write for example 128,0") from None
    return first, second


def layer_pattern(name: str, text: str) -> int | tuple[int, ...]:
    """`2`, or a Python list of 0 and 1 made with brackets, `+` and `*`: `([0]*3+[1]*5)`."""
    rule, fix = "must be a whole number or a list of 0 and 1", 'write for example 2 or "([0]*3+[1]*5)"'
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, MemoryError):
        raise ConfigError(name, text, rule, fix) from None
    if isinstance(value, int):
        return value
    if not set(value) <= {0, 1}:
        raise ConfigError(name, text, rule, fix)
    return tuple(value)


def _evaluate(node: ast.expr) -> Any:
    """Lists of small integers, sums and repetitions; anything else is a ValueError."""
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 10_000:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        value = left + right if isinstance(node.op, ast.Add) else left * right
        if isinstance(value, list) and len(value) > 10_000:
            raise ValueError
        return value
    raise ValueError


def flag_texts(flag: Flag, value: Any) -> list[str]:
    """The tokens that set the flag to a value other than its default."""
    if flag.kind == "switch":
        if value:
            return [flag.names[0]]
        assert flag.off is not None
        return [flag.off]
    if flag.kind == "layers" and isinstance(value, tuple):
        return [flag.names[0], "[" + ",".join(map(str, value)) + "]"]
    if flag.kind == "pair":
        return [flag.names[0], ",".join(map(str, value))]
    if flag.many:
        return [flag.names[0], *map(str, value)]
    return [flag.names[0], str(value)]


def spelling(path: str) -> str:
    """The documented flag of a field ("group.field")."""
    return next(flag.names[0] for flag in config_flags() if f"{flag.group}.{flag.field}" == path)
