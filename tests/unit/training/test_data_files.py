"""Tests of the data flags: blends, splits, and indexed datasets whose two files do not fit each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.data.sources import (
    HEADER,
    MAGIC,
    Blend,
    IndexedFacts,
    cache_folder,
    check_indexed_dataset,
    parse_blend,
    parse_split,
)
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
    write_dataset(tmp_path / "my_text_document", [3])
    with pytest.raises(ConfigError, match=r"my\.idx does not exist; did you mean .*/my_text_document\?$"):
        check_indexed_dataset(str(tmp_path / "my"))
    (tmp_path / "books.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"make a dataset of it: tools/preprocess_data\.py --input .*/books\.txt "):
        check_indexed_dataset(str(tmp_path / "books.txt"))
    Path(prefix + ".idx").unlink()
    with pytest.raises(ConfigError, match=r"d\.idx does not exist; the dataset is incomplete"):
        check_indexed_dataset(prefix)
    with pytest.raises(ConfigError, match=r"nowhere\.idx does not exist"):
        check_indexed_dataset(str(tmp_path / "nowhere"))


def test_no_torch() -> None:
    modules = "megatron.training.data.tokenizers, megatron.training.data.sources"
    code = f"import sys, {modules}; print([m for m in sys.modules if m in ('torch', 'numpy', 'transformers')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
