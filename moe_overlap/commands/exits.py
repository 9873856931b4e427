"""The end of a process: rank 0 says why a job failed, a closed pipe ends it in silence, and no destructor runs."""

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

from moe_overlap.describe.errors import system_refusal
from moe_overlap.describe.files import printable
from moe_overlap.describe.process import end_with_parent

LAUNCH_FOLDER = "MOE_OVERLAP_LAUNCH_FOLDER"
"""Variable by which our own launcher tells its ranks where their `LaunchFolder` is."""
RANK_0_SPEAKS_WITHIN_SECONDS = 10


@dataclass(frozen=True, slots=True)
class LaunchFolder:
    """A temporary folder in which the ranks of one machine tell their launcher how far they are, and who has spoken.

    One rank in trouble brings down the others, and each would say so: of these lines the user needs the first. The launcher
    speaks for a rank that a signal ended before it could.
    """

    path: Path
    attempt: str = "0"

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str]) -> LaunchFolder | None:
        """The folder of the launcher that started this rank; None where torchrun or Slurm did, or nobody."""
        path = environment.get(LAUNCH_FOLDER)
        return cls(Path(path), environment.get("TORCHELASTIC_RESTART_COUNT", "0")) if path else None

    def claim(self) -> bool:
        """Whether this rank is the first of its attempt to speak."""
        try:
            (self.path / f"spoken-{self.attempt}").touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True  # Twice is better than not at all.
        return True

    def of_attempt(self, number: int) -> LaunchFolder:
        """The same folder for another start of the ranks (--max-restarts): what the one before left is not this one's."""
        return LaunchFolder(self.path, str(number))

    def last_attempt(self) -> LaunchFolder:
        """The folder for the latest start of which a rank has begun."""
        return self.of_attempt(
            max((int(path.name.partition("-")[2]) for path in self.path.glob("attempt-*")), default=0)
        )

    def has_spoken(self) -> bool:
        """Whether a rank of this attempt has spoken."""
        return (self.path / f"spoken-{self.attempt}").exists()

    def begin(self) -> None:
        """Note that a rank of this attempt has begun."""
        with contextlib.suppress(OSError):
            (self.path / f"attempt-{self.attempt}").touch()

    def note(self, rank: int, activity: str) -> None:
        """Keep what a rank is doing, for the launcher to name if the rank is killed: while it writes this, too."""
        kept = self.path / f"rank-{self.attempt}-{rank}"
        with contextlib.suppress(OSError):
            kept.with_suffix(".next").write_text(activity)
            kept.with_suffix(".next").replace(kept)

    def activity(self, rank: int) -> str:
        """The activity that a rank of this attempt has noted last; `start` before its first note."""
        try:
            return (self.path / f"rank-{self.attempt}-{rank}").read_text()
        except OSError:
            return "start"

    def finish(self, rank: int) -> None:
        """Note that a rank has come to its end."""
        with contextlib.suppress(OSError):
            (self.path / f"done-{self.attempt}-{rank}").touch()

    def finished(self) -> int:
        """The number of ranks of this attempt that have come to their end."""
        return len(list(self.path.glob(f"done-{self.attempt}-*")))


def speak(line: str, waits: bool = False) -> None:
    """Print a rank's last line, unless another rank of our own launcher has spoken before.

    Args:
        waits: the cause lies with another rank: it, or the launcher, is given time to speak first. The launcher ends this
            process meanwhile, unless the other one hangs.
    """
    folder = LaunchFolder.of_this_process(os.environ)
    if folder is not None and waits:
        time.sleep(RANK_0_SPEAKS_WITHIN_SECONDS)
    if folder is None or folder.claim():
        print(printable(line, len(line)), file=sys.stderr, flush=True)


def leave_to_signals() -> None:
    """Have Ctrl-C end a rank at once and in silence, as SIGTERM does: its launcher, or the shell, says what happened."""
    if "RANK" in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_with_launcher() -> None:
    """Have the kernel end this process when torchrun is killed: ranks that train on would collide with those of a restart.

    Ranks that no torchrun started, of Slurm or a shell, end as their launcher ends them.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def leave(rank: int, line: str, status: int, is_shared: bool = False) -> int:
    """Return the status of a run that failed on this rank, mostly on all of them: rank 0 says why, the others give it time to.

    torchrun ends every process as soon as one has failed: if another rank went first, nobody would read the line. A rank that is
    still there after that time has failed alone, for something that its node lacks.

    Args:
        is_shared: all ranks are known to fail, as they have decided it together.
    """
    if rank == 0:
        speak(line)
        return status
    time.sleep(RANK_0_SPEAKS_WITHIN_SECONDS)
    if not is_shared:
        speak(f"{line} (rank {rank} on {socket.gethostname()})")
    return status


INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
_Main = TypeVar("_Main", bound=Callable[..., int])


def interruptible(main: _Main) -> _Main:
    """A command that ends with one line on Ctrl-C, on a path that the system refuses, and on a full disk behind its output.

    It ends by SIGPIPE, as programs do, when the reader of its output goes away (`| head`). Of many ranks the first one says that
    it was interrupted. Training has signals of its own.
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
        except OSError as error:
            print(refusal_line(error), file=sys.stderr, flush=True)
            return 2

    return cast("_Main", command)


@contextlib.contextmanager
def flushed_output() -> Iterator[None]:
    """Flush standard output behind the block, where an error has a handler. Python's own flush at exit has none."""
    try:
        yield
    finally:
        sys.stdout.flush()


_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of standard output, if they name no path: commands open every other file by its path."""


def refusal_line(error: OSError) -> str:
    """The line that a command ends with where the system refuses a path or its output; a closed pipe ends the process by SIGPIPE.

    Raises:
        OSError: the error itself, if it is neither.
    """
    if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
        return f"error: {system_refusal(error)}"
    # Python would try once more at exit to write what its buffer still holds.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    return f"error: standard output: {error.strerror}; make space, or send it elsewhere"


def end_process(status: int) -> NoReturn:
    """End with this status, after what is registered with `atexit`, without destructors.

    torch keeps process groups in places that outlive `destroy_process_group` (the frames of an error, caches of its libraries).
    Destroyed while the interpreter goes down, one whose threads still run aborts the process now and then, and its launcher
    reads signal 6 in place of the status.
    """
    atexit._run_exitfuncs()
    # A full disk behind stdout, or a reader that has gone, does not change how the run ended.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(status)
