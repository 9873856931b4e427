"""The transformer layer and MoE layer of a run: megatron-core's, with replaceable gate and dispatcher, and spans.

`adapt_layer` turns a stock layer spec into ours. The routed path is megatron-core's; the shared expert runs after the dispatch
has been issued (megatron-core runs it before the gate): there it can hide the all-to-all, and the backward order is the mirror.
Spans have the names of the instruction list, so that a trace can be compared with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from moe_overlap.plan.instructions import EXPERT
from moe_overlap.runtime.spans import SpanRecorder

AdaptLayer = Callable[[ModuleSpec], ModuleSpec]
MakeGate = Callable[..., TopKRouter]
"""Builds the gate of a layer from megatron-core's `config` and `pg_collection`."""
MakeDispatcher = Callable[..., MoETokenDispatcher]
"""Builds the token dispatcher of a layer, called as megatron-core calls its own."""


class RecordedLayer(TransformerLayer):
    """A transformer layer that names its operators `L<n>.attention` and `L<n>.mlp` or `L<n>.moe.…`, n from 0.

    Inside a multi-token-prediction layer, whose number follows the decoder's, `mtp<n>.…`.
    """

    def __init__(self, *args: Any, recorder: SpanRecorder, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recorder = recorder
        beyond = self.layer_number - 1 - self.config.num_layers
        self.operator = f"L{self.layer_number - 1}" if beyond < 0 else f"mtp{beyond}"
        if isinstance(self.mlp, RecordedMoELayer):
            self.mlp.operator = self.operator + ".moe"
        # A recomputed module is entered twice: marks inside it let the recorder see the second pass and the end of its backward.
        self.marks_inside = self.mlp.moe_layer_recompute if self.is_moe_layer else self.recompute_mlp
        if self.recompute_mlp:
            self.mlp.register_forward_pre_hook(self._begin_mlp)
            self.mlp.register_forward_hook(self._mark_mlp)

    def _forward_attention(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        self.recorder.begin(f"{self.operator}.attention")
        hidden, context = super()._forward_attention(*args, **kwargs)
        return self.recorder.on_backward(f"{self.operator}.attention.backward", hidden), context

    def _forward_mlp(self, *args: Any, **kwargs: Any) -> Tensor:
        first, last = ("moe.gate", "moe.merge") if self.is_moe_layer else ("mlp", "mlp")
        self.recorder.begin(f"{self.operator}.{first}")
        hidden = super()._forward_mlp(*args, **kwargs)
        if self.marks_inside:
            return hidden
        return self.recorder.on_backward(f"{self.operator}.{last}.backward", hidden)

    def _begin_mlp(self, _module: Any, _inputs: Any) -> None:
        if self.recompute_mlp:
            self.recorder.begin(f"{self.operator}.mlp")

    def _mark_mlp(
        self, _module: Any, _inputs: Any, output: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        if not self.recompute_mlp:
            return output
        return self.recorder.on_backward(f"{self.operator}.mlp.backward", output[0]), output[1]


class RecordedMoELayer(MoELayer):
    """megatron-core's MoE layer cut at its communication, with spans, and with the shared expert after the dispatch.

    Args:
        recorder: records the spans.
        make_dispatcher: replaces megatron-core's token dispatcher; called with the same arguments.
    """

    token_dispatcher: Any

    def __init__(
        self,
        *args: Any,
        recorder: SpanRecorder,
        make_dispatcher: MakeDispatcher | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        # Attached losses are weighted by one scale for the step (state/attached_losses.py), not by each router's tokens.
        self.router.calculate_per_token_loss = False
        self.recorder = recorder
        self.operator = "moe"
        self._shared_input: Tensor | None = None
        self._shared_output: Tensor | None = None
        if make_dispatcher is None and isinstance(self.token_dispatcher, MoEAlltoAllTokenDispatcher):
            make_dispatcher = RecordedAlltoAllDispatcher
        if make_dispatcher is not None:
            self.token_dispatcher = make_dispatcher(
                self.num_local_experts,
                self.local_expert_indices,
                config=self.config,
                pg_collection=kwargs["pg_collection"],
            )
        self.token_dispatcher.layer = self

    @property
    def sends_tokens(self) -> bool:
        """Whether tokens leave this rank: several ranks, expert-tensor ranks included, share the experts."""
        return bool(self.token_dispatcher.tp_ep_group.size() > 1)

    def shared_experts_compute(self, hidden_states: Tensor) -> None:
        """Store the input; the shared expert runs in `dispatch`."""
        self._shared_input = hidden_states if self.use_shared_expert else None

    def route(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Choose the experts of every token."""
        self.recorder.begin(f"{self.operator}.gate")
        return super().route(*args, **kwargs)

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """Count and permute the routed tokens."""
        permuted, probs = super().preprocess(hidden_states, probs, routing_map)
        return self.recorder.on_backward(f"{self.operator}.gate.backward", permuted, probs)

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send the tokens to their experts, then run the shared expert."""
        if self.sends_tokens:
            self.recorder.begin(f"{self.operator}.dispatch", EXPERT)
        received, probs = super().dispatch(hidden_states, probs)
        if self.sends_tokens:
            received, probs = self.recorder.on_backward(f"{self.operator}.dispatch.backward", received, probs)
        if self._shared_input is not None:
            self.recorder.begin(f"{self.operator}.shared")
            shared = MoELayer.shared_experts_compute(self, self._shared_input)
            self._shared_output = self.recorder.on_backward(f"{self.operator}.shared.backward", shared)
        return received, probs

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run the experts this rank holds."""
        self.recorder.begin(f"{self.operator}.experts")
        output, bias = super().routed_experts_compute(hidden_states, probs)
        return self.recorder.on_backward(f"{self.operator}.experts.backward", output), bias

    def combine(self, output: Tensor) -> Tensor:
        """Send the results back."""
        if not self.sends_tokens:
            return super().combine(output)
        self.recorder.begin(f"{self.operator}.combine", EXPERT)
        return self.recorder.on_backward(f"{self.operator}.combine.backward", super().combine(output))

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Unpermute and add the shared expert's output."""
        self.recorder.begin(f"{self.operator}.merge")
        shared, self._shared_input, self._shared_output = self._shared_output, None, None
        merged = super().postprocess(output, shared)
        if self.moe_layer_recompute:
            return self.recorder.on_backward(f"{self.operator}.merge.backward", merged)
        return merged


class RecordedAlltoAllDispatcher(MoEAlltoAllTokenDispatcher):
    """megatron-core's all-to-all dispatcher with a span around the all-to-all of counts."""

    layer: RecordedMoELayer

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Send and receive the counts."""
        if not self.layer.sends_tokens or self.drop_and_pad:
            return super().preprocess(routing_map)
        recorder, operator = self.layer.recorder, self.layer.operator
        recorder.begin(f"{operator}.count", EXPERT)
        counts = super().preprocess(routing_map)
        recorder.begin(f"{operator}.gate")
        return counts


def adapt_layer(
    recorder: SpanRecorder,
    groups: ProcessGroupCollection,
    make_gate: MakeGate | None = None,
    make_dispatcher: MakeDispatcher | None = None,
) -> AdaptLayer:
    """Make the function that `build_model` applies to every layer spec of a run.

    Args:
        recorder: records the spans of the layers.
        groups: this rank's process groups.
        make_gate: replaces megatron-core's router; called with its `config` and `pg_collection`.
        make_dispatcher: replaces its token dispatcher; called with the same arguments.

    Returns:
        A function from a stock spec to one that builds `RecordedLayer`, derived from the spec's own layer class, and in MoE
            layers `RecordedMoELayer`.
    """

    def adapt(spec: ModuleSpec) -> ModuleSpec:
        submodules = spec.submodules
        if isinstance(submodules.mlp, ModuleSpec) and submodules.mlp.module is MoELayer:
            # megatron-core passes the groups to its own MoELayer class only, recognised by identity; ours gets them here.
            params = {**(submodules.mlp.params or {}), "recorder": recorder, "pg_collection": groups}
            params["make_dispatcher"] = make_dispatcher
            inner = submodules.mlp.submodules
            if make_gate is not None:
                inner = dataclasses.replace(inner, router=make_gate)
            mlp = dataclasses.replace(submodules.mlp, module=RecordedMoELayer, submodules=inner, params=params)
            submodules = dataclasses.replace(submodules, mlp=mlp)
        recorded: type = RecordedLayer
        if spec.module is not TransformerLayer:
            recorded = type(f"Recorded{spec.module.__name__}", (RecordedLayer, spec.module), {})
        return dataclasses.replace(
            spec, module=recorded, submodules=submodules, params={**(spec.params or {}), "recorder": recorder}
        )

    return adapt
