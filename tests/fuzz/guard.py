"""One input before its reader: what the reader does wrong, found within bounds of time and memory.

traceback   the reader raises anything but the errors that are printed as one line
hang        it needs more than SLOW_SECONDS of the processor, or has not ended after HANG_SECONDS
line        its error has no line, several, or control characters; or a command answers 2 without exactly one line
nan         a command prints a number that is none
code        it starts a program, opens a connection, or calls `canary`, which no input may reach
"""

from __future__ import annotations

import contextlib
import io
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.targets import EXPECTED, Target

SLOW_SECONDS, HANG_SECONDS = 1.0, 20
MEMORY_BYTES = 512 << 20
KINDS = ("traceback", "hang", "line", "nan", "code")
_EVENTS = frozenset(
    "os.system subprocess.Popen os.exec os.posix_spawn os.fork os.forkpty os.spawn pty.spawn socket.connect".split()
)
_NOT_A_NUMBER = re.compile(r"(?<![\w./-])[-+]?(nan|inf)(?![\w./-])|\b(NaN|Infinity)\b(?=\s*[,\]}])")
_EXECUTED: list[str] = []
_HOOKED: list[bool] = []


@dataclass(frozen=True, slots=True)
class Failure:
    """The fault of a reader: one of KINDS, and a sentence for the one who mends it."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Hang(BaseException):
    """Raised by the alarm; no reader catches it."""


def canary(*arguments: Any) -> list[Any]:
    """A function that pickles of the fuzzer name: a reader that calls it would call any other."""
    _EXECUTED.append("canary")
    return []


def watch_for_code() -> None:
    """Note the start of programs and connections, from here to the end of the process: Python has no way back."""

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS:
            _EXECUTED.append(event)

    if not _HOOKED:
        _HOOKED.append(True)
        sys.addaudithook(note)


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Let this process grow by MEMORY_BYTES and no further: an input that needs more meets a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def failure(target: Target, content: bytes, slow_seconds: float = SLOW_SECONDS) -> Failure | None:
    """The fault that a reader shows with an input; None where it reads it or says in one line why not."""
    watch_for_code()
    _EXECUTED.clear()
    before = signal.signal(signal.SIGALRM, _ring)
    out, err = io.StringIO(), io.StringIO()
    wrong: Failure | None = None
    answer: object = None
    begin = time.process_time()  # What else the machine does is no fault of the reader.
    signal.alarm(HANG_SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            answer = target.read(content)
    except EXPECTED as error:
        if not str(error) or not str(error).isprintable():
            wrong = Failure("line", f"an error of several lines or with control characters: {error!r}"[:300])
    except Hang:
        wrong = Failure("hang", f"not ended after {HANG_SECONDS} s")
    except BaseException as error:  # Some libraries raise what is no Exception; whatever it is, it is looked for.
        if isinstance(error, KeyboardInterrupt):
            raise
        wrong = Failure("traceback", f"{type(error).__name__}: {error}"[:300])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    seconds = time.process_time() - begin
    if _EXECUTED:
        return Failure("code", ", ".join(dict.fromkeys(_EXECUTED)))
    if wrong is None and seconds > slow_seconds:
        wrong = Failure("hang", f"{seconds:.1f} s")
    return wrong or _printed(target, answer, out.getvalue(), err.getvalue())


def _printed(target: Target, answer: object, out: str, err: str) -> Failure | None:
    for line in (*out.split("\n"), *err.split("\n")):
        if not line.isprintable():
            return Failure("line", f"prints control characters: {line[:200]!r}")
    if target.is_command and answer == 2 and not (err.count("\n") == 1 and err.startswith("error: ")):
        return Failure("line", f"status 2 with {err[:300]!r}")
    if target.prints_numbers and (match := _NOT_A_NUMBER.search(out)):
        return Failure("nan", out[max(0, match.start() - 100) : match.end() + 50])
    return None


def _ring(number: int, frame: object) -> None:
    raise Hang
