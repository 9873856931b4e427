"""The properties of each gate, and the router flags that agree with it. runtime/routing executes the gates."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_overlap.describe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GateFacts:
    """The properties of a gate that decide about partitions and flags.

    Attributes:
        partitionable_before: the decision for a token depends on this and earlier tokens only, so the samples of a
            micro-batch may arrive partition by partition (Lancet, section 2.3).
        learns_choice: the router's scores pick the experts of each token, so balancing losses have an effect.
        unlimited: the gate works without an expert capacity.
        reason: why the gate needs the whole micro-batch; empty if it does not.
    """

    partitionable_before: bool
    learns_choice: bool
    unlimited: bool = True
    reason: str = ""


GATE_FACTS: Mapping[str, GateFacts] = {
    "topk": GateFacts(partitionable_before=True, learns_choice=True),
    "switch": GateFacts(partitionable_before=True, learns_choice=True),
    "batch_prioritized": GateFacts(
        partitionable_before=False,
        learns_choice=True,
        unlimited=False,
        reason="sorts the tokens of the whole micro-batch",
    ),
    "random": GateFacts(partitionable_before=True, learns_choice=False),
    "hash": GateFacts(partitionable_before=True, learns_choice=False),
    "expert_choice": GateFacts(
        partitionable_before=False,
        learns_choice=False,
        unlimited=False,
        reason="lets experts choose among the tokens of the whole micro-batch",
    ),
}


def expert_capacity(tokens: int, topk: int, experts: int, factor: float) -> int:
    """Number of tokens an expert takes of one micro-batch on one rank: ceil(T · k / E · factor), rounded as megatron-core does.

    Args:
        tokens: tokens of the whole micro-batch on this rank, never of a partition.
    """
    return math.ceil((tokens * topk / experts) * factor)


RANGES_BEFORE = ("around",)
"""Words of --moe-overlap-range that partition operators before the MoE layer."""


class RouterFlags(Protocol):
    """The router's part of a configuration: our MoEConfig or megatron-core's TransformerConfig."""

    @property
    def moe_router_topk(self) -> int: ...
    @property
    def moe_router_score_function(self) -> str: ...
    @property
    def moe_router_pre_softmax(self) -> bool: ...
    @property
    def moe_router_num_groups(self) -> int | None: ...
    @property
    def moe_router_load_balancing_type(self) -> str | Sequence[str]: ...
    @property
    def moe_aux_loss_coeff(self) -> float | Sequence[float]: ...
    @property
    def moe_router_enable_expert_bias(self) -> bool: ...
    @property
    def moe_router_force_load_balancing(self) -> bool: ...
    @property
    def moe_input_jitter_eps(self) -> float | None: ...
    @property
    def moe_expert_capacity_factor(self) -> float | None: ...
    @property
    def moe_token_drop_policy(self) -> str: ...


def check_gate(name: str, moe: RouterFlags, flags: Collection[str] = ()) -> None:
    """Refuse router flags that contradict a gate or have no effect on it.

    Args:
        name: value of --moe-gate.
        moe: the router flags.
        flags: flags that the user set. No gate follows the default of --moe-token-drop-policy: that default is ignored
            unless the flag is in `flags`.
    Raises:
        ConfigError: names the first flag that contradicts the gate.
    """
    if name not in GATE_FACTS:
        raise ConfigError("--moe-gate", name, "no such gate", f"use {', '.join(GATE_FACTS)}")
    for rule in (_no_gate_draws_by_calls, _switch_takes_one, _choice_is_learned, _capacity_is_there, _policy_agrees):
        rule(name, moe, flags)


def require_partitionable(gate: str, overlap_range: str) -> None:
    """Refuse a range that begins before the MoE layer if the gate needs the whole micro-batch.

    Args:
        gate: name of the gate.
        overlap_range: word of --moe-overlap-range.
    Raises:
        ConfigError: the gate forbids the range.
    """
    facts = GATE_FACTS[gate]
    if overlap_range in RANGES_BEFORE and not facts.partitionable_before:
        allowed = " or ".join(name for name, other in GATE_FACTS.items() if other.partitionable_before)
        rule = f"the gate {gate} {facts.reason}, which can then not be partitioned before the MoE layer"
        raise ConfigError("--moe-overlap-range", overlap_range, rule, f"use after or experts, or --moe-gate {allowed}")


def _require(holds: object, flag: str, value: object, rule: str, fix: str) -> None:
    if not holds:
        raise ConfigError(flag, "" if value is True else value, rule, fix)


def _balancing(moe: RouterFlags) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Kinds and coefficients as tuples; megatron-core unwraps lists of one."""
    kinds, coefficients = moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    return kinds, tuple(coefficients) if isinstance(coefficients, Sequence) else (coefficients,)


def _no_gate_draws_by_calls(name: str, moe: RouterFlags, flags: Collection[str]) -> None:
    gate = f"--moe-gate {name}"
    rule = f"its noise depends on the order of the calls, which {gate} does not allow"
    _require(not moe.moe_input_jitter_eps, "--moe-input-jitter-eps", moe.moe_input_jitter_eps, rule, "drop the flag")
    forced = moe.moe_router_force_load_balancing
    rule = f"replaces the gate, which {gate} names"
    _require(not forced, "--moe-router-force-load-balancing", forced, rule, "drop the flag or use --moe-gate random")
    kinds, _ = _balancing(moe)
    rule = f"sinkhorn is a gate of its own and disagrees with {gate}"
    _require("sinkhorn" not in kinds, "--moe-router-load-balancing-type", " ".join(kinds), rule, "drop one of them")


def _switch_takes_one(name: str, moe: RouterFlags, flags: Collection[str]) -> None:
    if name != "switch":
        return
    topk, score = moe.moe_router_topk, moe.moe_router_score_function
    rule = "the switch gate sends a token to one expert"
    _require(topk == 1, "--moe-router-topk", topk, rule, "add --moe-router-topk 1 or use --moe-gate topk")
    rule = "the switch gate weighs by softmax"
    _require(score == "softmax", "--moe-router-score-function", score, rule, "drop the flag or use --moe-gate topk")
    rule = "weighs by the softmax over all experts"
    _require(moe.moe_router_pre_softmax, "--moe-gate", name, rule, "add --moe-router-pre-softmax")


def _choice_is_learned(name: str, moe: RouterFlags, flags: Collection[str]) -> None:
    if GATE_FACTS[name].learns_choice:
        return
    gate = f"--moe-gate {name}"
    _, coefficients = _balancing(moe)
    rule = f"balancing losses do not steer {gate}"
    shown = " ".join(map(str, coefficients))
    _require(not any(coefficients), "--moe-aux-loss-coeff", shown, rule, "drop the coefficient")
    bias, groups = moe.moe_router_enable_expert_bias, moe.moe_router_num_groups
    rule = f"a bias does not steer {gate}"
    _require(not bias, "--moe-router-enable-expert-bias", bias, rule, "drop the flag")
    rule = f"{gate} knows no groups of experts"
    _require(groups is None, "--moe-router-num-groups", groups, rule, "drop the flag")
    score = moe.moe_router_score_function
    softmax_only = name != "expert_choice" or score == "softmax"
    rule = f"{gate} weighs by softmax"
    _require(softmax_only, "--moe-router-score-function", score, rule, "drop the flag")


def _capacity_is_there(name: str, moe: RouterFlags, flags: Collection[str]) -> None:
    facts, factor = GATE_FACTS[name], moe.moe_expert_capacity_factor
    rule = "orders tokens for a capacity, and there is none"
    _require(facts.unlimited or factor is not None, "--moe-gate", name, rule, "add --moe-expert-capacity-factor")


def _policy_agrees(name: str, moe: RouterFlags, flags: Collection[str]) -> None:
    policy = moe.moe_token_drop_policy
    if moe.moe_expert_capacity_factor is None or (policy == "probs" and "--moe-token-drop-policy" not in flags):
        return
    rules = {"batch_prioritized": "by the score of the token", "expert_choice": "by the choice of the expert"}
    rule = f"--moe-gate {name} drops {rules.get(name, 'by position')}"
    _require(policy == "position" and name not in rules, "--moe-token-drop-policy", policy, rule, "drop the flag")
