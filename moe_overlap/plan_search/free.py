"""Plans beyond the narrow space: unlike stages, sub-meshes, moved states; with `--target any` also those that nothing executes.

1. `search_beyond` searches uniform plans of the wide space, without model chunks. Layouts bounded above the best plan of the
   narrow space are pruned.
2. `search_freed` searches plans of unlike stages for the layouts of the fastest uniform plans (`freed_layouts`,
   tuner/search/pipeline/per_stage.py); `with_sub_meshes` adds plans whose stages have sub-meshes of unlike size
   (tuner/search/pipeline/sub_meshes.py).
3. Flags express no such plan, so `free_finalists` predicts the plan itself. The rule of plan/capabilities.py that refuses it is
   part of the answer (`refusal_of`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.capabilities import refuse_unsupported
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan_search.flags import PlanFlags
from moe_overlap.plan_search.processes import UNLIMITED, Candidate, SearchBudget, in_processes
from moe_overlap.plan_search.results import Finalist
from moe_overlap.tuner.cost.interference import all_to_all_costs
from moe_overlap.tuner.cost.prediction import closed_form, estimate_plan, moves_states
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.profile.lookup import lookup_of, operator_keys
from moe_overlap.tuner.search.bounds import Bounds
from moe_overlap.tuner.search.pipeline.per_stage import StagedPlan, StageSearch, search_stages, with_meshes
from moe_overlap.tuner.search.pipeline.shares import joined_meshes, joined_stages
from moe_overlap.tuner.search.pipeline.sub_meshes import MeshPlan, MeshSearch, search_meshes
from moe_overlap.tuner.search.shares import LayoutShare, share_of
from moe_overlap.tuner.search.solution import Status
from moe_overlap.tuner.search.space import RECOMPUTE, Run, SearchSpace, UniformLayout, uniform_plan
from moe_overlap.tuner.search.uniform import (
    Accepts,
    RankedLayout,
    UniformSearch,
    joined_uniform,
    search_uniform,
    widened,
)
from moe_overlap.tuner.search.uniform_cost import UniformCosts, UniformTask

FREED = 8
"""Uniform plans whose layouts are searched with unlike stages."""
PER_STAGE_GAP = 1e-3
"""Relative gap to the optimum at which the integer program stops."""
Bounding = Callable[[UniformLayout], Bounds]
Flags = Callable[[Plan, ModelDescription], PlanFlags]
"""A plan and its model -> the flags of the run; ConfigError where none say it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeSearch:
    """The results of the searches beyond the narrow space.

    Attributes:
        uniform: over plans whose stages share everything but their layers.
        staged: over plans of unlike stages; None where the space has none.
    """

    uniform: UniformSearch
    staged: StageSearch | None


def narrow_space(space: SearchSpace) -> SearchSpace:
    """The part of the space that any runtime executes, which is searched first; the space itself if it has no such part."""
    recompute = replace(
        RECOMPUTE,
        recomputes=space.recomputes,
        all_layers=space.all_layers,
        overlaps=space.overlaps,
    )
    return recompute if set(recompute.zero_levels) < set(space.zero_levels) else space


def search_beyond(
    narrow: UniformSearch,
    layouts: Sequence[UniformLayout],
    task: UniformTask,
    bounds: Bounding,
    keep: int,
    budget: SearchBudget = UNLIMITED,
    run: Run | None = None,
    accepts: Accepts = lambda layout, memory: True,
) -> FreeSearch:
    """Steps 1 and 2.

    Args:
        narrow: the search of the narrow space, by the same objective.
        task: its space is the wide one.
        keep: plans that are ranked.
        run: the GPUs and the batch; None: sub-meshes are not searched.
        accepts: whether the target executes a uniform plan.
    Raises:
        ConfigError: the space has sub-meshes only, and nodes have none.
    """
    costs, uniform = UniformCosts(task), narrow
    if narrow_space(task.space) != task.space and narrow.solution.status is not Status.TIME_LIMIT:
        uniform = widened(narrow, _search_wider(narrow, layouts, costs, bounds, keep, budget, accepts), keep)
    staged = search_freed(uniform, layouts, costs, budget) if task.space.frees_stages else None
    # A space of sub-meshes only reports nodes that have none; a wider space is searched without sub-meshes.
    if run is not None and task.space.meshes and (not task.space.frees_stages or is_halved(run, task)):
        # Contexts of the narrow space, which wider spaces share: a wider space then has all plans of a narrower one.
        staged = with_meshes(staged, _search_meshes(uniform, staged, contexts_of(narrow), task, run, budget))
    return FreeSearch(uniform=uniform if task.space.uniform else _without_plans(uniform), staged=staged)


def with_sub_meshes(
    uniform: UniformSearch, staged: StageSearch, task: UniformTask, run: Run, budget: SearchBudget
) -> StageSearch:
    """Step 2: plans on sub-meshes beside those whose stages have equal meshes, where nodes can be halved."""
    if not is_halved(run, task):
        return staged
    return with_meshes(staged, _search_meshes(uniform, staged, contexts_of(uniform), task, run, budget))


def contexts_of(uniform: UniformSearch) -> list[int]:
    """The context-parallel sizes of ranked plans, and 1."""
    return sorted({1, *(plan.layout.context for plan in uniform.ranked)})


def _search_wider(
    narrow: UniformSearch,
    layouts: Sequence[UniformLayout],
    costs: UniformCosts,
    bounds: Bounding,
    keep: int,
    budget: SearchBudget,
    accepts: Accepts,
) -> UniformSearch:
    """Step 1: the uniform plans of the wide space that are faster than the best of the narrow space."""
    # The price of states that move has an error above 1 % where model chunks interleave.
    without_chunks = [layout for layout in layouts if layout.virtual == 1]

    def search(share: LayoutShare) -> UniformSearch:
        return search_uniform(
            share_of(without_chunks, share),
            costs,
            bounds,
            accepts,
            keep=keep,
            deadline=budget.deadline,
            incumbent_seconds=narrow.solution.objective,
            progress=budget.progress_of(share, narrow.solution.value),
        )

    return joined_uniform(in_processes(search, budget.jobs), keep)


def search_freed(
    uniform: UniformSearch,
    layouts: Sequence[UniformLayout],
    costs: UniformCosts,
    budget: SearchBudget = UNLIMITED,
) -> StageSearch:
    """Step 2: plans of unlike stages for the layouts of the fastest uniform plans."""
    freed = freed_layouts(uniform, layouts)

    def search(share: LayoutShare) -> StageSearch:
        return search_stages(
            costs,
            freed[share.index :: share.count],
            uniform.ranked,
            deadline=budget.after(uniform).deadline,
            gap=PER_STAGE_GAP,
            progress=budget.progress_of(share),
        )

    fastest = min((plan.seconds for plan in uniform.ranked), default=math.inf)
    return joined_stages(in_processes(search, budget.jobs), freed, fastest)


def _search_meshes(
    uniform: UniformSearch,
    staged: StageSearch | None,
    contexts: Sequence[int],
    task: UniformTask,
    run: Run,
    budget: SearchBudget,
) -> MeshSearch:
    """Step 2: plans on sub-meshes of unlike size that are faster than the plans of both earlier searches."""
    fastest = min([uniform.solution.objective, *([staged.solution.objective] if staged is not None else [])])
    # Uniform plans outside the space prune nothing.
    incumbent_seconds = fastest if task.space.uniform else math.inf

    def search(share: LayoutShare) -> MeshSearch:
        return search_meshes(
            task,
            run,
            task.space.meshes,
            contexts=contexts,
            deadline=budget.after(uniform).deadline,
            progress=budget.progress_of(share),
            incumbent_seconds=incumbent_seconds,
            share=(share.index, share.count),
        )

    return joined_meshes(in_processes(search, budget.jobs))


def is_halved(run: Run, task: UniformTask) -> bool:
    """Whether nodes can be halved into sub-meshes, and fill the run."""
    per_node = task.machine.cluster.group_of(0).gpus_per_node
    return per_node & (per_node - 1) == 0 and run.gpus % per_node == 0


def _without_plans(uniform: UniformSearch) -> UniformSearch:
    """The search of uniform plans in a space that has none."""
    ended = uniform.solution.status is Status.TIME_LIMIT
    nothing = replace(
        uniform.solution,
        value=None,
        objective=math.inf,
        bound=math.inf,
        status=Status.TIME_LIMIT if ended else Status.INFEASIBLE,
    )
    return replace(uniform, solution=nothing, ranked=(), frontier=())


def freed_layouts(uniform: UniformSearch, layouts: Sequence[UniformLayout]) -> list[UniformLayout]:
    """Layouts of several stages whose stages are freed, the fastest uniform plan's first, without model chunks.

    Each layout is followed by the layout with twice the micro-batch, which may fit with unlike stages although it does not fit
    with equal ones.
    """
    searched = set(layouts)
    freed: dict[UniformLayout, None] = {}
    # Unlike stages may fit where no uniform plan does: the plans that lack the least memory come first.
    plans = uniform.ranked or sorted(uniform.frontier, key=lambda plan: plan.needed_bytes)
    staged = (replace(plan.layout, virtual=1, paired=False) for plan in plans if plan.layout.pipeline > 1)
    for layout in [*dict.fromkeys(staged)][:FREED]:
        for candidate in (layout, replace(layout, micro_batch=2 * layout.micro_batch)):
            if candidate in searched:
                freed.setdefault(candidate)
    return list(freed)


def free_finalists(
    search: FreeSearch,
    task: UniformTask,
    keep: int,
    flags: Flags,
    paired: Callable[[RankedLayout], Finalist],
    extrapolating: tuple[str, ...] = (),
) -> list[Finalist]:
    """Step 3: predictions of the fastest plans, in the order of their objectives.

    Args:
        flags: makes the flags of a plan that pretrain_moe.py executes.
        paired: makes the finalist of a plan with Megatron-LM's overlap.
        extrapolating: why prices extrapolate beyond measured steps.
    """
    candidates: list[Candidate] = [*search.uniform.ranked]
    candidates += search.staged.ranked if search.staged is not None else ()
    return [
        paired(candidate)
        if isinstance(candidate, RankedLayout) and candidate.layout.paired
        else free_finalist(candidate, task, flags, extrapolating)
        for candidate in sorted(candidates, key=lambda plan: plan.seconds)[:keep]
    ]


def free_finalist(
    candidate: Candidate, task: UniformTask, flags: Flags, extrapolating: tuple[str, ...] = ()
) -> Finalist:
    """The prediction of one plan, with its flags or the rule that refuses it. Arguments as in `free_finalists`."""
    searched = candidate
    if isinstance(candidate, MeshPlan):
        # A run pads the vocabulary for the first stage's tensor ranks; the search pads it for the most of any stage.
        candidate = replace(candidate, width=candidate.stages[0].layout.tensor)
    template, model = task.templates(candidate.layout.tensor)
    plan = _plan_of(candidate, template, model)
    validate_plan(plan, model)
    machine, graphs = task.machine_of(candidate.layout), task.graphs(plan, model)
    # The search prices operators by rates only; a measured cluster measures the operators of the finalists.
    keys = operator_keys(plan, model, graphs, task.features) if machine.cluster.measured is not None else []
    lookup = lookup_of(machine.cluster, keys)
    problem = Problem(
        model=model,
        plan=plan,
        graphs=graphs,
        features=task.features,
        machine=replace(machine, exchanges=all_to_all_costs(machine.cluster), lookup=lookup),
        extrapolating=extrapolating,
    )
    prediction = closed_form(plan, problem) if plan.transfers else estimate_plan(plan, problem)
    step = prediction.predicted.step_seconds
    is_priced_alike = candidate == searched and not task.averages and lookup is None
    assert not is_priced_alike or math.isclose(step, candidate.seconds, rel_tol=1e-6), candidate.name
    refusal, plan_flags = refusal_of(plan), PlanFlags([], ())
    if refusal is None:
        try:
            plan_flags = flags(plan, model)
        except ConfigError as error:
            refusal = str(error)
    return Finalist(
        name=candidate.name,
        problem=problem,
        prediction=prediction,
        arguments=tuple(plan_flags.arguments),
        plan_arguments=plan_flags.plan_arguments,
        in_file=plan_flags.in_file,
        is_staged=isinstance(candidate, StagedPlan | MeshPlan),
        refusal=refusal,
        # The closed form has no waits for tiles, and an estimate of waits for states: the simulated lists decide.
        lacks_lists=bool(plan.transfers) or moves_states(plan),
    )


def _plan_of(candidate: Candidate, template: Plan, model: ModelDescription) -> Plan:
    if isinstance(candidate, StagedPlan | MeshPlan):
        return candidate.plan(template, model.num_layers)
    return uniform_plan(template, model.num_layers, candidate.layout, candidate.memory)


def refusal_of(plan: Plan) -> str | None:
    """Why pretrain_moe.py refuses a plan today, with the field; None where it executes it."""
    try:
        # The precision is the user's, whoever executes it: it refuses no plan, but for precisions without other ZeRO levels.
        refuse_unsupported(plan if plan.has_stores else replace(plan, precision="fp32"))
    except ConfigError as error:
        return str(error)
    return None
