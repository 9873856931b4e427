"""The processes that capture: started for missing captures, and kept for later ones. No torch.

Importing torch and megatron-core takes longer than a capture, and a search may need further layouts late. So a process answers
requests, one a line, until stdin ends.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from moe_overlap.describe.host import usable_cores
from moe_overlap.tuner.capture.request import Request

EACH = 4
"""Number of captures that justify another process."""
MOST = 4
"""Largest number of processes: each holds torch, about half a GiB."""
POLL_SECONDS = 0.5
"""Longest time between two reports of progress; a report may end the capture by an exception."""


class CaptureError(RuntimeError):
    """The capturing process failed; the message is its last line."""


@dataclass(frozen=True, slots=True)
class _Worker:
    process: subprocess.Popen[str]
    errors: IO[str]

    def ask(self, path: Path, request: Request) -> None:
        """Send a request; its answer goes to `path`."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({**request.to_values(), "path": str(path.resolve())}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failure() from None

    def failure(self) -> CaptureError:
        """The error with which it ended."""
        self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return CaptureError(lines[-1] if lines else "the capture was killed")

    def end(self) -> None:
        """End it; files stay complete or absent."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            if stream is not None:
                stream.close()


class CaptureProcesses:
    """Captures in other processes, as many as cores and work allow; they end with this object.

    Args:
        command: command line of a process, which reads requests from stdin and writes a line to stdout after each.
        cores: number of cores; None: those of this machine.
        report: called with the numbers of finished captures and of all, at the start, after each, and while they are awaited.
    """

    def __init__(
        self,
        command: Sequence[str] = (),
        cores: int | None = None,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._report = report
        # -P: a torch.py in the user's working folder is not torch.
        self._command = command or [sys.executable, "-P", "-m", "moe_overlap.tuner.capture"]
        self._most = min(MOST, cores or usable_cores())
        # By the process that started them: a forked process shares their pipes, and must not use them.
        self._workers: dict[int, list[_Worker]] = {}
        self._owner = os.getpid()
        weakref.finalize(self, _end_all, self._workers)

    def capture(self, missing: Mapping[Path, Request]) -> None:
        """Capture all requests, each to its path.

        Raises:
            CaptureError: a capture failed; finished ones stay.
        """
        waiting, done = list(missing.items())[::-1], 0
        workers = self._workers.setdefault(os.getpid(), [])
        # Forked processes share the cores, so each of them starts one.
        most = self._most if os.getpid() == self._owner else 1
        while len(workers) < min(most, -(-len(waiting) // EACH)):
            workers.append(self._started())
        try:
            with selectors.DefaultSelector() as busy:
                for worker in workers[: len(waiting)]:
                    worker.ask(*waiting.pop())
                    busy.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
                while busy.get_map():
                    self._report(done, len(missing))
                    for key, _ in busy.select(POLL_SECONDS):
                        worker = key.data
                        if not worker.process.stdout.readline():
                            raise worker.failure()
                        done += 1
                        if waiting:
                            worker.ask(*waiting.pop())
                        else:
                            busy.unregister(key.fileobj)
        except BaseException:
            # Nobody needs their remaining answers.
            _end_all(self._workers)
            raise

    def _started(self) -> _Worker:
        root = Path(__file__).parents[3]
        environment = {
            **os.environ,
            # The capture pretends a machine without CUDA, and needs no threads.
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        # A file, because nobody would empty a pipe in time.
        errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed by `end`)
        process = subprocess.Popen(
            self._command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        return _Worker(process, errors)


def _end_all(workers: dict[int, list[_Worker]]) -> None:
    """End the processes that this one started."""
    for worker in workers.pop(os.getpid(), []):
        worker.end()
