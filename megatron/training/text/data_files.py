"""What the data flags name on disk, checked without torch: blends, splits, the cache folder, indexed datasets.

An indexed dataset is a pair of files, PREFIX.bin (token ids, one after the other) and PREFIX.idx: magic (9 bytes),
version (u64), type code of the ids (u8), sequences S (u64), document boundaries D (u64), S lengths (i32), S byte
offsets (i64), D boundaries (i64); little-endian.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_overlap.describe.errors import ConfigError

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
BYTES_BY_TYPE_CODE = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
"""Integer types only; the format's codes 6 and 7 are floats."""
DEFAULT_SPLIT = "969,30,1"
BUILTIN_SPLIT = "98,1,1"
REBUILD = "make it again with tools/preprocess_data.py"


@dataclass(frozen=True, slots=True)
class Blend:
    """Prefixes of indexed datasets; `weights` is None where each contributes what it has."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class IndexedFacts:
    """What the index of a dataset says."""

    sequences: int
    tokens: int
    bytes_per_token: int


def parse_blend(data_path: Sequence[str], subject: str = "--data-path") -> Blend:
    """`P`, `P1 P2 …`, or `W1 P1 W2 P2 …` as Megatron reads them.

    Args:
        subject: the flag that gave the words.
    Raises:
        ConfigError: nothing is named, weights and prefixes do not alternate, or a weight is not positive.
    """
    words = [word.strip() for word in data_path]
    shown = " ".join(words)
    if not words or not all(words):
        raise ConfigError(subject, shown or '""', "names no dataset", "give a prefix, or drop the flag")
    numbers = [_number(word) for word in words]
    if all(number is None for number in numbers):
        return Blend(tuple(words), None)
    alternate = len(words) % 2 == 0 and all((number is not None) == (i % 2 == 0) for i, number in enumerate(numbers))
    if not alternate:
        raise ConfigError(
            subject,
            shown,
            "weights and prefixes must alternate",
            "write WEIGHT PREFIX WEIGHT PREFIX …, or prefixes only",
        )
    weights = tuple(number for number in numbers if number is not None)
    if not all(weight > 0 and math.isfinite(weight) for weight in weights):
        raise ConfigError(subject, shown, "weights must be positive", "drop the datasets you do not want")
    return Blend(tuple(words[1::2]), weights)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def parse_split(split: str) -> tuple[float, float, float]:
    """Parts of train, validation and test, as they are written ("969,30,1").

    Raises:
        ConfigError: not one to three numbers ≥ 0, separated by commas, of which one is positive.
    """
    numbers = [_number(word) for word in split.split(",")]
    parts = [n for n in numbers if n is not None and n >= 0 and math.isfinite(n)]
    if len(parts) != len(numbers) or len(parts) > 3 or not sum(parts):
        raise ConfigError("--split", split, "must be one to three numbers, separated by commas", "write, say, 969,30,1")
    train, valid, test = (*parts, 0.0, 0.0)[:3]
    return train, valid, test


def cache_folder(data_cache_path: str | None) -> Path:
    """Where indices and the built-in corpus are kept: the flag, else `moe_overlap` in the user's cache folder."""
    if data_cache_path is not None:
        return Path(data_cache_path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_overlap"


def check_indexed_dataset(prefix: str, subject: str = "--data-path") -> IndexedFacts:
    """Compare the sizes of the two files with what the index says; reads a few bytes, however large the dataset.

    Raises:
        ConfigError: a file is missing, is not an index, is empty, or does not fit the other.
    """
    for suffix, other in ((".idx", ".bin"), (".bin", ".idx")):
        if not Path(prefix + suffix).is_file():
            if prefix.endswith((".bin", ".idx")) and Path(prefix).is_file():
                fix = f"give the prefix without the ending: {prefix[:-4]}"
            elif Path(prefix + other).is_file():
                fix = f"the dataset is incomplete: {REBUILD}"
            else:
                fix = "give the path of PREFIX.bin and PREFIX.idx without the ending"
            raise ConfigError(subject, prefix, f"{prefix}{suffix} does not exist", fix)
    try:
        return _read_facts(prefix, subject)
    except OSError as error:
        raise ConfigError(
            subject, prefix, f"cannot be read ({error.strerror})", "check the file's permissions"
        ) from error


def _read_facts(prefix: str, subject: str) -> IndexedFacts:
    def corrupt(rule: str) -> ConfigError:
        return ConfigError(subject, prefix, f"is corrupt: {rule}", REBUILD)

    index_bytes, data_bytes = (Path(prefix + suffix).stat().st_size for suffix in (".idx", ".bin"))
    with Path(prefix + ".idx").open("rb") as index:
        head = index.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise corrupt(f"{prefix}.idx is not the index of a Megatron dataset")
        _, version, type_code, sequences, boundaries = HEADER.unpack(head)
        if version != 1 or type_code not in BYTES_BY_TYPE_CODE:
            raise corrupt(
                f"{prefix}.idx has version {version} and type code {type_code}, expected 1 and an integer type"
            )
        expected = HEADER.size + 12 * sequences + 8 * boundaries
        if index_bytes != expected:
            raise corrupt(f"{prefix}.idx has {index_bytes} bytes, its header says {expected}")
        if not sequences or not data_bytes:
            raise ConfigError(subject, prefix, "holds no tokens", "give a dataset with documents")
        index.seek(HEADER.size + 4 * (sequences - 1))
        (last_length,) = struct.unpack("<i", index.read(4))
        index.seek(HEADER.size + 12 * sequences - 8)
        (last_offset,) = struct.unpack("<q", index.read(8))
    token_bytes = BYTES_BY_TYPE_CODE[type_code]
    if last_offset + last_length * token_bytes != data_bytes:
        stated = last_offset + last_length * token_bytes
        raise corrupt(f"{prefix}.bin has {data_bytes} bytes, its index says {stated}")
    return IndexedFacts(sequences, data_bytes // token_bytes, token_bytes)
