"""Stages in closed form: against plain loops, and many at once against each by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_overlap.tuner.cost import evaluate
from moe_overlap.tuner.cost.evaluate import CATEGORIES, StageCosts, StageEvaluator, StageShapes
from moe_overlap.tuner.cost.interference import partly_concurrent
from moe_overlap.tuner.cost.stage import KindTerms, StateRates, Strategy
from moe_overlap.tuner.cost.stage_parts import StagePart

KINDS, STRATEGIES, SHAPES = 3, 24, 10
random = np.random.default_rng(7)
KIND_TERMS = KindTerms(
    forward_seconds=random.random(KINDS),
    backward_seconds=random.random(KINDS),
    saved_bytes=1e9 * random.random(KINDS),
    working_bytes=1e9 * random.random(KINDS),
    dense_parameters=1e8 * random.random(KINDS),
    expert_parameters=1e8 * random.random(KINDS),
    is_layer=np.array([True, True, False]),
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
RUNS = tuple(StagePart(kind, held_once=once) for kind, once in enumerate(ONCE))
CONCURRENT = partly_concurrent(0.2)


def shapes(counts: np.ndarray, in_flight: np.ndarray) -> StageShapes:
    return StageShapes(runs=RUNS, counts=counts, in_flight=in_flight, boundary_bytes=1e7)


def evaluator(strategy: Strategy, rates: StateRates) -> StageEvaluator:
    return StageEvaluator(KIND_TERMS, strategy, rates, CONCURRENT, 0.05)


def costs_of(strategy: Strategy, rates: StateRates, counts: np.ndarray, in_flight: np.ndarray) -> StageCosts:
    return evaluator(strategy, rates).costs(shapes(counts, in_flight))


def test_bytes_of_a_stage_are_those_counted_by_hand() -> None:
    costs = costs_of(STRATEGY, RATES, COUNTS, IN_FLIGHT)
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
                moves = 0.0 if ONCE[k] else STRATEGY.offload_activations[n]
                kept = KIND_TERMS.saved_bytes[k] * (1 - moves)
                expected["activations"] += count * kept * (1 if ONCE[k] else IN_FLIGHT[m])
                if count:
                    expected["temporaries"] = max(expected["temporaries"], KIND_TERMS.working_bytes[k])
            expected["fragmentation"] = 0.05 * (expected["activations"] + expected["temporaries"])
            for category in set(CATEGORIES) - {"communication"}:
                assert costs.peaks[category][n, m] == pytest.approx(expected[category]), (category, n, m)


def test_many_strategies_and_shapes_cost_what_each_costs_by_itself() -> None:
    together = costs_of(STRATEGY, RATES, COUNTS, IN_FLIGHT)
    for n, place in enumerate(random.integers(0, SHAPES, STRATEGIES)):
        alone, rates = (
            type(values)(
                **{
                    name: value[n : n + 1] if isinstance(value := getattr(values, name), np.ndarray) else value
                    for name in type(values).__dataclass_fields__
                }
            )
            for values in (STRATEGY, RATES)
        )
        one = evaluator(alone, rates).costs(shapes(COUNTS[:, [place]], IN_FLIGHT[[place]]))
        for name, seconds in one.times.items():
            np.testing.assert_allclose(seconds[0, 0], together.times[name][n, place], rtol=1e-12, atol=1e-15)
        for name, held in one.peaks.items():
            np.testing.assert_allclose(held[0, 0], together.peaks[name][n, place], rtol=1e-12)


def test_shapes_in_blocks_cost_what_they_cost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = costs_of(STRATEGY, RATES, COUNTS, IN_FLIGHT)
    monkeypatch.setattr(evaluate, "BLOCK", 7 * STRATEGIES)
    in_blocks = costs_of(STRATEGY, RATES, COUNTS, IN_FLIGHT)
    assert SHAPES % 7 and at_once.peaks.keys() == in_blocks.peaks.keys()
    np.testing.assert_allclose(in_blocks.peak_bytes, at_once.peak_bytes, rtol=1e-12)
    np.testing.assert_allclose(in_blocks.optimizer_seconds, at_once.optimizer_seconds, rtol=1e-12)
    for name, seconds in at_once.times.items():
        np.testing.assert_allclose(in_blocks.times[name], seconds, rtol=1e-12, atol=1e-15)


def test_a_reduce_scatter_that_takes_twice_as_long_is_paid_wherever_one_runs() -> None:
    """gloo makes it of an all-reduce. Without sharding an all-reduce runs, which stays what it was."""
    still = np.zeros(STRATEGIES)
    kept = replace(
        STRATEGY, offload_weights=still, offload_gradients=still, offload_optimizer=still, offload_activations=still
    )
    exposed = replace(RATES, overlap_grad_reduce=False, latency_seconds=0.0)
    usual, slow = (
        evaluator(kept, replace(exposed, reduce_scatter=factor)).terms.last_extra_seconds for factor in (1.0, 2.0)
    )
    np.testing.assert_allclose(slow, np.where(kept.zero_level > 0, 2.0, 1.0) * usual, rtol=1e-12)
    assert (usual > 0).all()


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
    terms = evaluator(strategy, rates).terms
    held = (terms.weights + terms.gradients + terms.optimizer).sum(axis=0)
    assert held[0] > held[1] > held[2] > held[3]
    assert held[1] > held[4]
    stable = costs_of(strategy, rates, np.full((KINDS, 1), 2.0), np.ones(1)).stable_seconds[:, 0]
    assert stable[0] == stable[1] < stable[2] < stable[3]
    assert stable[4] > stable[1]


def test_overlap_is_between_the_longest_and_the_sum() -> None:
    parts = random.random((4, 100))
    seconds = CONCURRENT(*parts)
    assert (seconds >= parts.max(axis=0)).all()
    assert (seconds <= parts.sum(axis=0)).all()
