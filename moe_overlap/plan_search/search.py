"""Search the plan of a run: from its Megatron flags without a layout, or in spite of theirs, to the flags of the fastest plan.

1. `asked_of` takes from the user's flags what a plan decides. What is left describes model, batch, precision and features.
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
from moe_overlap.plan_search.asked import Asked, SearchSettings, asked_of
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
    words: Sequence[str],
    cluster: Cluster,
    settings: SearchSettings,
    libraries: Libraries | None = None,
    **options: Unpack[Options],
) -> PlanSearch:
    """The fastest plan of a run on a cluster.

    Args:
        words: Megatron flags, or `@FILE`; what they say of the layout is a baseline, and binds nothing.
        libraries: captures that several searches share; default those of the cache.
    Raises:
        ConfigError: as `predict`; no layout divides the model, the batch and the GPUs; or no plan fits.
    """
    begun = time.monotonic()
    asked = asked_of(words, cluster, settings, begun + settings.seconds, libraries, **options)
    outcome = _search_until_measured(asked)
    search, wider, is_interrupted = outcome.search, outcome.wider, outcome.is_interrupted
    found, staged, finalists = wider.uniform, wider.staged, outcome.finalists
    deadline = -math.inf if found.solution.status is Status.TIME_LIMIT or is_interrupted else asked.deadline
    finalists, answered = search.decided(found, finalists, deadline)
    chosen, tuned, shards = answered.chosen, answered.tuned, asked.space.shards_operators
    plan, prediction = (
        (chosen.plan, chosen.prediction) if tuned is None else (tuned.chosen.decided, tuned.chosen.prediction)
    )
    assert prediction is not None
    own = _baseline(asked) if settings.has_baseline else None
    answer = PlanSearch(
        target=settings.target,
        space=asked.space.name,
        cluster=cluster,
        words=tuple(as_priced(asked.bare, "megatron-lm") if is_paired(chosen) else asked.bare),
        chosen=chosen,
        tuned=tuned,
        why_plain=answered.why_plain,
        screened=answered.screened,
        equal_stages_seconds=answered.equal_stages_seconds if staged is not None else None,
        graphs=answered.graphs,
        others=tuple(finalist for finalist in finalists if finalist is not chosen),
        found=found,
        refused=tuple(search.said.refused),
        baseline=None if own is None else own[0],
        wider_space="" if own is None else _wider_space(own[1], settings),
        dropped=asked.dropped,
        kept_micro_batch=asked.run.micro_batch,
        sharding=search_sharding(chosen.problem, wider.task, deadline, answered.is_interrupted) if shards else None,
        seconds=time.monotonic() - begun,
        staged=staged,
        is_interrupted=is_interrupted or answered.is_interrupted,
        is_late=answered.is_late,
        dispatchers=outcome.dispatchers,
    )
    step = prediction.predicted.step_seconds
    launching = launching_of(plan, answer.problem, step, asked.job.flags, replays_lists=False)
    answer = dataclasses.replace(answer, launching=launching)
    return _with_changes(answer, asked)


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
    """A search of plans for what is asked: it prices, accepts and reads them.

    Attributes:
        task, bounds: of the narrow space; `listed` is the task for plans with instruction lists.
        paired: the task with Megatron-LM's overlap of all-to-alls, where that is searched, too.
        said: reads plans as flags; `upstream` those of Megatron-LM's overlap, which another target may look at, too.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked, target, bare = asked, asked.settings.target, asked.bare
        task, self.bounds = asked.task(asked.job, narrow_space(asked.space))
        if asked.graphs == asked.libraries.graphs:
            task = captured_ahead(task, asked.job, asked.layouts, asked.libraries, asked.settings.jobs)
        self.task = task
        pairs = target == "megatron-lm" or (target == "any" and asked.space.overlaps)
        self.paired = paired_task(task, bare) if pairs else None
        self.listed = dataclasses.replace(
            task, features=dataclasses.replace(task.features, listed_graphs=asked.replays)
        )
        self.refusal = refusals(task, target, bare)
        self.accepts = accepted(self.refusal)
        self.said = PlansAsFlags(task, bare, target, asked.cluster.gpus)
        self.upstream = PlansAsFlags(task, as_priced(bare, "megatron-lm"), "megatron-lm", asked.cluster.gpus)
        self.admits: Callable[[RankedLayout], bool] = self.said.is_read
        if target == "any":
            self.admits = lambda plan: not plan.layout.paired or self.upstream.is_read(plan)

    def uniform(self) -> tuple[UniformSearch, tuple[DispatcherOutcome, ...]]:
        """Uniform plans of the narrow space, under all dispatchers that are searched."""
        asked, settings = self.asked, self.asked.settings

        def search(share: LayoutShare, bar: SharedBar | None) -> tuple[UniformSearch, Refused]:
            layouts, costs, bounds = share_of(asked.layouts, share), UniformCosts(self.task), self.bounds
            if self.paired is not None:
                layouts, costs = [*with_paired(layouts)], CostsOfBoth(self.task, self.paired)
                bounds = costs.bounds(self.bounds)
            found = search_uniform(
                layouts,
                costs,
                bounds,
                self.accepts,
                self.admits,
                KEPT,
                asked.deadline,
                progress=settings.progress if share.index == 0 else silent,
                shared=None if bar is None else (bar, share.index),
            )
            return found, self.said.refused

        def side(dispatcher: Dispatcher) -> Side:
            task, bounds = asked.task(with_dispatcher_of(asked.job, dispatcher), narrow_space(asked.space))
            task = dataclasses.replace(task, modules=self.task.modules)
            # Megatron-LM runs its overlap with all-to-alls and with libraries of their own.
            pairs = self.paired is not None and dispatcher in LIBRARIES
            return Side(task=task, bounds=bounds, paired=paired_task(task, asked.bare) if pairs else None)

        found, self.said.refused = shared_search(search, settings.jobs, KEPT)
        rules = self.accepts, self.admits
        return search_dispatchers(
            found,
            asked.layouts,
            self.task,
            asked.further,
            side,
            KEPT,
            *rules,
            asked.deadline,
            settings.progress,
            paired=self.paired,
        )

    def beyond(self, found: UniformSearch) -> _Wider:
        """The plans of the whole space, where it is wider than the narrow one."""
        asked, settings = self.asked, self.asked.settings
        if asked.space == narrow_space(asked.space) and settings.target != "any":
            staged, task = self.freed(found) if asked.space.frees_stages else (None, self.task)
            return _Wider(uniform=found, staged=staged, job=asked.job, layouts=asked.layouts, task=task)
        job, layouts, found = _of_one_dispatcher(asked.job, asked.layouts, found)
        task, bounds = asked.task(job, asked.space)
        staged = None
        jobs, progress = settings.jobs, settings.progress
        if settings.target == "any":
            # Beyond what runs whole layers are recomputed.
            operators = (task if layouts[0].dispatcher else self.task).operators
            task = dataclasses.replace(task, modules=(), operators=operators)
            free = search_beyond(found, layouts, task, bounds, KEPT, asked.deadline, progress, asked.run, jobs)
            found, staged = free.uniform, free.staged
        elif found.solution.status is not Status.TIME_LIMIT:
            rules = self.accepts, self.admits
            found = search_states(found, layouts, task, bounds, rules, KEPT, asked.deadline, jobs, progress)
        return _Wider(uniform=found, staged=staged, job=job, layouts=layouts, task=task)

    def freed(self, found: UniformSearch) -> tuple[StageSearch, UniformTask]:
        """Plans whose stages differ in layers, recomputation or shape, under the best uniform plan's dispatcher; their task."""
        asked, settings = self.asked, self.asked.settings
        job, layouts, found = _of_one_dispatcher(asked.job, asked.layouts, found)
        task, _ = asked.task(job, asked.space)
        task = dataclasses.replace(task, modules=self.task.modules)
        if not layouts[0].dispatcher:
            task = dataclasses.replace(task, operators=self.task.operators)
        going = asked.deadline, settings.progress, settings.jobs
        staged = search_freed(found, layouts, UniformCosts(task), *going)
        if asked.space.meshes and asked.run.gpus <= MESH_GPUS and not asked.job.model.num_experts:
            whole = dataclasses.replace(task, modules=())
            staged = with_sub_meshes(found, staged, whole, asked.run, *going)
        return staged, task

    def finalists(self, wider: _Wider) -> list[Finalist]:
        """The ranked plans, predicted, in the order of the search.

        Raises:
            ConfigError: none is left, as measured operators of a machine may say otherwise than the search.
        """
        asked = self.asked
        if asked.settings.target != "any":
            staged = () if wider.staged is None else wider.staged.ranked[:STAGED]
            # Lists carry tokens by the irregular dispatcher, whichever the search has found for others.
            extrapolating = machine_for(asked.job, asked.cluster, asked.options)[1]
            flags = partial(self.said.read, "")
            unlike = partial(free_finalist, task=wider.task, flags=flags, extrapolating=extrapolating)
            return _finalists(wider.uniform, staged, self.said, unlike, asked.cluster, asked.options)
        dispatcher = wider.layouts[0].dispatcher
        extrapolating = machine_for(wider.job, asked.cluster, asked.options)[1]
        name = dispatcher or wider.task.features.dispatcher
        extrapolating = (*extrapolating, *uncalibrated(name, asked.cluster.group_of(0).gpu.name))
        read = partial(self.said.read, dispatcher)
        paired = partial(self.upstream.finalist, cluster=asked.cluster, options=asked.options)
        free = FreeSearch(uniform=wider.uniform, staged=wider.staged)
        return free_finalists(free, wider.task, KEPT, read, paired, extrapolating)

    def decided(
        self, found: UniformSearch, finalists: list[Finalist], deadline: float
    ) -> tuple[list[Finalist], Overlapped]:
        """The finalists in the order of their simulated steps, and the fastest with its overlap."""
        asked, settings, options = self.asked, self.asked.settings, self.asked.options
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
            read=partial(self.said.finalist, cluster=asked.cluster, options=options),
            cluster=asked.cluster,
            limits=settings.overlap_limits,
            solver_seconds=settings.solver_seconds,
            deadline=deadline,
            replays=asked.replays,
        )
        if overlaps.is_late or settings.target == "megatron-lm" or not asked.space.overlaps:
            return finalists, dataclasses.replace(undecided(finalists), is_late=overlaps.is_late)
        hidden = partial(
            search_hidden,
            found,
            asked.layouts,
            self.listed,
            self.bounds,
            SCREENED,
            accepts=accepted(refusals(self.task, "moe-overlap", asked.bare)),
            admits=self.said.is_read,
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


def _search_until_measured(asked: Asked) -> _Outcome:
    """The last of the searches that a measured machine needs; any other cluster needs one.

    A search prices operators that the machine has not measured by its peak rates, and predictions of its best plans measure
    theirs. Rates may be several times too high for an operator, so that plans that run it lead the search; the next search knows
    better. The searches end when the predictions had nothing to measure.
    """
    operators = _measured_operators(asked.cluster)
    for _ in range(MOST_SEARCHES):
        outcome = _search_once(asked)
        before, operators = operators, _measured_operators(asked.cluster)
        if operators == before or outcome.is_interrupted or time.monotonic() > asked.deadline:
            break
    return outcome


def _measured_operators(cluster: Cluster) -> int:
    """Operators in the database of a measured cluster; 0 without one."""
    return 0 if cluster.measured is None else len(Database.load(Path(cluster.measured.database)).operators)


def _search_once(asked: Asked) -> _Outcome:
    """Search the whole space and predict its best plans.

    Raises:
        ConfigError: no plan fits.
        KeyboardInterrupt: Ctrl-C came before any plan was found.
    """
    search = _Search(asked)
    found, dispatchers = search.uniform()
    wider = search.beyond(found)
    uniform, staged = wider.uniform, wider.staged
    is_interrupted = uniform.is_interrupted or (staged is not None and staged.is_interrupted)
    if uniform.solution.value is None and (staged is None or staged.solution.value is None):
        if is_interrupted:
            raise KeyboardInterrupt
        commonest = commonest_refusal(search.refusal, asked.layouts[:REFUSALS])
        certainty = search.task.machine.memory.certainty
        raise does_not_fit(uniform, asked.cluster, search.said.refused, certainty, commonest)
    return _Outcome(
        search=search,
        wider=wider,
        dispatchers=dispatchers,
        finalists=search.finalists(wider),
        is_interrupted=is_interrupted,
    )


def _with_changes(answer: PlanSearch, asked: Asked) -> PlanSearch:
    """The answer with what it changes in the user's own layout."""
    if answer.baseline is None or answer.refusal is not None:
        return answer
    precise = Options(**{**asked.options, "precision": asked.given.get("precision")})
    own = flags_of(asked.words)
    # For this fork flags of Megatron-LM's overlap make way, as `dropped` says.
    decided = PAIRED if answer.is_upstream else ()
    planned = answer.written.flags
    if "--plan" in planned:
        # The file beside the flags says the layout; a comparison needs the flags that would say it.
        predictions = int(own.get("--mtp-num-layers", ("0",))[0])
        planned = {**flags_of_layout(answer.plan, predictions), **planned}
    changes = changes_of(own, planned, answer.baseline, answer.cluster, decided, **precise)
    return dataclasses.replace(answer, changes=changes)


def _of_one_dispatcher(
    job: Job, layouts: list[UniformLayout], found: UniformSearch
) -> tuple[Job, list[UniformLayout], UniformSearch]:
    """The search with the dispatcher of its best plan alone: wider spaces keep it."""
    if found.solution.value is None:
        return job, layouts, found
    name = found.solution.value.layout.dispatcher
    under = [dataclasses.replace(layout, dispatcher=name) for layout in layouts if runs(name, layout)]
    ranked = tuple(plan for plan in found.ranked if plan.layout.dispatcher == name)
    return with_dispatcher_of(job, name), under, dataclasses.replace(found, ranked=ranked)


def _finalists(
    found: UniformSearch,
    staged: Sequence[StagedPlan | MeshPlan],
    said: PlansAsFlags,
    unlike: Callable[[MeshPlan], Finalist],
    cluster: Cluster,
    options: Options,
) -> list[Finalist]:
    """The ranked plans, read from their flags and predicted, in the order of the search.

    Raises:
        ConfigError: none is left, as measured operators of a machine may say otherwise than the search.
    """
    finalists = []
    for ranked in sorted((*found.ranked, *staged), key=lambda plan: plan.seconds):
        try:
            if isinstance(ranked, MeshPlan):
                finalist = unlike(ranked)
                if finalist.refusal is not None:
                    said.refused.append((ranked.name, finalist.refusal))
                    continue
            elif isinstance(ranked, StagedPlan):
                finalist = said.staged_finalist(ranked, cluster, options)
            else:
                finalist = said.finalist(ranked, cluster, options)
        except ConfigError as error:
            if isinstance(ranked, RankedLayout):
                raise
            said.refused.append((ranked.name, str(error)))
            continue
        if not finalist.prediction.fits:
            said.refused.append((ranked.name, finalist.prediction.overflow[0]))
            continue
        finalists.append(finalist)
    if not finalists:
        raise ConfigError("the search", "", f"no plan is left: {said.refused[-1][1]}", "use more GPUs")
    return finalists


def _baseline(asked: Asked) -> tuple[Prediction, Plan] | None:
    """The user's own layout, where the flags have one that runs on these GPUs, with its prediction."""
    # Where they overlap nothing, flags that ask for captured graphs are those of the run without them.
    for said in (asked.words, without_graphs(asked.words)[0]):
        try:
            problem = problem_of(said, asked.cluster, asked.given)
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
