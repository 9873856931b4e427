"""Reading files that somebody else may have written: bounded in bytes, plain JSON only, every mistake a phrase; new files.

A name given to a command may be a device that never ends, a pipe that nobody writes to, or a file larger than the memory; its
JSON may nest without end, hold a number of a million digits, the same key twice, or `NaN`. Each of these is `Unreadable`.
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
"""Bytes of the largest text file that is read whole."""
MOST_JSON_BYTES = 8 << 20
"""Bytes of the largest JSON file that is read whole: as objects it takes about ten times as much memory."""
MOST_DEPTH = 200
MOST_DIGITS = 300
MOST_WHOLE_DIGITS = 9
"""Digits of the largest number that a word or a name holds; Python itself refuses to read thousands."""
_CHUNK_BYTES = 1 << 24

Checksums = dict[str, tuple[int, int]]
"""File name -> bytes, CRC-32."""
MOST_VALUES = 4_000_000
"""Commas and opening brackets of the largest JSON text: with as many values as these, Python's objects take some 400 MB."""


class Unreadable(Exception):
    """A file that is not read; the message is a phrase that follows its name."""

    @property
    def fix(self) -> str:
        """The fix that a refusal names: correct the path where the name is wrong, else the file."""
        named_wrongly = str(self).startswith("cannot be read: ") and not str(self).endswith("text")
        return "correct the path" if named_wrongly else "correct the file"


def bounded_bytes(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a regular file.

    Raises:
        Unreadable: there is no such file, it is no regular file, or it is larger than `most_bytes`.
    """
    try:
        # Opening a pipe waits for its writer without O_NONBLOCK; a regular file does not notice it.
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
        raise Unreadable("is no regular file")  # Some files of /proc call themselves regular, and wait like a pipe.
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
        finite: refuse NaN and infinity; else the caller checks its numbers, and names the field.
    Raises:
        Unreadable: as in `bounded_bytes`, or the content is not the JSON that `plain_json` reads.
    """
    return plain_json(_text(bounded_bytes(path, most_bytes)), finite=finite)


def plain_json(text: str | bytes, *, finite: bool = True) -> Any:
    """The value of a JSON text whose numbers are finite, whose keys are unique, and which nests at most MOST_DEPTH deep.

    Raises:
        Unreadable: it is no such text.
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
    """The whole number from 0 that a word of at most MOST_WHOLE_DIGITS digits spells; None for every other word."""
    # For ² and the digits of other scripts `isdigit` holds as well.
    return int(word) if word.isascii() and word.isdigit() and len(word) <= MOST_WHOLE_DIGITS else None


def names_file(word: str) -> bool:
    """Whether a word of a command line is the path of a file; False for what no path can be, and where it may not be asked."""
    try:
        return Path(word).is_file()
    except (OSError, ValueError):
        return False


def printable(text: str, most: int = 80) -> str:
    """Text from a file, fit for one line of a terminal: without control characters, cut after `most` characters."""
    shown = "".join(character if character.isprintable() else "?" for character in text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file beside `path`, to be written in the block; at its end it takes the place of `path`, and after an error it is gone.

    Nobody can guess its name: in a folder that others may write to, a link under a name that is known before would have the
    content written to wherever the link points.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        # Created here, and only if nothing is there.
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8; an existing one is replaced whole or stays as it was.

    Raises:
        OSError: it cannot be written.
    """
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def checksums(paths: Iterable[Path], from_device: bool = False) -> Checksums:
    """Size and CRC-32 of files.

    Args:
        from_device: drop synced files from the page cache first, if the system can, so that the device is read.
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
    """A new file, written in order, which sums the bytes in memory on their way to it.

    Closing it syncs it: on a file system of several machines its writer alone can.

    Attributes:
        sums: bytes and CRC-32 so far.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.sums = (0, 0)

    def write(self, content: Any) -> int:
        """Write all of it."""
        size, crc = self.sums
        self.sums = (size + memoryview(content).nbytes, zlib.crc32(content, crc))
        return super().write(content)

    def close(self) -> None:
        """Have the file system write it to the device, and close it."""
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
    """The integer of a JSON text: one that a floating-point number can hold, so that arithmetic with it does not overflow.

    Raises:
        Unreadable: it has hundreds of digits.
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
