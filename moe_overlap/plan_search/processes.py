"""The limits of a search (`SearchBudget`), and a search in several processes of this host (`--jobs`).

Each process is forked from this one and searches a share of the layouts.

The pools of the standard library pickle a task, and a search is a closure over prices and captures. `ProcessPoolExecutor` also
ends no task before it is done, and `multiprocessing.Pool` waits forever for a process that was killed.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.process import end_with_parent
from moe_overlap.tuner.search.pipeline.per_stage import StagedPlan
from moe_overlap.tuner.search.pipeline.sub_meshes import MeshPlan
from moe_overlap.tuner.search.shares import LayoutShare, SharedBar
from moe_overlap.tuner.search.solution import Status
from moe_overlap.tuner.search.uniform import RankedLayout, UniformSearch, joined_uniform

Answer = TypeVar("Answer")
Refused = list[tuple[str, str]]
"""Names of plans that a rule refuses, with the rule."""
Candidate = RankedLayout | StagedPlan | MeshPlan
Progress = Callable[[int, int, Candidate | None], None]
"""Called with layouts done, layouts in all, and the best so far."""


def silent(done: int, total: int, best: Candidate | None) -> None:
    """No progress: one process reports for all."""


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """The limits of a search.

    Attributes:
        deadline: of `time.monotonic`, after which the best so far is the answer.
        jobs: processes of this host that share the search; the best plans do not depend on their number.
    """

    deadline: float = math.inf
    jobs: int = 1
    progress: Progress = silent

    def progress_of(self, share: LayoutShare, incumbent: Candidate | None = None) -> Progress:
        """The progress of a share: the first process reports, and shows the incumbent until the share has a plan."""
        if share.index > 0:
            return silent
        return lambda done, total, best: self.progress(done, total, best or incumbent)

    def after(self, uniform: UniformSearch) -> SearchBudget:
        """The budget of a search that follows: no time where the search of uniform plans reached its deadline."""
        return replace(self, deadline=-math.inf) if uniform.solution.status is Status.TIME_LIMIT else self


UNLIMITED = SearchBudget()


def shared_search(
    search: Callable[[LayoutShare, SharedBar | None], tuple[UniformSearch, Refused]], jobs: int, keep: int
) -> tuple[UniformSearch, Refused]:
    """A search of uniform plans in so many processes, and what rules refuse.

    Args:
        search: of a share of the layouts; given the bar of all processes where there are several.
        keep: layouts that are ranked.
    Raises:
        ConfigError: a process was killed.
    """
    bar = SharedBar(jobs, keep) if jobs > 1 else None
    answers = in_processes(lambda share: search(share, bar), jobs)
    if len(answers) == 1:
        return answers[0]
    refused = dict.fromkeys(refusal for _, of_share in answers for refusal in of_share)
    return joined_uniform([uniform for uniform, _ in answers], keep), list(refused)


def in_processes(search: Callable[[LayoutShare], Answer], jobs: int) -> list[Answer]:
    """The answers of so many shares, each from a process that is forked from this one; this one searches the first itself.

    Raises:
        ConfigError: a process was killed.
        Exception: what a search raises; a RuntimeError with its class and text where processes cannot hand it on.
    """
    context = multiprocessing.get_context("fork")
    processes, answers = [], []
    for index in range(1, jobs):
        receiving, sending = context.Pipe(duplex=False)
        arguments = search, LayoutShare(index, jobs), sending, os.getpid()
        process = context.Process(target=_answer, args=arguments, daemon=True)
        process.start()
        sending.close()
        processes.append((process, receiving))
    try:
        answers.append(search(LayoutShare(0, jobs)))
        answers += [_received(receiving, jobs) for _, receiving in processes]
    finally:
        for process, receiving in processes:
            receiving.close()
            if len(answers) < jobs:
                process.terminate()
            process.join()
    return answers


def _answer(search: Callable[[LayoutShare], Answer], share: LayoutShare, sending: Connection, parent: int) -> None:
    # Nobody takes the answer of a search that was killed, or that memory ran out for.
    end_with_parent(parent)
    try:
        sending.send((search(share), None))
    except BaseException as error:
        sending.send((None, _as_sent(error)))


def _as_sent(error: BaseException) -> BaseException:
    """An error as another process can have it: itself, or its class and text where it does not pickle or is not made again."""
    try:
        # Made again here: a class that fails to be would fail where the answer is awaited, as an error of its own.
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _received(receiving: Connection, jobs: int) -> Any:
    while True:
        try:
            answer, error = receiving.recv()
        except KeyboardInterrupt:
            continue  # A terminal interrupts the other processes, too: each answers with its best so far.
        except EOFError:
            rule = "one of its processes was killed, perhaps for want of memory"
            raise ConfigError("--jobs", jobs, rule, "use fewer") from None
        if error is not None:
            raise error
        return answer
