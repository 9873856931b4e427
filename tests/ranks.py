"""The ranks of a job, forked from a process that has imported torch: a start costs a second where `program.Launch` takes seven.

A rank is what torchrun or Slurm would start: a session of its own, a launcher's variables, stdout and stderr in files, and the
program's own entry point. `Trouble` puts it into a state that no flag reaches: a limit, or a failure at a chosen dispatch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.end_to_end.program import PROGRAM, ROOT, Ended, environment, free_port, line_count
from tests.spawn import HANGS_SECONDS


@dataclass(frozen=True, slots=True)
class Trouble:
    """The trouble that a rank is put into.

    Attributes:
        rank: which rank; None for all.
        limit: a limit of the process by the name of its constant, with its value, from the start on.
        dispatch, how: fail at this dispatch, counted from 1, in the way `lost_rank.come_to_grief` knows. With overlap the
            other ranks have then started theirs: what they wait for next is what they must name.
    """

    rank: int | None = None
    limit: tuple[str, int] | None = None
    dispatch: int = 0
    how: str = ""


class Ranks:
    """The ranks of one job, running.

    Args:
        words: the command line after the program's name.
        folder: takes the ranks' output.
        more: further variables, or others than the launcher's.
        cwd: working directory.
        by_srun: whether the ranks know their place only from Slurm's variables, as tasks of srun without torchrun do.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        ranks: int = 2,
        trouble: Trouble | None = None,
        more: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        by_srun: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preload"])
        meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.processes: list[BaseProcess] = []
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), **meeting} if ranks > 1 else {}
            if by_srun:
                step = {"SLURM_STEP_NUM_TASKS": str(ranks), "SLURM_STEP_TASKS_PER_NODE": str(ranks)}
                step |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
                place = {**step, "MASTER_PORT": meeting["MASTER_PORT"]}
            variables = environment({**place, **(more or {})})
            start = (list(words), str(folder / f"rank{rank}"), variables, trouble, str(cwd))
            process: BaseProcess = context.Process(target=_rank, args=start, daemon=True)
            process.start()
            self.processes.append(process)

    def wait_until_lines(self, path: Path, count: int) -> None:
        """Until a file holds so many lines, or a rank has ended."""
        deadline = time.monotonic() + HANGS_SECONDS
        while line_count(path) < count and all(process.is_alive() for process in self.processes):
            assert time.monotonic() < deadline, f"{path} has {line_count(path)} lines, not {count}"
            time.sleep(0.005)

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank, or to all at once."""
        for process in self.processes if rank is None else [self.processes[rank]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, number)

    def kill(self) -> bool:
        """SIGKILL to every rank at once, and to what it has started; whether all of them were still running."""
        # All are stopped first, which closes no connection: else one that is killed last may see its peer lost, and end so.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid or 0, number)
            # A rank that has no session of its own yet.
            self.signal(number)
        for process in self.processes:
            process.join(HANGS_SECONDS)
        return all(process.exitcode == -signal.SIGKILL for process in self.processes)

    def wait(self, timeout_seconds: float = HANGS_SECONDS, only: int | None = None) -> list[Ended]:
        """How the ranks ended, in their order; those that do not end in time are killed, and their status says so.

        Args:
            only: wait for this rank alone, and kill the others then.
        """
        deadline = time.monotonic() + timeout_seconds
        for rank, process in enumerate(self.processes):
            if only in (None, rank):
                process.join(max(0.0, deadline - time.monotonic()))
        self.kill()
        texts = [
            [Path(f"{self.folder}/rank{rank}.{end}") for end in ("out", "err")] for rank in range(len(self.processes))
        ]
        return [
            Ended(process.exitcode or 0, *(path.read_text() if path.exists() else "" for path in paths))
            for process, paths in zip(self.processes, texts, strict=True)
        ]


def _rank(words: list[str], name: str, variables: dict[str, str], trouble: Trouble | None, cwd: str) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, end in ((1, "out"), (2, "err")):
        descriptor = os.open(f"{name}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    sys.argv = [str(PROGRAM), *words]
    if trouble is not None:
        _put_into(trouble, int(variables.get("RANK", 0)), int(variables.get("WORLD_SIZE", 1)), Path(name).parent)
    from moe_overlap.commands.train import run

    run()


def _put_into(trouble: Trouble, rank: int, ranks: int, folder: Path) -> None:
    mine = trouble.rank in (None, rank)
    if mine and trouble.limit is not None:
        limit, value = trouble.limit
        resource.setrlimit(getattr(resource, limit), (value, resource.getrlimit(getattr(resource, limit))[1]))
    if trouble.dispatch:
        from tests.end_to_end.lost_rank import is_plain, lose_at, tell_at

        # A rank that is slow to start its own dispatch would otherwise find its peer gone already, or two of them.
        told = [folder / f"started{other}" for other in range(ranks)]
        if mine:
            lose_at(trouble.dispatch, trouble.how, told[:rank] + told[rank + 1 :])
        elif not is_plain(trouble.how):
            tell_at(trouble.dispatch, told[rank])
