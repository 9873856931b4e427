"""Rules for the gate, the dispatcher and the overlap."""

from __future__ import annotations

from megatron.training.config import Config
from megatron.training.rule import Rule, require
from moe_overlap.plan.gate_rules import GATE_FACTS, check_gate


def gate_agrees_with_router_flags(config: Config) -> None:
    gate = config.overlap.moe_gate
    if gate is None:
        return
    require(config.moe.num_experts is not None, "--moe-gate", gate, "the model has no experts", "add --num-experts")
    check_gate(gate, config.moe)
    recompute = config.parallel.recompute_granularity
    numbered = gate != "random" or recompute is None or overlapped_by(config) is not None
    rule = "draws anew in a recomputation, which may meet another micro-batch's number"
    require(numbered, "--moe-gate", gate, rule, "drop --recompute-granularity or use hash")


def overlapped_by(config: Config) -> str | None:
    """The flag that has the executor run the step, or None where megatron-core's schedule does."""
    if (config.overlap.moe_overlap_partitions or 1) != 1:
        return "--moe-overlap-partitions"
    return "--defer-weight-gradients" if config.overlap.defer_weight_gradients else None


def executor_has_what_it_needs(config: Config) -> None:
    flag = overlapped_by(config)
    if flag is not None:
        require_executable(config, flag)


def require_executable(config: Config, why: str) -> None:
    """The flags that the executor needs, or does not go with.

    Args:
        why: the flag or the plan that has the executor run the step.
    """
    parallel, dispatcher = config.parallel, config.moe.moe_token_dispatcher_type
    rule = f"{why} exchanges tokens by the irregular dispatcher"
    require(dispatcher == "irregular", "--moe-token-dispatcher-type", dispatcher, rule, "use irregular")
    fix = f"drop it or {why}"
    rule = f"{why} reduces gradients after the last backward pass"
    require(not parallel.overlap_grad_reduce, "--overlap-grad-reduce", "", rule, fix)
    rule = f"{why} gathers weights at the end of the step; hooks would send them among the first exchanges of the next"
    require(not parallel.overlap_param_gather, "--overlap-param-gather", "", rule, fix)


def partitions_keep_the_mathematics(config: Config) -> None:
    parts = config.overlap.moe_overlap_partitions
    if parts is None or parts == 1:
        return
    flag, gate = "--moe-overlap-partitions", config.overlap.moe_gate
    require(gate is not None, flag, parts, "capacity passes from part to part in our gates only", "add --moe-gate topk")
    whole = gate is not None and not GATE_FACTS[gate].partitionable_before
    rule = "needs the whole micro-batch, and parts behind such a gate are not executed yet"
    require(not whole, "--moe-gate", gate, rule, f"use topk, switch, random or hash, or drop {flag}")
    require_no_dropout(config)


def require_no_dropout(config: Config) -> None:
    """Where micro-batches are cut, by flags or by a plan."""
    for name, value in (
        ("--hidden-dropout", config.model.hidden_dropout),
        ("--attention-dropout", config.model.attention_dropout),
    ):
        require(value == 0, name, value, "its masks would depend on how the micro-batch is cut", "use 0")


OVERLAP_RULES: tuple[Rule, ...] = (
    gate_agrees_with_router_flags,
    executor_has_what_it_needs,
    partitions_keep_the_mathematics,
)
