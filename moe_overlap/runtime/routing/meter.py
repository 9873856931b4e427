"""Counters of the routers' decisions: tokens per expert, drops, entropy of the scores.

A meter runs after the linear layer of a router and counts every partition of every training micro-batch once: it skips passes
without gradients (evaluation, the first pass of a recompute) and partitions that are routed again. It adds up on the device and
communicates nothing; `RouterMeters.collect` sums over the ranks.

With sequence parallelism (a rule of MoE layers under tensor parallelism) every rank routes tokens of its own, so the sum over
all ranks counts each token once, at any TP, CP, DP and EP; pipeline stages hold different layers.

Legend: T tokens of one call, E experts, L layers of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from moe_overlap.describe.expert_load import ExpertLoad
from moe_overlap.runtime.routing.gate import Gate


class RouterMeter:
    """Sums of one router on one rank since the last `take`.

    Args:
        score_function: the router's, `softmax` or `sigmoid`.
    """

    def __init__(self, num_experts: int, score_function: str, device: torch.device) -> None:
        self._experts, self._score_function = num_experts, score_function
        # load by expert, dropped by expert, entropy, tokens: float64 holds counts up to 2^53 exactly.
        self._sums = torch.zeros(2 * num_experts + 2, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, logits_TE: Tensor, map_TE: Tensor, wanted_TE: Tensor) -> None:
        """Count one call.

        Args:
            logits_TE: logits of the router.
            map_TE: bool, the pairs that are computed, padding to capacity included.
            wanted_TE: bool, the choice of the tokens before capacity.
        """
        # float64, as exact as the sums: entropies of millions of tokens are added up between two reports.
        logits_TE = logits_TE.detach().double()
        scores_TE = logits_TE.softmax(-1) if self._score_function == "softmax" else logits_TE.sigmoid()
        scores_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
        self._sums[: self._experts] += (map_TE & wanted_TE).sum(0)
        self._sums[self._experts : -2] += (wanted_TE & ~map_TE).sum(0)
        self._sums[-2] += torch.special.entr(scores_TE).sum()
        self._sums[-1] += logits_TE.shape[0]

    def take(self) -> Tensor:
        """Return the sums [2E + 2] and reset them."""
        sums = self._sums.clone()
        self._sums.zero_()  # in place: captured graphs add to this memory
        return sums


class RouterMeters:
    """The meters of all routers in this rank's transformer layers; the constructor attaches them.

    Args:
        models: the GPTModel of each of this rank's chunks.
        layers, experts: numbers in the whole model; prediction layers follow the decoder's.
    """

    def __init__(self, models: Iterable[torch.nn.Module], layers: int, experts: int, device: torch.device) -> None:
        self._shape, self._device = (layers, 2 * experts + 2), device
        self._meters: dict[int, RouterMeter] = {}
        inside = (module for model in models for module in model.modules())
        for router in (module for module in inside if isinstance(module, TopKRouter)):
            assert router.layer_number is not None
            meter = RouterMeter(experts, router.score_function, device)
            self._meters[router.layer_number - 1] = meter
            if isinstance(router, Gate):
                router.meter = meter
            else:
                # `routing` is the first method after the linear layer that sees logits and decisions together.
                router.routing = _metered(router, meter)

    def collect(self, first_step: int, last_step: int) -> list[ExpertLoad]:
        """Sum up the steps since the last call over all ranks, layer by layer. Collective over the default group.

        Args:
            first_step, last_step: the range of these steps, both included.
        """
        # Every rank contributes a row for every layer, zeros for layers of other stages: one reduction of one shape needs no
        # agreement on the layers of each rank.
        sums = torch.zeros(self._shape, dtype=torch.float64, device=self._device)
        for layer, meter in self._meters.items():
            sums[layer] = meter.take()
        dist.all_reduce(sums)
        experts, loads = (self._shape[1] - 2) // 2, []
        for layer, row in enumerate(sums.tolist()):
            *counts, entropy, tokens = row
            if tokens:
                load, dropped = (tuple(map(int, part)) for part in (counts[:experts], counts[experts:]))
                loads.append(ExpertLoad(first_step, last_step, layer, int(tokens), load, dropped, entropy / tokens))
        return loads


def _metered(router: TopKRouter, meter: RouterMeter) -> Callable[..., tuple[Tensor, Tensor]]:
    """Wrap the `routing` of megatron-core's router so that its decisions are counted."""
    routing = router.routing

    def routed(logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        probs_TE, map_TE = routing(logits, padding_mask=padding_mask)
        # The first pass of a recomputation has no gradients, so each micro-batch counts once.
        if router.training and torch.is_grad_enabled():
            logits_TE = logits.detach().reshape(map_TE.shape)
            meter.add(logits_TE, map_TE, _uncapped_choice(router, logits_TE, map_TE))
        return probs_TE, map_TE

    return routed


@torch.no_grad()
def _uncapped_choice(router: Any, logits_TE: Tensor, map_TE: Tensor) -> Tensor:
    """[T, E] the router's choice without the capacity limit, computed again because megatron-core does not return it."""
    config = router.config
    if config.moe_expert_capacity_factor is None:
        return map_TE
    if router.routing_type == "sinkhorn":
        return router.sinkhorn_load_balancing(logits_TE)[1]
    return topk_routing_with_score_function(
        logits_TE,
        router.topk,
        use_pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        scaling_factor=config.moe_router_topk_scaling_factor,
        score_function=router.score_function,
        expert_bias=router.expert_bias,
        fused=config.moe_router_fusion,
    )[1]
