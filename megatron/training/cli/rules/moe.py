"""Rules for mixtures of experts: sizes, router, capacity and dispatcher, and how computation overlaps their all-to-alls.

Several repeat errors that megatron-core would raise later, deep inside a layer. The overlap's rules hold for flags and, if a
function takes the flag or plan at fault, for `--plan` as well (`plan_flags.py` calls them).
"""

from __future__ import annotations

from megatron.training.cli.config import Config, Rule
from megatron.training.cli.sizes import dense_width, expert_tensor_size
from moe_overlap.describe.errors import at_least, divisors, fraction, require
from moe_overlap.plan.capabilities import ListedRun, require_cuttable, require_listable
from moe_overlap.plan.gates import check_gate, require_partitionable
from moe_overlap.plan.overlap import Gate

_AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


# Gate and overlap


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
    """The flag that sets an overlap by hand, or None if a plan may set it (plan_flags.py compares it with the flags)."""
    overlap = config.overlap
    if (overlap.moe_overlap_partitions or 1) != 1:
        return "--moe-overlap-partitions"
    if overlap.moe_overlap_micro_batches != 1:
        return "--moe-overlap-micro-batches"
    if (overlap.moe_overlap_capacity_chunks or 1) != 1:
        return "--moe-overlap-capacity-chunks"
    return "--defer-weight-gradients" if overlap.defer_weight_gradients else None


def may_follow_lists(config: Config) -> bool:
    """Whether instruction lists may order the run: with --plan, its file decides."""
    return overlap_flag(config) is not None or config.overlap.plan is not None


def executor_has_what_it_needs(config: Config) -> None:
    flag = overlap_flag(config)
    if flag is not None:
        require_executable(config, flag)


def listed_run(config: Config) -> ListedRun:
    """The settings of a run, besides the plan, that overlap depends on."""
    parallel = config.parallel
    return ListedRun(
        gate=config.overlap.moe_gate,
        dispatcher=config.moe.moe_token_dispatcher_type,
        overlap_param_gather=parallel.overlap_param_gather,
        prediction_layers=config.model.mtp_num_layers,
        parallel_block=config.model.parallel_attention_mlp,
        recompute_granularity=parallel.recompute_granularity,
        recompute_modules=parallel.recompute_modules or (),
        hidden_dropout=config.model.hidden_dropout,
        attention_dropout=config.model.attention_dropout,
        offloading=_offloading_flag(config),
        static_capacity=static_capacity_factor(config) is not None,
        fp8_recipe=config.precision.fp8_recipe if config.precision.fp8 else None,
        weights_in_fp8=config.precision.fp8_param_gather,
    )


def _offloading_flag(config: Config) -> str | None:
    """The flag that offloads activations to the host, or None."""
    if config.device.cpu_offloading_num_layers:
        return "--cpu-offloading-num-layers"
    return "--fine-grained-activation-offloading" if config.device.fine_grained_activation_offloading else None


def static_capacity_factor(config: Config) -> float | None:
    """The capacity factor to which our dispatcher pads; None if it sends the routed rows, or if megatron-core's pads."""
    moe = config.moe
    pads = moe.moe_pad_expert_input_to_capacity and moe.moe_token_dispatcher_type == "irregular"
    return moe.moe_expert_capacity_factor if pads and moe.num_experts is not None else None


def require_executable(config: Config, why: str) -> None:
    """Require the flags that the executor needs, and refuse those it cannot work with.

    Args:
        why: the flag or the plan for which the executor runs the step.
    """
    require_listable(listed_run(config), why, config.overlap.moe_overlap_capacity_chunks or 1)


def unnamed_gate(config: Config) -> Gate | None:
    """The default gate of partitions without --moe-gate; None if they need a name.

    Without a capacity the top-k gate makes the same decisions as megatron-core's router, so the choice does not matter. With
    one, the two drop different tokens, and the user must choose.
    """
    return "topk" if config.moe.moe_expert_capacity_factor is None else None


def partitions_keep_the_mathematics(config: Config) -> None:
    flag, partitions = "--moe-overlap-partitions", config.overlap.moe_overlap_partitions
    if partitions is None or partitions == 1:
        return
    gate = config.overlap.moe_gate or unnamed_gate(config)
    rule = "capacity passes from part to part in our gates only"
    require(gate is not None, flag, partitions, rule, "add --moe-gate topk")
    assert gate is not None
    if config.moe.num_experts is not None:
        check_gate(gate, config.moe)
    require_partitionable(gate, config.overlap.moe_overlap_range)
    require_cuttable(listed_run(config))


def reductions_at_once_are_of_lists(config: Config) -> None:
    value = config.overlap.moe_overlap_grad_reduce
    if value == "gaps" or config.overlap.plan is not None:  # plan_flags.py compares a plan with it.
        return
    flag, rule = "--moe-overlap-grad-reduce", "says when instruction lists reduce gradients, and nothing is overlapped"
    require(overlap_flag(config) is not None, flag, value, rule, "drop it, or add --defer-weight-gradients")
    rule = "works on the buckets of --overlap-grad-reduce"
    require(config.parallel.overlap_grad_reduce, flag, value, rule, "add --overlap-grad-reduce")


def sends_are_of_pairs(config: Config) -> None:
    value = config.overlap.moe_overlap_forward_send
    if value == "early" or config.overlap.plan is not None:  # plan_flags.py compares a plan with it.
        return
    flag, rule = "--moe-overlap-forward-send", "says when one of two micro-batches at a time sends to the next stage"
    fix = "drop it, or add --moe-overlap-micro-batches 2"
    require(config.overlap.moe_overlap_micro_batches > 1, flag, value, f"{rule}, and they run one by one", fix)
    stages = config.parallel.pipeline_model_parallel_size
    require(stages > 1, flag, value, f"{rule}, and there is one", "drop it")


def device_limits_are_in_range(config: Config) -> None:
    for flag, value in (
        ("--moe-overlap-device-connections", config.overlap.moe_overlap_device_connections),
        ("--moe-overlap-nccl-ctas", config.overlap.moe_overlap_nccl_ctas),
    ):
        require(value is None or 1 <= value <= 32, flag, value, "must be from 1 to 32", "correct the value or drop it")


OVERLAP_RULES: tuple[Rule, ...] = (
    device_limits_are_in_range,
    gate_agrees_with_router_flags,
    executor_has_what_it_needs,
    partitions_keep_the_mathematics,
    reductions_at_once_are_of_lists,
    sends_are_of_pairs,
)


# Experts, router, capacity and dispatcher


def dense_models_have_no_expert_ranks(config: Config) -> None:
    if config.moe.num_experts is not None:
        return
    expert = config.parallel.expert_model_parallel_size
    require(
        expert == 1, "--expert-model-parallel-size", expert, "the model has no experts", "add --num-experts or drop it"
    )


def experts_divide(config: Config) -> None:
    experts = config.moe.num_experts
    if experts is None:
        return
    at_least(1, (("--num-experts", experts),))
    expert = config.parallel.expert_model_parallel_size
    rule = f"{experts} experts are not divisible by {expert}"
    require(experts % expert == 0, "--expert-model-parallel-size", expert, rule, f"use {divisors(experts)}")
    topk = config.moe.moe_router_topk
    require(1 <= topk <= experts, "--moe-router-topk", topk, f"there are {experts} experts", f"use 1 to {experts}")


def layers_are_named(config: Config) -> None:
    frequency, layers = config.moe.moe_layer_freq, config.model.num_layers
    if isinstance(frequency, int):
        at_least(1, (("--moe-layer-freq", frequency),))
        return
    rule = f"the list has {len(frequency)} entries for {layers} layers"
    shown = "[" + ",".join(map(str, frequency)) + "]"
    require(len(frequency) == layers, "--moe-layer-freq", shown, rule, "give one entry per layer")


def expert_widths_divide(config: Config) -> None:
    moe = config.moe
    if moe.num_experts is None:
        return
    at_least(
        1,
        (
            ("--moe-ffn-hidden-size", moe.moe_ffn_hidden_size),
            ("--moe-latent-size", moe.moe_latent_size),
            ("--moe-shared-expert-intermediate-size", moe.moe_shared_expert_intermediate_size),
        ),
    )
    sharing = expert_tensor_size(config)
    width = moe.moe_ffn_hidden_size or dense_width(config)
    rule = f"the experts' width {width} is not divisible by {sharing}"
    require(width % sharing == 0, "--expert-tensor-parallel-size", sharing, rule, "change it or --moe-ffn-hidden-size")
    tensor, shared = config.parallel.tensor_model_parallel_size, moe.moe_shared_expert_intermediate_size
    rule = f"is not divisible by --tensor-model-parallel-size {tensor}"
    require(
        not shared or shared % tensor == 0, "--moe-shared-expert-intermediate-size", shared, rule, "change one of them"
    )


def biases_fit(config: Config) -> None:
    moe = config.moe
    if moe.num_experts is None:
        return
    shared, sharing = moe.moe_shared_expert_intermediate_size, expert_tensor_size(config)
    gated_nothing = moe.moe_shared_expert_gate and shared is None
    rule = "there are no shared experts to gate"
    require(not gated_nothing, "--moe-shared-expert-gate", "", rule, "add --moe-shared-expert-intermediate-size")
    if not config.model.add_bias_linear:
        return
    rule = "shared experts have no biases in megatron-core"
    require(shared is None, "--moe-shared-expert-intermediate-size", shared, rule, "add --disable-bias-linear")
    rule, fix = "experts with biases cannot be split", "add --disable-bias-linear or --expert-tensor-parallel-size 1"
    require(sharing == 1, "--expert-tensor-parallel-size", sharing, rule, fix)


def tensor_parallel_needs_sequence_parallel(config: Config) -> None:
    tensor = config.parallel.tensor_model_parallel_size
    if config.moe.num_experts is not None and tensor > 1:
        rule = "experts with tensor parallelism need sequence parallelism"
        require(
            config.parallel.sequence_parallel, "--tensor-model-parallel-size", tensor, rule, "add --sequence-parallel"
        )


def router_scores_fit(config: Config) -> None:
    moe = config.moe
    sigmoid, sinkhorn = moe.moe_router_score_function == "sigmoid", "sinkhorn" in moe.moe_router_load_balancing_type
    rule = "megatron-core balances by bias on sigmoid scores only"
    bias_fits = sigmoid or not moe.moe_router_enable_expert_bias
    require(bias_fits, "--moe-router-enable-expert-bias", "", rule, "add --moe-router-score-function sigmoid")
    constant = moe.moe_router_topk == 1 and not sigmoid and not moe.moe_router_pre_softmax and not sinkhorn
    rule = "a softmax over one expert is constant: the router would not learn"
    require(moe.num_experts is None or not constant, "--moe-router-topk", 1, rule, "add --moe-router-pre-softmax")
    rule = "works with --moe-router-topk 1 only"
    on_input_fits = moe.moe_router_topk == 1 or not moe.moe_apply_probs_on_input
    require(on_input_fits, "--moe-apply-probs-on-input", "", rule, "drop the flag")
    fraction((("--moe-input-jitter-eps", moe.moe_input_jitter_eps),), includes_one=False)
    at_least(
        0,
        (
            ("--moe-z-loss-coeff", moe.moe_z_loss_coeff),
            ("--moe-router-bias-update-rate", moe.moe_router_bias_update_rate),
        ),
    )
    factor = moe.moe_router_topk_scaling_factor
    require(
        factor is None or factor > 0,
        "--moe-router-topk-scaling-factor",
        factor,
        "must be positive",
        "correct the value",
    )


def balancing_losses_fit(config: Config) -> None:
    moe = config.moe
    kinds, coefficients = moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff
    shown = " ".join(map(str, coefficients))
    at_least(0, [("--moe-aux-loss-coeff", coefficient) for coefficient in coefficients])
    rule = f"{len(coefficients)} coefficients for {len(kinds)} kinds of balancing"
    require(
        len(kinds) == len(coefficients),
        "--moe-aux-loss-coeff",
        shown,
        rule,
        "give one per --moe-router-load-balancing-type",
    )
    names = " ".join(kinds)
    rule = "a kind stands there twice"
    require(len(set(kinds)) == len(kinds), "--moe-router-load-balancing-type", names, rule, "name each kind once")
    combines = len(kinds) == 1 or set(kinds) <= set(_AUX_LOSSES)
    rule = "sinkhorn and none do not combine with other kinds"
    require(combines, "--moe-router-load-balancing-type", names, rule, f"combine {', '.join(_AUX_LOSSES)} only")


def groups_limit_routing(config: Config) -> None:
    moe = config.moe
    groups, chosen, experts, topk = (
        moe.moe_router_num_groups,
        moe.moe_router_group_topk,
        moe.num_experts,
        moe.moe_router_topk,
    )
    require(
        chosen is None or groups is not None,
        "--moe-router-group-topk",
        chosen,
        "needs the number of groups",
        "add --moe-router-num-groups",
    )
    require(
        groups is None or chosen is not None,
        "--moe-router-num-groups",
        groups,
        "needs the groups per token",
        "add --moe-router-group-topk",
    )
    if groups is None or chosen is None or experts is None:
        return
    at_least(1, (("--moe-router-num-groups", groups), ("--moe-router-group-topk", chosen)))
    rule = f"{experts} experts are not divisible by {groups}"
    require(experts % groups == 0, "--moe-router-num-groups", groups, rule, f"use {divisors(experts)}")
    require(chosen <= groups, "--moe-router-group-topk", chosen, f"there are {groups} groups", f"use {groups} or less")
    rule = f"{chosen} groups of {experts // groups} experts do not hold --moe-router-topk {topk}"
    require(
        topk <= chosen * experts // groups, "--moe-router-group-topk", chosen, rule, "let a token reach more groups"
    )
    rule = f"megatron-core scores a group by its best top-k / groups experts: {topk} is fewer than {chosen}"
    require(topk >= chosen, "--moe-router-group-topk", chosen, rule, f"use {topk} or less")


def capacity_fits(config: Config) -> None:
    moe = config.moe
    factor = moe.moe_expert_capacity_factor
    if factor is None:
        rule, fix = "needs a capacity", "add --moe-expert-capacity-factor"
        require(not moe.moe_pad_expert_input_to_capacity, "--moe-pad-expert-input-to-capacity", "", rule, fix)
        return
    require(factor > 0, "--moe-expert-capacity-factor", factor, "must be positive", "drop it for no limit")
    rule = "sinkhorn routing has no capacity"
    sinkhorn = "sinkhorn" in moe.moe_router_load_balancing_type
    require(not sinkhorn, "--moe-expert-capacity-factor", factor, rule, "use another --moe-router-load-balancing-type")
    flag, dispatcher, gate = (
        "--moe-pad-expert-input-to-capacity",
        moe.moe_token_dispatcher_type,
        config.overlap.moe_gate,
    )
    if not moe.moe_pad_expert_input_to_capacity:
        return
    if gate is not None:
        rule, fix = "the rows of our gates are padded by our dispatcher", "add --moe-token-dispatcher-type irregular"
        require(dispatcher == "irregular", flag, "", rule, f"{fix} or drop --moe-gate")
        return
    rule, fix = "the irregular dispatcher pads the rows of our gates", "add --moe-gate topk or use alltoall"
    require(dispatcher != "irregular", flag, "", rule, fix)
    rule = "only the alltoall dispatcher pads"
    require(dispatcher == "alltoall", flag, "", rule, "add --moe-token-dispatcher-type alltoall")


def dispatcher_is_flex_for_its_flags(config: Config) -> None:
    rule, fix = "belongs to --moe-token-dispatcher-type flex", "add that flag or drop this one"
    fits = config.moe.moe_token_dispatcher_type == "flex" or not config.device.moe_enable_deepep
    require(fits, "--moe-enable-deepep", "", rule, fix)
    is_flex = config.moe.moe_token_dispatcher_type == "flex" and config.moe.num_experts is not None
    is_distributed = config.parallel.expert_model_parallel_size * expert_tensor_size(config) > 1
    rule, fix = "every rank has all experts", "add --expert-model-parallel-size or use alltoall"
    require(is_distributed or not is_flex, "--moe-token-dispatcher-type", "flex", rule, fix)


MOE_RULES: tuple[Rule, ...] = (
    dense_models_have_no_expert_ranks,
    experts_divide,
    layers_are_named,
    expert_widths_divide,
    biases_fit,
    tensor_parallel_needs_sequence_parallel,
    router_scores_fit,
    balancing_losses_fit,
    groups_limit_routing,
    capacity_fits,
    dispatcher_is_flex_for_its_flags,
)
