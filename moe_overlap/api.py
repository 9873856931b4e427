"""Predict and tune a run from its Megatron flags: the one bridge between `megatron.training` and the tuner.

1. `read_job` understands a command line: configuration, model, plan.
2. `problem_of` makes of it the tuner's `Problem`: captured graphs, features, the machine with its constants, and the settings on
   which overlap depends. The tuner reads no flag.
3. `predict` and `tune` hand problems to the tuner; `arguments_to_run` writes the flags that execute its plan.

No torch where the layouts are cached.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict, Unpack

from megatron.training.cli.arguments import expand_files, parse
from megatron.training.cli.config import Config
from megatron.training.cli.rules.moe import listed_run
from megatron.training.cli.sizes import describe_model, known_vocab_size, parallel_layout
from megatron.training.cli.validation import validate
from megatron.training.plan_argument import with_plan
from megatron.training.plan_flags import gradient_chunk_bytes, plan_from_flags, plan_of_run
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.expert_load import read_expert_loads, shares_by_layer
from moe_overlap.describe.model import ModelDescription
from moe_overlap.describe.readers.predicted_flags import (
    assumed_vocabulary,
    is_sharded_by_fsdp,
    not_modelled,
    read,
    require_context_heads,
    zero_level,
)
from moe_overlap.plan.capabilities import ListedRun
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.plan.plan import Plan, Precision
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import load_plan
from moe_overlap.report.tuning import Tuned
from moe_overlap.tuner.calibrate.refine import Refinement, job_key, refine
from moe_overlap.tuner.capture.cache import PRECISIONS, Flags, Graphs, cached_graphs, cpu_graphs
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.hardware import Constants, Dispatcher, Features, measured_constants, shipped_constants
from moe_overlap.tuner.cost.hardware import Graphs as CudaGraphs
from moe_overlap.tuner.cost.interference import all_to_all_costs
from moe_overlap.tuner.cost.machine import machine_of
from moe_overlap.tuner.cost.memory import QUANTIZED_ELEMENT
from moe_overlap.tuner.cost.simulate.step import SimulatedStep, predict_plan, simulate_step
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.profile.database import OperatorKey
from moe_overlap.tuner.profile.lookup import lookup_of, operator_keys, refined_of
from moe_overlap.tuner.search.fitting import cheapest_change
from moe_overlap.tuner.search.layer.overlap import decide_overlap
from moe_overlap.tuner.search.layer.partition_ranges import check_limits

PLACED_BY_LISTS = ("--overlap-param-gather",)
"""Flags that only place communication, which an instruction list places itself."""
ALWAYS_SHARDED = "ZeRO-1, as this fork runs: --use-distributed-optimizer is always on in it"
STATE_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}


class Options(TypedDict, total=False):
    """Options of a prediction beside the flags and the machines."""

    precision: Precision | None
    """In place of what the flags say."""
    plan: str | None
    """File of a plan that decides in place of the flags."""
    software: str | None
    """Release whose losses count; default the GPU's median release."""
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
    job = _job_on(words, cluster, options)
    problem = _problem(job, cluster, options)
    prediction = dataclasses.replace(predict_plan(problem.plan, problem), assumed=job.assumed)
    if prediction.fits:
        return prediction
    remedy, tried = cheapest_change(prediction, problem, lambda plan: _captured(job, plan, cluster, options))
    return dataclasses.replace(prediction, remedy=remedy, tried=tried)


def simulated(words: Sequence[str], cluster: Cluster, **options: Unpack[Options]) -> SimulatedStep:
    """A step of a run, instruction by instruction, on one rank of every stage. Arguments as `predict` takes them.

    Raises:
        ConfigError: as `predict`; or the plan cannot be lowered to instructions.
    """
    problem = problem_of(words, cluster, options)
    return simulate_step(problem.plan, problem)


def tune(
    words: Sequence[str],
    cluster: Cluster,
    limits: SearchLimits,
    solver_seconds: float = 5.0,
    traces: Sequence[str | Path] = (),
    **options: Unpack[Options],
) -> Tuned:
    """Choose the overlap of a run.

    Args:
        words: Megatron flags, or `@FILE`, without a plan and without overlap decided by hand.
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
    parse(
        list(expand_files(words))
    )  # What is tuned is executed here: the flags of other releases are refused, as in training.
    job = _executed_here(read_job(words, cluster.gpus, options.get("precision"), options.get("plan")))
    problem = _problem(job, cluster, options)
    _require_open(problem.plan)
    refinement: Refinement | None = None
    if traces:
        problem, refinement = refine(problem, traces)
    decision = decide_overlap(problem, limits, solver_seconds, None if refinement is None else refinement.steps)
    arguments, dropped = arguments_to_run(words, decision.chosen.decided, job.config)
    return Tuned(
        chosen=decision.chosen,
        others=decision.others,
        mix=decision.mix,
        step=decision.step,
        plain_seconds=decision.baseline_seconds,
        search_seconds=time.perf_counter() - begun,
        arguments=arguments,
        dropped=dropped,
        refinement=refinement,
        assumed=job.assumed,
    )


def _require_open(plan: Plan) -> None:
    """Refuse a plan that leaves the search nothing to decide."""
    if any(stage.overlap.is_listed for stage in plan.stages):
        fix = "drop --moe-overlap-* and --plan"
        raise ConfigError("--overlap-only", "", "the flags decide an overlap by hand", fix)
    if all(stage.expert * stage.expert_tensor == 1 for stage in plan.stages):
        rule = "nothing to hide: one expert rank exchanges no tokens"
        raise ConfigError("--overlap-only", "", rule, "use --expert-model-parallel-size 2 or more")


def arguments_to_run(words: Sequence[str], plan: Plan, config: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The flags that execute a plan, without `--plan`, and the user's flags that are left out of them.

    Args:
        words: the flags for which the plan was decided.
        config: what they were read into.
    """
    arguments = tuple(expand_files(words))
    if not any(stage.overlap.is_listed for stage in plan.stages):
        return arguments, ()
    kept = tuple(word for word in arguments if word not in PLACED_BY_LISTS)
    dropped = tuple(dict.fromkeys(word for word in arguments if word in PLACED_BY_LISTS))
    # Instruction lists run on the runtime's own gate and dispatcher, never on megatron-core's.
    gate = ("--moe-gate", "topk") if config.overlap.moe_gate is None else ()
    return (*kept, *gate, "--moe-token-dispatcher-type", "irregular"), dropped


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A command line, understood."""

    config: Config
    model: ModelDescription
    plan: Plan
    flags: Flags
    assumed: tuple[str, ...] = ()
    """Sentences on what was taken for what the flags do not say."""


def read_job(words: Sequence[str], num_gpus: int, precision: Precision | None = None, plan: str | None = None) -> Job:
    """Understand a command line for a number of GPUs.

    Args:
        words: Megatron flags; `@FILE` stands for the words in a file. A `--plan` among them completes them, as in training.
        precision: in place of what the flags say.
        plan: file of a plan that decides in place of the flags.
    Raises:
        ConfigError: the flags are wrong, or do not describe the vocabulary.
    """
    reading = read(list(expand_files(words)))
    files = [word for word in words if word.startswith("@")][:1]
    parsed = parse(reading.arguments)
    if plan is None:
        parsed = with_plan(parsed, num_gpus)
    config = parsed.config
    if precision is not None:
        optimizer = dataclasses.replace(config.optimizer, bf16=precision != "fp16")
        config = dataclasses.replace(config, optimizer=optimizer, precision=PRECISIONS[precision])
    validate(config, num_gpus)
    vocabulary, assumed = _vocabulary(config)
    name = files[0][1:].rpartition("/")[2].partition(".")[0] if files else parsed.name
    model = describe_model(config, vocabulary, name)
    decided = _decided(config, model, num_gpus, reading.flags, plan)
    for stage in decided.stages:
        groups = model.num_attention_heads if model.latent_attention is not None else model.num_query_groups
        require_context_heads(reading.flags, stage.context, max(1, groups // stage.tensor))
    is_listed = plan is None and any(stage.overlap.is_listed for stage in decided.stages)
    if is_listed and zero_level(reading.flags) == 0:
        assumed = (*assumed, ALWAYS_SHARDED)
    if model.num_experts and SINKHORN in config.moe.moe_router_load_balancing_type:
        assumed = (*assumed, "a router without the iterations of sinkhorn, whose number depends on the data")
    return Job(config, model, decided, reading.flags, (*reading.assumed, *assumed))


def _vocabulary(config: Config) -> tuple[int, tuple[str, ...]]:
    """Tokens of the vocabulary, and the sentence that says where they are not the flags'."""
    data, known = config.data, known_vocab_size(config)
    if known is None:
        guess = assumed_vocabulary(data.tokenizer_type, data.tokenizer_model)
        if guess is None:
            raise ConfigError("--vocab-size", "", "the flags alone do not tell the vocabulary", "add --vocab-size")
        return guess[0], (guess[1],)
    if data.tokenizer_type is None and data.vocab_size is None and data.vocab_file is None:
        return known, (f"a vocabulary of {known} bytes, as no tokenizer is named; --vocab-size says another",)
    return known, ()


def _decided(config: Config, model: ModelDescription, num_gpus: int, flags: Flags, file: str | None) -> Plan:
    """The plan of a file, of --plan among the flags, or of the flags."""
    if file is not None:
        decided = load_plan(file)
        validate_plan(decided, model, file)
        return decided
    if config.overlap.plan is not None:
        return plan_of_run(config, model, num_gpus)
    decided = plan_from_flags(config, model, num_gpus)
    # Overlap by instruction lists is this fork's own, whose optimizer is always distributed: what `plan_from_flags` says.
    if any(stage.overlap.is_listed for stage in decided.stages) and not is_sharded_by_fsdp(flags):
        return decided
    activations = offloaded_layers(flags, model.num_layers) / model.num_layers
    return _with_offloaded(_with_zero_level(decided, zero_level(flags)), activations, offloaded_states(flags))


def _with_offloaded(plan: Plan, activations: float, optimizer: float) -> Plan:
    """A plan whose stages keep these shares of their saved activations and of the optimizer's states on the host."""
    return dataclasses.replace(
        plan,
        stages=tuple(
            dataclasses.replace(
                stage, offload=dataclasses.replace(stage.offload, activations=activations, optimizer=optimizer)
            )
            for stage in plan.stages
        ),
    )


def _with_zero_level(plan: Plan, level: int) -> Plan:
    return dataclasses.replace(
        plan, stages=tuple(dataclasses.replace(stage, zero_level=level) for stage in plan.stages)
    )


def _executed_here(job: Job) -> Job:
    """The job as this fork runs it: its optimizer is always distributed, whether or not a flag says so."""
    if all(stage.zero_level > 0 for stage in job.plan.stages):
        return job
    return dataclasses.replace(job, plan=_with_zero_level(job.plan, 1), assumed=(*job.assumed, ALWAYS_SHARDED))


def problem_of(words: Sequence[str], cluster: Cluster, options: Options) -> Problem:
    """The tuner's problem of a command line: read, captured and looked up. Arguments and errors as `predict` has them."""
    return _problem(_job_on(words, cluster, options), cluster, options)


def _job_on(words: Sequence[str], cluster: Cluster, options: Options) -> Job:
    job = read_job(words, cluster.gpus, options.get("precision"), options.get("plan"))
    # A machine is measured for runs of this fork on it.
    return job if cluster.measured is None else _executed_here(job)


SINKHORN = "sinkhorn"


def _capturable(config: Config) -> Config:
    """A configuration whose router ends after steps that do not depend on the data: without sinkhorn's iterations."""
    moe = config.moe
    if SINKHORN not in moe.moe_router_load_balancing_type:
        return config
    kinds = tuple("none" if kind == SINKHORN else kind for kind in moe.moe_router_load_balancing_type)
    # Behind top-1, megatron-core's other routers want the softmax in front of the choice.
    before = moe.moe_router_pre_softmax or moe.moe_router_topk == 1
    moe = dataclasses.replace(moe, moe_router_load_balancing_type=kinds, moe_router_pre_softmax=before)
    return dataclasses.replace(config, moe=moe)


def _problem(job: Job, cluster: Cluster, options: Options) -> Problem:
    features = features_of(job.config, job.plan.precision, job.flags)
    constants, expert_load, measured = options.get("constants"), options.get("expert_load"), cluster.measured
    captured = _captured(job, job.plan, cluster, options)
    load = _busiest(expert_load, job) if expert_load is not None else 1.0
    lookup = None
    if measured is not None:
        constants = constants or measured_constants(measured, cluster.group_of(0).gpu.name)
        lookup = lookup_of(cluster, operator_keys(job.plan, job.model, captured, features, load))
    machine, extrapolating = machine_of(
        cluster,
        constants or shipped_constants(),
        options.get("software"),
        load,
        lookup,
        precision=job.plan.precision,
        is_moe=job.model.num_experts > 0,
    )
    refined = refined_of(cluster, job_key(job.model, job.plan))
    return Problem(
        model=job.model,
        plan=job.plan,
        graphs=captured,
        features=features,
        machine=dataclasses.replace(machine, refined=refined, exchanges=all_to_all_costs(cluster)),
        extrapolating=extrapolating,
        listed=_listed_run(job.config, cluster.gpus),
    )


def _captured(job: Job, plan: Plan, cluster: Cluster, options: Options) -> Mapping[int, CapturedModel]:
    """The graphs of the stages of a plan on these machines."""
    on_cpu = cluster.measured is not None and cluster.measured.device == "cpu"
    graphs = options.get("graphs") or (cpu_graphs if on_cpu else cached_graphs)
    return graphs(_capturable(job.config), job.model, plan, job.flags)


def _listed_run(config: Config, num_gpus: int) -> ListedRun:
    """The settings that a plan with overlap runs under: a gate and a dispatcher of ours, and no flag that lists replace.

    The rules across flags are asked once whether the others go with these; the answer is a setting itself, since each of the
    tuner's candidates needs it.
    """
    config = dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, overlap_param_gather=False),
        moe=dataclasses.replace(config.moe, moe_token_dispatcher_type="irregular"),
        overlap=dataclasses.replace(config.overlap, moe_gate=config.overlap.moe_gate or "topk"),
    )
    refusal = None
    try:
        validate(config, num_gpus)
    except ConfigError as error:
        # A traceback would keep the frames of the validation alive as long as the problem.
        refusal = error.with_traceback(None)
    for flag, value in (("--fp8-format", config.precision.fp8), ("--fp4-format", config.precision.fp4)):
        if value is not None and refusal is None:
            # Predicted it could be, but a plan that the runtime refuses to start must not be the answer.
            rule = "layers that overlap are not executed in 8 or 4 bits"
            refusal = ConfigError(flag, value, rule, "train in bf16 to overlap")
    bucket = gradient_chunk_bytes(config, parallel_layout(config, num_gpus))
    return dataclasses.replace(listed_run(config), gradient_bucket_bytes=bucket, refusal=refusal)


def _busiest(path: str, job: Job) -> float:
    """Rows of the busiest rank of an expert group over the mean, averaged over the layers.

    Raises:
        ConfigError: the file holds no load, or is of a model with another number of experts.
    """
    groups, experts = job.plan.stages[0].expert, job.model.num_experts
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
        each = len(shares) // groups
        ratios.append(groups * max(sum(shares[rank * each : (rank + 1) * each]) for rank in range(groups)))
    return sum(ratios) / len(ratios)


def job_operators(words: Sequence[str], ranks: int, device: str) -> list[OperatorKey]:
    """The operators that a run executes, for measuring them ahead.

    Args:
        words: Megatron flags, or `@FILE`.
        device: cpu or cuda.
    Raises:
        ConfigError: the flags are wrong, or do not describe the vocabulary.
    """
    job = read_job(words, ranks)
    graphs = (cpu_graphs if device == "cpu" else cached_graphs)(_capturable(job.config), job.model, job.plan, job.flags)
    return operator_keys(job.plan, job.model, graphs, features_of(job.config, job.plan.precision, job.flags))


# Flags that change the speed or memory of a run beside its plan. Training executes some of them only on newer releases of
# Megatron-LM, or refuses them; a prediction is about any release, so they are read from the command line itself.


def offloaded_layers(flags: Flags, num_layers: int) -> int:
    """Layers whose activations wait in host memory for the backward pass.

    Raises:
        ConfigError: not a number of layers below that of the model.
    """
    (layers,) = flags.get("--cpu-offloading-num-layers", ("0",)) or ("",)
    if not layers.isdecimal() or len(layers) > 9 or int(layers) >= num_layers:
        rule = f"is no number of layers below the model's {num_layers}"
        raise ConfigError("--cpu-offloading-num-layers", layers, rule, f"use 0 to {num_layers - 1}")
    return int(layers)


def offloaded_states(flags: Flags) -> float:
    """The share of the optimizer's states that waits in host memory for the update.

    Raises:
        ConfigError: not a share.
    """
    if "--optimizer-cpu-offload" not in flags:
        return 0.0
    (written,) = flags.get("--optimizer-offload-fraction", ("1.0",)) or ("",)
    try:
        share = float(written)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise ConfigError("--optimizer-offload-fraction", written, "is no share", "use a number from 0 to 1")
    return share


def features_of(config: Config, precision: Precision, flags: Flags) -> Features:
    """The features of a run that its flags ask for.

    Args:
        precision: of the products; the plan's.
        flags: of the command line, those too that the configuration does not hold.
    """
    parallel, optimizer = config.parallel, config.optimizer
    low_weights = config.precision.fp8_param_gather or config.precision.fp4_param_gather
    fsdp = is_sharded_by_fsdp(flags) and zero_level(flags) > 1
    in_fp32 = optimizer.accumulate_allreduce_grads_in_fp32 or precision == "fp32"
    # Megatron reduces bf16 gradients in fp32 unless told otherwise.
    in_fp32 = in_fp32 or (optimizer.bf16 and not optimizer.grad_reduce_in_bf16)
    return Features(
        precision=precision,
        flash=_is_fused_attention(flags),
        dropped_scores=config.model.attention_dropout > 0,
        overlap_grad_reduce=parallel.overlap_grad_reduce or fsdp,
        overlap_param_gather=parallel.overlap_param_gather or fsdp,
        overlap_tensor="--tp-comm-overlap" in flags,
        overlap_experts="--overlap-moe-expert-parallel-comm" in flags,
        overlap_shared_expert="--moe-shared-expert-overlap" in flags,
        overlap_transfers=parallel.overlap_p2p_comm,
        context_exchange=_context_exchange(flags),
        dispatcher=_dispatcher(config),
        graphs=_cuda_graphs(flags),
        fused_router="--moe-router-fusion" in flags,
        fused_experts="--use-transformer-engine-op-fuser" in flags,
        gradient_bytes=4 if in_fp32 else 2,
        gathered_bytes=1 if low_weights else 4 if precision == "fp32" else 2,
        weight_bytes=_weight_bytes(precision, low_weights),
        optimizer_bytes=_optimizer_bytes(config, precision),
        fused_gradients="--no-gradient-accumulation-fusion" not in flags and not _is_local(flags),
        fused_loss="--cross-entropy-loss-fusion" in flags and flags.get("--cross-entropy-fusion-impl") == ("te",),
        not_modelled=not_modelled(flags),
    )


def _is_fused_attention(flags: Flags) -> bool:
    backend = flags.get("--attention-backend", ("auto",))[0]
    return backend not in ("unfused", "local") and ("--use-flash-attn" in flags or not _is_local(flags))


def _is_local(flags: Flags) -> bool:
    """Whether megatron-core's own modules run in place of Transformer Engine's."""
    return flags.get("--transformer-impl", ("transformer_engine",))[0] == "local"


def _context_exchange(flags: Flags) -> Literal["p2p", "a2a", "all_gather"]:
    kind = flags.get("--cp-comm-type", ("p2p",))[0]
    return "a2a" if kind == "a2a" else "all_gather" if kind in ("allgather", "all_gather") else "p2p"


def _dispatcher(config: Config) -> Dispatcher:
    kind = config.moe.moe_token_dispatcher_type
    if kind == "flex":
        return "hybridep" if config.device.moe_flex_dispatcher_backend == "hybridep" else "deepep"
    return "allgather" if kind == "allgather" else "alltoall"


def _cuda_graphs(flags: Flags) -> CudaGraphs:
    implementation = flags.get("--cuda-graph-impl", ("none",))[0]
    if "--enable-cuda-graph" in flags or "--external-cuda-graph" in flags:
        implementation = "local"
    if implementation == "none":
        return "none"
    # The newer flag names the same modules.
    scope = flags.get("--cuda-graph-modules", flags.get("--cuda-graph-scope", ("full",)))
    return "full" if implementation == "full_iteration" or {"full", "full_iteration"} & set(scope) else "partial"


def _weight_bytes(precision: Precision, low_weights: bool) -> float:
    """Bytes per parameter of what products read: by rows in the forward pass, by columns in the backward pass.

    Transformer Engine keeps quantized weights for all micro-batches of a step, beside those in bf16 unless the weights
    themselves are quantized (--fp8-param-gather).
    """
    quantized = 2.0 * QUANTIZED_ELEMENT.get(precision, 0.0)
    if quantized and low_weights:
        return quantized
    return quantized + (4.0 if precision == "fp32" else 2.0)


def _optimizer_bytes(config: Config, precision: Precision) -> float:
    """Bytes per parameter of the master weight, if the weight itself is none, and of two moments."""
    chosen = config.precision
    if not chosen.use_precision_aware_optimizer:
        master = 0.0 if precision == "fp32" else 4.0
        return master + (8.0 if config.optimizer.optimizer == "adam" else 4.0)
    master = STATE_BYTES[chosen.main_params_dtype]
    if precision == "bf16" and chosen.main_params_dtype == "fp32":
        # Transformer Engine's Adam keeps the half of the master weight that the bf16 weight lacks (store_param_remainders).
        master = 2.0
    return master + STATE_BYTES[chosen.exp_avg_dtype] + STATE_BYTES[chosen.exp_avg_sq_dtype]
