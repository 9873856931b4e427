"""Tokenizers: bytes, ids, and the files of Hugging Face, GPT-2, SentencePiece and tiktoken; what lacks is one line."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.training.cli import packages
from megatron.training.cli.arguments import parse
from megatron.training.cli.flags.without_effect import idle_flags
from megatron.training.cli.sizes import known_vocab_size
from megatron.training.cli.validation import validate
from megatron.training.data.sources import tokenizer_of_run
from megatron.training.data.tokenizers import (
    MODEL_TYPES,
    MOST_BYTES,
    ByteTokenizer,
    NullTokenizer,
    TokenizerFiles,
    build_tokenizer,
    refuse_unread_files,
    require_readable,
)
from moe_overlap.describe.errors import ConfigError

SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --lr 1e-3 --train-iters 1"
)


@pytest.mark.parametrize("text", ["", "plain", "Größe 中文 🙂 \x00\r\n", "\ud800 lone surrogate"])
def test_bytes_survive_the_byte_tokenizer(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == text
    assert all(0 <= i < 256 for i in ids)
    assert tokenizer.detokenize("ö".encode()[1:]) == "�"


def test_null_tokenizer() -> None:
    tokenizer = build_tokenizer("NullTokenizer", TokenizerFiles(), 100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)
    assert tokenizer.tokenize("1 2  99") == [1, 2, 99]
    assert tokenizer.detokenize([1, 2]) == "1 2"
    for wrong in ("1 x", "100", "-1", "1.5", "9" * 5000):
        with pytest.raises(ConfigError, match="not an id below --vocab-size 100"):
            tokenizer.tokenize(wrong)


@pytest.mark.parametrize(
    ("kind", "files", "vocab_size", "message"),
    [
        ("WordPiece", {}, None, "--tokenizer-type WordPiece: is not supported"),
        ("NullTokenizer", {}, None, "add --vocab-size N"),
        ("HuggingFaceTokenizer", {}, None, "add --tokenizer-model FOLDER"),
        ("HuggingFaceTokenizer", {"tokenizer_model": "/nowhere"}, None, "--tokenizer-model /nowhere: is not a folder"),
        ("Llama2Tokenizer", {}, None, "add --tokenizer-model FILE"),
        ("TikTokenizer", {}, None, "add --tokenizer-model FILE"),
        ("GPT2BPETokenizer", {"vocab_file": "v"}, None, "add --merge-file FILE"),
        ("GPT2BPETokenizer", {"merge_file": "m"}, None, "add --vocab-file FILE"),
        (None, {}, 100, "--vocab-size 100: the tokenizer has 257 ids"),
        ("NullTokenizer", {}, 1, "--vocab-size 1: must be at least 2"),
    ],
)
def test_wrong_tokenizer_flags(kind: str | None, files: dict[str, str], vocab_size: int | None, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_tokenizer(kind, TokenizerFiles(**files), vocab_size)
    assert message in str(caught.value)


def test_hugging_face_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<eos>": 0, "hello": 1, "world": 2, "<unk>": 3}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")
    fast.save_pretrained(tmp_path / "good")
    transformers.PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(tmp_path / "no_end")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")

    tokenizer = build_tokenizer("HuggingFaceTokenizer", TokenizerFiles(str(tmp_path / "good")), None)
    assert (tokenizer.vocab_size, tokenizer.eod) == (4, 0)
    assert tokenizer.pad == -1  # not 0: that would mask every end of document
    assert tokenizer.tokenize("hello world there") == [1, 2, 3]
    assert tokenizer.detokenize([1, 2]) == "hello world"
    for folder, message in (("no_end", "names no end-of-sequence token"), ("broken", "transformers cannot read it")):
        with pytest.raises(ConfigError, match=message):
            build_tokenizer("HuggingFaceTokenizer", TokenizerFiles(str(tmp_path / folder)), None)


def gpt2_files(folder: Path) -> TokenizerFiles:
    """A vocabulary trained on two sentences, as GPT-2's files."""
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.ByteLevelBPETokenizer()
    text = ["the cat sat on the mat", "the dog sat on the cat"]
    trained.train_from_iterator(text, vocab_size=280, min_frequency=1, special_tokens=["<|endoftext|>"])
    vocab, merges = trained.save_model(str(folder))
    return TokenizerFiles(vocab_file=vocab, merge_file=merges)


def test_gpt2(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    files = gpt2_files(tmp_path)
    tokenizer = build_tokenizer("GPT2BPETokenizer", files, None)
    twin = transformers.GPT2Tokenizer(files.vocab_file, files.merge_file)  # the plain Python of the same format
    for text in ("the cat sat", " the  dog\n\n", "Größe 中文 🙂", "don't"):
        ids = tokenizer.tokenize(text)
        assert ids == twin.convert_tokens_to_ids(twin.tokenize(text)) and tokenizer.detokenize(ids) == text
    assert len(tokenizer.tokenize("the cat")) < 5  # pairs were merged
    entries = len(json.loads(Path(str(files.vocab_file)).read_text()))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (entries, 0, -1)
    with pytest.raises(ConfigError, match="--vocab-file /nowhere: is not a file"):
        build_tokenizer("GPT2BPETokenizer", TokenizerFiles(vocab_file="/nowhere", merge_file=files.merge_file), None)
    with pytest.raises(ConfigError, match="tokenizers cannot read it"):
        swapped = TokenizerFiles(vocab_file=files.merge_file, merge_file=files.vocab_file)
        build_tokenizer("GPT2BPETokenizer", swapped, None)
    without_end = json.loads(Path(str(files.vocab_file)).read_text())
    del without_end["<|endoftext|>"]
    Path(str(files.vocab_file)).write_text(json.dumps(without_end))
    with pytest.raises(ConfigError, match=r"vocab.json: has no <\|endoftext\|>"):
        build_tokenizer("GPT2BPETokenizer", files, None)


SENTENCE_PIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


@pytest.mark.parametrize("kind", SENTENCE_PIECE)
def test_sentence_piece(tmp_path: Path, kind: str) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("the cat sat on the mat\nthe dog sat on the cat\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "m"), vocab_size=30, minloglevel=2
    )
    tokenizer = build_tokenizer(kind, TokenizerFiles(str(tmp_path / "m.model")), None)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (30, 2, -1)
    assert tokenizer.detokenize(tokenizer.tokenize("the cat sat")) == "the cat sat"


class FakePieces:
    """The part of SentencePieceProcessor that is used; the file holds the end's and the padding's id."""

    def __init__(self, model_file: str) -> None:
        self._end, self._pad = (int(word) for word in Path(model_file).read_text().split())

    def get_piece_size(self) -> int:
        return 300

    def eos_id(self) -> int:
        return self._end

    def pad_id(self) -> int:
        return self._pad

    def encode(self, text: str) -> list[int]:
        return [b + 3 for b in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i - 3 for i in ids).decode()


def test_sentence_piece_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer that we make of the package's answers; the package itself is stood in for."""
    monkeypatch.setattr(packages, "is_installed", lambda name: name == "sentencepiece")
    monkeypatch.setitem(sys.modules, "sentencepiece", SimpleNamespace(SentencePieceProcessor=FakePieces))
    for name, content in {"good": "2 0", "same": "2 2", "no_end": "-1 0", "broken": "x"}.items():
        (tmp_path / name).write_text(content)

    def build(name: str) -> Any:
        return build_tokenizer("Llama2Tokenizer", TokenizerFiles(str(tmp_path / name)), None)

    good = build("good")
    assert (good.vocab_size, good.eod, good.pad) == (300, 2, 0)
    assert good.detokenize(good.tokenize("ab")) == "ab"
    assert good.unique_identifiers != build("same").unique_identifiers
    assert build("same").pad == -1
    for name, message in (("no_end", "has no end of sequence"), ("broken", "cannot read it"), ("none", "not a file")):
        with pytest.raises(ConfigError, match=message):
            build(name)


def tekken(path: Path, tokens: int = 300) -> TokenizerFiles:
    """A tiktoken vocabulary of all bytes and some pairs."""
    words = [bytes([b]) for b in range(256)] + [bytes([97, 97 + i]) for i in range(tokens - 256)]
    rows = [{"rank": i, "token_bytes": base64.b64encode(w).decode(), "token_str": ""} for i, w in enumerate(words)]
    path.write_text(json.dumps(rows))
    return TokenizerFiles(str(path), tiktoken_num_special_tokens=10)


def test_tiktoken(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    tokenizer = build_tokenizer("TikTokenizer", tekken(tmp_path / "t.json"), 310)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (310, 2, 4)
    assert tokenizer.tokenize("abz") == [10 + 257, 10 + ord("z")]
    assert tokenizer.detokenize(tokenizer.tokenize("abz")) == "abz"


class FakeEncoding:
    """tiktoken.Encoding without merges: every byte is a token."""

    def __init__(self, name: str, pat_str: str, mergeable_ranks: dict[bytes, int], special_tokens: dict[str, int]):
        self._ranks, self._pat_str = mergeable_ranks, pat_str

    def encode(self, text: str, allowed_special: object) -> list[int]:
        return [self._ranks[bytes([b])] for b in text.encode()]

    def decode_single_token_bytes(self, token: int) -> bytes:
        return next(word for word, rank in self._ranks.items() if rank == token)


def test_tiktoken_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's reading of the file; the package itself is stood in for."""
    from megatron.core.tokenizers.text.libraries import tiktoken_tokenizer

    monkeypatch.setattr(packages, "is_installed", lambda name: name == "tiktoken")
    monkeypatch.setattr(tiktoken_tokenizer, "tiktoken", SimpleNamespace(Encoding=FakeEncoding), raising=False)
    files = tekken(tmp_path / "t.json")
    tokenizer = build_tokenizer("TikTokenizer", files, 310)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (310, 2, 4)
    assert tokenizer.tokenize("ab") == [107, 108] and tokenizer.detokenize([107, 108]) == "ab"
    with pytest.raises(ConfigError, match="--tokenizer-model .*t.json: megatron-core .for --vocab-size 131072. cannot"):
        build_tokenizer("TikTokenizer", files, None)  # the file has fewer tokens


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_a_path_that_holds_no_tokenizer_is_refused_before_it_is_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not exist may be on another machine."""
    monkeypatch.setattr(packages, "is_installed", lambda name: True)
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    file.write_text("")
    rules = {
        folder: "is not a file; correct the path",
        file: f"has 0 bytes, 1 to {MOST_BYTES} are read; correct the path",
    }
    if kind == "HuggingFaceTokenizer":
        fix = "give the folder that holds tokenizer.json"
        rules = {folder: f"holds no tokenizer's file; {fix}", file: f"is not a folder; {fix}"}
    for path, rule in rules.items():
        for check in (require_readable, partial(build_tokenizer, vocab_size=None)):
            with pytest.raises(ConfigError) as caught:
                check(kind, TokenizerFiles(str(path)))
            assert str(caught.value) == f"--tokenizer-model {path}: {rule}"
    require_readable(kind, TokenizerFiles(str(tmp_path / "gone")))
    for name in ("tokenizer.json", "vocab.txt", "spiece.model", "tekken.json"):
        (folder / name).write_text("{}")
        require_readable("HuggingFaceTokenizer", TokenizerFiles(str(folder)))
        (folder / name).unlink()


@pytest.mark.parametrize("kind", packages.TOKENIZER_PACKAGES)
def test_a_missing_package_is_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda name: False)
    files = TokenizerFiles(str(tmp_path), vocab_file="v", merge_file="m")
    with pytest.raises(ConfigError, match=f"^--tokenizer-type {kind}: needs the package .*; pip install "):
        build_tokenizer(kind, files, None)


@pytest.mark.parametrize(
    ("kind", "files", "message"),
    [
        (None, {"tokenizer_model": "m"}, "--tokenizer-model m: is used by"),
        (
            "HuggingFaceTokenizer",
            {"vocab_file": "v"},
            "--vocab-file v: is used by --tokenizer-type GPT2BPETokenizer only",
        ),
        ("Llama2Tokenizer", {"tiktoken_pattern": "v1"}, "--tiktoken-pattern v1: is used by"),
        (None, {"tiktoken_num_special_tokens": 10}, "--tiktoken-num-special-tokens 10: is used by"),
    ],
)
def test_a_file_that_is_not_read(kind: str | None, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_unread_files(kind, TokenizerFiles(**files))
    assert message in str(caught.value)


def test_files_that_another_type_would_read_are_said(tmp_path: Path) -> None:
    """Words after a real list's replace its tokenizer; its files cannot be taken back."""
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text(json.dumps({"a": 0, "b": 1, "c": 2}))
    files = f"--vocab-file {vocabulary} --merge-file /nowhere"
    for words, ids, idle in (
        (files, 3, {"--merge-file"}),
        (f"{files} --vocab-size 300", 300, {"--vocab-file", "--merge-file"}),
        ("--vocab-file /nowhere --vocab-size 300", 300, {"--vocab-file"}),
        (
            f"{files} --tokenizer-model /nowhere --tokenizer-type NullTokenizer --vocab-size 9",
            9,
            {"--vocab-file", "--merge-file", "--tokenizer-model"},
        ),
    ):
        parsed = parse([*SIZES.split(), *words.split()])
        validate(parsed.config, 1)
        tokenizer = tokenizer_of_run(parsed.config.data)
        assert (type(tokenizer), tokenizer.vocab_size, known_vocab_size(parsed.config)) == (NullTokenizer, ids, ids)
        assert {flag for flag, _ in idle_flags(parsed)} == idle
