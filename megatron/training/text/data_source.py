"""Where a run's text comes from, as the data flags say it: one blend that --split cuts, or a blend for each part. No torch.

Exactly one of these, or none for the built-in corpus:
    --data-path WORDS, --data-args-path FILE (the same words in a file)         one blend
    --train-data-path, --valid-data-path, --test-data-path WORDS                a blend for each part
    --per-split-data-args-path FILE, {"train": [WORDS], "valid": [...], ...}    the same in a JSON file
    --mock-data
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.training.config import DataConfig
from megatron.training.text.data_files import Blend, parse_blend
from moe_overlap.describe.errors import ConfigError

PARTS = ("train", "valid", "test")
ARGS, PER_SPLIT_ARGS = "--data-args-path", "--per-split-data-args-path"


@dataclass(frozen=True, slots=True)
class DataSource:
    """Blends of a run; neither for mock data and the built-in corpus."""

    whole: Blend | None = None
    parts: tuple[Blend | None, Blend | None, Blend | None] | None = None

    @property
    def blends(self) -> tuple[Blend | None, Blend | None, Blend | None]:
        """The blend that train, validation and test come from."""
        return self.parts or (self.whole, self.whole, self.whole)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Every dataset, named once."""
        return tuple(dict.fromkeys(prefix for blend in self.blends if blend for prefix in blend.prefixes))

    def __str__(self) -> str:
        if self.parts is None:
            return _shown(self.whole)
        return ", ".join(f"{name} {_shown(blend)}" for name, blend in zip(PARTS, self.parts, strict=True) if blend)


def _shown(blend: Blend | None) -> str:
    if blend is None:
        return ""
    if blend.weights is None:
        return " ".join(blend.prefixes)
    return " ".join(f"{weight:g} {prefix}" for weight, prefix in zip(blend.weights, blend.prefixes, strict=True))


def check_data_flags(data: DataConfig) -> None:
    """Raises ConfigError where flags name text twice, or a blend is wrong; opens no file."""
    separate = [flag for flag, words in _separate_flags(data) if words is not None]
    named = [
        *(["--mock-data"] if data.mock_data else []),
        *(["--data-path"] if data.data_path is not None else []),
        *([ARGS] if data.data_args_path is not None else []),
        *([PER_SPLIT_ARGS] if data.per_split_data_args_path is not None else []),
        *separate[:1],
    ]
    if len(named) > 1:
        raise ConfigError(named[0], "", f"is set together with {named[1]}", "drop one of them")
    if data.split is not None and (separate or data.per_split_data_args_path is not None):
        raise ConfigError("--split", data.split, f"{named[0]} names the parts already", "drop --split")
    for flag, words in (("--data-path", data.data_path), *_separate_flags(data)):
        if words is not None:
            parse_blend(words, flag)


def data_source(data: DataConfig) -> DataSource:
    """The blends that the flags name, files of arguments included.

    Raises:
        ConfigError: text is named twice, a file of arguments cannot be read, or a blend is wrong.
    """
    check_data_flags(data)
    if data.data_path is not None:
        return DataSource(whole=parse_blend(data.data_path))
    if data.data_args_path is not None:
        return DataSource(whole=parse_blend(_text(ARGS, data.data_args_path).split(), ARGS))
    if data.per_split_data_args_path is not None:
        return _per_split(data.per_split_data_args_path)
    separate = _separate_flags(data)
    if all(words is None for _, words in separate):
        return DataSource()
    train, valid, test = (None if words is None else parse_blend(words, flag) for flag, words in separate)
    return DataSource(parts=(train, valid, test))


def _separate_flags(data: DataConfig) -> tuple[tuple[str, Sequence[str] | None], ...]:
    paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    return tuple((f"--{part}-data-path", words) for part, words in zip(PARTS, paths, strict=True))


def _per_split(path: str) -> DataSource:
    rule, fix = "must be a JSON object", 'write {"train": [WEIGHT, PREFIX, …], "valid": […], "test": […]}'
    try:
        parts = json.loads(_text(PER_SPLIT_ARGS, path))
    except ValueError as error:
        raise ConfigError(PER_SPLIT_ARGS, path, f"{rule} ({error})", fix) from error
    if not isinstance(parts, dict) or not all(isinstance(words, list) for words in parts.values()):
        raise ConfigError(PER_SPLIT_ARGS, path, f"{rule} of lists", fix)
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        raise ConfigError(PER_SPLIT_ARGS, path, f"names the part {unknown[0]!r}", f"use {', '.join(PARTS)}")
    train, valid, test = (
        parse_blend([str(word) for word in parts[part]], PER_SPLIT_ARGS) if parts.get(part) else None for part in PARTS
    )
    return DataSource(parts=(train, valid, test))


def _text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(flag, path, f"cannot be read ({error})", "correct the path") from error
