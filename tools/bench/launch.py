"""Ranks of one command on the hosts of a bed, or on this machine; they can be told what to do, line by line.

Every rank gets the environment of torchrun, a CPU of its own as far as there are any, and a pair of pipes: it reads orders as
JSON lines from its standard input and writes answers to the descriptor `--reply-fd`. When one rank ends, all are ended; when
this program ends, however it ends, the kernel ends them.

`ranks_on_bed` is the base of the benchmarks of overlap, predictions and choices: ranks of one or more jobs on hosts of their own,
joined by links of a rate that may change.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from moe_overlap.describe.errors import ConfigError
from tools.bench.bed import Bed, CpuGroup, require_namespaces
from tools.bench.variants import Variant
from tools.bench.worker import command_of

ROOT = Path(__file__).resolve().parents[2]
FIRST_PORT = 29400
ANSWER_SECONDS = 300.0
"""Longest wait for an answer, unless a caller knows better."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Large tensors come from the heap and stay there: no page faults in the middle of a measurement.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    # torch warns of every connection of a host without a name, as those of a bed are.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


Tell = Callable[..., list[Any]]
"""Sends one order, given by keywords, to every rank; their answers."""


class RankFailed(Exception):
    """A rank ended, or did not answer in time; the message says which and how.

    Attributes:
        status: its exit status; None while it runs.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def report_failure(error: ConfigError | RankFailed) -> int:
    """Print why a benchmark ended, unless its rank has printed it; returns the exit status."""
    if isinstance(error, RankFailed) and error.status == 2:  # a user's mistake, which the rank has printed
        return 2
    print(f"error: {error}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


class LaunchedRanks:
    """Processes of one job; all are ended when the `with` block is left.

    Args:
        command: program and arguments; `--reply-fd N` is appended.
        ranks: number of processes, spread evenly over the bed's hosts, neighbours together.
        bed: None: this machine, without limited links.
        priority: the CPU group they join.
        folder: they start in; this program's unless given.
        port: of the rendezvous; jobs that run at the same time need different ones.
        timeout_seconds: longest wait for an answer.
    """

    def __init__(
        self,
        command: Sequence[str],
        ranks: int,
        bed: Bed | None,
        priority: CpuGroup,
        *,
        folder: Path | None = None,
        port: int = FIRST_PORT,
        timeout_seconds: float = ANSWER_SECONDS,
    ) -> None:
        assert bed is None or ranks % bed.hosts == 0, f"{ranks} ranks on {bed and bed.hosts} hosts"
        self.timeout_seconds, self._priority, self._folder = timeout_seconds, priority, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._replies: list[int] = []
        self._unread: list[bytes] = [b""] * ranks
        try:
            shared = environment_of_job(ranks, bed, port)
            for rank in range(ranks):
                self._start(placed(command, rank, ranks, bed), shared | place_of(rank))
        except BaseException:
            self.kill()
            raise

    def _start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        reads, writes = os.pipe()
        try:
            process = subprocess.Popen(
                [*command, "--reply-fd", str(writes)],
                env=environment,
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(writes,),
                start_new_session=True,
            )
        finally:
            os.close(writes)
        self._processes.append(process)
        self._replies.append(reads)
        self._priority.join(process.pid)

    def __enter__(self) -> LaunchedRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def tell(self, **order: Any) -> list[Any]:
        """Send one order to every rank.

        Returns:
            Their answers, in order of rank.
        Raises:
            RankFailed: a rank ended or was silent for too long.
        """
        line = (json.dumps(order) + "\n").encode()
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the missing answer tells
                process.stdin.write(line)
                process.stdin.flush()
        return self.answers()

    def answers(self) -> list[Any]:
        """Wait for one line of every rank, and return them in order of rank."""
        deadline = time.monotonic() + self.timeout_seconds
        answers: dict[int, Any] = {}
        while len(answers) < len(self._processes):
            waiting = {self._replies[rank]: rank for rank in range(len(self._processes)) if rank not in answers}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = ", ".join(map(str, sorted(waiting.values())))
                raise RankFailed(f"rank {silent}: no answer in {self.timeout_seconds:g} s")
            for descriptor in ready:
                rank = waiting[descriptor]
                data = os.read(descriptor, 1 << 16)
                if not data:
                    status = self._processes[rank].wait(self.timeout_seconds)
                    raise RankFailed(f"rank {rank}: ended with status {status}", status)
                line, newline, rest = (self._unread[rank] + data).partition(b"\n")
                if newline:
                    answers[rank], self._unread[rank] = json.loads(line), rest
                else:
                    self._unread[rank] = line
        return [answers[rank] for rank in range(len(self._processes))]

    def kill(self) -> None:
        """End every process and its children."""
        kill_sessions(self._processes)
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        for descriptor in self._replies:
            os.close(descriptor)
        self._replies = []


def kill_sessions(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes that are leaders of sessions, and their children."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def placed(command: Sequence[str], rank: int, ranks: int, bed: Bed | None) -> list[str]:
    """The command line that executes a rank on its host and its own CPU, until this program ends."""
    cpus = sorted(os.sched_getaffinity(0))
    host = bed.prefix(rank * bed.hosts // ranks) if bed is not None else ()
    return [*host, "setpriv", "--pdeathsig", "KILL", "--", "taskset", "-c", str(cpus[rank % len(cpus)]), *command]


def environment_of_job(ranks: int, bed: Bed | None, port: int) -> dict[str, str]:
    """The variables that all ranks of a job share."""
    meeting = {"WORLD_SIZE": str(ranks)}
    if bed is None:
        meeting |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    else:
        meeting |= {"MASTER_ADDR": bed.address(0), "MASTER_PORT": str(port)}
        meeting |= {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
    return {**_outside_torchrun(), **ENVIRONMENT, **meeting}


def place_of(rank: int) -> dict[str, str]:
    """The variables that tell a rank its place."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def _outside_torchrun() -> dict[str, str]:
    """The environment without torchrun's variables, because this job has its own rendezvous."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RanksOnBed:
    """Processes of one or more jobs on the same hosts.

    Args:
        bed: None: emulated links.
        jobs: (names of variants, ranks): an order goes to the job that has its variant; a single job gets all orders.
        mbit: rate of every rank's exit in 10^6 bit/s; None: not limited.
    """

    def __init__(
        self, bed: Bed | None, jobs: Sequence[tuple[Sequence[str], LaunchedRanks]], mbit: float | None
    ) -> None:
        self._bed, self._jobs = bed, jobs
        self.set_rate(mbit)

    def set_rate(self, mbit: float | None) -> None:
        """Change the rate of every exit; None: not limited."""
        self._mbit = mbit
        if self._bed is not None:
            self._bed.set_rate(mbit)

    def tell(self, **order: Any) -> list[Any]:
        """Send one order to the ranks of its variant, or of the first job; their answers."""
        rate = None if self._mbit is None else self._mbit * 1e6 / 8
        named = (ranks for names, ranks in self._jobs if order.get("variant") in names)
        return next(named, self._jobs[0][1]).tell(bytes_per_second=rate, **order)


@contextlib.contextmanager
def ranks_on_bed(
    ranks: int,
    job: Sequence[str],
    groups: Sequence[Sequence[Variant]],
    profiled: Variant,
    *,
    timer: bool,
    namespaces: bool,
    mbit: float | None,
    timeout_seconds: float = ANSWER_SECONDS,
) -> Iterator[RanksOnBed]:
    """Hosts, links and processes; gone when the block is left.

    Args:
        groups: variants by job; megatron-core's own stand apart where computation is real. If their processes import overlap
            code all the same, standard error says so.
        profiled: as `TimerRank` takes it.
        timeout_seconds: longest wait for an answer.
    """
    with contextlib.ExitStack() as stack:
        bed = stack.enter_context(Bed(ranks, mbit)) if namespaces else None
        priority = stack.enter_context(CpuGroup())
        jobs = []
        for number, group in enumerate(groups):
            command = command_of(job, group, timer=timer, emulator=bed is None, profiled=profiled)
            port = FIRST_PORT + number
            processes = LaunchedRanks(
                command, ranks, bed, priority, folder=ROOT, port=port, timeout_seconds=timeout_seconds
            )
            imported = stack.enter_context(processes).answers()[0]["overlap_code"]
            if len(groups) > 1 and group[0].plain and imported:
                note = f"note: the process of megatron-core's variants has imported {', '.join(imported)}"
                print(note, file=sys.stderr)
            jobs.append(([variant.name for variant in group], processes))
        yield RanksOnBed(bed, jobs, mbit)


def add_link_options(parser: argparse.ArgumentParser) -> None:
    """`--namespaces` and `--emulator`, between which `settle_links` decides where neither is given."""
    links = parser.add_mutually_exclusive_group()
    links.add_argument("--namespaces", action="store_true", default=None, help="default where they can be made")
    links.add_argument("--emulator", dest="namespaces", action="store_false", help="links inside the processes")


def settle_links(arguments: argparse.Namespace) -> None:
    """Choose namespaces if they can be created; raise ConfigError if they are requested and cannot."""
    if arguments.namespaces is None:
        with contextlib.suppress(ConfigError):
            require_namespaces()
            arguments.namespaces = True
    elif arguments.namespaces:
        require_namespaces()


def links_name(arguments: argparse.Namespace) -> str:
    """Name of the chosen links, for files and records."""
    return "namespaces" if arguments.namespaces else "emulator"
