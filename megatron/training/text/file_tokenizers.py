"""Tokenizers read from one or two files: GPT-2's byte-pair encoding, SentencePiece, tiktoken. No torch, but for tiktoken's.

Each is the library's own; ids are those that Megatron-LM's tokenizer of the same name gives. Where the library is not
installed, where a file is missing or broken, a ConfigError says so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megatron.training.rules.packages import TOKENIZER_PACKAGES, require_package
from moe_overlap.describe.errors import ConfigError

NO_PAD = -1
"""megatron-core masks tokens equal to `pad`; none of ours ever are, because samples are always full."""
END_OF_TEXT = "<|endoftext|>"
TIKTOKEN_VOCAB_SIZE = 1 << 17
"""Of a TikTokenizer without --vocab-size, special tokens included."""
T = TypeVar("T")


class FileTokenizer:
    """What the tokenizers of this file share.

    Attributes:
        vocab_size, eod, pad: as in `Tokenizer`.
    """

    def __init__(self, paths: Sequence[str], vocab_size: int, eod: int, pad: int = NO_PAD) -> None:
        self._paths = [str(Path(path).resolve()) for path in paths]
        self.vocab_size, self.eod = vocab_size, eod
        # Masking padding that is the end of documents too would hide every one of them.
        self.pad = NO_PAD if pad in (eod, NO_PAD) else pad

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """Kind, files and vocabulary."""
        kind = type(self).__name__
        return OrderedDict({"class": kind, "paths": self._paths, "vocab_size": self.vocab_size})


class GPT2BPETokenizer(FileTokenizer):
    """GPT-2's vocab.json and merges.txt."""

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
        vocab_size: ids in all; the first `special_tokens` of them are special, the rest the file's first tokens.
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
        """Also what decides how the file's tokens become ids."""
        known = super().unique_identifiers
        known["special_tokens"], known["pattern"] = self._model.num_special_tokens, self._model.tokenizer._pat_str
        return known

    def tokenize(self, text: str) -> list[int]:
        return list(self._model.text_to_ids(text))

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._model.ids_to_text([int(i) for i in ids]))


def _prepare(kind: str, *files: tuple[str, str]) -> None:
    """Raises ConfigError where the library or a file (flag, path) is missing."""
    require_package("--tokenizer-type", kind, TOKENIZER_PACKAGES[kind])
    for flag, path in files:
        if not Path(path).is_file():
            raise ConfigError(flag, path, "is not a file", "correct the path")


def _read(flag: str, value: str, library: str, read: Callable[[], T]) -> T:
    """What the library makes of a file, or one line of why it could not: it raises a dozen types, bare ones among them."""
    try:
        return read()
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        rule = f"{library} cannot read it ({reason})"
        raise ConfigError(flag, value, rule, "give a complete file of this tokenizer type") from error
