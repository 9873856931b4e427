"""Analytic seconds and peak bytes of pipeline stages, for many stages at once, and the step of a pipeline of them.

Steps, so that a search pays for the first once.
1. `layer_terms` prices each kind of layer under each strategy: data parallelism, ZeRO level, offloading. On the four streams of
   interference.py, collectives and copies run beside computation.
2. `stage_costs` sums the terms over the layers of a stage. `stage_totals` and `paired_totals` do so for millions of stages.
3. `step_seconds` makes a step of stages under 1F1B and interleaved 1F1B:

       step = (G - 1) · max t_i + Σ t_i over the stages, of which a micro-batch passes all but the slowest 1/v as a bubble
              + the largest delta_i of first and last micro-batch, less what the stages before it leave to wait

   G micro-batches, v virtual stages, t_i seconds of a stable micro-batch (forward and backward, all chunks) at stage i, with the
   transfers between stages that it waits for (`transfer_waits`). For v = 1 and equal stages it is (G + S - 1) · t.
   `simulate/step.py` is its slow twin.

Legend: K kinds of layer (kind and recompute variant), N strategies, M shapes of a stage. Arrays broadcast: [K, N], [K, M], [M].
Source: Mist, section 5.2, and section 5.3, third term; the categories are those of plan.PeakBytes. Unlike Mist's release, it
prices the optimizer step, point-to-point transfers and tensor-parallel collectives of the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.cost.interference import Concurrent

Floats = NDArray[np.float64]
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "communication", "fragmentation")


@dataclass(frozen=True, kw_only=True, slots=True)
class KindTerms:
    """Costs of one layer of each kind before any strategy; [K] each. Seconds and bytes of one micro-batch."""

    forward_seconds: Floats
    """Computation, and the communication inside the layer that computation does not hide."""
    backward_seconds: Floats
    saved_bytes: Floats
    """Kept from the forward to the backward pass."""
    working_bytes: Floats
    """Peak bytes inside a pass beyond the saved ones."""
    dense_parameters: Floats
    """Numbers of parameters on a rank: replicated over the data ranks."""
    expert_parameters: Floats
    """Replicated over the expert-data ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Decisions about the states (weights, gradients, optimizer) of a stage; [N] each. Offloading: shares in [0, 1]."""

    data: Floats
    """Ranks that share dense states (with context parallelism all of them)."""
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
    """Seconds per byte, reduce-scatter or all-gather over the data ranks; [N]."""
    expert_scatter: Floats
    latency_seconds: float
    """Latency of one such collective."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTerms:
    """One layer of each kind under each strategy; [K, N] each."""

    stable_seconds: Floats
    first_extra_seconds: Floats
    """Seconds that the first micro-batch of a step adds: parameters are gathered, states loaded."""
    last_extra_seconds: Floats
    """Seconds that the last micro-batch adds: gradients are reduced."""
    optimizer_seconds: Floats
    weights: Floats
    """Bytes, as everything below."""
    gradients: Floats
    optimizer: Floats
    saved: Floats
    working: Floats
    gathered: Floats
    """Whole parameters and gradients of a sharded or offloaded layer while it computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCosts:
    """Costs of stages; [N, M] each."""

    stable_seconds: Floats
    first_extra_seconds: Floats
    last_extra_seconds: Floats
    optimizer_seconds: Floats
    peaks: dict[str, Floats]
    """Bytes by CATEGORIES."""

    @property
    def peak_bytes(self) -> Floats:
        """Peak bytes over all categories."""
        return np.sum([*self.peaks.values()], axis=0)


def layer_terms(kinds: KindTerms, strategy: Strategy, rates: StateRates, concurrent: Concurrent) -> LayerTerms:
    """Price every kind of layer under every strategy."""
    forward, backward = kinds.forward_seconds[:, None], kinds.backward_seconds[:, None]
    dense, experts = kinds.dense_parameters[:, None], kinds.expert_parameters[:, None]
    numbers = dense + experts
    level = strategy.zero_level
    shard = dense / strategy.data + experts / strategy.expert_data
    zeros = np.zeros_like(shard)

    gather = state_seconds(dense, experts, rates.gathered_bytes, rates)
    scatter = state_seconds(dense, experts, rates.gradient_bytes, rates)
    copied = rates.host_copy * np.where(level >= 3, shard, numbers)
    weights_in = rates.weight_bytes * copied * strategy.offload_weights
    gradients_moved = rates.gradient_bytes * copied * strategy.offload_gradients
    activations = rates.host_copy * kinds.saved_bytes[:, None] * strategy.offload_activations
    optimizer_moved = rates.host_copy * rates.optimizer_bytes * shard * strategy.offload_optimizer
    # Every micro-batch: ZeRO-3 holds no whole weights between the passes, ZeRO-2 no whole gradients. The streams are
    # those of Mist, section 5.2.
    each_gather, each_scatter = np.where(level >= 3, gather, 0.0), np.where(level >= 2, scatter, 0.0)

    forward_stable = concurrent(forward + zeros, each_gather, weights_in, activations)
    backward_stable = concurrent(
        backward + zeros, each_gather + each_scatter, weights_in + gradients_moved + activations, gradients_moved
    )
    # Once a step: what is updated in shards is gathered, and gradients are reduced; without sharding by an all-reduce,
    # which is a reduce-scatter and an all-gather.
    once_gather = np.where(level < 3, gather, 0.0) * (level > 0)
    once_scatter = np.where(level < 2, scatter, 0.0) * np.where(level == 0, 2.0, 1.0)
    # The decoupled optimizer step stands before the first forward pass: it loads and stores what is kept on the host.
    first = concurrent(
        forward + zeros, zeros, weights_in + optimizer_moved, activations + optimizer_moved
    ) - concurrent(forward + zeros, zeros, weights_in, activations)
    # The stable pass counts as computation beside it. That is exact without offloading: a level that communicates once
    # a step has no collectives of states in the same pass of every micro-batch.
    if rates.overlap_param_gather:
        first = first + concurrent(forward_stable, once_gather, zeros, zeros) - forward_stable
    else:
        first = first + once_gather
    if rates.overlap_grad_reduce:
        last = concurrent(backward_stable, once_scatter, zeros, zeros) - backward_stable
    else:
        last = once_scatter
    # Gradient, master weight and moments are read, all but the gradient written; the gradient is zeroed, and read for its norm.
    swept = shard * (2 * rates.optimizer_bytes + 2 * rates.gradient_bytes) + numbers * rates.gradient_bytes
    keeps = 1.0 - strategy.offload_weights
    sharded = (level >= 3) | (strategy.offload_weights > 0)
    return LayerTerms(
        stable_seconds=forward_stable + backward_stable,
        first_extra_seconds=first,
        last_extra_seconds=last,
        optimizer_seconds=rates.optimizer_sweep * swept,
        weights=rates.weight_bytes * np.where(level >= 3, shard, numbers) * keeps,
        gradients=rates.gradient_bytes * np.where(level >= 2, shard, numbers) * (1.0 - strategy.offload_gradients),
        optimizer=rates.optimizer_bytes * np.where(level >= 1, shard, numbers) * (1.0 - strategy.offload_optimizer),
        saved=kinds.saved_bytes[:, None] * (1.0 - strategy.offload_activations),
        # The layer at work needs its offloaded activations whole on the device.
        working=kinds.working_bytes[:, None] + kinds.saved_bytes[:, None] * strategy.offload_activations,
        # Twice: the next layer's are fetched into a second buffer while this one computes (Mist's double buffers).
        gathered=np.where(sharded, 2.0 * rates.weight_bytes * numbers, 0.0)
        + np.where((level >= 2) | (strategy.offload_gradients > 0), 2.0 * rates.gradient_bytes * numbers, 0.0),
    )


def state_seconds(dense: Floats, experts: Floats, bytes_each: float, rates: StateRates) -> Floats:
    """Seconds of a reduce-scatter or all-gather of one layer's state over its replicas."""
    seconds = bytes_each * (dense * rates.dense_scatter + experts * rates.expert_scatter)
    return seconds + rates.latency_seconds * (seconds > 0)


def stage_costs(
    terms: LayerTerms,
    counts: Floats,
    in_flight: Floats,
    boundary_bytes: float,
    fragmentation: float,
    held_once: Sequence[bool],
) -> StageCosts:
    """Sum layers to stages.

    Args:
        counts: [K, M] layers of each kind; embedding and head are kinds that count 0 or 1.
        in_flight: [M] micro-batches whose activations are held at once; with virtual stages a fraction.
        boundary_bytes: hidden states at a stage's edge: one received, one to be sent, each way.
        fragmentation: part of activations and temporaries that the allocator reserves in vain.
        held_once: [K] kinds of which one micro-batch alone is ever held: the head.
    """

    def total(per_layer: Floats) -> Floats:
        return np.einsum("kn,km->nm", per_layer, counts, optimize=True)

    once = np.array(held_once, dtype=np.bool_)[:, None]
    present = counts > 0
    activations = total(np.where(once, 0.0, terms.saved)) * in_flight + total(np.where(once, terms.saved, 0.0))
    working = _largest(terms.working, present)
    zeros = np.zeros_like(activations)
    peaks = {
        "parameters": total(terms.weights),
        "gradients": total(terms.gradients),
        "optimizer": total(terms.optimizer),
        "activations": activations,
        "temporaries": working,
        "communication": _largest(terms.gathered, present) + 2.0 * boundary_bytes * (in_flight > 1) + zeros,
    }
    # States are allocated once and leave no holes.
    peaks["fragmentation"] = fragmentation * (activations + working)
    return StageCosts(
        stable_seconds=total(terms.stable_seconds),
        first_extra_seconds=total(terms.first_extra_seconds),
        last_extra_seconds=total(terms.last_extra_seconds),
        optimizer_seconds=total(terms.optimizer_seconds),
        peaks=peaks,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTotals:
    """The figures of stages that a search compares; [N, M] each."""

    stable_seconds: Floats
    extra_seconds: Floats
    """First and last micro-batch beyond stable ones, and the optimizer."""
    peak_bytes: Floats


BLOCK = 1 << 15
"""Stages worked on at a time, few enough to stay in the cache."""
PAIRED_BLOCK = 1 << 12
"""The same where each has a strategy of its own."""


def stage_totals(
    terms: LayerTerms,
    counts: Floats,
    in_flight: Floats,
    boundary_bytes: float,
    fragmentation: float,
    held_once: Sequence[bool],
) -> StageTotals:
    """Sums of `stage_costs`, for millions of stages: nothing is kept by category. Arguments as there."""
    once = np.array(held_once, dtype=np.bool_)[:, None]
    reserved = 1.0 + fragmentation
    state = terms.weights + terms.gradients + terms.optimizer + np.where(once, reserved * terms.saved, 0.0)
    saved = np.where(once, 0.0, reserved * terms.saved)
    extra = terms.first_extra_seconds + terms.last_extra_seconds + terms.optimizer_seconds
    present = counts > 0
    edges = 2.0 * boundary_bytes * (in_flight > 1)
    strategies, shapes = terms.weights.shape[1], counts.shape[1]
    result = np.empty((3, strategies, shapes))
    rows = max(1, BLOCK // shapes)
    # Activations alone grow with the micro-batches in flight: one more matrix product covers them.
    held = counts * in_flight
    for first in range(0, strategies, rows):
        block = slice(first, first + rows)
        np.matmul(terms.stable_seconds[:, block].T, counts, out=result[0, block])
        np.matmul(extra[:, block].T, counts, out=result[1, block])
        peak = np.matmul(state[:, block].T, counts, out=result[2, block])
        peak += saved[:, block].T @ held
        peak += reserved * _largest(terms.working[:, block], present)
        peak += _largest(terms.gathered[:, block], present)
        peak += edges
    return StageTotals(stable_seconds=result[0], extra_seconds=result[1], peak_bytes=result[2])


def paired_totals(
    kinds: KindTerms,
    strategy: Strategy,
    rates: StateRates,
    concurrent: Concurrent,
    counts: Floats,
    in_flight: Floats,
    boundary_bytes: float,
    fragmentation: float,
    held_once: Sequence[bool],
) -> StageTotals:
    """Both steps for stages that share nothing: stage n has strategy n, `counts[:, n]` layers and `in_flight[n]`; [N] each."""
    size = counts.shape[1]
    result = np.empty((3, size))
    once = np.array(held_once, dtype=np.bool_)[:, None]
    reserved = 1.0 + fragmentation
    for first in range(0, size, PAIRED_BLOCK):
        block = slice(first, first + PAIRED_BLOCK)
        terms = layer_terms(kinds, _part_of(strategy, block), _rates_of(rates, block), concurrent)
        layers, flying = counts[:, block], in_flight[block]
        present = layers > 0
        extra = terms.first_extra_seconds + terms.last_extra_seconds + terms.optimizer_seconds
        state = terms.weights + terms.gradients + terms.optimizer + reserved * terms.saved * np.where(once, 1.0, flying)
        result[0, block] = (terms.stable_seconds * layers).sum(axis=0)
        result[1, block] = (extra * layers).sum(axis=0)
        peak = (state * layers).sum(axis=0) + reserved * (terms.working * present).max(axis=0)
        result[2, block] = peak + (terms.gathered * present).max(axis=0) + 2.0 * boundary_bytes * (flying > 1)
    return StageTotals(stable_seconds=result[0], extra_seconds=result[1], peak_bytes=result[2])


def _part_of(strategy: Strategy, block: slice) -> Strategy:
    return Strategy(**{field.name: getattr(strategy, field.name)[block] for field in fields(Strategy)})


def _rates_of(rates: StateRates, block: slice) -> StateRates:
    return replace(rates, dense_scatter=rates.dense_scatter[block], expert_scatter=rates.expert_scatter[block])


def _largest(per_layer: Floats, present: NDArray[np.bool_]) -> Floats:
    """[N, M] maximum over the kinds that a stage has.

    Stages that hold the same kinds have the same maximum, and there are few such sets: one pass over each in place of [K, N, M].
    """
    sets = np.unique(present, axis=1)
    result = np.empty((per_layer.shape[1], present.shape[1]))
    for members in sets.T:
        most = per_layer[members].max(axis=0, initial=0.0)
        result[:, (present == members[:, None]).all(axis=0)] = most[:, None]
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    """A step by what its seconds are spent on; they add up to its time without the optimizer."""

    steady: float
    """The slowest stage at work."""
    bubble: float
    """Filling and draining the pipeline."""
    edges: float
    """First and last micro-batch beyond a stable one."""

    @property
    def total(self) -> float:
        """Seconds of the step without the optimizer."""
        return self.steady + self.bubble + self.edges


def step_seconds(
    stable: Sequence[float], first_extra: Sequence[float], last_extra: Sequence[float], micro_batches: int, virtual: int
) -> StepSeconds:
    """Seconds of a step without the optimizer.

    Args:
        stable: t_i of every stage.
        first_extra: seconds of the first micro-batch beyond t_i; stages after the first spend them while they wait for input.
        last_extra: seconds of the last one beyond t_i; stages after the first end early and do it while the others drain.
        virtual: chunks per stage.
    """
    slowest = max(stable)
    # Chunks are 1 / v of a stage, so filling and draining the pipeline takes 1 / v as long.
    bubble = (sum(stable) - slowest) / virtual
    edges, waited = 0.0, 0.0
    for seconds, first, last in zip(stable, first_extra, last_extra, strict=True):
        # A stage waits for the forward passes before it, about a third of their time, and drains before their backward ones.
        edges = max(edges, max(0.0, first - waited / 3) + max(0.0, last - waited * 2 / 3))
        waited += seconds / virtual
    return StepSeconds(steady=micro_batches * slowest, bubble=bubble, edges=edges)


def transfer_waits(stages: int, virtual: int, one_way: float, beside: float | None) -> tuple[list[float], float]:
    """Seconds that transfers between stages add to a step.

    megatron-core's 1F1B waits for each of them: behind a forward pass for the transfer to the next stage, behind a backward
    pass for that to the stage before. Its interleaved pipeline may have them beside its passes, which then take longer by a
    share of every transfer in or out; the passes that fill and drain the pipeline wait for them, but for those of stages that
    wait anyway. That count is read off simulated lists; with transfers of 5 % of a forward pass it is right to 1 % of a step.

    Args:
        one_way: seconds of one transfer.
        beside: share by which a transfer slows down what runs beside it; None: every pass waits for its transfers.
    Returns:
        Seconds of a stable micro-batch at each stage; seconds of filling and draining beside what those add to the bubble.
    """
    if stages == 1:
        return [0.0], 0.0
    if virtual == 1:
        return [one_way * ((stage > 0) + (stage < stages - 1)) for stage in range(stages)], 0.0
    if beside is None:
        return [2.0 * one_way * virtual] * stages, 0.0
    return [beside * one_way * (4 * virtual - 2)] * stages, one_way * (2 * virtual * stages - stages - 1)


def in_flight(schedule_virtual: int, stages: int, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once, in whole passes of all its chunks.

    1F1B: stages behind it, and its own. Interleaved: 2 (S - 1 - i) + (v - 1) S + 1 chunk passes of v.
    """
    if schedule_virtual == 1:
        return float(min(micro_batches, stages - stage))
    passes = min(2 * (stages - stage - 1) + (schedule_virtual - 1) * stages + 1, micro_batches * schedule_virtual)
    return passes / schedule_virtual
