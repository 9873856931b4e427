"""Rules for the gate, the dispatcher and the overlap."""

from __future__ import annotations

from megatron.training.config import Config
from megatron.training.rules.rule import Rule, require
from megatron.training.stages import virtual_stages
from moe_overlap.plan.gate_rules import check_gate, require_partitionable


def gate_agrees_with_router_flags(config: Config) -> None:
    gate = config.overlap.moe_gate
    if gate is None:
        return
    require(config.moe.num_experts is not None, "--moe-gate", gate, "the model has no experts", "add --num-experts")
    check_gate(gate, config.moe)
    recompute = config.parallel.recompute_granularity
    numbered = gate != "random" or recompute is None or overlap_flag(config) is not None
    rule = "draws anew in a recomputation, which may meet another micro-batch's number"
    require(numbered, "--moe-gate", gate, rule, "drop --recompute-granularity or use hash")


def overlap_flag(config: Config) -> str | None:
    """The flag that decides an overlap by hand, or None where a plan may (plan_of_run.py holds it against the flags)."""
    overlap = config.overlap
    if (overlap.moe_overlap_partitions or 1) != 1:
        return "--moe-overlap-partitions"
    if overlap.moe_overlap_micro_batches != 1:
        return "--moe-overlap-micro-batches"
    if (overlap.moe_overlap_capacity_chunks or 1) != 1:
        return "--moe-overlap-capacity-chunks"
    return "--defer-weight-gradients" if overlap.defer_weight_gradients else None


def executor_has_what_it_needs(config: Config) -> None:
    flag = overlap_flag(config)
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
    predicted = config.model.mtp_num_layers
    require(not predicted, "--mtp-num-layers", predicted, f"{why} overlaps the layers of the decoder alone", fix)
    rule = f"{why} gathers weights at the end of the step; hooks would send them among the first exchanges of the next"
    require(not parallel.overlap_param_gather, "--overlap-param-gather", "", rule, fix)
    block, rule = config.model.parallel_attention_mlp, f"{why} runs attention and MLP one after the other"
    require(block is None, "--parallel-attention-mlp", block, rule, fix)
    chunked, recompute = (config.overlap.moe_overlap_capacity_chunks or 1) != 1, parallel.recompute_granularity
    rule = "capacity chunks that are recomputed are not executed"
    require(recompute is None or not chunked, "--recompute-granularity", recompute, rule, fix)


def partitions_keep_the_mathematics(config: Config) -> None:
    flag, gate, parts = "--moe-overlap-partitions", config.overlap.moe_gate, config.overlap.moe_overlap_partitions
    if parts is None or parts == 1:
        return
    rule = "capacity passes from part to part in our gates only"
    require(gate is not None, flag, parts, rule, "add --moe-gate topk")
    assert gate is not None
    require_partitionable(gate, config.overlap.moe_overlap_range)
    require_cuttable(config)


def require_cuttable(config: Config) -> None:
    """What the flags must leave out where micro-batches are cut, by flags or by a plan."""
    again = config.parallel.recompute_modules or ()
    rule = "a layer keeps one normed input to compute again, and parts are under way together"
    require("layernorm" not in again, "--recompute-modules", " ".join(again), rule, "drop layernorm")
    for name, value in (
        ("--hidden-dropout", config.model.hidden_dropout),
        ("--attention-dropout", config.model.attention_dropout),
    ):
        require(value == 0, name, value, "its masks would depend on how the micro-batch is cut", "use 0")


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
