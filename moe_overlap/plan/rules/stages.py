"""The invariants of a plan. Every error names stage, field, value, rule and fix; nothing is repaired."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite, lcm

from moe_overlap.describe.errors import ConfigError, require
from moe_overlap.describe.model import MOST_LAYERS, ModelDescription
from moe_overlap.plan.lowering.deferral import sends_of
from moe_overlap.plan.lowering.pipeline_order import check_interleaving
from moe_overlap.plan.plan import Plan, Predicted, Recompute, StagePlan
from moe_overlap.plan.rules.overlap import validate_overlap
from moe_overlap.plan.rules.resharding import validate_transfers

RECOMPUTE_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
"""Choices of Megatron's `--recompute-modules`."""
OFFLOADED = ("weights", "gradients", "optimizer", "activations")
SIZE_FIELDS = (
    "micro_batch_size",
    "gradient_accumulation_steps",
    "tensor",
    "context",
    "data",
    "expert",
    "expert_tensor",
)


def validate_plan(plan: Plan, model: ModelDescription | None = None, source: str = "plan.json") -> None:
    """Check every invariant of a plan.

    Args:
        model: the model of the plan; None skips the invariants that need a model.
        source: the file of the plan, for errors.
    Raises:
        ConfigError: for the first invariant that does not hold.
    """
    _check_run(plan, source)
    _check_static_capacity(plan, model, source)
    # Before any check builds a table of the layers.
    layers = max((last for stage in plan.stages for _, last in stage.chunks), default=0)
    if layers > MOST_LAYERS:
        rule = f"hold {layers} layers, more than {MOST_LAYERS}"
        raise ConfigError(f"{source} stages", "", rule, "correct the chunks")
    for index, stage in enumerate(plan.stages):
        subject = f"{source} stages[{index}]"
        # First, because later checks divide by these sizes.
        _check_sizes(plan, stage, subject)
        _check_memory(stage, subject)
        if model is not None:
            _check_model(plan, stage, model, subject)
        tied = model is not None and model.tied_embeddings and plan.embedding_stage == index
        head_apart = plan.loss_stage == index and not tied
        validate_overlap(stage, model, f"{subject}.overlap", sends_of(plan, index), head_apart)
        if stage.overlap.sends_late and len(plan.stages) == 1:
            raise ConfigError(f"{subject}.overlap.sends_late", True, "there is no stage to send to", "write false")
    _check_chunks(plan, model, source)
    if model is not None and (plan.mtp_stage is None) != (model.mtp_layers == 0):
        shown = "null" if plan.mtp_stage is None else plan.mtp_stage
        rule = f"{model.name} has {model.mtp_layers or 'no'} multi-token-prediction layers"
        raise ConfigError(
            f"{source} mtp_stage", shown, rule, f"write {plan.loss_stage if model.mtp_layers else 'null'}"
        )
    _check_ranks(plan, source)
    validate_transfers(plan, source)
    if plan.predicted is not None:
        _check_predicted(plan.predicted, len(plan.stages), f"{source} predicted")


def _check_predicted(predicted: Predicted, stages: int, subject: str) -> None:
    """Check predicted figures, which reports print unchanged. The schema has already required them to be finite."""
    if len(predicted.stages) != stages:
        rule = f"the plan has {stages} stages"
        raise ConfigError(f"{subject}.stages", len(predicted.stages), rule, "predict again")
    for name in ("step_seconds", "tokens_per_second_per_gpu", "model_tflops_per_gpu"):
        value = getattr(predicted, name)
        require(value > 0, f"{subject}.{name}", value, "must be greater than 0", "predict again")
    for index, stage in enumerate(predicted.stages):
        # Exposed communication is not checked: it is a difference of simulated times and may be slightly negative.
        sizes = {
            name: getattr(stage, name) for name in ("stable_seconds", "first_seconds", "last_seconds", "peak_bytes")
        }
        sizes |= {f"peak_bytes_by_category.{name}": size for name, size in asdict(stage.peak_bytes_by_category).items()}
        for name, value in sizes.items():
            require(value >= 0, f"{subject}.stages[{index}].{name}", value, "must not be negative", "predict again")


def require_stages(plan: Plan, source: str) -> None:
    """ConfigError for a plan without a stage."""
    if not plan.stages:
        raise ConfigError(f"{source} stages", "[]", "a plan has at least one stage", "add a stage")


def _check_run(plan: Plan, source: str) -> None:
    """Check the fields of the whole run."""
    require_stages(plan, source)
    for field in ("sequence_length", "global_batch_size"):
        if getattr(plan, field) < 1:
            raise ConfigError(
                f"{source} {field}", getattr(plan, field), "must be at least 1", "write a positive number"
            )
    for field in ("embedding_stage", "mtp_stage", "loss_stage"):
        stage = getattr(plan, field)
        if stage is not None and not 0 <= stage < len(plan.stages):
            last = len(plan.stages) - 1
            raise ConfigError(f"{source} {field}", stage, f"the stages are 0 to {last}", "name one of them")
    if plan.embedding_stage > plan.loss_stage:
        rule = f"the embedding runs before the loss (stage {plan.loss_stage})"
        raise ConfigError(f"{source} embedding_stage", plan.embedding_stage, rule, "write 0")


def _check_static_capacity(plan: Plan, model: ModelDescription | None, source: str) -> None:
    """Check a static capacity. It is defined for a full micro-batch, so it excludes partitions and fused kernels."""
    factor = plan.static_capacity_factor
    if factor is None:
        return
    subject = f"{source} static_capacity_factor"
    if not (isfinite(factor) and factor > 0):
        raise ConfigError(subject, factor, "must be positive", "write null for counted rows")
    if model is not None and not model.num_experts:
        raise ConfigError(subject, factor, f"{model.name} has no experts", "write null")
    for s, stage in enumerate(plan.stages):
        for n, layer in enumerate(stage.overlap.layers):
            if layer.mechanism in ("partitioned", "fused"):
                place = f"{source} stages[{s}].overlap.layers[{n}].mechanism"
                rule = "rows of a static capacity travel whole or in chunks of it"
                raise ConfigError(place, layer.mechanism, rule, "use tutel, or write static_capacity_factor null")


def _check_sizes(plan: Plan, stage: StagePlan, subject: str) -> None:
    """Batch and mesh arithmetic of one stage."""
    for field in SIZE_FIELDS:
        if getattr(stage, field) < 1:
            raise ConfigError(
                f"{subject}.{field}", getattr(stage, field), "must be at least 1", "write a positive number"
            )
    samples = stage.micro_batch_size * stage.data * stage.gradient_accumulation_steps
    if samples != plan.global_batch_size:
        raise ConfigError(
            f"{subject}.gradient_accumulation_steps",
            stage.gradient_accumulation_steps,
            f"micro_batch_size · data · gradient_accumulation_steps = {stage.micro_batch_size} · {stage.data} · "
            f"{stage.gradient_accumulation_steps} = {samples} must be the global batch of {plan.global_batch_size}",
            "change one of the three",
        )
    ranks = stage.tensor * stage.context * stage.data
    rows, columns = stage.devices.mesh
    if rows < 1 or columns < 1 or rows * columns != ranks:
        rule = f"tensor · context · data = {stage.tensor} · {stage.context} · {stage.data} = {ranks} devices are needed"
        raise ConfigError(f"{subject}.devices.mesh", f"[{rows}, {columns}]", rule, f"give a mesh of {ranks} devices")
    if len(stage.devices.ranks) != ranks:
        count = len(stage.devices.ranks)
        raise ConfigError(
            f"{subject}.devices.ranks", f"({count} ranks)", f"the mesh has {ranks} devices", f"list {ranks}"
        )
    if ranks % (stage.expert * stage.expert_tensor) != 0:
        product = stage.expert * stage.expert_tensor
        rule = f"expert · expert_tensor = {product} does not divide the {ranks} ranks of the stage"
        raise ConfigError(f"{subject}.expert", stage.expert, rule, f"use divisors of {ranks}")
    # Causal attention costs more at the end of a sequence: each context rank takes one early and one late piece.
    pieces = lcm(stage.tensor * stage.context, 2 * stage.context if stage.context > 1 else 1)
    if plan.sequence_length % pieces != 0:
        rule = f"the sequence of {plan.sequence_length} does not divide into tensor and context pieces ({pieces})"
        field = "context" if stage.context > 1 else "tensor"
        raise ConfigError(f"{subject}.{field}", getattr(stage, field), rule, "use a divisor of the sequence")


def _check_memory(stage: StagePlan, subject: str) -> None:
    """ZeRO, offloading, recomputation."""
    if not 0 <= stage.zero_level <= 3:
        raise ConfigError(f"{subject}.zero_level", stage.zero_level, "must be 0, 1, 2 or 3", "write 1")
    for field in OFFLOADED:
        share = getattr(stage.offload, field)
        if not 0.0 <= share <= 1.0:
            raise ConfigError(f"{subject}.offload.{field}", share, "must lie in [0, 1]", "write a share of the state")
    _check_recompute(stage.recompute, stage.chunks, f"{subject}.recompute")


def _check_recompute(recompute: Recompute, chunks: tuple[tuple[int, int], ...], subject: str) -> None:
    # A stage with only the embedding or the loss has no layers; it may have the number of the other stages.
    longest = max((last - first for first, last in chunks), default=0) or recompute.layers
    layers = recompute.layers
    if recompute.granularity == "none":
        if layers != 0:
            raise ConfigError(f"{subject}.layers", layers, "nothing is recomputed (granularity none)", "write 0")
    elif not 1 <= layers <= longest:
        rule = f"must lie between 1 and the layers of a chunk ({longest})"
        raise ConfigError(f"{subject}.layers", layers, rule, "write granularity none to recompute nothing")
    if recompute.granularity == "uniform":
        for first, last in chunks:
            if (last - first) % layers != 0:
                rule = f"a chunk of {last - first} layers does not divide into groups of {layers}"
                raise ConfigError(f"{subject}.layers", layers, rule, "use a divisor, or granularity full")
    if recompute.granularity == "selective" and not recompute.modules:
        raise ConfigError(f"{subject}.modules", "[]", "selective recomputation needs modules", "name a module")
    if recompute.granularity != "selective" and recompute.modules:
        rule = f"only granularity selective reads modules (here {recompute.granularity})"
        raise ConfigError(f"{subject}.modules", recompute.modules[0], rule, "write []")
    for index, module in enumerate(recompute.modules):
        if module not in RECOMPUTE_MODULES:
            fix = f"use {', '.join(RECOMPUTE_MODULES)}"
            raise ConfigError(f"{subject}.modules[{index}]", module, "unknown module", fix)
        if module in recompute.modules[:index]:
            raise ConfigError(f"{subject}.modules[{index}]", module, "stands twice", "remove one")


def _check_model(plan: Plan, stage: StagePlan, model: ModelDescription, subject: str) -> None:
    """Check a stage against the widths of the model."""
    experts = model.num_experts
    if experts == 0 and stage.expert > 1:
        raise ConfigError(f"{subject}.expert", stage.expert, f"{model.name} has no experts", "write 1")
    if experts and experts % stage.expert != 0:
        fits = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        raise ConfigError(f"{subject}.expert", stage.expert, f"{experts} experts are not divisible", f"use {fits}")
    widths = {
        "tensor": {
            "attention heads": model.num_attention_heads,
            "MLP width": model.ffn_hidden_size if not all(model.moe_layers) else 0,
            "shared expert width": model.shared_expert_hidden_size,
        },
        "expert_tensor": {"expert width": model.moe_ffn_hidden_size if experts else 0},
    }
    for field, sizes in widths.items():
        size = getattr(stage, field)
        for what, width in sizes.items():
            if width % size != 0:
                raise ConfigError(
                    f"{subject}.{field}", size, f"{what} {width} is not divisible", f"use a divisor of {width}"
                )
    if model.learned_positions and plan.sequence_length > model.max_position_embeddings:
        source = subject.rpartition(" ")[0]
        rule = f"{model.name} has {model.max_position_embeddings} positions"
        raise ConfigError(f"{source} sequence_length", plan.sequence_length, rule, "shorten the sequence")


def _check_chunks(plan: Plan, model: ModelDescription | None, source: str) -> None:
    """Check that chunks hold every layer of the model once, in model order: chunk 0 of every stage, then chunk 1, …

    Only the chunks with the embedding or the loss may have no layers.
    """
    counts = {len(stage.chunks) for stage in plan.stages}
    interleaved = plan.pipeline_schedule == "interleaved-1f1b"
    for index, stage in enumerate(plan.stages):
        subject = f"{source} stages[{index}].chunks"
        count = len(stage.chunks)
        if not interleaved and count != 1:
            raise ConfigError(subject, f"({count} chunks)", "1f1b has one chunk per stage", "use interleaved-1f1b")
        if interleaved and (count < 2 or len(counts) > 1):
            rule = "interleaved-1f1b has at least 2 chunks per stage, on every stage as many"
            raise ConfigError(subject, f"({count} chunks)", rule, "use 1f1b or cut every stage into as many chunks")
    expected = 0
    for chunk in range(max(counts)):
        for index, stage in enumerate(plan.stages):
            first, last = stage.chunks[chunk]
            ends = (plan.embedding_stage, 0), (plan.loss_stage, len(stage.chunks) - 1)
            if first != expected or last < first or (last == first and (index, chunk) not in ends):
                rule = f"chunks hold every layer once, in model order, at least one each but the ends; layer {expected} is next"
                raise ConfigError(
                    f"{source} stages[{index}].chunks[{chunk}]", f"[{first}, {last}]", rule, f"start with {expected}"
                )
            expected = last
    if model is not None and expected != model.num_layers:
        rule = f"the chunks hold {expected} layers, {model.name} has {model.num_layers}"
        raise ConfigError(f"{source} stages[{len(plan.stages) - 1}].chunks", "", rule, "cover the layers once")
    if interleaved:
        if len(plan.stages) == 1:
            raise ConfigError(f"{source} pipeline_schedule", "interleaved-1f1b", "needs at least 2 stages", "use 1f1b")
        for index, stage in enumerate(plan.stages):
            subject = f"{source} stages[{index}].gradient_accumulation_steps"
            check_interleaving(len(plan.stages), stage.gradient_accumulation_steps, subject)


def _check_ranks(plan: Plan, source: str) -> None:
    """Check that the stages list every rank of the run exactly once."""
    owner: dict[int, int] = {}
    for index, stage in enumerate(plan.stages):
        for place, rank in enumerate(stage.devices.ranks):
            subject = f"{source} stages[{index}].devices.ranks[{place}]"
            if rank in owner:
                raise ConfigError(subject, rank, f"stands already in stages[{owner[rank]}]", "list every rank once")
            if not 0 <= rank < plan.world_size:
                rule = f"the plan has {plan.world_size} devices, its ranks are 0 to {plan.world_size - 1}"
                raise ConfigError(subject, rank, rule, "number the ranks without gaps")
            owner[rank] = index
