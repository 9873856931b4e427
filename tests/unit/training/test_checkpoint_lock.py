"""A folder of checkpoints belongs to one job: the second one is told who has it, and what a dead job left is taken over."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron.training.checkpoint import lock as module
from megatron.training.checkpoint.lock import LOCK, FolderLock, owner_of, start_of, this_process
from moe_overlap.describe.errors import ConfigError


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(module.time, "sleep", lambda seconds, stock=time.sleep: stock(seconds / 5))


def held_by(folder: Path, **changed: Any) -> None:
    (folder / LOCK).write_text(json.dumps(asdict(replace(this_process(), **changed))))


def error_of(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        FolderLock(folder, "--save").acquire()
    return str(caught.value)


def test_taken_and_given_back(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "--save")
    lock.acquire()
    assert owner_of(tmp_path / LOCK) == this_process() or owner_of(tmp_path / LOCK).process == os.getpid()  # type: ignore[union-attr]
    lock.require()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_live_job_of_this_host_is_named(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        started = start_of(other.pid)
        held_by(tmp_path, process=other.pid, started=started, since="noon", host="a\x1b[2Jhost")
        assert error_of(tmp_path) == (
            f"--save {tmp_path}: belongs to another job (process {other.pid} on a?[2Jhost, since noon); "
            f"choose another folder, or end that job; delete {tmp_path}/.lock if there is none"
        )
        # A process of the same number that started at another time is another process.
        held_by(tmp_path, process=other.pid, started=(started or 0) + 1)
        FolderLock(tmp_path, "--save").acquire()
        other.communicate(b"\n")


def test_what_a_dead_job_left_is_taken_over(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as other:
        other.wait()
    held_by(tmp_path, process=other.pid, started=1)
    lock = FolderLock(tmp_path, "--save")
    lock.acquire()
    lock.require()
    lock.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "make",
    [lambda path: path.symlink_to("nowhere"), os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")],
    ids=["a link to nothing", "a pipe", "a folder", "a link to a device"],
)
def test_a_lock_that_no_job_makes_is_refused_at_once(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / LOCK)
    assert error_of(tmp_path) == (
        f"--save {tmp_path}: holds a .lock that is no regular file, and no job makes such a one; delete {tmp_path}/.lock"
    )
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


@pytest.mark.parametrize("content", [None, "", "[]", '{"host": 1}', "\xff"])
def test_a_lock_of_another_host_lives_as_long_as_it_beats(tmp_path: Path, content: str | None) -> None:
    held_by(tmp_path, space="elsewhere", host="elsewhere")
    if content is not None:
        (tmp_path / LOCK).write_text(content, encoding="latin-1")
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.05):
            os.utime(tmp_path / LOCK)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        line = error_of(tmp_path)
    finally:
        ended.set()
        thread.join()
    assert f"on elsewhere, since {this_process().since[:10]}" in line or "whose .lock cannot be read" in line
    FolderLock(tmp_path, "--save").acquire()


def test_of_many_jobs_one_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_by(tmp_path, process=2**22 + 1, started=1)
    # Threads of one process stand for jobs: each has a start of its own, and all of them live.
    locks = [FolderLock(tmp_path, "--save") for _ in range(8)]
    for index, lock in enumerate(locks):
        lock._owner = replace(lock._owner, started=index + 100)
    monkeypatch.setattr(module, "start_of", lambda process: None if process > 2**22 else owner_started(tmp_path))
    won: list[FolderLock] = []

    def take(lock: FolderLock) -> None:
        try:
            lock.acquire()
        except ConfigError:
            return
        won.append(lock)

    threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    won[0].require()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_lock_that_was_made_since_is_never_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it were moved aside and put back, a third job could take the folder."""
    held_by(tmp_path, process=2**22 + 1, started=1)
    lock = FolderLock(tmp_path, "--save")

    def another_is_faster(owner: object, beat_before: int) -> bool:
        (tmp_path / LOCK).unlink()
        held_by(tmp_path, process=os.getpid(), started=2)
        return False

    monkeypatch.setattr(lock, "_lives", another_is_faster)
    with monkeypatch.context() as watched:
        gone: list[Path] = []
        for name in ("unlink", "rename"):
            real = getattr(Path, name)

            def noted(self: Path, *words: object, real: Callable[..., Any] = real, **more: object) -> Any:
                gone.append(self)
                return real(self, *words, **more)

            watched.setattr(Path, name, noted)
        lock._take_over()
    assert gone.count(tmp_path / LOCK) == 1  # By the faster one.
    owner = owner_of(tmp_path / LOCK)
    assert owner is not None and owner.started == 2
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_the_claim_of_a_job_that_was_killed_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
    held_by(tmp_path, process=2**22 + 1, started=1)
    seen = (tmp_path / LOCK).stat()
    (tmp_path / f"{LOCK}-claim-{seen.st_ino}-{seen.st_mtime_ns}").touch()
    lock = FolderLock(tmp_path, "--save")
    lock.acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def owner_started(folder: Path) -> int:
    """Whoever holds the folder lives."""
    owner = owner_of(folder / LOCK)
    return -1 if owner is None else owner.started


def test_a_job_whose_folder_was_taken_does_not_save(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "--save")
    lock.acquire()
    held_by(tmp_path, process=1, started=1, since="noon")
    with pytest.raises(
        ConfigError, match=r"^--save .*: belongs to process 1 on .*, since noon now: this job gave no sign"
    ):
        lock.require()
    lock.release()
    assert (tmp_path / LOCK).exists()


def test_a_job_whose_folder_was_taken_does_not_beat_for_the_other(tmp_path: Path) -> None:
    """Its beat would let the other job's lock look alive when that job has been killed."""
    before = set(threading.enumerate())
    FolderLock(tmp_path, "--save").acquire()
    (beating,) = set(threading.enumerate()) - before
    held_by(tmp_path, host="another", space="another")
    beating.join(60)
    assert not beating.is_alive()


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*names: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    lock = FolderLock(tmp_path, "--save")
    lock.acquire()
    lock.require()
    lock.release()
    assert list(tmp_path.iterdir()) == []
