"""Search the plan of a run: from its Megatron flags without a layout, or in spite of theirs, to the flags of the fastest plan.

1. `without_layout` takes from the user's flags what a plan decides. What is left describes model, batch, precision and features.
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
from typing import Unpack

from megatron.training.cli.arguments import expand_files
from megatron.training.plan_flags import arguments_of, layout_values
from moe_overlap.api import Options, machine_for, problem_of
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.readers.predicted_flags import grouped
from moe_overlap.job import Job, named_by, read_job, without_graphs
from moe_overlap.launching import launching_of
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.plan.plan import Plan
from moe_overlap.plan_search.changes import changes_of
from moe_overlap.plan_search.finalists import (
    does_not_fit,
    in_order,
    listed_alone,
    simulated_finalists,
    simulated_until_ahead,
)
from moe_overlap.plan_search.flags import PlansAsFlags, Target, as_priced, with_precision, without_layout
from moe_overlap.plan_search.free import FreeSearch, free_finalists, narrow_space, search_beyond
from moe_overlap.plan_search.free_sharding import search_sharding
from moe_overlap.plan_search.overlapped import SCREENED, Overlapped, OverlapSearch, decide_overlaps
from moe_overlap.plan_search.processes import Processes, job_sha256, search_shards
from moe_overlap.plan_search.shards import Refused, Shard, share_of
from moe_overlap.plan_search.task import (
    accepted,
    captured_ahead,
    commonest_refusal,
    layouts_of,
    paired_task,
    refusals,
    run_of,
    task_of,
    with_dispatcher_of,
)
from moe_overlap.plan_search.upstream_states import UPSTREAM, search_states
from moe_overlap.report.search import Finalist, PlanSearch, is_paired
from moe_overlap.tuner.capture.cache import CaptureFiles, Graphs, cache_folder, cpu_graphs
from moe_overlap.tuner.capture.library import Libraries
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.hardware import Dispatcher
from moe_overlap.tuner.cost.prediction import predict_plan
from moe_overlap.tuner.search.bounds import Bounds
from moe_overlap.tuner.search.dispatchers import (
    FIRST,
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
from moe_overlap.tuner.search.shared_bar import SharedBar
from moe_overlap.tuner.search.solution import Status
from moe_overlap.tuner.search.space import (
    SEARCH_SPACES,
    SearchSpace,
    UniformLayout,
)
from moe_overlap.tuner.search.uniform import RankedLayout, UniformSearch, search_uniform
from moe_overlap.tuner.search.uniform_cost import UniformCosts, UniformTask
from moe_overlap.tuner.write.argument_file import layout_flags
from moe_overlap.tuner.write.dispatcher_flags import with_dispatcher
from moe_overlap.tuner.write.upstream_rules import PAIRED

SPACES = ("megatron", "recompute")
"""Search spaces of plans that are executed."""
BEYOND = tuple(name for name in SEARCH_SPACES if name not in SPACES)
"""Search spaces with plans that no runtime executes today."""
REFUSALS = 1000
"""Layouts among which the commonest refusal is looked for, where the target runs none."""
KEPT = 20
"""Layouts that are ranked and read again as flags."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SearchSettings:
    """Settings of a plan search.

    Attributes:
        space: a name of `SEARCH_SPACES`, or a space of its own.
        seconds: after which the best so far is the answer.
        overlap_limits, solver_seconds: of the overlap search for the first few.
        has_baseline: whether the user's own layout is predicted as well.
        averages: whether the objective takes all micro-batches of a stage for their mean.
        frees_dispatcher: whether the dispatcher is searched although the flags name one; where they name none it is.
        processes: that search uniform plans.
        progress: called with layouts done, layouts in all, and the best so far.
    """

    target: Target = "moe-overlap"
    space: str | SearchSpace = "recompute"
    seconds: float = math.inf
    overlap_limits: SearchLimits = SearchLimits(max_partitions=8, group_seconds=0.0, range_limit=16)
    solver_seconds: float = 2.0
    has_baseline: bool = True
    averages: bool = False
    frees_dispatcher: bool = False
    processes: Processes = Processes()
    progress: Callable[[int, int, RankedLayout | StagedPlan | MeshPlan | None], None] = lambda done, total, best: None


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
        ShardsMissingError: with a shard, where answers of the others are not there yet.
    """
    begun = time.monotonic()
    search = _Search(words, cluster, settings, libraries, options, deadline=begun + settings.seconds)
    found, outcomes = search.uniform()
    wider = search.beyond(found)
    found, staged = wider.uniform, wider.staged
    is_interrupted = found.is_interrupted or (staged is not None and staged.is_interrupted)
    if found.solution.value is None and (staged is None or staged.solution.value is None):
        if is_interrupted:
            raise KeyboardInterrupt
        commonest = commonest_refusal(search.refusal, search.layouts[:REFUSALS])
        raise does_not_fit(found, cluster, search.said.refused, search.task.machine.memory.certainty, commonest)
    finalists = search.finalists(wider)
    deadline = -math.inf if found.solution.status is Status.TIME_LIMIT or is_interrupted else search.deadline
    finalists, answered = search.decided(found, finalists, deadline)
    chosen, tuned, shards = answered.chosen, answered.tuned, search.space.shards_operators
    plan, prediction = (
        (chosen.plan, chosen.prediction) if tuned is None else (tuned.chosen.decided, tuned.chosen.prediction)
    )
    assert prediction is not None
    own = _baseline(words, cluster, search.given) if settings.has_baseline else None
    answer = PlanSearch(
        target=settings.target,
        space=search.space.name,
        cluster=cluster,
        words=tuple(as_priced(search.bare, "megatron-lm") if is_paired(chosen) else search.bare),
        chosen=chosen,
        tuned=tuned,
        why_plain=answered.why_plain,
        screened=answered.screened,
        graphs=answered.graphs,
        others=tuple(finalist for finalist in finalists if finalist is not chosen),
        found=found,
        refused=tuple(search.said.refused),
        baseline=None if own is None else own[0],
        wider_space="" if own is None else _wider_space(own[1], settings),
        dropped=search.dropped,
        sharding=search_sharding(chosen.problem, wider.task, deadline, answered.is_interrupted) if shards else None,
        seconds=time.monotonic() - begun,
        staged=staged,
        is_interrupted=is_interrupted or answered.is_interrupted,
        is_late=answered.is_late,
        dispatchers=outcomes,
    )
    step = prediction.predicted.step_seconds
    launching = launching_of(plan, answer.problem, step, search.job.flags, replays_lists=False)
    answer = dataclasses.replace(answer, launching=launching)
    return _with_changes(answer, words, search.given, search.options)


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
    """The job, and what its plans are priced, accepted and read with.

    Attributes:
        bare: the user's flags without their layout.
        dropped: flags that the run goes without, with the reason.
        given: the options of the user; `options` are those of plans that are read from flags of their own.
        task, bounds: of the narrow space; `listed` is the task for plans with instruction lists.
        paired: the task with Megatron-LM's overlap of all-to-alls, where that is searched, too.
        replays: whether the flags ask for lists that are replayed as CUDA graphs.
        said: reads plans as flags; `upstream` those of Megatron-LM's overlap, which another target may look at, too.
    """

    def __init__(
        self,
        words: Sequence[str],
        cluster: Cluster,
        settings: SearchSettings,
        libraries: Libraries | None,
        options: Options,
        deadline: float,
    ) -> None:
        self.cluster, self.settings, self.deadline = cluster, settings, deadline
        self.bare, self.dropped, self.further, self.job = _asked(words, cluster, settings, options)
        libraries = libraries or Libraries(CaptureFiles(cache_folder(), options.get("tell")))
        on_cpu = cluster.measured is not None and cluster.measured.device == "cpu"
        captured = partial(cpu_graphs, tell=options.get("tell")) if on_cpu else libraries.graphs
        self.graphs: Graphs = options.get("graphs") or captured
        # Plans are read from flags of their own, which stand in no file that names the model.
        self.given = Options(**{**options, "graphs": self.graphs, "name": self.job.model.name})
        # Those flags say the precision, and a plan file is of the user's own layout.
        self.options = Options(**{**self.given, "precision": None, "plan": None})
        self.space = _space(settings)
        self.run = run_of(self.job, cluster)
        self.layouts = layouts_of(self.job, self.run, self.space)
        task, self.bounds = self._task_of(self.job, narrow_space(self.space))
        if self.graphs == libraries.graphs:
            task = captured_ahead(task, self.job, self.layouts, libraries, settings.processes.shares)
        self.task = task
        pairs = settings.target == "megatron-lm" or (settings.target == "any" and self.space.overlaps)
        self.paired = paired_task(task, self.bare) if pairs else None
        self.replays = without_graphs(words)[1]
        self.listed = dataclasses.replace(task, features=dataclasses.replace(task.features, listed_graphs=self.replays))
        self.refusal = refusals(task, settings.target, self.bare)
        self.accepts = accepted(self.refusal)
        self.said = PlansAsFlags(task, self.bare, settings.target, cluster.gpus)
        self.upstream = PlansAsFlags(task, as_priced(self.bare, "megatron-lm"), "megatron-lm", cluster.gpus)
        self.admits: Callable[[RankedLayout], bool] = self.said.is_read
        if settings.target == "any":
            self.admits = lambda plan: not plan.layout.paired or self.upstream.is_read(plan)

    def _task_of(self, job: Job, space: SearchSpace) -> tuple[UniformTask, Callable[[UniformLayout], Bounds]]:
        return task_of(job, self.cluster, space, self.graphs, self.given, self.settings.averages)

    def uniform(self) -> tuple[UniformSearch, tuple[DispatcherOutcome, ...]]:
        """Uniform plans of the narrow space, under all dispatchers that are searched.

        Raises:
            ShardsMissingError: answers of other shards are not there yet.
        """
        settings = self.settings

        def search(shard: Shard, bar: SharedBar | None) -> tuple[UniformSearch, Refused]:
            is_said = shard.index == 1 or settings.processes.shard is not None
            layouts, costs, bounds = share_of(self.layouts, shard), UniformCosts(self.task), self.bounds
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
                self.deadline,
                progress=settings.progress if is_said else lambda done, total, best: None,
                shared=None if bar is None else (bar, shard.index - 1),
            )
            return found, self.said.refused

        def side(dispatcher: Dispatcher) -> Side:
            task, bounds = self._task_of(with_dispatcher_of(self.job, dispatcher), narrow_space(self.space))
            task = dataclasses.replace(task, modules=self.task.modules)
            # Megatron-LM runs its overlap with all-to-alls and with libraries of their own.
            pairs = self.paired is not None and dispatcher in LIBRARIES
            return Side(task=task, bounds=bounds, paired=paired_task(task, self.bare) if pairs else None)

        asked = (self.bare, settings.target, str(settings.space), settings.averages, str(settings.seconds))
        found, self.said.refused = search_shards(
            search, settings.processes, partial(job_sha256, asked, self.cluster, self.given), KEPT
        )
        rules = self.accepts, self.admits
        return search_dispatchers(
            found,
            self.layouts,
            self.task,
            self.further,
            side,
            KEPT,
            *rules,
            self.deadline,
            settings.progress,
            paired=self.paired,
        )

    def beyond(self, found: UniformSearch) -> _Wider:
        """The plans of the whole space, where it is wider than the narrow one."""
        settings = self.settings
        if self.space == narrow_space(self.space) and settings.target != "any":
            return _Wider(uniform=found, staged=None, job=self.job, layouts=self.layouts, task=self.task)
        job, layouts, found = _of_one_dispatcher(self.job, self.layouts, found)
        task, bounds = self._task_of(job, self.space)
        staged: StageSearch | None = None
        jobs, progress = settings.processes.jobs, settings.progress
        if settings.target == "any":
            # Beyond what runs whole layers are recomputed.
            operators = (task if layouts[0].dispatcher else self.task).operators
            task = dataclasses.replace(task, modules=(), operators=operators)
            free = search_beyond(found, layouts, task, bounds, KEPT, self.deadline, progress, self.run, jobs)
            found, staged = free.uniform, free.staged
        elif found.solution.status is not Status.TIME_LIMIT:
            rules = self.accepts, self.admits
            found = search_states(found, layouts, task, bounds, rules, KEPT, self.deadline, jobs, progress)
        return _Wider(uniform=found, staged=staged, job=job, layouts=layouts, task=task)

    def finalists(self, wider: _Wider) -> list[Finalist]:
        """The ranked plans, predicted, in the order of the search.

        Raises:
            ConfigError: none is left, as measured operators of a machine may say otherwise than the search.
        """
        if self.settings.target != "any":
            return _finalists(wider.uniform, self.said, self.cluster, self.options)
        dispatcher = wider.layouts[0].dispatcher
        extrapolating = machine_for(wider.job, self.cluster, self.options)[1]
        name = dispatcher or wider.task.features.dispatcher
        extrapolating = (*extrapolating, *uncalibrated(name, self.cluster.group_of(0).gpu.name))
        read = partial(self.said.read, dispatcher)
        paired = partial(self.upstream.finalist, cluster=self.cluster, options=self.options)
        free = FreeSearch(uniform=wider.uniform, staged=wider.staged)
        return free_finalists(free, wider.task, KEPT, read, paired, extrapolating)

    def decided(
        self, found: UniformSearch, finalists: list[Finalist], deadline: float
    ) -> tuple[list[Finalist], Overlapped]:
        """The finalists in the order of their simulated steps, and the fastest with its overlap."""
        settings, options = self.settings, self.options
        try:
            if settings.target == "any":
                finalists = simulated_until_ahead(finalists, deadline)
            else:
                finalists = simulated_finalists(finalists, deadline, settings.processes.jobs)
            # A search that takes all micro-batches for their mean answers with what it takes for the best.
            finalists = finalists if settings.averages else in_order(finalists)
        except KeyboardInterrupt:
            finalists = listed_alone(finalists)
            return finalists, Overlapped(chosen=finalists[0], tuned=None, is_interrupted=True)
        overlaps = OverlapSearch(
            read=partial(self.said.finalist, cluster=self.cluster, options=options),
            cluster=self.cluster,
            limits=settings.overlap_limits,
            solver_seconds=settings.solver_seconds,
            deadline=deadline,
            replays=self.replays,
        )
        if overlaps.is_late or settings.target == "megatron-lm" or not self.space.overlaps:
            return finalists, Overlapped(chosen=finalists[0], tuned=None, is_late=overlaps.is_late)
        hidden = partial(
            search_hidden,
            found,
            self.layouts,
            self.listed,
            self.bounds,
            SCREENED,
            accepts=accepted(refusals(self.task, "moe-overlap", self.bare)),
            admits=self.said.is_read,
        )
        hidden = partial(hidden, deadline=deadline, progress=settings.progress)
        return finalists, decide_overlaps(finalists, hidden, overlaps, **options)


def _asked(
    words: Sequence[str], cluster: Cluster, settings: SearchSettings, options: Options
) -> tuple[list[str], dict[str, str], tuple[Dispatcher, ...], Job]:
    """The user's flags without their layout, those that are dropped, the dispatchers that are searched, and the job.

    Raises:
        ConfigError: the flags are wrong whatever the layout, or nodes differ.
    """
    require_equal_groups(cluster)
    bare, dropped = without_layout(tuple(expand_files(words)), settings.target)
    bare = as_priced(with_precision(bare, options.get("precision")), settings.target)
    bare, further = with_dispatcher(bare, cluster, settings.frees_dispatcher)
    job = with_dispatcher_of(_described(words, bare, cluster, options), FIRST if further else "")
    flags = {name: values for name, values in job.flags.items() if name not in layout_flags() | dropped.keys()}
    return bare, dropped, further, dataclasses.replace(job, flags=flags)


def _with_changes(answer: PlanSearch, words: Sequence[str], given: Options, options: Options) -> PlanSearch:
    """The answer with what it changes in the user's own layout.

    Args:
        words, given: of the user.
        options: of the answer's plan.
    """
    if answer.baseline is None or answer.refusal is not None:
        return answer
    precise = Options(**{**options, "precision": given.get("precision")})
    own = grouped(tuple(expand_files(words)))
    # For this fork flags of Megatron-LM's overlap make way, as `dropped` says.
    decided = PAIRED if answer.is_upstream else ()
    planned = answer.written.flags
    if "--plan" in planned:
        # The file beside the flags says the layout; a comparison needs the flags that would say it.
        predictions = int(own.get("--mtp-num-layers", ("0",))[0])
        planned = {**grouped(arguments_of(layout_values(answer.plan, predictions))), **planned}
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


def _described(words: Sequence[str], bare: Sequence[str], cluster: Cluster, options: Options) -> Job:
    """The job of the flags, whose layout is not looked at.

    Raises:
        ConfigError: the flags are wrong whatever the layout.
    """
    name = named_by(words) or options.get("name")
    smallest = [*bare, "--micro-batch-size", "1"]
    try:
        job = read_job(smallest, 1)
    except ConfigError:
        try:
            # A dispatch library, which is of several expert ranks alone.
            job = read_job([*smallest, "--expert-model-parallel-size", "2"], 2)
        except ConfigError:
            # Whatever else needs several ranks is read with the user's own layout.
            job = read_job(words, cluster.gpus, options.get("precision"))
    # All plans of the search are made from this one, whose own may be a file's for other devices.
    job = dataclasses.replace(job, plan=dataclasses.replace(job.plan, host_runs_ahead=cluster.queues))
    return job if name is None else dataclasses.replace(job, model=dataclasses.replace(job.model, name=name))


def require_equal_groups(cluster: Cluster) -> None:
    """Refuse nodes of unlike kinds: one layout is priced on all of them.

    Raises:
        ConfigError: two groups of nodes differ.
    """
    if len({dataclasses.replace(group, nodes=1) for group in cluster.groups}) > 1:
        rule = "its groups of nodes differ, and plans whose stages differ are not searched yet"
        raise ConfigError("--cluster", cluster.name, rule, "search for each group alone")


def _space(settings: SearchSettings) -> SearchSpace:
    """The search space, as far as the target executes it.

    Raises:
        ConfigError: the space is not searched.
    """
    if isinstance(settings.space, SearchSpace):
        return settings.space
    if settings.space in UPSTREAM and settings.target == "megatron-lm":
        return UPSTREAM[settings.space]
    if settings.space in UPSTREAM and settings.target == "moe-overlap":
        rule = "has plans that this fork does not execute (ZeRO 0, 2 and 3, offloading)"
        raise ConfigError("--search-space", settings.space, rule, "add --target megatron-lm or --target any")
    if settings.space in BEYOND and settings.target != "any":
        rule = "has plans that nothing executes today (ZeRO 0, 2 and 3, offloading or stages that differ)"
        raise ConfigError("--search-space", settings.space, rule, "add --target any")
    if settings.space not in (*SPACES, *BEYOND):
        raise ConfigError(
            "--search-space", settings.space, "is no search space", f"use {', '.join((*SPACES, *BEYOND))}"
        )
    return SEARCH_SPACES[settings.space]


def _finalists(found: UniformSearch, said: PlansAsFlags, cluster: Cluster, options: Options) -> list[Finalist]:
    """The ranked plans, read from their flags and predicted, in the order of the search.

    Raises:
        ConfigError: none is left, as measured operators of a machine may say otherwise than the search.
    """
    finalists = []
    for ranked in found.ranked:
        finalist = said.finalist(ranked, cluster, options)
        if not finalist.prediction.fits:
            said.refused.append((ranked.name, finalist.prediction.overflow[0]))
            continue
        finalists.append(finalist)
    if not finalists:
        raise ConfigError("the search", "", f"no plan is left: {said.refused[-1][1]}", "use more GPUs")
    return finalists


def _baseline(words: Sequence[str], cluster: Cluster, options: Options) -> tuple[Prediction, Plan] | None:
    """The user's own layout, where the flags have one that runs on these GPUs, with its prediction."""
    # Where they overlap nothing, flags that ask for captured graphs are those of the run without them.
    for said in (words, without_graphs(words)[0]):
        try:
            problem = problem_of(said, cluster, options)
            return predict_plan(problem.plan, problem), problem.plan
        except ConfigError:
            continue
    return None


def _wider_space(plan: Plan, settings: SearchSettings) -> str:
    """The search space of Megatron-LM that has a plan like the user's own, where the search is in a narrower one."""
    shards = any(stage.zero_level > 1 for stage in plan.stages)
    offloads = any(stage.offload.activations for stage in plan.stages)
    name = "offload" if offloads else "zero" if shards else ""
    return name if settings.target == "megatron-lm" and settings.space in SPACES else ""
