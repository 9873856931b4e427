"""`complete.json`, the completion mark of a checkpoint: its schema, its version and its checksum. No torch.

    {"format": 2, "step": 300, "order": 3, "files": {NAME: [BYTES, CRC-32], ...}, ..., "checksum": SHA-256}

The checksum covers every other entry, so that a flipped bit in the number of steps, in a schedule or in a flag is detected.
Format 1 has none; its entries are checked by the schema only. An entry that no version writes is an error in both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moe_overlap.describe.files import Unreadable, bounded_bytes, plain_json, printable

MARK = "complete.json"
FORMAT = 2
READABLE = (1, 2)
CHECKSUM = "checksum"
_REQUIRED = ("format", "step", "order", "files")
RESUMABLE = ("progress", "fingerprint", "layout", "scheduler", "optimizer", "random_states")
"""Entries without which a run cannot continue; `arguments` and `versions` are for information."""
_LARGEST = 1 << 62

Check = Callable[[Any], bool]


class Damaged(Exception):
    """A completion mark with other content than a save writes; the message is a phrase that follows its name."""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_flag_value(value: Any) -> bool:
    is_scalar = value is None or type(value) in (str, bool, int, float)
    return is_scalar or (type(value) is list and all(type(item) in (str, bool, int, float) for item in value))


def _table(of_value: Check, keys: tuple[str, ...] = ()) -> Check:
    """A check for dictionaries: only these keys, if any are given, with values of one kind."""

    def check(value: Any) -> bool:
        if type(value) is not dict or (keys and set(value) - set(keys)):
            return False
        return all(of_value(entry) for entry in value.values())

    return check


def _is_file(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and all(_is_count(number) for number in value)


def _are_files(value: Any) -> bool:
    if type(value) is not dict or not all(map(_is_file, value.values())):
        return False
    return all(name and name not in (".", "..", MARK) and "/" not in name and "\0" not in name for name in value)


def _is_optimizer(value: Any) -> bool:
    if value is None:
        return True
    if type(value) is not dict or not {"name", "precision", "steps"} <= value.keys() <= {*_OPTIMIZER}:
        return False
    return all(check(value[key]) for key, check in _OPTIMIZER.items() if key in value)


def _is_run(value: Any) -> bool:
    if type(value) is not dict or not value.keys() <= {"samples_per_step", "data", "order"}:
        return False
    return _is_count(value.get("samples_per_step", 1)) and all(
        _is_text(value.get(key, "")) for key in ("data", "order")
    )


_OPTIMIZER: dict[str, Check] = {
    "name": _is_text,
    "precision": _is_text,
    "steps": _is_count,
    "scaler": lambda value: value is None or _table(_is_number)(value),
}
_SCHEMA: dict[str, Check] = {
    "format": lambda value: type(value) is int,
    "step": _is_count,
    "order": lambda value: _is_count(value) and value >= 1,
    "files": _are_files,
    "progress": _table(_is_count, ("iteration", "skipped", "train_samples", "valid_samples")),
    "fingerprint": _table(_is_flag_value),
    "arguments": lambda value: type(value) is list and all(map(_is_text, value)),
    "run": _is_run,
    "layout": _table(lambda size: _is_count(size) and size >= 1),
    "scheduler": _table(lambda value: value is None or _is_number(value) or _is_text(value)),
    "optimizer": _is_optimizer,
    "random_states": lambda value: type(value) is bool,
    "versions": _table(_is_text),
}
"""Entry -> check of its values."""


def mark_text(content: Mapping[str, Any]) -> str:
    """The text of a completion mark.

    Args:
        content: every entry but format and checksum.
    """
    mark = {"format": FORMAT, **content}
    return json.dumps({**mark, CHECKSUM: _checksum(mark)}, indent=1, allow_nan=False) + "\n"


def read_mark(folder: Path) -> dict[str, Any] | None:
    """The completion mark of a folder, checked; None if there is none, or a truncated one.

    Raises:
        Damaged: the mark exists, but no save wrote it so.
    """
    path = folder / MARK
    if not path.is_file():
        return None
    try:
        content = bounded_bytes(path)
        # A mark has several lines, and the last one closes it.
        if not content.rstrip().endswith(b"}"):
            return None
        mark = plain_json(content)
    except Unreadable as error:
        raise Damaged(str(error)) from None
    if type(mark) is not dict or not set(_REQUIRED) <= mark.keys():
        raise Damaged("lacks entries that every save writes")
    _check(mark, folder.name)
    return mark


def _check(mark: dict[str, Any], folder_name: str) -> None:
    written = mark["format"]
    if written not in READABLE or type(written) is not int:
        # Another version may write other entries: `choose` reports that this version does not read it.
        if type(written) is int and written > FORMAT and _is_count(mark["order"]) and _is_count(mark["step"]):
            return
        raise Damaged("names no format of ours")
    if written == FORMAT and mark.pop(CHECKSUM, None) != _checksum(mark):
        raise Damaged("is not what was written: its checksum differs")
    for key, value in mark.items():
        if key not in _SCHEMA:
            raise Damaged(f"holds {printable(key)}, which no save writes")
        if not _SCHEMA[key](value):
            raise Damaged(f"holds a value of {key} that no save writes")
    iteration = mark.get("progress", {}).get("iteration", mark["step"])
    if iteration != mark["step"]:
        raise Damaged(f"is of step {mark['step']} and of step {iteration}")
    digits = folder_name.lstrip(".").removeprefix("replaced-").removeprefix("step-").partition("-")[0]
    if digits.isdigit() and int(digits) != mark["step"]:
        raise Damaged(f"is of step {mark['step']}, its folder of step {int(digits)}")


def _checksum(mark: Mapping[str, Any]) -> str:
    text = json.dumps({key: value for key, value in mark.items() if key != CHECKSUM}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
