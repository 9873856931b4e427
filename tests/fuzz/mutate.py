"""Inputs made from valid ones: bytes flipped, cut, repeated and replaced, and JSON values in whose place others stand.

Bytes find what a parser does wrong; most of them end there. `json_changed` keeps the text a JSON document, so that what is wrong
reaches the code behind the parser: a field of another type, too small, too large, missing, or twice.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

Mutation = Callable[[bytes, random.Random], bytes]

TOKENS = (
    b"9" * 5000,
    b"-1",
    b"NaN",
    b"1e999",
    b"null",
    b"[" * 500,
    b'{"a":' * 300,
    b"\x00",
    b"\xff",
    b"\x1b[2J",
    b"$A",
    b"${A}",
    b"$(touch executed)",
    b"'",
    b"\n",
    b"--",
    b"@",
    b"1000000000",
)
_RAW = "raw"
"""Marks a string in whose place its rest stands without quotation marks: numbers that Python does not write as JSON."""
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3.5,
    -0.0,
    1e308,
    5e-324,
    10**9,
    1 << 63,
    10**400,
    "",
    "x",
    "\x1b[2J",
    "\n",
    "9" * 5000,
    "../../etc/passwd",
    "$(touch executed)",
    [],
    {},
    [0] * 2000,
    [[]],
    {"": None},
    f"{_RAW}NaN",
    f"{_RAW}-Infinity",
    f"{_RAW}1e999",
    f"{_RAW}{'9' * 5000}",
    f"{_RAW}{'[' * 300}{']' * 300}",
    f"{_RAW}{'[' * 3000}",
)
"""Stand in place of a value."""


def bytes_changed(seed: bytes, draw: random.Random) -> bytes:
    """An input with some bytes flipped, cut, repeated or replaced."""
    content = bytearray(seed)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 8))):
        at = draw.randrange(len(content) + 1)
        end = min(len(content), at + draw.choice((1, 1, 4, 16, 200)))
        kind = draw.randrange(6)
        if kind == 0 and at < len(content):
            content[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del content[at:end]
        elif kind == 2:
            content[at:at] = content[at:end] * draw.choice((1, 2, 30))
        elif kind == 3:
            content[at:end] = draw.choice(TOKENS)
        elif kind == 4 and at < len(content):
            content[at] = draw.randrange(256)
        else:
            other = draw.randrange(len(content) + 1)
            content[at:end] = content[other : other + end - at]
    return bytes(content)


def json_changed(seed: bytes, draw: random.Random) -> bytes:
    """A JSON document in which up to four values are others, are missing, or stand there twice."""
    root = [json.loads(seed)]
    twice = False
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        holder, key = draw.choice(_places(root))
        value = holder[key]
        kind = draw.randrange(8)
        if kind == 0 and holder is not root:
            del holder[key]
        elif kind == 1 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(value))
        elif kind == 2 and isinstance(holder, dict):
            holder[draw.choice(("", "x", "\x1b[2J", "9" * 300))] = copy.deepcopy(value)
        elif kind == 3 and type(value) in (int, float):
            holder[key] = draw.choice((-value, value + 1, value - 1, value * 10**9, value % 1000 + 0.5, str(value)))
        elif kind == 4:
            other, place = draw.choice(_places(root))
            holder[key] = copy.deepcopy(other[place])
        elif kind == 5:
            twice = True
        else:
            holder[key] = copy.deepcopy(draw.choice(VALUES))
    if not root:
        return b""
    text = json.dumps(root[0])
    for value in VALUES:
        if isinstance(value, str) and value.startswith(_RAW):
            text = text.replace(json.dumps(value), value.removeprefix(_RAW))
    if twice and text.startswith('{"'):
        text = text[:-1] + "," + text[1:]
    return text.encode("utf-8", "surrogatepass")


def lines_changed(seed: bytes, draw: random.Random) -> bytes:
    """JSON lines, one of which `json_changed` made, or which stand elsewhere, twice, or not at all."""
    lines = seed.splitlines()
    at = draw.randrange(len(lines))
    kind = draw.randrange(6)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(draw.randrange(len(lines)), lines[at])
    elif kind == 2:
        draw.shuffle(lines)
    else:
        lines[at] = json_changed(lines[at], draw)
    return b"\n".join(lines) + draw.choice((b"", b"\n"))


def packed(change: Mutation) -> Mutation:
    """A change inside a gzip file, now and then of the file itself; few unpack to a thousand times their size."""

    def changed(seed: bytes, draw: random.Random) -> bytes:
        kind = draw.randrange(10)
        if kind == 0:
            return bytes_changed(seed, draw)
        content = gzip.decompress(seed)
        if kind == 1 and draw.randrange(200) == 0:
            return gzip.compress(content + draw.choice((b" ", b"\n", b"[", b"\x00")) * (1 << 27), 1, mtime=0)
        return gzip.compress(change(content, draw), 1, mtime=0)

    return changed


def calls_inserted(calls: Sequence[bytes]) -> Mutation:
    """A pickle into which opcodes are put that call a function while it is read; else its bytes are changed."""

    def changed(seed: bytes, draw: random.Random) -> bytes:
        if draw.randrange(3):
            return bytes_changed(seed, draw)
        at = draw.choice((2, len(seed) - 1, draw.randrange(len(seed) + 1)))
        return seed[:at] + draw.choice(calls) + seed[at:]

    return changed


def either(*changes: Mutation) -> Mutation:
    """One of several changes."""
    return lambda seed, draw: draw.choice(changes)(seed, draw)


def archive_changed(seed: bytes, draw: random.Random) -> bytes:
    """Bytes of an archive without compression; its check sums are made right where a member's content alone changed."""
    content = bytes_changed(seed, draw)
    return content if draw.randrange(2) else _with_sums(content)


def _with_sums(content: bytes) -> bytes:
    """Every local header and entry of the directory of a zip file gets the CRC-32 of what lies there."""
    changed, at = bytearray(content), 0
    sums: dict[bytes, bytes] = {}
    while (at := content.find(b"PK\x03\x04", at)) >= 0 and at + 30 <= len(content):
        names, extra = (int.from_bytes(content[at + n : at + n + 2], "little") for n in (26, 28))
        size = int.from_bytes(content[at + 18 : at + 22], "little")
        begin = at + 30 + names + extra
        if size < len(content):
            total = zlib.crc32(content[begin : begin + size]).to_bytes(4, "little")
            sums[bytes(content[at + 30 : at + 30 + names])] = total
            changed[at + 14 : at + 18] = total
        at += 4
    at = 0
    while (at := content.find(b"PK\x01\x02", at)) >= 0 and at + 46 <= len(content):
        names = int.from_bytes(content[at + 28 : at + 30], "little")
        if (total := sums.get(bytes(content[at + 46 : at + 46 + names]), b"")) != b"":
            changed[at + 16 : at + 20] = total
        at += 4
    return bytes(changed)


def _places(root: list[Any]) -> list[tuple[Any, Any]]:
    """Every value of a document, as its holder and the key or index there."""
    places: list[tuple[Any, Any]] = []
    waiting: list[Any] = [root]
    while waiting:
        holder = waiting.pop()
        for key in range(len(holder)) if isinstance(holder, list) else list(holder):
            places.append((holder, key))
            if isinstance(holder[key], list | dict):
                waiting.append(holder[key])
    return places
