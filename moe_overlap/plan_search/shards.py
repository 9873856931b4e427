"""One search in several processes, of this host or of others: each takes its share of the layouts, and the answers are merged.

1. `share_of` deals the layouts: a shard has all layouts of its ranks, so no two put together the same graphs.
2. `in_processes` runs shards beside each other on this host (`--jobs`). Over hosts every shard is a process of its own that any
   scheduler starts (`--shard i/n`): it writes its answer to a folder (`save_shard`), and the one that finds the answers of all
   shards there goes on with them (`read_shards`).
3. `merged` makes one search of their answers. A shard keeps at least those of its layouts that a search over all would keep, and
   plans have one order, so what is kept does not depend on the number of shards, nor on the order in which they end. Evaluated
   layouts and the frontier do: a shard knows no plan of the others, and rules out less.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_json, new_file, whole_number
from moe_overlap.describe.process import end_with_parent
from moe_overlap.plan.serialize import as_values, read_record
from moe_overlap.tuner.search.solution import Solution, Status
from moe_overlap.tuner.search.space import UniformLayout
from moe_overlap.tuner.search.uniform import Counts, RankedLayout, UniformSearch, least_of_both, ranked_first

Answer = TypeVar("Answer")
MOST_ANSWER_BYTES = 1 << 26
"""Bytes of the largest answer of a shard that is read."""
Refused = list[tuple[str, str]]
"""Names of plans that a rule refuses, with the rule."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A share of a search: the `index`-th of `count`, from 1 on, as the command line says it."""

    index: int
    count: int

    @property
    def name(self) -> str:
        """The share as `--shard` takes it, such as `1/4`."""
        return f"{self.index}/{self.count}"

    @staticmethod
    def parse(text: str) -> Shard:
        """Read what `--shard` was given.

        Raises:
            ConfigError: the text is no i/n with 1 <= i <= n.
        """
        index, count = (whole_number(part) for part in text.partition("/")[::2])
        if index is not None and count is not None and 1 <= index <= count:
            return Shard(index, count)
        raise ConfigError("--shard", text, "is no i/n with i from 1 to n", "write 1/4 for the first of four")


class ShardsMissingError(Exception):
    """Answers of other shards are not there yet.

    Attributes:
        missing: the shards without an answer.
    """

    def __init__(self, written: Path, missing: Sequence[Shard]) -> None:
        names = ", ".join(shard.name for shard in missing)
        super().__init__(f"{written} is written; the last of the shards {names} to end merges them and writes the plan")
        self.missing = tuple(missing)


def share_of(layouts: Sequence[UniformLayout], shard: Shard) -> list[UniformLayout]:
    """The layouts of a shard, in their order; there may be none."""
    ranks = list(dict.fromkeys(layout.ranks for layout in layouts))
    own = set(ranks[shard.index - 1 :: shard.count])
    return [layout for layout in layouts if layout.ranks in own]


def in_processes(run: Callable[[Shard], Answer], jobs: int) -> list[Answer]:
    """The answers of so many shards, each from a process that is forked from this one; this one answers the first itself.

    Raises:
        ConfigError: a process was killed.
        Exception: what a shard raises; a RuntimeError with its class and text where processes cannot hand it on.
    """
    context = multiprocessing.get_context("fork")
    processes, answers = [], []
    for index in range(2, jobs + 1):
        receiving, sending = context.Pipe(duplex=False)
        own = run, Shard(index, jobs), sending, os.getpid()
        process = context.Process(target=_answer, args=own, daemon=True)
        process.start()
        sending.close()
        processes.append((process, receiving))
    try:
        answers.append(run(Shard(1, jobs)))
        answers += [_received(receiving, jobs) for _, receiving in processes]
    finally:
        for process, receiving in processes:
            receiving.close()
            if len(answers) < jobs:
                process.terminate()
            process.join()
    return answers


def _answer(run: Callable[[Shard], Answer], shard: Shard, sending: Connection, parent: int) -> None:
    # Nobody takes the answer of a search that was killed, or that memory ran out for.
    end_with_parent(parent)
    try:
        sending.send((run(shard), None))
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


def merged(searches: Sequence[UniformSearch], keep: int) -> UniformSearch:
    """The searches of all shards as one.

    Args:
        keep: layouts that each has ranked at most.
    """
    ranked = ranked_first([plan for search in searches for plan in search.ranked])[:keep]
    best = ranked[0] if ranked else None
    statuses = {search.solution.status for search in searches}
    status = Status.OPTIMAL if best is not None else Status.INFEASIBLE
    smallest = [search.smallest for search in searches if search.smallest is not None]
    return UniformSearch(
        solution=Solution(
            value=best,
            objective=math.inf if best is None else best.seconds,
            bound=min(search.solution.bound for search in searches),
            status=Status.TIME_LIMIT if Status.TIME_LIMIT in statuses else status,
            seconds=max(search.solution.seconds for search in searches),
        ),
        ranked=tuple(ranked),
        smallest=min(smallest, key=lambda plan: (plan.needed_bytes, plan.order), default=None),
        frontier=least_of_both([plan for search in searches for plan in search.frontier]),
        counts=Counts(
            **{field.name: sum(getattr(search.counts, field.name) for search in searches) for field in fields(Counts)}
        ),
        is_interrupted=any(search.is_interrupted for search in searches),
    )


# Answers in files


def save_shard(folder: Path, shard: Shard, job: str, search: UniformSearch, refused: Refused) -> Path:
    """Write the answer of a shard; the file is complete or absent.

    Args:
        job: hash of everything that the answer depends on.
    Raises:
        ConfigError: the file cannot be written.
    """
    path = _path(folder, shard)
    solution = search.solution
    values = {
        "job": job,
        "ranked": as_values(search.ranked),
        "smallest": as_values(search.smallest),
        "frontier": as_values(search.frontier),
        "counts": as_values(search.counts),
        # JSON has no infinity.
        "bound": None if math.isinf(solution.bound) else solution.bound,
        "status": solution.status.value,
        "seconds": solution.seconds,
        "is_interrupted": search.is_interrupted,
        "refused": refused,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with new_file(path) as temporary:
            temporary.write_text(json.dumps(values, indent=1), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "--output", str(path), f"cannot be written: {error.strerror}", "give another folder"
        ) from error
    return path


def read_shards(folder: Path, count: int, job: str) -> list[tuple[UniformSearch, Refused]]:
    """The answers of all shards.

    Raises:
        ShardsMissingError: some are not there yet.
        ConfigError: a file is of another search, or is no answer.
    """
    shards = [Shard(index, count) for index in range(1, count + 1)]
    missing = [shard for shard in shards if not _path(folder, shard).exists()]
    if missing:
        raise ShardsMissingError(folder, missing)
    return [_read(_path(folder, shard), job) for shard in shards]


def _path(folder: Path, shard: Shard) -> Path:
    return folder / f"{shard.index}-of-{shard.count}.json"


def _read(path: Path, job: str) -> tuple[UniformSearch, Refused]:
    fix = "remove it, or give another --output"
    try:
        values = bounded_json(path, MOST_ANSWER_BYTES)
        if values["job"] != job:
            raise ConfigError("--shard", str(path), "is of other flags, GPUs, options or another release", fix)

        def plans(name: str) -> tuple[RankedLayout, ...]:
            return tuple(read_record(RankedLayout, plan, path.name) for plan in values[name])

        smallest, ranked = values["smallest"], plans("ranked")
        best = ranked[0] if ranked else None
        objective = math.inf if best is None else best.seconds
        bound = math.inf if values["bound"] is None else _from_zero(values["bound"])
        if bound > objective:
            raise ValueError(f"its bound, {bound:g} s, is above its best plan")
        search = UniformSearch(
            solution=Solution(
                value=best,
                objective=objective,
                bound=bound,
                status=Status(values["status"]),
                seconds=_from_zero(values["seconds"]),
            ),
            ranked=ranked,
            smallest=None if smallest is None else read_record(RankedLayout, smallest, path.name),
            frontier=plans("frontier"),
            counts=read_record(Counts, values["counts"], path.name),
            is_interrupted=values["is_interrupted"] is True,
        )
        plans_read = [*search.ranked, *search.frontier, *([search.smallest] if search.smallest else [])]
        if any(min(plan.seconds, plan.needed_bytes) < 0 for plan in plans_read):
            raise ValueError("a plan of less than nothing")
        return search, [(name, rule) for name, rule in values["refused"]]
    except (Unreadable, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("--shard", str(path), f"is no answer of a shard: {error}", fix) from error


def _from_zero(value: Any) -> float:
    if type(value) not in (int, float) or value < 0:
        raise ValueError(f"{value!r} is no number from 0")
    return float(value)
