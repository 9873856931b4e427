"""The fastest uniform plans of a run: best first, with bounds.

1. Every layout gets a lower bound of its bytes and of its step (bounds.py); those that cannot fit are left out.
2. Layouts are evaluated in the order of their bounds, each with all its decisions about memory (uniform_cost.py), until no
   remaining bound is below the step of the last plan that is kept. What is kept is then exactly what an enumeration of all
   layouts by `predict` would keep. Modules are recomputed only where nothing recomputed would be kept but does not fit:
   elsewhere they only cost seconds.
3. A deadline or an interrupt ends the search early: the best so far stays, and the bound says how good it is.

No solver is needed: a uniform plan has one layout and one decision about memory.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from moe_overlap.tuner.search.bounds import Bounds
from moe_overlap.tuner.search.shares import SharedBar
from moe_overlap.tuner.search.solution import Solution, Status
from moe_overlap.tuner.search.space import MemoryChoice, UniformLayout
from moe_overlap.tuner.search.uniform_cost import Evaluated, UniformCosts

Accepts = Callable[[UniformLayout, MemoryChoice], bool]
Waiting = list[tuple[float, bool, UniformLayout]]
"""A heap of layouts that are not evaluated yet: a bound, and whether it is that of the priced parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedLayout:
    """A layout with the decision about memory that is fastest among those that fit.

    Attributes:
        needed_bytes: of the fullest stage, as predicted.
    """

    layout: UniformLayout
    memory: MemoryChoice
    seconds: float
    needed_bytes: float

    @property
    def name(self) -> str:
        """Degrees, then decisions about memory."""
        return ", ".join(filter(None, (self.layout.name, self.memory.name)))

    @property
    def order(self) -> tuple[float, float, UniformLayout, str]:
        """The order of plans: of equal steps the one that needs less memory comes first, and no two plans are equal."""
        return self.seconds, self.needed_bytes, self.layout, self.memory.name

    @property
    def shape(self) -> tuple[object, ...]:
        """The ranks, stages, dispatcher and overlap of which one plan is ranked, and one whose states move.

        The closed form of the latter is rougher: where it is too short it must not hide a plan whose states stay.
        """
        layout = self.layout
        return layout.ranks, layout.pipeline, layout.dispatcher, layout.paired, self.memory.moves_states


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchCounts:
    """Layouts by what became of them, and stages that were priced."""

    layouts: int
    too_large: int
    """Left out: not even the lower bound of their bytes fits."""
    too_slow: int
    """Left out: the lower bound of their step is above the plans that are kept."""
    not_reached: int
    """Neither: the search ended early."""
    evaluated: int
    fitting: int
    """Evaluated layouts that have a plan that fits."""
    stages: int
    """Complete stages that were priced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UniformSearch:
    """The answer of a search over uniform plans.

    Attributes:
        ranked: the fastest that fit, one for each `RankedLayout.shape`.
        smallest: of the evaluated layouts what needs the least memory; the answer where nothing fits.
        frontier: of seconds and bytes over all evaluated plans.
        is_interrupted: whether Ctrl-C ended the search.
    """

    solution: Solution[RankedLayout]
    ranked: tuple[RankedLayout, ...]
    smallest: RankedLayout | None
    frontier: tuple[RankedLayout, ...]
    counts: SearchCounts
    is_interrupted: bool = False


Progress = Callable[[int, int, RankedLayout | None], None]
"""Called with layouts done, layouts in all, and the best so far."""


def search_uniform(
    layouts: list[UniformLayout],
    costs: UniformCosts,
    bounds: Callable[[UniformLayout], Bounds],
    accepts: Accepts = lambda layout, memory: True,
    admits: Callable[[RankedLayout], bool] = lambda plan: True,
    keep: int = 20,
    deadline: float = math.inf,
    known: float = math.inf,
    progress: Progress = lambda done, total, best: None,
    shared: tuple[SharedBar, int] | None = None,
) -> UniformSearch:
    """Search the fastest plans.

    Args:
        bounds: of a layout's tensor ranks, whose vocabulary is padded to their multiple.
        accepts: whether a plan may be the answer (`--target`).
        admits: the same, asked only of plans that would be kept: it may take long.
        keep: layouts that are ranked.
        deadline: of `time.monotonic`, behind which the best so far is the answer.
        known: seconds of a plan that fits; what is slower is not looked for.
        shared: the bar of all processes that search shares of the layouts, and the index of this one.
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
    found = _Kept(keep, capacity, admits, known, shared)
    done, status, is_interrupted = 0, Status.OPTIMAL, False
    try:
        while waiting and waiting[0][0] <= found.bar:
            if time.monotonic() > deadline:
                status = Status.TIME_LIMIT
                break
            # A layout leaves when it is done: where the search is interrupted, what waits says how good a plan may still be.
            bound, is_priced, layout = waiting[0]
            if not is_priced:
                # Pricing the parts is cheaper than pricing stages: most layouts go no further.
                heapq.heapreplace(waiting, (max(bound, costs.step_bound(layout)), True, layout))
                continue
            is_short = found.add(costs.evaluate(layout), accepts)
            if is_short and costs.task.modules:
                found.add(costs.evaluate(layout, of_modules=True), accepts)
            heapq.heappop(waiting)
            done += 1
            progress(done, small, found.best)
    except KeyboardInterrupt:
        status, is_interrupted = Status.TIME_LIMIT, True
    best = found.best
    left = waiting[0][0] if waiting else math.inf
    not_reached = sum(bound <= found.bar for bound, _, _ in waiting)
    objective = best.seconds if best is not None else math.inf
    if best is None and status is Status.OPTIMAL:
        status = Status.INFEASIBLE
    return UniformSearch(
        solution=Solution(
            value=best,
            objective=objective,
            bound=min(objective, left),
            status=status,
            seconds=time.monotonic() - begun,
        ),
        ranked=found.ranked,
        smallest=found.smallest,
        frontier=found.frontier,
        counts=SearchCounts(
            layouts=len(layouts),
            too_large=len(layouts) - small,
            too_slow=small - done - not_reached,
            not_reached=not_reached,
            evaluated=done,
            fitting=len(found.fitting),
            stages=costs.stages_priced,
        ),
        is_interrupted=is_interrupted,
    )


def widened(narrow: UniformSearch, wide: UniformSearch, keep: int) -> UniformSearch:
    """A search over a space and one over a wider space as one.

    Args:
        wide: over some of the layouts; it knew the fastest plan of the narrow one, and looked for faster ones alone.
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
    """Searches of shares of the layouts as one of all of them.

    A share keeps at least those of its layouts that a search of all would keep, and plans have one order, so the ranked plans do
    not depend on how many shares there are. Evaluated layouts and the frontier do: a share knows less of the plans of the others.

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
    """The plans that no other beats in both seconds and bytes, fastest first."""
    frontier: list[RankedLayout] = []
    for plan in sorted(plans, key=lambda plan: plan.order):
        if not frontier or plan.needed_bytes < frontier[-1].needed_bytes:
            frontier.append(plan)
    return tuple(frontier)


class _Kept:
    """The plans that a search keeps: of layouts that differ in micro-batch and model chunks only, the best."""

    def __init__(
        self,
        keep: int,
        capacity: float,
        admits: Callable[[RankedLayout], bool],
        known: float,
        shared: tuple[SharedBar, int] | None = None,
    ) -> None:
        self._keep, self._capacity, self._admits, self._known = keep, capacity, admits, known
        self._shared = shared
        self._best: dict[object, RankedLayout] = {}
        self._points: list[RankedLayout] = []
        self.smallest: RankedLayout | None = None
        self.fitting: set[UniformLayout] = set()

    @property
    def bar(self) -> float:
        """Seconds that a plan must stay below to be kept."""
        full = len(self._best) == self._keep
        own = max(plan.seconds for plan in self._best.values()) if full else math.inf
        return min(self._known, own, self._of_all)

    @property
    def _of_all(self) -> float:
        """The bar of all processes that share the search."""
        return math.inf if self._shared is None else self._shared[0].seconds

    @property
    def ranked(self) -> tuple[RankedLayout, ...]:
        """From the fastest on; of equal steps the one that needs less memory first."""
        return tuple(sorted(self._best.values(), key=lambda plan: plan.order))

    @property
    def best(self) -> RankedLayout | None:
        """The fastest that fits."""
        return next(iter(self.ranked), None)

    @property
    def frontier(self) -> tuple[RankedLayout, ...]:
        """The evaluated plans that no other beats in both seconds and bytes."""
        return least_of_both(self._points)

    def add(self, evaluated: Evaluated, accepts: Accepts) -> bool:
        """Keep what is worth it of a layout.

        Returns:
            Whether a plan that is faster than what is kept of the layout, and would be kept, does not fit.
        """
        rows, columns = np.unravel_index(
            np.argsort(evaluated.seconds, axis=None, kind="stable"), evaluated.seconds.shape
        )
        fits, is_short = False, False
        least = math.inf
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            needed = float(evaluated.needed_bytes[row, column])
            # Behind a faster one, only what needs less memory matters.
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
            # What is refused stands in the way of no other plan.
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
        """Whether a plan is faster than what it would take the place of."""
        if plan.seconds >= self._known or plan.seconds > self._of_all:
            return False
        if plan.shape in self._best:
            return plan.order < self._best[plan.shape].order
        return len(self._best) < self._keep or plan.order < max(kept.order for kept in self._best.values())

    def _keep_fastest(self, plan: RankedLayout) -> None:
        self._best[plan.shape] = plan
        if len(self._best) > self._keep:
            slowest = max(self._best, key=lambda shape: self._best[shape].order)
            del self._best[slowest]
        if self._shared is not None:
            bar, index = self._shared
            bar.tell(index, (kept.seconds for kept in self._best.values()))
