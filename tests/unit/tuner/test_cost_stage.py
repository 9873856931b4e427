"""Stages in closed form: against plain loops, and the fast sums against the full ones."""

from __future__ import annotations

import numpy as np
import pytest

from moe_overlap.tuner.cost.interference import partly_concurrent
from moe_overlap.tuner.cost.stage import (
    CATEGORIES,
    KindTerms,
    StateRates,
    Strategy,
    layer_terms,
    paired_totals,
    stage_costs,
    stage_totals,
)

KINDS, STRATEGIES, SHAPES = 3, 24, 10
random = np.random.default_rng(7)
KIND_TERMS = KindTerms(
    forward_seconds=random.random(KINDS),
    backward_seconds=random.random(KINDS),
    saved_bytes=1e9 * random.random(KINDS),
    working_bytes=1e9 * random.random(KINDS),
    dense_parameters=1e8 * random.random(KINDS),
    expert_parameters=1e8 * random.random(KINDS),
)
STRATEGY = Strategy(
    data=random.integers(1, 9, STRATEGIES).astype(float),
    expert_data=random.integers(1, 5, STRATEGIES).astype(float),
    zero_level=np.arange(STRATEGIES) % 4.0,
    offload_weights=random.random(STRATEGIES) * (np.arange(STRATEGIES) > 8),
    offload_gradients=random.random(STRATEGIES) * (np.arange(STRATEGIES) > 8),
    offload_optimizer=random.random(STRATEGIES),
    offload_activations=random.random(STRATEGIES),
)
RATES = StateRates(
    dense_scatter=1e-10 * random.random(STRATEGIES),
    expert_scatter=1e-10 * random.random(STRATEGIES),
    latency_seconds=1e-5,
    host_copy=2e-11,
    optimizer_sweep=1e-12,
    weight_bytes=2.0,
    gradient_bytes=4.0,
    optimizer_bytes=12.0,
    gathered_bytes=2.0,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
)
COUNTS = random.integers(0, 5, (KINDS, SHAPES)).astype(float)
IN_FLIGHT = random.integers(1, 6, SHAPES).astype(float)
ONCE = [False, False, True]
ARGUMENTS = (1e7, 0.05, ONCE)
CONCURRENT = partly_concurrent(0.2)


def test_bytes_of_a_stage_are_those_counted_by_hand() -> None:
    terms = layer_terms(KIND_TERMS, STRATEGY, RATES, CONCURRENT)
    costs = stage_costs(terms, COUNTS, IN_FLIGHT, *ARGUMENTS)
    for n in range(STRATEGIES):
        level, data, experts = STRATEGY.zero_level[n], STRATEGY.data[n], STRATEGY.expert_data[n]
        for m in range(SHAPES):
            expected = dict.fromkeys(CATEGORIES, 0.0)
            for k in range(KINDS):
                dense, expert = KIND_TERMS.dense_parameters[k], KIND_TERMS.expert_parameters[k]
                whole, shard = dense + expert, dense / data + expert / experts
                count = COUNTS[k, m]
                held = shard if level >= 3 else whole
                expected["parameters"] += count * 2 * held * (1 - STRATEGY.offload_weights[n])
                held = shard if level >= 2 else whole
                expected["gradients"] += count * 4 * held * (1 - STRATEGY.offload_gradients[n])
                held = shard if level >= 1 else whole
                expected["optimizer"] += count * 12 * held * (1 - STRATEGY.offload_optimizer[n])
                kept = KIND_TERMS.saved_bytes[k] * (1 - STRATEGY.offload_activations[n])
                expected["activations"] += count * kept * (1 if ONCE[k] else IN_FLIGHT[m])
                if count:
                    whole_again = KIND_TERMS.saved_bytes[k] * STRATEGY.offload_activations[n]
                    working = KIND_TERMS.working_bytes[k] + whole_again
                    expected["temporaries"] = max(expected["temporaries"], working)
            expected["fragmentation"] = 0.05 * (expected["activations"] + expected["temporaries"])
            for category in set(CATEGORIES) - {"communication"}:
                assert costs.peaks[category][n, m] == pytest.approx(expected[category]), (category, n, m)


def test_sums_for_a_search_equal_the_full_ones() -> None:
    terms = layer_terms(KIND_TERMS, STRATEGY, RATES, CONCURRENT)
    full = stage_costs(terms, COUNTS, IN_FLIGHT, *ARGUMENTS)
    fast = stage_totals(terms, COUNTS, IN_FLIGHT, *ARGUMENTS)
    extra = full.first_extra_seconds + full.last_extra_seconds + full.optimizer_seconds
    np.testing.assert_allclose(fast.stable_seconds, full.stable_seconds)
    np.testing.assert_allclose(fast.extra_seconds, extra)
    np.testing.assert_allclose(fast.peak_bytes, full.peak_bytes)
    places = random.integers(0, SHAPES, STRATEGIES)
    paired = paired_totals(KIND_TERMS, STRATEGY, RATES, CONCURRENT, COUNTS[:, places], IN_FLIGHT[places], *ARGUMENTS)
    rows = np.arange(STRATEGIES)
    np.testing.assert_allclose(paired.peak_bytes, full.peak_bytes[rows, places])
    np.testing.assert_allclose(paired.stable_seconds, full.stable_seconds[rows, places])
    np.testing.assert_allclose(paired.extra_seconds, extra[rows, places])


def test_more_sharding_and_offloading_hold_less_and_cost_time() -> None:
    level = np.array([0.0, 1.0, 2.0, 3.0, 1.0])
    nothing = np.zeros(5)
    strategy = Strategy(
        data=np.full(5, 8.0),
        expert_data=np.full(5, 4.0),
        zero_level=level,
        offload_weights=nothing,
        offload_gradients=nothing,
        offload_optimizer=np.array([0.0, 0.0, 0.0, 0.0, 0.5]),
        offload_activations=np.array([0.0, 0.0, 0.0, 0.0, 0.5]),
    )
    rates = StateRates(
        **{name: getattr(RATES, name) for name in StateRates.__dataclass_fields__ if "scatter" not in name},
        dense_scatter=np.full(5, 1e-10),
        expert_scatter=np.full(5, 1e-10),
    )
    terms = layer_terms(KIND_TERMS, strategy, rates, CONCURRENT)
    held = (terms.weights + terms.gradients + terms.optimizer).sum(axis=0)
    assert held[0] > held[1] > held[2] > held[3]
    assert held[1] > held[4]
    stable = terms.stable_seconds.sum(axis=0)
    assert stable[0] == stable[1] < stable[2] < stable[3]
    assert stable[4] > stable[1]


def test_overlap_is_between_the_longest_and_the_sum() -> None:
    parts = random.random((4, 100))
    seconds = CONCURRENT(*parts)
    assert (seconds >= parts.max(axis=0)).all()
    assert (seconds <= parts.sum(axis=0)).all()
