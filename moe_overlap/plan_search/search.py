"""Search the plan of a run: from its Megatron flags, whose layout is only a baseline, to the flags of the fastest plan.

`search_plan` is the whole search:

1. `read_request` separates what a plan decides from the user's flags. The rest describes model, batch, precision and features.
2. `SearchRules.of` prepares the prices of layouts, captures what most of them share, and has the rules of the target: this
   runtime, or unmodified Megatron-LM.
3. `_search_uniform` searches uniform plans under every dispatcher (tuner/search/uniform.py).
4. `_search_wider` adds plans with unlike stages, other ZeRO levels or shares in host memory (free.py); for Megatron-LM states
   that it shards or offloads (upstream_states.py); for `--target any` plans that nothing executes.
5. `_finalists` writes the fastest as flags and reads those like any command line, so that rules across flags refuse them here and
   not at the start of the run. Each is predicted, by the closed form where states move; plans that no flags express are predicted
   as they are.
6. `_simulated` simulates the finalists near the fastest. Simulated steps order them (not with --no-imbalance); of those within
   `TIE` of the fastest the one that needs the least memory leads.
7. `_overlapped` decides the overlap of the first few for this runtime, and of layouts that are fast only with overlap
   (overlapped.py). The shortest step is the answer.
8. `_answer` assembles the result; `_with_changes` lists what it changes in the user's own layout.

A measured machine repeats steps 2 to 5 until predictions have nothing new to measure, five searches at most in all
(`_search_until_measured`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Unpack

from moe_overlap.api import Options, machine_for
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.host_launches import launching_of
from moe_overlap.job import Job
from moe_overlap.plan.plan import Plan
from moe_overlap.plan_search.changes import Baseline, baseline_of, changes_of
from moe_overlap.plan_search.finalists import (
    does_not_fit,
    in_order,
    listed_alone,
    require_room,
    simulated_finalists,
    simulated_until_ahead,
)
from moe_overlap.plan_search.flags import PlansAsFlags, as_priced, as_run, flags_of, flags_of_layout
from moe_overlap.plan_search.free import (
    FreeSearch,
    free_finalist,
    free_finalists,
    narrow_space,
    search_beyond,
    search_freed,
    with_sub_meshes,
)
from moe_overlap.plan_search.free_sharding import search_sharding
from moe_overlap.plan_search.overlapped import SCREENED, Overlapped, OverlapSearch, decide_overlaps, undecided
from moe_overlap.plan_search.processes import Refused, shared_search
from moe_overlap.plan_search.request import SearchRequest, SearchSettings, read_request
from moe_overlap.plan_search.results import Finalist, PlanSearch, is_paired
from moe_overlap.plan_search.task import (
    Refusals,
    accepted,
    captured_ahead,
    commonest_refusal,
    paired_task,
    refusals,
    with_dispatcher_of,
)
from moe_overlap.plan_search.upstream_states import search_states
from moe_overlap.tuner.capture.library import Libraries
from moe_overlap.tuner.cost.hardware import Dispatcher
from moe_overlap.tuner.profile.database import Database
from moe_overlap.tuner.search.bounds import Bounds
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
from moe_overlap.tuner.search.space import NARROW_DEFAULT, SEARCH_SPACES, SearchSpace, UniformLayout
from moe_overlap.tuner.search.uniform import Accepts, RankedLayout, UniformSearch, search_uniform
from moe_overlap.tuner.search.uniform_cost import UniformCosts, UniformTask
from moe_overlap.tuner.write.upstream_rules import PAIRED

REFUSALS = 1000
"""Layouts among which the commonest refusal is looked for, where the target runs none."""
KEPT = 20
"""Layouts that are ranked and read again as flags."""
MESH_GPUS = 32
"""Most GPUs on whose sub-meshes stages are searched by default, for dense models."""
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
        arguments: Megatron flags, or `@FILE`; their layout is a baseline and constrains nothing.
        libraries: captures that several searches share; default those of the cache.
    Raises:
        ConfigError: as `predict`; no layout divides the model, the batch and the GPUs; or no plan fits.
    """
    begun = time.monotonic()
    # 1. Read the flags without their layout.
    request = read_request(arguments, cluster, settings, begun + settings.seconds, libraries, **options)
    # 2 to 5. Search, and predict the best plans.
    plans, finalists = _search_until_measured(request)
    # A search that ended early leaves no time for the later steps.
    ended = plans.uniform.solution.status is Status.TIME_LIMIT or plans.is_interrupted
    deadline = -math.inf if ended else request.deadline
    # 6. Order them by simulated steps.
    finalists, is_interrupted = _simulated(finalists, request, deadline)
    # 7. Decide the overlap of the first few.
    if is_interrupted:
        overlapped = dataclasses.replace(undecided(finalists), is_interrupted=True)
    else:
        overlapped = _overlapped(finalists, plans, request, deadline)
    # 8. Assemble the answer, and list what it changes in the user's own layout.
    answer = _answer(plans, finalists, overlapped, request, deadline, begun)
    return _with_changes(answer, request)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SearchRules:
    """Prices of layouts in the narrow space, and which plans the target runs.

    Attributes:
        task, bounds: prices and bounds of layouts.
        paired: the task with Megatron-LM's overlap of all-to-alls; None where that is not searched.
        refusal: the rule by which the target does not run a plan; `accepts` whether it does.
        reader: reads plans as flags; `upstream_reader` those of Megatron-LM's overlap, which `--target any` evaluates as well.
        admits: whether the flags of a plan are accepted.
    """

    task: UniformTask
    bounds: Callable[[UniformLayout], Bounds]
    paired: UniformTask | None
    refusal: Refusals
    reader: PlansAsFlags
    upstream_reader: PlansAsFlags
    admits: Callable[[RankedLayout], bool]

    @classmethod
    def of(cls, request: SearchRequest) -> SearchRules:
        """The rules of a request.

        Raises:
            ConfigError: the GPUs cannot hold the states of any plan.
        """
        target, bare = request.settings.target, request.bare
        task, bounds = request.task(request.job, narrow_space(request.space))
        _, wide = request.task(request.job, request.space)
        require_room(wide(dataclasses.replace(request.layouts[0], tensor=1)).state_bytes, request.space, task.machine)
        if request.graphs == request.libraries.graphs:
            task = captured_ahead(task, request.job, request.layouts, request.libraries, request.settings.jobs)
        pairs = target == "megatron-lm" or (target == "any" and request.space.overlaps)
        reader = PlansAsFlags(task, bare, target, request.cluster.gpus)
        upstream_reader = PlansAsFlags(task, as_priced(bare, "megatron-lm"), "megatron-lm", request.cluster.gpus)
        admits: Callable[[RankedLayout], bool] = reader.is_read
        if target == "any":
            admits = lambda plan: not plan.layout.paired or upstream_reader.is_read(plan)  # noqa: E731
        return cls(
            task=task,
            bounds=bounds,
            paired=paired_task(task, bare) if pairs else None,
            refusal=refusals(task, target, bare),
            reader=reader,
            upstream_reader=upstream_reader,
            admits=admits,
        )

    @property
    def accepts(self) -> Accepts:
        """Whether the target runs a plan."""
        return accepted(self.refusal)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SearchedPlans:
    """One search of the whole space.

    Attributes:
        uniform, staged: the searches over uniform plans and over unlike stages; `staged` is None where the space has none.
        task: of the whole space, under the dispatcher of the narrow space's best plan.
        job, layouts: under that dispatcher too where the space is wider; else those of the request.
        dispatchers: the other dispatchers that were searched.
    """

    rules: SearchRules
    uniform: UniformSearch
    staged: StageSearch | None
    job: Job
    layouts: Sequence[UniformLayout]
    task: UniformTask
    dispatchers: tuple[DispatcherOutcome, ...]

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C ended one of the searches."""
        return self.uniform.is_interrupted or (self.staged is not None and self.staged.is_interrupted)

    def interrupted(self) -> SearchedPlans:
        """The same plans, after a later search that Ctrl-C ended."""
        return dataclasses.replace(self, uniform=dataclasses.replace(self.uniform, is_interrupted=True))

    @property
    def has_plan(self) -> bool:
        """Whether any plan fits."""
        return self.uniform.solution.value is not None or (
            self.staged is not None and self.staged.solution.value is not None
        )


def _search_until_measured(request: SearchRequest) -> tuple[SearchedPlans, list[Finalist]]:
    """The last complete search of those that a measured machine needs, and its best plans; any other cluster needs one search.

    A search prices operators that the machine has not measured by its peak rates, and predictions of its best plans measure
    theirs. Rates may be several times too high for an operator, so that plans that run it lead the search; the next search knows
    better. The searches end when predictions have nothing new to measure, at the deadline, and after `MOST_SEARCHES`.

    Raises:
        ConfigError: no plan fits.
        KeyboardInterrupt: Ctrl-C came before any plan was known.
    """
    operators = _measured_operators(request.cluster)
    complete: tuple[SearchedPlans, list[Finalist]] | None = None
    for _ in range(MOST_SEARCHES):
        try:
            newest = _search_once(request)
        except KeyboardInterrupt:
            if complete is None:
                raise
            return complete[0].interrupted(), complete[1]
        except ConfigError:
            # Plans that no longer fit once their operators are measured are no reason to give up: the next search prices them.
            before, operators = operators, _measured_operators(request.cluster)
            if operators != before and time.monotonic() <= request.deadline:
                continue
            if complete is None:
                raise
            return complete
        plans = newest[0]
        if complete is not None and (plans.is_interrupted or plans.uniform.solution.status is Status.TIME_LIMIT):
            return (complete[0].interrupted() if plans.is_interrupted else complete[0]), complete[1]
        complete = newest
        before, operators = operators, _measured_operators(request.cluster)
        if operators == before or plans.is_interrupted or time.monotonic() > request.deadline:
            return complete
    if complete is None:
        raise ConfigError("the search", "", "no plan fits as its operators are measured", "use more GPUs")
    return complete


def _measured_operators(cluster: Cluster) -> int:
    """Operators in the database of a measured cluster; 0 without one."""
    return 0 if cluster.measured is None else len(Database.load(Path(cluster.measured.database)).operators)


def _search_once(request: SearchRequest) -> tuple[SearchedPlans, list[Finalist]]:
    """Steps 2 to 5: search the whole space, and predict its best plans.

    Raises:
        ConfigError: no plan fits.
        KeyboardInterrupt: Ctrl-C came before any plan was known.
    """
    with request.libraries.until(request.deadline):
        rules = SearchRules.of(request)
        uniform, dispatchers = _search_uniform(rules, request)
    plans = _search_wider(uniform, dispatchers, rules, request)
    if not plans.has_plan:
        if plans.is_interrupted:
            raise KeyboardInterrupt
        commonest = commonest_refusal(rules.refusal, request.layouts[:REFUSALS])
        raise does_not_fit(plans.uniform, rules.task.machine, rules.reader.refused, commonest)
    return plans, _finalists(plans, request)


def _search_uniform(rules: SearchRules, request: SearchRequest) -> tuple[UniformSearch, tuple[DispatcherOutcome, ...]]:
    """Step 3: uniform plans of the narrow space, under every dispatcher that is searched."""

    def search(share: LayoutShare, bar: SharedBar | None) -> tuple[UniformSearch, Refused]:
        layouts, costs, bounds = share_of(request.layouts, share), UniformCosts(rules.task), rules.bounds
        if rules.paired is not None:
            layouts, costs = [*with_paired(layouts)], CostsOfBoth(rules.task, rules.paired)
            bounds = costs.bounds(rules.bounds)
        uniform = search_uniform(
            layouts,
            costs,
            bounds,
            rules.accepts,
            rules.admits,
            KEPT,
            request.deadline,
            progress=request.budget.progress_of(share),
            shared=None if bar is None else (bar, share.index),
        )
        return uniform, rules.reader.refused

    def side(dispatcher: Dispatcher) -> Side:
        task, bounds = request.task(with_dispatcher_of(request.job, dispatcher), narrow_space(request.space))
        task = dataclasses.replace(task, modules=rules.task.modules)
        # Megatron-LM overlaps all-to-alls and dispatch libraries only.
        pairs = rules.paired is not None and dispatcher in LIBRARIES
        return Side(task=task, bounds=bounds, paired=paired_task(task, request.bare) if pairs else None)

    uniform, rules.reader.refused = shared_search(search, request.settings.jobs, KEPT)
    return search_dispatchers(
        uniform,
        request.layouts,
        rules.task,
        request.other_dispatchers,
        side,
        KEPT,
        rules.accepts,
        rules.admits,
        request.deadline,
        request.settings.progress,
        paired=rules.paired,
    )


def _search_wider(
    narrow: UniformSearch, dispatchers: tuple[DispatcherOutcome, ...], rules: SearchRules, request: SearchRequest
) -> SearchedPlans:
    """Step 4: the plans of the whole space. A wider space keeps the dispatcher of the narrow space's best plan."""
    searched = partial(SearchedPlans, rules=rules, dispatchers=dispatchers)
    is_narrow = request.space == narrow_space(request.space)
    if is_narrow and request.settings.target != "any" and not request.space.frees_stages:
        return searched(uniform=narrow, staged=None, job=request.job, layouts=request.layouts, task=rules.task)
    job, layouts, uniform = _of_one_dispatcher(request.job, request.layouts, narrow)
    task, bounds = request.task(job, request.space)
    # The first dispatcher's operator tables exist; another dispatcher has its own.
    operators = task.operators if layouts[0].dispatcher else rules.task.operators
    staged = None
    if request.predicts_plans:
        # Plans whose states move recompute whole layers only, no modules.
        task = dataclasses.replace(task, modules=(), operators=operators)
        free = search_beyond(uniform, layouts, task, bounds, KEPT, request.budget, request.run, rules.accepts)
        uniform, staged = free.uniform, free.staged
    elif is_narrow:
        task = dataclasses.replace(task, modules=rules.task.modules, operators=operators)
        staged = search_freed(uniform, layouts, UniformCosts(task), request.budget)
        # No overlap is searched between stages of unlike shape: Mixtral on 64 H100 takes 40 % longer and gains nothing.
        if request.space.meshes and request.run.gpus <= MESH_GPUS and not request.job.model.num_experts:
            whole_layers = dataclasses.replace(task, modules=())
            staged = with_sub_meshes(uniform, staged, whole_layers, request.run, request.budget)
        # The uniform plans keep all dispatchers.
        uniform, job, layouts = narrow, request.job, request.layouts
    elif uniform.solution.status is not Status.TIME_LIMIT:
        uniform = search_states(uniform, layouts, task, bounds, (rules.accepts, rules.admits), KEPT, request.budget)
    return searched(uniform=uniform, staged=staged, job=job, layouts=layouts, task=task)


def _of_one_dispatcher(
    job: Job, layouts: list[UniformLayout], uniform: UniformSearch
) -> tuple[Job, list[UniformLayout], UniformSearch]:
    """Job, layouts and search with the dispatcher of the best plan only."""
    if uniform.solution.value is None:
        return job, layouts, uniform
    name = uniform.solution.value.layout.dispatcher
    of_dispatcher = [dataclasses.replace(layout, dispatcher=name) for layout in layouts if runs(name, layout)]
    ranked = tuple(plan for plan in uniform.ranked if plan.layout.dispatcher == name)
    return with_dispatcher_of(job, name), of_dispatcher, dataclasses.replace(uniform, ranked=ranked)


def _finalists(plans: SearchedPlans, request: SearchRequest) -> list[Finalist]:
    """Step 5: the ranked plans, predicted, in the order of the search.

    Raises:
        ConfigError: none fits, as measured operators of a machine may be slower or larger than the search expected.
    """
    rules, cluster, options = plans.rules, request.cluster, request.options
    extrapolating = machine_for(plans.job, cluster, options)[1]
    if request.predicts_plans:
        dispatcher = plans.layouts[0].dispatcher
        name = dispatcher or plans.task.features.dispatcher
        extrapolating = (*extrapolating, *uncalibrated(name, cluster.group_of(0).gpu.name))
        free = FreeSearch(uniform=plans.uniform, staged=plans.staged)
        flags = partial(rules.reader.read, dispatcher)
        paired = partial(rules.upstream_reader.finalist, cluster=cluster, options=options)
        free_plans = free_finalists(free, plans.task, KEPT, flags, paired, extrapolating)
        return free_plans if request.settings.target == "any" else _executed(free_plans, rules.reader.refused)
    # Instruction lists use the irregular dispatcher, whichever the search has chosen for other plans.
    of_meshes = partial(
        free_finalist, task=plans.task, flags=partial(rules.reader.read, ""), extrapolating=extrapolating
    )
    finalists, refused = [], rules.reader.refused
    staged = () if plans.staged is None else plans.staged.ranked[:STAGED]
    for ranked in sorted((*plans.uniform.ranked, *staged), key=lambda plan: plan.seconds):
        try:
            if isinstance(ranked, MeshPlan):
                finalist = of_meshes(ranked)
            elif isinstance(ranked, StagedPlan):
                finalist = rules.reader.staged_finalist(ranked, cluster, options)
            else:
                finalist = rules.reader.finalist(ranked, cluster, options)
        except ConfigError as error:
            if isinstance(ranked, RankedLayout):
                raise
            refused.append((ranked.name, str(error)))
            continue
        if finalist.refusal is not None:
            refused.append((ranked.name, finalist.refusal))
        elif not finalist.prediction.fits:
            refused.append((ranked.name, finalist.prediction.overflow[0]))
        else:
            finalists.append(finalist)
    if not finalists:
        raise ConfigError("the search", "", f"no plan is left: {refused[-1][1]}", "use more GPUs")
    return finalists


def _executed(finalists: Sequence[Finalist], refused: Refused) -> list[Finalist]:
    """The finalists that this fork executes; the rules against the others join `refused`.

    Raises:
        ConfigError: it executes none.
    """
    refused += [(finalist.name, finalist.refusal) for finalist in finalists if finalist.refusal is not None]
    executed = [finalist for finalist in finalists if finalist.refusal is None]
    if not executed:
        raise ConfigError("the search", "", f"no plan is left: {refused[-1][1]}", "use --search-space stages")
    return executed


def _simulated(finalists: Sequence[Finalist], request: SearchRequest, deadline: float) -> tuple[list[Finalist], bool]:
    """Step 6: the finalists in the order of their simulated steps; and whether Ctrl-C ended that."""
    settings = request.settings
    try:
        if request.predicts_plans:
            simulated = simulated_until_ahead(finalists, deadline)
        else:
            simulated = simulated_finalists(finalists, deadline, settings.jobs)
    except KeyboardInterrupt:
        return listed_alone(finalists), True
    # With --no-imbalance the order of the search stays: it reproduces papers, which answer with the best of their objective.
    return simulated if settings.averages else in_order(simulated), False


def _overlapped(
    finalists: Sequence[Finalist], plans: SearchedPlans, request: SearchRequest, deadline: float
) -> Overlapped:
    """Step 7: the fastest plan with its overlap decided."""
    rules, settings = plans.rules, request.settings
    overlaps = OverlapSearch(
        read=partial(rules.reader.finalist, cluster=request.cluster, options=request.options),
        cluster=request.cluster,
        limits=settings.overlap_limits,
        solver_seconds=settings.solver_seconds,
        deadline=deadline,
        replays=request.replays,
    )
    if overlaps.is_late or settings.target == "megatron-lm" or not request.space.overlaps:
        return dataclasses.replace(undecided(finalists), is_late=overlaps.is_late)
    features = dataclasses.replace(rules.task.features, listed_graphs=request.replays)
    hidden = partial(
        search_hidden,
        plans.uniform,
        request.layouts,
        dataclasses.replace(rules.task, features=features),
        rules.bounds,
        SCREENED,
        accepts=accepted(refusals(rules.task, "moe-overlap", request.bare)),
        admits=rules.reader.is_read,
        deadline=deadline,
        progress=settings.progress,
    )
    return decide_overlaps(finalists, hidden, overlaps, **request.options)


def _answer(
    plans: SearchedPlans,
    finalists: Sequence[Finalist],
    overlapped: Overlapped,
    request: SearchRequest,
    deadline: float,
    begun: float,
) -> PlanSearch:
    """Step 8: the answer, with the prediction of the user's own layout and the cost of launches.

    Args:
        begun: `time.monotonic` at the start of the search.
    """
    settings, chosen, tuned = request.settings, overlapped.chosen, overlapped.tuned
    plan, prediction = (
        (chosen.plan, chosen.prediction) if tuned is None else (tuned.chosen.decided, tuned.chosen.prediction)
    )
    assert prediction is not None
    baseline = Baseline()
    if settings.has_baseline:
        baseline = baseline_of(request.arguments, request.cluster, settings.target, request.user_options)
    sharding = None
    if request.space.shards_operators:
        sharding = search_sharding(chosen.problem, plans.task, deadline, overlapped.is_interrupted)
    answer = PlanSearch(
        target=settings.target,
        space=request.space.name,
        cluster=request.cluster,
        arguments=tuple(as_priced(request.bare, "megatron-lm") if is_paired(chosen) else request.bare),
        chosen=chosen,
        tuned=tuned,
        why_plain=overlapped.why_plain,
        screened=overlapped.screened,
        equal_stages_seconds=overlapped.equal_stages_seconds if plans.staged is not None else None,
        graphs=overlapped.graphs,
        others=tuple(finalist for finalist in finalists if finalist is not chosen),
        uniform=plans.uniform,
        refused=tuple(plans.rules.reader.refused),
        baseline=baseline.prediction,
        baseline_refusal=baseline.refusal,
        wider_space="" if baseline.plan is None else _wider_space(baseline.plan, settings),
        dropped=request.dropped,
        kept_micro_batch=request.run.micro_batch,
        sharding=sharding,
        seconds=time.monotonic() - begun,
        staged=plans.staged,
        is_interrupted=plans.is_interrupted or overlapped.is_interrupted,
        is_late=overlapped.is_late,
        dispatchers=plans.dispatchers,
    )
    step = prediction.predicted.step_seconds
    launching = launching_of(plan, answer.problem, step, request.job.flags, replays_lists=False)
    return dataclasses.replace(answer, launching=launching)


def _wider_space(plan: Plan, settings: SearchSettings) -> str:
    """The search space of Megatron-LM that has a plan like the user's own, where the search is in a narrower one."""
    shards = any(stage.zero_level > 1 for stage in plan.stages)
    offloads = any(stage.offload.activations for stage in plan.stages)
    name = "offload" if offloads else "zero" if shards else ""
    row = None if isinstance(settings.space, SearchSpace) else SEARCH_SPACES[settings.space or NARROW_DEFAULT]
    is_narrow = row is not None and row.megatron_lm is not None and row.megatron_lm.zero_levels == (1,)
    return name if settings.target == "megatron-lm" and is_narrow else ""


def _with_changes(answer: PlanSearch, request: SearchRequest) -> PlanSearch:
    """The answer with what it changes in the user's own layout."""
    if answer.baseline is None or answer.refusal is not None:
        return answer
    precise = Options(**{**request.options, "precision": request.user_options.get("precision")})
    user_flags = flags_of(as_run(request.arguments, request.settings.target))
    # This fork drops the flags of Megatron-LM's overlap (`dropped`), so they are no decision of its plan.
    decided = PAIRED if answer.is_upstream else ()
    planned = answer.written.flags
    if "--plan" in planned:
        # The file beside the flags says the layout; a comparison needs the flags that would say it.
        predictions = int(user_flags.get("--mtp-num-layers", ("0",))[0])
        planned = {**flags_of_layout(answer.plan, predictions), **planned}
    changes = changes_of(user_flags, planned, answer.baseline, answer.cluster, decided, **precise)
    return dataclasses.replace(answer, changes=changes)
