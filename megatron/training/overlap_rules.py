"""Rules for the gate, the dispatcher and the overlap."""

from __future__ import annotations

from megatron.training.config import Config
from megatron.training.rule import Rule, require
from megatron.training.stages import virtual_stages
from moe_overlap.plan.gate_rules import GATE_FACTS, check_gate


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
    if (config.overlap.moe_overlap_partitions or 1) != 1:
        return "--moe-overlap-partitions"
    return "--defer-weight-gradients" if config.overlap.defer_weight_gradients else None


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
    rule = f"{flag} reduces gradients after the last backward pass"
    require(not parallel.overlap_grad_reduce, "--overlap-grad-reduce", "", rule, f"drop it or {flag}")
    require(not parallel.overlap_param_gather, "--overlap-param-gather", "", rule, f"drop it or {flag}")
    per_token = config.training.calculate_per_token_loss
    rule = f"is not executed with {flag} yet"
    require(not per_token, "--calculate-per-token-loss", "", rule, f"drop it or {flag}")


def partitions_keep_the_mathematics(config: Config) -> None:
    parts = config.overlap.moe_overlap_partitions
    if parts is None or parts == 1:
        return
    flag, gate = "--moe-overlap-partitions", config.overlap.moe_gate
    require(gate is not None, flag, parts, "capacity passes from part to part in our gates only", "add --moe-gate topk")
    whole = gate is not None and not GATE_FACTS[gate].partitionable_before
    rule = "needs the whole micro-batch, and parts behind such a gate are not executed yet"
    require(not whole, "--moe-gate", gate, rule, f"use topk, switch, random or hash, or drop {flag}")
    for name, value in (
        ("--hidden-dropout", config.model.hidden_dropout),
        ("--attention-dropout", config.model.attention_dropout),
    ):
        require(value == 0, name, value, "its masks would depend on how the micro-batch is cut", "use 0")
    rule = "the parts of an interleaved pipeline are not executed yet"
    require(virtual_stages(config) == 1, flag, parts, rule, "drop the virtual stages or the flag")


OVERLAP_RULES: tuple[Rule, ...] = (
    gate_agrees_with_router_flags,
    executor_has_what_it_needs,
    partitions_keep_the_mathematics,
)
