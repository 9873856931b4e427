"""Stand-ins for the exchanges of the flex dispatcher, DeepEP and HybridEP: what each kernel reads, sends, writes and keeps.

Both send a token once to every rank that holds some of its experts. DeepEP hands over the rows as they come, and a permutation
copies them for the experts; HybridEP writes each expert's rows itself. Routing is balanced: a rank receives as much as it sends.

Legend: T tokens, R rows sent or received, N rows of this rank's experts, H hidden size, K choices of a token, E experts of the
group, L experts of this rank, P ranks of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_overlap.describe.routing import expected_places
from moe_overlap.tuner.capture.record import Recorder
from moe_overlap.tuner.capture.stand_ins import Counts

COPIES_PER = 16
"""Copies of a token are counted in parts of this size, so that tokens of a sample batch make whole rows."""


def sent_rows(tokens: int, choices: int, ranks: int) -> int:
    """Rows that leave a rank, its own among them."""
    rows = tokens * round(COPIES_PER * expected_places(choices, ranks))
    assert rows % COPIES_PER == 0, "the sample batch makes no whole rows"
    return rows // COPIES_PER


@dataclass(frozen=True, slots=True)
class Route:
    """An exchange that runs: megatron-core calls it the handle, and hands it to the way back.

    Attributes:
        library: deepep or hybridep, as the table of kernels names them.
        tokens, sent: T and R.
        received: rows on the other side: R of DeepEP, N of HybridEP.
        plan: what the library made of the routing map.
        score_shape: of the scores that travel along: per token, and per received row.
    """

    recorder: Recorder
    library: str
    group: Any
    tokens: int
    sent: int
    received: int
    plan: Tensor
    score_shape: tuple[tuple[int, ...], tuple[int, ...]]

    def there(self, x_TH: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens to the ranks of their experts."""
        return self._exchange("dispatch", x_TH, scores, self.received, self.score_shape[1])

    def back(self, x_RH: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Rows to where they came from, added up for each token."""
        return self._exchange("combine", x_RH, scores, self.tokens, self.score_shape[0])

    def _exchange(
        self, name: str, x: Tensor, scores: Tensor | None, rows: int, score_shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        def exchanged(rows_in: Tensor, _plan: Tensor, scores_in: Tensor | None) -> tuple[Tensor, ...]:
            out = rows_in.new_empty(rows, rows_in.shape[1])
            return (out,) if scores_in is None else (out, scores_in.new_empty(score_shape))

        each = x.shape[1] * x.element_size()
        each += 0 if scores is None else scores.element_size() * (scores.numel() // scores.shape[0])
        out, *out_scores = self.recorder.kernel(
            f"{self.library}.{name}", exchanged, x, self.plan, scores, sent=(self.group, self.sent * each)
        )
        return out, out_scores[0] if out_scores else None


class Dispatch(torch.autograd.Function):
    """To the experts, with the scores; keeps the plan only."""

    @staticmethod
    def forward(ctx: Any, route: Route, x_TH: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Received rows and their scores."""
        ctx.route = route
        out, out_scores = route.there(x_TH, scores)
        assert out_scores is not None
        return out, out_scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """The gradients go back."""
        return None, *ctx.route.back(*gradients)


class Combine(torch.autograd.Function):
    """From the experts; keeps the plan only."""

    @staticmethod
    def forward(ctx: Any, route: Route, x_RH: Tensor) -> Tensor:
        """[T, H]."""
        ctx.route = route
        return route.back(x_RH, None)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Gradients of the rows."""
        return None, ctx.route.there(gradients[0], None)[0]


class Multihot(torch.autograd.Function):
    """Scores of a row's choices as scores of this rank's experts; keeps the choices."""

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, choices_RK: Tensor, scores_RK: Tensor, experts: int
    ) -> tuple[Tensor, Tensor]:
        """The routing map [R, L], and the scores."""

        def spread(choices: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
            shape = (choices.shape[0], experts)
            return torch.empty(shape, dtype=torch.bool), scores.new_empty(shape)

        ctx.recorder = recorder
        ctx.save_for_backward(choices_RK)
        chosen_RL, spread_RL = recorder.kernel("deepep.multihot", spread, choices_RK, scores_RK)
        ctx.mark_non_differentiable(chosen_RL)
        return chosen_RL, spread_RL

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Of the choices."""
        (choices_RK,) = ctx.saved_tensors

        def gathered(gradient: Tensor, choices: Tensor) -> Tensor:
            return gradient.new_empty(choices.shape)

        return None, None, ctx.recorder.kernel("deepep.multihot", gathered, gradients[1], choices_RK), None


def flex_functions(recorder: Recorder) -> dict[str, Any]:
    """The libraries' functions under the names by which megatron-core's token_dispatcher.py knows them."""

    def rows_of_experts(experts: int, tokens: int) -> int:
        assert recorder.rows_of_map is not None, "there are no experts"
        return recorder.rows_of_map(experts, tokens)

    def fused_dispatch(x_TH: Tensor, choices_TK: Tensor, scores_TK: Tensor, experts: int, group: Any, **_: Any) -> Any:
        (tokens, choices), ranks = choices_TK.shape, group.size()
        sent = sent_rows(tokens, choices, ranks)

        def planned(chosen: Tensor) -> tuple[Tensor, Tensor]:
            # Whether a token goes to a rank, its place there, and where each received row came from.
            return torch.empty(tokens * ranks * 5 + sent * 4, dtype=torch.uint8), chosen.new_empty(sent, choices)

        plan, received_RK = recorder.kernel("deepep.layout", planned, choices_TK)
        shapes = ((tokens, choices), (sent, choices))
        route = Route(recorder, "deepep", group, tokens, sent, sent, plan, shapes)
        rows_RH, scores_RK = Dispatch.apply(route, x_TH, scores_TK)
        local = experts // ranks
        counts = Counts([rows_of_experts(experts, tokens) // local] * local)
        return rows_RH, received_RK, scores_RK, counts, route

    def fused_combine(x_RH: Tensor, group: Any, route: Route, **_: Any) -> tuple[Tensor, None]:
        return Combine.apply(route, x_RH), None

    def hybrid_ep_dispatch(
        *, x: Tensor, routing_map: Tensor, probs: Tensor, group: Any, num_local_experts: int, **_: Any
    ) -> Any:
        (tokens, experts), ranks = routing_map.shape, group.size()
        received = rows_of_experts(experts, tokens)
        sent = sent_rows(tokens, max(1, received // tokens), ranks)
        whole_map = routing_map.new_empty(tokens * ranks, experts)
        dist.all_gather_into_tensor(whole_map, routing_map.contiguous(), group=group)

        def planned(_map: Tensor) -> Tensor:
            # Every token's place on every rank, and the rows of this rank's experts.
            return torch.empty(tokens * ranks * (4 + num_local_experts), dtype=torch.uint8)

        plan = recorder.kernel("hybridep.layout", planned, whole_map)
        route = Route(recorder, "hybridep", group, tokens, sent, received, plan, ((tokens, experts), (received,)))
        rows_NH, scores_N = Dispatch.apply(route, x, probs)
        counts = Counts([received // num_local_experts] * num_local_experts)
        return rows_NH, scores_N, None, counts, route

    def hybrid_ep_combine(*, x: Tensor, handle: Route, **_: Any) -> Tensor:
        return Combine.apply(handle, x)  # type: ignore[no-any-return]

    return {
        "fused_dispatch": fused_dispatch,
        "fused_combine": fused_combine,
        "set_deepep_num_sms": lambda count: None,
        "hybrid_ep_dispatch": hybrid_ep_dispatch,
        "hybrid_ep_combine": hybrid_ep_combine,
    }
