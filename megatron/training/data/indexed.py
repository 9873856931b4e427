"""Writes Megatron's indexed datasets, and the built-in corpus as one of them, in a cache.

A dataset appears when both of its files are complete: a killed writer leaves nothing that looks complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megatron.training.data.sources import (
    builtin_corpus_documents,
    check_indexed_dataset,
    summarize_corpus,
)
from megatron.training.data.tokenizers import Tokenizer
from moe_overlap.describe.errors import ConfigError

CORPUS_FORMAT = 1
"""Version of the corpus: raise it when the conversion of documents to tokens changes."""


class IndexedWriter:
    """PREFIX.bin and PREFIX.idx under construction; one sequence per document."""

    def __init__(self, prefix: str, vocab_size: int, replaces_equal: bool = False) -> None:
        self._prefix, self._replaces_equal = prefix, replaces_equal
        mark = f".partial-{secrets.token_hex(8)}"
        self._data, self._index = f"{prefix}.bin{mark}", f"{prefix}.idx{mark}"
        self._dtype = DType.optimal_dtype(vocab_size)
        self._builder = IndexedDatasetBuilder(self._data, dtype=self._dtype)
        self.documents, self.tokens = 0, 0

    def add_document(self, ids: Sequence[int] | numpy.ndarray) -> None:
        """Append a document of token ids; an empty one is skipped, since no sample can be drawn from it."""
        if not len(ids):
            return
        # megatron-core annotates a tensor, but accepts whatever numpy.array accepts.
        self._builder.add_document(numpy.asarray(ids, dtype=self._dtype), [len(ids)])
        self.documents, self.tokens = self.documents + 1, self.tokens + len(ids)

    def publish(self) -> None:
        """Give both files their names, the index last: without it the dataset does not exist."""
        self._builder.finalize(self._index)
        if not self._replaces_equal:
            with contextlib.suppress(FileNotFoundError):
                Path(self._prefix + ".idx").unlink()
        Path(self._data).replace(self._prefix + ".bin")
        Path(self._index).replace(self._prefix + ".idx")

    def discard(self) -> None:
        """Remove the unfinished files."""
        with contextlib.suppress(OSError):  # A full disk refuses the buffered rest again.
            self._builder.data_file.close()
        for path in (self._data, self._index):
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()


@contextlib.contextmanager
def indexed_dataset(prefix: str, vocab_size: int, replaces_equal: bool = False) -> Iterator[IndexedWriter]:
    """Write a dataset: it appears at `prefix` when the block ends, and not at all if the block fails or is killed.

    Args:
        prefix: path without ending; its folder is made.
        vocab_size: decides the width of an id, 2 bytes below 65,500.
        replaces_equal: whether every writer of this prefix writes the same bytes. The old index then stays until the new one
            replaces it, so that a reader always finds a complete dataset, whatever the number of writers.
    """
    Path(prefix).absolute().parent.mkdir(parents=True, exist_ok=True)
    writer = IndexedWriter(prefix, vocab_size, replaces_equal)
    try:
        yield writer
        writer.publish()
    except BaseException:
        writer.discard()
        raise


@dataclass(frozen=True, slots=True)
class BuiltinCorpus:
    """The tokenized built-in corpus on disk."""

    prefix: str
    files: int
    text_bytes: int


def prepare_builtin_corpus(
    cache: Path,
    tokenizer: Tokenizer,
    on_first_rank: Callable[[Callable[[], tuple[str, int, int]]], tuple[str, int, int]],
) -> BuiltinCorpus:
    """The standard library as an indexed dataset under `cache`, made at its first use.

    Args:
        cache: folder; the file name contains a hash of text, tokenizer and format, so it is never outdated.
        tokenizer: an end of document follows each file.
        on_first_rank: runs its argument on one process and returns the result on all.
    Raises:
        ConfigError: the cache cannot be written.
    """

    def prepare() -> tuple[str, int, int]:
        summary = summarize_corpus()
        key = json.dumps([CORPUS_FORMAT, summary.digest, tokenizer.unique_identifiers])
        prefix = str(cache / f"python-{hashlib.sha256(key.encode()).hexdigest()[:16]}_text_document")
        with contextlib.suppress(ConfigError):
            check_indexed_dataset(prefix)
            return prefix, summary.files, summary.text_bytes
        try:
            with indexed_dataset(prefix, tokenizer.vocab_size, replaces_equal=True) as writer:
                for text in builtin_corpus_documents():
                    writer.add_document([*tokenizer.tokenize(text), tokenizer.eod])
        except OSError as error:
            raise cannot_write(cache, error) from error
        return prefix, summary.files, summary.text_bytes

    return BuiltinCorpus(*on_first_rank(prepare))


def cannot_write(cache: Path, error: OSError) -> ConfigError:
    """The error for a cache folder that cannot be written."""
    return ConfigError(
        "--data-cache-path",
        cache,
        f"cannot be written ({error.strerror or error})",
        "give --data-cache-path FOLDER with space and access",
    )
