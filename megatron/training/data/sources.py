"""The text of a run as the data flags name it, checked without torch: indexed datasets, blends, splits, tokenizer.

An indexed dataset is a pair of files, PREFIX.bin (token ids, one after the other) and PREFIX.idx: magic (9 bytes),
version (u64), type code of the ids (u8), sequences S (u64), document boundaries D (u64), S lengths (i32), S byte
offsets (i64), D boundaries (i64); little-endian.

A run reads exactly one of these, or none for the built-in corpus:
    --data-path VALUES, --data-args-path FILE (the same values in a file)           one blend, which --split cuts
    --train-data-path, --valid-data-path, --test-data-path VALUES                   a blend for each part
    --per-split-data-args-path FILE, {"train": [VALUES], "valid": [...], ...}       the same in a JSON file
    --mock-data
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import struct
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.training.cli.config import DataConfig
from megatron.training.cli.sizes import vocab_file_entries
from megatron.training.data.tokenizers import NullTokenizer, Tokenizer, TokenizerFiles, build_tokenizer
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_text, plain_json

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
BYTES_BY_TYPE_CODE = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
"""Integer types only; the format's codes 6 and 7 are floats."""
DEFAULT_SPLIT = "969,30,1"
BUILTIN_SPLIT = "98,1,1"
REBUILD = "make it again with tools/preprocess_data.py"


@dataclass(frozen=True, slots=True)
class Blend:
    """Prefixes of indexed datasets; `weights` is None if each contributes all of its tokens."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class IndexedFacts:
    """Facts of a dataset from its index."""

    sequences: int
    tokens: int
    bytes_per_token: int


def parse_blend(data_path: Sequence[str], subject: str = "--data-path") -> Blend:
    """Read `P`, `P1 P2 …`, or `W1 P1 W2 P2 …` as Megatron does, with prefixes P and weights W.

    Args:
        subject: the flag of the values.
    Raises:
        ConfigError: nothing is named, weights and prefixes do not alternate, or a weight is not positive.
    """
    entries = [entry.strip() for entry in data_path]
    shown = " ".join(entries)
    if not entries or not all(entries):
        raise ConfigError(subject, shown or '""', "names no dataset", "give a prefix, or drop the flag")
    numbers = [_number(entry) for entry in entries]
    if all(number is None for number in numbers):
        return Blend(tuple(entries), None)
    alternate = len(entries) % 2 == 0 and all((number is not None) == (i % 2 == 0) for i, number in enumerate(numbers))
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
    return Blend(tuple(entries[1::2]), weights)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def parse_split(split: str) -> tuple[float, float, float]:
    """Parts of train, validation and test, as the user wrote them ("969,30,1").

    Raises:
        ConfigError: not one to three numbers ≥ 0, separated by commas, at least one of them positive.
    """
    numbers = [_number(part) for part in split.split(",")]
    parts = [n for n in numbers if n is not None and n >= 0 and math.isfinite(n)]
    if len(parts) != len(numbers) or len(parts) > 3 or not sum(parts):
        raise ConfigError("--split", split, "must be one to three numbers, separated by commas", "write, say, 969,30,1")
    train, valid, test = (*parts, 0.0, 0.0)[:3]
    return train, valid, test


def cache_folder(data_cache_path: str | None) -> Path:
    """The folder of indices and the built-in corpus: the flag's, or `moe_overlap` in the user's cache folder."""
    if data_cache_path is not None:
        return Path(data_cache_path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_overlap"


def check_indexed_dataset(prefix: str, subject: str = "--data-path", *, is_complete: bool = False) -> IndexedFacts:
    """Compare the sizes of the two files with the index, and check the content of the index.

    Args:
        is_complete: whether to check every entry of a large index, too, instead of samples.

    Raises:
        ConfigError: a file is missing, is not an index, is empty, or does not fit the other.
    """
    for suffix, other in ((".idx", ".bin"), (".bin", ".idx")):
        if not Path(prefix + suffix).is_file():
            if prefix.endswith((".bin", ".idx")) and Path(prefix).is_file():
                fix = f"give the prefix without the ending: {prefix[:-4]}"
            elif Path(prefix + other).is_file():
                fix = f"the dataset is incomplete: {REBUILD}"
            elif Path(prefix).is_file():
                fix = f"make a dataset of it: tools/preprocess_data.py --input {prefix} --output-prefix PREFIX"
            elif Path(f"{prefix}_text_document.idx").is_file():
                fix = f"did you mean {prefix}_text_document?"
            else:
                fix = "give the path of PREFIX.bin and PREFIX.idx without the ending"
            raise ConfigError(subject, prefix, f"{prefix}{suffix} does not exist", fix)
    try:
        return _read_facts(prefix, subject, is_complete)
    except OSError as error:
        raise ConfigError(
            subject, prefix, f"cannot be read ({error.strerror})", "check the file's permissions"
        ) from error


def _read_facts(prefix: str, subject: str, is_complete: bool) -> IndexedFacts:
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
    wrong = _wrong_inside(prefix + ".idx", sequences, boundaries, token_bytes, is_complete)
    if wrong is not None:
        raise corrupt(f"{prefix}.idx {wrong}")
    return IndexedFacts(sequences, data_bytes // token_bytes, token_bytes)


_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CHUNK_TOKENS = 1 << 22


def token_range(prefix: str, subject: str = "--data-path") -> tuple[int, int]:
    """The lowest and the highest token id of a dataset that `check_indexed_dataset` has accepted; reads all of it.

    Raises:
        ConfigError: the file cannot be read, or a token id is negative.
    """
    import numpy  # flags are checked without it

    lowest = highest = 0
    try:
        with Path(prefix + ".idx").open("rb") as index:
            _, _, type_code, _, _ = HEADER.unpack(index.read(HEADER.size))
        # Read, not mapped: a file that is truncated meanwhile ends early instead of raising SIGBUS.
        with Path(prefix + ".bin").open("rb") as data:
            place = 0
            while len(ids := numpy.fromfile(data, _DTYPES[type_code], _CHUNK_TOKENS)):
                lowest, highest = min(lowest, int(ids.min())), max(highest, int(ids.max()))
                if lowest < 0:
                    token = place + int((ids < 0).argmax())
                    raise ConfigError(subject, prefix, f"is corrupt: token {token} is {ids[token - place]}", REBUILD)
                place += len(ids)
    except OSError as error:
        raise ConfigError(subject, prefix, f"cannot be read ({error.strerror})", "check the file") from error
    return lowest, highest


_WHOLE_BYTES, _SAMPLES, _SAMPLE_BYTES = 1 << 24, 64, 1 << 16


def dataset_digest(source: DataSource) -> str:
    """A digest of a run's text: weights, and index and tokens of every dataset.

    Files of up to 16 MiB are read completely, of larger ones 64 evenly spread samples of 64 KiB, so that it takes a moment.
    Paths do not count: moved data are the same data.
    """
    digest = hashlib.sha256()
    for blend in source.blends:
        digest.update(repr(blend and (len(blend.prefixes), blend.weights)).encode())
    for prefix in source.prefixes:
        for suffix in (".idx", ".bin"):
            with Path(prefix + suffix).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(size.to_bytes(8, "little"))
                if size <= _WHOLE_BYTES:
                    digest.update(file.read(_WHOLE_BYTES))
                    continue
                for index in range(_SAMPLES):
                    file.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


_WHOLE_ENTRIES, _BLOCKS, _BLOCK_ENTRIES = 1 << 22, 64, 1 << 14


def _wrong_inside(path: str, sequences: int, boundaries: int, token_bytes: int, is_complete: bool) -> str | None:
    """The first error inside an index: a length, a byte offset or a document boundary that no writer writes.

    Of an index of more than 4 million sequences only 64 evenly spread blocks are checked, unless `is_complete`. Sequences follow
    each other without gaps, so each offset follows from the previous one; boundaries count sequences and never decrease.
    """
    import numpy  # flags are checked without it

    lengths = numpy.memmap(path, "<i4", "r", HEADER.size, (sequences,))
    offsets = numpy.memmap(path, "<i8", "r", HEADER.size + 4 * sequences, (sequences,))
    documents = numpy.memmap(path, "<i8", "r", HEADER.size + 12 * sequences, (boundaries,)) if boundaries else None
    if documents is None or documents[0] != 0 or documents[-1] != sequences:
        return f"has document boundaries that do not span its {sequences} sequences"
    if offsets[0] != 0:
        return f"places sequence 0 at byte {offsets[0]}"
    for first, last in _blocks(sequences, is_complete):
        block = lengths[first:last].astype(numpy.int64)
        if (block < 0).any():
            return f"gives sequence {first + int((block < 0).argmax())} a negative length"
        places = offsets[first : last + 1]
        jumps = places[1:] - places[:-1] != block[: len(places) - 1] * token_bytes
        if jumps.any():
            return f"places sequence {first + int(jumps.argmax()) + 1} elsewhere than behind the one before it"
    for first, last in _blocks(boundaries, is_complete):
        steps = numpy.diff(documents[first : last + 1])
        if (steps < 0).any():
            return f"ends document {first + int((steps < 0).argmax())} before it begins"
    return None


def _blocks(entries: int, is_complete: bool) -> list[tuple[int, int]]:
    """First entry and last + 1 of each checked block."""
    if is_complete:
        return [(first, min(first + _WHOLE_ENTRIES, entries)) for first in range(0, entries, _WHOLE_ENTRIES)]
    if entries <= _WHOLE_ENTRIES:
        return [(0, entries)]
    firsts = [(entries - _BLOCK_ENTRIES) * index // (_BLOCKS - 1) for index in range(_BLOCKS)]
    return [(first, first + _BLOCK_ENTRIES) for first in firsts]


# The source of a run's text

PARTS = ("train", "valid", "test")
ARGS, PER_SPLIT_ARGS = "--data-args-path", "--per-split-data-args-path"


@dataclass(frozen=True, slots=True)
class DataSource:
    """Blends of a run; both None for mock data and the built-in corpus."""

    all_parts: Blend | None = None
    parts: tuple[Blend | None, Blend | None, Blend | None] | None = None

    @property
    def blends(self) -> tuple[Blend | None, Blend | None, Blend | None]:
        """The blends of train, validation and test."""
        return self.parts or (self.all_parts, self.all_parts, self.all_parts)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Every dataset, named once."""
        return tuple(dict.fromkeys(prefix for blend in self.blends if blend for prefix in blend.prefixes))

    def __str__(self) -> str:
        if self.parts is None:
            return _shown(self.all_parts)
        return ", ".join(f"{name} {_shown(blend)}" for name, blend in zip(PARTS, self.parts, strict=True) if blend)


def _shown(blend: Blend | None) -> str:
    if blend is None:
        return ""
    if blend.weights is None:
        return " ".join(blend.prefixes)
    return " ".join(f"{weight:g} {prefix}" for weight, prefix in zip(blend.weights, blend.prefixes, strict=True))


def check_data_flags(data: DataConfig) -> None:
    """Raise ConfigError if flags name text twice, or a blend is wrong; opens no file."""
    separate = [flag for flag, values in _separate_flags(data) if values is not None]
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
    for flag, values in (("--data-path", data.data_path), *_separate_flags(data)):
        if values is not None:
            parse_blend(values, flag)


def data_source(data: DataConfig) -> DataSource:
    """The blends that the flags name, including those in files of arguments.

    Raises:
        ConfigError: text is named twice, a file of arguments cannot be read, or a blend is wrong.
    """
    check_data_flags(data)
    if data.data_path is not None:
        return DataSource(all_parts=parse_blend(data.data_path))
    if data.data_args_path is not None:
        return DataSource(all_parts=parse_blend(_text(ARGS, data.data_args_path).split(), ARGS))
    if data.per_split_data_args_path is not None:
        return _per_split(data.per_split_data_args_path)
    separate = _separate_flags(data)
    if all(values is None for _, values in separate):
        return DataSource()
    train, valid, test = (None if values is None else parse_blend(values, flag) for flag, values in separate)
    return DataSource(parts=(train, valid, test))


def _separate_flags(data: DataConfig) -> tuple[tuple[str, Sequence[str] | None], ...]:
    paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    return tuple((f"--{part}-data-path", values) for part, values in zip(PARTS, paths, strict=True))


def _per_split(path: str) -> DataSource:
    rule, fix = "must be a JSON object", 'write {"train": [WEIGHT, PREFIX, …], "valid": […], "test": […]}'
    try:
        parts = plain_json(_text(PER_SPLIT_ARGS, path))
    except Unreadable as error:
        raise ConfigError(PER_SPLIT_ARGS, path, f"{rule} ({error})", fix) from error
    if not isinstance(parts, dict) or not all(isinstance(values, list) for values in parts.values()):
        raise ConfigError(PER_SPLIT_ARGS, path, f"{rule} of lists", fix)
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        raise ConfigError(PER_SPLIT_ARGS, path, f"names the part {unknown[0]!r}", f"use {', '.join(PARTS)}")
    train, valid, test = (
        parse_blend([str(value) for value in parts[part]], PER_SPLIT_ARGS) if parts.get(part) else None
        for part in PARTS
    )
    return DataSource(parts=(train, valid, test))


def _text(flag: str, path: str) -> str:
    try:
        return bounded_text(path)
    except Unreadable as error:
        raise ConfigError(flag, path, str(error), error.fix) from error


def tokenizer_of_run(data: DataConfig) -> Tokenizer:
    """The tokenizer of the flags; bytes by default.

    A GPT-2 --vocab-file without a type means tokenized data: the vocabulary has as many ids as the file has entries, unless
    --vocab-size is set.

    Raises:
        ConfigError: an unknown type, missing files, a vocabulary that is too small.
    """
    if data.tokenizer_type is None and data.vocab_file is not None:
        return NullTokenizer(data.vocab_size or vocab_file_entries(data.vocab_file))
    return build_tokenizer(data.tokenizer_type, tokenizer_files(data), data.vocab_size)


def tokenizer_files(data: DataConfig) -> TokenizerFiles:
    """The flags of a tokenizer's files; files that the type does not read are ignored (a dry run lists them)."""
    return TokenizerFiles(**{field.name: getattr(data, field.name) for field in dataclasses.fields(TokenizerFiles)})


# The built-in corpus: the sources of Python's standard library, real text that every machine has. No torch.
#
# One document per file, as text. Folders of installed packages are left out; test folders are kept (if a distribution
# ships them they are about two thirds of the text). Documents are ordered by a hash of their path: a dataset is
# split by position, and in alphabetical order validation would see nothing but xml, zipfile and zoneinfo.

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class CorpusSummary:
    """Size and content of a corpus; `digest` identifies the content."""

    files: int
    text_bytes: int
    digest: str


def standard_library_folder() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def builtin_corpus_documents(folder: Path | None = None) -> Iterator[str]:
    """Sources of the standard library, one text per file, in an order that does not depend on the file system.

    Args:
        folder: the tree to read; default the running interpreter's standard library.
    Yields:
        Texts. Empty files, and files that do not decode as their coding line says (test inputs), are left out.
    """
    root = folder or standard_library_folder()
    paths = []
    # Every run begins with this walk: excluded folders are not entered, since installed packages hold most of the files.
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        paths += [Path(parent, name) for name in names if name.endswith(".py")]
    for path in sorted(paths, key=lambda p: hashlib.sha256(p.relative_to(root).as_posix().encode()).digest()):
        try:
            with tokenize.open(path) as source:
                text = source.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        if text.strip():
            yield text


def summarize_corpus(folder: Path | None = None) -> CorpusSummary:
    """Read the corpus once: number of files, bytes of UTF-8 text, and a digest of content and order."""
    files, text_bytes, digest = 0, 0, hashlib.sha256()
    for text in builtin_corpus_documents(folder):
        data = text.encode("utf-8", "surrogatepass")
        files, text_bytes = files + 1, text_bytes + len(data)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return CorpusSummary(files, text_bytes, digest.hexdigest())
