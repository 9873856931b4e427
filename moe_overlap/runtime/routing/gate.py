"""`Gate`, the base of all gates: logits, losses, capacity, and a micro-batch that may come in partitions.

A subclass chooses the experts of a token (`choose`) and, where position does not decide, the tokens within capacity (`keep`).
The order of a call: logits, z-loss, choice, capacity, balancing losses, counts. Sums over partitions are stored in a
`RoutingState` (state.py) and its totals (balance.py), never in the gate: micro-batches may interleave.

S positions on this rank, B samples, H hidden, T = S · B tokens in megatron-core's order (token s·B + b), E experts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from megatron.core.transformer.moe.moe_utils import HAVE_TE, compute_routing_scores_for_aux_loss, router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from moe_overlap.plan.gates import GATE_FACTS, check_gate, expert_capacity, require_partitionable
from moe_overlap.runtime.routing.balance import (
    LateBalanceGradient,
    add_counts,
    close_balance,
    open_balance,
    z_loss_share,
)
from moe_overlap.runtime.routing.state import (
    DrawClock,
    RoutingState,
    drop_beyond_capacity,
    position_major,
    sample_major,
)

GatingLinear = Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Tensor]


def gating_linear(hidden: Tensor, weight_EH: Tensor, bias_E: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Logits [..., E] of the hidden states [..., H], in `dtype`.

    megatron-core's linear layer needs Transformer Engine's GEMM and ends in a NameError without it; ours stands in. Both save the
    input in its own precision: a float32 copy of every token would outweigh the rest of the gate.
    """
    if HAVE_TE:
        return router_gating_linear(hidden, weight_EH, bias_E, dtype)
    return _GatingLinear.apply(hidden, weight_EH, bias_E, dtype)


class _GatingLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_EH: Tensor, bias_E: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight_EH)
        ctx.dtype, ctx.bias_dtype = dtype, None if bias_E is None else bias_E.dtype
        bias_E = None if bias_E is None else bias_E.to(dtype)
        return torch.nn.functional.linear(hidden.to(dtype), weight_EH.to(dtype), bias_E)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        hidden, weight_EH = ctx.saved_tensors
        (grad,) = gradients
        grad_TE = grad.flatten(0, -2)
        grad_hidden = (grad @ weight_EH.to(ctx.dtype)).to(hidden.dtype)
        grad_weight_EH = (grad_TE.t() @ hidden.flatten(0, -2).to(ctx.dtype)).to(weight_EH.dtype)
        grad_bias_E = None if ctx.bias_dtype is None else grad_TE.sum(0).to(ctx.bias_dtype)
        return grad_hidden, grad_weight_EH, grad_bias_E, None


class Meter(Protocol):
    """A counter of a gate's decisions."""

    def add(self, logits_TE: Tensor, map_TE: Tensor, wanted_TE: Tensor) -> None:
        """Count one partition: its logits, the routes of its tokens, and their routes without capacity."""


class Gate(TopKRouter):
    """A router of megatron-core, usable as `MoESubmodules.router`, that can also route a micro-batch partition by partition.

    A subclass chooses the experts of a token (`choose`) and, if position does not decide, the tokens that stay (`keep`).

    Args:
        config: a TransformerConfig whose router flags agree with the gate.
        pg_collection: the stage's groups; tp, cp, tp_cp and tp_dp_cp are read.
        clock: seed and micro-batch of the draws that `forward` makes; `route` takes them from its state.
        linear: the linear layer that computes logits; a weight-gradient split passes its own.
    Raises:
        ConfigError: a router flag disagrees with the gate.
    """

    name: ClassVar[str]
    partitionable_before: ClassVar[bool]
    """Whether samples may arrive in partitions: the decision for a token depends on it and on earlier tokens only."""
    num_experts: int
    meter: Meter | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "name"):
            cls.partitionable_before = GATE_FACTS[cls.name].partitionable_before

    def __init__(
        self,
        config: Any,
        pg_collection: Any = None,
        clock: DrawClock | None = None,
        linear: GatingLinear = gating_linear,
    ) -> None:
        # First, so that the user reads the rule of the flag rather than an error from megatron-core.
        check_gate(self.name, config)
        super().__init__(config=config, pg_collection=pg_collection)
        self.clock = clock
        self.linear = linear

    def begin(
        self,
        sequence: int,
        samples: int,
        partitions: int = 1,
        *,
        seed: int = 0,
        micro_batch: int = 0,
        padding_SB: Tensor | None = None,
        recording: bool | None = None,
        logs: bool = True,
    ) -> RoutingState:
        """Start a micro-batch.

        Args:
            sequence, samples: S and B of the whole micro-batch on this rank.
            partitions: number of calls of `route` that will follow.
            seed, micro_batch: seed and micro-batch of the draws; `first_micro_batch` says how micro-batches are numbered.
            padding_SB: bool, true where a token is padding.
            recording: whether losses and counts are kept; default: in training.
            logs: whether the values of the losses are computed for megatron-core's log; gradients do not need them.
        Raises:
            ConfigError: several partitions at a gate that needs the whole micro-batch.
        """
        if partitions > 1:
            require_partitionable(self.name, "around")
        recording = self.training if recording is None else recording
        has_losses = self.is_aux_loss_enabled() or self.config.moe_z_loss_coeff is not None
        totals = None
        if recording and self.training and has_losses:
            totals = open_balance(self, sequence, samples, padding_SB, logs)
        return RoutingState(
            sequence=sequence,
            samples=samples,
            partitions=partitions,
            # A new tensor per micro-batch, on the device: reading it would stop the host at every gate.
            used_E=torch.zeros(self.num_experts, dtype=torch.int64, device=self.weight.device),
            totals=totals,
            counts_bias=recording and self.enable_expert_bias,
            counts_load=recording and self.meter is not None,
            seed=seed,
            micro_batch=micro_batch,
            padding_SB=padding_SB,
        )

    def gating(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states [..., H], in the precision of --moe-router-dtype."""
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype, hidden.dtype)
        return self.linear(hidden, self.weight, self.bias, dtype)

    def route(self, hidden_SBH: Tensor, state: RoutingState, partition: int) -> tuple[Tensor, Tensor]:
        """Route one partition.

        Args:
            hidden_SBH: its samples, whole sequences of this rank; B may be 0.
            state: state of the micro-batch; advanced, unless the partition has been routed before.
            partition: its number.
        Returns:
            probs_TE: weight of each expert's answer, 0 if a token does not go; carries the gradients of the losses.
            map_TE: bool, where the tokens go.
        """
        self._maintain_float32_expert_bias()
        return self.route_logits(self.gating(hidden_SBH), state, partition)

    def route_logits(self, logits_SBE: Tensor, state: RoutingState, partition: int) -> tuple[Tensor, Tensor]:
        """Route one partition from its logits: `route` after the linear layer."""
        # A recomputation starts from the capacity that the partition met the first time, whatever has been routed since.
        entry, is_repeated = state.enter(partition, logits_SBE.shape[1])
        samples = range(entry.first_sample, entry.last_sample)
        padding_T = None if state.padding_SB is None else state.padding_SB[:, samples.start : samples.stop].reshape(-1)
        logits_TE = logits_SBE.reshape(-1, self.num_experts)
        totals = state.totals
        if totals is not None and self.config.moe_z_loss_coeff is not None:
            logits_TE = z_loss_share(self, totals, logits_TE, padding_T, is_new=not is_repeated)

        probs_TE, wanted_TE = self.choose(logits_TE, state, samples)
        map_TE, used_E = self.keep(wanted_TE, logits_TE, entry.used_E, state, samples)
        # As in megatron-core, a dropped expert's weight is not spread over the token's other experts.
        if map_TE is not wanted_TE:  # where every token stays, there is nothing to take away
            probs_TE = probs_TE * map_TE

        if totals is not None and self.is_aux_loss_enabled():
            balance_map_TE, scores_TE = self.balance_scores(logits_TE, wanted_TE, padding_T)
            if not is_repeated:
                add_counts(totals, scores_TE, balance_map_TE, samples)
            probs_TE = LateBalanceGradient.apply(probs_TE, scores_TE, totals, samples)
        if not is_repeated:
            # Once per partition: a repetition would count its tokens twice and fill the experts before later partitions come.
            state.leave(entry, used_E)
            if state.counts_load and self.meter is not None:
                self.meter.add(logits_TE, map_TE, wanted_TE)
            if state.counts_bias:
                with torch.no_grad():
                    counted_TE = map_TE if padding_T is None else map_TE & ~padding_T[:, None]
                    self.local_tokens_per_expert += counted_TE.sum(0)
            if state.is_complete and totals is not None:
                # In the forward pass of the last partition: the first backward pass, of any partition, needs the counts
                # of all.
                close_balance(self, totals)
        return probs_TE, map_TE

    @abstractmethod
    def choose(self, logits_TE: Tensor, state: RoutingState, samples: range) -> tuple[Tensor, Tensor]:
        """Choose the experts of one partition's tokens, ignoring capacity; returns (weights_TE, 0 outside the map; map_TE)."""

    def balance_scores(self, logits_TE: Tensor, wanted_TE: Tensor, padding_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """The [T, E] map and scores of the tokens that count in the balancing losses; by megatron-core's rule."""
        map_and_scores: tuple[Tensor, Tensor] = compute_routing_scores_for_aux_loss(
            logits_TE, self.topk, self.score_function, self.config.moe_router_fusion, padding_T
        )
        return map_and_scores

    def capacity(self, state: RoutingState) -> int | None:
        """Tokens that each expert takes from the whole micro-batch; None without a limit."""
        factor = self.config.moe_expert_capacity_factor
        return None if factor is None else expert_capacity(state.tokens, self.topk, self.num_experts, factor)

    def most_rows(self, tokens: int, state: RoutingState) -> int:
        """Upper bound of the (token, expert) pairs of so many tokens of the micro-batch; needs no routing."""
        capacity = self.capacity(state)
        routed = tokens * self.topk
        return routed if capacity is None else min(routed, capacity * self.num_experts)

    def scaled(self, weights: Tensor) -> Tensor:
        """Multiply the weights of chosen experts by --moe-router-topk-scaling-factor."""
        factor = self.config.moe_router_topk_scaling_factor
        return weights * factor if factor else weights

    def keep(
        self, wanted_TE: Tensor, logits_TE: Tensor, used_E: Tensor, state: RoutingState, samples: range
    ) -> tuple[Tensor, Tensor]:
        """Drop tokens beyond capacity, counted sample by sample; returns (map_TE, capacity used after them)."""
        if self.capacity(state) is None:
            return wanted_TE, used_E + wanted_TE.sum(0)  # a sum has no order: nothing is reordered for it
        kept_TE, used_E = drop_beyond_capacity(sample_major(wanted_TE, len(samples)), used_E, self.capacity(state))
        return position_major(kept_TE, len(samples)), used_E

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route logits [S, B, E] as one partition: megatron-core's entry point after the linear layer."""
        return self.route_logits(logits, self._begin_whole(logits, padding_mask), 0)

    def forward(self, hidden_SBH: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route a whole micro-batch, as megatron-core's MoE layer calls it.

        Args:
            hidden_SBH: hidden states.
            padding_mask: [S, B], true where a token is padding.
        Returns:
            (probs_TE, map_TE), as `route`.
        """
        return self.route(hidden_SBH, self._begin_whole(hidden_SBH, padding_mask), 0)

    def _begin_whole(self, x_SBX: Tensor, padding_SB: Tensor | None) -> RoutingState:
        """Begin a state of one partition. As in megatron-core, a pass without gradients (the first of two) leaves no trace."""
        clock = self.clock or DrawClock()
        return self.begin(
            x_SBX.shape[0],
            x_SBX.shape[1],
            seed=clock.seed,
            micro_batch=clock.micro_batch,
            padding_SB=padding_SB,
            recording=torch.is_grad_enabled(),
        )
