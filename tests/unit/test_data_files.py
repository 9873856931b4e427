"""What data flags name: blends, splits, tokenizers, and indexed datasets whose two files do not fit each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.data_files import (
    HEADER,
    MAGIC,
    Blend,
    IndexedFacts,
    cache_folder,
    check_indexed_dataset,
    parse_blend,
    parse_split,
)
from megatron.training.tokenizers import ByteTokenizer, build_tokenizer
from moe_overlap.describe.errors import ConfigError


def write_dataset(prefix: Path, lengths: list[int]) -> str:
    """The format of the documentation, spelled out by hand: ids of 2 bytes."""
    offsets = [2 * sum(lengths[:i]) for i in range(len(lengths))]
    index = HEADER.pack(MAGIC, 1, 8, len(lengths), len(lengths) + 1)
    index += b"".join(n.to_bytes(4, "little") for n in lengths)
    index += b"".join(n.to_bytes(8, "little") for n in [*offsets, *range(len(lengths) + 1)])
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(bytes(2 * sum(lengths)))
    return str(prefix)


@pytest.mark.parametrize(
    ("words", "blend"),
    [
        (["a"], Blend(("a",), None)),
        (["a", "b"], Blend(("a", "b"), None)),
        (["0.3", "a", "0.7", "b"], Blend(("a", "b"), (0.3, 0.7))),
        ([" 1 ", " a "], Blend(("a",), (1.0,))),
    ],
)
def test_blend(words: list[str], blend: Blend) -> None:
    assert parse_blend(words) == blend


@pytest.mark.parametrize("words", [[], [""], ["1", "a", "b"], ["a", "1"], ["1"], ["-1", "a"], ["0", "a"], ["1", "2"]])
def test_a_wrong_blend_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--data-path"):
        parse_blend(words)


def test_split() -> None:
    assert parse_split("969, 30, 1") == (969, 30, 1)
    assert parse_split("1") == (1, 0, 0)
    for wrong in ("", "a,b,c", "1,2,3,4", "0,0,0", "-1,2", "1;2", "inf,1", "1,,2"):
        with pytest.raises(ConfigError, match="--split"):
            parse_split(wrong)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder(None) == Path("/somewhere/moe_overlap")
    assert cache_folder("here") == Path("here")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder(None) == Path.home() / ".cache" / "moe_overlap"


def test_a_whole_dataset_is_accepted(tmp_path: Path) -> None:
    assert check_indexed_dataset(write_dataset(tmp_path / "d", [3, 4, 5])) == IndexedFacts(3, 12, 2)


@pytest.mark.parametrize(
    ("suffix", "damage", "message"),
    [
        (".bin", lambda data: data[:-2], "d.bin has 22 bytes, its index says 24"),
        (".bin", lambda data: data + b"\0", "d.bin has 25 bytes"),
        (".bin", lambda data: b"", "holds no tokens"),
        (".idx", lambda data: data[:-1], "d.idx has 101 bytes, its header says 102"),
        (".idx", lambda data: data[:20], "not the index of a Megatron dataset"),
        (".idx", lambda data: b"GARBAGE!!" + data[9:], "not the index of a Megatron dataset"),
        (".idx", lambda data: data[:17] + b"\x06" + data[18:], "type code 6"),
        (".idx", lambda data: data[:9] + b"\x02" + data[10:], "version 2"),
    ],
)
def test_a_damaged_dataset_is_refused(tmp_path: Path, suffix: str, damage: object, message: str) -> None:
    prefix = write_dataset(tmp_path / "d", [3, 4, 5])
    path = Path(prefix + suffix)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ConfigError) as caught:
        check_indexed_dataset(prefix)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"--data-path {prefix}")


def test_a_missing_file_is_named_with_the_likely_fix(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", [3])
    with pytest.raises(ConfigError, match=r"d\.bin\.idx does not exist; give the prefix without the ending: .*/d$"):
        check_indexed_dataset(prefix + ".bin")
    Path(prefix + ".idx").unlink()
    with pytest.raises(ConfigError, match=r"d\.idx does not exist; the dataset is incomplete"):
        check_indexed_dataset(prefix)
    with pytest.raises(ConfigError, match=r"nowhere\.idx does not exist"):
        check_indexed_dataset(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("text", ["", "plain", "Größe 中文 🙂 \x00\r\n", "\ud800 lone surrogate"])
def test_bytes_survive_the_byte_tokenizer(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == text
    assert all(0 <= i < 256 for i in ids)
    assert tokenizer.detokenize("ö".encode()[1:]) == "�"


def test_null_tokenizer() -> None:
    tokenizer = build_tokenizer("NullTokenizer", None, 100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)
    assert tokenizer.tokenize("1 2  99") == [1, 2, 99]
    assert tokenizer.detokenize([1, 2]) == "1 2"
    for wrong in ("1 x", "100", "-1", "1.5"):
        with pytest.raises(ConfigError, match="not an id below --vocab-size 100"):
            tokenizer.tokenize(wrong)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("WordPiece", None, None), "--tokenizer-type WordPiece: is not supported"),
        (("NullTokenizer", None, None), "add --vocab-size N"),
        (("HuggingFaceTokenizer", None, None), "add --tokenizer-model FOLDER"),
        (("HuggingFaceTokenizer", "/nowhere", None), "--tokenizer-model /nowhere: is not a folder"),
        ((None, "folder", None), "--tokenizer-model folder: is used by"),
        ((None, None, 100), "--vocab-size 100: the tokenizer has 257 ids"),
        (("NullTokenizer", None, 1), "--vocab-size 1: must be at least 2"),
    ],
)
def test_wrong_tokenizer_flags(flags: tuple[str | None, str | None, int | None], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_tokenizer(*flags)
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
    (tmp_path / "empty").mkdir()

    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "good"), None)
    assert (tokenizer.vocab_size, tokenizer.eod) == (4, 0)
    assert tokenizer.pad == -1  # not 0: that would mask every end of document
    assert tokenizer.tokenize("hello world there") == [1, 2, 3]
    assert tokenizer.detokenize([1, 2]) == "hello world"
    for folder, message in (("no_end", "names no end-of-sequence token"), ("empty", "transformers cannot read it")):
        with pytest.raises(ConfigError, match=message):
            build_tokenizer("HuggingFaceTokenizer", str(tmp_path / folder), None)


def test_no_torch() -> None:
    modules = "megatron.training.tokenizers, megatron.training.corpus, megatron.training.data_files"
    code = f"import sys, {modules}; print([m for m in sys.modules if m in ('torch', 'numpy', 'transformers')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
