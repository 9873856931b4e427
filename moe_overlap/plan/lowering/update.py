"""The end of a step as instructions: gradient reduction, norm, optimizer steps, parameter gathering."""

from __future__ import annotations

from collections.abc import Iterator

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import sizes as payload
from moe_overlap.plan.instructions import COMPUTE
from moe_overlap.plan.lowering.dependencies import Draft
from moe_overlap.plan.operators import NORM, OperatorKind, state_operator
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.sizes import PartSize

DATA_CHANNEL = "dp"
NORM_BYTES = 4
NORM_BUFFER = "norm"


def optimizer_parts(plan: Plan, stage_index: int, model: ModelDescription) -> tuple[str, ...]:
    """The parameter groups that the optimizer of a stage steps, in order: `embedding`, `L0`, …, `mtp0`, …, `head`.

    The stage of the prediction layers has the word embedding or a copy of it.
    """
    parts = [f"L{layer}" for layer in plan.stages[stage_index].layers]
    if stage_index in (plan.embedding_stage, plan.mtp_stage):
        parts.insert(0, "embedding")
    if stage_index == plan.mtp_stage:
        parts += [f"mtp{depth}" for depth in range(model.mtp_layers)]
    if stage_index == plan.loss_stage:
        parts.append("head")
    return tuple(parts)


def is_replicated(stage: StagePlan) -> bool:
    """Whether another rank holds a copy of a parameter."""
    return stage.data * stage.context > 1 or stage.expert_data > 1


def lower_update(plan: Plan, stage_index: int, model: ModelDescription) -> Iterator[Draft]:
    """Everything after the last backward pass; pieces of gradients stand among the passes already (gradient_buckets.py)."""
    stage = plan.stages[stage_index]
    parts = optimizer_parts(plan, stage_index, model)
    sizes = {part: payload.part_size(part, plan, stage, model) for part in parts}
    totals = tuple(f"gradient.{part}" for part in parts)
    replicated = is_replicated(stage)
    if replicated and stage.overlap.gradient_chunk_bytes == 0:
        whole = sum(sizes.values(), PartSize(0, 0))
        sent = whole.reduction_bytes(stage)
        yield Draft(kind="collective", name="gradients", channel=DATA_CHANNEL, reads=totals, writes=totals, bytes=sent)
    yield norm_of(plan, totals)
    for part in parts:
        reads = (f"gradient.{part}", f"state.{part}", NORM_BUFFER)
        yield Draft(
            kind="optimizer",
            name=state_operator(OperatorKind.OPTIMIZER, part),
            reads=reads,
            writes=(f"parameters.{part}", f"state.{part}"),
        )
    if replicated and stage.zero_level > 0:
        shards = tuple(f"parameters.{part}" for part in parts)
        sent = sum(size.gather_bytes(stage, plan.precision) for size in sizes.values())
        yield Draft(kind="collective", name="parameters", channel=DATA_CHANNEL, reads=shards, writes=shards, bytes=sent)


def norm_of(plan: Plan, totals: tuple[str, ...], buffer: str = NORM_BUFFER) -> Draft:
    """The norm of all gradients, over all ranks."""
    alone = plan.world_size == 1
    return Draft(
        kind="compute" if alone else "collective",
        name=str(NORM),
        channel=COMPUTE if alone else DATA_CHANNEL,
        reads=totals,
        writes=(buffer,),
        bytes=0 if alone else NORM_BYTES,
    )
