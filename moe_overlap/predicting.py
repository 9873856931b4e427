"""Predict a run from its Megatron flags: what `tools/predict.py` prints, as a function. No torch where its layouts are cached."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from megatron.training.cli.arguments import expand_files, parse
from megatron.training.cli.config import Config
from megatron.training.cli.config_fields import DeviceConfig, PrecisionConfig
from megatron.training.cli.sizes import describe_model, known_vocab_size
from megatron.training.cli.validation import validate
from megatron.training.plan_flags import plan_from_flags
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.expert_load import read_expert_loads, shares_by_layer
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan, Precision
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import load_plan
from moe_overlap.refined_job import job_key
from moe_overlap.speed_flags import features_of, grouped, without_newer, zero_level
from moe_overlap.tuner.capture.cache import CaptureError, cached_captures
from moe_overlap.tuner.capture.graph import CapturedModel, Implementation, Layout
from moe_overlap.tuner.capture.request import NO_RECOMPUTATION, Request, layer_kinds, prediction_kinds
from moe_overlap.tuner.cost.analytic import Machine, Prediction, machine_of, prepare, price, stage_variants
from moe_overlap.tuner.cost.exchange_costs import exchange_costs
from moe_overlap.tuner.cost.hardware import NOT_REFINED, Constants, Features, shipped_constants
from moe_overlap.tuner.cost.measured import constants_of, lookup_of, operator_keys, refined_of
from moe_overlap.tuner.cost.simulate.step import SimulatedStep, simulate_step, with_lists, with_refined
from moe_overlap.tuner.profile.database import OperatorKey

Flags = Mapping[str, tuple[str, ...]]
"""The words of a command line, grouped by flag."""
Graphs = Callable[[Config, ModelDescription, Plan, Flags], Mapping[int, CapturedModel]]
"""Captured models by stage."""
PRECISIONS: dict[str, PrecisionConfig] = {
    "bf16": PrecisionConfig(),
    "fp16": PrecisionConfig(fp16=True),
    "fp8": PrecisionConfig(fp8="hybrid", fp8_recipe="tensorwise"),
    "mxfp8": PrecisionConfig(fp8="e4m3", fp8_recipe="mxfp8"),
    "nvfp4": PrecisionConfig(fp4="e2m1"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A configuration, understood."""

    config: Config
    model: ModelDescription
    plan: Plan
    flags: Flags


def read_job(words: Sequence[str], num_gpus: int, precision: Precision | None = None, plan: str | None = None) -> Job:
    """A command line for a number of GPUs.

    Args:
        words: Megatron flags; `@FILE` stands for the words in a file.
        precision: in place of what the flags say.
        plan: file of a plan that decides in place of the flags.
    Raises:
        ConfigError: the flags are wrong, or do not describe the vocabulary.
    """
    written = list(expand_files(words))
    flags = grouped(written)
    named = [word for word in words if word.startswith("@")][:1]
    parsed = parse(without_newer(written))
    config = parsed.config
    if precision is not None:
        bf16 = precision != "fp16"
        optimizer = dataclasses.replace(config.optimizer, bf16=bf16)
        config = dataclasses.replace(config, optimizer=optimizer, precision=PRECISIONS[precision])
    validate(config, num_gpus)
    vocabulary = known_vocab_size(config)
    if vocabulary is None:
        raise ConfigError("--vocab-size", "", "the flags alone do not tell the vocabulary", "add --vocab-size")
    name = named[0][1:].rpartition("/")[2].partition(".")[0] if named else parsed.name
    model = describe_model(config, vocabulary, name)
    if plan is not None:
        decided = load_plan(plan)
        validate_plan(decided, model, plan)
    else:
        decided = plan_from_flags(config, model, num_gpus)
        level = zero_level(flags)
        stages = (dataclasses.replace(stage, zero_level=level) for stage in decided.stages)
        decided = dataclasses.replace(decided, stages=tuple(stages))
    return Job(config, model, decided, flags)


class Options(TypedDict, total=False):
    """What may be said of a prediction beside the flags and the machines."""

    precision: Precision | None
    """In place of what the flags say."""
    plan: str | None
    """File of a plan that decides in place of the flags."""
    software: str | None
    """Release whose efficiencies count; default the newest that was measured."""
    expert_load: str | None
    """File of --log-expert-load: the busiest ranks set the pace. Default: balanced routing."""
    graphs: Graphs | None
    """Captured models of the stages; default the cached capture."""
    constants: Constants | None
    """Default those of constants.json."""


def predict(words: Sequence[str], cluster: Cluster, **options: Unpack[Options]) -> Prediction:
    """Seconds and bytes of a run.

    Args:
        words: Megatron flags, or `@FILE`.
        cluster: the machines; all of their GPUs run.
    Raises:
        ConfigError: the flags or the files of the options are wrong, or the model cannot be captured.
    """
    task = task_of(words, cluster, options)
    return predicted_of(task, task.job.plan)


def simulated(words: Sequence[str], cluster: Cluster, **options: Unpack[Options]) -> SimulatedStep:
    """A step of a run, instruction by instruction, on one rank of every stage. Arguments as `predict` takes them.

    Raises:
        ConfigError: beside what `predict` raises, what cannot be lowered to instructions.
    """
    task = task_of(words, cluster, options)
    return simulate_step(task.job.plan, task.job.model, task.graphs, task.machine, task.features)


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A configuration with everything that prices it, and its plans of other overlap."""

    job: Job
    graphs: Mapping[int, CapturedModel]
    features: Features
    machine: Machine
    extrapolating: tuple[str, ...]


def predicted_of(task: Task, plan: Plan) -> Prediction:
    """Seconds and bytes of a plan that has the task's parallel layout."""
    model, machine = task.job.model, task.machine
    families = prepare(plan, model, task.graphs, task.features, machine.load)
    closed = price(plan, model, families, machine, task.features, task.extrapolating)
    if not plan.transfers and not any(stage.overlap.is_listed for stage in plan.stages):
        if machine.refined == NOT_REFINED:
            return closed
        return with_refined(closed, plan, model, task.graphs, machine, task.features)
    return with_lists(closed, plan, model, task.graphs, machine, task.features)


def task_of(words: Sequence[str], cluster: Cluster, options: Options) -> Task:
    """Read, capture and look up; arguments as `predict` takes them."""
    job = read_job(words, cluster.gpus, options.get("precision"), options.get("plan"))
    features = features_of(job.config, job.plan.precision, job.flags)
    graphs, constants, expert_load = options.get("graphs"), options.get("constants"), options.get("expert_load")
    measured = cluster.measured
    if graphs is None and measured is not None and measured.device == "cpu":
        graphs = cpu_graphs
    captured = (graphs or cached_graphs)(job.config, job.model, job.plan, job.flags)
    load = _busiest(expert_load, job) if expert_load is not None else 1.0
    lookup = None
    if measured is not None:
        constants = constants or constants_of(measured, cluster.group_of(0).gpu.name)
        lookup = lookup_of(cluster, operator_keys(job.plan, job.model, captured, features, load))
    machine, extrapolating = machine_of(
        cluster, constants or shipped_constants(), options.get("software"), load, lookup
    )
    refined = refined_of(cluster, job_key(job.model, job.plan))
    machine = dataclasses.replace(machine, refined=refined, exchanges=exchange_costs(cluster))
    return Task(job, captured, features, machine, extrapolating)


def job_operators(words: Sequence[str], ranks: int, device: str) -> list[OperatorKey]:
    """The operators that a configuration runs, for measuring them ahead.

    Args:
        words: Megatron flags, or `@FILE`.
        device: cpu or cuda.
    Raises:
        ConfigError: the flags are wrong, or do not describe the vocabulary.
    """
    job = read_job(words, ranks)
    graphs = (cpu_graphs if device == "cpu" else cached_graphs)(job.config, job.model, job.plan, job.flags)
    return operator_keys(job.plan, job.model, graphs, features_of(job.config, job.plan.precision, job.flags))


def cpu_graphs(config: Config, model: ModelDescription, plan: Plan, flags: Flags) -> Mapping[int, CapturedModel]:
    """`cached_graphs` of what a CPU runs: megatron-core's own modules, whatever the flags choose."""
    return _cached(stage_requests(config, model, plan, "torch"), model)


def cached_graphs(config: Config, model: ModelDescription, plan: Plan, flags: Flags) -> Mapping[int, CapturedModel]:
    """Captured models of the stages from the user's cache; what is not there is captured, which takes seconds and torch.

    Raises:
        ConfigError: a part of the model cannot be captured.
    """
    return _cached(stage_requests(config, model, plan), model)


def _cached(requests: Mapping[int, list[Request]], model: ModelDescription) -> dict[int, CapturedModel]:
    asked = [request for several in requests.values() for request in several]
    try:
        found = dict(zip(map(Request.sha256, asked), cached_captures(asked, cache_folder()), strict=True))
    except CaptureError as error:
        raise ConfigError("the model", "", f"cannot be captured: {error}", "report these flags") from error
    return {
        index: joined([found[request.sha256()] for request in several], model) for index, several in requests.items()
    }


def stage_requests(
    config: Config, model: ModelDescription, plan: Plan, implementation: Implementation = "te"
) -> dict[int, list[Request]]:
    """What has to be captured, by stage: one request for each variant of recomputation.

    Products below bf16 run the operators of bf16 and are priced otherwise; what offloads changes no operator either. On a GPU
    megatron-core's own modules run fused kernels, too: attention aside they are taken as Transformer Engine's. A CPU has no
    library that exchanges tokens: it runs all-to-alls.
    """
    precision = plan.precision if plan.precision in ("fp32", "fp16") else "bf16"
    dispatcher, backend = config.moe.moe_token_dispatcher_type, config.device.moe_flex_dispatcher_backend
    if dispatcher == "flex" and implementation == "torch":
        dispatcher = "alltoall"
    config = dataclasses.replace(
        config,
        precision=PRECISIONS.get(precision, PrecisionConfig()),
        device=DeviceConfig(moe_flex_dispatcher_backend=backend) if dispatcher == "flex" else DeviceConfig(),
        moe=dataclasses.replace(config.moe, moe_token_dispatcher_type=dispatcher),
    )
    requests = {}
    for index, stage in enumerate(plan.stages):
        layout = Layout(
            tensor=stage.tensor,
            context=stage.context,
            expert=stage.expert,
            expert_tensor=stage.expert_tensor if model.num_experts else 1,
            sequence_parallel=config.parallel.sequence_parallel and stage.tensor > 1,
            precision=precision,
        )
        requests[index] = [
            Request(config=config, model=model, layout=layout, implementation=implementation, variant=variant)
            for variant in sorted(stage_variants(stage), key=lambda name: (name != NO_RECOMPUTATION, name))
        ]
    return requests


def joined(variants: Sequence[CapturedModel], model: ModelDescription) -> CapturedModel:
    """One captured model of several variants' parts."""
    parts = tuple(part for captured in variants for part in captured.parts)
    return dataclasses.replace(
        variants[0], parts=parts, layer_kinds=layer_kinds(model), mtp_kinds=prediction_kinds(model)
    )


def cache_folder() -> Path:
    """Where captured layouts are kept: as the XDG base directories say."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_overlap" / "captures"


def _busiest(path: str, job: Job) -> float:
    """Rows of the busiest rank of an expert group over the mean, averaged over the layers.

    Raises:
        ConfigError: the file is of a model with another number of experts.
    """
    groups, experts = job.plan.stages[0].expert, job.model.num_experts
    ratios = []
    for layer, shares in shares_by_layer(read_expert_loads(path)).items():
        if len(shares) != experts:
            rule = f"its layer {layer} has {len(shares)} experts, the model {experts or 'none'}"
            raise ConfigError("--expert-load", path, rule, "give the file that a run of this model wrote")
        each = len(shares) // groups
        ratios.append(groups * max(sum(shares[rank * each : (rank + 1) * each]) for rank in range(groups)))
    return sum(ratios) / len(ratios)
