"""Joins the answers of several processes, each of which searched a share of the layouts or of the numbers of samples.

A share does not see the incumbents of the others and prunes less, but it finds the same best plan of each layout and each number
of samples. So the ranked plans do not depend on the number of shares if all finish; the counts of candidates and programs do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moe_overlap.tuner.search.pipeline.per_stage import StagedPlan, StageSearch
from moe_overlap.tuner.search.pipeline.sub_meshes import MeshSearch
from moe_overlap.tuner.search.solution import Solution, Status
from moe_overlap.tuner.search.space import UniformLayout


def joined_stages(searches: Sequence[StageSearch], layouts: Sequence[UniformLayout], fastest: float) -> StageSearch:
    """The searches of shares of the layouts, joined to one.

    Args:
        layouts: all layouts, in the order of a search.
        fastest: step seconds of the best uniform plan; slower plans are not ranked.
    """
    places = {layout: place for place, layout in enumerate(layouts)}
    ranked: list[StagedPlan] = []
    plans = [plan for search in searches for plan in search.ranked if isinstance(plan, StagedPlan)]
    for plan in sorted(plans, key=lambda plan: places[plan.layout]):
        if plan.seconds <= (ranked[0].seconds if ranked else fastest):
            ranked.insert(0, plan)
    objective = ranked[0].seconds if ranked else math.inf
    statuses = {search.solution.status for search in searches}
    limited = next((status for status in (Status.TIME_LIMIT, Status.FEASIBLE) if status in statuses), None)
    return StageSearch(
        solution=Solution(
            value=ranked[0] if ranked else None,
            objective=objective,
            bound=min(objective, *(search.solution.bound for search in searches)),
            status=limited or (Status.OPTIMAL if ranked else Status.INFEASIBLE),
            seconds=max(search.solution.seconds for search in searches),
        ),
        ranked=tuple(ranked),
        layouts=sum(search.layouts for search in searches),
        candidates=sum(search.candidates for search in searches),
        on_frontier=sum(search.on_frontier for search in searches),
        is_interrupted=any(search.is_interrupted for search in searches),
    )


def joined_meshes(searches: Sequence[MeshSearch]) -> MeshSearch:
    """The searches of shares of the numbers of samples, joined to one."""
    ranked = sorted(
        (plan for search in searches for plan in search.ranked), key=lambda plan: (plan.seconds, plan.samples)
    )
    objective = ranked[0].seconds if ranked else math.inf
    bound = min(objective, *(search.solution.bound for search in searches))
    status = Status.OPTIMAL if bound >= objective else Status.FEASIBLE
    if any(search.solution.status is Status.TIME_LIMIT for search in searches):
        status = Status.TIME_LIMIT
    elif not ranked:
        status = Status.INFEASIBLE
    return MeshSearch(
        solution=Solution(
            value=ranked[0] if ranked else None,
            objective=objective,
            bound=bound,
            status=status,
            seconds=max(search.solution.seconds for search in searches),
        ),
        ranked=tuple(ranked),
        programs=sum(search.programs for search in searches),
        priced=sum(search.priced for search in searches),
        cheapest=sum(search.cheapest for search in searches),
        is_interrupted=any(search.is_interrupted for search in searches),
    )
