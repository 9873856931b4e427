"""How a process ends: one rank prints why a job failed, a closed pipe ends the process silently, and no destructor runs."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from moe_overlap.describe.errors import ConfigError, system_refusal
from moe_overlap.describe.files import printable
from moe_overlap.describe.process import end_with_parent

LAUNCH_FOLDER = "MOE_OVERLAP_LAUNCH_FOLDER"
"""Variable in which this project's launcher passes the path of the `LaunchFolder` to its ranks."""
RANK_0_SPEAKS_WITHIN_SECONDS = 10


@dataclass(frozen=True, slots=True)
class LaunchFolder:
    """A temporary folder in which the ranks of one machine record their activity, and which of them has printed an error.

    One failing rank makes the others fail, and each would print an error; the user needs only the first. The launcher prints it
    for a rank that was ended by a signal.
    """

    path: Path
    attempt: str = "0"

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str]) -> LaunchFolder | None:
        """The folder of this project's launcher; None for a rank that torchrun, Slurm or a shell started."""
        path = environment.get(LAUNCH_FOLDER)
        return cls(Path(path), environment.get("TORCHELASTIC_RESTART_COUNT", "0")) if path else None

    def claim(self) -> bool:
        """Whether this rank is the first of its attempt to print an error; it then counts as having done so."""
        try:
            (self.path / f"spoken-{self.attempt}").touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True  # Rather a duplicate than no error at all.
        return True

    def of_attempt(self, number: int) -> LaunchFolder:
        """The same folder for another start of the ranks (--max-restarts), which has separate records."""
        return LaunchFolder(self.path, str(number))

    def last_attempt(self) -> LaunchFolder:
        """The folder for the latest start in which a rank has begun."""
        return self.of_attempt(
            max((int(path.name.partition("-")[2]) for path in self.path.glob("attempt-*")), default=0)
        )

    def has_spoken(self) -> bool:
        """Whether a rank of this attempt has printed an error."""
        return (self.path / f"spoken-{self.attempt}").exists()

    def begin(self) -> None:
        """Record that a rank of this attempt has begun."""
        with contextlib.suppress(OSError):
            (self.path / f"attempt-{self.attempt}").touch()

    def note(self, rank: int, activity: str) -> None:
        """Record a rank's activity atomically, for the launcher's line if the rank is killed."""
        path = self.path / f"rank-{self.attempt}-{rank}"
        with contextlib.suppress(OSError):
            path.with_suffix(".next").write_text(activity)
            path.with_suffix(".next").replace(path)

    def activity(self, rank: int) -> str:
        """The last recorded activity of a rank of this attempt; `start` before the first record."""
        try:
            return (self.path / f"rank-{self.attempt}-{rank}").read_text()
        except OSError:
            return "start"

    def finish(self, rank: int) -> None:
        """Record that a rank has finished."""
        with contextlib.suppress(OSError):
            (self.path / f"done-{self.attempt}-{rank}").touch()

    def finished(self) -> int:
        """The number of finished ranks of this attempt."""
        return len(list(self.path.glob(f"done-{self.attempt}-*")))


def speak(line: str, waits: bool = False) -> None:
    """Print a rank's error, unless another rank of this project's launcher has printed one.

    Args:
        waits: whether another rank is the cause, so that it, or the launcher, gets time to print first. Meanwhile the launcher
            ends this process, unless the other rank hangs.
    """
    folder = LaunchFolder.of_this_process(os.environ)
    if folder is not None and waits:
        time.sleep(RANK_0_SPEAKS_WITHIN_SECONDS)
    if folder is None or folder.claim():
        print(printable(line, len(line)), file=sys.stderr, flush=True)


def leave_to_signals() -> None:
    """Make Ctrl-C end a rank immediately and silently, like SIGTERM: its launcher, or the shell, reports it."""
    if "RANK" in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_with_launcher() -> None:
    """Make the kernel end this process when torchrun is killed: ranks that continue would collide with those of a restart.

    Ranks of Slurm or a shell are ended by their launcher.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def leave(rank: int, line: str, status: int, is_shared: bool = False) -> int:
    """Print the error of a failed run and return its status. Usually all ranks fail: rank 0 prints, the others wait for it.

    torchrun ends all processes as soon as one has failed; if another rank ended first, rank 0 could not print. A rank that is
    still alive after the wait has failed for a reason of its own node, and prints its error.

    Args:
        is_shared: whether all ranks are known to fail for the same reason.
    """
    if rank == 0:
        speak(line)
        return status
    time.sleep(RANK_0_SPEAKS_WITHIN_SECONDS)
    if not is_shared:
        speak(f"{line} (rank {rank} on {socket.gethostname()})")
    return status


OURS = ("moe_overlap", "megatron.training", "tools")
"""Roots of this project's modules: a missing one is a bug, and its traceback is printed."""
DISTRIBUTION = "megatron-moe-overlap"
"""Name of this project in a package index."""
ROOT = Path(__file__).resolve().parents[2]


def missing_package(error: ModuleNotFoundError, root: Path = ROOT) -> ConfigError:
    """The error about a package that this Python lacks.

    Args:
        root: the folder with the project: a checkout, or the packages of an installation.
    Raises:
        ModuleNotFoundError: a module of this project, whose absence is a bug.
    """
    name = error.name or ""
    if not name or any(name == package or name.startswith(f"{package}.") for package in OURS):
        raise error
    activate = root / ".venv" / "bin" / "activate"
    if not (root / "setup.py").is_file():
        package = name.partition(".")[0]
        what = f"'{DISTRIBUTION}[train]'" if package in ("torch", "megatron") else package
        fix = f"`pip install {what}`"
    elif not activate.exists():
        fix = "`make train` makes .venv and installs; then `. .venv/bin/activate`"
    elif Path(sys.prefix).resolve() == (root / ".venv").resolve():
        fix = "install again: `pip install --editable '.[train]'`"
    else:
        fix = f"use the project's environment: `. {activate}`"
    return ConfigError("python", sys.executable, f"lacks the package {name}", fix)


INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""
_Main = TypeVar("_Main", bound=Callable[..., int])


def interruptible(main: _Main) -> _Main:
    """A command that ends with one line on Ctrl-C, on a path that the system refuses, and on an output that cannot be written.

    It ends by SIGPIPE, as is usual, when the reader of its output closes the pipe (`| head`). Of several ranks only rank 0
    reports Ctrl-C. Training handles signals separately.
    """

    @functools.wraps(main)
    def command(*arguments: Any, **named: Any) -> int:
        try:
            with flushed_output():
                return main(*arguments, **named)
        except KeyboardInterrupt:
            if os.environ.get("RANK", "0") == "0":
                print("error: interrupted", file=sys.stderr, flush=True)
            return INTERRUPTED
        except ModuleNotFoundError as error:
            # An installation for predictions alone has no torch.
            print(f"error: {missing_package(error)}", file=sys.stderr, flush=True)
            return 2
        except OSError as error:
            print(refusal_line(error), file=sys.stderr, flush=True)
            return 2

    return cast("_Main", command)


@contextlib.contextmanager
def flushed_output() -> Iterator[None]:
    """Flush standard output after the block, so that an error is handled; Python's flush at exit handles none."""
    try:
        yield
    finally:
        sys.stdout.flush()


_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of standard output if they name no path; errors of all other files name one."""


def refusal_line(error: OSError) -> str:
    """The last line of a command for a path or an output that the system refuses; a closed pipe ends the process by SIGPIPE.

    Raises:
        OSError: the error itself, if it concerns neither.
    """
    if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
        return f"error: {system_refusal(error)}"
    # Otherwise Python would try again at exit to write its buffer.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    return f"error: standard output: {error.strerror}; make space, or send it elsewhere"


def end_process(status: int) -> NoReturn:
    """End with this status, after the functions of `atexit`, without destructors.

    Process groups of torch may outlive `destroy_process_group` (in frames of an error, in caches of its libraries). If one with
    running threads is destroyed during the interpreter's shutdown, the process sometimes aborts, and its launcher reads signal 6
    instead of the status.
    """
    atexit._run_exitfuncs()
    # A full disk or a closed pipe at stdout does not change the status of the run.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(status)
