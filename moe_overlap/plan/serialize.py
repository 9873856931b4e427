"""Frozen dataclasses to JSON and back, exactly.

The dataclass is the schema: an unknown or missing key, or a wrong type, is an error; optional fields are marked in their metadata
(`MAY_BE_MISSING`). A file is written under a temporary name and renamed, so it is complete or absent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import types
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import MOST_JSON_BYTES, Unreadable, bounded_text, new_file, plain_json
from moe_overlap.plan.plan import SCHEMA_VERSION, Plan

LINE_WIDTH = 120
Record = TypeVar("Record")


def to_json(plan: Plan) -> str:
    """A plan as JSON text; the same plan always gives the same bytes."""
    return format_json(as_values(plan)) + "\n"


def from_json(text: str, source: str = "plan.json") -> Plan:
    """The plan of a JSON text. Checks the schema; `validate_plan` checks the invariants.

    Args:
        source: the file of the text, for errors.
    Raises:
        ConfigError: `plain_json` refuses the text, or it has another schema version or another form.
    """
    try:
        values = plain_json(text, finite=False)  # `read_value` refuses non-finite numbers and names the field.
    except Unreadable as error:
        raise ConfigError(source, "", str(error), "write the file again") from error
    if not isinstance(values, dict):
        raise ConfigError(source, "", "must be a JSON object", "write a plan with tools/autotune.py")
    version = values.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        shown = "missing" if version is None else json.dumps(version)
        raise ConfigError(
            f"{source} schema_version", shown, f"this release reads version {SCHEMA_VERSION}", "write the plan again"
        )
    return read_record(Plan, values, source)


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan from a file; ConfigError names the file and the field."""
    name = os.fspath(path)
    try:
        text = bounded_text(path, MOST_JSON_BYTES)
    except Unreadable as error:
        raise ConfigError(name, "", str(error), "name a plan made by tools/autotune.py") from error
    return from_json(text, name)


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan; an existing file is replaced atomically.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with new_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.write(to_json(plan))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(os.fspath(path), "", f"cannot be written: {error.strerror}", "name another place") from error


def as_values(value: Any) -> Any:
    """Dataclasses, tuples and dictionaries as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {
            field.name: as_values(item)
            for field, item in values
            if not (field.metadata.get("may_be_missing", False) and item == field.default)
        }
    if isinstance(value, tuple):
        return [as_values(item) for item in value]
    if isinstance(value, dict):
        return {key: as_values(item) for key, item in value.items()}
    return value


def content_sha256(content: Any) -> str:
    """Hash of a JSON value, independent of the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def format_json(value: Any, indent: int = 0, used: int = 0) -> str:
    """JSON text in which every value that fits on one line is written on one line.

    Args:
        used: characters of the line before the value.
    """
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not isinstance(value, dict | list) or len(flat) + used <= LINE_WIDTH or not value:
        return flat
    inner = " " * (indent + 2)
    if isinstance(value, dict):
        heads = [json.dumps(key, ensure_ascii=False) + ": " for key in value]
        lines = [h + format_json(v, indent + 2, len(inner + h) + 1) for h, v in zip(heads, value.values(), strict=True)]
        return "{\n" + ",\n".join(inner + line for line in lines) + "\n" + " " * indent + "}"
    lines = [format_json(item, indent + 2, len(inner) + 1) for item in value]
    return "[\n" + ",\n".join(inner + line for line in lines) + "\n" + " " * indent + "]"


def read_record(kind: type[Record], values: Any, source: str, path: str = "") -> Record:
    """Build a dataclass from JSON values; a field that already holds its dataclass is kept.

    Args:
        kind: a dataclass of str, int, float, bool, None, Literal, tuple, dict and dataclasses.
        source: the file, for errors.
        path: position in the file, such as `stages[1].offload`.
    Raises:
        ConfigError: an unknown or missing key, or a value of another type; the subject is source and path.
    """
    subject = _subject(source, path)
    if not isinstance(values, dict):
        raise ConfigError(subject, _short(values), "must be an object", f"give the fields of {kind.__name__}")
    hints, needed = _schema(kind)  # type: ignore[arg-type]
    for key in values:
        if key not in hints:
            raise ConfigError(_subject(source, _join(path, key)), "", "unknown key", f"use one of {', '.join(hints)}")
    for name in needed:
        if name not in values:
            raise ConfigError(_subject(source, _join(path, name)), "", "is missing", f"add {name}")
    return kind(**{name: read_value(hints[name], value, source, _join(path, name)) for name, value in values.items()})


@cache
def _schema(kind: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Field name -> type of a dataclass, and the names of the required fields."""
    types_by_name, fields = get_type_hints(kind), dataclasses.fields(kind)
    needed = tuple(field.name for field in fields if not field.metadata.get("may_be_missing", False))
    return {field.name: types_by_name[field.name] for field in fields}, needed


def read_value(hint: Any, value: Any, source: str, path: str = "") -> Any:
    """One value of a declared type. Arguments and errors as of `read_record`."""
    if hint in SCALARS:
        return _read_scalar(hint, value, source, path)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if type(value) is hint else read_record(hint, value, source, path)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (other,) = (argument for argument in arguments if argument is not type(None))
        return read_value(other, value, source, path)
    if origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
        raise ConfigError(_subject(source, path), _short(value), "unknown choice", f"use one of {', '.join(arguments)}")
    if origin is tuple:
        return _read_tuple(arguments, value, source, path)
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(_subject(source, path), _short(value), "must be an object", "write {…}")
        for key in value:
            _read_scalar(str, key, source, path)
        return {key: read_value(arguments[1], item, source, f'{path}["{key}"]') for key, item in value.items()}
    return _read_scalar(hint, value, source, path)


def _read_tuple(arguments: tuple[Any, ...], value: Any, source: str, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ConfigError(_subject(source, path), _short(value), "must be a list", "write […]")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(arguments) != len(value):
        raise ConfigError(
            _subject(source, path), _short(value), f"must have {len(arguments)} entries", f"give {len(arguments)}"
        )
    if value and arguments[0] in SCALARS and arguments[0] is not float and len(set(arguments)) == 1:
        fits = SCALARS[arguments[0]][1]
        if all(map(fits, value)):
            return tuple(value)  # Fast path: no path per entry, which only errors need.
    items = zip(arguments, value, strict=True)
    return tuple(read_value(hint, item, source, f"{path}[{i}]") for i, (hint, item) in enumerate(items))


SCALARS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    float: (
        "a finite number",
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
    ),
    str: ("a string without control characters", lambda value: isinstance(value, str) and value.isprintable()),
}
"""Type -> its name in errors, and whether a JSON value has it."""


def _read_scalar(hint: Any, value: Any, source: str, path: str) -> Any:
    what, fits = SCALARS[hint]
    if not fits(value):
        raise ConfigError(_subject(source, path), _short(value), f"must be {what}", f"write {what}")
    return float(value) if hint is float else value


def _subject(source: str, path: str) -> str:
    return f"{source} {path}" if path else source


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:59] + "…"
