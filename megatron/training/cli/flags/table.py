"""The flags that the dataclasses of `config.py` define, and their `--help`.

A field's annotation gives the flag's value type and choices, its metadata (`config_fields.flag`) all other facts, and the string
under it the help text: no fact about a flag is stated twice.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import math
import textwrap
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.training.cli import config as config_module
from megatron.training.cli import config_fields
from megatron.training.cli.config import Config
from megatron.training.cli.flags.launch import launch_help
from moe_overlap.describe.errors import ConfigError, one_of

ValueKind = Literal["switch", "int", "float", "str", "layers", "pair"]
_KIND_TEXT = {"int": "a whole number", "float": "a number"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One field of the configuration as a flag."""

    group: str
    """The field of Config that holds its dataclass."""
    field: str
    names: tuple[str, ...]
    off: str | None
    """The flag that turns a switch off that is on by default."""
    kind: ValueKind
    choices: tuple[str, ...] | None
    many: bool
    """Whether it takes one or more values."""
    default: Any
    needs: str | None = None
    """A library or device that every value but the default needs."""
    of: str | None = None
    """The field ("group.field") whose setting this is: without effect while that field has its default."""

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
            return tuple(self._value(name, text) for text in texts)
        return self._value(name, texts[0])

    def _value(self, name: str, text: str) -> Any:
        if self.kind == "layers":
            return layer_pattern(name, text)
        if self.kind == "pair":
            return _pair(name, text)
        if self.kind in _KIND_TEXT:
            return _number(name, text, self.kind)
        if self.choices is not None and text not in self.choices:
            near = difflib.get_close_matches(text, self.choices, 9, 0.6) if len(self.choices) > 4 else []
            near.sort(key=lambda choice: not choice.startswith(text[:1]))
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(name, text, "unknown choice", f"{hint}use {one_of(self.choices)}")
        return text


def _number(name: str, text: str, kind: ValueKind) -> int | float:
    """Read a number that 64 bits hold."""
    try:
        value = int(text) if kind == "int" else float(text)
    except ValueError:
        raise ConfigError(name, text or '""', f"must be {_KIND_TEXT[kind]}", "correct the value") from None
    if text.strip().lstrip("+-").lower() in ("nan", "inf", "infinity"):
        raise ConfigError(name, text, "must be finite", "correct the value")
    if not math.isfinite(value) or (kind == "int" and abs(value) >= 2**63):
        raise ConfigError(name, text, f"must be {_KIND_TEXT[kind]} of 64 bits", "correct the value")
    return value


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
    """Read `128,0` or `(128, 0)`."""
    try:
        first, second = (int(part) for part in text.strip().removeprefix("(").removesuffix(")").split(","))
    except ValueError:
        raise ConfigError(name, text, "must be two whole numbers", "write for example 128,0") from None
    return first, second


def layer_pattern(name: str, text: str) -> int | tuple[int, ...]:
    """Read `2`, or a Python list of 0 and 1 made with brackets, `+` and `*`: `([0]*3+[1]*5)`."""
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
    """Evaluate lists of small integers, sums and repetitions; anything else is a ValueError."""
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 10_000:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        first, second = _evaluate(node.left), _evaluate(node.right)
        value = first + second if isinstance(node.op, ast.Add) else first * second
        if isinstance(value, list) and len(value) > 10_000:
            raise ValueError
        return value
    raise ValueError


def flag_texts(flag: Flag, value: Any) -> list[str]:
    """The arguments that set the flag to a value other than its default."""
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
    """The documented name of a field's flag ("group.field")."""
    return next(flag.names[0] for flag in config_flags() if f"{flag.group}.{flag.field}" == path)


# --help

_WIDTH = 120
_INDENT = 4
USAGE = """\
usage: python pretrain_moe.py [--nproc-per-node N] [@FILE] [--model NAME] [flags]
       torchrun --nproc-per-node N pretrain_moe.py [@FILE] [--model NAME] [flags]

Flags have Megatron-LM's names and meanings; @FILE reads flags from a file (comments after #), later flags win.

this command
  --help [TOPIC], -h
    Show the topics and what most runs need; the flags of a topic; or, with all, every flag.
  --dry-run
    Stop before the first step: check the flags, print configuration, layout, parameters, and what this machine lacks.
  --model NAME
    Take the model of a name (the files of examples/models), of a model file, or of a Hugging Face config.json. Flags
    written beside it win.
    A config.json names no sample length: --seq-length is then its number of positions, at most 4096.
  --world-size N
    With --dry-run: number of processes; default the smallest that the parallel sizes allow.
"""


def help_text() -> str:
    """Every flag, grouped by what it configures."""
    docs = field_docs()
    groups = typing.get_type_hints(Config)
    lines = [f"{USAGE}\n{launch_help()}"]
    for group, cls in groups.items():
        lines.append(str(cls.__doc__))
        for flag in config_flags():
            if flag.group == group:
                lines += flag_lines(flag, docs[cls.__name__, flag.field])
        lines.append("")
    return "\n".join(lines).rstrip()


def field_docs() -> dict[tuple[str, str], str]:
    """The string under each field of the configuration, by class and field."""
    files = (Path(str(module.__file__)) for module in (config_module, config_fields))
    bodies = [ast.parse(path.read_text(encoding="utf-8")).body for path in files]
    docs: dict[tuple[str, str], str] = {}
    for cls in (node for body in bodies for node in body if isinstance(node, ast.ClassDef)):
        for field, text in zip(cls.body, cls.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                docs[cls.name, field.target.id] = " ".join(str(text.value.value).split())
    return docs


def flag_lines(flag: Flag, doc: str) -> list[str]:
    """A flag, its value and default, and under it what it does."""
    names = [flag.off] if flag.off is not None else list(flag.names)
    head = "  " + ", ".join(names) + _value_placeholder(flag)
    default = "" if flag.kind == "switch" or flag.default is None else f" (default {_shown(flag.default)})"
    text = f"Turn off: {doc[0].lower()}{doc[1:]}" if flag.off is not None else doc
    if flag.needs is not None:
        text += f" Needs {flag.needs}."
    if len(head) > _WIDTH:
        head = head.replace(",", ", ")
    heads = textwrap.wrap(head, _WIDTH, initial_indent="  ", subsequent_indent=" " * _INDENT)
    return [
        *heads,
        *textwrap.wrap(text + default, _WIDTH, initial_indent=" " * _INDENT, subsequent_indent=" " * _INDENT),
    ]


def _value_placeholder(flag: Flag) -> str:
    if flag.kind == "switch":
        return ""
    value = {"int": "N", "float": "X", "str": "TEXT", "layers": "N", "pair": "N,N"}[flag.kind]
    if flag.choices:
        value = "{" + ",".join(flag.choices) + "}"
    return f" {value} ..." if flag.many else f" {value}"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
