"""A checkpoint folder, whenever its writer is killed: the last complete checkpoint is found, whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.training.checkpoint import folder as cf
from moe_overlap.describe.errors import ConfigError


class Killed(BaseException):
    """The process ends here."""


def save(folder: Path, step: int, keep_last: int | None = None, retain: int | None = None) -> None:
    """A save of one data file, as the checkpointer does it."""
    temporary = cf.open_temporary(folder, step)
    (temporary / "data").write_bytes(f"weights of step {step}".encode())
    cf.publish(temporary, folder, step, {"files": cf.checksums(temporary.iterdir()), "progress": {"iteration": step}})
    cf.prune(folder, step, keep_last, retain)


def load(folder: Path, step: int | None = None) -> int | None:
    """The step that would be loaded, its files checked."""
    chosen = cf.choose(str(folder), step, exit_on_missing=False)
    if chosen is None:
        return None
    cf.verify(chosen, list(chosen.mark["files"]))
    assert (chosen.path / "data").read_text() == f"weights of step {chosen.step}"
    return chosen.step


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Ends the process at its n-th change of the file system: before it, or in the midst of a deletion."""
    left = [-1]

    def count() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    def guard(owner: Any, name: str) -> None:
        stock = getattr(owner, name)

        def guarded(*arguments: Any, **options: Any) -> Any:
            count()
            return stock(*arguments, **options)

        monkeypatch.setattr(owner, name, guarded)

    def rmtree(path: Path) -> None:
        for inside in sorted(path.iterdir()):
            count()
            inside.unlink()
        count()
        path.rmdir()

    for name in ("rename", "mkdir", "write_text", "write_bytes"):
        guard(Path, name)
    guard(os, "fsync")
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    yield lambda number: left.__setitem__(0, number)


@pytest.mark.parametrize("steps", [[1, 2], [1, 1], [2, 1], [1, 2, 3]])
def test_killed_at_any_change_the_last_complete_checkpoint_loads(
    tmp_path: Path, kill_at: Callable[[int], None], steps: list[int]
) -> None:
    kills = 0
    for number in range(1, 200):
        folder = tmp_path / str(number)
        for step in steps[:-1]:
            save(folder, step)
        kill_at(number)
        try:
            save(folder, steps[-1], keep_last=1)
        except Killed:
            kills += 1
            assert load(folder) in (steps[-2], steps[-1])
            kill_at(-1)
            save(folder, 9, keep_last=1)
            assert load(folder) == 9 and names(folder) == ["step-000009"]
        else:
            kill_at(-1)
            assert load(folder) == steps[-1] and names(folder) == [cf.step_name(steps[-1])]
            break
    assert kills >= 8


def test_a_displaced_checkpoint_stays_until_its_own_step_is_saved(
    tmp_path: Path,
) -> None:
    """A run that was killed between the two renames of step 2 keeps it, though without --keep-last-checkpoints."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step-000002").rename(tmp_path / ".replaced-step-000002-0a")
    save(tmp_path, 3)
    assert load(tmp_path, 2) == 2 and load(tmp_path) == 3
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000003"]


def test_the_last_save_wins_over_a_higher_step_of_an_abandoned_run(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    assert load(tmp_path) == 30 and load(tmp_path, 10) == 10
    save(tmp_path, 15)
    assert load(tmp_path) == 15
    save(tmp_path, 20, keep_last=2)
    assert load(tmp_path) == 20 and names(tmp_path) == ["step-000015", "step-000020"]


@pytest.mark.parametrize(
    ("keep_last", "retain", "kept"),
    [(None, None, [1, 2, 3, 4, 5, 6, 7]), (2, None, [6, 7]), (None, 3, [3, 6, 7]), (3, 3, [3, 5, 6, 7])],
)
def test_superseded_checkpoints_are_deleted(
    tmp_path: Path, keep_last: int | None, retain: int | None, kept: list[int]
) -> None:
    for step in range(1, 8):
        save(tmp_path, step, keep_last, retain)
    assert names(tmp_path) == [cf.step_name(step) for step in kept]


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    for name in (".tmp-notes", "step-000002-copy", "tensorboard"):
        (tmp_path / name).mkdir()
    (tmp_path / ".tmp-step-000001-killed").mkdir()
    save(tmp_path, 1, keep_last=1)
    assert names(tmp_path) == [".tmp-notes", "step-000001", "step-000002-copy", "tensorboard"]


def error_of(folder: Path, step: int | None = None, must_exist: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        cf.choose(str(folder), step, must_exist)
    return str(caught.value)


def test_an_absent_or_empty_folder_starts_afresh(tmp_path: Path) -> None:
    assert load(tmp_path / "absent") is None and load(tmp_path) is None
    assert error_of(tmp_path, must_exist=True).startswith(f"--load {tmp_path}: holds no checkpoint;")


def test_incomplete_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "step-000120").mkdir()
    assert error_of(tmp_path) == (
        f"--load {tmp_path}: step 120 is incomplete (no completion mark);"
        " there is no complete checkpoint: delete step-000120 to start afresh"
    )
    save(tmp_path, 100)
    expected = (
        f"--load {tmp_path}: step 120 is incomplete (no completion mark); the last complete checkpoint is step 100:"
        " add --ckpt-step 100 or delete step-000120"
    )
    assert error_of(tmp_path) == error_of(tmp_path, 120) == expected
    assert load(tmp_path, 100) == 100
    (tmp_path / "step-000120" / "complete.json").write_text('{"format": 1, "st')
    assert error_of(tmp_path) == expected
    save(tmp_path, 120)
    assert load(tmp_path) == 120
    (tmp_path / "step-000090").mkdir()
    assert load(tmp_path) == 120


def test_other_folders(tmp_path: Path) -> None:
    save(tmp_path, 7)
    one = tmp_path / "step-000007"
    assert error_of(one).endswith(f"the folder of checkpoints; give {tmp_path} and --ckpt-step 7")
    assert error_of(tmp_path, 8) == f"--ckpt-step 8: {tmp_path} holds no such step; it holds step 7"
    assert error_of(one / "data").startswith(f"--load {one}/data: is not a folder;")
    mark = one / "complete.json"
    mark.write_text(mark.read_text().replace('"format": 2', '"format": 3'))
    assert "has format 3, this version reads 1 or 2" in error_of(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert "was written by upstream Megatron-LM" in error_of(tmp_path)


def test_damaged_files(tmp_path: Path) -> None:
    save(tmp_path, 7)
    data = tmp_path / "step-000007" / "data"
    for content, rule in (
        (b"weights of step 8", "is corrupt: its content is not what was written"),
        (b"weights", "is corrupt: 7 bytes instead of 17"),
        (None, "cannot be read: No such file or directory"),
    ):
        data.unlink() if content is None else data.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load(tmp_path)
        assert str(caught.value).startswith(f"--load {data}: {rule}; delete step-000007")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        cf.open_temporary(tmp_path / "file" / "checkpoints", 1)
    assert str(caught.value).startswith(
        f"--save {tmp_path}/file/checkpoints: cannot be written: Not a directory; free space"
    )
