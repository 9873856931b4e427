"""Balancing losses and z-loss of a micro-batch that is routed in partitions.

The batch-level loss is a product of two sums over the micro-batch, E/(k·T²) · Σ_e f_e · P_e: counts f (no gradient) and scores P.
No partition knows f in its forward pass; every one does in its backward pass, where it is needed. So forward sums up, and
`LateBalanceGradient` writes the gradient of the scores, f_e · E/(k·T²) · coefficient, when backward comes by. The sequence-level
loss is the mean over samples of the same; the global one takes f averaged over the micro-batches of the step so far. The z-loss
is a mean over tokens, of which a partition adds its share.

Formulas and names of logged values are megatron-core's (transformer/moe/router.py), weights those of `state/attached_losses.py`;
one all-reduce of the counts per group and micro-batch replaces its one per loss.

Legend: T tokens of a partition, B samples of the micro-batch, E experts; f counts, P summed scores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, save_to_aux_losses_tracker
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

LOGGED_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
Z_LOSS = "z_loss"


@dataclass(slots=True)
class BalanceTotals:
    """Sums over the partitions routed so far.

    Attributes:
        counts_BE: int64, tokens that would go to each expert without capacity.
        scores_BE: float32, summed scores.
        squares: summed squares of the logits' log-sum-exp.
        valid_tokens: of the micro-batch, padding left out; at least 1.
        factor_BE: gradient of all balancing losses with respect to a score, loss scale left out; None until `close_balance`.
        values: what the losses are without their coefficients, by logged name; filled by `close_balance`.
        logs: whether they are formed at all: nothing but a log reads them.
    """

    counts_BE: Tensor
    scores_BE: Tensor
    squares: Tensor
    valid_tokens: Tensor
    factor_BE: Tensor | None = None
    values: dict[str, Tensor] = field(default_factory=dict)
    logs: bool = True


def open_balance(
    router: TopKRouter, sequence: int, samples: int, padding_SB: Tensor | None, logs: bool = True
) -> BalanceTotals:
    """Open empty sums for one micro-batch of S positions and B samples."""
    device = router.weight.device
    valid = torch.full((), sequence * samples, device=device) if padding_SB is None else (~padding_SB).sum()
    shape = (samples, router.num_experts)
    return BalanceTotals(
        counts_BE=torch.zeros(shape, dtype=torch.int64, device=device),
        scores_BE=torch.zeros(shape, dtype=torch.float32, device=device),
        squares=torch.zeros((), dtype=torch.float32, device=device),
        valid_tokens=valid.clamp(min=1),
        logs=logs,
    )


@torch.no_grad()
def add_counts(totals: BalanceTotals, scores_TE: Tensor, map_TE: Tensor, samples: range) -> None:
    """Add one partition, given position-major."""
    if len(samples) == 0:
        return
    rows = slice(samples.start, samples.stop)
    # Assigned, not added: every sample is in one partition. Counts
    # are integers, so their sums over ranks are exact in any order.
    shape = (-1, len(samples), map_TE.shape[1])
    torch.sum(map_TE.view(shape), 0, out=totals.counts_BE[rows])
    torch.sum(scores_TE.view(shape), 0, dtype=torch.float32, out=totals.scores_BE[rows])


def z_loss_share(
    router: TopKRouter, totals: BalanceTotals, logits_TE: Tensor, padding_T: Tensor | None, is_new: bool
) -> Tensor:
    """Attach one partition's share of the z-loss to its logits.

    Args:
        is_new: whether the share is to be added to the logged value.
    Returns:
        The logits, whose backward pass also carries the gradient of the share.
    Source: Zoph et al. 2022 (ST-MoE), equation 5.
    """
    squares_T = torch.logsumexp(logits_TE, dim=-1).square()
    if padding_T is not None:
        squares_T = squares_T * ~padding_T
    if is_new:
        totals.squares += squares_T.detach().sum(dtype=torch.float32)
    # The first pass of a recomputation logs the share; its gradient comes from the second.
    if not torch.is_grad_enabled():
        return logits_TE
    share = squares_T.sum() / totals.valid_tokens * (router.config.moe_z_loss_coeff / router.tp_cp_group.size())
    return MoEAuxLossAutoScaler.apply(logits_TE, share)


@torch.no_grad()
def close_balance(router: TopKRouter, totals: BalanceTotals) -> None:
    """After the last partition: form the losses, log them, and make the gradients known."""
    if router.config.moe_z_loss_coeff is not None and totals.logs:
        _log(router, totals, Z_LOSS, totals.squares / totals.valid_tokens, group=None)
    if not router.is_aux_loss_enabled():
        return
    samples = max(totals.counts_BE.shape[0], 1)
    # All balancing losses are linear in the scores once the counts are known, so that one factor per sample and expert
    # is the gradient of their sum.
    totals.factor_BE = torch.zeros_like(totals.scores_BE)
    # Collective, once per micro-batch: every rank comes here behind its last partition, also where that is empty.
    near_BE = sum_over(totals.counts_BE, router.tp_cp_group)
    for kind, name in LOGGED_NAMES.items():
        coefficient = router.get_aux_loss_coeff(kind)
        if coefficient == 0:
            continue
        group, counts, terms = router.tp_cp_group, near_BE.sum(0), 1
        if kind == "seq_aux_loss":
            counts, terms = near_BE, samples
        tokens = counts.sum() / (router.topk * terms)
        if kind == "global_aux_loss":
            group = router.tp_dp_cp_group
            far_E = sum_over(totals.counts_BE.sum(0), group)
            router.global_tokens_per_expert += far_E
            router.ga_steps += 1
            counts, tokens = router.global_tokens_per_expert / router.ga_steps, far_E.sum() / router.topk
        # A micro-batch of padding alone has no tokens, and no loss either.
        weight = counts * router.num_experts / (router.topk * tokens.clamp(min=1).square()) / terms
        if totals.logs:
            _log(router, totals, name, (totals.scores_BE * weight).sum(), group, has_dp=kind == "global_aux_loss")
        totals.factor_BE += coefficient * weight


def sum_over(counts: Tensor, group: Any) -> Tensor:
    """Sum over the ranks of a group; a group of one communicates nothing."""
    if group.size() == 1:
        return counts
    counts = counts.clone()
    dist.all_reduce(counts, group=group)
    return counts


def _log(router: TopKRouter, totals: BalanceTotals, name: str, value: Tensor, group: Any, has_dp: bool = False) -> None:
    totals.values[name] = value
    layers = router.config.num_layers + (router.config.mtp_num_layers or 0)
    save_to_aux_losses_tracker(name, value, router.layer_number, layers, reduce_group=group, reduce_group_has_dp=has_dp)


class LateBalanceGradient(torch.autograd.Function):
    """The identity on probabilities; backward also gives the scores the gradient of the balancing losses."""

    @staticmethod
    def forward(ctx: Any, probs_TE: Tensor, scores_TE: Tensor, totals: BalanceTotals, samples: range) -> Tensor:
        """Remember which samples the rows belong to (position-major)."""
        ctx.totals, ctx.samples = totals, samples
        ctx.shape, ctx.dtype = scores_TE.shape, scores_TE.dtype
        return probs_TE.view_as(probs_TE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Every partition has been routed by now, so the counts are known."""
        factor_BE = ctx.totals.factor_BE
        # A schedule that starts backward earlier would need counts that
        # nobody has yet: it fails here instead of training wrongly.
        assert factor_BE is not None, "the backward pass began before the last partition was routed"
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        partition_BE = factor_BE[ctx.samples.start : ctx.samples.stop]
        if scale is not None:
            partition_BE = partition_BE * scale
        (grad_probs_TE,) = gradients
        positions = ctx.shape[0] // max(len(ctx.samples), 1)
        return grad_probs_TE, partition_BE.to(ctx.dtype).repeat(positions, 1), None, None
