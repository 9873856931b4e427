"""Plans beyond what a runtime executes (`--target any`): searched, predicted, and marked with what refuses them.

1. Uniform plans of the wide space, without model chunks: only layouts whose bound is below the best plan of the narrow one are
   looked at (`search_beyond`).
2. Plans of unlike stages, for the layouts of the fastest uniform ones (`freed_layouts`, tuner/search/pipeline/per_stage.py), and
   plans whose stages stand on sub-meshes of unlike size (tuner/search/pipeline/sub_meshes.py).
3. No command line says such plans: each is predicted as it is (`free_finalists`). The rule of plan/capabilities.py that refuses
   it is part of the answer (`refusal_of`).
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
from moe_overlap.plan_search.processes import in_processes
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
from moe_overlap.tuner.search.uniform import RankedLayout, UniformSearch, joined_uniform, search_uniform, widened
from moe_overlap.tuner.search.uniform_cost import UniformCosts, UniformTask

FREED = 8
"""Uniform plans of whose ranks and stages the stages are freed."""
PER_STAGE_GAP = 1e-3
"""Share of a step that the integer program may miss."""
Bounding = Callable[[UniformLayout], Bounds]
Candidate = RankedLayout | StagedPlan | MeshPlan
Progress = Callable[[int, int, Candidate | None], None]
Flags = Callable[[Plan, ModelDescription], PlanFlags]
"""A plan and its model -> the flags of the run; ConfigError where none say it."""


def silent(done: int, total: int, best: Candidate | None) -> None:
    """The progress of processes beside the first."""


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
    """The space that is searched before: what of it any runtime executes, where that is a part of it."""
    recompute = replace(
        RECOMPUTE,
        recomputes=space.recomputes,
        all_layers=space.all_layers,
        overlaps=space.overlaps,
    )
    return recompute if set(recompute.zero_levels) < set(space.zero_levels) else space


def search_beyond(
    found: UniformSearch,
    layouts: Sequence[UniformLayout],
    task: UniformTask,
    bounds: Bounding,
    keep: int,
    deadline: float = math.inf,
    progress: Progress = lambda done, total, best: None,
    run: Run | None = None,
    jobs: int = 1,
) -> FreeSearch:
    """Steps 1 and 2.

    Args:
        found: of the narrow space, by the same objective.
        task: its space is the wide one.
        run: the GPUs and the batch; None: nothing is searched on sub-meshes.
        jobs: processes of this host that share each of the searches; the best plans do not depend on how many they are.
    Raises:
        ConfigError: the space has sub-meshes alone, and nodes have none.
    """
    costs, narrow, going = UniformCosts(task), found, _Going(deadline, progress, jobs)
    if narrow_space(task.space) != task.space and found.solution.status is not Status.TIME_LIMIT:
        found = widened(found, _search_wider(found, layouts, costs, bounds, keep, going), keep)
    staged = search_freed(found, layouts, costs, deadline, progress, jobs) if task.space.frees_stages else None
    # A space of sub-meshes alone says what is wrong with nodes that have none; a wider one goes without.
    if run is not None and task.space.meshes and (not task.space.frees_stages or is_halved(run, task)):
        # The same for every space with the same narrow one, so that a wider space finds no less.
        contexts = sorted({1, *(plan.layout.context for plan in narrow.ranked)})
        staged = with_meshes(staged, _search_meshes(found, staged, contexts, task, run, going))
    return FreeSearch(uniform=found if task.space.uniform else _without_plans(found), staged=staged)


def with_sub_meshes(
    found: UniformSearch,
    staged: StageSearch,
    task: UniformTask,
    run: Run,
    deadline: float,
    progress: Progress,
    jobs: int,
) -> StageSearch:
    """Step 2 with plans on sub-meshes beside those of stages that share their ranks, where nodes can be halved."""
    if not is_halved(run, task):
        return staged
    contexts = sorted({1, *(plan.layout.context for plan in found.ranked)})
    return with_meshes(staged, _search_meshes(found, staged, contexts, task, run, _Going(deadline, progress, jobs)))


@dataclass(frozen=True, slots=True)
class _Going:
    """How searches go on: until when, who is told of it, and in how many processes."""

    deadline: float
    progress: Progress
    jobs: int

    def told(self, share: LayoutShare) -> Progress:
        """Who is told of a share's progress: one process speaks for all."""
        return self.progress if share.index == 0 else silent

    def deadline_behind(self, found: UniformSearch) -> float:
        """Until when a search goes on behind that of uniform plans: with what it has at once, if time had ended there."""
        return -math.inf if found.solution.status is Status.TIME_LIMIT else self.deadline


def _search_wider(
    found: UniformSearch,
    layouts: Sequence[UniformLayout],
    costs: UniformCosts,
    bounds: Bounding,
    keep: int,
    going: _Going,
) -> UniformSearch:
    """Step 1: the uniform plans of the wide space that are faster than the best of the narrow one."""
    before = found.solution.value
    # States that step by themselves are not priced to a hundredth where chunks interleave.
    whole, known = [layout for layout in layouts if layout.virtual == 1], found.solution.objective

    def wider(share: LayoutShare) -> UniformSearch:
        said = going.told(share)
        return search_uniform(
            share_of(whole, share),
            costs,
            bounds,
            keep=keep,
            deadline=going.deadline,
            known=known,
            progress=lambda done, total, best: said(done, total, best or before),
        )

    return joined_uniform(in_processes(wider, going.jobs), keep)


def search_freed(
    found: UniformSearch,
    layouts: Sequence[UniformLayout],
    costs: UniformCosts,
    deadline: float = math.inf,
    progress: Progress = lambda done, total, best: None,
    jobs: int = 1,
) -> StageSearch:
    """Step 2, plans of unlike stages for the layouts of the fastest uniform ones."""
    uniform, freed, going = found.ranked, freed_layouts(found, layouts), _Going(deadline, progress, jobs)

    def freer(share: LayoutShare) -> StageSearch:
        return search_stages(
            costs,
            freed[share.index :: share.count],
            uniform,
            deadline=going.deadline_behind(found),
            gap=PER_STAGE_GAP,
            progress=going.told(share),
        )

    fastest = min((plan.seconds for plan in uniform), default=math.inf)
    return joined_stages(in_processes(freer, going.jobs), freed, fastest)


def _search_meshes(
    found: UniformSearch,
    staged: StageSearch | None,
    contexts: Sequence[int],
    task: UniformTask,
    run: Run,
    going: _Going,
) -> MeshSearch:
    """Step 2, plans whose stages stand on sub-meshes of unlike size, faster than those of both searches before."""
    fastest = min([found.solution.objective, *([staged.solution.objective] if staged is not None else [])])
    # Where uniform plans are not in the space they are not known either.
    known = fastest if task.space.uniform else math.inf

    def on_meshes(share: LayoutShare) -> MeshSearch:
        return search_meshes(
            task,
            run,
            task.space.meshes,
            contexts=contexts,
            deadline=going.deadline_behind(found),
            progress=going.told(share),
            known=known,
            share=(share.index, share.count),
        )

    return joined_meshes(in_processes(on_meshes, going.jobs))


def is_halved(run: Run, task: UniformTask) -> bool:
    """Whether nodes can be halved into sub-meshes, and fill the run."""
    per_node = task.machine.cluster.group_of(0).gpus_per_node
    return per_node & (per_node - 1) == 0 and run.gpus % per_node == 0


def _without_plans(found: UniformSearch) -> UniformSearch:
    """A search of uniform plans that are not in the space."""
    ended = found.solution.status is Status.TIME_LIMIT
    nothing = replace(
        found.solution,
        value=None,
        objective=math.inf,
        bound=math.inf,
        status=Status.TIME_LIMIT if ended else Status.INFEASIBLE,
    )
    return replace(found, solution=nothing, ranked=(), frontier=())


def freed_layouts(found: UniformSearch, layouts: Sequence[UniformLayout]) -> list[UniformLayout]:
    """Layouts of several stages whose stages are freed, the fastest uniform plan's first, each without model chunks.

    With a micro-batch twice as large beside each: what one stage cannot hold uniformly, stages that differ may.
    """
    known = set(layouts)
    wanted: dict[UniformLayout, None] = {}
    # Where no uniform plan fits, stages that differ may: those that lack least come first.
    plans = found.ranked or sorted(found.frontier, key=lambda plan: plan.needed_bytes)
    staged = (replace(plan.layout, virtual=1, paired=False) for plan in plans if plan.layout.pipeline > 1)
    for alone in [*dict.fromkeys(staged)][:FREED]:
        for layout in (alone, replace(alone, micro_batch=2 * alone.micro_batch)):
            if layout in known:
                wanted.setdefault(layout)
    return list(wanted)


def free_finalists(
    search: FreeSearch,
    task: UniformTask,
    keep: int,
    flags: Flags,
    paired: Callable[[RankedLayout], Finalist],
    extrapolating: tuple[str, ...] = (),
) -> list[Finalist]:
    """Step 3: the fastest plans in the order of their objectives, each predicted.

    Args:
        flags: asked for the flags of a plan that pretrain_moe.py executes.
        paired: asked for the finalist of a plan with Megatron-LM's overlap.
        extrapolating: why prices reach beyond what was measured.
    """
    candidates: list[Candidate] = [*search.uniform.ranked]
    candidates += search.staged.ranked if search.staged is not None else ()
    return [
        paired(candidate)
        if isinstance(candidate, RankedLayout) and candidate.layout.paired
        else free_finalist(candidate, task, flags, extrapolating)
        for candidate in sorted(candidates, key=lambda each: each.seconds)[:keep]
    ]


def free_finalist(
    candidate: Candidate, task: UniformTask, flags: Flags, extrapolating: tuple[str, ...] = ()
) -> Finalist:
    """One plan as it is, predicted, with its flags or what refuses it. Arguments as `free_finalists` takes them."""
    searched = candidate
    if isinstance(candidate, MeshPlan):
        # A run pads the vocabulary for the tensor ranks of the first stage, the search for the most of any.
        candidate = replace(candidate, width=candidate.stages[0].layout.tensor)
    template, model = task.templates(candidate.layout.tensor)
    plan = _plan_of(candidate, template, model)
    validate_plan(plan, model)
    machine, graphs = task.machine_of(candidate.layout), task.graphs(plan, model)
    # The search prices operators by rates alone; a measured cluster measures those of the plans that are left.
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
    refusal, said = refusal_of(plan), PlanFlags([], ())
    if refusal is None:
        try:
            said = flags(plan, model)
        except ConfigError as error:
            refusal = str(error)
    return Finalist(
        name=candidate.name,
        problem=problem,
        prediction=prediction,
        arguments=tuple(said.arguments),
        plan_arguments=said.said,
        in_file=said.in_file,
        is_staged=isinstance(candidate, StagedPlan | MeshPlan),
        refusal=refusal,
        # What waits for tiles is in no closed form, and what waits for states roughly: lists tell, where it matters.
        lacks_lists=bool(plan.transfers) or moves_states(plan),
    )


def _plan_of(candidate: Candidate, template: Plan, model: ModelDescription) -> Plan:
    if isinstance(candidate, StagedPlan | MeshPlan):
        return candidate.plan(template, model.num_layers)
    return uniform_plan(template, model.num_layers, candidate.layout, candidate.memory)


def refusal_of(plan: Plan) -> str | None:
    """Why pretrain_moe.py refuses a plan today, with the field; None where it executes it."""
    try:
        # No flag but says the precision, and it is the user's: the answer for it is wanted, whoever executes it. Not every
        # precision goes with other ZeRO levels.
        refuse_unsupported(plan if plan.has_stores else replace(plan, precision="fp32"))
    except ConfigError as error:
        return str(error)
    return None
