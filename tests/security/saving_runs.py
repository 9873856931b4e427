"""Saves with somebody at the folder, for test_saved_bytes.py. Called in the process of a launch."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron.training.checkpoint import saver
from moe_overlap.describe.errors import ConfigError
from tests.multiprocess.checkpoint_runs import train


def flip(file: Path) -> None:
    """Change a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def bits_flip_on_the_device(temporary: Path) -> None:
    flip(temporary / "__0_0.distcp")


def bits_of_the_index_flip(temporary: Path) -> None:
    flip(temporary / ".metadata")


def a_file_is_cut(temporary: Path) -> None:
    os.truncate(temporary / "__0_0.distcp", 100)


def a_file_vanishes(temporary: Path) -> None:
    (temporary / "common.pt").unlink()


def said_of(folder: str, change: Callable[[Path], None], before: bool = False) -> tuple[str, list[str]]:
    """What a run says whose folder somebody changes, and the entries that are left.

    Args:
        before: before the data is written; else between writing and reading back.
    """
    read_again, write = saver._read_again, saver.DirectSave._write

    def changed(temporary: Path, written: Any) -> Any:
        change(temporary)
        return read_again(temporary, written)

    def emptied(self: Any, by_key: Any, temporary: Any) -> None:
        change(Path(temporary))
        write(self, by_key, temporary)

    place: Any = (
        patch.object(saver.DirectSave, "_write", emptied) if before else patch.object(saver, "_read_again", changed)
    )
    said = ""
    with place:
        try:
            train(Path(folder), "run", f"--save {folder}/saved --save-interval 4")
        except ConfigError as error:
            said = str(error)
    return said, sorted(path.name for path in Path(folder, "saved").iterdir() if not path.name.startswith("."))


def a_folder_is_emptied(temporary: Path) -> None:
    shutil.rmtree(temporary)


def order_of_a_save(folder: str) -> list[str]:
    """Syncs, drops from the page cache (`NAME dropped`) and renames (`NAME > NAME`) of a save, in order."""
    saved, seen = Path(folder, "saved").resolve(), list[str]()
    fsync, rename, advise = os.fsync, os.rename, os.posix_fadvise

    def name(path: Any) -> str:
        return Path(path).name

    def synced(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_relative_to(saved):
            seen.append(name(path))
        fsync(descriptor)

    def advised(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        seen.append(f"{name(Path(f'/proc/self/fd/{descriptor}').readlink())} dropped")
        advise(descriptor, offset, length, advice)

    def renamed(source: Any, target: Any, **named: Any) -> None:
        if Path(source).resolve().is_relative_to(saved):
            seen.append(f"{name(source)} > {name(target)}")
        rename(source, target, **named)

    with (
        patch.object(os, "fsync", synced),
        patch.object(os, "rename", renamed),
        patch.object(os, "posix_fadvise", advised),
    ):
        train(Path(folder), "run", f"--save {folder}/saved --save-interval 4")
    return seen


def four_saves(folder: str) -> None:
    """Steps 1 to 4, each saved."""
    train(Path(folder), "run", f"--save {folder}/saved --save-interval 1")


def resumed(folder: str, may_restart: bool) -> tuple[str, list[int], str]:
    """The error of a run that goes on to step 4, the steps it makes, and what it prints."""
    environment = {"TORCHELASTIC_MAX_RESTARTS": "3"} if may_restart else {}
    printed = io.StringIO()
    Path(folder, "again.jsonl").unlink(missing_ok=True)
    with patch.dict(os.environ, environment), contextlib.redirect_stdout(printed):
        try:
            steps = train(Path(folder), "again", f"--load {folder}/saved")
        except ConfigError as error:
            return str(error), [], printed.getvalue()
    return "", sorted(steps), printed.getvalue()
