"""The completion mark: no flipped bit is read as another value, and nothing that a save does not write is accepted."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from megatron.training.checkpoint import folder as cf
from megatron.training.checkpoint.mark import MARK, Damaged, mark_text, read_mark
from moe_overlap.describe.errors import ConfigError

CONTENT: dict[str, Any] = {
    "step": 300,
    "order": 2,
    "progress": {"iteration": 300, "skipped": 0, "train_samples": 2400, "valid_samples": 0},
    "fingerprint": {"--num-layers": 4, "--normalization": "RMSNorm", "--moe-layer-freq": [1, 0]},
    "arguments": ["--num-layers", "4"],
    "layout": {"world": 2, "tensor": 1},
    "scheduler": {"max_lr": 1e-3, "num_steps": 160, "lr_decay_style": "cosine"},
    "optimizer": {"name": "adam", "precision": "bf16", "steps": 300, "scaler": {"scale": 1024.0}},
    "random_states": True,
    "versions": {"torch": "2.13.0"},
    "files": {"__0_0.distcp": [17, 99], ".metadata": [5, 7]},
}


def folder_with(tmp_path: Path, text: str | bytes) -> Path:
    folder = tmp_path / "step-000300"
    folder.mkdir(exist_ok=True)
    (folder / MARK).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def first_format(**changed: Any) -> str:
    return json.dumps({"format": 1, **CONTENT, **changed})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read_mark(folder_with(tmp_path, mark_text(CONTENT))) == {"format": 2, **CONTENT}
    assert read_mark(folder_with(tmp_path, first_format())) == {"format": 1, **CONTENT}


def test_no_flipped_bit_changes_a_value(tmp_path: Path) -> None:
    text = mark_text(CONTENT).encode()
    draw = random.Random(16)
    seen = {"damaged": 0, "incomplete": 0}
    for position in draw.sample(range(len(text)), 250):
        flipped = bytearray(text)
        flipped[position] ^= 1 << draw.randrange(8)
        try:
            mark = read_mark(folder_with(tmp_path, bytes(flipped)))
        except Damaged:
            seen["damaged"] += 1
            continue
        seen["incomplete"] += mark is None
        # A flip between two kinds of white space, or into a version that is not read.
        assert mark is None or mark == {"format": 2, **CONTENT} or mark["format"] == 3
    assert seen["damaged"] > 200


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"colour": 1}, "holds colour, which no save writes"),
        ({"step": -1}, "holds a value of step"),
        ({"step": 301}, "is of step 301 and of step 300"),
        ({"step": 301, "progress": {}}, "is of step 301, its folder of step 300"),
        ({"order": "2"}, "holds a value of order"),
        ({"files": {"../x": [1, 2]}}, "holds a value of files"),
        ({"files": {"x": [1]}}, "holds a value of files"),
        ({"progress": {"iteration": 300.0}}, "holds a value of progress"),
        ({"layout": {"world": 0}}, "holds a value of layout"),
        ({"scheduler": {"max_lr": []}}, "holds a value of scheduler"),
        ({"optimizer": {"name": "adam"}}, "holds a value of optimizer"),
        ({"arguments": "--lr"}, "holds a value of arguments"),
        ({"format": True}, "names no format of ours"),
        ({"format": 0}, "names no format of ours"),
        ({"format": 2}, "is not what was written: its checksum differs"),
    ],
)
def test_what_no_save_writes(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(Damaged) as caught:
        read_mark(folder_with(tmp_path, first_format(**changed)))
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]}", "is not JSON"),
        ("[" * 100_000 + "]" * 100_000 + "}", "is not JSON|nests too deep"),
        ('{"a": ' * 100_000 + "1" + "}" * 100_000, "nests too deep"),
        ('{"step": ' + "9" * 10_000 + "}", "holds a number of thousands of digits"),
        ('{"step": NaN}', "holds NaN, which is no number"),
        ('{"step": 1e999}', "holds 1e999, which no number can be"),
        ('{"step": 1, "step": 2}', "holds the key step twice"),
        (b"\xff{}", "is not UTF-8 text"),
        ("{}", "lacks entries that every save writes"),
    ],
)
def test_hostile_text(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(Damaged, match=f"^({words})"):
        read_mark(folder_with(tmp_path, text))


def test_a_mark_that_breaks_off_is_none(tmp_path: Path) -> None:
    text = mark_text(CONTENT)
    for length in (0, 1, 40, len(text) - 3):
        assert read_mark(folder_with(tmp_path, text[:length])) is None


def save(folder: Path, step: int) -> Path:
    temporary = cf.open_temporary(folder, step)
    (temporary / "data").write_bytes(b"weights")
    resumable = {key: CONTENT[key] for key in CONTENT if key not in ("step", "order", "progress")}
    content = {**resumable, "progress": {"iteration": step}, "files": cf.checksums(temporary.iterdir())}
    return cf.publish(temporary, folder, step, content)


def test_a_damaged_mark_stops_only_the_run_that_needs_it(tmp_path: Path) -> None:
    first, second = save(tmp_path, 100), save(tmp_path, 200)
    (second / MARK).write_text((second / MARK).read_text().replace('"num_steps": 160', '"num_steps": 960'))
    for step in (None, 200):
        with pytest.raises(ConfigError) as caught:
            cf.choose(str(tmp_path), step, exit_on_missing=False)
        assert str(caught.value) == (
            f"--load {tmp_path}: step 200 is damaged: its complete.json is not what was written: its checksum differs; "
            "the last complete checkpoint is step 100: add --ckpt-step 100 or delete step-000200"
        )
    chosen = cf.choose(str(tmp_path), 100, exit_on_missing=False)
    assert chosen is not None and chosen.path == first
    save(tmp_path, 300)
    chosen = cf.choose(str(tmp_path), None, exit_on_missing=False)
    assert chosen is not None and chosen.step == 300


def test_every_file_is_listed_and_regular(tmp_path: Path) -> None:
    path = save(tmp_path, 100)
    stored = cf.choose(str(tmp_path), None, exit_on_missing=False)
    assert stored is not None
    cf.require_whole(stored, ["data"])
    with pytest.raises(ConfigError, match=r"complete\.json: is damaged: it lacks \.metadata; delete step-000100"):
        cf.require_whole(stored, ["data", ".metadata"])
    (path / "more\x1b[2J").write_text("")
    with pytest.raises(ConfigError, match=r"more\?\[2J: was not written by the save: complete\.json does not list it;"):
        cf.require_whole(stored, ["data"])
    for hostile in (lambda file: os.mkfifo(file), lambda file: file.symlink_to("/dev/zero")):
        (path / "data").unlink()
        hostile(path / "data")
        with pytest.raises(ConfigError, match="data: is no regular file; delete step-000100"):
            cf.verify(stored, ["data"])
