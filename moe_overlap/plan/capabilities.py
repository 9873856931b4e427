"""Limits of `lower` and of the runtime today, for the fields of a plan and for the settings of a run that no plan holds.

`LOWERED` and `EXECUTED` hold the limits of a plan, a line per field. A valid plan outside them can be stored and printed, but is
refused before it runs. `ListedRun` holds the settings of a run: how its layers compute and how their gradients and weights
travel. Some settings exclude instruction lists, others exclude partitions. A run checks its flags against these rules before it
starts; the tuner checks every candidate, so it never returns a plan that a run would refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from moe_overlap.describe.errors import ConfigError, require
from moe_overlap.plan.overlap import Gate
from moe_overlap.plan.plan import Plan, StagePlan

GRAPHS_FLAG = "--moe-overlap-cuda-graphs"
"""The flag that replays operators of instruction lists as CUDA graphs."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The values that a field may have.

    Attributes:
        field: dotted name, from the plan or from a stage.
        allows: whether a value is supported.
        rule, fix: for the error about an unsupported value.
    """

    field: str
    allows: Callable[[Any], bool]
    rule: str
    fix: str


def _only(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the fields of a plan, of its stages and of their overlapped layers."""

    plan: tuple[Limit, ...]
    stage: tuple[Limit, ...]
    layer: tuple[Limit, ...]


LOWERED = Limits(
    plan=(
        Limit("pipeline_schedule", _only("1f1b", "interleaved-1f1b"), "not lowered", "use 1f1b or interleaved-1f1b"),
        Limit("embedding_stage", _only(0), "the embedding runs on the first stage", "write 0"),
    ),
    stage=(
        Limit("overlap.micro_batches_in_flight", _only(1, 2), "two micro-batches are interleaved at most", "write 2"),
    ),
    layer=(Limit("axis", _only(None, "batch"), "only the batch is cut", "write batch"),),
)
"""Limits of `lower`."""
EXECUTED = Limits(
    plan=(Limit("precision", lambda value: value != "nvfp4", "not executed", "use bf16, fp8 or mxfp8"),),
    stage=(Limit("offload.gradients", _only(0), "the norm reads all gradients on the device", "write 0.0"),),
    layer=(
        Limit(
            "mechanism",
            _only("none", "partitioned", "tutel", "cross_micro_batch"),
            "not executed",
            "use none, partitioned, tutel or cross_micro_batch",
        ),
        Limit("dispatcher", _only(None, "irregular"), "not executed", "write irregular"),
    ),
)
"""Limits of the runtime, in addition to those of `lower`."""
NOTHING_OVERLAPPED = (
    Limit("overlap.gradient_chunk_bytes", _only(0), "no layer of this plan overlaps anything", "write 0"),
    Limit("overlap.reduce_at_once", _only(False), "no layer of this plan overlaps anything", "write false"),
    Limit("overlap.overlap_param_gather", _only(False), "no layer of this plan overlaps anything", "write false"),
)
"""Limits of plans without overlapped layers, whose steps megatron-core's schedules run instead of the executor."""
ONE_NORMED_INPUT = "a layer keeps one normed input to compute again, and partitions are under way together"
"""Why partitions exclude recomputed norms."""
NARROW = ("fp8", "mxfp8", "nvfp4")
"""Precisions with matrix products in 8 or 4 bits."""
LISTED_RECIPES = ("tensorwise", "blockwise", "mxfp8")
"""Recipes of fp8 that scale a tensor by its current values only, so the result of an operator depends on no other operator."""
QUANTIZED_TOKENS = {"fp8": 16, "mxfp8": 32}
"""Precision -> the number of tokens in a product must be a multiple of this."""
SHAPE_FIELDS = ("micro_batch_size", "gradient_accumulation_steps", "tensor", "context", "data")
"""Stages that differ in one of these need resharding between them."""
UNLIKE_FIELDS = (*SHAPE_FIELDS, "expert", "expert_tensor")
"""Fields in which stages may differ if transfers join them."""
UNIFORM_FIELDS = (
    *UNLIKE_FIELDS,
    "overlap.gradient_chunk_bytes",
    "overlap.reduce_at_once",
    "overlap.overlap_param_gather",
    "overlap.micro_batches_in_flight",
    "overlap.sends_late",
)
"""Fields with one value for all stages; the layers of a stage, its recomputation, ZeRO level and offloading may differ."""
STORED = Limits(
    plan=(
        Limit(
            "precision",
            _only("fp32", "bf16"),
            "executed with ZeRO 1 on the device alone",
            "use bf16, or write zero_level 1 and no offload",
        ),
        Limit(
            "mtp_stage",
            _only(None),
            "executed with ZeRO 1 on the device alone",
            "write zero_level 1, or drop the prediction layers",
        ),
    ),
    stage=(
        Limit(
            "overlap.gradient_chunk_bytes", _only(0), "buckets are executed with ZeRO 1 on the device alone", "write 0"
        ),
        Limit("overlap.overlap_param_gather", _only(False), "executed with ZeRO 1 on the device alone", "write false"),
    ),
    layer=(),
)
"""Limits of plans in which a stage has another ZeRO level than 1 or offloads, in addition to those of the runtime."""


def refuse_what_cannot_be_lowered(plan: Plan, source: str = "plan.json") -> None:
    """ConfigError for the first field with a value that `lower` does not support."""
    _refuse_limits(plan, LOWERED, source)
    if plan.loss_stage != len(plan.stages) - 1:
        last = len(plan.stages) - 1
        raise ConfigError(f"{source} loss_stage", plan.loss_stage, "the loss runs on the last stage", f"write {last}")
    if plan.mtp_stage not in (None, plan.loss_stage):
        rule = "prediction layers run on the stage of the loss"
        raise ConfigError(f"{source} mtp_stage", plan.mtp_stage, rule, f"write {plan.loss_stage}")
    if plan.mtp_stage is not None and plan.is_listed:
        rule = "multi-token prediction is not overlapped, and here layers are"
        raise ConfigError(f"{source} mtp_stage", plan.mtp_stage, rule, "write null or overlap nothing")
    for path, stage in _stages(plan):
        if stage.is_decoupled and stage.overlap.gradient_chunk_bytes > 0:
            subject = f"{source} {path}.overlap.gradient_chunk_bytes"
            rule = "with ZeRO 2 and 3 and with offloading gradients are reduced part by part"
            raise ConfigError(subject, stage.overlap.gradient_chunk_bytes, rule, "write 0")
        if plan.transfers and (stage.overlap.micro_batches_in_flight > 1 or plan.pipeline_schedule != "1f1b"):
            rule = f"stages of unlike shape run 1f1b, one micro-batch at a time, and {path} does not"
            raise ConfigError(f"{source} transfers", f"({len(plan.transfers)} entries)", rule, "use 1f1b")
    if not plan.transfers:
        _refuse_differences(plan, SHAPE_FIELDS, source)


def refuse_narrow_precision(plan: Plan, subject: str, value: str, fix: str) -> None:
    """ConfigError for fp4 if the executor runs the step: it opens Transformer Engine's contexts for 8 bits only.

    Args:
        subject, value: the field or flag that selects the precision.
        fix: for the error.
    """
    if plan.precision == "nvfp4" and plan.follows_lists:
        rule = "layers that overlap are not executed in 4 bits: their products would run in the weights' type"
        raise ConfigError(subject, value, rule, fix)


def refuse_cut_blocks(plan: Plan, source: str | None) -> None:
    """ConfigError if the tokens of a partition are not a multiple of the block of products in 8 bits.

    Args:
        source: the file of the plan; None: the plan comes from flags.
    """
    block = QUANTIZED_TOKENS.get(plan.precision)
    if block is None:
        return
    for path, stage in _stages(plan):
        # Sequence parallelism also splits the tokens over the tensor ranks.
        tokens = plan.sequence_length * stage.micro_batch_size // (stage.context * stage.tensor)
        for index, layer in enumerate(stage.overlap.layers):
            parts = layer.partitions or 1
            if parts > 1 and tokens // parts % block:
                flag = "--moe-overlap-partitions"
                subject = flag if source is None else f"{source} {path}.overlap.layers[{index}].partitions"
                size = f"a partition has {tokens // parts} tokens on a rank"
                rule = f"{size}, and products in {plan.precision} take {block} at a time"
                raise ConfigError(subject, parts, rule, "cut into fewer, or use a larger micro-batch")


def refuse_unsupported(plan: Plan, source: str = "plan.json") -> None:
    """ConfigError for the first field of a valid plan that the runtime does not execute today.

    Args:
        source: the file of the plan, for the error.
    """
    refuse_what_cannot_be_lowered(plan, source)
    refuse_narrow_precision(plan, f"{source} precision", plan.precision, "use bf16 or overlap nothing")
    refuse_cut_blocks(plan, source)
    _refuse_limits(plan, EXECUTED, source)
    for path, stage in _stages(plan):
        _refuse_partial_selection(stage, f"{source} {path}.recompute.layers")
        refuse_cuts_of(stage, f"{source} {path}")
        rule = "the stage recomputes every layer and saves nothing"
        saves = stage.recompute.granularity != "full" or stage.recompute.layers < _longest(stage)
        share = stage.offload.activations
        require(not share or saves, f"{source} {path}.offload.activations", share, rule, "write 0.0")
    _refuse_differences(
        plan, [field for field in UNIFORM_FIELDS if not (plan.transfers and field in UNLIKE_FIELDS)], source
    )
    for index, transfer in enumerate(plan.transfers):
        rule = "the ranks of a stage are sequence-parallel: each keeps what it receives"
        require(transfer.all_gather is None, f"{source} transfers[{index}].all_gather", "", rule, "write null")
    if plan.has_stores:
        _refuse_limits(plan, STORED, source)
        for path, stage in _stages(plan):
            rule = "the stage has one replica, nothing to shard"
            require(
                stage.zero_level < 2 or stage.is_replicated,
                f"{source} {path}.zero_level",
                stage.zero_level,
                rule,
                "write 1",
            )
    if not plan.follows_lists:
        _refuse_values(plan.stages[0], NOTHING_OVERLAPPED, f"{source} stages[0].")


def _stages(plan: Plan) -> Iterator[tuple[str, StagePlan]]:
    return ((f"stages[{index}]", stage) for index, stage in enumerate(plan.stages))


def _refuse_limits(plan: Plan, limits: Limits, source: str) -> None:
    _refuse_values(plan, limits.plan, source)
    for path, stage in _stages(plan):
        _refuse_values(stage, limits.stage, f"{source} {path}.")
        for index, layer in enumerate(stage.overlap.layers):
            _refuse_values(layer, limits.layer, f"{source} {path}.overlap.layers[{index}].")


def _refuse_values(owner: object, limits: tuple[Limit, ...], prefix: str) -> None:
    head = prefix if prefix.endswith(".") else prefix + " "
    for limit in limits:
        value = attrgetter(limit.field)(owner)
        if not limit.allows(value):
            raise ConfigError(head + limit.field, _shown(value), limit.rule, limit.fix)


def _longest(stage: StagePlan) -> int:
    """Layers of the stage's largest chunk."""
    return max(last - first for first, last in stage.chunks)


def _refuse_partial_selection(stage: StagePlan, subject: str) -> None:
    """Megatron recomputes the selected modules of every layer."""
    longest = _longest(stage)
    if stage.recompute.granularity == "selective" and stage.recompute.layers < longest:
        rule = f"selective recomputation covers every layer of a chunk ({longest})"
        raise ConfigError(subject, stage.recompute.layers, rule, f"write {longest}")


def refuse_cuts_of(stage: StagePlan, subject: str) -> None:
    """ConfigError for gates and recomputation that the executor does not combine with partitions or capacity chunks."""
    for index, layer in enumerate(stage.overlap.layers):
        if layer.mechanism not in ("partitioned", "tutel"):
            continue
        if layer.mechanism == "partitioned" and layer.gate is None:
            rule = "only a gate of ours hands capacity to the next partition"
            raise ConfigError(f"{subject}.overlap.layers[{index}].gate", "null", rule, "write topk")
        modules = stage.recompute.modules
        if layer.mechanism == "partitioned" and cuttable(modules) != modules:
            raise ConfigError(f"{subject}.recompute.modules", " ".join(modules), ONE_NORMED_INPUT, "drop layernorm")
        if layer.mechanism == "tutel" and stage.recompute.granularity != "none":
            rule = "capacity chunks that are recomputed are not executed"
            raise ConfigError(f"{subject}.recompute.granularity", stage.recompute.granularity, rule, "write none")


def _refuse_differences(plan: Plan, fields: Sequence[str], source: str) -> None:
    first = plan.stages[0]
    for path, stage in _stages(plan):
        for field in fields:
            read = attrgetter(field)
            if read(stage) != read(first):
                value = _shown(read(stage))
                raise ConfigError(
                    f"{source} {path}.{field}",
                    value,
                    "differs from stages[0]; all stages have one value of it",
                    "make all stages equal",
                )


def _shown(value: object) -> str:
    """A value in a short form: the number of entries of a tuple or dictionary, the empty string for other structures."""
    if isinstance(value, tuple | dict):
        return f"({len(value)} entries)"
    return "null" if value is None else str(value) if isinstance(value, str | int | float) else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedRun:
    """The settings of a run that limit its overlap and that no plan holds.

    Attributes:
        gate: of every mixture-of-experts layer; None: the router's flags decide.
        gradient_bucket_bytes: most bytes of one gradient reduction between all-to-alls; 0 reduces at the end of the step.
        dispatcher: value of --moe-token-dispatcher-type.
        domain: number of GPUs in a domain whose all-to-alls do not cross the network; 1 if the links are unknown.
        overlap_param_gather: whether weights are gathered under the first passes of the next step.
        prediction_layers: number of multi-token-prediction layers, if any.
        parallel_block: value of --parallel-attention-mlp; None: one after the other.
        recompute_granularity, recompute_modules: values of Megatron's flags.
        offloading: the flag that offloads activations of layers or modules to the host, if set.
        static_capacity: whether every expert's input is padded to its capacity, so that no counts travel.
        fp8_recipe: value of --fp8-recipe; None without products in 8 bits.
        weights_in_fp8: whether weights are stored and gathered in 8 bits.
        refusal: why the settings exclude the gates and the dispatcher of this project, whatever overlaps; None if they allow
            them.
        graphs_refusal: why lists under these settings cannot be replayed as CUDA graphs; None if they can.
        library_defers: whether modules of a library defer weight gradients themselves, which a replayed graph would not repeat.
    """

    gate: Gate | None = None
    gradient_bucket_bytes: int = 0
    dispatcher: str = "irregular"
    domain: int = 1
    overlap_param_gather: bool = False
    prediction_layers: int | None = None
    parallel_block: str | None = None
    recompute_granularity: str | None = None
    recompute_modules: tuple[str, ...] = ()
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    offloading: str | None = None
    static_capacity: bool = False
    fp8_recipe: str | None = None
    weights_in_fp8: bool = False
    refusal: ConfigError | None = None
    graphs_refusal: ConfigError | None = None
    library_defers: bool = False


def require_listable(run: ListedRun, why: str, capacity_chunks: int = 1) -> None:
    """Refuse settings that the executor of lists does not support.

    Args:
        why: the flag or the plan that selects the executor.
        capacity_chunks: of dispatch, experts and combine; 1: none.
    Raises:
        ConfigError: the first unsupported setting.
    """
    rule = f"{why} exchanges tokens by the irregular dispatcher"
    require(run.dispatcher == "irregular", "--moe-token-dispatcher-type", run.dispatcher, rule, "use irregular")
    fix = f"drop it or {why}"
    predicted = run.prediction_layers
    require(not predicted, "--mtp-num-layers", predicted, f"{why} overlaps the layers of the decoder alone", fix)
    rule = f"{why} runs attention and MLP one after the other"
    require(run.parallel_block is None, "--parallel-attention-mlp", run.parallel_block, rule, fix)
    again = run.recompute_granularity
    rule = "capacity chunks that are recomputed are not executed"
    require(again is None or capacity_chunks == 1, "--recompute-granularity", again, rule, fix)
    rule = f"{why} runs layers operator by operator, and only megatron-core's own passes offload activations"
    require(run.offloading is None, str(run.offloading), "", rule, fix)
    require_listed_recipe(run, why)


def require_listed_recipe(run: ListedRun, why: str) -> None:
    """Refuse recipes of fp8 whose products would differ between a list and megatron-core's passes.

    Delayed scaling takes its scales from the maxima of earlier passes. Transformer Engine updates the scales, and reduces the
    maxima over ranks, at the end of each context: in a list after each operator instead of each pass, and also for modules that
    the operator does not call.

    Raises:
        ConfigError: the recipe is not one of LISTED_RECIPES, or weights are stored in 8 bits.
    """
    recipe, recipes = run.fp8_recipe, ", ".join(LISTED_RECIPES[:-1])
    rule = f"{why} cuts passes into operators, and the scales of this recipe may be those of whole passes"
    require(recipe in (None, *LISTED_RECIPES), "--fp8-recipe", recipe, rule, f"use {recipes} or {LISTED_RECIPES[-1]}")
    rule = f"{why} sums deferred gradients of, and gathers, weights of 16 or 32 bits only"
    require(recipe is None or not run.weights_in_fp8, "--fp8-param-gather", "", rule, "drop it")


def shares_scales(recipe: str | None, stages: int) -> bool:
    """Whether Transformer Engine would reduce the scales of a pass over several stages.

    At the end of a pass it reduces the maxima of delayed scaling over all ranks of the run, but stages end their passes at
    different times. megatron-core passes it the group of one stage from `parallel_state`, which this project never initialises.
    """
    return recipe == "delayed" and stages > 1


def cuttable(modules: Sequence[str]) -> tuple[str, ...]:
    """The recomputed modules without those that partitions of a micro-batch cannot recompute."""
    return tuple(module for module in modules if module != "layernorm")


def require_cuttable(run: ListedRun) -> None:
    """Refuse settings under which a micro-batch in partitions would give another result than in one piece.

    Raises:
        ConfigError: the first such setting.
    """
    modules, rule = run.recompute_modules, ONE_NORMED_INPUT
    require(cuttable(modules) == tuple(modules), "--recompute-modules", " ".join(modules), rule, "drop layernorm")
    for flag, value in (("--hidden-dropout", run.hidden_dropout), ("--attention-dropout", run.attention_dropout)):
        require(value == 0, flag, value, "its masks would depend on how the micro-batch is cut", "use 0")
    rule = "any partition may fill an expert's whole capacity, so that each would send all of it"
    fix = "drop it, or cut the capacity by --moe-overlap-capacity-chunks"
    require(not run.static_capacity, "--moe-pad-expert-input-to-capacity", "", rule, fix)
