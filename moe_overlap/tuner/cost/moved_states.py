"""Seconds and bytes of parameter groups that step separately (ZeRO 2 and 3, offloading), for ranking candidates.

Answers have the seconds of the simulator (prediction.py); these sums decide which plans are simulated first. A pass of a
micro-batch through a part has four concurrent streams, which start together and slow each other down by measured factors
(`Interference.seconds`). A stage takes the sum over its parts, so that a search prices a part once for all stages.

                   compute        between ranks                to the device                       to the host
    forward        F              gather                       weights                             activations
    backward       B              gather, scatter              weights, activations, gradients     gradients
    first forward  F, update      gather, gather of updated    states, gradients                   activations, states, weights
    first backward B              gather, scatter              weights, activations                gradients
    last backward  B              gather, scatter, reduce      weights, activations, gradients     gradients

Not modelled: two buffers per use limit how far a stream runs ahead; streams continue during the next part; states and tokens
share links; updates run while a stage waits for its first input. tests/unit/tuner/cost/test_cost_corners.py bounds the error.

Legend: K kinds of part, N strategies; arrays are [K, N].
Source: Mist, section 5.2 and equation (1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.cost.interference import Concurrent
from moe_overlap.tuner.cost.stage import KindTerms, StateRates, Strategy, state_seconds, state_sizes

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class MovedTerms:
    """One part of each kind under each strategy; [K, N] each.

    Attributes:
        seconds: in the order of `evaluate.SECONDS`: forward pass, backward pass, extra seconds of the first micro-batch (updates)
            and of the last one (reduction of gradient sums), and the update after all passes, which is 0.
        used_bytes: bytes on the device during a use, in addition to those that stay; and for the neighbouring layers, whose
            states arrive or leave at the same time.
        updated_bytes: the same for an update.
        leaving_bytes: bytes of an update that leave for the host while passes fill the device with activations.
    """

    seconds: tuple[Floats, Floats, Floats, Floats, Floats]
    used_bytes: tuple[Floats, Floats]
    updated_bytes: tuple[Floats, Floats]
    leaving_bytes: Floats


def moved_terms(kinds: KindTerms, strategy: Strategy, rates: StateRates, concurrent: Concurrent) -> MovedTerms:
    """Price every kind of part under every strategy."""
    sizes, level = state_sizes(kinds, strategy, rates), strategy.zero_level
    dense, experts = kinds.dense_parameters[:, None], kinds.expert_parameters[:, None]
    nothing, is_layer = np.zeros_like(sizes.weights), kinds.is_layer[:, None]
    # 1. Bytes that move with a use or an update, and the unsharded tensors of a use whose shards stay.
    weights = sizes.weights * strategy.offload_weights
    gradients = sizes.gradients * strategy.offload_gradients
    states = sizes.optimizer * strategy.offload_optimizer
    activations = kinds.saved_bytes[:, None] * is_layer * strategy.offload_activations
    replicated = (strategy.data > 1) | (strategy.expert_data > 1)
    gathered = np.where(replicated & (level >= 3), rates.weight_bytes * (dense + experts), nothing)
    own_gradients = np.where(replicated & (level >= 2), rates.gradient_bytes * (dense + experts), nothing)
    # While a use computes, the next one is loaded, and the gradients of the previous one leave.
    used = weights + gathered + activations + gradients + own_gradients
    updated = states + gradients + weights
    # 2. Alone seconds of the streams.
    gather_seconds = state_seconds(dense, experts, rates.gathered_bytes, rates)
    reduced = state_seconds(dense, experts, rates.gradient_bytes, rates) * rates.reduce_scatter
    gather, scatter = np.where(level >= 3, gather_seconds, nothing), np.where(level >= 2, reduced, nothing)
    # Unsharded gradient sums are all-reduced: a reduce-scatter and an all-gather.
    reduce = np.where(level >= 2, nothing, np.where(level == 0, 2.0 / rates.reduce_scatter, 1.0) * reduced)
    gather_updated = np.where((level >= 1) & (level < 3), gather_seconds, nothing)
    update, host = rates.optimizer_sweep * sizes.swept, rates.host_copy
    come = host * (weights + activations)
    # 3. Passes, and the extra seconds of the first and the last one of a step.
    forward_alone, backward_alone = kinds.forward_seconds[:, None] + nothing, kinds.backward_seconds[:, None] + nothing
    forward = concurrent(forward_alone, gather, host * weights, host * activations)
    backward = concurrent(backward_alone, gather + scatter, come + host * gradients, host * gradients)
    first_forward = concurrent(
        forward_alone + update,
        gather + gather_updated,
        host * (states + gradients),
        host * (activations + states + weights),
    )
    first_backward = concurrent(backward_alone, gather + scatter, come, host * gradients)
    last_backward = concurrent(backward_alone, gather + scatter + reduce, come + host * gradients, host * gradients)
    return MovedTerms(
        seconds=(
            forward,
            backward,
            first_forward - forward + first_backward - backward,
            last_backward - backward,
            nothing,
        ),
        used_bytes=(used, is_layer * (used + gradients)),
        updated_bytes=(updated, is_layer * updated),
        leaving_bytes=states + weights,
    )
