"""A flipped bit anywhere in a checkpoint: the load is refused in one line, or reads what was written."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.training.checkpoint.mark import MARK, Damaged, read_mark
from tests.faults.damage import DATA, checkpoint, load

FEW = 150


def flips(path: Path, bits: Iterable[int]) -> Iterator[None]:
    """Flip one bit of a file after the other, each for the time of one look."""
    content = path.read_bytes()
    for bit in bits:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        yield
    path.write_bytes(content)


def answer_of(path: Path, written: dict[str, Any]) -> str:
    """`refused`, `incomplete`, `another version`, or `as written`; nothing else is an answer."""
    try:
        mark = read_mark(path)
    except Damaged as error:
        assert "\n" not in str(error) and str(error).isprintable()
        return "refused"
    if mark is None:
        return "incomplete"
    if mark["format"] == written["format"]:
        assert mark == written
        return "as written"
    # A bit of the version itself: a mark of a version to come is not read.
    assert mark["format"] > written["format"]
    return "another version"


def answers(folder: Path, bits_of: Callable[[int], Iterable[int]], loads: bool) -> dict[str, int]:
    """Flip bits of a mark.

    Args:
        bits_of: which ones of so many bytes.
        loads: load the checkpoint after each flip; else only after those that are not refused.
    Returns:
        How often each answer came.
    """
    step = checkpoint(folder)
    written = read_mark(step)
    assert written is not None
    seen = dict.fromkeys(("refused", "incomplete", "another version", "as written"), 0)
    for _ in flips(step / MARK, bits_of((step / MARK).stat().st_size)):
        answer = answer_of(step, written)
        seen[answer] += 1
        if loads or answer != "refused":
            line = load(folder)
            assert line == "step 2 loads" if answer == "as written" else line.startswith("error: --load "), line
    return seen


def test_few_bits_of_the_mark(tmp_path: Path) -> None:
    seen = answers(tmp_path, lambda size: random.Random(16).sample(range(8 * size), FEW), loads=True)
    assert seen["refused"] > FEW * 0.9 and sum(seen.values()) == FEW


@pytest.mark.slow
def test_a_bit_of_every_byte_of_the_mark(tmp_path: Path) -> None:
    """All bits: `python -m tests.faults --flips`."""
    draw = random.Random(16)
    seen = answers(tmp_path, lambda size: [8 * byte + draw.randrange(8) for byte in range(size)], loads=False)
    assert seen["refused"] > 0.9 * sum(seen.values()) and seen["incomplete"] + seen["another version"] < 30, seen


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("version", [1, 2])
def test_bits_of_every_other_file(name: str, version: int, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, version) / name
    size = 8 * path.stat().st_size
    for _ in flips(path, random.Random(version).sample(range(size), min(size, 12))):
        line = load(tmp_path)
        assert line.startswith(f"error: --load {path}: is corrupt: its content is not what was written; "), line
    assert load(tmp_path) == "step 2 loads"
