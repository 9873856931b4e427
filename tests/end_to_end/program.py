"""pretrain_moe.py as its users start it, and the one small job that the end-to-end tests share.

`Launch` starts a process per rank with torchrun's environment variables, as Slurm does: every rank's exit status and output are
seen, signals reach whom they are meant for, and a start costs less than torchrun's.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.spawn import HANGS_SECONDS

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "pretrain_moe.py"
SMALL_ARGS = f"@{Path(__file__).with_name('small.args')}"
"""Two layers, four experts over two ranks, dropout on: about a tenth of a second per step. It names no length."""
STEPS = 40
SMALL = (SMALL_ARGS, "--train-iters", str(STEPS), "--lr-warmup-iters", "2")
"""The command line that all runs share which are compared with the undisturbed one."""
STANDALONE = ("--standalone", "--local-addr", "127.0.0.1")
"""torchrun's flags for one machine: without the address it resolves the machine's own name, which some cannot."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One process that has ended; a signal's number counts negative, as in subprocess."""

    status: int
    out: str
    err: str


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without a launcher's variables, one thread per rank."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    return kept | {"OMP_NUM_THREADS": "1"} | dict(extra or {})


def alone(words: Sequence[str], extra: Mapping[str, str] | None = None) -> Ended:
    """Run the program as a single process, without torchrun."""
    command = [sys.executable, str(PROGRAM), *words]
    return _run(command, extra)


def torchrun(
    words: Sequence[str],
    ranks: int = 2,
    options: Sequence[str] = STANDALONE,
    timeout_seconds: float = HANGS_SECONDS,
) -> Ended:
    """Run the program under torchrun; its stderr holds torchrun's own remarks, too."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", str(ranks)]
    return _run([*command, str(PROGRAM), *words], None, timeout_seconds)


def _run(command: Sequence[str], extra: Mapping[str, str] | None, timeout_seconds: float = HANGS_SECONDS) -> Ended:
    ended = subprocess.run(
        command, cwd=ROOT, env=environment(extra), capture_output=True, text=True, timeout=timeout_seconds
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to connections until the ranks are up."""
    while True:
        port = random.SystemRandom().randrange(15_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Launch:
    """The ranks of one job, running.

    Args:
        words: the command line after the program's name.
        folder: takes the ranks' output.
        program: what every rank runs.
    """

    def __init__(self, words: Sequence[str], folder: Path, ranks: int = 2, program: Path = PROGRAM) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), **meeting}
            with self._file(rank, "out").open("w") as out, self._file(rank, "err").open("w") as err:
                process = subprocess.Popen(
                    [sys.executable, str(program), *words],
                    cwd=ROOT,
                    env=environment(place),
                    stdout=out,
                    stderr=err,
                    text=True,
                    start_new_session=True,
                )
            self.processes.append(process)

    def _file(self, rank: int, stream: str) -> Path:
        return self._folder / f"rank{rank}.{stream}"

    def wait_until_lines(self, path: Path, count: int) -> None:
        """Until a file holds so many lines, or a rank has ended."""
        deadline = time.monotonic() + HANGS_SECONDS
        while line_count(path) < count and all(process.poll() is None for process in self.processes):
            assert time.monotonic() < deadline, f"{path} has {line_count(path)} lines, not {count}"
            time.sleep(0.005)

    def kill(self) -> bool:
        """SIGKILL to every process of the job at once; whether all of them were still running."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        statuses = [process.wait(HANGS_SECONDS) for process in self.processes]
        return all(status == -signal.SIGKILL for status in statuses)

    def wait(self, timeout_seconds: float = HANGS_SECONDS) -> list[Ended]:
        """How every rank ended, in order of rank; a rank that does not end in time fails the test."""
        deadline = time.monotonic() + timeout_seconds
        try:
            statuses = [process.wait(max(0.0, deadline - time.monotonic())) for process in self.processes]
        finally:
            self.kill()
        return [
            Ended(status, self._file(rank, "out").read_text(), self._file(rank, "err").read_text())
            for rank, status in enumerate(statuses)
        ]


def line_count(path: Path) -> int:
    """Whole lines of a file; 0 without it."""
    return path.read_text().count("\n") if path.exists() else 0
