"""The overlap of a plan search (for this runtime, or any): which of its plans is the fastest once all-to-alls are hidden.

1. The overlap of the first few plans that this runtime executes is decided, as --overlap-only decides it.
2. Layouts whose plain step is too slow may be faster with their all-to-alls hidden (tuner/search/hidden.py). Each is read as
   flags, and the simplest plan of its way to overlap is simulated, which takes a second; deciding its overlap takes several.
3. The overlap of the fastest layout of each way is decided as well, if the gain of a decision can make it the best so far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from moe_overlap.api import Options, choose_overlap
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.capabilities import GRAPHS_FLAG
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.plan_search.results import Finalist, Screened, Tuned, is_paired
from moe_overlap.tuner.search.hidden import HiddenLayout
from moe_overlap.tuner.search.layer.candidates import PLAIN, Candidates
from moe_overlap.tuner.search.layer.overlap import GraphsChoice
from moe_overlap.tuner.search.uniform import RankedLayout

DECIDED = 3
"""The overlap of so many of the fastest plans is decided."""
GAINED = 1.1
"""How many times as fast a decided overlap may be as the simplest plan of its way, which defers nothing. GPT-OSS 120B on 64
H100 with TP2 and EP64 takes 4.64 s, and 4.23 s decided."""
SCREENED = 8
"""Layouts of each way to overlap whose simplest plan is simulated."""
Reading = Callable[[RankedLayout], Finalist]
"""A layout -> the finalist of its flags; ConfigError where rules refuse them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlapped:
    """The fastest plan of a search, as far as its overlap was decided.

    Attributes:
        tuned: its overlap; None where nothing is overlapped.
        why_plain: why the chosen plan overlaps nothing; empty where it does, or was not looked at.
        screened: the layouts that were looked at for what they may hide, the fastest first.
        other_graphs: of the plans that run without CUDA graphs, the fastest with its lists replayed as such.
        equal_stages_seconds: of the fastest of its plans whose stages share everything but their layers, as far as decided.
        is_late: whether the time limit left something that was not looked at.
        is_interrupted: whether Ctrl-C did.
    """

    chosen: Finalist
    tuned: Tuned | None
    why_plain: str = ""
    screened: tuple[Screened, ...] = ()
    other_graphs: GraphsChoice | None = None
    equal_stages_seconds: float = math.inf
    is_late: bool = False
    is_interrupted: bool = False

    @property
    def graphs(self) -> GraphsChoice | None:
        """The graphs of the plan, where its lists are replayed; else of the fastest that would be, with its layout."""
        graphs = None if self.tuned is None else self.tuned.graphs
        return graphs if graphs is not None and graphs.is_on else self.other_graphs

    @property
    def seconds(self) -> float:
        """Seconds of its step, simulated."""
        return self.chosen.simulated_seconds if self.tuned is None else self.tuned.chosen.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapSearch:
    """Settings of the decisions.

    Attributes:
        read: makes a finalist of a layout.
        limits, solver_seconds: of one decision.
        deadline: of `time.monotonic`, behind which nothing more is looked at.
        replays: whether lists are to be replayed as CUDA graphs; those that rules refuse it for run without.
    """

    read: Reading
    cluster: Cluster
    limits: SearchLimits
    solver_seconds: float
    deadline: float = math.inf
    replays: bool = False

    def replayed(self, finalist: Finalist) -> bool:
        """Whether the lists of a plan are to be replayed."""
        return self.replays and finalist.problem.listed.graphs_refusal is None

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline


def decide_overlaps(
    finalists: Sequence[Finalist],
    hidden: Callable[..., Sequence[HiddenLayout]],
    search: OverlapSearch,
    **options: Unpack[Options],
) -> Overlapped:
    """The fastest of a search's plans with overlap and without. Time and Ctrl-C end the search with the best so far.

    Args:
        finalists: in their order; the first is the answer where no overlap is faster.
        hidden: with `bar`, seconds of a step: the layouts that may be faster than that with their all-to-alls hidden.
    """
    best = undecided(finalists)
    try:
        for so_far in _decisions(best, finalists, hidden, search, options):
            best = so_far
            if search.is_late:
                break
    except KeyboardInterrupt:
        return replace(best, is_late=False, is_interrupted=True)
    return best


def undecided(finalists: Sequence[Finalist]) -> Overlapped:
    """The first of the finalists, without overlap."""
    equal = (finalist.simulated_seconds for finalist in finalists if not finalist.is_staged)
    return Overlapped(chosen=finalists[0], tuned=None, equal_stages_seconds=min(equal, default=math.inf))


def _decisions(
    best: Overlapped,
    finalists: Sequence[Finalist],
    hidden: Callable[..., Sequence[HiddenLayout]],
    search: OverlapSearch,
    options: Options,
) -> Iterator[Overlapped]:
    """The best so far after each decision; it counts as late until the last."""
    best = replace(best, is_late=True)
    # Step 1.
    # No overlap is searched yet between stages of unlike shape, and with other ZeRO levels than 1.
    executed = [
        finalist
        for finalist in finalists
        if finalist.refusal is None and not is_paired(finalist)
        if not finalist.plan.transfers and not finalist.plan.has_stores
    ]
    equal = [finalist for finalist in executed if not finalist.is_staged]
    first = [*executed[:DECIDED], *(finalist for finalist in equal[:1] if finalist not in executed[:DECIDED])]
    for finalist in first:
        if finalist.plan.stages[0].expert * finalist.plan.stages[0].expert_tensor > 1:
            best = _faster(best, finalist, search, options)
            yield best
    # Step 2. What was decided above is not looked at again.
    decided = {finalist.name for finalist in first}
    known = {finalist.name: finalist for finalist in executed}
    promising = [layout for layout in hidden(bar=best.seconds) if layout.ranked.name not in decided]
    # Late layouts may be missing among them.
    yield best
    screened: list[tuple[Screened, Finalist | None]] = []
    for layout in promising:
        screened.append(_screened(layout, known.get(layout.ranked.name), search))
        screened.sort(key=lambda pair: pair[0].order)
        best = replace(best, screened=tuple(outcome for outcome, _ in screened))
        yield best
    # Step 3.
    for way in dict.fromkeys(outcome.way for outcome, _ in screened):
        outcome, simulated = next(pair for pair in screened if pair[0].way == way)
        if simulated is not None and outcome.seconds is not None and outcome.seconds < GAINED * best.seconds:
            best = _faster(best, simulated, search, options)
            yield best
    yield replace(best, is_late=False)


def _faster(best: Overlapped, finalist: Finalist, search: OverlapSearch, options: Options) -> Overlapped:
    """The best so far, or a finalist with its overlap where that is faster."""
    try:
        graphs = (GRAPHS_FLAG,) if search.replayed(finalist) else ()
        arguments = [*finalist.arguments, *graphs]
        # What flags cannot say of single stages the plan itself does.
        options = Options(**{**options, "decided": finalist.plan}) if finalist.in_file else options
        tuned = choose_overlap(arguments, search.cluster, search.limits, search.solver_seconds, **options)
    except ConfigError as error:
        # The rules of overlap refuse the plan; it stays what it is.
        return replace(best, why_plain=str(error)) if finalist is best.chosen else best
    if tuned.graphs is not None and not tuned.graphs.is_on and tuned.graphs.other is not None:
        choice = replace(tuned.graphs, name=f"{finalist.name}, {tuned.graphs.name}")
        choices = [choice] if best.other_graphs is None else [best.other_graphs, choice]
        best = replace(best, other_graphs=min(choices, key=lambda choice: choice.order))
    overlaps = tuned.chosen.name != PLAIN and tuned.chosen.fits
    if overlaps and not finalist.is_staged:
        best = replace(best, equal_stages_seconds=min(best.equal_stages_seconds, tuned.chosen.seconds))
    if overlaps and tuned.chosen.seconds < best.seconds:
        return replace(best, chosen=finalist, tuned=tuned, why_plain="")
    return replace(best, why_plain=why_plain(tuned)) if finalist is best.chosen else best


def _screened(
    layout: HiddenLayout, finalist: Finalist | None, search: OverlapSearch
) -> tuple[Screened, Finalist | None]:
    """The simulated step of the simplest plan of a layout's way to overlap, and the layout as flags.

    Args:
        finalist: the layout, where its flags were read before.
    """
    ranked, seconds = layout.ranked, None
    try:
        finalist = finalist or search.read(ranked)
        problem = finalist.problem.replaying(search.replayed(finalist))
        candidate = Candidates(problem, search.limits, search.solver_seconds).simplest(layout.way)
        refused = candidate.refused
        if candidate.prediction is not None:
            seconds = candidate.seconds if candidate.fits else None
            refused = "" if candidate.fits else candidate.prediction.memory_verdict
    except ConfigError as error:
        refused = str(error)
    outcome = Screened(
        name=ranked.name, way=str(layout.way), least_seconds=ranked.seconds, seconds=seconds, refused=refused
    )
    return outcome, finalist


def why_plain(tuned: Tuned) -> str:
    """Why the chosen plan has no overlap: the fastest candidate with overlap, and what is wrong with it.

    Empty if there is no such candidate.
    """
    ways = [way for way in (tuned.chosen, *tuned.others) if way.name != PLAIN]
    predicted = [way for way in ways if way.prediction is not None]
    if not predicted:
        return next((f"{way.name}: {way.refused}" for way in ways), "")
    closest = min(predicted, key=lambda way: (not way.fits, way.seconds))
    assert closest.prediction is not None
    than = f"{closest.seconds:.3f} s ({100 * (closest.seconds / tuned.plain_seconds - 1):+.1f} %)"
    lacks = "" if closest.fits else f" and {closest.prediction.memory_verdict}"
    return f"the best of {len(ways)} ways, {closest.name}, takes {than}{lacks}"
