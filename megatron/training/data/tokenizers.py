"""Tokenizers: bytes (the default), a tokenizer's files, or text that consists of ids.

GPT-2's byte-pair encoding, SentencePiece, tiktoken and Hugging Face's are the libraries' own; ids equal those of Megatron-LM's
tokenizer of the same name. A missing library, or a missing or broken file, is a ConfigError. No torch is imported, except for
tiktoken's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megatron.training.cli.packages import TOKENIZER_PACKAGES, require_package
from moe_overlap.describe.errors import ConfigError, one_of

NO_PAD = -1
"""megatron-core masks tokens equal to `pad`; ours never are, because samples are always full."""
END_OF_TEXT = "<|endoftext|>"
TIKTOKEN_VOCAB_SIZE = 1 << 17
"""Ids of a TikTokenizer without --vocab-size, special tokens included."""
MOST_BYTES = 1 << 28
"""Largest size of a tokenizer's file: vocabularies of a quarter of a million tokens have about ten million bytes."""
HUGGING_FACE_FILES = ("tokenizer*", "vocab*", "*bpe*", "*.model", "*.tiktoken", "*.spm", "tekken.json")
"""Patterns of the files of a tokenizer of Hugging Face, of which a folder has at least one."""
T = TypeVar("T")


class FileTokenizer:
    """Base of the tokenizers that are read from one or two files.

    Attributes:
        vocab_size, eod, pad: see `Tokenizer`.
    """

    def __init__(self, paths: Sequence[str], vocab_size: int, eod: int, pad: int = NO_PAD) -> None:
        self._paths = [str(Path(path).resolve()) for path in paths]
        self.vocab_size, self.eod = vocab_size, eod
        # If padding and end of document had one id, masking it would hide every end of document.
        self.pad = NO_PAD if pad in (eod, NO_PAD) else pad

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """Kind, files and size of the vocabulary."""
        kind = type(self).__name__
        return OrderedDict({"class": kind, "paths": self._paths, "vocab_size": self.vocab_size})


class GPT2BPETokenizer(FileTokenizer):
    """GPT-2's byte-pair encoding, from its vocab.json and merges.txt."""

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        _prepare("GPT2BPETokenizer", ("--vocab-file", vocab_file), ("--merge-file", merge_file))
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        read = lambda: Tokenizer(models.BPE.from_file(vocab_file, merge_file))  # noqa: E731
        self._tokenizer = _read("--vocab-file", f"{vocab_file} --merge-file {merge_file}", "tokenizers", read)
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        eod = self._tokenizer.token_to_id(END_OF_TEXT)
        if eod is None:
            raise ConfigError(
                "--vocab-file", vocab_file, f"has no {END_OF_TEXT}", "give the vocab.json of a GPT-2 model"
            )
        super().__init__((vocab_file, merge_file), self._tokenizer.get_vocab_size(), eod)

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


class SentencePieceTokenizer(FileTokenizer):
    """A SentencePiece model; its end of sequence ends documents, and no begin of sequence is added."""

    def __init__(self, kind: str, model_file: str) -> None:
        _prepare(kind, ("--tokenizer-model", model_file))
        from sentencepiece import SentencePieceProcessor

        read = lambda: SentencePieceProcessor(model_file=model_file)  # noqa: E731
        self._model = _read("--tokenizer-model", model_file, "sentencepiece", read)
        eod = int(self._model.eos_id())
        if eod < 0:
            raise ConfigError(
                "--tokenizer-model", model_file, "has no end of sequence", "train the model with an eos_id"
            )
        super().__init__((model_file,), int(self._model.get_piece_size()), eod, int(self._model.pad_id()))

    def tokenize(self, text: str) -> list[int]:
        return list(self._model.encode(text))

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._model.decode([int(i) for i in ids]))


class TikTokenizer(FileTokenizer):
    """A tiktoken vocabulary in JSON, as Mistral's Tekken and Nemotron have it, read by megatron-core.

    Args:
        vocab_size: number of ids; the first `special_tokens` of them are special, the others the file's first tokens.
        pattern: `v1` or `v2`, how text is cut into words; default v2.
    """

    def __init__(self, model_file: str, vocab_size: int | None, special_tokens: int, pattern: str | None) -> None:
        _prepare("TikTokenizer", ("--tokenizer-model", model_file))
        from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer

        size = vocab_size or TIKTOKEN_VOCAB_SIZE

        def read() -> Any:
            return TikTokenTokenizer(
                model_file, num_special_tokens=special_tokens, pattern=pattern or "v2", vocab_size=size
            )

        self._model = _read("--tokenizer-model", model_file, f"megatron-core (for --vocab-size {size})", read)
        super().__init__((model_file,), size, self._model.eos_id, self._model.pad_id)

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """The base's entries, and the settings that decide how the file's tokens become ids."""
        identifiers = super().unique_identifiers
        identifiers["special_tokens"], identifiers["pattern"] = (
            self._model.num_special_tokens,
            self._model.tokenizer._pat_str,
        )
        return identifiers

    def tokenize(self, text: str) -> list[int]:
        return list(self._model.text_to_ids(text))

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._model.ids_to_text([int(i) for i in ids]))


def _prepare(kind: str, *files: tuple[str, str]) -> None:
    """Raise ConfigError if the library or a file (flag, path) is missing."""
    require_package("--tokenizer-type", kind, TOKENIZER_PACKAGES[kind])
    for flag, path in files:
        _require_file(flag, path)


def _require_file(flag: str, path: str) -> None:
    """Raise ConfigError if a path is no file, or one of a size that no tokenizer's file has."""
    if not Path(path).is_file():
        raise ConfigError(flag, path, "is not a file", "correct the path")
    size = Path(path).stat().st_size
    if not 0 < size <= MOST_BYTES:
        raise ConfigError(flag, path, f"has {size} bytes, 1 to {MOST_BYTES} are read", "correct the path")


def _require_folder(flag: str, path: str) -> None:
    """Raise ConfigError if a path is no folder, or none with a file of Hugging Face's tokenizers."""
    fix = "give the folder that holds tokenizer.json"
    if not Path(path).is_dir():
        raise ConfigError(flag, path, "is not a folder", fix)
    if not any(fnmatchcase(file.name, pattern) for file in Path(path).iterdir() for pattern in HUGGING_FACE_FILES):
        raise ConfigError(flag, path, "holds no tokenizer's file", fix)


def _read(flag: str, value: str, library: str, read: Callable[[], T]) -> T:
    """Make the library read a file, and turn its error into one line: it raises a dozen types, some without a message."""
    try:
        return read()
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        rule = f"{library} cannot read it ({reason})"
        raise ConfigError(flag, value, rule, "give a complete file of this tokenizer type") from error


SENTENCE_PIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
"""Three upstream names of one tokenizer."""
MODEL_TYPES = ("HuggingFaceTokenizer", "TikTokenizer", *SENTENCE_PIECE_TYPES)
"""Types that read --tokenizer-model."""
TYPES = ("ByteTokenizer", "NullTokenizer", "GPT2BPETokenizer", *MODEL_TYPES)


class Tokenizer(Protocol):
    """The interface of a tokenizer for the datasets and the model builder."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, before the embedding is padded."""
        ...

    @property
    def eod(self) -> int:
        """The id that ends a document."""
        ...

    @property
    def pad(self) -> int:
        """The id of padding, or -1."""
        ...

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """Everything that the tokenizer's ids depend on; part of the key of every cache."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, without an end of document."""
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    vocab_size = 257
    eod = 256
    pad = NO_PAD

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict({"class": "ByteTokenizer"})

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Bytes that are no UTF-8 (a sample may start inside a character) become U+FFFD; ends of documents vanish."""
        data = bytes(i for i in ids if i != self.eod)
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return data.decode("utf-8", "replace")


class NullTokenizer:
    """Texts that consist of ids, separated by spaces. The last id of the vocabulary ends a document."""

    pad = NO_PAD

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict({"class": "NullTokenizer", "vocab_size": self.vocab_size})

    def tokenize(self, text: str) -> list[int]:
        """The ids in the text; raises ConfigError for a word that is not an id of the vocabulary."""
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit() and len(word) < 20 and int(word) < self.vocab_size):
                raise ConfigError(
                    "--tokenizer-type",
                    "NullTokenizer",
                    f"the text holds {word[:40]!r}, which is not an id below --vocab-size {self.vocab_size}",
                    "give numbers separated by spaces, or another tokenizer",
                )
            ids.append(int(word))
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)


class HuggingFaceTokenizer:
    """A tokenizer folder saved by Hugging Face; nothing is downloaded and no code of the folder is run.

    Raises:
        ConfigError: no package `transformers`, the folder is missing or broken, or it names no end of sequence.
    """

    def __init__(self, folder: str) -> None:
        self._path = folder
        require_package("--tokenizer-type", "HuggingFaceTokenizer", TOKENIZER_PACKAGES["HuggingFaceTokenizer"])
        _require_folder("--tokenizer-model", folder)
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # for a broken folder the loader raises a dozen types, down to bare Exception
            reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
            raise ConfigError(
                "--tokenizer-model",
                folder,
                f"transformers cannot read it ({reason})",
                "give a complete tokenizer folder",
            ) from error
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                "--tokenizer-model",
                folder,
                "names no end-of-sequence token",
                "set eos_token in its tokenizer_config.json",
            )

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def eod(self) -> int:
        return int(self._tokenizer.eos_token_id)

    @property
    def pad(self) -> int:
        # Many tokenizers use the end of sequence as padding too; masking it would hide every end of document.
        pad = self._tokenizer.pad_token_id
        return NO_PAD if pad is None or pad == self.eod else int(pad)

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        path = str(Path(self._path).resolve())
        return OrderedDict({"class": "HuggingFaceTokenizer", "path": path, "vocab_size": self.vocab_size})

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer's files, and the settings of a tiktoken file; each field is the flag of its name."""

    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    tiktoken_num_special_tokens: int = 1000
    tiktoken_pattern: str | None = None


def build_tokenizer(tokenizer_type: str | None, files: TokenizerFiles, vocab_size: int | None) -> Tokenizer:
    """The tokenizer of the flags; bytes by default.

    Args:
        tokenizer_type: one of TYPES, or None.
        vocab_size: the vocabulary of `NullTokenizer` and `TikTokenizer`; for the others the smallest allowed size of the model's
            embedding.
    Raises:
        ConfigError: an unknown type, a flag the type lacks or cannot use, missing files, a vocabulary too small.
    """
    check_tokenizer_flags(tokenizer_type, files, vocab_size)
    if vocab_size is not None and vocab_size < 2:
        raise ConfigError("--vocab-size", vocab_size, "must be at least 2", "give the number of token ids")
    tokenizer = _build(tokenizer_type, files, vocab_size)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            "--vocab-size",
            vocab_size,
            f"the tokenizer has {tokenizer.vocab_size} ids",
            f"use at least {tokenizer.vocab_size} or drop the flag",
        )
    return tokenizer


def check_tokenizer_flags(tokenizer_type: str | None, files: TokenizerFiles, vocab_size: int | None) -> None:
    """Raise ConfigError if a type is unknown or lacks a flag; opens no file."""
    _require_known(tokenizer_type)
    placeholder = "FOLDER" if tokenizer_type == "HuggingFaceTokenizer" else "FILE"
    lacking = (
        (tokenizer_type in MODEL_TYPES and files.tokenizer_model is None, f"add --tokenizer-model {placeholder}"),
        (tokenizer_type == "GPT2BPETokenizer" and files.vocab_file is None, "add --vocab-file FILE"),
        (tokenizer_type == "GPT2BPETokenizer" and files.merge_file is None, "add --merge-file FILE"),
    )
    for is_lacking, fix in lacking:
        if is_lacking:
            raise ConfigError("--tokenizer-type", tokenizer_type, "needs the tokenizer's files", fix)
    if tokenizer_type == "NullTokenizer" and vocab_size is None:
        raise ConfigError("--tokenizer-type", tokenizer_type, "needs the number of ids", "add --vocab-size N")


def require_readable(tokenizer_type: str | None, files: TokenizerFiles) -> None:
    """Raise ConfigError for a path that holds nothing a tokenizer of this type reads; opens no file.

    A path that does not exist is none of these: it may be one of another machine.
    """
    model, is_gpt2 = files.tokenizer_model, tokenizer_type == "GPT2BPETokenizer"
    for flag, path in (
        ("--tokenizer-model", model if tokenizer_type in MODEL_TYPES else None),
        ("--vocab-file", files.vocab_file if is_gpt2 else None),
        ("--merge-file", files.merge_file if is_gpt2 else None),
    ):
        if path is not None and Path(path).exists():
            require_kind = _require_folder if tokenizer_type == "HuggingFaceTokenizer" else _require_file
            require_kind(flag, path)


def _require_known(tokenizer_type: str | None) -> None:
    """Raise ConfigError for an unknown type."""
    if tokenizer_type is not None and tokenizer_type not in TYPES:
        raise ConfigError("--tokenizer-type", tokenizer_type, "is not supported", f"use {one_of(TYPES)}")


def refuse_unread_files(tokenizer_type: str | None, files: TokenizerFiles) -> None:
    """Raise ConfigError for an unknown type, and for a file that the type does not read."""
    _require_known(tokenizer_type)
    by_gpt2, by_model = ("GPT2BPETokenizer",), MODEL_TYPES
    for flag, path, readers in (
        ("--tokenizer-model", files.tokenizer_model, by_model),
        ("--vocab-file", files.vocab_file, by_gpt2),
        ("--merge-file", files.merge_file, by_gpt2),
    ):
        if path is not None and tokenizer_type not in readers:
            rule = f"is used by --tokenizer-type {one_of(readers)} only"
            raise ConfigError(flag, path, rule, "add that flag or drop this one")
    _refuse_tiktoken_settings(tokenizer_type, files)


def _refuse_tiktoken_settings(tokenizer_type: str | None, files: TokenizerFiles) -> None:
    special, usual = files.tiktoken_num_special_tokens, TokenizerFiles().tiktoken_num_special_tokens
    for flag, value in (
        ("--tiktoken-pattern", files.tiktoken_pattern),
        ("--tiktoken-num-special-tokens", special if special != usual else None),
    ):
        if value is not None and tokenizer_type != "TikTokenizer":
            rule = "is used by --tokenizer-type TikTokenizer only"
            raise ConfigError(flag, value, rule, "add that flag or drop this one")


def _build(tokenizer_type: str | None, files: TokenizerFiles, vocab_size: int | None) -> Tokenizer:
    if tokenizer_type in (None, "ByteTokenizer"):
        return ByteTokenizer()
    if tokenizer_type == "NullTokenizer":
        assert vocab_size is not None
        return NullTokenizer(vocab_size)
    if tokenizer_type == "GPT2BPETokenizer":
        assert files.vocab_file is not None and files.merge_file is not None
        return GPT2BPETokenizer(files.vocab_file, files.merge_file)
    assert tokenizer_type is not None and files.tokenizer_model is not None
    if tokenizer_type == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(files.tokenizer_model)
    if tokenizer_type == "TikTokenizer":
        special_tokens, pattern = files.tiktoken_num_special_tokens, files.tiktoken_pattern
        return TikTokenizer(files.tokenizer_model, vocab_size, special_tokens, pattern)
    return SentencePieceTokenizer(tokenizer_type, files.tokenizer_model)
