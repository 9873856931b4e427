"""Training on the hosts of a bed: the ranks of pretrain_moe.py itself, each where `launch.placed` puts it.

`train` starts them, forwards the output of the first one, and ends them all when one fails. Without namespaces a rank is this
file, which is pretrain_moe.py with one change: between the assembly of the run and its first step the wires of the dispatcher are
put on an emulated link (emulator.py). Gradients and parameters of replicas do not cross that link.

    python -m tools.bench.training --bytes-per-second 4e7 flags of pretrain_moe.py …
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from moe_overlap.commands import train as program
from moe_overlap.commands.exits import RANK_0_SPEAKS_WITHIN_SECONDS, end_process
from tools.bench.bed import Bed, CpuGroup
from tools.bench.launch import FIRST_PORT, ROOT, RankFailed, environment_of_job, kill_sessions, place_of, placed

if TYPE_CHECKING:
    from megatron.training.cli.arguments import ParsedArguments
    from megatron.training.training import TrainingLoop

LOOK_SECONDS = 0.1
"""Seconds between two reads of the ranks' output."""
RATE = "--bytes-per-second"


def command_of_training(flags: Sequence[str], emulated_rate: float | None) -> list[str]:
    """The command line of a rank.

    Args:
        flags: flags of pretrain_moe.py.
        emulated_rate: bytes per second of an emulated link; None: pretrain_moe.py as it stands.
    """
    if emulated_rate is None:
        return [sys.executable, str(ROOT / "pretrain_moe.py"), *flags]
    return [sys.executable, "-P", "-m", "tools.bench.training", RATE, repr(emulated_rate), *flags]


def train(command: Sequence[str], ranks: int, bed: Bed | None, log: Path, show: Callable[[str], None]) -> None:
    """Train to the end of the run.

    Args:
        command: of every rank.
        bed: None: this machine, without limited links.
        log: takes what rank 0 prints; errors of rank R go to `log` with the suffix `.errR`.
        show: is called with every line that rank 0 prints.
    Raises:
        RankFailed: a rank ended with another status than 0; its error is on stderr.
    """
    shared = environment_of_job(ranks, bed, FIRST_PORT)
    processes: list[subprocess.Popen[bytes]] = []
    shared["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), shared.get("PYTHONPATH")]))
    with CpuGroup() as priority, contextlib.ExitStack() as stack:
        stack.callback(lambda: kill_sessions(processes))
        for rank in range(ranks):
            with (
                (log if rank == 0 else Path(os.devnull)).open("w") as out,
                _errors(log, rank).open("w") as errors,
            ):
                process = subprocess.Popen(
                    placed(command, rank, ranks, bed),
                    env=shared | place_of(rank),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=errors,
                    start_new_session=True,
                )
            processes.append(process)
            priority.join(process.pid)
        with log.open() as lines:
            _follow(processes, lambda: _show_new(lines, show))
    failed = [(rank, process.returncode) for rank, process in enumerate(processes) if process.returncode]
    if failed:
        spoke = [rank for rank, _ in failed if _errors(log, rank).read_text()]
        rank, status = next(((rank, status) for rank, status in failed if rank in spoke), failed[0])
        sys.stderr.write(_errors(log, rank).read_text())
        raise RankFailed(f"rank {rank} of the training ended with status {status}; its output: {log}", status)


def _errors(log: Path, rank: int) -> Path:
    return log.with_suffix(f".err{rank}")


def _follow(processes: Sequence[subprocess.Popen[bytes]], look: Callable[[], None]) -> None:
    """Look again and again until every rank has ended, or one has failed and the others have had time to speak."""
    failed_at: float | None = None
    while any(process.poll() is None for process in processes):
        look()
        if failed_at is None and any(process.returncode for process in processes):
            failed_at = time.monotonic()
        if processes[0].returncode or (
            failed_at is not None and time.monotonic() > failed_at + RANK_0_SPEAKS_WITHIN_SECONDS
        ):
            break
        time.sleep(LOOK_SECONDS)
    look()


def _show_new(lines: TextIO, show: Callable[[str], None]) -> None:
    """Pass on the complete lines that a file has gained."""
    while True:
        start = lines.tell()
        line = lines.readline()
        if not line.endswith("\n"):
            lines.seek(start)
            return
        show(line.rstrip("\n"))


def main(argv: Sequence[str]) -> int:
    """Train over an emulated link; returns the exit status of pretrain_moe.py."""
    from tools.bench.emulator import EgressClock, emulate
    from tools.bench.worker import wires_of

    parser = argparse.ArgumentParser(description=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument(RATE, type=float, required=True)
    arguments, flags = parser.parse_known_args(argv)
    assemble = program.assemble

    def assemble_on_link(parsed: ParsedArguments, rank: int) -> TrainingLoop:
        loop = assemble(parsed, rank)
        clock = EgressClock(arguments.bytes_per_second)
        for wires in wires_of(loop.job, loop.job.machinery.runner):
            emulate(wires, clock)
        return loop

    program.assemble = assemble_on_link
    return program.main(flags)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
