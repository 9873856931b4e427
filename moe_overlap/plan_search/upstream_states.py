"""Plans whose states Megatron-LM shards or offloads (`--target megatron-lm` with `--search-space zero` or `offload`).

`search_states` looks for such plans that are faster than the best of the narrow space, under the rules of
tuner/write/upstream_rules.py, and ranks them among those. Megatron-LM does neither in pipelines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe_overlap.plan_search.processes import Refused, shared_search
from moe_overlap.tuner.search.bounds import Bounds
from moe_overlap.tuner.search.shares import LayoutShare, SharedBar, share_of
from moe_overlap.tuner.search.space import UniformLayout
from moe_overlap.tuner.search.uniform import (
    Accepts,
    Progress,
    RankedLayout,
    UniformSearch,
    search_uniform,
    widened,
)
from moe_overlap.tuner.search.uniform_cost import UniformCosts, UniformTask


def search_states(
    found: UniformSearch,
    layouts: Sequence[UniformLayout],
    task: UniformTask,
    bounds: Callable[[UniformLayout], Bounds],
    rules: tuple[Accepts, Callable[[RankedLayout], bool]],
    keep: int,
    deadline: float,
    jobs: int,
    progress: Progress,
) -> UniformSearch:
    """The search of the narrow space with the plans of a wider one that are faster than its best.

    Args:
        found: of the narrow space.
        task: its space is the part of a wider one that Megatron-LM executes.
        rules: whether Megatron-LM runs a plan, and whether its flags are read.
        jobs: processes of this host that share the search.
    """
    one_stage = [layout for layout in layouts if layout.pipeline == 1]
    costs, before = UniformCosts(task), found.solution.value

    def search(share: LayoutShare, bar: SharedBar | None) -> tuple[UniformSearch, Refused]:
        said = progress if share.index == 0 else lambda done, total, best: None
        further = search_uniform(
            share_of(one_stage, share),
            costs,
            bounds,
            *rules,
            keep,
            deadline,
            known=found.solution.objective,
            progress=lambda done, total, best: said(done, total, best or before),
            shared=None if bar is None else (bar, share.index),
        )
        return further, []

    further, _ = shared_search(search, jobs, keep)
    return widened(found, further, keep)
