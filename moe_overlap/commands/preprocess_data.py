"""Text to a Megatron indexed dataset: PREFIX_KEY_document.bin and .idx, for `pretrain_moe.py --data-path`.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod --workers 8

The ending of a file decides its format: .jsonl, .ndjson, .json (one JSON object per line; each of --json-keys becomes a dataset)
and .txt (one document per file, or per line with --txt-documents line), all of them also with .gz, and .parquet (one document per
row; --json-keys are columns). The flags are upstream's. The output is written atomically: after an error or a kill there is none
(a kill leaves PREFIX…partial-* files, which may be deleted).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import json
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from typing import IO

import numpy

from megatron.training.cli.packages import is_installed
from megatron.training.cli.start import quiet_libraries
from megatron.training.data.tokenizers import TYPES, Tokenizer, TokenizerFiles, build_tokenizer, refuse_unread_files
from moe_overlap.commands.exits import interruptible
from moe_overlap.commands.help_topics import Parser
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.version import VERSION_LINE

TASK_BYTES, TASK_DOCUMENTS = 1 << 20, 1000
"""Size of a worker's task: documents are added until one of these is reached."""
MOST_LINE_BYTES, MOST_FILE_BYTES, MOST_BLANK_LINES = 1 << 26, 1 << 30, 1 << 20
"""Longest line and largest single-document file, in bytes, and longest run of blank lines; a .gz file may unpack to any
length."""
PARQUET = ".parquet"
UNSUPPORTED = {
    "--split-sentences": "sentences are for BERT and T5",
    "--keep-newlines": "it belongs to --split-sentences",
    "--lang": "it belongs to --split-sentences",
    "--partitions": "--workers alone decides the parallelism",
    "--keep-sequential-samples": "documents always keep their order",
    "--find-optimal-num-workers": "set --workers to the number of cores",
}


@dataclass(frozen=True, slots=True)
class Document:
    """An undecoded document; `place` is FILE or FILE:LINE."""

    place: str
    raw: bytes
    is_json: bool


@dataclass(frozen=True, slots=True)
class Encoding:
    """The settings of a worker that tokenizes documents."""

    tokenizer_type: str | None
    files: TokenizerFiles
    vocab_size: int | None
    keys: tuple[str, ...]
    append_eod: bool


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids per document and key (int32; empty for an empty text)."""

    documents: list[list[numpy.ndarray]]
    text_bytes: int


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed flags of the tool.

    Raises:
        ConfigError: an unsupported flag, or an invalid value.
        SystemExit: the parser refuses the arguments.
    """
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=VERSION_LINE)
    group = parser.add_argument_group("input")
    group.add_argument("--input", nargs="+", required=True, metavar="FILE", help="files: .jsonl, .txt, .parquet")
    group.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to take; default text")
    group.add_argument("--txt-documents", choices=["file", "line"], default="file", help="unit of a document in a .txt")
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", metavar="TYPE", help=f"{', '.join(TYPES)}; default the first")
    group.add_argument(
        "--tokenizer-model", metavar="PATH", help="folder of a Hugging Face tokenizer, file of the other types"
    )
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    group.add_argument("--vocab-size", type=int, metavar="N", help="vocabulary of NullTokenizer and TikTokenizer")
    group.add_argument("--tiktoken-pattern", choices=["v1", "v2"], help="how TikTokenizer cuts text; default v2")
    group.add_argument(
        "--tiktoken-num-special-tokens", type=int, default=1000, metavar="N", help="of TikTokenizer; default 1000"
    )
    group.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document id")
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="PREFIX_KEY_document.bin/.idx are written"
    )
    group = parser.add_argument_group("run")
    group.add_argument("--workers", type=int, default=1, metavar="N", help="processes that tokenize; default 1")
    group.add_argument("--log-interval", type=int, default=1000, metavar="N", help="documents between progress lines")
    for flag in (word.partition("=")[0] for word in arguments):
        if flag in UNSUPPORTED:
            raise ConfigError(flag, "", f"not supported: {UNSUPPORTED[flag]}", "drop the flag")
    options = parser.parse_args(arguments)
    for name in ("workers", "log_interval"):
        if getattr(options, name) < 1:
            raise ConfigError(
                "--" + name.replace("_", "-"), getattr(options, name), "must be at least 1", "give 1 or more"
            )
    return options


def open_text(path: str) -> IO[bytes] | gzip.GzipFile:
    """A file opened for reading bytes, unpacked if its name ends in .gz."""
    return gzip.open(path, "rb") if path.endswith(".gz") else Path(path).open("rb")


def check_inputs(paths: Sequence[str], keys: Sequence[str]) -> None:
    """Raise ConfigError for a missing file, or one of an unknown format."""
    for path in paths:
        if not Path(path).is_file():
            fix = "give its files" if Path(path).is_dir() else "check the path"
            raise ConfigError("--input", path, "is not a file", fix)
        kind = Path(path.removesuffix(".gz")).suffix
        if kind not in (".txt", ".jsonl", ".ndjson", ".json", PARQUET) or path.endswith(PARQUET + ".gz"):
            fix = "use .txt, .jsonl, .ndjson or .json, also with .gz, or .parquet"
            raise ConfigError("--input", path, "has an unknown ending", fix)
        if kind == PARQUET and not is_installed("pyarrow"):
            raise ConfigError("--input", path, "needs the package pyarrow", 'pip install -e ".[data]"')
        if kind == ".txt" and tuple(keys) != ("text",):
            raise ConfigError(
                "--json-keys", " ".join(keys), f"{path} is plain text", "drop the flag or give JSON files"
            )


def read_parquet(path: str, keys: Sequence[str]) -> Iterator[Document]:
    """The rows of a parquet file as JSON records of the columns `keys`, read batch by batch.

    Raises:
        ConfigError: a column is missing, or the file is no parquet.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            missing = [key for key in keys if key not in file.schema_arrow.names]
            if missing:
                fix = f"name columns with --json-keys: {', '.join(file.schema_arrow.names)}"
                raise ConfigError("--input", path, f"has no column {missing[0]!r}", fix)
            row = 0
            for portion in file.iter_batches(batch_size=TASK_DOCUMENTS, columns=list(keys)):
                for record in portion.to_pylist():
                    row += 1
                    text = json.dumps({key: record[key] for key in keys}, default=str)
                    yield Document(f"{path}:{row}", text.encode(), True)
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError("--input", path, f"cannot be read ({reason})", "check or replace the file") from error


def read_documents(paths: Sequence[str], txt_documents: str, keys: Sequence[str]) -> Iterator[Document]:
    """The undecoded documents of the files, in order; blank lines are skipped.

    Raises:
        ConfigError: a file cannot be read or unpacked, or exceeds a limit.
    """
    for path in paths:
        if path.endswith(PARQUET):
            yield from read_parquet(path, keys)
            continue
        is_json = not path.removesuffix(".gz").endswith(".txt")
        try:
            with open_text(path) as file:
                if not is_json and txt_documents == "file":
                    # The size of a packed file is known only while it is unpacked, hence the smaller limit.
                    most = MOST_LINE_BYTES if path.endswith(".gz") else MOST_FILE_BYTES
                    yield Document(path, _at_most(file.read(most + 1), most, path), False)
                    continue
                lines = iter(lambda: file.readline(MOST_LINE_BYTES + 1), b"")  # noqa: B023 (used before the next file)
                last = 0
                for number, line in enumerate(lines, 1):
                    place = f"{path}:{number}"
                    if _at_most(line, MOST_LINE_BYTES, place).strip():
                        yield Document(place, line.rstrip(b"\r\n"), is_json)
                        last = number
                    elif number - last > MOST_BLANK_LINES:
                        # A small packed file may contain billions of them.
                        rule = f"{MOST_BLANK_LINES} lines in a row are blank"
                        raise ConfigError("--input", place, rule, "check or replace the file")
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError("--input", path, f"cannot be read ({error})", "check or replace the file") from error


def _at_most(content: bytes, most: int, place: str) -> bytes:
    if len(content) > most:
        rule = f"is one document of more than {most >> 20} MiB"
        raise ConfigError(
            "--input", place, rule, "cut it into documents, one per line: .jsonl, or --txt-documents line"
        )
    return content


@functools.lru_cache(maxsize=1)
def tokenizer_of(encoding: Encoding) -> Tokenizer:
    """The tokenizer, built once per process."""
    return build_tokenizer(encoding.tokenizer_type, encoding.files, encoding.vocab_size)


def texts_of(document: Document, keys: Sequence[str]) -> list[str]:
    """The document's text for each key.

    Raises:
        ConfigError: the document is not UTF-8 or not JSON, or the value of a key is missing or no text.
    """
    try:
        text = document.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            "--input", document.place, f"is not UTF-8 (byte {error.start})", "convert the file, e.g. with iconv"
        ) from error
    if not document.is_json:
        return [text]
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:  # Python converts no integer of thousands of digits.
        raise ConfigError("--input", document.place, f"is not JSON ({error})", "fix or remove the line") from error
    for key in keys:
        if not isinstance(record, dict) or not isinstance(record.get(key), str):
            raise ConfigError(
                "--input", document.place, f"has no text under the key {key!r}", "name the key with --json-keys"
            )
    return [record[key] for key in keys]


def encode(encoding: Encoding, documents: Sequence[Document]) -> Encoded:
    """Tokenize documents.

    Raises:
        ConfigError: as `texts_of`, or the tokenizer refuses a text.
    """
    encoded: list[list[numpy.ndarray]] = []
    tokenizer = tokenizer_of(encoding)
    end = [tokenizer.eod] if encoding.append_eod else []
    for document in documents:
        ids = [tokenizer.tokenize(text) for text in texts_of(document, encoding.keys)]
        encoded.append([numpy.array([*i, *end] if i else [], dtype=numpy.int32) for i in ids])
    return Encoded(encoded, sum(len(d.raw) for d in documents))


def tasks(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in portions of a worker's task (TASK_BYTES, TASK_DOCUMENTS)."""
    portion: list[Document] = []
    size = 0
    for document in documents:
        portion.append(document)
        size += len(document.raw)
        if size >= TASK_BYTES or len(portion) >= TASK_DOCUMENTS:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def encode_all(encoding: Encoding, documents: Iterator[Document], workers: int) -> Iterator[Encoded]:
    """The results in the order of the input. Only a few portions are in memory, whatever the size of the input.

    Raises:
        ConfigError: the first mistake in the input, or a killed worker.
    """
    if workers == 1:
        yield from (encode(encoding, portion) for portion in tasks(documents))
        return
    # Spawned, not forked: the parent holds torch and its threads.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    waiting: deque[Future[Encoded]] = deque()
    try:
        for portion in tasks(documents):
            waiting.append(pool.submit(encode, encoding, portion))
            if len(waiting) > 4 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise ConfigError("--workers", workers, "a worker was killed, often for memory", "use fewer workers") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def write(options: argparse.Namespace, encoding: Encoding) -> None:
    """Tokenize all inputs and write one dataset per key, with progress on stderr and a summary on stdout."""
    quiet_libraries()
    from megatron.training.data.indexed import indexed_dataset

    started, read, text_bytes, empty, last_shown = time.monotonic(), 0, 0, 0, 0
    prefixes = [f"{options.output_prefix}_{key}_document" for key in encoding.keys]
    vocab_size = tokenizer_of(encoding).vocab_size
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(indexed_dataset(prefix, vocab_size)) for prefix in prefixes]
        incoming = read_documents(options.input, options.txt_documents, options.json_keys)
        for result in encode_all(encoding, incoming, options.workers):
            for document in result.documents:
                for writer, ids in zip(writers, document, strict=True):
                    writer.add_document(ids)
                    empty += not len(ids)
            read, text_bytes = read + len(result.documents), text_bytes + result.text_bytes
            if read - last_shown >= options.log_interval:
                rate = text_bytes / 1e6 / (time.monotonic() - started)
                print(
                    f"read {read:,} documents, {text_bytes / 1e6:,.1f} MB, {rate:.1f} MB/s", file=sys.stderr, flush=True
                )
                last_shown = read
        for key, writer in zip(encoding.keys, writers, strict=True):
            if not writer.tokens:
                raise ConfigError(
                    "--input", " ".join(options.input), f"holds no text under {key!r}", "give files with text"
                )
        counts = [(writer.documents, writer.tokens) for writer in writers]
    seconds = time.monotonic() - started
    for prefix, (documents, tokens) in zip(prefixes, counts, strict=True):
        counted = f"{documents:,} document{'' if documents == 1 else 's'}"
        print(f"wrote {prefix}.bin and .idx: {counted}, {tokens:,} tokens, {seconds:.1f} s")
        if documents == 1:
            hint = "--txt-documents line makes a document of every line of a .txt"
            print(f"a document goes wholly to training, validation or test; {hint}")
    if empty:
        print(f"left out {empty:,} empty documents")


@interruptible
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 2 for a user's mistake. If interrupted, it has written nothing."""
    try:
        options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        check_inputs(options.input, options.json_keys)
        encoding = Encoding(
            options.tokenizer_type,
            TokenizerFiles(**{field.name: getattr(options, field.name) for field in fields(TokenizerFiles)}),
            options.vocab_size,
            tuple(options.json_keys),
            options.append_eod,
        )
        refuse_unread_files(encoding.tokenizer_type, encoding.files)
        tokenizer_of(encoding)
        try:
            write(options, encoding)
        except OSError as error:
            rule = f"cannot be written ({error.strerror or error})"
            raise ConfigError("--output-prefix", options.output_prefix, rule, "choose another folder") from error
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
