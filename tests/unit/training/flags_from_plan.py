"""The inverse of `plan_from_flags`, which no run needs: it lets tests show that flags and --plan describe the same run."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.cli.config import Config, ModelConfig
from megatron.training.plan_flags import plan_from_flags
from megatron.training.plan_values import Values, layout_values, with_values
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.overlap import LayerOverlap
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.sizes import GRADIENT_BYTES


def flags_from_plan(plan: Plan, model: ModelDescription) -> Values:
    """The value of every configuration field that the plan decides.

    Args:
        plan: valid for `model`, with stages of one shape and one overlap for all layers.
    """
    facts = ModelConfig(num_layers=model.num_layers, mtp_num_layers=model.mtp_layers or None)
    layout = layout_values(plan, model.mtp_layers) | _static_values(plan, model)
    # Inverted by trial: flags are right if `plan_from_flags` of them is the plan.
    for overlap in _overlap_values(plan):
        values = layout | overlap
        if plan_from_flags(with_values(Config(model=facts), values), model, plan.world_size) == plan:
            return values
    raise AssertionError(f"no flags describe {plan}")


def _static_values(plan: Plan, model: ModelDescription) -> Values:
    """The fields of a static capacity. A run's own flags state its factor, too: a plan does not change the mathematics."""
    if plan.static_capacity_factor is None:
        return {}
    return {
        "moe.num_experts": model.num_experts,
        "moe.moe_token_dispatcher_type": "irregular",
        "moe.moe_pad_expert_input_to_capacity": True,
        "moe.moe_expert_capacity_factor": plan.static_capacity_factor,
    }


def _overlap_values(plan: Plan) -> Iterator[Values]:
    """The fields that may say a plan's overlap: what its first layer says, once for each word of a range."""
    overlaps = [stage.overlap for stage in plan.stages]
    if not any(overlap.is_listed for overlap in overlaps):
        yield {}
        return
    layers = [layer for overlap in overlaps for layer in overlap.layers]
    first = layers[0] if layers else LayerOverlap(layer=0)
    chunk_bytes = overlaps[0].gradient_chunk_bytes
    values: Values = {
        "moe.moe_token_dispatcher_type": "irregular",
        "overlap.moe_gate": first.gate,
        "overlap.moe_overlap_partitions": first.partitions,
        "overlap.moe_overlap_capacity_chunks": first.tutel_degree,
        "overlap.moe_overlap_micro_batches": overlaps[0].micro_batches_in_flight,
        "overlap.moe_overlap_forward_send": "late" if overlaps[0].sends_late else "early",
        "overlap.moe_overlap_grad_reduce": "at-once" if overlaps[0].reduce_at_once else "gaps",
        "parallel.overlap_grad_reduce": chunk_bytes > 0,
        "parallel.ddp_bucket_size": chunk_bytes // GRADIENT_BYTES or None,
        "parallel.overlap_param_gather": overlaps[0].overlap_param_gather,
    }
    deferring = [overlap for overlap in overlaps if any(layer.weight_gradient_slots for layer in overlap.layers)]
    if deferring:
        values["overlap.defer_weight_gradients"] = True
        values["overlap.max_deferred_bytes"] = deferring[0].max_deferred_bytes
    for word in ("around", "experts", "after") if first.partitions else ("around",):
        yield values | {"overlap.moe_overlap_range": word}
