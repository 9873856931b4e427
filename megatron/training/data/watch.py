"""Watches indexed datasets that are mapped into memory: whoever cuts one while it is read must not end a rank without a word.

A page behind the end of a mapped file is a SIGBUS, which no program catches. So the sizes of the files are compared with those of
the start before samples are read from them, in the process that reads: a file that became shorter, or is gone, is one line. What
is cut between the comparison and the reading still ends in SIGBUS: of a loader's worker, that is noticed where its next batch is
taken (`start`), which is a place for one line; of the run's own process it is the end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol

from torch.utils.data import DataLoader

from moe_overlap.describe.errors import ConfigError

FILES_AT_ONCE = 16
"""Files compared before a micro-batch; a blend of more takes turns, so that a slow file system is not asked for all each time."""


class WatchedFiles:
    """The data files of a run, and their bytes when it began."""

    def __init__(self, prefixes: Iterable[str]) -> None:
        paths = [f"{prefix}{suffix}" for prefix in prefixes for suffix in (".bin", ".idx")]
        self._sizes = {path: Path(path).stat().st_size for path in paths}
        self._turns: Iterator[str] = cycle(self._sizes)

    def check(self) -> None:
        """Compare the next files.

        Raises:
            ConfigError: a file is shorter than it was, or cannot be looked at.
        """
        self._compare(islice(self._turns, min(FILES_AT_ONCE, len(self._sizes))))

    def check_all(self) -> None:
        """Compare every file; raises as `check`."""
        self._compare(self._sizes)

    def _compare(self, paths: Iterable[str]) -> None:
        for path in paths:
            begun, again = self._sizes[path], "start again when the file is whole"
            try:
                size = Path(path).stat().st_size
            except OSError as error:
                raise ConfigError(path, "", f"can no longer be read: {error.strerror}", again) from None
            if size < begun:
                raise ConfigError(path, "", f"has {size:,} bytes, and had {begun:,} when the run began", again)


class Samples(Protocol):
    """A dataset of samples by number."""

    def __getitem__(self, index: int) -> Any: ...


class WatchedSamples:
    """The samples of a dataset; its files are compared before each batch is read.

    A loader's worker cannot raise an error that its parent gets as it was: torch makes another one of it, whose message is a
    traceback. So a batch is an error where one is due, and whoever takes the batch raises it.
    """

    def __init__(self, samples: Samples, files: WatchedFiles) -> None:
        self._samples, self._files = samples, files

    def __getitems__(self, indices: Sequence[int]) -> list[Any] | ConfigError:
        """The samples of a batch, or why they are not read."""
        try:
            self._files.check()
        except ConfigError as error:
            return error
        return [self._samples[index] for index in indices]


def start(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start a loader; the end of one of its workers is a RuntimeError of the iterator, and of nothing else.

    torch sets a handler of SIGCHLD that raises in whatever line the process is at when a worker dies: in the middle of a step, or
    of the writing of a checkpoint. The iterator notices a dead worker without it, when it waits for a batch (within 5 s).
    """
    before = signal.getsignal(signal.SIGCHLD)
    iterator = iter(loader)
    # Like torch, which sets none elsewhere. None is a handler that Python did not set, and cannot set again.
    if threading.current_thread() is threading.main_thread() and before is not None:
        signal.signal(signal.SIGCHLD, before)
    return iterator
