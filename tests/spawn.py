"""Functions run by several processes that form a gloo group, for tests.

    losses = run(2, train_a_little, "--expert-model-parallel-size 2")

`function` is a module-level function of an importable module. The processes are forked from a server that has imported torch
and megatron.core (tests/preload.py), which takes longer than most functions.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

HANGS_SECONDS = 600.0
"""What takes longer hangs. It is many times what anything takes, as the machine may be slow and busy with something else."""
PATIENCE_SECONDS = 5.0
"""How long the others may take to report after the first failure: the first one is rarely the one that tells most."""


class ProcessFailed(Exception):
    """A process raised, died or did not end in time; the message holds each report."""


def run(
    world_size: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = HANGS_SECONDS
) -> list[Any]:
    """Call `function(*arguments)` in `world_size` processes of one group.

    Returns:
        What each rank returned (picklable), in order of rank.
    Raises:
        ProcessFailed: with the tracebacks of the processes that failed; the others are stopped.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    with tempfile.TemporaryDirectory() as folder:
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            name = (function.__module__, function.__qualname__)
            start = (rank, world_size, f"{folder}/rendezvous", name, arguments, dict(os.environ), there)
            process: BaseProcess = context.Process(target=_child, args=start, daemon=True)
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        try:
            return _collect(processes, pipes, time.monotonic() + timeout_seconds, timeout_seconds)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(
    processes: list[BaseProcess], pipes: list[Connection], deadline: float, timeout_seconds: float
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready and not failures:
            late = ", ".join(str(rank) for rank in sorted(waiting.values()))
            raise ProcessFailed(f"rank {late}: no result after {timeout_seconds:g} s")
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                failed, value = pipe.recv()
            except EOFError:
                processes[rank].join(PATIENCE_SECONDS)
                failed, value = True, f"ended without a report, exit code {processes[rank].exitcode}"
            if failed:
                deadline = min(deadline, time.monotonic() + PATIENCE_SECONDS)
                failures[rank] = value
            else:
                results[rank] = value
    if failures:
        raise ProcessFailed("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))
    return [results[rank] for rank in range(len(processes))]


def _child(
    rank: int,
    world_size: int,
    rendezvous: str,
    name: tuple[str, str],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    pipe: Connection,
) -> None:
    os.environ.update(environment)  # the server's is that of the first launch
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("RANK", None)
    try:
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
        function: Any = importlib.import_module(name[0])
        for part in name[1].split("."):
            function = getattr(function, part)
        result = function(*arguments)
        pipe.send((False, result))
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send((True, traceback.format_exc()))
    # Without the interpreter's teardown: gloo's threads may still hold what the others need.
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
