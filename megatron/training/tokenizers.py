"""Text to token ids: bytes (the default), a Hugging Face tokenizer, or numbers that are ids already. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from moe_overlap.describe.errors import ConfigError

NO_PAD = -1
"""megatron-core masks tokens equal to `pad`; none of ours ever are, because samples are always full."""


class Tokenizer(Protocol):
    """What the datasets and the model builder ask of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids, before the embedding is padded."""
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
        """What the tokenizer's ids depend on; part of the key of every cache."""
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
    """Texts that are ids already, separated by spaces. The last id of the vocabulary ends a document."""

    pad = NO_PAD

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict({"class": "NullTokenizer", "vocab_size": self.vocab_size})

    def tokenize(self, text: str) -> list[int]:
        """Raises ConfigError for a word that is not an id of the vocabulary."""
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size):
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
    """A tokenizer folder as Hugging Face saves it; nothing is downloaded and no code of the folder is run.

    Raises:
        ConfigError: no package `transformers`, the folder is missing or broken, or it names no end of sequence.
    """

    def __init__(self, folder: str) -> None:
        self._path = folder
        if not Path(folder).is_dir():
            raise ConfigError(
                "--tokenizer-model", folder, "is not a folder", "give the folder that holds tokenizer.json"
            )
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                "--tokenizer-type", "HuggingFaceTokenizer", "needs the package transformers", "pip install transformers"
            ) from error
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the loader raises a dozen types, down to bare Exception, for a broken folder
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
        # Many tokenizers name the end of sequence as padding too; masking it would hide every end of document.
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


def build_tokenizer(tokenizer_type: str | None, tokenizer_model: str | None, vocab_size: int | None) -> Tokenizer:
    """The tokenizer the flags ask for; bytes without any.

    Args:
        tokenizer_type: `ByteTokenizer`, `HuggingFaceTokenizer`, `NullTokenizer` or None.
        tokenizer_model: a folder, for `HuggingFaceTokenizer`.
        vocab_size: the vocabulary of `NullTokenizer`; for the others the least size of the model's embedding.
    Raises:
        ConfigError: an unknown type, a flag the type lacks or cannot use, missing files, a vocabulary too small.
    """
    if tokenizer_model is not None and tokenizer_type != "HuggingFaceTokenizer":
        raise ConfigError(
            "--tokenizer-model",
            tokenizer_model,
            "is used by --tokenizer-type HuggingFaceTokenizer only",
            "add that flag or drop this one",
        )
    if vocab_size is not None and vocab_size < 2:
        raise ConfigError("--vocab-size", vocab_size, "must be at least 2", "give the number of token ids")
    tokenizer: Tokenizer
    match tokenizer_type:
        case None | "ByteTokenizer":
            tokenizer = ByteTokenizer()
        case "HuggingFaceTokenizer":
            if tokenizer_model is None:
                raise ConfigError(
                    "--tokenizer-type", tokenizer_type, "needs a tokenizer folder", "add --tokenizer-model FOLDER"
                )
            tokenizer = HuggingFaceTokenizer(tokenizer_model)
        case "NullTokenizer":
            if vocab_size is None:
                raise ConfigError("--tokenizer-type", tokenizer_type, "needs a vocabulary", "add --vocab-size N")
            tokenizer = NullTokenizer(vocab_size)
        case _:
            raise ConfigError(
                "--tokenizer-type",
                tokenizer_type,
                "is not supported",
                "use ByteTokenizer, HuggingFaceTokenizer or NullTokenizer",
            )
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            "--vocab-size",
            vocab_size,
            f"the tokenizer has {tokenizer.vocab_size} ids",
            f"use at least {tokenizer.vocab_size} or drop the flag",
        )
    return tokenizer
