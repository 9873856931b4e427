"""Planned bytes of communication, per rank and operation, for balanced dropless routing.

Legend: B micro-batch size, S sequence length, C context ranks, T tensor ranks (sequence-parallel), H hidden size,
k experts per token, E experts, P expert ranks, Q expert-tensor ranks, D replicas of a parameter, b bytes per element.
"""

from __future__ import annotations

import enum
import math
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
from moe_overlap.plan.gates import expert_capacity
from moe_overlap.plan.operators import (
    ATTENTION,
    EXPERTS,
    GATE,
    HEAD_LOSS,
    SHARED,
    GroupKind,
    OperatorId,
    parse_group,
)
from moe_overlap.plan.plan import Plan, Precision, StagePlan

ACTIVATION_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "mxfp8": 2, "nvfp4": 2}
"""Bytes of a communicated element; the 8-bit and 4-bit recipes compute in low precision and communicate in bf16."""
GRADIENT_BYTES = 4
"""Gradients are accumulated and reduced in fp32."""
COUNT_BYTES = 8
STATE_BYTES = 8
"""Adam's two moments of a parameter; below fp32 the optimizer also keeps fp32 weights (MASTER_BYTES)."""
MASTER_BYTES = 4
ROUTER_BYTES = 8
"""Largest element of the router's logits (--moe-router-dtype fp64)."""
SHARDED_FROM = {"optimizer": 1, "gradients": 2, "weights": 3}
"""State -> lowest ZeRO level that shards it."""


def tokens_of_rank(plan: Plan, stage: StagePlan) -> int:
    """Tokens of a micro-batch that one rank holds between operators: B · S / (C · T)."""
    return stage.micro_batch_size * plan.sequence_length // (stage.context * stage.tensor)


def boundary_bytes(plan: Plan, stage: StagePlan, model: ModelDescription) -> int:
    """Bytes of one send: B · S / (C · T) · H · b."""
    return tokens_of_rank(plan, stage) * model.hidden_size * ACTIVATION_BYTES[plan.precision]


def count_bytes(stage: StagePlan, model: ModelDescription) -> int:
    """Bytes of one all-to-all of counts: E integers to each of the P · Q - 1 other ranks."""
    return model.num_experts * COUNT_BYTES * (stage.expert * stage.expert_tensor - 1)


def static_rows(plan: Plan, stage: StagePlan, model: ModelDescription) -> int | None:
    """Rows that one rank sends to all experts of a layer with a static capacity, padding included; None without one."""
    if plan.static_capacity_factor is None:
        return None
    tokens, experts = tokens_of_rank(plan, stage), model.num_experts
    return experts * expert_capacity(tokens, model.router_topk, experts, plan.static_capacity_factor)


def sent_rows(plan: Plan, stage: StagePlan, model: ModelDescription) -> int:
    """Rows that one rank sends for a micro-batch: `static_rows`, or B · S / (C · T) · k."""
    static = static_rows(plan, stage, model)
    return tokens_of_rank(plan, stage) * model.router_topk if static is None else static


def exchange_bytes(plan: Plan, stage: StagePlan, model: ModelDescription, partitions: int = 1) -> int:
    """Bytes of one dispatch or combine of one partition of a micro-batch.

    B · S / (C · T) · k · H · b · ((P - 1) / P + (Q - 1)) / partitions: all-to-all over the expert ranks, then
    all-gather (combine: reduce-scatter) over the expert-tensor ranks. H is the latent width of the experts if the model has
    one. With a static capacity `static_rows` replaces B · S / (C · T) · k.
    """
    width = (model.moe_latent_size or model.hidden_size) * ACTIVATION_BYTES[plan.precision]
    static = static_rows(plan, stage, model)
    routed = tokens_of_rank(plan, stage) // partitions * model.router_topk if static is None else static // partitions
    rows = routed * width
    return rows * (stage.expert - 1) // stage.expert + rows * (stage.expert_tensor - 1)


@dataclass(frozen=True, slots=True)
class PartSize:
    """Parameters of a parameter group on one rank: dense ones (replicated D = data · context times) and experts (expert-data)."""

    dense: int
    experts: int

    def __add__(self, other: PartSize) -> PartSize:
        return PartSize(self.dense + other.dense, self.experts + other.experts)

    def replicated_bytes(self, stage: StagePlan) -> int:
        """Bytes of the accumulated gradients that have replicas, the input of a reduction."""
        dense = self.dense if stage.data * stage.context > 1 else 0
        return (dense + (self.experts if stage.expert_data > 1 else 0)) * GRADIENT_BYTES

    def reduction_bytes(self, stage: StagePlan) -> int:
        """Bytes that a rank sends in a gradient reduction: ring reduce-scatter (D - 1) / D, all-reduce (ZeRO 0) twice that."""
        return self._ring(stage, GRADIENT_BYTES) * (2 if stage.zero_level == 0 else 1)

    def gather_bytes(self, stage: StagePlan, precision: Precision) -> int:
        """Bytes that a rank sends in the gather of updated parameters: (D - 1) / D."""
        return self._ring(stage, ACTIVATION_BYTES[precision])

    def stored_bytes(self, stage: StagePlan, what: str, precision: Precision) -> int:
        """Bytes of `weights`, `gradients` or `optimizer` states on the rank; only its shard if the ZeRO level shards them."""
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

    Tied embeddings belong to `embedding`; `head` has a copy if the loss stage has neither embedding nor prediction layers.
    """
    share = Share(chunks=stage.chunks, tensor=stage.tensor, expert=stage.expert, expert_tensor=stage.expert_tensor)
    if part == "embedding":
        return PartSize(embedding_parameters(model, replace(share, last_stage=False)), 0)
    if part == "head":
        head_share = replace(share, first_stage=plan.loss_stage in (plan.embedding_stage, plan.mtp_stage))
        before = embedding_parameters(model, replace(share, last_stage=False)) if head_share.first_stage else 0
        output = embedding_parameters(model, head_share) - before
        return PartSize(output + norm_parameters(model, model.hidden_size), 0)
    group = parse_group(part)
    predicts = group.kind is GroupKind.PREDICTION
    layer = model.num_layers - 1 if predicts or group.number is None else group.number
    experts = 0
    if model.moe_layers[layer]:
        experts = model.num_experts // stage.expert * expert_parameters(model, stage.expert_tensor)
    parameters = prediction_parameters(model, share) if predicts else layer_parameters(model, layer, share)
    return PartSize(parameters - experts, experts)


ROUTED_LOAD_BOUND = 2.0
"""Assumed rows of the busiest rank of an expert group, relative to the balanced share. The bound on deferred bytes uses it to
decide which weight gradients are computed early; all ranks share that decision, so it must hold for the busiest."""


def deferred_bytes(gradient: OperatorId, plan: Plan, stage: StagePlan, model: ModelDescription) -> int:
    """Bytes that one deferred weight gradient of a micro-batch keeps alive on a rank: input and output gradient of its product.

    Args:
        gradient: a weight of `deferral.split_weights`, such as `L3.moe.experts.fc1.dW`.
    Returns:
        An upper bound for every rank, provided that none receives more than ROUTED_LOAD_BOUND times its balanced share of rows.
    """
    product = _products(gradient, model)[gradient.weight]
    sharded_tokens = tokens_of_rank(plan, stage)
    tokens = sharded_tokens * stage.tensor
    rows = {Rows.WHOLE: tokens, Rows.PART: sharded_tokens, Rows.ROUTED: 0}
    split = stage.tensor
    if gradient.kind == EXPERTS:
        split = stage.expert_tensor
        static = static_rows(plan, stage, model)
        most = sharded_tokens * model.router_topk * ROUTED_LOAD_BOUND if static is None else static
        rows[Rows.ROUTED] = math.ceil(most * stage.expert_tensor)
    width = ACTIVATION_BYTES[plan.precision]
    read = rows[product.input_rows] * (product.input // (split if product.input_is_split else 1)) * width
    written = rows[product.output_rows] * (product.output // (split if product.output_is_split else 1))
    return read + written * (ROUTER_BYTES if gradient.kind == GATE else width)


class Rows(enum.Enum):
    """Rows of a product on one rank: the tokens of all tensor ranks, this rank's shard of them, or routed rows."""

    WHOLE = enum.auto()
    PART = enum.auto()
    ROUTED = enum.auto()


@dataclass(frozen=True, slots=True)
class _Product:
    """One matrix product: its input and output widths before tensor parallelism splits them, and the rows of both."""

    input: int
    output: int
    input_rows: Rows = Rows.WHOLE
    output_rows: Rows = Rows.WHOLE
    input_is_split: bool = False
    output_is_split: bool = False


def _products(gradient: OperatorId, model: ModelDescription) -> dict[str, _Product]:
    """Weight -> product, for the operator of a weight gradient."""
    hidden = model.hidden_size
    gate = 2 if model.gated else 1
    if gradient.kind == ATTENTION:
        return _attention_products(model)
    if gradient.kind == GATE:
        return {"router": _Product(hidden, model.num_experts, Rows.PART, Rows.PART)}
    if gradient.kind == HEAD_LOSS:
        return {"output": _Product(hidden, model.vocab_size, Rows.PART, output_is_split=True)}
    if gradient.kind == EXPERTS:
        width, hidden, rows = model.moe_ffn_hidden_size, model.moe_latent_size or hidden, Rows.ROUTED
        first = _Product(hidden, gate * width, rows, rows, output_is_split=True)
        return {"fc1": first, "fc2": _Product(width, hidden, rows, rows, input_is_split=True)}
    width = model.shared_expert_hidden_size if gradient.kind == SHARED else model.ffn_hidden_size
    first = _Product(hidden, gate * width, Rows.PART, output_is_split=True)
    return {"fc1": first, "fc2": _Product(width, hidden, input_is_split=True)}


def _attention_products(model: ModelDescription) -> dict[str, _Product]:
    """Column-parallel linears read this rank's shard of the sequence; their output is split over heads."""
    hidden, latent = model.hidden_size, model.latent_attention
    if latent is None:
        heads = model.num_attention_heads * model.kv_channels
        both = heads + 2 * model.num_query_groups * model.kv_channels
        qkv = _Product(hidden, both, Rows.PART, output_is_split=True)
        return {"qkv": qkv, "proj": _Product(heads, hidden, input_is_split=True)}
    query = model.num_attention_heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim)
    keys = model.num_attention_heads * (latent.qk_head_dim + latent.v_head_dim)
    rank = latent.q_lora_rank or hidden
    return {
        "q": _Product(hidden, query, output_is_split=True),
        "q_down": _Product(hidden, rank),
        "q_up": _Product(rank, query, output_is_split=True),
        "kv_down": _Product(hidden, latent.kv_lora_rank + latent.qk_pos_emb_head_dim),
        # Without a norm in between, the input is a view into the whole output of kv_down and keeps it alive.
        "kv_up": _Product(latent.kv_lora_rank + latent.qk_pos_emb_head_dim, keys, output_is_split=True),
        "proj": _Product(model.num_attention_heads * latent.v_head_dim, hidden, input_is_split=True),
    }
