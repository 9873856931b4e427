"""A model file as flags: one of examples/models/*.json, or a Hugging Face config.json. Standard library only.

The key `flags` identifies the former, `model_type` the latter (`hugging_face.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_json, printable
from moe_overlap.describe.readers.hugging_face import flags_of_config
from moe_overlap.describe.shipped import model_path


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFile:
    """The model of a file."""

    name: str
    flags: Mapping[str, Any]
    """Names without dashes -> a value, a list of values, or true for a switch."""
    notes: tuple[str, ...]
    """Lines on differences between megatron-core's computation and that of the file's source."""
    dtype: str | None = None
    """The type of a config.json's weights, such as `bfloat16`: the default precision of a run."""
    is_config: bool = False
    """Whether it is a config.json, which has the number of positions of the model but not the length of samples."""

    @property
    def arguments(self) -> list[str]:
        """The flags as command-line arguments."""
        return [argument for flag, values in flags_with_values(self.flags) for argument in (flag, *values)]


def read_model(path: str, subject: str = "--model", *, is_predicted: bool = False) -> ModelFile:
    """Read the model of a file.

    Args:
        path: a JSON file with `flags`, a config.json with `model_type`, or the name of a shipped model.
        subject: the flag with the path, for errors about the file itself.
        is_predicted: whether the model is only predicted, not trained: features that megatron-core lacks but that hardly change
            the cost of a layer then become notes instead of errors.
    Raises:
        ConfigError: the file cannot be read, has neither key, or describes a model that this fork cannot train.
    """
    file = model_path(path, subject)
    if file.is_dir():
        raise ConfigError(subject, path, "is a folder", f"give a file, such as {file / 'config.json'}")
    try:
        values = bounded_json(file, finite=False)
    except Unreadable as error:
        raise ConfigError(subject, path, str(error), error.fix) from None
    if isinstance(values, dict) and "flags" in values:
        return _read_model(values, path)
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
    """Each flag with its values as command-line arguments; a switch has no values."""
    written = []
    for name, value in flags.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        written.append((f"--{name}", [str(item) for item in values]))
    return written


def _read_model(values: Mapping[str, Any], path: str) -> ModelFile:
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
    """The published name in the file; without one, the name of the folder (for config.json) or of the file."""
    published = str(values.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    return printable(published) or (file.resolve().parent.name if file.stem == "config" else file.stem)
