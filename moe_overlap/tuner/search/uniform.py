"""The fastest uniform plans of a run: best first, with bounds.

1. Every layout gets a lower bound of its bytes and of its step (bounds.py); layouts that cannot fit are pruned.
2. Layouts are evaluated in the order of their bounds, each with all its memory choices (uniform_cost.py), until no remaining
   bound is below the slowest incumbent. The incumbents then equal those of an enumeration of all layouts by `predict`. Choices
   that recompute modules are evaluated only if a plan without them would be an incumbent but does not fit: else they only add
   seconds.
3. A deadline or an interrupt ends the search early: the best plan so far is the answer, and the bound tells its quality.

No solver is needed: a uniform plan has one layout and one memory choice.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from moe_overlap.describe.errors import OutOfTime
from moe_overlap.tuner.search.bounds import Bounds
from moe_overlap.tuner.search.shares import SharedBar
from moe_overlap.tuner.search.solution import Solution, Status
from moe_overlap.tuner.search.space import MemoryChoice, UniformLayout
from moe_overlap.tuner.search.uniform_cost import Evaluated, UniformCosts

Accepts = Callable[[UniformLayout, MemoryChoice], bool]
Waiting = list[tuple[float, bool, UniformLayout]]
"""A heap of layouts to evaluate: lower bound, True if it is the tighter one of priced parts, layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedLayout:
    """A layout with its fastest memory choice that fits.

    Attributes:
        seconds: predicted seconds of a step.
        needed_bytes: predicted bytes of the fullest stage.
    """

    layout: UniformLayout
    memory: MemoryChoice
    seconds: float
    needed_bytes: float

    @property
    def name(self) -> str:
        """Degrees, then the memory choice."""
        return ", ".join(filter(None, (self.layout.name, self.memory.name)))

    @property
    def order(self) -> tuple[float, float, UniformLayout, str]:
        """Sort key of plans: by step seconds, then by bytes; no two plans have equal keys."""
        return self.seconds, self.needed_bytes, self.layout, self.memory.name

    @property
    def shape(self) -> tuple[object, ...]:
        """Key of the ranking, which has one plan per value: ranks, stages, dispatcher, overlap, and whether states move.

        The closed form is less exact for plans whose states move: an underestimate must not displace a plan whose states stay.
        """
        layout = self.layout
        return layout.ranks, layout.pipeline, layout.dispatcher, layout.paired, self.memory.moves_states


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchCounts:
    """Numbers of layouts by outcome, and of priced stages."""

    layouts: int
    too_large: int
    """Pruned: the lower bound of their bytes does not fit."""
    too_slow: int
    """Pruned: the lower bound of their step is above the incumbents."""
    not_reached: int
    """Neither pruned nor evaluated: the search ended early."""
    evaluated: int
    fitting: int
    """Evaluated layouts with a plan that fits."""
    stages: int
    """Priced stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UniformSearch:
    """The answer of a search over uniform plans.

    Attributes:
        ranked: the fastest plans that fit, one for each `RankedLayout.shape`.
        smallest: the evaluated plan with the least memory; the answer if no plan fits.
        frontier: Pareto frontier of seconds and bytes over all evaluated plans.
        is_interrupted: True if Ctrl-C ended the search.
    """

    solution: Solution[RankedLayout]
    ranked: tuple[RankedLayout, ...]
    smallest: RankedLayout | None
    frontier: tuple[RankedLayout, ...]
    counts: SearchCounts
    is_interrupted: bool = False


Progress = Callable[[int, int, RankedLayout | None], None]
"""Called with the number of finished layouts, the number of all layouts, and the best plan so far."""


def search_uniform(
    layouts: list[UniformLayout],
    costs: UniformCosts,
    bounds: Callable[[UniformLayout], Bounds],
    accepts: Accepts = lambda layout, memory: True,
    admits: Callable[[RankedLayout], bool] = lambda plan: True,
    keep: int = 20,
    deadline: float = math.inf,
    incumbent_seconds: float = math.inf,
    progress: Progress = lambda done, total, best: None,
    shared: tuple[SharedBar, int] | None = None,
) -> UniformSearch:
    """Search the fastest plans.

    Args:
        bounds: layout -> the bounds for its tensor ranks, which pad the vocabulary.
        accepts: True if a plan may be the answer (`--target`).
        admits: a slower test of the same, called only for plans that would become incumbents.
        keep: number of plans that are ranked.
        deadline: time by `time.monotonic`; after it the best plan so far is the answer.
        incumbent_seconds: step seconds of the incumbent; layouts bounded above them are pruned.
        shared: the bar that all processes of a shared search lower, and the index of this process.
    """
    begun = time.monotonic()
    capacity = costs.task.machine.usable_bytes
    waiting: Waiting = [
        (bounds(layout).step_seconds(layout), False, layout)
        for layout in layouts
        if bounds(layout).needed_bytes(layout) <= capacity
    ]
    small = len(waiting)
    heapq.heapify(waiting)
    incumbents = _Incumbents(keep, capacity, admits, incumbent_seconds, shared)
    done, status, is_interrupted = 0, Status.OPTIMAL, False
    try:
        while waiting and waiting[0][0] <= incumbents.bar:
            if time.monotonic() > deadline:
                status = Status.TIME_LIMIT
                break
            # A layout leaves the heap after its evaluation: after an interrupt the heap then bounds all unevaluated plans.
            bound, is_priced, layout = waiting[0]
            if not is_priced:
                # Pricing parts is cheaper than pricing stages, and prunes most layouts.
                heapq.heapreplace(waiting, (max(bound, costs.step_bound(layout)), True, layout))
                continue
            is_short = incumbents.add(costs.evaluate(layout), accepts)
            if is_short and costs.task.modules:
                incumbents.add(costs.evaluate(layout, of_modules=True), accepts)
            heapq.heappop(waiting)
            done += 1
            progress(done, small, incumbents.best)
    except OutOfTime:
        # The capture of a layout did not end in time.
        status = Status.TIME_LIMIT
    except KeyboardInterrupt:
        status, is_interrupted = Status.TIME_LIMIT, True
    best = incumbents.best
    open_bound = waiting[0][0] if waiting else math.inf
    not_reached = sum(bound <= incumbents.bar for bound, _, _ in waiting)
    objective = best.seconds if best is not None else math.inf
    if best is None and status is Status.OPTIMAL:
        status = Status.INFEASIBLE
    return UniformSearch(
        solution=Solution(
            value=best,
            objective=objective,
            bound=min(objective, open_bound),
            status=status,
            seconds=time.monotonic() - begun,
        ),
        ranked=incumbents.ranked,
        smallest=incumbents.smallest,
        frontier=incumbents.frontier,
        counts=SearchCounts(
            layouts=len(layouts),
            too_large=len(layouts) - small,
            too_slow=small - done - not_reached,
            not_reached=not_reached,
            evaluated=done,
            fitting=len(incumbents.fitting),
            stages=costs.stages_priced,
        ),
        is_interrupted=is_interrupted,
    )


def widened(narrow: UniformSearch, wide: UniformSearch, keep: int) -> UniformSearch:
    """A search over a space joined with one over a wider space.

    Args:
        wide: a search of some of the layouts that was pruned by the fastest plan of the narrow one.
        keep: number of plans that are ranked.
    """
    ranked = tuple(ranked_first([*narrow.ranked, *wide.ranked])[:keep])
    best = ranked[0] if ranked else None
    objective = math.inf if best is None else best.seconds
    status = wide.solution.status
    smallest = [plan for plan in (narrow.smallest, wide.smallest) if plan is not None]
    counts = narrow.counts
    return UniformSearch(
        solution=Solution(
            value=best,
            objective=objective,
            bound=min(wide.solution.bound, objective),
            status=Status.OPTIMAL if best is not None and status is Status.INFEASIBLE else status,
            seconds=narrow.solution.seconds + wide.solution.seconds,
        ),
        ranked=ranked,
        smallest=min(smallest, key=lambda plan: plan.needed_bytes, default=None),
        frontier=least_of_both((*narrow.frontier, *wide.frontier)),
        counts=replace(
            counts, evaluated=max(counts.evaluated, wide.counts.evaluated), stages=counts.stages + wide.counts.stages
        ),
        is_interrupted=narrow.is_interrupted or wide.is_interrupted,
    )


def joined_uniform(searches: Sequence[UniformSearch], keep: int) -> UniformSearch:
    """The searches of shares of the layouts, joined to one.

    A share keeps at least those of its layouts that a search of all layouts would keep, and the order of plans is total, so the
    ranked plans do not depend on the number of shares. The evaluated layouts and the frontier do, because a share sees fewer
    plans.

    Args:
        keep: most plans that each search ranks.
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
        counts=SearchCounts(
            **{
                field.name: sum(getattr(search.counts, field.name) for search in searches)
                for field in fields(SearchCounts)
            }
        ),
        is_interrupted=any(search.is_interrupted for search in searches),
    )


def ranked_first(plans: Iterable[RankedLayout]) -> list[RankedLayout]:
    """The best plan of every shape, best first."""
    best: dict[object, RankedLayout] = {}
    for plan in sorted(plans, key=lambda plan: plan.order):
        best.setdefault(plan.shape, plan)
    return list(best.values())


def least_of_both(plans: Iterable[RankedLayout]) -> tuple[RankedLayout, ...]:
    """The Pareto frontier of seconds and bytes, fastest plan first."""
    frontier: list[RankedLayout] = []
    for plan in sorted(plans, key=lambda plan: plan.order):
        if not frontier or plan.needed_bytes < frontier[-1].needed_bytes:
            frontier.append(plan)
    return tuple(frontier)


class _Incumbents:
    """The best plan so far of each `RankedLayout.shape`: layouts of one shape differ in micro-batch and model chunks only."""

    def __init__(
        self,
        keep: int,
        capacity: float,
        admits: Callable[[RankedLayout], bool],
        incumbent_seconds: float,
        shared: tuple[SharedBar, int] | None = None,
    ) -> None:
        self._keep, self._capacity, self._admits, self._incumbent_seconds = keep, capacity, admits, incumbent_seconds
        self._shared = shared
        self._best: dict[object, RankedLayout] = {}
        self._points: list[RankedLayout] = []
        self.smallest: RankedLayout | None = None
        self.fitting: set[UniformLayout] = set()

    @property
    def bar(self) -> float:
        """Seconds above which no plan becomes an incumbent."""
        full = len(self._best) == self._keep
        slowest_incumbent = max(plan.seconds for plan in self._best.values()) if full else math.inf
        return min(self._incumbent_seconds, slowest_incumbent, self._of_all)

    @property
    def _of_all(self) -> float:
        """The bar of all processes of a shared search; infinite if it is not shared."""
        return math.inf if self._shared is None else self._shared[0].seconds

    @property
    def ranked(self) -> tuple[RankedLayout, ...]:
        """The incumbents by `RankedLayout.order`."""
        return tuple(sorted(self._best.values(), key=lambda plan: plan.order))

    @property
    def best(self) -> RankedLayout | None:
        """The fastest plan that fits."""
        return next(iter(self.ranked), None)

    @property
    def frontier(self) -> tuple[RankedLayout, ...]:
        """The Pareto frontier of seconds and bytes over the evaluated plans."""
        return least_of_both(self._points)

    def add(self, evaluated: Evaluated, accepts: Accepts) -> bool:
        """Add the plans of an evaluated layout to the incumbents and to the frontier.

        Returns:
            True if some plan would become an incumbent but does not fit.
        """
        rows, columns = np.unravel_index(
            np.argsort(evaluated.seconds, axis=None, kind="stable"), evaluated.seconds.shape
        )
        fits, is_short = False, False
        least = math.inf
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            needed = float(evaluated.needed_bytes[row, column])
            # After a faster plan only one that needs less memory matters.
            if needed >= least or not accepts(evaluated.layout, evaluated.choices[row][column]):
                continue
            plan = RankedLayout(
                layout=evaluated.layout,
                memory=evaluated.choices[row][column],
                seconds=float(evaluated.seconds[row, column]),
                needed_bytes=needed,
            )
            is_worth = self._is_worth(plan)
            is_first = needed <= self._capacity and not fits
            # A refused plan must not exclude slower ones.
            if is_first and is_worth and not self._admits(plan):
                continue
            least = needed
            self._points.append(plan)
            if self.smallest is None or needed < self.smallest.needed_bytes:
                self.smallest = plan
            if is_first:
                fits = True
                self.fitting.add(plan.layout)
            if is_first and is_worth:
                self._keep_fastest(plan)
            is_short |= needed > self._capacity and is_worth
        return is_short

    def _is_worth(self, plan: RankedLayout) -> bool:
        """True if a plan would replace an incumbent."""
        if plan.seconds >= self._incumbent_seconds or plan.seconds > self._of_all:
            return False
        if plan.shape in self._best:
            return plan.order < self._best[plan.shape].order
        return len(self._best) < self._keep or plan.order < max(incumbent.order for incumbent in self._best.values())

    def _keep_fastest(self, plan: RankedLayout) -> None:
        self._best[plan.shape] = plan
        if len(self._best) > self._keep:
            slowest = max(self._best, key=lambda shape: self._best[shape].order)
            del self._best[slowest]
        if self._shared is not None:
            bar, index = self._shared
            bar.tell(index, (incumbent.seconds for incumbent in self._best.values()))
