"""Search the plan of a run: from its Megatron flags without a layout, or in spite of theirs, to the flags of the fastest plan.

1. `read_request` takes from the user's flags what a plan decides. What is left describes model, batch, precision and features.
2. Uniform plans are searched with that (tuner/search/uniform.py), under the rules of the target: what this runtime executes, or
   what unmodified Megatron-LM accepts.
3. The fastest are written as flags and read again as any command line is: what rules across flags refuse is no answer, and each
   is predicted as tools/predict.py predicts it. Those near the fastest are simulated, and the simulated steps order them. Of
   those within `TIE` of the fastest the one that needs the least memory leads.
4. For this runtime the overlap of the first few is decided, and of layouts that are fast with overlap only
   (overlapped.py); the shortest step is the answer.

`--target any` takes the fastest plan whoever runs it: plans that nothing runs (free.py), those of Megatron-LM with its
overlap, and those of this runtime with its own.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Unpack

from moe_overlap.api import Options, machine_for, problem_of
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.job import Job, without_graphs
from moe_overlap.launching import launching_of
from moe_overlap.plan.plan import Plan
from moe_overlap.plan_search.changes import changes_of
from moe_overlap.plan_search.finalists import (
    does_not_fit,
    in_order,
    listed_alone,
    simulated_finalists,
    simulated_until_ahead,
)
from moe_overlap.plan_search.flags import PlansAsFlags, as_priced, flags_of, flags_of_layout
from moe_overlap.plan_search.free import (
    FreeSearch,
    free_finalist,
    free_finalists,
    narrow_space,
    search_beyond,
    search_freed,
    silent,
    with_sub_meshes,
)
from moe_overlap.plan_search.free_sharding import search_sharding
from moe_overlap.plan_search.overlapped import SCREENED, Overlapped, OverlapSearch, decide_overlaps, undecided
from moe_overlap.plan_search.processes import Refused, shared_search
from moe_overlap.plan_search.request import SearchRequest, SearchSettings, read_request
from moe_overlap.plan_search.results import Finalist, PlanSearch, is_paired
from moe_overlap.plan_search.task import (
    accepted,
    captured_ahead,
    commonest_refusal,
    paired_task,
    refusals,
    with_dispatcher_of,
)
from moe_overlap.plan_search.upstream_states import search_states
from moe_overlap.tuner.capture.library import Libraries
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.hardware import Dispatcher
from moe_overlap.tuner.cost.prediction import predict_plan
from moe_overlap.tuner.profile.database import Database
from moe_overlap.tuner.search.dispatchers import (
    LIBRARIES,
    DispatcherOutcome,
    Side,
    runs,
    search_dispatchers,
    uncalibrated,
)
from moe_overlap.tuner.search.hidden import search_hidden
from moe_overlap.tuner.search.paired import CostsOfBoth, with_paired
from moe_overlap.tuner.search.pipeline.per_stage import StagedPlan, StageSearch
from moe_overlap.tuner.search.pipeline.sub_meshes import MeshPlan
from moe_overlap.tuner.search.shares import LayoutShare, SharedBar, share_of
from moe_overlap.tuner.search.solution import Status
from moe_overlap.tuner.search.space import SEARCH_SPACES, SearchSpace, UniformLayout
from moe_overlap.tuner.search.uniform import RankedLayout, UniformSearch, search_uniform
from moe_overlap.tuner.search.uniform_cost import UniformCosts, UniformTask
from moe_overlap.tuner.write.upstream_rules import PAIRED

REFUSALS = 1000
"""Layouts among which the commonest refusal is looked for, where the target runs none."""
KEPT = 20
"""Layouts that are ranked and read again as flags."""
MESH_GPUS = 32
"""Most GPUs on whose sub-meshes stages are searched by default, for dense models. Mixtral on 64 takes 40 % longer with them, and
gains nothing: no overlap is searched between stages of unlike shape."""
MOST_SEARCHES = 5
"""Most searches on a machine that measures operators meanwhile: two to four were needed."""
STAGED = 3
"""Plans of unlike stages that are read as flags: each is faster than those behind it, of layouts of their own."""


def search_plan(
    arguments: Sequence[str],
    cluster: Cluster,
    settings: SearchSettings,
    libraries: Libraries | None = None,
    **options: Unpack[Options],
) -> PlanSearch:
    """The fastest plan of a run on a cluster.

    Args:
        arguments: Megatron flags, or `@FILE`; what they say of the layout is a baseline, and binds nothing.
        libraries: captures that several searches share; default those of the cache.
    Raises:
        ConfigError: as `predict`; no layout divides the model, the batch and the GPUs; or no plan fits.
    """
    begun = time.monotonic()
    request = read_request(arguments, cluster, settings, begun + settings.seconds, libraries, **options)
    outcome = _search_until_measured(request)
    search, wider, is_interrupted = outcome.search, outcome.wider, outcome.is_interrupted
    uniform, staged, finalists = wider.uniform, wider.staged, outcome.finalists
    deadline = -math.inf if uniform.solution.status is Status.TIME_LIMIT or is_interrupted else request.deadline
    finalists, answered = search.decided(uniform, finalists, deadline)
    chosen, tuned, shards = answered.chosen, answered.tuned, request.space.shards_operators
    plan, prediction = (
        (chosen.plan, chosen.prediction) if tuned is None else (tuned.chosen.decided, tuned.chosen.prediction)
    )
    assert prediction is not None
    baseline = _baseline(request) if settings.has_baseline else None
    answer = PlanSearch(
        target=settings.target,
        space=request.space.name,
        cluster=cluster,
        arguments=tuple(as_priced(request.bare, "megatron-lm") if is_paired(chosen) else request.bare),
        chosen=chosen,
        tuned=tuned,
        why_plain=answered.why_plain,
        screened=answered.screened,
        equal_stages_seconds=answered.equal_stages_seconds if staged is not None else None,
        graphs=answered.graphs,
        others=tuple(finalist for finalist in finalists if finalist is not chosen),
        uniform=uniform,
        refused=tuple(search.reader.refused),
        baseline=None if baseline is None else baseline[0],
        wider_space="" if baseline is None else _wider_space(baseline[1], settings),
        dropped=request.dropped,
        kept_micro_batch=request.run.micro_batch,
        sharding=search_sharding(chosen.problem, wider.task, deadline, answered.is_interrupted) if shards else None,
        seconds=time.monotonic() - begun,
        staged=staged,
        is_interrupted=is_interrupted or answered.is_interrupted,
        is_late=answered.is_late,
        dispatchers=outcome.dispatchers,
    )
    step = prediction.predicted.step_seconds
    launching = launching_of(plan, answer.problem, step, request.job.flags, replays_lists=False)
    answer = dataclasses.replace(answer, launching=launching)
    return _with_changes(answer, request)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Wider:
    """The plans of the whole space.

    Attributes:
        job, layouts: under the dispatcher of the best plan of the narrow space, which a wider one keeps.
        task: of the whole space.
    """

    uniform: UniformSearch
    staged: StageSearch | None
    job: Job
    layouts: Sequence[UniformLayout]
    task: UniformTask


class _Search:
    """A search of plans for a request: it prices, accepts and reads them.

    Attributes:
        task, bounds: of the narrow space; `listed` is the task for plans with instruction lists.
        paired: the task with Megatron-LM's overlap of all-to-alls, where that is searched, too.
        reader: reads plans as flags; `upstream` those of Megatron-LM's overlap, which another target may look at, too.
    """

    def __init__(self, request: SearchRequest) -> None:
        self.request, target, bare = request, request.settings.target, request.bare
        task, self.bounds = request.task(request.job, narrow_space(request.space))
        if request.graphs == request.libraries.graphs:
            task = captured_ahead(task, request.job, request.layouts, request.libraries, request.settings.jobs)
        self.task = task
        pairs = target == "megatron-lm" or (target == "any" and request.space.overlaps)
        self.paired = paired_task(task, bare) if pairs else None
        self.listed = dataclasses.replace(
            task, features=dataclasses.replace(task.features, listed_graphs=request.replays)
        )
        self.refusal = refusals(task, target, bare)
        self.accepts = accepted(self.refusal)
        self.reader = PlansAsFlags(task, bare, target, request.cluster.gpus)
        self.upstream = PlansAsFlags(task, as_priced(bare, "megatron-lm"), "megatron-lm", request.cluster.gpus)
        self.admits: Callable[[RankedLayout], bool] = self.reader.is_read
        if target == "any":
            self.admits = lambda plan: not plan.layout.paired or self.upstream.is_read(plan)

    def uniform(self) -> tuple[UniformSearch, tuple[DispatcherOutcome, ...]]:
        """Uniform plans of the narrow space, under all dispatchers that are searched."""
        request, settings = self.request, self.request.settings

        def search(share: LayoutShare, bar: SharedBar | None) -> tuple[UniformSearch, Refused]:
            layouts, costs, bounds = share_of(request.layouts, share), UniformCosts(self.task), self.bounds
            if self.paired is not None:
                layouts, costs = [*with_paired(layouts)], CostsOfBoth(self.task, self.paired)
                bounds = costs.bounds(self.bounds)
            uniform = search_uniform(
                layouts,
                costs,
                bounds,
                self.accepts,
                self.admits,
                KEPT,
                request.deadline,
                progress=settings.progress if share.index == 0 else silent,
                shared=None if bar is None else (bar, share.index),
            )
            return uniform, self.reader.refused

        def side(dispatcher: Dispatcher) -> Side:
            task, bounds = request.task(with_dispatcher_of(request.job, dispatcher), narrow_space(request.space))
            task = dataclasses.replace(task, modules=self.task.modules)
            # Megatron-LM runs its overlap with all-to-alls and with libraries of their own.
            pairs = self.paired is not None and dispatcher in LIBRARIES
            return Side(task=task, bounds=bounds, paired=paired_task(task, request.bare) if pairs else None)

        uniform, self.reader.refused = shared_search(search, settings.jobs, KEPT)
        rules = self.accepts, self.admits
        return search_dispatchers(
            uniform,
            request.layouts,
            self.task,
            request.other_dispatchers,
            side,
            KEPT,
            *rules,
            request.deadline,
            settings.progress,
            paired=self.paired,
        )

    def beyond(self, uniform: UniformSearch) -> _Wider:
        """The plans of the whole space, where it is wider than the narrow one."""
        request, settings = self.request, self.request.settings
        if request.space == narrow_space(request.space) and settings.target != "any":
            staged, task = self.freed(uniform) if request.space.frees_stages else (None, self.task)
            return _Wider(uniform=uniform, staged=staged, job=request.job, layouts=request.layouts, task=task)
        job, layouts, uniform = _of_one_dispatcher(request.job, request.layouts, uniform)
        task, bounds = request.task(job, request.space)
        staged = None
        jobs, progress = settings.jobs, settings.progress
        if settings.target == "any":
            # Beyond what runs whole layers are recomputed.
            operators = (task if layouts[0].dispatcher else self.task).operators
            task = dataclasses.replace(task, modules=(), operators=operators)
            free = search_beyond(uniform, layouts, task, bounds, KEPT, request.deadline, progress, request.run, jobs)
            uniform, staged = free.uniform, free.staged
        elif uniform.solution.status is not Status.TIME_LIMIT:
            rules = self.accepts, self.admits
            uniform = search_states(uniform, layouts, task, bounds, rules, KEPT, request.deadline, jobs, progress)
        return _Wider(uniform=uniform, staged=staged, job=job, layouts=layouts, task=task)

    def freed(self, uniform: UniformSearch) -> tuple[StageSearch, UniformTask]:
        """Plans whose stages differ in layers, recomputation or shape, under the best uniform plan's dispatcher; their task."""
        request, settings = self.request, self.request.settings
        job, layouts, uniform = _of_one_dispatcher(request.job, request.layouts, uniform)
        task, _ = request.task(job, request.space)
        task = dataclasses.replace(task, modules=self.task.modules)
        if not layouts[0].dispatcher:
            task = dataclasses.replace(task, operators=self.task.operators)
        going = request.deadline, settings.progress, settings.jobs
        staged = search_freed(uniform, layouts, UniformCosts(task), *going)
        if request.space.meshes and request.run.gpus <= MESH_GPUS and not request.job.model.num_experts:
            whole_layers = dataclasses.replace(task, modules=())
            staged = with_sub_meshes(uniform, staged, whole_layers, request.run, *going)
        return staged, task

    def finalists(self, wider: _Wider) -> list[Finalist]:
        """The ranked plans, predicted, in the order of the search.

        Raises:
            ConfigError: none is left, as measured operators of a machine may say otherwise than the search.
        """
        request = self.request
        if request.settings.target != "any":
            staged = () if wider.staged is None else wider.staged.ranked[:STAGED]
            # Lists carry tokens by the irregular dispatcher, whichever the search has found for others.
            extrapolating = machine_for(request.job, request.cluster, request.options)[1]
            flags = partial(self.reader.read, "")
            unlike = partial(free_finalist, task=wider.task, flags=flags, extrapolating=extrapolating)
            return _finalists(wider.uniform, staged, self.reader, unlike, request.cluster, request.options)
        dispatcher = wider.layouts[0].dispatcher
        extrapolating = machine_for(wider.job, request.cluster, request.options)[1]
        name = dispatcher or wider.task.features.dispatcher
        extrapolating = (*extrapolating, *uncalibrated(name, request.cluster.group_of(0).gpu.name))
        read = partial(self.reader.read, dispatcher)
        paired = partial(self.upstream.finalist, cluster=request.cluster, options=request.options)
        free = FreeSearch(uniform=wider.uniform, staged=wider.staged)
        return free_finalists(free, wider.task, KEPT, read, paired, extrapolating)

    def decided(
        self, uniform: UniformSearch, finalists: list[Finalist], deadline: float
    ) -> tuple[list[Finalist], Overlapped]:
        """The finalists in the order of their simulated steps, and the fastest with its overlap."""
        request, settings, options = self.request, self.request.settings, self.request.options
        try:
            if settings.target == "any":
                finalists = simulated_until_ahead(finalists, deadline)
            else:
                finalists = simulated_finalists(finalists, deadline, settings.jobs)
            # A search that takes all micro-batches for their mean answers with what it takes for the best.
            finalists = finalists if settings.averages else in_order(finalists)
        except KeyboardInterrupt:
            finalists = listed_alone(finalists)
            return finalists, dataclasses.replace(undecided(finalists), is_interrupted=True)
        overlaps = OverlapSearch(
            read=partial(self.reader.finalist, cluster=request.cluster, options=options),
            cluster=request.cluster,
            limits=settings.overlap_limits,
            solver_seconds=settings.solver_seconds,
            deadline=deadline,
            replays=request.replays,
        )
        if overlaps.is_late or settings.target == "megatron-lm" or not request.space.overlaps:
            return finalists, dataclasses.replace(undecided(finalists), is_late=overlaps.is_late)
        hidden = partial(
            search_hidden,
            uniform,
            request.layouts,
            self.listed,
            self.bounds,
            SCREENED,
            accepts=accepted(refusals(self.task, "moe-overlap", request.bare)),
            admits=self.reader.is_read,
        )
        hidden = partial(hidden, deadline=deadline, progress=settings.progress)
        return finalists, decide_overlaps(finalists, hidden, overlaps, **options)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """One search of the whole space, with its best plans predicted, in the order of the search."""

    search: _Search
    wider: _Wider
    dispatchers: tuple[DispatcherOutcome, ...]
    finalists: list[Finalist]
    is_interrupted: bool


def _search_until_measured(request: SearchRequest) -> _Outcome:
    """The last of the searches that a measured machine needs; any other cluster needs one.

    A search prices operators that the machine has not measured by its peak rates, and predictions of its best plans measure
    theirs. Rates may be several times too high for an operator, so that plans that run it lead the search; the next search knows
    better. The searches end when the predictions had nothing to measure.
    """
    operators = _measured_operators(request.cluster)
    for _ in range(MOST_SEARCHES):
        outcome = _search_once(request)
        before, operators = operators, _measured_operators(request.cluster)
        if operators == before or outcome.is_interrupted or time.monotonic() > request.deadline:
            break
    return outcome


def _measured_operators(cluster: Cluster) -> int:
    """Operators in the database of a measured cluster; 0 without one."""
    return 0 if cluster.measured is None else len(Database.load(Path(cluster.measured.database)).operators)


def _search_once(request: SearchRequest) -> _Outcome:
    """Search the whole space and predict its best plans.

    Raises:
        ConfigError: no plan fits.
        KeyboardInterrupt: Ctrl-C came before any plan was found.
    """
    search = _Search(request)
    uniform, dispatchers = search.uniform()
    wider = search.beyond(uniform)
    uniform, staged = wider.uniform, wider.staged
    is_interrupted = uniform.is_interrupted or (staged is not None and staged.is_interrupted)
    if uniform.solution.value is None and (staged is None or staged.solution.value is None):
        if is_interrupted:
            raise KeyboardInterrupt
        commonest = commonest_refusal(search.refusal, request.layouts[:REFUSALS])
        certainty = search.task.machine.memory.certainty
        raise does_not_fit(uniform, request.cluster, search.reader.refused, certainty, commonest)
    return _Outcome(
        search=search,
        wider=wider,
        dispatchers=dispatchers,
        finalists=search.finalists(wider),
        is_interrupted=is_interrupted,
    )


def _with_changes(answer: PlanSearch, request: SearchRequest) -> PlanSearch:
    """The answer with what it changes in the user's own layout."""
    if answer.baseline is None or answer.refusal is not None:
        return answer
    precise = Options(**{**request.options, "precision": request.user_options.get("precision")})
    user_flags = flags_of(request.arguments)
    # For this fork flags of Megatron-LM's overlap make way, as `dropped` says.
    decided = PAIRED if answer.is_upstream else ()
    planned = answer.written.flags
    if "--plan" in planned:
        # The file beside the flags says the layout; a comparison needs the flags that would say it.
        predictions = int(user_flags.get("--mtp-num-layers", ("0",))[0])
        planned = {**flags_of_layout(answer.plan, predictions), **planned}
    changes = changes_of(user_flags, planned, answer.baseline, answer.cluster, decided, **precise)
    return dataclasses.replace(answer, changes=changes)


def _of_one_dispatcher(
    job: Job, layouts: list[UniformLayout], uniform: UniformSearch
) -> tuple[Job, list[UniformLayout], UniformSearch]:
    """The search with the dispatcher of its best plan alone: wider spaces keep it."""
    if uniform.solution.value is None:
        return job, layouts, uniform
    name = uniform.solution.value.layout.dispatcher
    under = [dataclasses.replace(layout, dispatcher=name) for layout in layouts if runs(name, layout)]
    ranked = tuple(plan for plan in uniform.ranked if plan.layout.dispatcher == name)
    return with_dispatcher_of(job, name), under, dataclasses.replace(uniform, ranked=ranked)


def _finalists(
    uniform: UniformSearch,
    staged: Sequence[StagedPlan | MeshPlan],
    reader: PlansAsFlags,
    unlike: Callable[[MeshPlan], Finalist],
    cluster: Cluster,
    options: Options,
) -> list[Finalist]:
    """The ranked plans, read from their flags and predicted, in the order of the search.

    Raises:
        ConfigError: none is left, as measured operators of a machine may say otherwise than the search.
    """
    finalists = []
    for ranked in sorted((*uniform.ranked, *staged), key=lambda plan: plan.seconds):
        try:
            if isinstance(ranked, MeshPlan):
                finalist = unlike(ranked)
                if finalist.refusal is not None:
                    reader.refused.append((ranked.name, finalist.refusal))
                    continue
            elif isinstance(ranked, StagedPlan):
                finalist = reader.staged_finalist(ranked, cluster, options)
            else:
                finalist = reader.finalist(ranked, cluster, options)
        except ConfigError as error:
            if isinstance(ranked, RankedLayout):
                raise
            reader.refused.append((ranked.name, str(error)))
            continue
        if not finalist.prediction.fits:
            reader.refused.append((ranked.name, finalist.prediction.overflow[0]))
            continue
        finalists.append(finalist)
    if not finalists:
        raise ConfigError("the search", "", f"no plan is left: {reader.refused[-1][1]}", "use more GPUs")
    return finalists


def _baseline(request: SearchRequest) -> tuple[Prediction, Plan] | None:
    """The user's own layout, where the flags have one that runs on these GPUs, with its prediction."""
    # Where they overlap nothing, flags that ask for captured graphs are those of the run without them.
    for arguments in (request.arguments, without_graphs(request.arguments)[0]):
        try:
            problem = problem_of(arguments, request.cluster, request.user_options)
            return predict_plan(problem.plan, problem), problem.plan
        except ConfigError:
            continue
    return None


def _wider_space(plan: Plan, settings: SearchSettings) -> str:
    """The search space of Megatron-LM that has a plan like the user's own, where the search is in a narrower one."""
    shards = any(stage.zero_level > 1 for stage in plan.stages)
    offloads = any(stage.offload.activations for stage in plan.stages)
    name = "offload" if offloads else "zero" if shards else ""
    row = None if isinstance(settings.space, SearchSpace) else SEARCH_SPACES[settings.space]
    is_narrow = row is not None and row.moe_overlap is not None
    return name if settings.target == "megatron-lm" and is_narrow else ""
