"""Searches of plans for the papers' comparisons: each in a separate process with a limit of processor time; outcomes are kept.

1. `Search` describes one search as data: flags, cluster, space. `run` searches in a forked process, so that processor seconds and
   memory are measured for each search. At its limit of processor time it returns the best plan so far, as after Ctrl-C.
2. `KeptSearches` appends every outcome to a file, and reads the file again: an interrupted comparison continues after its last
   search. Other flags or another limit are another search.

Limits are in processor seconds, because other programs may run at the same time.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from moe_overlap.api import Options
from moe_overlap.describe.cluster import Cluster, cluster_of, known_gpu, node_group
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.version import VERSION_LINE
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.results import PlanSearch
from moe_overlap.plan_search.search import search_plan
from moe_overlap.tuner.cost.hardware import Constants, shipped_constants
from moe_overlap.tuner.search.space import SearchSpace

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
KIB = 2**10
HARD_LIMIT = 2
"""Multiple of its limit after which a search is killed; it still predicts its answer after the limit."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """GPUs of one kind, in nodes.

    Attributes:
        network_gb_per_s: bandwidth per GPU and direction; None: that of moe_overlap/describe/gpus.json.
        memory_gib: memory of a GPU; None: that of the same file.
        like: the GPU whose fitted efficiencies are used; None: those of `gpu`.
    """

    gpu: str
    gpus: int
    node: int = 8
    network_gb_per_s: float | None = None
    memory_gib: float | None = None
    like: str | None = None

    def cluster(self) -> Cluster:
        """The machines as a cluster file would describe them."""
        node = min(self.node, self.gpus)
        group = node_group(known_gpu(self.gpu, "--gpu"), self.gpus // node, node)
        group |= {} if self.network_gb_per_s is None else {"network_gb_per_s": self.network_gb_per_s}
        cluster = cluster_of({"name": f"{self.gpu}-{self.gpus}", "groups": [group]}, "--cluster")
        if self.memory_gib is None:
            return cluster
        (only,) = cluster.groups
        return replace(cluster, groups=(replace(only, gpu=replace(only.gpu, memory_gib=self.memory_gib)),))

    def constants(self) -> Constants:
        """The shipped constants, with the efficiencies of `like`."""
        constants = shipped_constants()
        if self.like is None:
            return constants
        name = self.cluster().group_of(0).gpu.name
        return replace(constants, gpus={**constants.gpus, name: constants.gpus[self.like]})


@dataclass(frozen=True, kw_only=True)
class Search:
    """One search.

    Attributes:
        arguments: Megatron flags, or `@FILE`.
        averages: True if the search prices all micro-batches of a stage as their mean.
    """

    arguments: tuple[str, ...]
    machines: Machines
    space: SearchSpace
    averages: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a search.

    Attributes:
        seconds: step of the plan, simulated if the search simulated it; searches rank plans by it. None without a plan.
        objective: the step that the search minimized; with `averages` it has mean micro-batches.
        plan: name of the plan, or the reason why there is none.
        status: how the search ended.
        cpu_seconds: processor seconds of the search.
        capture_cpu_seconds: processor seconds of the processes that captured for it.
        points: number of priced stages, each under one memory choice.
        layouts: number of uniform layouts in the space.
        rss_gib: peak memory of the search.
        predicted: step of the plan by analytic costs.
    """

    seconds: float | None
    objective: float | None
    plan: str
    status: str
    cpu_seconds: float
    capture_cpu_seconds: float = 0.0
    points: int = 0
    layouts: int = 0
    rss_gib: float = 0.0
    predicted: float | None = None


Searcher = Callable[[Search], Outcome]


def points_of(result: PlanSearch) -> int:
    """Number of stages that a search has priced: of uniform plans, of freed stages, and on sub-meshes."""
    staged = result.staged
    return result.uniform.counts.stages + (0 if staged is None else staged.candidates + staged.mesh_stages)


def answered(search: Search) -> Outcome:
    """The outcome of a search in this process, without processor seconds and memory.

    Raises:
        KeyboardInterrupt: the time was over before the first plan.
    """
    # The systems of these papers do not hide all-to-alls.
    space = replace(search.space, overlaps=False)
    settings = SearchSettings(target="any", space=space, averages=search.averages, has_baseline=False)
    options: Options = {"constants": search.machines.constants()}
    try:
        result = search_plan(search.arguments, search.machines.cluster(), settings, **options)
    except ConfigError as error:
        return Outcome(seconds=None, objective=None, plan=str(error), status="no plan", cpu_seconds=0.0)
    objectives = [result.uniform.solution.objective]
    objectives += [result.staged.solution.objective] if result.staged is not None else []
    return Outcome(
        seconds=result.chosen.simulated_seconds,
        predicted=result.chosen.seconds,
        objective=min(objectives),
        plan=result.chosen.name,
        status="ended early" if result.ended_early else "searched",
        cpu_seconds=0.0,
        points=points_of(result),
        layouts=result.uniform.counts.layouts,
    )


def run(search: Search, cpu_seconds: float, answer: Searcher = answered) -> Outcome:
    """The outcome of a search in a separate process.

    Args:
        cpu_seconds: limit; after it the best plan so far is the answer.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(search, cpu_seconds, answer, sender))
    process.start()
    sender.close()
    try:
        return Outcome(**receiver.recv())
    except EOFError:
        process.join()
        plan = f"killed after {HARD_LIMIT * cpu_seconds:.0f} CPU seconds, exit status {process.exitcode}"
        return Outcome(seconds=None, objective=None, plan=plan, status="killed", cpu_seconds=HARD_LIMIT * cpu_seconds)
    finally:
        process.join()


def _answer(search: Search, cpu_seconds: float, answer: Searcher, sender: Connection) -> None:
    """The searching process."""
    hard = int(HARD_LIMIT * cpu_seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    signal.signal(signal.SIGPROF, _interrupt)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        outcome = answer(search)
    except KeyboardInterrupt:
        outcome = Outcome(seconds=None, objective=None, plan="no plan in time", status="ended early", cpu_seconds=0.0)
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    usage, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    outcome = replace(
        outcome,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        capture_cpu_seconds=children.ru_utime + children.ru_stime,
        rss_gib=usage.ru_maxrss * KIB / GIB,
    )
    sender.send(asdict(outcome))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@dataclass
class KeptSearches:
    """Searches whose outcomes are kept in a file.

    Attributes:
        path: file with one line of JSON per outcome; None: outcomes are not kept.
        cpu_seconds: limit of each search.
        only_kept: True to search nothing; outcomes that are not in the file stay unknown.
        budget: processor seconds of all searches together; after that, outcomes that are not in the file stay unknown.
    """

    path: Path | None = None
    cpu_seconds: float = 600.0
    only_kept: bool = False
    budget: float = math.inf
    spent: float = 0.0
    searcher: Searcher | None = None
    _known: dict[str, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None or not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            self._known[_key(row["search"], row["limit"])] = Outcome(**row["outcome"])

    def outcome(self, search: Search) -> Outcome | None:
        """The outcome of a search, from the file or by searching now; None if it is not in the file and may not be searched."""
        # The key does not depend on the repository's folder; `words` is the name of the arguments in kept files.
        facts = asdict(search)
        facts = {"words": [argument.replace(f"@{ROOT}/", "@") for argument in facts.pop("arguments")], **facts}
        key = _key(facts, self.cpu_seconds)
        if key not in self._known:
            if self.only_kept or self.spent >= self.budget:
                return None
            outcome = self._known[key] = self._searched(search)
            self.spent += outcome.cpu_seconds + outcome.capture_cpu_seconds
            self._keep({"search": facts, "limit": self.cpu_seconds, "outcome": asdict(self._known[key])})
        return self._known[key]

    def _searched(self, search: Search) -> Outcome:
        return run(search, self.cpu_seconds) if self.searcher is None else self.searcher(search)

    def _keep(self, entry: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**entry, "version": VERSION_LINE}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _key(search: Mapping[str, Any], limit: float) -> str:
    return json.dumps([search, limit], sort_keys=True, default=list)
