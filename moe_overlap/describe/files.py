"""Safe reading of untrusted files: bounded size, plain JSON only, every failure a phrase for an error; and writing of new files.

A path from a user may be a device without end, a pipe without a writer, or a file larger than the memory; its JSON may nest too
deeply, or hold a number of a million digits, a duplicate key or `NaN`. All of these raise `Unreadable`.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import secrets
import stat
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20
"""Largest text file that is read into memory, in bytes."""
MOST_JSON_BYTES = 8 << 20
"""Largest JSON file that is read into memory, in bytes; its objects take about ten times as much memory."""
MOST_DEPTH = 200
MOST_DIGITS = 300
MOST_WHOLE_DIGITS = 9
"""Most digits of a number in an argument or a name; Python itself refuses thousands."""
_CHUNK_BYTES = 1 << 24

Checksums = dict[str, tuple[int, int]]
"""File name -> bytes, CRC-32."""
MOST_VALUES = 4_000_000
"""Most commas and opening brackets of a JSON text; Python's objects for as many values take about 400 MB."""


class Unreadable(Exception):
    """A file that cannot or must not be read; the message is a phrase that follows the file's name."""

    @property
    def fix(self) -> str:
        """The fix for the error: correct the path if it is wrong, otherwise the file."""
        named_wrongly = str(self).startswith("cannot be read: ") and not str(self).endswith("text")
        return "correct the path" if named_wrongly else "correct the file"


def bounded_bytes(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a regular file.

    Raises:
        Unreadable: there is no such file, it is no regular file, or it is larger than `most_bytes`.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for its writer; for a regular file the flag has no effect.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise Unreadable(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        about = os.fstat(descriptor)
        if stat.S_ISDIR(about.st_mode):
            raise Unreadable("cannot be read: Is a directory")
        if not stat.S_ISREG(about.st_mode):
            raise Unreadable("is no regular file")
        if about.st_size > most_bytes:
            raise Unreadable(f"is too large: {about.st_size} bytes, at most {most_bytes} are read")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if content is None:
        raise Unreadable("is no regular file")  # Some files of /proc claim to be regular but wait like a pipe.
    if len(content) > most_bytes:
        raise Unreadable(f"is too large: more than {most_bytes} bytes")
    return content


def bounded_text(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> str:
    """The content of a regular file in UTF-8.

    Raises:
        Unreadable: as in `bounded_bytes`, or the file is no text.
    """
    return _text(bounded_bytes(path, most_bytes))


def bounded_json(path: str | os.PathLike[str], most_bytes: int = MOST_JSON_BYTES, *, finite: bool = True) -> Any:
    """The value of a JSON file.

    Args:
        finite: refuse NaN and infinity; with False the caller checks the numbers and names the field.
    Raises:
        Unreadable: as in `bounded_bytes` and `plain_json`.
    """
    return plain_json(_text(bounded_bytes(path, most_bytes)), finite=finite)


def plain_json(text: str | bytes, *, finite: bool = True) -> Any:
    """The value of a JSON text with finite numbers, unique keys and at most MOST_DEPTH levels.

    Raises:
        Unreadable: the text is no JSON, or violates one of these conditions.
    """
    if isinstance(text, bytes):
        text = _text(text)
    if text.count(",") + text.count("[") + text.count("{") > MOST_VALUES:
        raise Unreadable(f"is too large: it holds more than {MOST_VALUES} values")
    try:
        numbers: dict[str, Any] = {"parse_constant": _no_constant, "parse_float": _finite} if finite else {}
        value = json.loads(text, object_pairs_hook=_unique, parse_int=_bounded_integer, **numbers)
    except json.JSONDecodeError as error:
        raise Unreadable(f"is no JSON: line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise Unreadable("is no JSON: it nests too deep") from None
    if _is_deep(value):
        raise Unreadable(f"nests deeper than {MOST_DEPTH} levels")
    return value


def whole_number(word: str) -> int | None:
    """The whole number of an argument of at most MOST_WHOLE_DIGITS digits; None for any other text."""
    # `isdigit` also accepts ² and the digits of other scripts.
    return int(word) if word.isascii() and word.isdigit() and len(word) <= MOST_WHOLE_DIGITS else None


def names_file(word: str) -> bool:
    """Whether an argument is the path of a file; False also for an impossible path, and without permission to look."""
    try:
        return Path(word).is_file()
    except (OSError, ValueError):
        return False


def printable(text: str, most: int = 80) -> str:
    """Text from a file, made safe for one line of a terminal: no control characters, at most `most` characters."""
    shown = "".join(character if character.isprintable() else "?" for character in text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file in the folder of `path`, for the block to write; it replaces `path` at the end, or is removed on an error.

    Its name is random: in a folder that others may write to, a link at a predictable name would redirect the content.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        # O_EXCL: fails if the name exists.
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, replacing an existing one atomically.

    Raises:
        OSError: the file cannot be written.
    """
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def checksums(paths: Iterable[Path], from_device: bool = False) -> Checksums:
    """Size and CRC-32 of files.

    Args:
        from_device: drop synced files from the page cache first, if the system supports it, to read from the device.
    """
    sums = {}
    for path in paths:
        crc = size = 0
        with path.open("rb") as file:
            if from_device and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while chunk := file.read(_CHUNK_BYTES):
                crc, size = zlib.crc32(chunk, crc), size + len(chunk)
        sums[path.name] = (size, crc)
    return sums


class SummedFile(io.BufferedWriter):
    """A new file, written sequentially, that computes size and CRC-32 of the bytes while they are still in memory.

    Closing it syncs it: on a distributed file system only the writer can.

    Attributes:
        sums: bytes and CRC-32 of the content so far.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.sums = (0, 0)

    def write(self, content: Any) -> int:
        """Write the content and update the sums."""
        size, crc = self.sums
        self.sums = (size + memoryview(content).nbytes, zlib.crc32(content, crc))
        return super().write(content)

    def close(self) -> None:
        """Sync the file to the device and close it."""
        if not self.closed:
            self.flush()
            os.fsync(self.fileno())
        super().close()


def _text(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise Unreadable("cannot be read: not UTF-8 text") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Unreadable(f"holds the key {printable(twice)} twice")
    return values


def _bounded_integer(text: str) -> int:
    """An integer of a JSON text that fits into a floating-point number, so that arithmetic with it does not overflow.

    Raises:
        Unreadable: it has more than MOST_DIGITS digits.
    """
    if len(text) > MOST_DIGITS:
        raise Unreadable(f"holds a number of {'thousands' if len(text) >= 1000 else 'hundreds'} of digits")
    return int(text)


def _no_constant(name: str) -> float:
    raise Unreadable(f"holds {name}, which is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Unreadable(f"holds {printable(text, 20)}, which no number can be")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
