"""Search the plan of a run: from its Megatron flags without a layout, or in spite of theirs, to the flags of the fastest plan.

1. `without_layout` takes from the user's flags what a plan decides. What is left describes model, batch, precision and features.
2. Uniform plans are searched with that (tuner/search/uniform.py), under the rules of the target: what this runtime executes, or
   what unmodified Megatron-LM accepts.
3. The fastest are written as flags and read again as any command line is: what rules across flags refuse is no answer, and each
   is predicted as tools/predict.py predicts it. Those near the fastest are simulated, and the simulated steps order them. Of
   those within `TIE` of the fastest the one that needs the least memory leads.
4. For this runtime the overlap of the first few is decided, and of layouts that are fast with overlap only
   (overlapped_search.py); the shortest step is the answer.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any, Unpack

from megatron.training.cli.arguments import expand_files
from megatron.training.cli.sizes import describe_model
from megatron.training.plan_flags import with_values
from moe_overlap.api import Options, busiest_load, machine_for, problem_of
from moe_overlap.changes import changes_of
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.describe.readers.predicted_flags import grouped
from moe_overlap.finalists import does_not_fit, in_order, listed_alone, simulated_finalists, simulated_until_ahead
from moe_overlap.free_search import free_finalists, narrow_space, search_beyond
from moe_overlap.free_sharding import search_sharding
from moe_overlap.job import Job, capturable, features_of, named_by, read_job, vocabulary_of, without_graphs
from moe_overlap.overlapped_search import SCREENED, Overlapped, Reading, decide_overlaps
from moe_overlap.plan.capabilities import refuse_unsupported, shares_scales
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.plan.plan import Devices, Named, Offload, Plan, Recompute
from moe_overlap.plan.serialize import content_sha256
from moe_overlap.report.search import Finalist, PlanSearch
from moe_overlap.search_flags import PlansAsFlags, Target, with_precision, without_layout
from moe_overlap.sharded_search import Processes, job_sha256, search_shards
from moe_overlap.shards import Refused, Shard, share_of
from moe_overlap.tuner.capture.cache import CaptureFiles, Graphs, cache_folder, cpu_graphs, stage_requests
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.capture.library import Libraries
from moe_overlap.tuner.capture.request import Request
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.hardware import Dispatcher
from moe_overlap.tuner.cost.simulate.step import predict_plan
from moe_overlap.tuner.search.bounds import Bounds
from moe_overlap.tuner.search.dispatchers import FIRST, LIBRARIES, Side, runs, search_dispatchers
from moe_overlap.tuner.search.fitting import module_sets
from moe_overlap.tuner.search.hidden import HiddenLayout, search_hidden
from moe_overlap.tuner.search.part_tables import PartTables
from moe_overlap.tuner.search.pipeline.per_stage import StagedPlan, StageSearch
from moe_overlap.tuner.search.pipeline.sub_meshes import MeshPlan
from moe_overlap.tuner.search.solution import Status
from moe_overlap.tuner.search.space import (
    SEARCH_SPACES,
    MemoryChoice,
    Restriction,
    Run,
    SearchSpace,
    UniformLayout,
    uniform_layouts,
    uniform_plan,
)
from moe_overlap.tuner.search.uniform import Accepts, RankedLayout, UniformSearch, search_uniform
from moe_overlap.tuner.search.uniform_cost import UniformCosts, UniformTask, variant_plans
from moe_overlap.tuner.write.argument_file import layout_flags
from moe_overlap.tuner.write.dispatcher_flags import by_dispatcher, with_dispatcher
from moe_overlap.tuner.write.upstream_rules import is_upstream_plan
from moe_overlap.tuner.write.upstream_values import values_of

SPACES = ("megatron", "recompute")
"""Search spaces of plans that are executed."""
BEYOND = tuple(name for name in SEARCH_SPACES if name not in SPACES)
"""Search spaces with plans that no runtime executes today."""
KEPT = 20
"""Layouts that are ranked and read again as flags."""
MODULE_SETS = 1
"""The first so many sets of modules may be recomputed: each is captured on its own."""


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
    bare, dropped, further, job = _asked(words, cluster, settings, options)
    libraries = libraries or Libraries(CaptureFiles(cache_folder(), options.get("tell")))
    on_cpu = cluster.measured is not None and cluster.measured.device == "cpu"
    graphs = options.get("graphs") or (partial(cpu_graphs, tell=options.get("tell")) if on_cpu else libraries.graphs)
    # Plans are read from flags of their own, which stand in no file that names the model.
    options = given_options = Options(**{**options, "graphs": graphs, "name": job.model.name})
    space = _space(settings)
    task, bounds = _task(job, cluster, narrow_space(space), graphs, options, settings.averages)
    run = _run_of(job, cluster)
    layouts = _layouts(job, run, space)
    deadline = begun + settings.seconds
    if graphs == libraries.graphs:
        task = _captured_ahead(task, job, layouts, libraries)
    accepts = _accepted(task, settings.target, bare)
    said = PlansAsFlags(task, bare, settings.target, cluster.gpus)

    def side(dispatcher: Dispatcher) -> Side:
        under = _by(job, dispatcher)
        other, other_bounds = _task(under, cluster, narrow_space(space), graphs, options, settings.averages)
        return Side(task=dataclasses.replace(other, modules=task.modules), bounds=other_bounds)

    admits = said.is_read if settings.target != "any" else lambda plan: True

    def search(shard: Shard) -> tuple[UniformSearch, Refused]:
        is_said = shard.index == 1 or settings.processes.shard is not None
        progress = settings.progress if is_said else lambda done, total, best: None
        own, costs = share_of(layouts, shard), UniformCosts(task)
        return search_uniform(own, costs, bounds, accepts, admits, KEPT, deadline, progress=progress), said.refused

    asked = (bare, settings.target, str(settings.space), settings.averages, str(settings.seconds))
    sha256 = partial(job_sha256, asked, cluster, given_options)
    found, said.refused = search_shards(search, settings.processes, sha256, KEPT)
    found, outcomes = search_dispatchers(
        found, layouts, task, further, side, KEPT, accepts, admits, deadline, settings.progress
    )
    staged: StageSearch | None = None
    if settings.target == "any":
        job, layouts, found = _of_one_dispatcher(job, layouts, found)
        wide, wide_bounds = _task(job, cluster, space, graphs, options, settings.averages)
        # Beyond what runs whole layers are recomputed.
        wide = dataclasses.replace(wide, modules=(), operators=(wide if layouts[0].dispatcher else task).operators)
        shared = settings.progress, run, settings.processes.jobs
        beyond = search_beyond(found, layouts, wide, wide_bounds, KEPT, deadline, *shared)
        found, staged = beyond.uniform, beyond.staged
    is_interrupted = found.is_interrupted or (staged is not None and staged.is_interrupted)
    if found.solution.value is None and (staged is None or staged.solution.value is None):
        if is_interrupted:
            raise KeyboardInterrupt
        raise does_not_fit(found, cluster, said.refused, task.machine.memory.certainty)
    # The flags say the precision, and a plan file is of the user's own layout.
    options = Options(**{**options, "precision": None, "plan": None})
    if settings.target == "any":
        extrapolating = machine_for(job, cluster, options)[1]
        finalists = free_finalists(beyond, wide, KEPT, partial(said.read, layouts[0].dispatcher), extrapolating)
    else:
        finalists = _finalists(found, said, cluster, options)
    deadline = -math.inf if found.solution.status is Status.TIME_LIMIT or is_interrupted else deadline
    listed = _listed_as(task, words)
    hidden = partial(search_hidden, found, layouts, listed, bounds, SCREENED, accepts=accepts, admits=admits)
    read = partial(said.finalist, cluster=cluster, options=options)
    finalists, answered, is_late = _decided(finalists, hidden, read, cluster, settings, deadline, listed, options)
    chosen = answered.chosen
    answer = PlanSearch(
        target=settings.target,
        space=space.name,
        cluster=cluster,
        words=tuple(bare),
        chosen=chosen,
        tuned=answered.tuned,
        screened=answered.screened,
        graphs=answered.graphs,
        others=tuple(finalist for finalist in finalists if finalist is not chosen),
        found=found,
        refused=tuple(said.refused),
        baseline=_baseline(words, cluster, given_options) if settings.has_baseline else None,
        dropped=dropped,
        sharding=search_sharding(chosen.problem, wide, deadline, is_late) if space.shards_operators else None,
        seconds=time.monotonic() - begun,
        staged=staged,
        is_interrupted=is_interrupted or is_late,
        dispatchers=outcomes,
    )
    return _with_changes(answer, words, given_options, options)


def _asked(
    words: Sequence[str], cluster: Cluster, settings: SearchSettings, options: Options
) -> tuple[list[str], dict[str, str], tuple[Dispatcher, ...], Job]:
    """The user's flags without their layout, those that are dropped, the dispatchers that are searched, and the job.

    Raises:
        ConfigError: the flags are wrong whatever the layout, or nodes differ.
    """
    require_equal_groups(cluster)
    bare, dropped = without_layout(tuple(expand_files(words)), settings.target)
    bare = with_precision(bare, options.get("precision"))
    bare, further = with_dispatcher(bare, cluster, settings.frees_dispatcher)
    job = _by(_described(words, bare, cluster, options), FIRST if further else "")
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
    changes = changes_of(own, answer.written.flags, answer.baseline, answer.cluster, **precise)
    return dataclasses.replace(answer, changes=changes)


def _by(job: Job, dispatcher: str) -> Job:
    """The job with the dispatcher of a layout."""
    if not dispatcher:
        return job
    values: dict[str, Any] = {"moe.moe_token_dispatcher_type": "flex" if dispatcher in LIBRARIES else dispatcher}
    if dispatcher in LIBRARIES:
        values["device.moe_flex_dispatcher_backend"] = dispatcher
    return dataclasses.replace(job, config=with_values(job.config, values))


def _of_one_dispatcher(
    job: Job, layouts: list[UniformLayout], found: UniformSearch
) -> tuple[Job, list[UniformLayout], UniformSearch]:
    """The search with the dispatcher of its best plan alone: wider spaces keep it."""
    if found.solution.value is None:
        return job, layouts, found
    name = found.solution.value.layout.dispatcher
    under = [dataclasses.replace(layout, dispatcher=name) for layout in layouts if runs(name, layout)]
    ranked = tuple(plan for plan in found.ranked if plan.layout.dispatcher == name)
    return _by(job, name), under, dataclasses.replace(found, ranked=ranked)


def _described(words: Sequence[str], bare: Sequence[str], cluster: Cluster, options: Options) -> Job:
    """The job of the flags, whose layout is not looked at.

    Raises:
        ConfigError: the flags are wrong whatever the layout.
    """
    name = named_by(words) or options.get("name")
    try:
        job = read_job([*bare, "--micro-batch-size", "1"], 1)
    except ConfigError:
        # Flags that need several ranks are read with the user's own layout.
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
    """What the search is free to decide, as far as the target executes it.

    Raises:
        ConfigError: the space is not searched.
    """
    if isinstance(settings.space, SearchSpace):
        return settings.space
    if settings.space in BEYOND and settings.target != "any":
        rule = "has plans that nothing executes today (ZeRO 0, 2 and 3, offloading or stages that differ)"
        raise ConfigError("--search-space", settings.space, rule, "add --target any")
    if settings.space not in (*SPACES, *BEYOND):
        raise ConfigError(
            "--search-space", settings.space, "is no search space", f"use {', '.join((*SPACES, *BEYOND))}"
        )
    return SEARCH_SPACES[settings.space]


def _run_of(job: Job, cluster: Cluster) -> Run:
    """The run that layouts are enumerated for."""
    links = cluster.group_of(0)
    return Run(
        gpus=cluster.gpus,
        domain_gpus=max(links.domain_gpus, links.gpus_per_node),
        sequence_length=job.plan.sequence_length,
        global_batch_size=job.plan.global_batch_size,
    )


def _layouts(job: Job, run: Run, space: SearchSpace) -> list[UniformLayout]:
    """The uniform layouts of a space.

    Raises:
        ConfigError: there is none.
    """
    layouts = [
        layout
        for layout in uniform_layouts(job.model, run)
        if space.has(layout, run.gpus) and _has_dispatcher(job, layout)
    ]
    if layouts:
        return layouts
    if space.meshes == (Restriction.ONE_DEVICE,) and run.gpus > job.model.num_layers:
        rule = (
            f"a stage on each of {run.gpus} GPUs needs as many layers, and {job.model.name} has {job.model.num_layers}"
        )
        raise ConfigError("--search-space", space.name, rule, "use fewer GPUs, or another space")
    rule = f"no layout of {run.gpus} GPUs divides the batch and the model"
    raise ConfigError("--global-batch-size", run.global_batch_size, rule, "use a multiple of the number of GPUs")


def _has_dispatcher(job: Job, layout: UniformLayout) -> bool:
    """Whether the flags' dispatcher runs a layout: megatron-core's flex dispatcher wants ranks that exchange tokens."""
    is_flex = job.model.num_experts > 0 and job.config.moe.moe_token_dispatcher_type == "flex"
    return not is_flex or layout.expert * layout.expert_tensor > 1


def _task(
    job: Job, cluster: Cluster, space: SearchSpace, graphs: Graphs, options: Options, averages: bool = False
) -> tuple[UniformTask, Callable[[UniformLayout], Bounds]]:
    """The task of the search, and the bounds of its layouts."""
    config = with_values(job.config, {"parallel.sequence_parallel": True})
    described: dict[int, tuple[Plan, ModelDescription]] = {}

    def template(tensor: int) -> tuple[Plan, ModelDescription]:
        if tensor not in described:
            padded = with_values(config, {"parallel.tensor_model_parallel_size": tensor})
            model = describe_model(padded, vocabulary_of(padded)[0], job.model.name)
            every = Devices(mesh=(1, cluster.gpus), ranks=tuple(range(cluster.gpus)))
            stage = dataclasses.replace(job.plan.stages[0], devices=every, recompute=Recompute(), offload=Offload())
            named = Named(name=model.name, sha256=content_sha256(dataclasses.asdict(model)))
            described[tensor] = dataclasses.replace(job.plan, model=named, stages=(stage,)), model
        return described[tensor]

    def captured(plan: Plan, model: ModelDescription) -> Mapping[int, CapturedModel]:
        return graphs(capturable(config), model, plan, job.flags)

    features = features_of(job.config, job.plan.precision, job.flags)
    machine, _ = machine_for(job, cluster, options)
    recorded = options.get("expert_load")

    @cache
    def load(expert: int) -> float:
        return 1.0 if recorded is None else busiest_load(recorded, job.model.num_experts, expert)

    has_modules = space.recomputes and not space.all_layers
    task = UniformTask(
        templates=template,
        graphs=captured,
        machine=machine,
        features=features,
        space=space,
        load=load,
        averages=averages,
        modules=tuple(islice(module_sets(template(1)[0], job.model, features), MODULE_SETS if has_modules else 0)),
    )
    of_tensor: dict[int, Bounds] = {}

    def bounds(layout: UniformLayout) -> Bounds:
        if layout.tensor not in of_tensor:
            plan, model = template(layout.tensor)
            of_tensor[layout.tensor] = Bounds(
                model=model, template=plan, machine=machine, features=features, space=space
            )
        return of_tensor[layout.tensor]

    return task, bounds


def _captured_ahead(task: UniformTask, job: Job, layouts: Sequence[UniformLayout], libraries: Libraries) -> UniformTask:
    """The task, for which one process has captured what nearly all layouts are put together from."""
    config = capturable(with_values(job.config, {"parallel.sequence_parallel": True}))
    first = {layout.ranks: layout for layout in layouts}
    requests: list[Request] = []
    plain: dict[tuple[int, int, int, int], Request] = {}
    for layout in first.values():
        (plan, model), before = task.templates(layout.tensor), len(requests)
        for variant in variant_plans(task, uniform_plan(plan, model.num_layers, layout)):
            requests += [
                request for of_stage in stage_requests(config, model, variant).values() for request in of_stage
            ]
        (plain[layout.ranks], *_) = requests[before:]
    libraries.prepare(requests, all_layouts=False)
    library = libraries.of(requests[0])
    tables = PartTables(library, plain, layouts, job.plan.sequence_length)
    return dataclasses.replace(task, operators=tables.of)


def _accepted(task: UniformTask, target: Target, bare: Sequence[str]) -> Accepts:
    """Whether the target runs a plan."""

    said = grouped(bare)
    recipe = said.get("--fp8-recipe", ("delayed",))[-1] if "--fp8-format" in said else None

    @cache
    def settings_by(dispatcher: str) -> Mapping[str, Any]:
        return values_of(grouped(by_dispatcher(bare, dispatcher)))

    def accepts(layout: UniformLayout, memory: MemoryChoice) -> bool:
        template, model = task.templates(layout.tensor)
        plan = uniform_plan(template, model.num_layers, layout, memory)
        if target == "any":
            return True
        if target == "megatron-lm":
            return is_upstream_plan(plan, settings_by(layout.dispatcher))
        try:
            refuse_unsupported(dataclasses.replace(plan, precision="fp32"))
        except ConfigError:
            return False
        return not shares_scales(recipe, len(plan.stages))

    return accepts


def _listed_as(task: UniformTask, words: Sequence[str]) -> UniformTask:
    """The task for plans with instruction lists, which are replayed as CUDA graphs where the user's flags ask for it."""
    replays = without_graphs(words)[1]
    return dataclasses.replace(task, features=dataclasses.replace(task.features, listed_graphs=replays))


def _finalists(found: UniformSearch, said: PlansAsFlags, cluster: Cluster, options: Options) -> list[Finalist]:
    """The ranked plans, read from their flags and predicted, in the order of the search.

    Raises:
        ConfigError: none is left, as measured operators of a machine may say otherwise than the search.
    """
    finalists = []
    for ranked in found.ranked:
        finalist = said.finalist(ranked, cluster, options)
        if not finalist.prediction.fits:
            verdict = f"{finalist.prediction.memory_verdict}: {finalist.prediction.overflow[0]}"
            said.refused.append((ranked.name, verdict))
            continue
        finalists.append(finalist)
    if not finalists:
        raise ConfigError("the search", "", f"no plan is left: {said.refused[-1][1]}", "use more GPUs")
    return finalists


def _decided(
    finalists: list[Finalist],
    hidden: Callable[..., Sequence[HiddenLayout]],
    read: Reading,
    cluster: Cluster,
    settings: SearchSettings,
    deadline: float,
    listed: UniformTask,
    options: Options,
) -> tuple[list[Finalist], Overlapped, bool]:
    """The finalists in the order of their simulated steps, the fastest with its overlap, and whether Ctrl-C came in between."""
    try:
        if settings.target == "any":
            finalists = simulated_until_ahead(finalists, deadline)
        else:
            finalists = simulated_finalists(finalists, deadline)
        # A search that takes all micro-batches for their mean answers with what it takes for the best.
        finalists = finalists if settings.averages else in_order(finalists)
        if settings.target != "moe-overlap":
            return finalists, Overlapped(chosen=finalists[0], tuned=None), False
        hidden = partial(hidden, deadline=deadline, progress=settings.progress)
        limits, seconds = settings.overlap_limits, settings.solver_seconds
        asked = limits, seconds, deadline, listed.features.listed_graphs
        return finalists, decide_overlaps(finalists, hidden, read, cluster, *asked, **options), False
    except KeyboardInterrupt:
        finalists = listed_alone(finalists)
        return finalists, Overlapped(chosen=finalists[0], tuned=None), True


def _baseline(words: Sequence[str], cluster: Cluster, options: Options) -> Prediction | None:
    """The user's own layout, where the flags have one that runs on these GPUs."""
    # Where they overlap nothing, flags that ask for captured graphs are those of the run without them.
    for said in (words, without_graphs(words)[0]):
        try:
            problem = problem_of(said, cluster, options)
            return predict_plan(problem.plan, problem)
        except ConfigError:
            continue
    return None
