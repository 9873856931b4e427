"""The overlap of a plan search (`--target moe-overlap`): which of its plans is the fastest once all-to-alls are hidden.

1. The overlap of the first few plans without overlap is decided, as --overlap-only decides it.
2. Layouts that plain steps rule out may be faster with their all-to-alls hidden (tuner/search/hidden.py). Each is read as flags,
   and the simplest plan of its way to overlap is simulated: that takes a second, deciding its overlap several.
3. The overlap of the fastest of those is decided too, if they are faster than the best so far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from moe_overlap.api import Options, tune
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.capabilities import GRAPHS_FLAG
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.report.search import Finalist, Screened
from moe_overlap.report.tuning import Tuned
from moe_overlap.tuner.search.hidden import HiddenLayout
from moe_overlap.tuner.search.layer.candidates import PLAIN, Candidates
from moe_overlap.tuner.search.layer.overlap import GraphsChoice
from moe_overlap.tuner.search.uniform import RankedLayout

DECIDED = 3
"""The overlap of so many of the fastest plans is decided."""
FURTHER = 2
"""The same of the layouts that are fast with overlap only."""
SCREENED = 8
"""Layouts of each way to overlap whose simplest plan is simulated."""
Reading = Callable[[RankedLayout], Finalist]
"""A layout -> the finalist of its flags; ConfigError where rules refuse them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlapped:
    """The fastest plan of a search.

    Attributes:
        tuned: its overlap; None where nothing is overlapped.
        screened: the layouts that were looked at for what they may hide, the fastest first.
        graphs: of the plan, where its lists are replayed as CUDA graphs; else of the fastest that would be, with its layout.
    """

    chosen: Finalist
    tuned: Tuned | None
    screened: tuple[Screened, ...] = ()
    graphs: GraphsChoice | None = None


def decide_overlaps(
    finalists: Sequence[Finalist],
    hidden: Callable[..., Sequence[HiddenLayout]],
    read: Reading,
    cluster: Cluster,
    limits: SearchLimits,
    solver_seconds: float,
    deadline: float = math.inf,
    replays: bool = False,
    **options: Unpack[Options],
) -> Overlapped:
    """The fastest of a search's plans with overlap and without.

    Args:
        finalists: in their order; the first is the answer where no overlap is faster.
        hidden: with `bar`, seconds of a step: the layouts that may be faster than that with their all-to-alls hidden.
        deadline: of `time.monotonic`, behind which nothing more is looked at.
        replays: whether lists are to be replayed as CUDA graphs; those that rules refuse it for run without.
    """
    best = Overlapped(chosen=finalists[0], tuned=None)
    shortest = finalists[0].simulated_seconds
    elsewise: list[GraphsChoice] = []

    def decide(finalist: Finalist) -> None:
        nonlocal best, shortest
        if time.monotonic() > deadline:
            return
        try:
            graphs = (GRAPHS_FLAG,) if replays and finalist.problem.listed.graphs_refusal is None else ()
            tuned = tune([*finalist.arguments, *graphs], cluster, limits, solver_seconds, **options)
        except ConfigError:
            return  # The rules of overlap refuse the plan; it stays what it is.
        if tuned.graphs is not None and not tuned.graphs.is_on and tuned.graphs.other is not None:
            elsewise.append(replace(tuned.graphs, name=f"{finalist.name}, {tuned.graphs.name}"))
        if tuned.chosen.name != PLAIN and tuned.chosen.fits and tuned.chosen.seconds < shortest:
            best, shortest = Overlapped(chosen=finalist, tuned=tuned), tuned.chosen.seconds

    # Step 1.
    for finalist in finalists[:DECIDED]:
        if finalist.plan.stages[0].expert * finalist.plan.stages[0].expert_tensor > 1:
            decide(finalist)
    if time.monotonic() > deadline:
        return replace(best, graphs=_graphs_of(best, elsewise))
    # Step 2. What was decided above is not looked at again.
    decided = {finalist.name for finalist in finalists[:DECIDED]}
    known = {finalist.name: finalist for finalist in finalists}
    wanted = [layout for layout in hidden(bar=shortest) if layout.ranked.name not in decided]
    outcomes = _screened(
        wanted, lambda ranked: known.get(ranked.name) or read(ranked), limits, solver_seconds, deadline, replays
    )
    screened = sorted(outcomes, key=lambda pair: pair[0].order)
    # Step 3.
    for outcome, further in screened[:FURTHER]:
        if further is not None and outcome.seconds is not None and outcome.seconds < shortest:
            decide(further)
    return replace(best, screened=tuple(outcome for outcome, _ in screened), graphs=_graphs_of(best, elsewise))


def _graphs_of(best: Overlapped, elsewise: Sequence[GraphsChoice]) -> GraphsChoice | None:
    """The choice of graphs that the answer tells: its own, or the fastest of those that were predicted with graphs."""
    if best.tuned is not None and best.tuned.graphs is not None and best.tuned.graphs.is_on:
        return best.tuned.graphs
    return min(elsewise, key=lambda choice: choice.order, default=None)


def _screened(
    layouts: Sequence[HiddenLayout],
    read: Reading,
    limits: SearchLimits,
    solver_seconds: float,
    deadline: float,
    replays: bool,
) -> Iterator[tuple[Screened, Finalist | None]]:
    """The simulated step of the simplest plan of every layout's way to overlap."""
    for layout in layouts:
        if time.monotonic() > deadline:
            return
        ranked, finalist, seconds, refused = layout.ranked, None, None, ""
        try:
            finalist = read(ranked)
            problem = finalist.problem.replaying(replays and finalist.problem.listed.graphs_refusal is None)
            candidate = Candidates(problem, limits, solver_seconds).simplest(layout.way)
            refused = candidate.refused
            if candidate.prediction is not None:
                seconds = candidate.seconds if candidate.fits else None
                refused = "" if candidate.fits else candidate.prediction.memory_verdict
        except ConfigError as error:
            refused = str(error)
        outcome = Screened(
            name=ranked.name, way=str(layout.way), least_seconds=ranked.seconds, seconds=seconds, refused=refused
        )
        yield outcome, finalist
