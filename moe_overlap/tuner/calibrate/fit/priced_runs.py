"""Errors of runs under constants, priced by one process per core; each process has its own share of the runs.

A fit needs the errors of some runs under some constants tens of thousands of times, mostly of few runs. A process keeps the
seconds that it has priced, by the constants that a configuration sees, so every run belongs to one process. The answers do not
depend on the number of processes.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Protocol

from moe_overlap.describe.cluster import known_gpus
from moe_overlap.describe.host import usable_cores
from moe_overlap.tuner.cost.hardware import Constants

Known = dict[tuple[object, ...], float]
"""A configuration and the constants it sees -> predicted seconds."""


class ScopedRun(Protocol):
    """The properties of a run that select its constants."""

    @property
    def gpu_type(self) -> str:
        """The GPU type, as constants name it."""

    @property
    def release(self) -> str:
        """The release of its software; empty if the table has none for it."""

    @property
    def scope(self) -> str:
        """Precision, and dense or MoE."""


class FittedRun(ScopedRun, Protocol):
    """A run that constants are fitted to."""

    @property
    def configuration(self) -> object:
        """Equal for runs that differ in their release alone."""

    @property
    def seconds(self) -> float:
        """The measured seconds of a step."""

    def relative_error(self, constants: Constants) -> float:
        """The relative error of the predicted step."""


def architecture_of(gpu: str) -> str:
    """The architecture of a GPU type of the table."""
    return str(known_gpus()[gpu]["architecture"])


class PricedRuns:
    """The runs of a fit, priced in processes that end with this context.

    Args:
        runs: every run whose errors will be needed.
        processes: 1 prices in this process; None starts one per core.
    """

    def __init__(self, runs: Sequence[FittedRun], processes: int | None = None) -> None:
        count = min(len(runs), processes or usable_cores())
        # Runs of a configuration share caches, and neighbours in the table take similar times.
        configurations = {run.configuration: None for run in runs}
        dealt = {configuration: place % count for place, configuration in enumerate(configurations)}
        self._owners = {id(run): dealt[run.configuration] for run in runs}
        self._numbers = {id(run): number for number, run in enumerate(runs)}
        self._runs, self._known = tuple(runs), Known()
        self._links: list[Connection] = []
        self._workers: list[multiprocessing.process.BaseProcess] = []
        # Runs are not sent as messages: a forked child has them from the start.
        context = multiprocessing.get_context("fork")
        for _ in range(count if count > 1 else 0):
            parent_end, child_end = context.Pipe()
            self._links.append(parent_end)
            worker = context.Process(target=self._serve, args=(child_end,), daemon=True)
            worker.start()
            child_end.close()
            self._workers.append(worker)

    def __enter__(self) -> PricedRuns:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for link in self._links:
            link.close()
        for worker in self._workers:
            worker.join()

    def errors(self, questions: Sequence[tuple[Sequence[FittedRun], Constants]]) -> list[list[float]]:
        """Logarithms of predicted over measured seconds, for each pair of runs and constants.

        Many pairs at once keep all processes busy: one pair has few runs, often of one process.
        """
        if not self._links:
            return [[self._error(run, constants) for run in runs] for runs, constants in questions]
        shares: list[list[tuple[Constants, list[int]]]] = [[] for _ in self._links]
        for runs, constants in questions:
            for owner, share in enumerate(shares):
                numbers = [self._numbers[id(run)] for run in runs if self._owners[id(run)] == owner]
                share.append((constants, numbers))
        for link, share in zip(self._links, shares, strict=True):
            link.send(share)
        answers = [iter(link.recv()) for link in self._links]
        return [[next(answers[self._owners[id(run)]]) for run in runs] for runs, _ in questions]

    def _serve(self, link: Connection) -> None:
        # A pipe ends when no process holds its other end; a child holds copies of the ends that existed when it began.
        for inherited in self._links:
            inherited.close()
        while True:
            try:
                share: list[tuple[Constants, list[int]]] = link.recv()
            except EOFError:
                return
            link.send(
                [self._error(self._runs[number], constants) for constants, numbers in share for number in numbers]
            )

    def _error(self, run: FittedRun, constants: Constants) -> float:
        release = constants.releases.get(run.release, {}).get(architecture_of(run.gpu_type))
        loss = release.loss if release is not None else 1.0
        key = (run.configuration, constants.gpus[run.gpu_type], constants.common, loss)
        if key not in self._known:
            self._known[key] = (1.0 + run.relative_error(constants)) * run.seconds
        return math.log(self._known[key] / run.seconds)
