"""Predict and tune a run from its Megatron flags.

Commands and captures apart, five files know both `megatron.training` and the tuner: this one, job.py, and in plan_search/
search.py, flags.py and task.py, which search without a layout.

1. `read_job` (job.py) understands a command line: configuration, model, plan.
2. `problem_of` makes of it the tuner's `Problem`: captured graphs, features, the machine with its constants, and the settings on
   which overlap depends. The tuner reads no flag.
3. `predict` and `tune` hand problems to the tuner; `arguments_to_run` writes the flags that execute its plan.

No torch where the layouts are cached.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

from megatron.training.cli.arguments import expand_files, parse
from megatron.training.cli.config import Config
from moe_overlap.alternatives import NotCaptured, alternatives_of
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError, require
from moe_overlap.describe.expert_load import NATURAL, NATURAL_LOAD, read_expert_loads, shares_by_layer
from moe_overlap.describe.readers.predicted_flags import grouped
from moe_overlap.host_launches import launching_of
from moe_overlap.job import (
    Job,
    capturable,
    executed_by_megatron,
    executed_here,
    features_of,
    listed_run_of,
    may_interleave,
    named_by,
    read_job,
    with_stages_of,
    without_graphs,
)
from moe_overlap.plan.capabilities import GRAPHS_FLAG, require_listable
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.plan.plan import Plan, Precision
from moe_overlap.plan_search.results import Leeway, Tuned
from moe_overlap.tuner.calibrate.refine import Refinement, job_key, refine
from moe_overlap.tuner.capture.cache import Graphs, Tell, cached_graphs, cpu_graphs
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.feasibility import MemoryChange
from moe_overlap.tuner.cost.hardware import Constants, Features, measured_constants, shipped_constants
from moe_overlap.tuner.cost.interference import all_to_all_costs
from moe_overlap.tuner.cost.machine import Machine, machine_of, require_units
from moe_overlap.tuner.cost.prediction import predict_plan
from moe_overlap.tuner.cost.simulate.step import SimulatedStep, simulate_step
from moe_overlap.tuner.limits import check_limits
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.profile.database import OperatorKey
from moe_overlap.tuner.profile.lookup import lookup_of, operator_keys, refined_of
from moe_overlap.tuner.search.dispatchers import uncalibrated
from moe_overlap.tuner.search.fitting import cheapest_change
from moe_overlap.tuner.search.layer.overlap import decide_overlap
from moe_overlap.tuner.write.flags_left_out import LEFT_OUT
from moe_overlap.tuner.write.memory_changes import RUN_BY_MEGATRON_LM, change_flags
from moe_overlap.tuner.write.upstream_rules import upstream_errors
from moe_overlap.tuner.write.upstream_values import values_of


class Options(TypedDict, total=False):
    """Options of a prediction beside the flags and the machines."""

    precision: Precision | None
    """Precision in place of what the flags say."""
    plan: str | None
    """File of a plan that decides in place of the flags."""
    decided: Plan | None
    """A plan that the flags say but for what its stages recompute, which they leave open."""
    name: str | None
    """Name of the model, where no file of flags names it."""
    software: str | None
    """Release whose losses count; default the GPU's median release."""
    expert_load: str | None
    """File of --log-expert-load: the busiest ranks set the pace; or `natural`: NATURAL_LOAD. Default: balanced routing."""
    memory_margin: float | None
    """A plan fits where this quantile of its peak is within the capacity; default 0.95."""
    graphs: Graphs | None
    """Captured models of the stages; default the cached capture."""
    tell: Tell | None
    """Is told before operators are recorded, which takes seconds to minutes."""
    constants: Constants | None
    """Constants of the cost model; default those of constants.json."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedJob:
    """A prediction, with what was read and captured for it.

    Attributes:
        job: as the flags say it, and as this fork runs it on a measured cluster.
        problem: of the job; its plan is the one that is predicted.
        leeway: what the job leaves to advise.
    """

    job: Job
    problem: Problem
    prediction: Prediction
    leeway: Leeway


def leeway_of(arguments: Sequence[str], job: Job, problem: Problem) -> Leeway:
    """Which advice applies: never a flag already set or refused, never a search that cannot improve.

    Args:
        arguments: its flags, or `@FILE`.
        problem: of it, with its plan.
    """
    features, plan = problem.features, problem.plan
    hiding = {
        "--overlap-grad-reduce": features.overlap_grad_reduce,
        # Weights that are not sharded are not gathered.
        "--overlap-param-gather": features.overlap_param_gather or plan.stages[0].zero_level == 0,
    }
    return Leeway(
        data_flags=tuple(flag for flag, is_given in hiding.items() if not is_given),
        may_interleave=may_interleave(job, plan),
        no_overlap=_no_overlap(arguments, problem),
    )


def _no_overlap(arguments: Sequence[str], problem: Problem) -> str:
    """The rule by which a search for an overlap of the job's all-to-alls finds none; empty where no flag decides that."""
    try:
        # What is tuned is executed here, without what other releases have.
        parse(list(expand_files(arguments)))
    except ConfigError as error:
        return str(error)
    if problem.listed.refusal is not None:
        return str(problem.listed.refusal)
    try:
        require_listable(problem.listed, "an instruction list")
    except ConfigError as error:
        # Its fix speaks of the flag that asks for a list, and nobody has asked.
        return f"{error.subject} {error.value}".rstrip() + f": {error.rule}"
    return ""


def predict(arguments: Sequence[str], cluster: Cluster, **options: Unpack[Options]) -> Prediction:
    """Seconds and bytes of a run. Arguments and errors as `predict_job` has them."""
    return predict_job(arguments, cluster, options).prediction


def predict_job(arguments: Sequence[str], cluster: Cluster, options: Options) -> PredictedJob:
    """Seconds and bytes of a run, with the job and the problem of which they are.

    Args:
        arguments: Megatron flags, or `@FILE`.
        cluster: the machines; all of their GPUs run.
    Raises:
        ConfigError: the flags or the files of the options are wrong, or the model cannot be captured.
    """
    job = _job_on(arguments, cluster, options)
    problem, prediction = _predicted(job, cluster, options)
    remedy, tried, alternatives = prediction.remedy, prediction.tried, prediction.alternatives
    if not prediction.fits:
        remedy, tried = cheapest_change(
            prediction,
            problem,
            lambda plan: _captured(job, plan, cluster, options),
            lambda change, plan: _features_with(change, plan, arguments, job, problem, cluster, options),
        )
    leeway = leeway_of(arguments, job, problem)
    if prediction.fits and options.get("plan") is None and "--plan" not in job.flags:
        alternatives = alternatives_of(
            list(expand_files(arguments)),
            problem.plan,
            prediction.launching,
            leeway.data_flags,
            leeway.may_interleave,
            lambda changed: _predict_captured(changed, cluster, options),
        )
    if cluster.measured is not None:
        # Changes measure operators between which those of the job were interpolated: the next answer would be another.
        problem, prediction = _predicted(job, cluster, options)
    prediction = dataclasses.replace(prediction, remedy=remedy, tried=tried, alternatives=alternatives)
    return PredictedJob(job=job, problem=problem, prediction=prediction, leeway=leeway)


def _predicted(job: Job, cluster: Cluster, options: Options) -> tuple[Problem, Prediction]:
    """The tuner's problem of a job, and its prediction without any change."""
    problem = _problem(job, cluster, options)
    prediction = predict_plan(problem.plan, problem)
    launching = launching_of(problem.plan, problem, prediction.predicted.step_seconds, job.flags)
    return problem, dataclasses.replace(prediction, assumed=job.assumed, not_run=job.not_run, launching=launching)


def _predict_captured(arguments: Sequence[str], cluster: Cluster, options: Options) -> Prediction:
    """The prediction of a run whose layers are captured already.

    Raises:
        NotCaptured: they are not.
        ConfigError: as `predict_job`.
    """

    def refuse(text: str) -> None:
        raise NotCaptured(text)

    quick: Options = {**options, "tell": refuse}
    job = _job_on(arguments, cluster, quick)
    if job.not_run:
        raise ConfigError("the change", "", job.not_run[0], "leave it out")
    problem = _problem(job, cluster, quick)
    return predict_plan(problem.plan, problem)


def _features_with(
    change: MemoryChange,
    plan: Plan,
    arguments: Sequence[str],
    job: Job,
    problem: Problem,
    cluster: Cluster,
    options: Options,
) -> Features | None:
    """The features of a job with the flags of a change; None where they do not make the changed plan, or break a rule that the
    job kept: this fork's, or Megatron-LM's where that alone runs the change.

    Args:
        arguments: of the job.
        plan: the changed one.
    """
    if options.get("plan") is not None or "--plan" in job.flags:
        # The file decides, not flags.
        return problem.features
    try:
        changed = _job_on((*expand_files(arguments), *change_flags(change).split()), cluster, options)
    except ConfigError:
        return None
    if changed.plan.stages != plan.stages:
        return None
    before, broken = (set(variant.not_run) for variant in (job, changed))
    if change.kind in RUN_BY_MEGATRON_LM:
        before, broken = (
            set(map(str, upstream_errors(values_of(variant.flags), cluster.gpus))) for variant in (job, changed)
        )
    if not broken <= before:
        return None
    return features_of(changed.config, changed.plan.precision, changed.flags)


def simulated(arguments: Sequence[str], cluster: Cluster, **options: Unpack[Options]) -> SimulatedStep:
    """A step of a run, instruction by instruction, on one rank of every stage. Arguments as `predict` takes them.

    Raises:
        ConfigError: as `predict`; or the plan cannot be lowered to instructions.
    """
    problem = problem_of(arguments, cluster, options)
    return simulate_step(problem.plan, problem)


def tune(
    arguments: Sequence[str],
    cluster: Cluster,
    limits: SearchLimits,
    solver_seconds: float = 5.0,
    traces: Sequence[str | Path] = (),
    **options: Unpack[Options],
) -> Tuned:
    """Choose the overlap of a run, with the cost of its launches from the host. Arguments and errors as `choose_overlap`."""
    tuned = choose_overlap(arguments, cluster, limits, solver_seconds, traces, **options)
    plan, flags = tuned.chosen.decided, grouped(tuned.arguments)
    problem = tuned.problem.replaying(tuned.graphs is not None and tuned.graphs.is_on)
    launching = launching_of(plan, problem, tuned.chosen.seconds, flags, replays_lists=False)
    return dataclasses.replace(tuned, launching=launching)


def choose_overlap(
    arguments: Sequence[str],
    cluster: Cluster,
    limits: SearchLimits,
    solver_seconds: float = 5.0,
    traces: Sequence[str | Path] = (),
    **options: Unpack[Options],
) -> Tuned:
    """Choose the overlap of a run.

    Args:
        arguments: Megatron flags, or `@FILE`, without a plan and without overlap decided by hand. With --moe-overlap-cuda-graphs
            all candidates are priced, and run, with their lists replayed as CUDA graphs.
        cluster: the machines; all of their GPUs run.
        solver_seconds: for each weight-gradient schedule.
        traces: of runs of this job, which refine its prices.
    Raises:
        ConfigError: as `predict` and `refine`; or training refuses a flag, or the flags decide an overlap themselves, or the run
            has one expert rank.
    """
    begun = time.perf_counter()
    check_limits(limits)
    if not solver_seconds > 0:
        raise ConfigError("--time-limit", solver_seconds, "must be greater than 0 seconds", "use 5")
    # This fork executes the answer, so flags of other releases are refused, as in training.
    parse(list(expand_files(arguments)))
    named = named_by(arguments)
    arguments, replays = without_graphs(arguments)
    job = executed_here(_read_on(arguments, cluster, options if named is None else {**options, "name": named}))
    require_executable(job, cluster, options)
    problem = _problem(job, cluster, options)
    _require_open(problem.plan)
    if replays and problem.listed.graphs_refusal is not None:
        raise problem.listed.graphs_refusal
    problem = problem.replaying(replays)
    refinement: Refinement | None = None
    if traces:
        problem, refinement = refine(problem, traces)
    decision = decide_overlap(problem, limits, solver_seconds, None if refinement is None else refinement.steps)
    executed, dropped = arguments_to_run(arguments, decision.chosen.decided, job.config)
    if replays and decision.chosen.decided.is_listed:
        executed = (*executed, GRAPHS_FLAG)
    elif replays:
        dropped = (*dropped, GRAPHS_FLAG)
    return Tuned(
        problem=problem,
        chosen=decision.chosen,
        others=decision.others,
        mix=decision.mix,
        step=decision.step,
        graphs=decision.graphs,
        plain_seconds=decision.baseline_seconds,
        search_seconds=time.perf_counter() - begun,
        arguments=executed,
        dropped=dropped,
        refinement=refinement,
        assumed=job.assumed,
    )


def require_executable(job: Job, cluster: Cluster, options: Options) -> None:
    """Refuse a job whose products the machines cannot compute, before anything is searched for it.

    Raises:
        ConfigError: they have no units for its precision.
    """
    precision = job.plan.precision
    flag = "--fp4-format" if precision == "nvfp4" else "--fp8-format"
    option = options.get("precision")
    named = (flag, " ".join(job.flags.get(flag, ()))) if option is None else ("--precision", option)
    require_units(cluster, precision, *named)


def _require_open(plan: Plan) -> None:
    """Refuse a plan that leaves the search nothing to decide."""
    if plan.is_listed:
        fix = "drop --moe-overlap-* and --plan"
        raise ConfigError("--overlap-only", "", "the flags decide an overlap by hand", fix)
    if all(stage.expert * stage.expert_tensor == 1 for stage in plan.stages):
        rule = "nothing to hide: one expert rank exchanges no tokens"
        raise ConfigError("--overlap-only", "", rule, "use --expert-model-parallel-size 2 or more")


DISPATCHER = "--moe-token-dispatcher-type"


def arguments_to_run(arguments: Sequence[str], plan: Plan, config: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The flags that execute a plan, without `--plan`, and the user's flags that are left out of them.

    Args:
        arguments: the flags for which the plan was decided.
        config: what they were read into.
    """
    expanded = tuple(expand_files(arguments))
    if not plan.runs_lists:
        return expanded, ()
    executed: list[str] = []
    dropped: dict[str, None] = {}
    is_kept = True
    for word in expanded:
        if word.startswith("--"):
            name = word.partition("=")[0]
            dropped |= {name: None} if name in LEFT_OUT else {}
            is_kept = name not in LEFT_OUT and name != DISPATCHER
        executed += [word] if is_kept else []  # Values follow their flag.
    # Instruction lists run on the runtime's own gate and dispatcher, never on megatron-core's.
    gate = ("--moe-gate", "topk") if config.overlap.moe_gate is None else ()
    return (*executed, *gate, DISPATCHER, "irregular"), tuple(dropped)


def problem_of(arguments: Sequence[str], cluster: Cluster, options: Options) -> Problem:
    """The tuner's problem of a command line: read, captured and looked up. Arguments and errors as `predict` has them."""
    return _problem(_job_on(arguments, cluster, options), cluster, options)


def _job_on(arguments: Sequence[str], cluster: Cluster, options: Options) -> Job:
    job = _read_on(arguments, cluster, options)
    # A machine is measured for runs of this fork on it. A plan has its ZeRO levels, and flags without
    # --use-distributed-optimizer ask for level 0, which this fork runs as level 1.
    if "--plan" in job.flags or any(options.get(source) is not None for source in ("plan", "decided")):
        return job
    return executed_by_megatron(job) if cluster.measured is None else executed_here(job)


def _read_on(arguments: Sequence[str], cluster: Cluster, options: Options) -> Job:
    precision, plan = options.get("precision"), options.get("plan")
    job = read_job(arguments, cluster.gpus, precision, plan, host_runs_ahead=cluster.queues, name=options.get("name"))
    decided = options.get("decided")
    return job if decided is None else with_stages_of(job, decided)


def _problem(job: Job, cluster: Cluster, options: Options) -> Problem:
    _constants_of(cluster, options)  # A mistake in them is told before layers are captured, which may take minutes.
    features = features_of(job.config, job.plan.precision, job.flags)
    measured = cluster.measured
    captured = _captured(job, job.plan, cluster, options)
    load = busiest_load(options.get("expert_load"), job.model.num_experts, job.plan.stages[0].expert)
    keys = operator_keys(job.plan, job.model, captured, features, load) if measured is not None else []
    machine, extrapolating = machine_for(job, cluster, options, load, keys)
    if job.model.num_experts and any(stage.expert * stage.expert_tensor > 1 for stage in job.plan.stages):
        extrapolating = (*extrapolating, *uncalibrated(features.dispatcher, cluster.group_of(0).gpu.name))
    refined = refined_of(cluster, job_key(job.model, job.plan))
    return Problem(
        model=job.model,
        plan=job.plan,
        graphs=captured,
        features=features,
        machine=dataclasses.replace(machine, refined=refined, exchanges=all_to_all_costs(cluster)),
        extrapolating=extrapolating,
        listed=listed_run_of(job.config, cluster.gpus, job.flags, cluster.queues, cluster.domain_gpus),
    )


def _constants_of(cluster: Cluster, options: Options) -> Constants:
    """The constants of prices: those of the options, of the measured machine, or the shipped ones.

    Raises:
        ConfigError: a constant of a measured machine, the margin of memory or the release of the software is wrong.
    """
    constants = options.get("constants")
    if constants is None and cluster.measured is not None:
        constants = measured_constants(cluster.measured, cluster.group_of(0).gpu.name)
    constants = (constants or shipped_constants()).with_margin(options.get("memory_margin"))
    constants.require_release(options.get("software"))
    return constants


def machine_for(
    job: Job, cluster: Cluster, options: Options, load: float = 1.0, keys: Sequence[OperatorKey] = ()
) -> tuple[Machine, tuple[str, ...]]:
    """The machine that a job is priced on, and why its prices reach beyond measured steps.

    Args:
        load: rows of the busiest rank of an expert group over the mean.
        keys: operators that a measured cluster measures where its database lacks them.
    Raises:
        ConfigError: as `_constants_of`.
    """
    return machine_of(
        cluster,
        _constants_of(cluster, options),
        options.get("software"),
        load,
        None if cluster.measured is None else lookup_of(cluster, list(keys)),
        precision=job.plan.precision,
        is_moe=job.model.num_experts > 0,
        model=job.model,
    )


def _captured(job: Job, plan: Plan, cluster: Cluster, options: Options) -> Mapping[int, CapturedModel]:
    """The graphs of the stages of a plan on these machines."""
    on_cpu = cluster.measured is not None and cluster.measured.device == "cpu"
    capture = (capturable(job.config), job.model, plan, job.flags)
    if (graphs := options.get("graphs")) is not None:
        return graphs(*capture)
    return (cpu_graphs if on_cpu else cached_graphs)(*capture, tell=options.get("tell"))


def busiest_load(path: str | None, experts: int, groups: int) -> float:
    """Rows of the busiest rank of an expert group over the mean, averaged over the layers.

    Args:
        path: as `Options.expert_load`.
        experts: of the model.
        groups: ranks that they are spread over.
    Raises:
        ConfigError: the file holds no load, or is of a model with another number of experts; a dense model has none.
    """
    if path is None:
        return 1.0
    if path == NATURAL:
        require(experts, "--routing", NATURAL, "the model has no experts", "drop it")
        return NATURAL_LOAD if groups > 1 else 1.0
    ratios = []
    layers = shares_by_layer(read_expert_loads(path))
    if not layers:
        raise ConfigError("--expert-load", path, "holds no record", "give the file that a run wrote")
    for layer, shares in layers.items():
        if not any(shares):
            rule = f"no token of its layer {layer} met an expert"
            raise ConfigError("--expert-load", path, rule, "give the file of a run that trained")
        if len(shares) != experts:
            rule = f"its layer {layer} has {len(shares)} experts, the model {experts or 'none'}"
            raise ConfigError("--expert-load", path, rule, "give the file that a run of this model wrote")
        # An expert rank holds neighbouring experts.
        local = len(shares) // groups
        ratios.append(groups * max(sum(shares[rank * local : (rank + 1) * local]) for rank in range(groups)))
    return sum(ratios) / len(ratios)


def job_operators(arguments: Sequence[str], ranks: int, device: str) -> list[OperatorKey]:
    """The operators that a run executes, for measuring them ahead.

    Args:
        arguments: Megatron flags, or `@FILE`.
        device: cpu or cuda.
    Raises:
        ConfigError: the flags are wrong.
    """
    job = read_job(arguments, ranks)
    graphs = (cpu_graphs if device == "cpu" else cached_graphs)(capturable(job.config), job.model, job.plan, job.flags)
    return operator_keys(job.plan, job.model, graphs, features_of(job.config, job.plan.precision, job.flags))
