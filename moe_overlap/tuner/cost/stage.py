"""Seconds and bytes of a stage's layers under many strategies about their states.

Steps; a search executes the first one once.
1. `layer_terms` prices each kind of layer under each strategy: data parallelism, ZeRO level, offloading.
   If parameter groups step separately (ZeRO 2 and 3, offloading), moved_states.py prices its seconds and passing bytes.
2. evaluate.py sums the terms over the layers of a stage.
3. pipeline.py computes the step from its stages.

Legend: K kinds of part (kind and recompute variant), N strategies. Arrays broadcast: [K, N].
Source: Mist, section 5.2. Unlike Mist's release, it prices the optimizer step and tensor-parallel collectives of forward passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.cost.interference import Concurrent
from moe_overlap.tuner.cost.links import LinkUse

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class KindTerms:
    """Costs of one layer of each kind before any strategy; [K] each. Seconds and bytes of one micro-batch."""

    forward_seconds: Floats
    """Computation and exposed communication inside the layer."""
    backward_seconds: Floats
    saved_bytes: Floats
    """Bytes saved from the forward to the backward pass."""
    working_bytes: Floats
    """Peak bytes inside a pass in addition to the saved ones."""
    dense_parameters: Floats
    """Number of parameters on a rank that are replicated over the data ranks."""
    expert_parameters: Floats
    """Number of parameters that are replicated over the expert-data ranks."""
    is_layer: NDArray[np.bool_]
    """True if offloading moves its activations: all parts except embedding and head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Strategies about the states (weights, gradients, optimizer) of a stage; [N] each. Offloading: shares in [0, 1]."""

    data: Floats
    """Ranks with the same dense states, including those of context parallelism."""
    expert_data: Floats
    zero_level: Floats
    offload_weights: Floats
    offload_gradients: Floats
    offload_optimizer: Floats
    offload_activations: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRates:
    """Rates at which states are communicated, copied and swept; formats in bytes per parameter."""

    dense_scatter: Floats
    """Seconds per byte, all-gather over the data ranks; [N]."""
    expert_scatter: Floats
    latency_seconds: float
    """Latency of one such collective."""
    dense_use: LinkUse = LinkUse()
    """The links that collectives of dense states use."""
    expert_use: LinkUse = LinkUse()
    token_use: LinkUse = LinkUse()
    """The links of the tokens' all-to-alls."""
    host_copy: float
    """Seconds per byte, one direction."""
    optimizer_sweep: float
    """Seconds per byte of device memory."""
    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    gathered_bytes: float
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    reduce_scatter: float = 1.0
    """Seconds of a reduce-scatter over those of an all-gather."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTerms:
    """One layer of each kind under each strategy; [K, N] each. Seconds hold if all parameter groups step together."""

    forward_seconds: Floats
    backward_seconds: Floats
    first_extra_seconds: Floats
    """Extra seconds of the first micro-batch of a step, during which updated parameters are gathered."""
    last_extra_seconds: Floats
    """Extra seconds of the last micro-batch, during which gradients are reduced."""
    optimizer_seconds: Floats
    gathered_seconds: Floats
    """Seconds of the gather of updated parameters after the optimizer, if no pass hides it."""
    weights: Floats
    """Bytes, as all fields below; of states only those that stay on the device."""
    gradients: Floats
    optimizer: Floats
    saved: Floats
    working: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSizes:
    """Bytes of one layer's states that a rank holds, on the device or on the host; [K, N] each."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    swept: Floats
    """Bytes of device memory that an optimizer step reads and writes."""


def state_sizes(kinds: KindTerms, strategy: Strategy, rates: StateRates) -> StateSizes:
    """The states of every kind under every strategy: unsharded, or the shard of a rank."""
    dense, experts = kinds.dense_parameters[:, None], kinds.expert_parameters[:, None]
    level, numbers = strategy.zero_level, dense + experts
    shard = dense / strategy.data + experts / strategy.expert_data
    weights, gradients, optimizer = (np.where(level >= first, shard, numbers) for first in (3, 2, 1))
    # The step reads gradient, master weight and moments, and writes all but the gradient; the norm reads the gradient once more,
    # and the gradients that the rank holds are zeroed.
    swept = optimizer * (2 * rates.optimizer_bytes + 2 * rates.gradient_bytes) + gradients * rates.gradient_bytes
    return StateSizes(
        weights=rates.weight_bytes * weights,
        gradients=rates.gradient_bytes * gradients,
        optimizer=rates.optimizer_bytes * optimizer,
        swept=swept,
    )


def is_decoupled(strategy: Strategy) -> NDArray[np.bool_]:
    """[N] True if parameter groups step separately, as `StagePlan.is_decoupled`."""
    moved = strategy.offload_weights + strategy.offload_gradients
    return (strategy.zero_level > 1) | (moved + strategy.offload_optimizer + strategy.offload_activations > 0)


def layer_terms(kinds: KindTerms, strategy: Strategy, rates: StateRates, concurrent: Concurrent) -> LayerTerms:
    """Price every kind of layer under every strategy."""
    sizes, level = state_sizes(kinds, strategy, rates), strategy.zero_level
    zeros = np.zeros_like(sizes.weights)
    forward, backward = kinds.forward_seconds[:, None] + zeros, kinds.backward_seconds[:, None] + zeros
    dense, experts = kinds.dense_parameters[:, None], kinds.expert_parameters[:, None]
    # Sharded updates need a gather of weights and a reduce-scatter of gradients; unsharded ones an all-reduce, which is a
    # reduce-scatter and an all-gather.
    gather = np.where(level > 0, state_seconds(dense, experts, rates.gathered_bytes, rates), 0.0)
    reduced = np.where(level == 0, 2.0, rates.reduce_scatter)
    scatter = state_seconds(dense, experts, rates.gradient_bytes, rates) * reduced
    # If no pass hides the gather, it follows the update, as in Megatron-LM.
    first = concurrent(forward, gather, zeros, zeros) - forward if rates.overlap_param_gather else zeros
    gathered = zeros if rates.overlap_param_gather else gather
    last = concurrent(backward, scatter, zeros, zeros) - backward if rates.overlap_grad_reduce else scatter
    moves = kinds.is_layer[:, None] * strategy.offload_activations
    return LayerTerms(
        forward_seconds=forward,
        backward_seconds=backward,
        first_extra_seconds=first,
        last_extra_seconds=last,
        optimizer_seconds=rates.optimizer_sweep * sizes.swept,
        gathered_seconds=gathered,
        weights=sizes.weights * (1.0 - strategy.offload_weights),
        gradients=sizes.gradients * (1.0 - strategy.offload_gradients),
        optimizer=sizes.optimizer * (1.0 - strategy.offload_optimizer),
        saved=kinds.saved_bytes[:, None] * (1.0 - moves),
        working=kinds.working_bytes[:, None] + zeros,
    )


def state_seconds(dense: Floats, experts: Floats, bytes_each: float, rates: StateRates) -> Floats:
    """Seconds of an all-gather of one layer's state over its replicas."""
    seconds = bytes_each * (dense * rates.dense_scatter + experts * rates.expert_scatter)
    return seconds + rates.latency_seconds * (seconds > 0)
