"""A question to a plan search: its settings, and a user's flags understood apart from the layout that they say.

`read_request` reads the flags once. All that follows, every plan that is priced, accepted, written or compared, is of this job on
this cluster. The user's own layout is no part of it: their flags stay as they are, for the baseline.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Unpack

from moe_overlap.api import Options, require_executable
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError, require
from moe_overlap.describe.files import printable, whole_number
from moe_overlap.job import Job, named_by, read_job, without_graphs
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.plan_search.flags import Target, as_priced, flags_of, with_precision, without_layout
from moe_overlap.plan_search.free import narrow_space
from moe_overlap.plan_search.processes import Progress, SearchBudget, silent
from moe_overlap.plan_search.task import layouts_of, run_of, stores_refusal, task_of, with_dispatcher_of
from moe_overlap.tuner.capture.cache import CaptureFiles, Graphs, cache_folder, cpu_graphs
from moe_overlap.tuner.capture.library import Libraries
from moe_overlap.tuner.cost.hardware import Dispatcher
from moe_overlap.tuner.limits import PLAN_SEARCH_LIMITS
from moe_overlap.tuner.search.bounds import Bounds
from moe_overlap.tuner.search.dispatchers import FIRST
from moe_overlap.tuner.search.space import (
    NARROW_DEFAULT,
    REMOVED_SPACES,
    SEARCH_SPACES,
    Run,
    SearchSpace,
    UniformLayout,
)
from moe_overlap.tuner.search.uniform_cost import UniformTask
from moe_overlap.tuner.write.argument_file import layout_flags
from moe_overlap.tuner.write.dispatcher_flags import with_dispatcher


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SearchSettings:
    """Settings of a plan search.

    Attributes:
        space: a name of `SEARCH_SPACES`, or a space of its own; None: `full` for this runtime, as far as it executes it for the
            job, `stages` for others.
        seconds: after which the best so far is the answer.
        overlap_limits, solver_seconds: of the overlap search for the first few.
        has_baseline: whether the user's own layout is predicted as well.
        averages: whether the objective takes all micro-batches of a stage for their mean.
        changes_micro_batch: whether other micro-batches than the user's are searched under a capacity of experts, too, where
            each drops other tokens.
        frees_dispatcher: whether the dispatcher is searched although the flags name one; where they name none it is.
        jobs: processes of this host that search.
        progress: called with layouts done, layouts in all, and the best so far.
    """

    target: Target = "moe-overlap"
    space: str | SearchSpace | None = None
    seconds: float = math.inf
    overlap_limits: SearchLimits = PLAN_SEARCH_LIMITS
    solver_seconds: float = 2.0
    has_baseline: bool = True
    averages: bool = False
    changes_micro_batch: bool = False
    frees_dispatcher: bool = False
    jobs: int = 1
    progress: Progress = silent


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """A job without a layout on a cluster, and how a plan for it is searched.

    Attributes:
        deadline: of `time.monotonic`, when the best so far is the answer.
        arguments: the user's flags as they are; `bare` are those without their layout.
        dropped: flags that the run goes without, with the reason.
        other_dispatchers: those that are searched beside the first.
        job: of the bare flags, with the first dispatcher.
        user_options: as the user says them; `options` are those of plans that are read from flags of their own.
        graphs: captures the model under a layout, as `libraries` do, which several searches share, or as the options say.
        layouts: of the whole space, for the GPUs and the batch of `run`.
        replays: whether the flags ask for lists that are replayed as CUDA graphs.
    """

    cluster: Cluster
    settings: SearchSettings
    deadline: float
    arguments: Sequence[str]
    bare: Sequence[str]
    dropped: Mapping[str, str]
    other_dispatchers: tuple[Dispatcher, ...]
    job: Job
    user_options: Options
    options: Options
    graphs: Graphs
    libraries: Libraries
    space: SearchSpace
    run: Run
    layouts: list[UniformLayout]
    replays: bool

    @property
    def predicts_plans(self) -> bool:
        """Whether finalists are predicted as plans and not as flags: for `any`, and in this runtime's spaces of other states."""
        is_wide = self.space != narrow_space(self.space)
        return self.settings.target == "any" or (self.settings.target == "moe-overlap" and is_wide)

    @property
    def budget(self) -> SearchBudget:
        """The limits of the searches of wider spaces."""
        return SearchBudget(self.deadline, self.settings.jobs, self.settings.progress)

    def task(self, job: Job, space: SearchSpace) -> tuple[UniformTask, Callable[[UniformLayout], Bounds]]:
        """Prices and bounds of the plans of a space, for this job or for it with another dispatcher."""
        return task_of(job, self.cluster, space, self.graphs, self.user_options, self.settings.averages)


def read_request(
    arguments: Sequence[str],
    cluster: Cluster,
    settings: SearchSettings,
    deadline: float,
    libraries: Libraries | None = None,
    **options: Unpack[Options],
) -> SearchRequest:
    """Read the user's flags once, apart from their layout.

    Args:
        arguments: Megatron flags, or `@FILE`.
        libraries: default those of the cache.
    Raises:
        ConfigError: the flags are wrong whatever the layout, nodes differ or lack units for the precision, or nothing divides
            the model, the batch and the GPUs.
    """
    require_equal_groups(cluster)
    bare, dropped = without_layout(arguments, settings.target)
    bare = as_priced(with_precision(bare, options.get("precision")), settings.target)
    bare, other_dispatchers = with_dispatcher(bare, cluster, settings.frees_dispatcher)
    job = with_dispatcher_of(_described(arguments, bare, cluster, options), FIRST if other_dispatchers else "")
    flags = {name: values for name, values in job.flags.items() if name not in layout_flags() | dropped.keys()}
    job = dataclasses.replace(job, flags=flags)
    require_executable(job, cluster, options)
    libraries = libraries or Libraries(CaptureFiles(cache_folder(), options.get("tell")))
    on_cpu = cluster.measured is not None and cluster.measured.device == "cpu"
    captured = partial(cpu_graphs, tell=options.get("tell")) if on_cpu else libraries.graphs
    graphs = options.get("graphs") or captured
    # Plans are read from flags of their own, which stand in no file that names the model.
    user_options = Options(**{**options, "graphs": graphs, "name": job.model.name})
    micro_batch = None if settings.changes_micro_batch else kept_micro_batch(arguments, job)
    space, run = _space(settings, job), run_of(job, cluster, micro_batch)
    return SearchRequest(
        cluster=cluster,
        settings=settings,
        deadline=deadline,
        arguments=arguments,
        bare=bare,
        dropped=dropped,
        other_dispatchers=other_dispatchers,
        job=job,
        user_options=user_options,
        # Those flags say the precision, and a plan file is of the user's own layout.
        options=Options(**{**user_options, "precision": None, "plan": None}),
        graphs=graphs,
        libraries=libraries,
        space=space,
        run=run,
        layouts=layouts_of(job, run, space),
        replays=without_graphs(arguments)[1],
    )


def kept_micro_batch(arguments: Sequence[str], job: Job) -> int | None:
    """The user's micro-batch where another would change what is trained: the capacity of experts is a share of its tokens."""
    values = flags_of(arguments).get("--micro-batch-size")
    if job.config.moe.moe_expert_capacity_factor is None or not values:
        return None
    samples = whole_number(values[-1])
    require(samples, "--micro-batch-size", printable(values[-1]), "must be a whole number from 1", "correct it")
    return samples


def _described(arguments: Sequence[str], bare: Sequence[str], cluster: Cluster, options: Options) -> Job:
    """The job of the flags, whose layout is not looked at.

    Raises:
        ConfigError: the flags are wrong whatever the layout.
    """
    name = named_by(arguments) or options.get("name")
    smallest = [*bare, "--micro-batch-size", "1"]
    try:
        job = read_job(smallest, 1)
    except ConfigError:
        try:
            # A dispatch library, which is of several expert ranks alone.
            job = read_job([*smallest, "--expert-model-parallel-size", "2"], 2)
        except ConfigError:
            # Whatever else needs several ranks is read with the user's own layout.
            job = read_job(arguments, cluster.gpus, options.get("precision"))
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


def _space(settings: SearchSettings, job: Job) -> SearchSpace:
    """The search space, as far as the target executes it.

    Raises:
        ConfigError: the space is not searched, or not for this job.
    """
    target, is_ours = settings.target, settings.target == "moe-overlap"
    refusal = stores_refusal(job) if is_ours else None
    default = "full" if is_ours and refusal is None else NARROW_DEFAULT
    space = _named_space(default if settings.space is None else settings.space, target)
    if refusal is not None and len(space.zero_levels) > 1:
        raise ConfigError("--search-space", space.name, refusal.rule, f"use --search-space {NARROW_DEFAULT}")
    return space


def _named_space(name: str | SearchSpace, target: Target) -> SearchSpace:
    """The space of a name, for a target.

    Raises:
        ConfigError: the space is not searched.
    """
    if isinstance(name, SearchSpace):
        return name
    if name in REMOVED_SPACES:
        rule = "was removed: papers compare with it, and tools/benchmark_papers.py searches it"
        raise ConfigError("--search-space", name, rule, f"use {REMOVED_SPACES[name]}")
    require(name in SEARCH_SPACES, "--search-space", name, "is no search space", f"use {', '.join(SEARCH_SPACES)}")
    row = SEARCH_SPACES[name]
    if (space := row.of(target)) is not None:
        return space
    rule = "has plans that Megatron-LM does not execute (stages with states of their own in host memory)"
    raise ConfigError("--search-space", name, rule, "use --target moe-overlap")
