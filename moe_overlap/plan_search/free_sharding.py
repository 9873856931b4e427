"""Beside the plan of one stage (the space `intra-only`): the best sharding of every operator, whoever executes it.

The plan stays the cheapest of megatron-core's layouts. Alpa's integer program (tuner/search/layer/intra_only.py) then runs over
the model as captured on one rank, with as many micro-batches as the plan has; where nothing fits with those, since the
program recomputes nothing, with the next number that divides the batch. It says what a runtime without megatron-core's layouts
could gain. A model that it has no algorithms for gets the reason instead, and the search its answer.
"""

from __future__ import annotations

import time
from dataclasses import replace

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan_search.results import SearchedSharding
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.search.layer.intra_only import intra_only, workload_of
from moe_overlap.tuner.search.layer.sharding_graph import NotShardableError
from moe_overlap.tuner.search.solution import Status
from moe_overlap.tuner.search.space import UniformLayout, uniform_plan
from moe_overlap.tuner.search.uniform_cost import UniformTask

SOLVER_SECONDS = 120.0
"""Most seconds of all integer programs together, where no time limit leaves less."""
ON_ONE_RANK = UniformLayout(tensor=1, context=1, expert=1, expert_tensor=1, pipeline=1, virtual=1, micro_batch=1)


def search_sharding(
    problem: Problem, task: UniformTask, deadline: float, is_interrupted: bool = False
) -> SearchedSharding:
    """The best sharding of the run on one stage of all its GPUs.

    Args:
        problem: of the plan that was chosen; its micro-batches and its load of the busiest expert rank are taken.
        deadline: of the whole search, on the monotonic clock.
        is_interrupted: whether Ctrl-C has ended the search.
    """
    ends = min(deadline, time.monotonic() + SOLVER_SECONDS)
    if is_interrupted or ends <= time.monotonic():
        return SearchedSharding(refusal="the search ended before it")
    searched = SearchedSharding(refusal="the search ended before it")
    batch = problem.plan.global_batch_size
    try:
        captured = _on_one_rank(task)
        for number in range(problem.plan.stages[0].gradient_accumulation_steps, batch + 1):
            remaining_seconds = ends - time.monotonic()
            if remaining_seconds <= 0.0:
                break
            if batch % number:
                continue
            workload = workload_of(problem, number)
            levels = task.space.zero_levels
            answer = intra_only(captured, workload, problem.cluster, seconds=remaining_seconds, zero_levels=levels)
            searched = SearchedSharding(answer=answer, micro_batches=number, samples=workload.samples)
            if answer.solution.status is not Status.INFEASIBLE:
                break
    except (NotShardableError, ConfigError) as error:
        return SearchedSharding(refusal=str(error))
    except KeyboardInterrupt:
        return SearchedSharding(refusal="Ctrl-C ended it")
    return searched


def _on_one_rank(task: UniformTask) -> CapturedModel:
    """The model as one rank captures it, nothing recomputed."""
    template, model = task.templates(1)
    plan = uniform_plan(template, model.num_layers, ON_ONE_RANK)
    return task.graphs(replace(plan, stages=plan.stages[:1]), model)[0]
