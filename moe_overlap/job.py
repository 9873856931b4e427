"""A job, understood from its Megatron flags: configuration, model, plan, and the features that the tuner prices.

1. `read_job` reads a command line for a number of GPUs.
2. `capturable` is the configuration whose graphs stand for it, `listed_run_of` the settings under which a plan with overlap runs.
3. `features_of` says which flags change speed or memory beside the plan.

No torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megatron.training.cli.arguments import expand_files, parse
from megatron.training.cli.config import Config
from megatron.training.cli.rules.graphs import graphs_capture_what_repeats
from megatron.training.cli.rules.moe import listed_run, static_capacity_factor
from megatron.training.cli.sizes import describe_model, known_vocab_size, parallel_layout
from megatron.training.cli.validation import validate, validate_model
from megatron.training.plan_argument import with_plan
from megatron.training.plan_flags import (
    gradient_chunk_bytes,
    plan_from_flags,
    plan_of_run,
    require_each_recomputation,
    require_world,
)
from megatron.training.plan_model import require_model
from moe_overlap.describe.errors import ConfigError, require
from moe_overlap.describe.files import whole_number
from moe_overlap.describe.model import ModelDescription, require_bounded_layers
from moe_overlap.describe.readers.predicted_flags import (
    assumed_vocabulary,
    grouped,
    is_sharded_by_fsdp,
    not_modelled,
    read,
    require_context_heads,
    zero_level,
)
from moe_overlap.plan.capabilities import GRAPHS_FLAG, ListedRun, require_listed_recipe
from moe_overlap.plan.operators import ATTENTION, GATE, MLP, SHARED
from moe_overlap.plan.plan import Plan, Precision
from moe_overlap.plan.rules.stages import require_stages, validate_plan
from moe_overlap.plan.serialize import load_plan
from moe_overlap.tuner.capture.cache import PRECISIONS, Flags
from moe_overlap.tuner.cost.hardware import Dispatcher, Features
from moe_overlap.tuner.cost.hardware import Graphs as CudaGraphs
from moe_overlap.tuner.cost.memory import QUANTIZED_ELEMENT
from moe_overlap.tuner.cost.router import RouterGroups
from moe_overlap.tuner.write.upstream_rules import errors_of_upstreams_own
from moe_overlap.tuner.write.upstream_values import values_of

ALWAYS_SHARDED = "ZeRO-1, as this fork runs: --use-distributed-optimizer is always on in it"
NOT_SHARDED = (
    "ZeRO-0, as Megatron-LM runs these flags; this fork runs ZeRO-1, which --use-distributed-optimizer predicts"
)
OWN_MODULES = "megatron-core's own modules: among captured graphs Transformer Engine's may not defer weight gradients"
SINKHORN = "sinkhorn"
STATE_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A command line, understood."""

    config: Config
    model: ModelDescription
    plan: Plan
    flags: Flags
    assumed: tuple[str, ...] = ()
    """Sentences on what was taken for what the flags do not say."""
    not_run: tuple[str, ...] = ()
    """Rules of Megatron-LM that these flags break and that this fork does not have."""


def read_job(
    arguments: Sequence[str],
    num_gpus: int,
    precision: Precision | None = None,
    plan: str | None = None,
    host_runs_ahead: bool = False,
    name: str | None = None,
) -> Job:
    """Understand a command line for a number of GPUs.

    Args:
        arguments: Megatron flags; `@FILE` stands for those in a file. A `--plan` among them only completes them, as in training.
        precision: in place of what the flags say.
        plan: file of a plan that decides alone, whatever layout the flags have.
        host_runs_ahead: whether the devices queue what the host gives them. A run of flags is lowered for its devices; a plan of
            a file says itself which it is for.
        name: of the model, where no file of flags names it.
    Raises:
        ConfigError: the flags are wrong; or the plan is none, of another model, or for another number of GPUs.
    """
    reading = read(list(expand_files(arguments)))
    parsed = parse(reading.arguments)
    if plan is None:
        parsed = with_plan(parsed, num_gpus)
    config = parsed.config
    require_bounded_layers("--mtp-num-layers", config.model.mtp_num_layers)
    if precision is not None:
        optimizer = dataclasses.replace(config.optimizer, bf16=precision != "fp16")
        config = dataclasses.replace(config, optimizer=optimizer, precision=PRECISIONS[precision])
    validate(config, parsed.layout_world or num_gpus)
    named = named_by(arguments) or name or parsed.name
    vocabulary, assumed = vocabulary_of(config, named)
    model = describe_model(config, vocabulary, named)
    decided = _decided(config, model, num_gpus, reading.flags, plan)
    if plan is None and config.overlap.plan is None:
        decided = dataclasses.replace(decided, host_runs_ahead=host_runs_ahead)
    for stage in decided.stages:
        groups = model.num_attention_heads if model.latent_attention is not None else model.num_query_groups
        require_context_heads(reading.flags, stage.context, max(1, groups // stage.tensor))
    is_listed = plan is None and decided.is_listed
    if is_listed and zero_level(reading.flags) == 0:
        assumed = (*assumed, ALWAYS_SHARDED)
    if config.overlap.moe_overlap_cuda_graphs and not _is_local(reading.flags) and _defers(decided):
        assumed = (*assumed, OWN_MODULES)
    if model.num_experts and SINKHORN in config.moe.moe_router_load_balancing_type:
        assumed = (*assumed, "a router without the iterations of sinkhorn, whose number depends on the data")
    is_of_flags = plan is None and config.overlap.plan is None and not decided.is_listed
    broken = errors_of_upstreams_own(values_of(reading.flags), num_gpus) if is_of_flags else []
    not_run = tuple(str(error) for error in broken)
    return Job(config, model, decided, reading.flags, (*reading.assumed, *assumed), not_run)


def model_of_plan(arguments: Sequence[str], plan: Plan, source: str, name: str | None = None) -> ModelDescription:
    """The model of a plan as flags describe it, whatever layout they say; the length of samples is the plan's if they say none.

    Args:
        source: of the plan, for errors.
        name: of the model, where no file of flags names it.
    Raises:
        ConfigError: the flags describe no model, or another one than the plan's; the plan has no stage.
    """
    require_stages(plan, source)
    flags = grouped(read(list(expand_files(arguments))).arguments)
    parsed = parse([word for flag, values in flags.items() if flag != "--plan" for word in (flag, *values)])
    model, parallel = parsed.config.model, parsed.config.parallel
    model = dataclasses.replace(
        model,
        seq_length=model.seq_length or plan.sequence_length,
        max_position_embeddings=model.max_position_embeddings or plan.sequence_length,
    )
    # The embedding's rows are padded for the tensor ranks.
    parallel = dataclasses.replace(parallel, tensor_model_parallel_size=plan.stages[0].tensor)
    config = dataclasses.replace(parsed.config, model=model, parallel=parallel)
    validate_model(config)
    named = named_by(arguments) or name or parsed.name
    described = describe_model(config, vocabulary_of(config, named)[0], named)
    require_model(plan, source, described, model.make_vocab_size_divisible_by)
    return described


def _defers(plan: Plan) -> bool:
    return any(layer.weight_gradient_slots for stage in plan.stages for layer in stage.overlap.layers)


def named_by(arguments: Sequence[str]) -> str | None:
    """The name that a file of flags gives a model; None where there is no file."""
    file = next((word for word in arguments if word.startswith("@")), None)
    return None if file is None else Path(file[1:]).stem


def without_graphs(arguments: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """The flags, files expanded, without --moe-overlap-cuda-graphs, and whether it was among them.

    Training refuses that flag for a plan without overlap, which a job has before it is tuned.
    """
    expanded = tuple(expand_files(arguments))
    return tuple(word for word in expanded if word != GRAPHS_FLAG), GRAPHS_FLAG in expanded


def vocabulary_of(config: Config, name: str) -> tuple[int, tuple[str, ...]]:
    """Tokens of the vocabulary, and a sentence on the assumption if the flags do not give the number.

    Args:
        name: of the model, which may tell the vocabulary.
    """
    data, known = config.data, known_vocab_size(config)
    if known is None:
        size, sentence = assumed_vocabulary(data.tokenizer_type, data.tokenizer_model, name)
        return size, (sentence,)
    if data.tokenizer_type is None and data.vocab_size is None and data.vocab_file is None:
        return known, (f"a vocabulary of {known} bytes, as no tokenizer is named; --vocab-size says another",)
    return known, ()


def _decided(config: Config, model: ModelDescription, num_gpus: int, flags: Flags, file: str | None) -> Plan:
    """The plan of a file, of --plan among the flags, or of the flags."""
    if file is not None:
        decided = load_plan(file)
        of_length = dataclasses.replace(
            model, max_position_embeddings=config.model.max_position_embeddings or decided.sequence_length
        )
        require_model(decided, file, of_length, config.model.make_vocab_size_divisible_by)
        validate_plan(decided, model, file)
        # Otherwise figures per GPU would be divided by the wrong number of GPUs.
        require_world(decided, file, num_gpus, "world size", "use")
        return decided
    if config.overlap.plan is not None:
        return plan_of_run(config, model, num_gpus)
    decided = plan_from_flags(config, model, num_gpus)
    # Plans with instruction lists run on this fork only, with ZeRO-1, as `plan_from_flags` has it.
    if decided.is_listed and not is_sharded_by_fsdp(flags):
        return decided
    activations = offloaded_layers(flags, model.num_layers) / model.num_layers
    return _with_offloaded(with_zero_level(decided, zero_level(flags)), activations, offloaded_states(flags))


def may_interleave(job: Job, plan: Plan) -> bool:
    """Whether the flags still allow two model chunks on every stage of their plan, wherever they cut the layers."""
    if len(plan.stages) == 1 or len(plan.stages[0].chunks) > 1:
        return False
    parallel = dataclasses.replace(job.config.parallel, num_virtual_stages_per_pipeline_rank=2)
    config = dataclasses.replace(job.config, parallel=parallel)
    try:
        validate(config, plan.world_size)
        plan_from_flags(config, job.model, plan.world_size)
    except ConfigError:
        return False
    return True


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


def with_stages_of(job: Job, plan: Plan) -> Job:
    """The job with a plan's stages, of which its flags express everything but the recomputation.

    Raises:
        ConfigError: what a stage recomputes breaks a rule across flags.
    """
    require_each_recomputation(plan, job.config, plan.world_size)
    return dataclasses.replace(job, plan=dataclasses.replace(job.plan, stages=plan.stages))


def with_zero_level(plan: Plan, level: int) -> Plan:
    return dataclasses.replace(
        plan, stages=tuple(dataclasses.replace(stage, zero_level=level) for stage in plan.stages)
    )


def executed_here(job: Job) -> Job:
    """The job as this fork runs it: its optimizer is always distributed, whether or not a flag says so."""
    if all(stage.zero_level > 0 for stage in job.plan.stages):
        return job
    return dataclasses.replace(job, plan=with_zero_level(job.plan, 1), assumed=(*job.assumed, ALWAYS_SHARDED))


def executed_by_megatron(job: Job) -> Job:
    """The job as Megatron-LM runs it, with a sentence where this fork would shard the states of the optimizer."""
    shards = any(stage.zero_level == 0 and stage.data * stage.context > 1 for stage in job.plan.stages)
    return dataclasses.replace(job, assumed=(*job.assumed, NOT_SHARDED)) if shards else job


def capturable(config: Config) -> Config:
    """A configuration whose router ends after steps that do not depend on the data: without sinkhorn's iterations."""
    moe = config.moe
    if SINKHORN not in moe.moe_router_load_balancing_type:
        return config
    kinds = tuple("none" if kind == SINKHORN else kind for kind in moe.moe_router_load_balancing_type)
    # Behind top-1, megatron-core's other routers want the softmax in front of the choice.
    before = moe.moe_router_pre_softmax or moe.moe_router_topk == 1
    moe = dataclasses.replace(moe, moe_router_load_balancing_type=kinds, moe_router_pre_softmax=before)
    return dataclasses.replace(config, moe=moe)


def listed_run_of(config: Config, num_gpus: int, flags: Flags, has_gpus: bool = True, domain: int = 1) -> ListedRun:
    """The settings that a plan with overlap runs under: a gate and a dispatcher of ours, and no flag that lists replace.

    The rules across flags are checked once, here: `ListedRun.refusal` keeps the result, because every candidate needs it.

    Args:
        flags: of the command line.
        has_gpus: whether the devices can capture graphs.
        domain: GPUs whose all-to-alls stay off the network.
    """
    # megatron-core pads in its own router and dispatcher; the plan does not describe that.
    pads_elsewhere = config.moe.moe_pad_expert_input_to_capacity and static_capacity_factor(config) is None
    config = dataclasses.replace(
        config,
        moe=dataclasses.replace(config.moe, moe_token_dispatcher_type="irregular"),
        overlap=dataclasses.replace(config.overlap, moe_gate=config.overlap.moe_gate or "topk"),
    )
    refusal = None
    try:
        validate(config, num_gpus)
    except ConfigError as error:
        # A traceback would keep the frames of the validation alive as long as the problem.
        refusal = error.with_traceback(None)
    try:
        # The cost model could predict it, but the runtime refuses to start it.
        rule = "layers that overlap are not executed in 4 bits"
        fp4 = config.precision.fp4
        require(refusal is not None or fp4 is None, "--fp4-format", fp4, rule, "train in bf16 to overlap")
        require_listed_recipe(listed_run(config), "overlap")
    except ConfigError as error:
        refusal = refusal or error.with_traceback(None)
    if pads_elsewhere and refusal is None:
        rule = "overlap pads by the irregular dispatcher, behind a gate of ours"
        fix = "name them: --moe-gate topk --moe-token-dispatcher-type irregular"
        refusal = ConfigError("--moe-pad-expert-input-to-capacity", "", rule, fix)
    bucket = gradient_chunk_bytes(config, parallel_layout(config, num_gpus))
    return dataclasses.replace(
        listed_run(config),
        gradient_bucket_bytes=bucket,
        domain=domain,
        refusal=refusal,
        graphs_refusal=refusal or _graphs_refusal(config, has_gpus),
        library_defers=not _is_local(flags),
    )


def _graphs_refusal(config: Config, has_gpus: bool) -> ConfigError | None:
    """Why lists of these flags are not replayed as CUDA graphs; None where they are."""
    overlap = dataclasses.replace(config.overlap, moe_overlap_cuda_graphs=True, defer_weight_gradients=True)
    try:
        require(has_gpus, GRAPHS_FLAG, "", "this machine has no GPU that would capture them", "drop it")
        graphs_capture_what_repeats(dataclasses.replace(config, overlap=overlap))
    except ConfigError as error:
        return error.with_traceback(None)
    return None


# Flags that change the speed or memory of a run beside its plan. Training executes some of them only on newer releases of
# Megatron-LM, or refuses them; a prediction is about any release, so they are read from the command line itself.


def offloaded_layers(flags: Flags, num_layers: int) -> int:
    """Layers whose activations wait in host memory for the backward pass.

    Raises:
        ConfigError: not a number of layers below that of the model.
    """
    (layers,) = flags.get("--cpu-offloading-num-layers", ("0",)) or ("",)
    number = whole_number(layers)
    if number is None or number >= num_layers:
        rule = f"is no number of layers below the model's {num_layers}"
        raise ConfigError("--cpu-offloading-num-layers", layers, rule, f"use 0 to {num_layers - 1}")
    return number


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
        delay_weight_gradients="--delay-wgrad-compute" in flags,
        overlap_shared_expert="--moe-shared-expert-overlap" in flags,
        overlap_transfers=parallel.overlap_p2p_comm,
        context_exchange=_context_exchange(flags),
        dispatcher=_dispatcher(config),
        graphs=_cuda_graphs(flags),
        outside_graphs=_outside_graphs(flags, has_experts=bool(config.moe.num_experts)),
        listed_graphs=config.overlap.moe_overlap_cuda_graphs,
        router_groups=_router_groups(config),
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


def _router_groups(config: Config) -> RouterGroups:
    groups, top_groups = config.moe.moe_router_num_groups, config.moe.moe_router_group_topk
    return RouterGroups(groups, top_groups) if groups and top_groups else RouterGroups()


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
    scope = _recorded_modules(flags)
    if implementation == "full_iteration" or scope & {"full", "full_iteration"}:
        return "full"
    return "partial" if scope & {"attn", "mlp", "moe", "moe_router"} else "none"


def _recorded_modules(flags: Flags) -> frozenset[str]:
    # The newer flag names the same modules. Lists of upstream's own tests write several values as `[a b]`.
    scope = flags.get("--cuda-graph-modules", flags.get("--cuda-graph-scope", ("full",)))
    return frozenset(" ".join(scope).strip("[]").replace(",", " ").split())


def _outside_graphs(flags: Flags, has_experts: bool) -> tuple[str, ...]:
    """The operators of a layer that partial graphs could record and that the flags do not name.

    Dense layers of a model with experts count as recorded with the router, as the constants were fitted.
    """
    if _cuda_graphs(flags) != "partial":
        return ()
    scope = _recorded_modules(flags)
    is_routed = has_experts and bool(scope & {"moe", "moe_router"})
    outside = [] if "attn" in scope else [ATTENTION]
    outside += [] if is_routed else [GATE, SHARED]
    outside += [] if is_routed or "mlp" in scope else [MLP]
    return tuple(outside)


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
