"""Watches memory-mapped datasets: truncating one while it is read must not end a rank without an error message.

Reading a page past the end of a mapped file raises SIGBUS, which no program catches. So the process that reads samples first
compares the sizes of the files with those at the start: a file that has become shorter or is gone is a one-line error. A file
truncated between comparison and reading still raises SIGBUS: in a loader's worker it is reported when the next batch is taken
(`start`); in the run's own process it ends the run.
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
"""Files compared before a micro-batch; larger blends take turns, so that a slow file system is not asked for all each time."""


class WatchedFiles:
    """The data files of a run, and their sizes when it began."""

    def __init__(self, prefixes: Iterable[str]) -> None:
        paths = [f"{prefix}{suffix}" for prefix in prefixes for suffix in (".bin", ".idx")]
        self._sizes = {path: Path(path).stat().st_size for path in paths}
        self._turns: Iterator[str] = cycle(self._sizes)

    def check(self) -> None:
        """Compare the next files.

        Raises:
            ConfigError: a file is shorter than it was, or its size cannot be read.
        """
        self._compare(islice(self._turns, min(FILES_AT_ONCE, len(self._sizes))))

    def check_all(self) -> None:
        """Compare every file; raises like `check`."""
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


class SampleSource(Protocol):
    """A dataset of samples by number."""

    def __getitem__(self, index: int) -> Any: ...


class WatchedSamples:
    """The samples of a dataset; its files are compared before each batch is read.

    An exception in a loader's worker does not reach its parent unchanged: torch wraps it in another one whose message is a
    traceback. So a batch may be an error, which the reader of the batch raises.
    """

    def __init__(self, samples: SampleSource, files: WatchedFiles) -> None:
        self._samples, self._files = samples, files

    def __getitems__(self, indices: Sequence[int]) -> list[Any] | ConfigError:
        """The samples of a batch, or the error that prevents reading them."""
        try:
            self._files.check()
        except ConfigError as error:
            return error
        return [self._samples[index] for index in indices]


def start(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start a loader; the death of one of its workers raises a RuntimeError in the iterator only.

    torch sets a handler of SIGCHLD that raises at whatever line the process executes when a worker dies: in the middle of a
    step, or while a checkpoint is written. Without it the iterator notices a dead worker when it waits for a batch (within 5 s).
    """
    before = signal.getsignal(signal.SIGCHLD)
    iterator = iter(loader)
    # Only in the main thread, as torch does. None is a handler that Python did not set and cannot set again.
    if threading.current_thread() is threading.main_thread() and before is not None:
        signal.signal(signal.SIGCHLD, before)
    return iterator
