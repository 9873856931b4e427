"""Plans whose states Megatron-LM shards or offloads (`--target megatron-lm` with `--search-space zero` or `offload`).

`search_states` searches plans of that kind that are faster than the best of the narrow space, under the rules of
tuner/write/upstream_rules.py, and ranks them among the plans of the narrow space. Megatron-LM does neither in pipelines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe_overlap.plan_search.processes import Refused, SearchBudget, shared_search
from moe_overlap.tuner.search.bounds import Bounds
from moe_overlap.tuner.search.shares import LayoutShare, SharedBar, share_of
from moe_overlap.tuner.search.space import UniformLayout
from moe_overlap.tuner.search.uniform import Accepts, RankedLayout, UniformSearch, search_uniform, widened
from moe_overlap.tuner.search.uniform_cost import UniformCosts, UniformTask


def search_states(
    narrow: UniformSearch,
    layouts: Sequence[UniformLayout],
    task: UniformTask,
    bounds: Callable[[UniformLayout], Bounds],
    rules: tuple[Accepts, Callable[[RankedLayout], bool]],
    keep: int,
    budget: SearchBudget,
) -> UniformSearch:
    """The search of the narrow space, with the faster plans of a wider one.

    Args:
        task: its space is the part of a wider one that Megatron-LM executes.
        rules: whether Megatron-LM runs a plan, and whether its flags are read.
        keep: plans that are ranked.
    """
    one_stage = [layout for layout in layouts if layout.pipeline == 1]
    costs = UniformCosts(task)

    def search(share: LayoutShare, bar: SharedBar | None) -> tuple[UniformSearch, Refused]:
        wider = search_uniform(
            share_of(one_stage, share),
            costs,
            bounds,
            *rules,
            keep,
            budget.deadline,
            incumbent_seconds=narrow.solution.objective,
            progress=budget.progress_of(share, narrow.solution.value),
            shared=None if bar is None else (bar, share.index),
        )
        return wider, []

    wider, _ = shared_search(search, budget.jobs, keep)
    return widened(narrow, wider, keep)
