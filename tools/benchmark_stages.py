"""Measure how many stages the analytic cost model prices per second, on one core: `python -m tools.benchmark_stages --json`

shared: 5,952 strategies (ZeRO level and four offload ratios) times 400 tuples of layers, recomputed layers and micro-batches
in flight, which share the pairing of work on the channels. apart: 400,000 stages that share nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from moe_overlap.tuner.cost.interference import Concurrent, interference_of
from moe_overlap.tuner.cost.stage import KindTerms, StateRates, Strategy, layer_terms, paired_totals, stage_totals

KINDS = 2
"""A layer as it is, and recomputed."""
STRATEGIES, SHAPES, APART = 5952, 400, 400_000


def concurrent() -> Concurrent:
    """The interference that was measured between eight A100s of a node."""
    measured = interference_of("A100", 1, 8)
    assert measured is not None
    return measured.seconds


def kinds() -> KindTerms:
    """Layers of the size of a 7B model's."""
    return KindTerms(
        forward_seconds=np.array([2e-3, 2e-3]),
        backward_seconds=np.array([4e-3, 6e-3]),
        saved_bytes=np.array([5e8, 3e7]),
        working_bytes=np.array([2e8, 5e8]),
        dense_parameters=np.array([2e8, 2e8]),
        expert_parameters=np.array([0.0, 0.0]),
    )


def strategies(count: int, random: np.random.Generator) -> Strategy:
    """Strategies whose every field is drawn independently."""
    ratios = [0.0, 0.25, 0.5, 0.75, 1.0]
    return Strategy(
        data=random.choice([1.0, 2.0, 4.0, 8.0], count),
        expert_data=random.choice([1.0, 2.0], count),
        zero_level=random.choice([1.0, 2.0, 3.0], count),
        offload_weights=random.choice(ratios, count),
        offload_gradients=random.choice(ratios, count),
        offload_optimizer=random.choice(ratios, count),
        offload_activations=random.choice(ratios, count),
    )


def rates(count: int) -> StateRates:
    """Rates of an H100."""
    return StateRates(
        dense_scatter=np.full(count, 3e-12),
        expert_scatter=np.full(count, 2e-11),
        latency_seconds=1e-5,
        host_copy=2e-11,
        optimizer_sweep=4e-13,
        weight_bytes=2.0,
        gradient_bytes=4.0,
        optimizer_bytes=12.0,
        gathered_bytes=2.0,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )


def measure(run: Callable[[], object], stages: int, repeats: int) -> dict[str, float]:
    """Stages per second."""
    rates_seen = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        rates_seen.append(stages / (time.perf_counter() - start))
    return {"min": min(rates_seen), "median": statistics.median(rates_seen), "max": max(rates_seen)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    random = np.random.default_rng(1)
    shared, apart = strategies(STRATEGIES, random), strategies(APART, random)
    counts = random.integers(0, 16, (KINDS, APART)).astype(np.float64)
    flying = random.integers(1, 9, APART).astype(np.float64)
    beside = concurrent()
    others = (1e7, 0.1, [False] * KINDS)

    def together() -> object:
        terms = layer_terms(kinds(), shared, rates(STRATEGIES), beside)
        return stage_totals(terms, counts[:, :SHAPES], flying[:SHAPES], *others)

    def alone() -> object:
        return paired_totals(kinds(), apart, rates(APART), beside, counts, flying, *others)

    figures = {
        "shared": measure(together, STRATEGIES * SHAPES, arguments.repeats),
        "apart": measure(alone, APART, arguments.repeats),
    }
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, row in figures.items():
        print(f"{name:<8}" + "  ".join(f"{key} {value / 1e6:6.2f} M/s" for key, value in row.items()))


if __name__ == "__main__":
    main()
