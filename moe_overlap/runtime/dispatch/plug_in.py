"""The irregular dispatcher as `MoELayer.token_dispatcher` of megatron-core, without overlap.

MoELayer passes no state from one call to the next, so the dispatcher stores the handle of the current pass; the backward pass
has its own reference to it. Only one pass can be in flight: for several, use the stages of `IrregularDispatcher`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.gates import expert_capacity
from moe_overlap.plan.instructions import EXPERT
from moe_overlap.runtime.dispatch.irregular import Handle, IrregularDispatcher, Wires
from moe_overlap.runtime.dispatch.wire import Pack, Pending

_REFUSED = {
    "moe_router_padding_for_quantization": "the irregular dispatcher pads to a capacity only",
    "moe_shared_expert_overlap": "the irregular dispatcher does not run the shared expert",
}


class IrregularTokenDispatcher:
    """megatron-core's dispatcher interface over the irregular all-to-all.

    Args:
        num_local_experts, local_expert_indices, config, pg_collection: as megatron-core's dispatchers take them.
    Attributes:
        layer: the layer that owns the dispatcher; None if nothing records spans.
    Raises:
        ConfigError: the configuration asks for padding, or for the shared expert inside the dispatcher.
    """

    def __init__(
        self, num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any
    ) -> None:
        refuse_padding(config)
        self.config = config
        self.ep_group, self.tp_group, self.tp_ep_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.tp_ep
        self.stages = IrregularDispatcher(
            Wires(pg_collection),
            takes_bounds=True,
            in_order=config.deterministic_mode,
            static_capacity=config.moe_pad_expert_input_to_capacity,
        )
        first = self.ep_group.rank() * num_local_experts
        assert local_expert_indices == list(range(first, first + num_local_experts)), "experts stand in order of rank"
        self.layer: Any = None
        self.shared_experts = None
        self._handle: Handle | None = None
        self._hidden_shape: torch.Size | None = None

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Refuse shared experts, which this dispatcher does not run."""
        raise ConfigError("--moe-shared-expert-overlap", "", _REFUSED["moe_shared_expert_overlap"], "remove the flag")

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Start the all-to-all of counts, permute, then wait for the counts, which the splits of the dispatch need.

        With a static capacity there are no counts to send.
        """
        spans = self.layer is not None and self.layer.sends_tokens
        name = "moe" if self.layer is None else self.layer.operator
        hidden_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        most_rows, capacity = self._most_rows(hidden_TH.shape[0]), None
        if self.stages.static_capacity:
            capacity = self._capacity(hidden_TH.shape[0])
        handle = self.stages.open(routing_map, probs.dtype, name, most_rows, capacity)
        self._handle, self._hidden_shape = handle, hidden_states.shape
        if capacity is not None:
            return self.stages.select(hidden_TH, probs, handle)
        pending = self.stages.start_counts(handle)
        rows = self.stages.select(hidden_TH, probs, handle)
        if spans:
            self.layer.recorder.begin(f"{name}.count", EXPERT)
        pending.wait()
        return rows

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens and probabilities to their experts, in one all-to-all."""
        handle, stages = self._current(), self.stages
        received = _AllToAllAtOnce.apply(
            Pack.apply(tokens, probs),
            lambda rows: stages.start_dispatch(rows, handle),
            lambda gradient: stages.start_dispatch_backward(gradient, handle),
        )
        arrived: tuple[Tensor, Tensor] = stages.arrive(received, handle)
        return arrived

    def dispatch_postprocess(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sort expert by expert; returns tokens, tokens per expert (on the host), probabilities."""
        return self.stages.by_expert(tokens, probs, self._current())

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Put the experts' output back in the order of arrival."""
        return self.stages.by_arrival(hidden_states, self._current())

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Send the results to the ranks their tokens came from."""
        handle, stages = self._current(), self.stages
        returned: Tensor = _AllToAllAtOnce.apply(
            stages.leave(hidden_states, handle),
            lambda rows: stages.start_combine(rows, handle),
            lambda gradient: stages.start_combine_backward(gradient, handle),
        )
        return returned

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the layer's output in the shape of its input."""
        handle, shape = self._current(), self._hidden_shape
        assert shape is not None
        self._handle, self._hidden_shape = None, None
        return self.stages.unpermute(hidden_states, handle).view(shape)

    def _most_rows(self, tokens: int) -> int | None:
        """Upper bound of the rows that any gate sends for so many tokens; None on a CPU, where counting costs no wait."""
        if not torch.cuda.is_available():
            return None
        topk, factor = self.config.moe_router_topk, self.config.moe_expert_capacity_factor
        # With a capacity the experts may choose (expert_choice): then only the sum over the experts bounds the rows.
        return tokens * topk if factor is None else self._capacity(tokens) * self.config.num_moe_experts

    def _capacity(self, tokens: int) -> int:
        config = self.config
        return expert_capacity(
            tokens, config.moe_router_topk, config.num_moe_experts, config.moe_expert_capacity_factor
        )

    def _current(self) -> Handle:
        assert self._handle is not None, "no pass is in flight: dispatch_preprocess comes first"
        return self._handle


def refuse_padding(config: Any) -> None:
    """Refuse fields of a TransformerConfig that the irregular dispatcher cannot honour."""
    for field, rule in _REFUSED.items():
        if getattr(config, field):
            flag = "--" + field.replace("_", "-")
            fix = f"remove {flag} or use --moe-token-dispatcher-type alltoall"
            raise ConfigError("--moe-token-dispatcher-type", "irregular", f"{rule}, {flag} asks for it", fix)


class _AllToAllAtOnce(torch.autograd.Function):
    """An all-to-all with an immediate wait: _AllToAllAtOnce.apply(rows, start, start_backward)."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        start: Callable[[Tensor], Pending[Tensor]],
        start_backward: Callable[[Tensor], Pending[Tensor]],
    ) -> Tensor:
        ctx.start_backward = start_backward
        return start(rows).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.start_backward(gradients[0]).wait(), None, None
