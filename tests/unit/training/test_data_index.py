"""The inside of a dataset's index: lengths, offsets and document boundaries that no writer writes are one line."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from megatron.training.data import sources
from megatron.training.data.indexed import indexed_dataset
from megatron.training.data.sources import HEADER, check_indexed_dataset
from moe_overlap.commands.check_data import main as check_data
from moe_overlap.describe.errors import ConfigError

LENGTHS = [3, 1, 4, 1, 5, 9]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    path = str(tmp_path / "data")
    with indexed_dataset(path, 300) as writer:
        for length in LENGTHS:
            writer.add_document([7] * length)
    return path


def put(prefix: str, offset: int, form: str, value: int) -> str:
    """Overwrite one number of the index; what it is answered with."""
    with Path(prefix + ".idx").open("r+b") as file:
        file.seek(HEADER.size + offset)
        file.write(struct.pack(form, value))
    with pytest.raises(ConfigError) as caught:
        check_indexed_dataset(prefix)
    return str(caught.value)


S = len(LENGTHS)


@pytest.mark.parametrize(
    ("offset", "form", "value", "words"),
    [
        (4, "<i", -1, "gives sequence 1 a negative length"),
        (8, "<i", 2**31 - 1, "places sequence 3 elsewhere than behind the one before it"),
        (4 * S, "<q", 2, "places sequence 0 at byte 2"),
        (4 * S + 16, "<q", -8, "places sequence 2 elsewhere"),
        (12 * S, "<q", 1, "has document boundaries that do not span its 6 sequences"),
        (12 * S + 8 * S, "<q", 7, "has document boundaries that do not span its 6 sequences"),
        (12 * S + 16, "<q", 5, "ends document 2 before it begins"),
    ],
)
@pytest.mark.parametrize("sampled", [False, True])
def test_an_index_that_is_wrong_inside(
    prefix: str, monkeypatch: pytest.MonkeyPatch, offset: int, form: str, value: int, words: str, sampled: bool
) -> None:
    if sampled:
        monkeypatch.setattr(sources, "_WHOLE_ENTRIES", 2)
        monkeypatch.setattr(sources, "_BLOCK_ENTRIES", 3)
    line = put(prefix, offset, form, value)
    assert line.startswith(f"--data-path {prefix}: is corrupt: {prefix}.idx ") and words in line
    assert line.endswith("make it again with tools/preprocess_data.py")


def test_a_right_index(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = check_indexed_dataset(prefix)
    assert (facts.sequences, facts.tokens) == (S, sum(LENGTHS))
    monkeypatch.setattr(sources, "_WHOLE_ENTRIES", 2)
    monkeypatch.setattr(sources, "_BLOCK_ENTRIES", 3)
    assert check_indexed_dataset(prefix) == facts


def test_flipped_bits_are_refused_or_change_nothing(prefix: str) -> None:
    path, draw = Path(prefix + ".idx"), random.Random(7)
    written = path.read_bytes()
    for _ in range(300):
        flipped = bytearray(written)
        flipped[draw.randrange(len(written))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            facts = check_indexed_dataset(prefix)
        except ConfigError as error:
            assert "\n" not in str(error)
        else:
            # Equal documents may be cut elsewhere, and a type of the same width read otherwise.
            assert facts.sequences == S


def test_the_tool_checks_what_samples_leave_out(
    prefix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_data([prefix, "--vocab-size", "8"]) == 0
    assert capsys.readouterr().out == f"{prefix}: 6 sequences, 23 tokens, the highest id is 7\n"
    assert check_data([prefix, "--vocab-size", "7"]) == 2
    assert "has the token id 7, the vocabulary has 7; give its tokenizer's --vocab-size" in capsys.readouterr().err
    monkeypatch.setattr(sources, "_WHOLE_ENTRIES", 2)
    monkeypatch.setattr(sources, "_BLOCKS", 2)
    monkeypatch.setattr(sources, "_BLOCK_ENTRIES", 1)
    with Path(prefix + ".idx").open("r+b") as file:
        file.seek(HEADER.size + 4 * 2)
        file.write(struct.pack("<i", 5))
    check_indexed_dataset(prefix)
    assert check_data([prefix]) == 2
    assert "places sequence 3 elsewhere than behind the one before it; make it again" in capsys.readouterr().err


def test_a_negative_token_has_a_place(tmp_path: Path) -> None:
    with indexed_dataset(str(tmp_path / "wide"), 1 << 20) as writer:
        writer.add_document([7, 8, 9])
    with (tmp_path / "wide.bin").open("r+b") as file:
        file.seek(4)
        file.write(struct.pack("<i", -3))
    with pytest.raises(ConfigError, match="is corrupt: token 1 is -3;"):
        sources.token_range(str(tmp_path / "wide"))
