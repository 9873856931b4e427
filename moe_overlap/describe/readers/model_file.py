"""A model as flags, read from a file: one of examples/models/*.json, or a Hugging Face config.json. Standard library only.

The file's keys decide which of the two it is: `flags` stand in the former, `model_type` in the latter (`hugging_face.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_json, printable
from moe_overlap.describe.readers.hugging_face import flags_of_config


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFile:
    """The model that a file describes."""

    name: str
    flags: Mapping[str, Any]
    """Names without dashes -> a value, a list of values, or true for a switch."""
    notes: tuple[str, ...]
    """Lines that say where megatron-core computes otherwise than the source of the file."""
    dtype: str | None = None
    """The type of a config.json's weights, as `bfloat16`: the precision of a run where nothing else says one."""
    is_config: bool = False
    """Whether it is a config.json, which says how many positions the model covers and not how long samples are."""

    @property
    def arguments(self) -> list[str]:
        """The flags as arguments of a command line."""
        return [argument for flag, values in flags_with_values(self.flags) for argument in (flag, *values)]


def read_model(path: str, subject: str = "--model", *, is_predicted: bool = False) -> ModelFile:
    """Read the model that a file describes.

    Args:
        path: a JSON file with `flags`, or a config.json with `model_type`.
        subject: the flag that names the file, for errors about the file itself.
        is_predicted: whether the model is only priced: layers that are as large without what nothing here computes become notes.
    Raises:
        ConfigError: the file cannot be read, is of neither kind, or describes what cannot be trained here.
    """
    file = Path(path)
    if file.is_dir():
        raise ConfigError(subject, path, "is a folder", f"give a file, such as {file / 'config.json'}")
    try:
        values = bounded_json(file)
    except Unreadable as error:
        raise ConfigError(subject, path, str(error), error.fix) from None
    if isinstance(values, dict) and "flags" in values:
        return _own(values, path)
    if isinstance(values, dict) and "model_type" in values:
        flags, notes = flags_of_config(values, path, is_predicted)
        dtype = values.get("torch_dtype") or values.get("dtype")
        written = None if dtype is None else str(dtype).removeprefix("torch.")
        name = _name_of_config(values, file)
        return ModelFile(name=name, flags=flags, notes=notes, dtype=written, is_config=True)
    rule = "has neither flags nor a model_type"
    fix = "give a file like examples/models/mixtral-8x7b.json or a Hugging Face config.json"
    raise ConfigError(subject, path, rule, fix)


def flags_with_values(flags: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Each flag as it is written on a command line, with its values; a switch has none."""
    written = []
    for name, value in flags.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        written.append((f"--{name}", [str(each) for each in values]))
    return written


def _own(values: Mapping[str, Any], path: str) -> ModelFile:
    flags, unknown = values["flags"], sorted(set(values) - {"name", "source", "flags"})
    if unknown:
        raise ConfigError(f"{path} {unknown[0]}", "", "unknown field", "a model file has name, source and flags")
    if not isinstance(flags, dict):
        raise ConfigError(f"{path} flags", flags, "must be an object of flag name to value", "correct the file")
    for name, value in flags.items():
        parts = value if isinstance(value, list) else [value]
        if value is not True and not all(isinstance(part, str | int | float) for part in parts):
            raise ConfigError(f"{path} flags.{name}", value, "must be a word, a number or true", "correct the file")
        if any(part is False or (part is True and isinstance(value, list)) for part in parts):
            raise ConfigError(f"{path} flags.{name}", value, "a switch is true", "remove what is off")
    name = values.get("name", Path(path).stem)
    if not isinstance(name, str) or not name.isprintable():
        raise ConfigError(f"{path} name", name, "must be a string without control characters", "correct the file")
    return ModelFile(name=name, flags=flags, notes=())


def _name_of_config(values: Mapping[str, Any], file: Path) -> str:
    """The published name where the file has it, else that of its folder or its own."""
    published = str(values.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    return printable(published) or (file.resolve().parent.name if file.stem == "config" else file.stem)
