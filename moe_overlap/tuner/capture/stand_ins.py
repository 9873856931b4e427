"""Replacements, during a capture, for operations of megatron-core that need data or peers.

Balanced routing replaces the router's choice: every expert gets the same number of rows. `StandInCounts` are lists that have the
methods which megatron-core calls on tensors of counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers, mappings, random
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from megatron.core.utils import GlobalMemoryBuffer

from megatron.training.model.layers import output as multi_token
from moe_overlap.tuner.capture.record import Recorder

_ABSENT = object()
_ROLL = multi_token_prediction.roll_tensor


class Total(int):
    """A sum of counts."""

    def item(self) -> int:
        """The number as an int."""
        return int(self)


class StandInCounts(list[int]):
    """Numbers of rows, or an order of chunks, known without data."""

    @property
    def T(self) -> StandInCounts:  # noqa: N802 - a tensor's attribute
        """These counts: their order does not matter."""
        return self

    def ravel(self) -> StandInCounts:
        """These counts: their order does not matter."""
        return self

    def sum(self) -> Total:
        """The sum of all counts."""
        return Total(sum(self))

    def tolist(self) -> list[int]:
        """The counts as a list of ints."""
        return list(self)


class NoRandomStates:
    """The tracker of generator states, for a model that draws nothing."""

    def fork(self, name: str = "") -> contextlib.AbstractContextManager[None]:
        """Switch nothing."""
        return contextlib.nullcontext()


@contextlib.contextmanager
def without_data(buffer: GlobalMemoryBuffer) -> Iterator[None]:
    """Replace functions that read generators, or globals that outlive a capture.

    Args:
        buffer: replaces the scratch buffer of the tensor-parallel linears.
    """
    scale = torch.ones((), device="cpu")
    tracker: dict[str, Any] = {}
    replacements: list[tuple[Any, str, Any]] = [
        # Generators: there is nothing to draw, and their states have no fake form.
        (random, "_CUDA_RNG_STATE_TRACKER", NoRandomStates()),
        (random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True),
        (random, "_get_all_rng_states", lambda: ()),
        (random, "_set_all_rng_states", lambda *states: None),
        (random, "_fork_rng", contextlib.nullcontext),
        # State that outlives a micro-batch: created per capture, so that captures do not depend on earlier ones.
        (layers, "get_global_memory_buffer", lambda: buffer),
        (mappings, "get_global_memory_buffer", lambda: buffer),
        (moe_utils, "get_moe_layer_wise_logging_tracker", lambda: tracker),
        (MoEAuxLossAutoScaler, "main_loss_backward_scale", scale),
        (MTPLossAutoScaler, "main_loss_backward_scale", scale),
        # The neighbours that would send a token.
        (multi_token_prediction, "roll_tensor", roll_without_neighbours),
        (multi_token, "roll_tensor", roll_without_neighbours),
    ]
    with replaced(replacements):
        yield


def roll_without_neighbours(tensor_BS: torch.Tensor, cp_group: Any, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, S] rolled by one token, and its sum; the token that a neighbour would send under context parallelism is broadcast."""
    if cp_group.size() == 1:
        return _ROLL(tensor_BS, cp_group=cp_group)  # type: ignore[no-any-return]
    token_B = tensor_BS.select(-1, -1).clone()
    dist.broadcast(token_B, group=cp_group, group_src=0)
    rolled_BS = torch.roll(tensor_BS, shifts=-1, dims=-1)
    rolled_BS.select(-1, -1).copy_(token_B)
    return rolled_BS, rolled_BS.sum()


@contextlib.contextmanager
def replaced(replacements: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Owner, attribute, value: set on entry, restored on exit; missing attributes are missing again."""
    before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in replacements]
    for owner, name, value in replacements:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def recomputation_announced(recorder: Recorder) -> contextlib.AbstractContextManager[None]:
    """Replacements that tell the recorder when megatron-core's checkpoints run their function again."""
    replacements: list[tuple[Any, str, Any]] = []
    for function_class in (random.CheckpointFunction, random.CheckpointWithoutOutputFunction):
        replacements.append((function_class, "forward", staticmethod(_announcing(function_class.forward, recorder))))
    replacements.append((random.CheckpointWithoutOutput, "checkpoint", _announced_method(recorder)))
    return replaced(replacements)


def _announcing(forward: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def announced(context: Any, run: Callable[..., Any], *args: Any) -> Any:
        return forward(context, _marked(run, recorder), *args)

    return announced


def _announced_method(recorder: Recorder) -> Callable[..., Any]:
    stock = random.CheckpointWithoutOutput.checkpoint

    def checkpoint(self: Any, run: Callable[..., Any], *args: Any) -> Any:
        return stock(self, _marked(run, recorder), *args)

    return checkpoint


def _marked(run: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def marked(*args: Any) -> Any:
        with recorder.recomputing():
            return run(*args)

    return marked


class Balance:
    """Balanced routing in one MoE layer.

    Args:
        layer: megatron-core's MoELayer.
    """

    def __init__(self, layer: Any) -> None:
        self._config = layer.config
        self._dispatcher = layer.token_dispatcher
        self._experts = layer.config.num_moe_experts
        self._local = layer.num_local_experts
        self._count = self._dispatcher.preprocess if hasattr(self._dispatcher, "preprocess") else None
        if self._count is not None:
            self._dispatcher.preprocess = self._balanced_counts
            # Orders of chunks: lists can be read, tensors without data cannot.
            for name in ("sort_input_by_local_experts", "restore_output_by_local_experts"):
                if hasattr(self._dispatcher, name):
                    setattr(self._dispatcher, name, StandInCounts(range(getattr(self._dispatcher, name).numel())))
        layer.experts.register_forward_pre_hook(self._balanced_experts)

    def rows_per_expert(self, tokens: int) -> int:
        """Rows that this rank's tokens send to one expert."""
        routed = tokens * self._config.moe_router_topk
        rows = routed // self._experts
        assert rows * self._experts == routed, "the sample batch does not divide among the experts"
        factor = self._config.moe_expert_capacity_factor
        if factor is None:
            return rows
        capacity = moe_utils.get_capacity(routed, self._experts, factor)
        # With padding every expert gets its capacity; without, capacity only drops what exceeds it.
        return int(capacity if self._config.moe_pad_expert_input_to_capacity else min(rows, capacity))

    def rows_of_map(self, experts: int, tokens: int) -> int:
        """Number of rows that tokens send to some of the experts."""
        return experts * self.rows_per_expert(tokens)

    def _balanced_counts(self, routing_map: torch.Tensor) -> Any:
        """Run the stock count for its operators and communication; return balanced counts."""
        assert self._count is not None
        dispatcher = self._dispatcher
        # Its operators and its collective belong to the graph; only its result, which would need data, is replaced.
        self._count(routing_map)
        rows = self.rows_per_expert(routing_map.shape[0])
        shares, tensor = dispatcher.ep_size, dispatcher.tp_size
        dispatcher.num_out_tokens = rows * self._experts
        if dispatcher.input_splits is not None and not dispatcher.drop_and_pad:
            dispatcher.input_splits = StandInCounts([rows * self._local] * shares)
            dispatcher.output_splits = StandInCounts([rows * self._local] * shares)
            # Equal parts: gathered without sizes, in one collective.
            dispatcher.output_splits_tp = None
        dispatcher.num_global_tokens_per_local_expert = StandInCounts([rows] * (shares * tensor * self._local))
        return StandInCounts([rows * shares * tensor] * self._local)

    def _balanced_experts(self, _module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        rows_TH, _counts, *rest = arguments
        return (rows_TH, StandInCounts([rows_TH.shape[0] // self._local] * self._local), *rest)
