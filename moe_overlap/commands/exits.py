"""The end of a process: rank 0 says why a job failed, a closed pipe ends it in silence, and no destructor runs."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar, cast

RANK_0_SPEAKS_WITHIN_SECONDS = 10
_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Have the kernel end this process when torchrun is killed: ranks that train on would collide with those of a restart.

    Linux alone has it. Ranks that no torchrun started, of Slurm or a shell, end as their launcher ends them.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave(rank: int, line: str, status: int) -> int:
    """Return the status of a run that failed on every rank: rank 0 says why, the others give it time to speak.

    torchrun ends every process as soon as one has failed: if another rank went first, nobody would read the line.
    """
    if rank == 0:
        print(line, file=sys.stderr, flush=True)
    else:
        time.sleep(RANK_0_SPEAKS_WITHIN_SECONDS)
    return status


INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
_Main = TypeVar("_Main", bound=Callable[..., int])


def interruptible(main: _Main) -> _Main:
    """A command that Ctrl-C ends with one line; of many ranks the first one says it."""

    @functools.wraps(main)
    def command(*arguments: Any, **named: Any) -> int:
        try:
            return main(*arguments, **named)
        except KeyboardInterrupt:
            if os.environ.get("RANK", "0") == "0":
                print("error: interrupted", file=sys.stderr, flush=True)
            return INTERRUPTED

    return cast("_Main", command)


@contextlib.contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """End the process by SIGPIPE, as programs do, when the reader of what the block prints goes away (`| head`).

    Outside the block Python's own setting holds: a socket that a peer has closed is an error, not the end.
    """
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
    finally:
        sys.stdout.flush()
        signal.signal(signal.SIGPIPE, before)


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
