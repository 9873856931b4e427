"""Things on the machine that must not outlive the program that made them.

What holds: their names carry the id of the process; they are gone when the `with` block is left, when the program ends, and after
SIGINT, SIGTERM or SIGHUP; what a killed program left behind goes when the next one makes its own.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

PREFIX = "moebed"
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Temporary:
    """Made when a `with` block in the main thread is entered, removed when it is left, however that happens.

    Attributes:
        name: prefix of the names of everything that is made.
    """

    def __init__(self) -> None:
        self.name = f"{PREFIX}{os.getpid()}"
        self._previous: dict[int, Any] = {}

    def build(self) -> None:
        """Make everything."""
        raise NotImplementedError

    def close(self) -> None:
        """Remove everything that stands under the name; closing again does nothing."""
        raise NotImplementedError

    def sweep(self) -> None:
        """Remove what programs that no longer exist left behind."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.sweep()
        atexit.register(self.close)
        for number in ENDING_SIGNALS:
            self._previous[number] = signal.signal(number, _end)
        try:
            self.build()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        self.close()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        atexit.unregister(self.close)


def found_in(folder: Path) -> Iterator[tuple[Path, int]]:
    """What stands in a folder under such names, and the process each belongs to."""
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if match := re.fullmatch(rf"{PREFIX}(\d+)\.\w+", path.name):
                yield path, int(match[1])


def is_alive(pid: int) -> bool:
    """Whether a process exists."""
    return Path("/proc", str(pid)).exists()


def _end(number: int, frame: FrameType | None) -> None:
    """Turn a signal into an exit, so that `with` blocks are left."""
    raise SystemExit(128 + number)
