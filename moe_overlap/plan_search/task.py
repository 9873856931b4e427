"""The task of a plan search: the run, its layouts, what prices them, the rules of the target, and captures made ahead.

`task_of` describes the run to tuner/search, `layouts_of` enumerates what is searched, `refusals` says what the target does not
run, and why; `captured_ahead` captures in one process what nearly all layouts are put together from.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

from megatron.training.cli.sizes import describe_model
from megatron.training.plan_flags import require_flags_of_stores
from megatron.training.plan_values import with_values
from moe_overlap.api import Options, busiest_load, machine_for
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.describe.readers.predicted_flags import grouped
from moe_overlap.job import Job, capturable, features_of, vocabulary_of
from moe_overlap.plan.capabilities import refuse_unsupported, shares_scales
from moe_overlap.plan.plan import Devices, Named, Offload, Plan, Recompute
from moe_overlap.plan.serialize import content_sha256
from moe_overlap.plan_search.flags import Target, as_priced
from moe_overlap.tuner.capture.cache import Graphs, stage_requests
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.capture.library import Libraries
from moe_overlap.tuner.capture.request import Request
from moe_overlap.tuner.search.bounds import Bounds
from moe_overlap.tuner.search.dispatchers import LIBRARIES
from moe_overlap.tuner.search.fitting import module_sets
from moe_overlap.tuner.search.part_tables import PartTables
from moe_overlap.tuner.search.space import (
    MemoryChoice,
    Restriction,
    Run,
    SearchSpace,
    UniformLayout,
    uniform_layouts,
    uniform_plan,
)
from moe_overlap.tuner.search.uniform import Accepts
from moe_overlap.tuner.search.uniform_cost import UniformTask, variant_plans
from moe_overlap.tuner.write.dispatcher_flags import by_dispatcher
from moe_overlap.tuner.write.upstream_rules import PAIRED, upstream_plan_errors
from moe_overlap.tuner.write.upstream_values import values_of

MODULE_SETS = 1
"""The first so many sets of modules may be recomputed: each is captured on its own."""


ALLOWING = "--allow-micro-batch-change"
"""The flag by which a search may take another micro-batch where that changes what is trained."""


def with_dispatcher_of(job: Job, dispatcher: str) -> Job:
    """The job with the dispatcher of a layout."""
    if not dispatcher:
        return job
    values: dict[str, Any] = {"moe.moe_token_dispatcher_type": "flex" if dispatcher in LIBRARIES else dispatcher}
    if dispatcher in LIBRARIES:
        values["device.moe_flex_dispatcher_backend"] = dispatcher
    return dataclasses.replace(job, config=with_values(job.config, values))


def run_of(job: Job, cluster: Cluster, micro_batch: int | None = None) -> Run:
    """The run that layouts are enumerated for, with this micro-batch alone if one is given."""
    links = cluster.group_of(0)
    return Run(
        gpus=cluster.gpus,
        domain_gpus=max(links.domain_gpus, links.gpus_per_node),
        sequence_length=job.plan.sequence_length,
        global_batch_size=job.plan.global_batch_size,
        micro_batch=micro_batch,
    )


def layouts_of(job: Job, run: Run, space: SearchSpace) -> list[UniformLayout]:
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
    if run.micro_batch is not None:
        rule = f"no layout of {run.gpus} GPUs has micro-batches of so many samples, and others drop other tokens"
        raise ConfigError("--micro-batch-size", run.micro_batch, rule, f"correct it, or allow others by {ALLOWING}")
    rule = f"no layout of {run.gpus} GPUs divides the batch and the model"
    raise ConfigError("--global-batch-size", run.global_batch_size, rule, "use a multiple of the number of GPUs")


def _has_dispatcher(job: Job, layout: UniformLayout) -> bool:
    """Whether the flags' dispatcher runs a layout: megatron-core's flex dispatcher wants ranks that exchange tokens."""
    is_flex = job.model.num_experts > 0 and job.config.moe.moe_token_dispatcher_type == "flex"
    return not is_flex or layout.expert * layout.expert_tensor > 1


def task_of(
    job: Job, cluster: Cluster, space: SearchSpace, graphs: Graphs, options: Options, averages: bool = False
) -> tuple[UniformTask, Callable[[UniformLayout], Bounds]]:
    """The task of the search, and the bounds of its layouts."""
    config = with_values(job.config, {"parallel.sequence_parallel": True})
    described: dict[int, tuple[Plan, ModelDescription]] = {}

    def template(tensor: int) -> tuple[Plan, ModelDescription]:
        if tensor not in described:
            padded = with_values(config, {"parallel.tensor_model_parallel_size": tensor})
            model = describe_model(padded, vocabulary_of(padded, job.model.name)[0], job.model.name)
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
        return busiest_load(recorded, job.model.num_experts, expert)

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


def captured_ahead(
    task: UniformTask, job: Job, layouts: Sequence[UniformLayout], libraries: Libraries, shares: int = 1
) -> UniformTask:
    """The task, for which one process has captured what nearly all layouts are put together from.

    Args:
        shares: of the layouts, each of which a process searches.
    """
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
    tables = PartTables(library, plain, layouts, job.plan.sequence_length, shares)
    return dataclasses.replace(task, operators=tables.of)


def paired_task(task: UniformTask, bare: Sequence[str]) -> UniformTask | None:
    """The task of the same run with Megatron-LM's overlap of all-to-alls; None where the flags say already whether it has it.

    Args:
        bare: the user's flags without their layout.
    """
    if PAIRED[0] in grouped(bare) or task.features.overlap_shared_expert or not task.templates(1)[1].num_experts:
        return None
    features = dataclasses.replace(task.features, overlap_experts=True, delay_weight_gradients=True)
    return dataclasses.replace(task, features=features)


def stores_refusal(job: Job) -> ConfigError | None:
    """The reason why parameter stores, which all ZeRO levels but 1 and offloading need, do not run the job."""
    stages = tuple(dataclasses.replace(stage, zero_level=0) for stage in job.plan.stages)
    try:
        refuse_unsupported(dataclasses.replace(job.plan, stages=stages))
    except ConfigError as error:
        field = error.subject.rpartition(" ")[2]
        described = "a model with --mtp-num-layers" if field == "mtp_stage" else f"{field} {error.value}"
        return ConfigError(field, error.value, f"{described} is {error.rule}", error.fix)
    try:
        require_flags_of_stores("such a plan", job.config)
    except ConfigError as error:
        return ConfigError(error.subject, "", f"{error.subject}: {error.rule}", error.fix)
    return None


Refusals = Callable[[UniformLayout, MemoryChoice], ConfigError | None]


def refusals(task: UniformTask, target: Target, bare: Sequence[str]) -> Refusals:
    """The rule by which the target does not run a plan; None where it does, and where none need run it.

    Plans with Megatron-LM's overlap are run by Megatron-LM, whatever the target.
    """

    flags = grouped(bare)
    recipe = flags.get("--fp8-recipe", ("delayed",))[-1] if "--fp8-format" in flags else None

    @cache
    def settings_by(dispatcher: str, paired: bool) -> Mapping[str, Any]:
        arguments = by_dispatcher(as_priced(bare, "megatron-lm"), dispatcher)
        return values_of(grouped([*arguments, *(PAIRED if paired else ())]))

    def refusal(layout: UniformLayout, memory: MemoryChoice) -> ConfigError | None:
        if target == "any" and not layout.paired:
            return None
        template, model = task.templates(layout.tensor)
        plan = uniform_plan(template, model.num_layers, layout, memory)
        if target == "megatron-lm" or layout.paired:
            return next(iter(upstream_plan_errors(plan, settings_by(layout.dispatcher, layout.paired))), None)
        try:
            refuse_unsupported(plan if plan.has_stores else dataclasses.replace(plan, precision="fp32"))
        except ConfigError as error:
            return error.with_traceback(None)
        if shares_scales(recipe, len(plan.stages)):
            rule = "its scales are not reduced over the ranks of one stage alone"
            return ConfigError("--fp8-recipe", "delayed", rule, "use tensorwise, blockwise or mxfp8")
        return None

    return refusal


def accepted(refusal: Refusals) -> Accepts:
    """Whether a plan is run."""
    return lambda layout, memory: refusal(layout, memory) is None


def commonest_refusal(refusal: Refusals, layouts: Sequence[UniformLayout]) -> ConfigError | None:
    """The rule by which most of some layouts are not run, in its simplest form; None where all are."""
    errors = [error for layout in layouts if (error := refusal(layout, MemoryChoice())) is not None]
    (often,) = Counter(str(error) for error in errors).most_common(1) or ((None, 0),)
    return next((error for error in errors if str(error) == often[0]), None)
