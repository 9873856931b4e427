"""The text of `--help`: the dataclasses of `config.py`, with the docstring under each field."""

from __future__ import annotations

import ast
import textwrap
import typing
from pathlib import Path
from typing import Any

from megatron.training import config as config_module
from megatron.training.config import Config
from megatron.training.flags import config_attention, config_gpu
from megatron.training.flags.table import Flag, config_flags

_WIDTH = 120
_INDENT = 4
_USAGE = """\
usage: torchrun --nproc-per-node N pretrain_moe.py [@FILE] [--model FILE] [flags]

Flags have Megatron-LM's names and meanings; @FILE reads flags from a file (comments after #), later flags win.

this command
  --help, -h
    Show this text.
  --dry-run
    Stop before the first step: check the flags, print configuration, layout, parameters, and what this machine lacks.
  --model FILE
    The model of a file: examples/models/*.json, or a Hugging Face config.json. Its flags come first: those written beside
    it win. A config.json says no length of samples: --seq-length is its positions, 4096 at most.
  --world-size N
    With --dry-run: number of processes; default the smallest that the parallel sizes allow.
"""


def help_text() -> str:
    """Every flag, grouped by what it configures."""
    docs = field_docs()
    groups = typing.get_type_hints(Config)
    lines = [_USAGE]
    for group, cls in groups.items():
        lines.append(str(cls.__doc__))
        for flag in config_flags():
            if flag.group == group:
                lines += _flag_lines(flag, docs[cls.__name__, flag.field])
        lines.append("")
    return "\n".join(lines).rstrip()


def field_docs() -> dict[tuple[str, str], str]:
    """The string under each field of the configuration, by class and field."""
    files = (Path(str(module.__file__)) for module in (config_module, config_attention, config_gpu))
    bodies = [ast.parse(path.read_text(encoding="utf-8")).body for path in files]
    docs: dict[tuple[str, str], str] = {}
    for cls in (node for body in bodies for node in body if isinstance(node, ast.ClassDef)):
        for field, text in zip(cls.body, cls.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                docs[cls.name, field.target.id] = " ".join(str(text.value.value).split())
    return docs


def _flag_lines(flag: Flag, doc: str) -> list[str]:
    names = [flag.off] if flag.off is not None else list(flag.names)
    head = "  " + ", ".join(names) + _value_words(flag)
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


def _value_words(flag: Flag) -> str:
    if flag.kind == "switch":
        return ""
    value = {"int": "N", "float": "X", "str": "TEXT", "layers": "N", "pair": "N,N"}[flag.kind]
    if flag.choices:
        value = "{" + ",".join(flag.choices) + "}"
    return f" {value} ..." if flag.many else f" {value}"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
