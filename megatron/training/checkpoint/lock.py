"""One job per folder of checkpoints. No torch.

    <folder>/.lock      the host, process and start time of the job that saves here

A job makes the file when it starts to train and deletes it when it ends. A killed job leaves it behind, and the next job takes
it over: at once if it sees that the process is gone (same host, same namespace of processes), else after watching the file for
BEATS heartbeats without seeing one. A lock is made by a hard link. A stale lock is removed by the first job that makes a claim
file named after it, so that only one of several jobs takes it over.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_json, printable

LOCK = ".lock"
HEARTBEAT_SECONDS = 5.0
BEATS = 4
_KEYS = {"host": str, "space": str, "process": int, "started": int, "since": str}


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that holds a folder.

    Attributes:
        space: boot and process namespace of the host, in which the process number is unique.
        started: start of the process in the kernel's ticks since the boot: process numbers are reused.
        since: local time when the job took the folder, for the reader.
    """

    host: str
    space: str
    process: int
    started: int
    since: str

    def is_same_process(self, other: Owner) -> bool:
        """Whether both are the same process."""
        return (self.space, self.process, self.started) == (other.space, other.process, other.started)

    def __str__(self) -> str:
        return f"process {self.process} on {printable(self.host)}, since {printable(self.since)}"


class FolderLock:
    """A folder that belongs to this process until `release`.

    Args:
        folder: must exist.
        flag: the flag that named it.
    """

    def __init__(self, folder: Path, flag: str) -> None:
        self._path, self._flag, self._ended = folder / LOCK, flag, threading.Event()
        self._owner = this_process()

    def acquire(self) -> None:
        """Take the folder.

        Raises:
            ConfigError: another job has it, or the lock cannot be written.
        """
        try:
            while not self._create():
                self._take_over()
        except OSError as error:
            fix = "free space, correct permissions, or choose another folder"
            raise ConfigError(
                self._flag, self._path.parent, f"cannot be written: {error.strerror or error}", fix
            ) from None
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def require(self) -> None:
        """Require that the folder still belongs to this process.

        Raises:
            ConfigError: another job took it while this one was suspended, or somebody deleted the lock.
        """
        owner = owner_of(self._path)
        if owner is None or not owner.is_same_process(self._owner):
            by = "nobody" if owner is None else str(owner)
            rule = f"belongs to {by} now: this job gave no sign of life, or its {LOCK} was deleted"
            raise ConfigError(self._flag, self._path.parent, rule, "start one job for each folder")

    def release(self) -> None:
        """Release the folder, if it still belongs to this process."""
        self._ended.set()
        owner = owner_of(self._path)
        if owner is not None and owner.is_same_process(self._owner):
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _create(self) -> bool:
        """Make the lock, completely or not at all; False if there is one."""
        draft = self._aside("new")
        with draft.open("x", encoding="utf-8") as file:
            json.dump({key: getattr(self._owner, key) for key in _KEYS}, file)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, self._path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            return self._create_without_links(draft.read_bytes())
        finally:
            draft.unlink(missing_ok=True)
        return True

    def _create_without_links(self, content: bytes) -> bool:
        """On a file system without hard links the lock exists before its content: a reader then waits for a heartbeat."""
        try:
            with self._path.open("xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True

    def _take_over(self) -> None:
        """Remove a stale lock; also returns if it has been removed by others."""
        try:
            before = self._path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISREG(before.st_mode):
            # A broken link would never be gone and never be made; opening a pipe waits for a writer.
            rule = f"holds a {LOCK} that is no regular file, and no job makes such a one"
            raise ConfigError(self._flag, self._path.parent, rule, f"delete {self._path}")
        owner = owner_of(self._path)
        if self._lives(owner, before.st_mtime_ns):
            rule = f"belongs to another job ({owner or 'whose ' + LOCK + ' cannot be read'})"
            fix = f"choose another folder, or end that job; delete {self._path} if there is none"
            raise ConfigError(self._flag, self._path.parent, rule, fix)
        # Only the job that holds the claim on this version of the lock may remove it: a lock made since has another claim.
        claim = self._path.with_name(f"{LOCK}-claim-{before.st_ino}-{before.st_mtime_ns}")
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            self._wait_for_claim(claim)
            return
        try:
            now = self._path.lstat()
            if (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns):
                self._path.unlink()
        except FileNotFoundError:
            return
        finally:
            claim.unlink(missing_ok=True)

    def _wait_for_claim(self, claim: Path) -> None:
        """Wait until another job has removed the stale lock; a claim that stays belongs to a killed job."""
        for _ in range(round(BEATS * HEARTBEAT_SECONDS / 0.05)):
            time.sleep(0.05)
            if not claim.exists():
                return
        claim.unlink(missing_ok=True)

    def _lives(self, owner: Owner | None, beat_before: int) -> bool:
        if owner is not None and owner.space == self._owner.space:
            return not owner.is_same_process(self._owner) and start_of(owner.process) == owner.started
        for _ in range(round(BEATS * HEARTBEAT_SECONDS / 0.5)):
            time.sleep(0.5)
            try:
                # Opened, since a network file system refreshes a file when it is opened, not when its status is read.
                with self._path.open("rb") as file:
                    if os.fstat(file.fileno()).st_mtime_ns != beat_before:
                        return True
            except FileNotFoundError:
                return False
        return False

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            owner = owner_of(self._path)
            if owner is not None and not owner.is_same_process(self._owner):
                return  # Taken while this job was suspended: a beat would keep the other job's lock alive after its end.
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def _aside(self, word: str) -> Path:
        return self._path.with_name(f"{LOCK}-{word}-{secrets.token_hex(8)}")


def this_process() -> Owner:
    """This process as an owner."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = (
        f"{boot.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}" if boot.exists() else secrets.token_hex(8)
    )
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return Owner(socket.gethostname(), space, os.getpid(), start_of(os.getpid()) or 0, since)


def start_of(process: int) -> int | None:
    """Start of a process of this host, in ticks since the boot; None if there is no such process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold any character; the 20th field after it is the start.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def owner_of(path: Path) -> Owner | None:
    """The owner that a lock names; None if it is missing or damaged."""
    try:
        values: Any = bounded_json(path, 1 << 16)
    except Unreadable:
        return None
    if not isinstance(values, dict) or any(type(values.get(key)) is not kind for key, kind in _KEYS.items()):
        return None
    return Owner(**{key: values[key] for key in _KEYS})
