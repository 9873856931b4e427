"""Planned bytes of communication, per rank and operation, for balanced dropless routing.

Legend: B micro-batch size, S sequence length, C context ranks, T tensor ranks (sequence-parallel), H hidden size,
k experts per token, E experts, P expert ranks, Q expert-tensor ranks, D replicas of a parameter, b bytes per element.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_overlap.describe.model import (
    ModelDescription,
    Share,
    embedding_parameters,
    expert_parameters,
    layer_parameters,
    norm_parameters,
    prediction_parameters,
)
from moe_overlap.plan.operators import GroupKind, parse_group
from moe_overlap.plan.plan import Plan, Precision, StagePlan

ACTIVATION_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "mxfp8": 2, "nvfp4": 2}
"""Bytes of an element that crosses ranks; the 8-bit and 4-bit recipes compute narrow and communicate in bf16."""
GRADIENT_BYTES = 4
"""Gradients are accumulated and reduced in fp32."""
COUNT_BYTES = 8
STATE_BYTES = 8
"""Adam's two moments; below fp32 the fp32 weights, MASTER_BYTES, are states, too."""
MASTER_BYTES = 4
SHARDED_FROM = {"optimizer": 1, "gradients": 2, "weights": 3}
"""ZeRO level from which each of them is kept in shards."""


def tokens_of_rank(plan: Plan, stage: StagePlan) -> int:
    """Tokens of a micro-batch that one rank holds between operators: B · S / (C · T)."""
    return stage.micro_batch_size * plan.sequence_length // (stage.context * stage.tensor)


def boundary_bytes(plan: Plan, stage: StagePlan, model: ModelDescription) -> int:
    """Bytes of one send: B · S / (C · T) · H · b."""
    return tokens_of_rank(plan, stage) * model.hidden_size * ACTIVATION_BYTES[plan.precision]


def count_bytes(stage: StagePlan, model: ModelDescription) -> int:
    """Bytes of one all-to-all of counts: E integers to each of the P · Q - 1 others."""
    return model.num_experts * COUNT_BYTES * (stage.expert * stage.expert_tensor - 1)


def exchange_bytes(plan: Plan, stage: StagePlan, model: ModelDescription, partitions: int = 1) -> int:
    """Bytes of one dispatch or combine of one of the micro-batch's partitions.

    B · S / (C · T) · k · H · b · ((P - 1) / P + (Q - 1)) over their number: all-to-all over the expert ranks, then
    all-gather (combine: reduce-scatter) over the expert-tensor ranks. H is the experts' own width where they have one.
    """
    width = (model.moe_latent_size or model.hidden_size) * ACTIVATION_BYTES[plan.precision]
    rows = tokens_of_rank(plan, stage) // partitions * model.router_topk * width
    return rows * (stage.expert - 1) // stage.expert + rows * (stage.expert_tensor - 1)


@dataclass(frozen=True, slots=True)
class PartSize:
    """Parameters that one rank holds of an optimizer part, by how they are replicated."""

    dense: int
    experts: int

    def __add__(self, other: PartSize) -> PartSize:
        return PartSize(self.dense + other.dense, self.experts + other.experts)

    def replicated_bytes(self, stage: StagePlan) -> int:
        """Bytes of the accumulated gradients that a reduction takes in."""
        dense = self.dense if stage.data * stage.context > 1 else 0
        return (dense + (self.experts if stage.expert_data > 1 else 0)) * GRADIENT_BYTES

    def reduction_bytes(self, stage: StagePlan) -> int:
        """Leaving the rank in a gradient reduction: ring reduce-scatter (D - 1) / D, all-reduce (ZeRO 0) twice that."""
        return self._ring(stage, GRADIENT_BYTES) * (2 if stage.zero_level == 0 else 1)

    def gather_bytes(self, stage: StagePlan, precision: Precision) -> int:
        """Leaving the rank when updated parameters are gathered: (D - 1) / D."""
        return self._ring(stage, ACTIVATION_BYTES[precision])

    def stored_bytes(self, stage: StagePlan, what: str, precision: Precision) -> int:
        """Bytes of the `weights`, `gradients` or `optimizer` states that the rank keeps, whole or its shard."""
        states = STATE_BYTES + (0 if precision == "fp32" else MASTER_BYTES)
        width = {"weights": ACTIVATION_BYTES[precision], "gradients": GRADIENT_BYTES, "optimizer": states}[what]
        if stage.zero_level < SHARDED_FROM[what]:
            return (self.dense + self.experts) * width
        return (-(-self.dense // (stage.data * stage.context)) + -(-self.experts // stage.expert_data)) * width

    def _ring(self, stage: StagePlan, width: int) -> int:
        replicas = stage.data * stage.context
        dense = self.dense * width * (replicas - 1) // replicas
        return dense + self.experts * width * (stage.expert_data - 1) // stage.expert_data


def part_size(part: str, plan: Plan, stage: StagePlan, model: ModelDescription) -> PartSize:
    """Parameters of `embedding`, `head`, `L3` or `mtp0` on one rank of a stage.

    Tied embeddings belong to `embedding`, and a copy to `head` where that is on another stage and no prediction layers are.
    """
    share = Share(chunks=stage.chunks, tensor=stage.tensor, expert=stage.expert, expert_tensor=stage.expert_tensor)
    if part == "embedding":
        return PartSize(embedding_parameters(model, replace(share, last_stage=False)), 0)
    if part == "head":
        alone = replace(share, first_stage=plan.loss_stage in (plan.embedding_stage, plan.mtp_stage))
        before = embedding_parameters(model, replace(share, last_stage=False)) if alone.first_stage else 0
        output = embedding_parameters(model, alone) - before
        return PartSize(output + norm_parameters(model, model.hidden_size), 0)
    group = parse_group(part)
    predicts = group.kind is GroupKind.PREDICTION
    layer = model.num_layers - 1 if predicts or group.number is None else group.number
    experts = 0
    if model.moe_layers[layer]:
        experts = model.num_experts // stage.expert * expert_parameters(model, stage.expert_tensor)
    whole = prediction_parameters(model, share) if predicts else layer_parameters(model, layer, share)
    return PartSize(whole - experts, experts)
