"""The gates of --moe-gate: top-k, switch, batch prioritized, random, hash and expert choice.

A gate decides the same for a token whether the micro-batch is routed whole or in partitions of its samples. Batch prioritized
and expert choice look at later tokens and cannot: `GATE_FACTS` (plan/gates.py) says so, and plans route their micro-batches
whole.

T tokens of a partition in megatron-core's order, S positions, B samples, E experts, K experts per token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from megatron.core.transformer.moe.moe_utils import group_limited_topk, topk_routing_with_score_function
from torch import Tensor

from moe_overlap.runtime.routing.gate import Gate
from moe_overlap.runtime.routing.state import (
    DrawClock,
    RoutingState,
    draw_experts,
    drop_by_priority,
    fold,
    position_major,
    sample_major,
)


def sigmoid_scores(logits: Tensor) -> Tensor:
    """Sigmoids in the precision of the logits.

    On a CPU, torch computes the last elements of a tensor by another routine, one bit apart: a token's score would depend on
    whether it comes last in its partition. Rounding from float64 makes both equal.
    """
    return torch.sigmoid(logits.double()).float().type_as(logits)


def normalised(scores_TK: Tensor) -> Tensor:
    """Scores of a token's experts, with sum 1 if there are several; the constant is megatron-core's."""
    return scores_TK / (scores_TK.sum(-1, keepdim=True) + 1e-20) if scores_TK.shape[-1] > 1 else scores_TK


def spread(logits_TE: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """(weights_TE, map_TE) of chosen experts."""
    map_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, chosen_TK, True)
    return torch.zeros_like(logits_TE).scatter(1, chosen_TK, weights_TK.to(logits_TE.dtype)), map_TE


class TopKGate(Gate):
    """The k experts of highest score, by megatron-core's scoring: softmax or sigmoid, groups, bias, scaling factor."""

    name = "topk"

    def choose(self, logits_TE: Tensor, state: RoutingState, samples: range) -> tuple[Tensor, Tensor]:
        """Choose by score, token by token."""
        if self._chooses_plainly():
            scores_TK, chosen_TK = logits_TE.topk(self.topk, dim=1)
            return spread(logits_TE, chosen_TK, torch.softmax(scores_TK, dim=-1, dtype=torch.float32))
        by_core = self.score_function == "softmax" or self.config.moe_router_fusion or self.router_replay is not None
        if not by_core:
            return self._choose_by_sigmoid(logits_TE)
        return topk_routing_with_score_function(
            logits_TE,
            self.topk,
            use_pre_softmax=self.config.moe_router_pre_softmax,
            num_groups=self.config.moe_router_num_groups,
            group_topk=self._group_topk(logits_TE),
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            fused=self.config.moe_router_fusion,
            router_replay=self.router_replay,
        )

    def _chooses_plainly(self) -> bool:
        """Whether a token goes to its highest logits and no bias, group or scale matters: then few operators suffice."""
        config = self.config
        special = config.moe_router_pre_softmax or config.moe_router_group_topk or config.moe_router_topk_scaling_factor
        replaced = config.moe_router_fusion or self.router_replay is not None
        return self.score_function == "softmax" and not special and not replaced

    def balance_scores(self, logits_TE: Tensor, wanted_TE: Tensor, padding_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """Map and scores as in `Gate`; where the highest logits decide, `wanted_TE` is already the map of the highest scores."""
        if padding_T is not None or not self._chooses_plainly():
            return super().balance_scores(logits_TE, wanted_TE, padding_T)
        return wanted_TE, torch.softmax(logits_TE, dim=-1, dtype=torch.float32)

    def _group_topk(self, logits_TE: Tensor) -> int | None:
        """Groups a token may reach; megatron-core's routine cannot shape an empty partition."""
        return self.config.moe_router_group_topk if logits_TE.shape[0] else None

    def _choose_by_sigmoid(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Choose as megatron-core does, on scores that do not depend on a token's position in the tensor."""
        scores_TE = sigmoid_scores(logits_TE)
        biased_TE = scores_TE.detach() if self.expert_bias is None else scores_TE.detach() + self.expert_bias
        reached = self._group_topk(logits_TE)
        if reached:
            sizes = (logits_TE.shape[0], self.num_experts, self.config.moe_router_num_groups)
            _, chosen_TK = group_limited_topk(biased_TE, self.topk, *sizes, reached)
        else:
            chosen_TK = biased_TE.topk(self.topk, dim=-1).indices
        return spread(logits_TE, chosen_TK, self.scaled(normalised(scores_TE.gather(1, chosen_TK))))


class SwitchGate(TopKGate):
    """One expert per token, weighed by its softmax over all experts (Fedus et al. 2022)."""

    name = "switch"


class BatchPrioritizedGate(TopKGate):
    """Top-k, but an expert over capacity drops the tokens of lowest score in the micro-batch (Riquelme et al. 2021).

    A token's score is the sum of its chosen experts' scores over all experts (Lancet, section 2.3). Weights that are
    normalised over the chosen ones sum to 1 for every token and order nothing.
    """

    name = "batch_prioritized"

    def keep(
        self, wanted_TE: Tensor, logits_TE: Tensor, used_E: Tensor, state: RoutingState, samples: range
    ) -> tuple[Tensor, Tensor]:
        """Tokens of high score first; equal scores sample by sample."""
        logits_TE = logits_TE.detach()
        is_softmax = self.score_function == "softmax"
        scores_TE = torch.softmax(logits_TE.float(), -1) if is_softmax else normalised(sigmoid_scores(logits_TE))
        priority_T = (scores_TE * wanted_TE).sum(-1)
        # Reordered first: the stable sort breaks ties by position, and positions count sample by sample.
        count = len(samples)
        kept_TE, used_E = drop_by_priority(
            sample_major(wanted_TE, count), sample_major(priority_T, count), used_E, self.capacity(state)
        )
        return position_major(kept_TE, count), used_E


class DrawingGate(Gate):
    """Experts follow from the token's position; their weights are learned, so that the router has gradients."""

    @abstractmethod
    def draw(self, state: RoutingState, samples: range) -> Tensor:
        """Experts [S, B or 1, K] of one partition."""

    def choose(self, logits_TE: Tensor, state: RoutingState, samples: range) -> tuple[Tensor, Tensor]:
        """Draw, then weigh the chosen experts as megatron-core does."""
        chosen_TK = self.draw(state, samples).expand(-1, len(samples), -1).reshape(-1, self.topk)
        return spread(logits_TE, chosen_TK, self.scaled(self._weights(logits_TE, chosen_TK)))

    def _weights(self, logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        if self.score_function == "sigmoid":
            return normalised(sigmoid_scores(logits_TE.gather(1, chosen_TK)))
        if self.config.moe_router_pre_softmax:
            return torch.softmax(logits_TE, -1, dtype=torch.float32).gather(1, chosen_TK)
        return torch.softmax(logits_TE.gather(1, chosen_TK), -1, dtype=torch.float32)

    def positions(self, sequence: int) -> Tensor:
        """Map this rank's positions to positions in the whole sequence.

        megatron-core cuts it into 2·CP chunks, of which context rank r holds chunks r and 2·CP - 1 - r; sequence parallelism
        cuts what a context rank holds.
        """
        split = self.config.sequence_parallel
        tensor_size, tensor_rank = (self.tp_group.size(), self.tp_group.rank()) if split else (1, 0)
        local_S = torch.arange(sequence, device=self.weight.device) + tensor_rank * sequence
        context_size, context_rank = self.cp_group.size(), self.cp_group.rank()
        if context_size == 1:
            return local_S
        # A context rank holds two chunks, which sequence parallelism has cut over the tensor ranks.
        chunk = sequence * tensor_size // 2
        chunk_S = torch.where(local_S < chunk, context_rank, 2 * context_size - 1 - context_rank)
        return chunk_S * chunk + local_S % chunk


class RandomGate(DrawingGate):
    """k different experts, drawn for every token of every micro-batch (Zuo et al. 2022; a gate of Lancet's).

    A draw depends on seed, layer, position and the number of the sample since the start of the run, not on how samples are
    spread over data-parallel ranks, micro-batches and partitions.
    """

    name = "random"

    def draw(self, state: RoutingState, samples: range) -> Tensor:
        """Experts [S, B, K]."""
        ranks = self.tp_cp_group.size()  # tensor and context are the fast axes of the group of all
        data_size, data_rank = self.tp_dp_cp_group.size() // ranks, self.tp_dp_cp_group.rank() // ranks
        # Micro-batches are dealt over the data-parallel ranks, so this is the sample's number in the run at any layout.
        first = (state.micro_batch * data_size + data_rank) * state.samples
        samples_B = torch.arange(samples.start, samples.stop, device=self.weight.device) + first
        # 0 here and 1 in the hash gate: different draws at the same seed.
        key = fold(fold(0, state.seed), self.layer_number or 0)
        return draw_experts(key, self.positions(state.sequence), samples_B, self.topk, self.num_experts)

    def _begin_whole(self, x_SBX: Tensor, padding_SB: Tensor | None) -> RoutingState:
        assert self.clock is not None, "the random gate draws by micro-batch: pass it a clock, or call route"
        return super()._begin_whole(x_SBX, padding_SB)


class HashGate(DrawingGate):
    """k different experts by a fixed hash of position and layer (Roller et al. 2021, who hash token ids; a gate sees none)."""

    name = "hash"

    def draw(self, state: RoutingState, samples: range) -> Tensor:
        """Experts [S, 1, K]."""
        key = fold(fold(1, state.seed), self.layer_number or 0)
        anyone = torch.zeros(1, dtype=torch.int64, device=self.weight.device)
        return draw_experts(key, self.positions(state.sequence), anyone, self.topk, self.num_experts)


class ExpertChoiceGate(Gate):
    """Each expert takes the tokens that score highest for it, up to its capacity (Zhou et al. 2022).

    A token may reach any number of experts, none included; on average, factor times k. The choice looks at later tokens too.
    """

    name = "expert_choice"

    def choose(self, logits_TE: Tensor, state: RoutingState, samples: range) -> tuple[Tensor, Tensor]:
        """Experts choose; of equal scores the earlier token wins, sample by sample."""
        scores_TE = torch.softmax(logits_TE, -1, dtype=torch.float32)
        capacity = self.capacity(state)
        assert capacity is not None
        ordered_TE = sample_major(scores_TE.detach(), len(samples))
        # A stable sort: topk does not define which of equal scores it takes.
        taken_CE = ordered_TE.argsort(dim=0, descending=True, stable=True)[:capacity]
        map_TE = torch.zeros_like(ordered_TE, dtype=torch.bool).scatter(0, taken_CE, True)
        map_TE = position_major(map_TE, len(samples))
        return self.scaled(scores_TE).to(logits_TE.dtype) * map_TE, map_TE

    def most_rows(self, tokens: int, state: RoutingState) -> int:
        """Experts choose: a token may reach all of them, and an expert takes no more than its capacity."""
        capacity = self.capacity(state)
        assert capacity is not None
        return min(tokens, capacity) * self.num_experts

    def keep(
        self, wanted_TE: Tensor, logits_TE: Tensor, used_E: Tensor, state: RoutingState, samples: range
    ) -> tuple[Tensor, Tensor]:
        """Keep every choice: no expert took more than its capacity."""
        return wanted_TE, used_E + wanted_TE.sum(0)


def gate_maker(name: str | None, clock: DrawClock) -> Callable[..., Gate] | None:
    """Return the constructor of a run's gates; None if megatron-core's router stays.

    Args:
        name: value of --moe-gate, or None.
        clock: seed and micro-batch number for the gates that draw.
    """
    return None if name is None else partial(GATES[name], clock=clock)


GATES: Mapping[str, type[Gate]] = MappingProxyType(
    {gate.name: gate for gate in (TopKGate, SwitchGate, BatchPrioritizedGate, RandomGate, HashGate, ExpertChoiceGate)}
)
"""The classes behind --moe-gate."""
