"""Rules for the gate, the dispatcher and the overlap."""

from __future__ import annotations

from megatron.training.config import Config
from megatron.training.describe import virtual_stages
from megatron.training.rule import Rule, require
from moe_overlap.plan.gate_rules import check_gate, require_partitionable
from moe_overlap.plan.overlap import LayerOverlap
from moe_overlap.plan.serialize import load_plan


def gate_agrees_with_router_flags(config: Config) -> None:
    gate = config.overlap.moe_gate
    if gate is None:
        return
    require(config.moe.num_experts is not None, "--moe-gate", gate, "the model has no experts", "add --num-experts")
    check_gate(gate, config.moe)
    recompute = config.parallel.recompute_granularity
    rule = "draws anew in a recomputation, which may meet another micro-batch's number"
    require(gate != "random" or recompute is None, "--moe-gate", gate, rule, "drop --recompute-granularity or use hash")


def overlapped_by(config: Config) -> str | None:
    """The flag that has the executor run the step, or None where megatron-core's schedule does."""
    return overlap_flag(config) or ("--plan" if _planned_layers(config) else None)


def overlap_flag(config: Config) -> str | None:
    """The flag that decides an overlap by hand, or None where a plan may."""
    overlap = config.overlap
    if (overlap.moe_overlap_partitions or 1) != 1:
        return "--moe-overlap-partitions"
    if overlap.moe_overlap_micro_batches != 1:
        return "--moe-overlap-micro-batches"
    if (overlap.moe_overlap_capacity_chunks or 1) != 1:
        return "--moe-overlap-capacity-chunks"
    return "--defer-weight-gradients" if overlap.defer_weight_gradients else None


def _planned_layers(config: Config) -> list[LayerOverlap]:
    """What --plan decides for the layers."""
    if config.overlap.plan is None:
        return []
    return [layer for stage in load_plan(config.overlap.plan).stages for layer in stage.overlap.layers]


def executor_has_what_it_needs(config: Config) -> None:
    flag, parallel, moe = overlapped_by(config), config.parallel, config.moe
    if flag is None:
        return
    dispatcher = moe.moe_token_dispatcher_type
    rule = f"{flag} exchanges tokens by the irregular dispatcher"
    require(dispatcher == "irregular", "--moe-token-dispatcher-type", dispatcher, rule, "use irregular")
    recompute = parallel.recompute_granularity
    rule = f"recomputation with {flag} is not executed yet"
    require(recompute is None, "--recompute-granularity", recompute, rule, f"drop it or {flag}")
    rule = f"{flag} gathers the weights before the next forward pass"
    require(not parallel.overlap_param_gather, "--overlap-param-gather", "", rule, f"drop it or {flag}")
    rule = f"sequences that ranks share are not executed with {flag} yet"
    require(
        parallel.context_parallel_size == 1, "--context-parallel-size", parallel.context_parallel_size, rule, "use 1"
    )
    per_token = config.training.calculate_per_token_loss
    rule = f"is not executed with {flag} yet"
    require(not per_token, "--calculate-per-token-loss", "", rule, f"drop it or {flag}")


def partitions_keep_the_mathematics(config: Config) -> None:
    flag, gate, parts = "--moe-overlap-partitions", config.overlap.moe_gate, config.overlap.moe_overlap_partitions
    if (parts or 1) == 1:
        parts = max((layer.partitions or 1 for layer in _planned_layers(config)), default=1)
        flag = "--plan"
    if parts is None or parts == 1:
        return
    rule = "capacity passes from part to part in our gates only"
    require(gate is not None, flag, parts, rule, "add --moe-gate topk")
    if flag != "--plan":
        assert gate is not None
        require_partitionable(gate, config.overlap.moe_overlap_range)
    for name, value in (
        ("--hidden-dropout", config.model.hidden_dropout),
        ("--attention-dropout", config.model.attention_dropout),
    ):
        require(value == 0, name, value, "its masks would depend on how the micro-batch is cut", "use 0")
    rule = "the parts of an interleaved pipeline are not executed yet"
    require(virtual_stages(config) == 1, flag, parts, rule, "drop the virtual stages or the flag")


def interleaved_micro_batches_have_one_chunk(config: Config) -> None:
    several, flag = config.overlap.moe_overlap_micro_batches, "--moe-overlap-micro-batches"
    rule = "the passes of an interleaved pipeline are not interleaved again"
    require(several == 1 or virtual_stages(config) == 1, flag, several, rule, "drop the virtual stages or the flag")


OVERLAP_RULES: tuple[Rule, ...] = (
    gate_agrees_with_router_flags,
    interleaved_micro_batches_have_one_chunk,
    executor_has_what_it_needs,
    partitions_keep_the_mathematics,
)
