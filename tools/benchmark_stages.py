"""Measure how many complete stages the evaluator prices per second, on one core: `python -m tools.benchmark_stages --json`

Kinds are those of DeepSeek-V3 with prediction layers, as captured (a first run captures them, in about 20 s): embedding, dense
and MoE layers, as they are and recomputed, prediction layer, head.

5,952 strategies (ZeRO 1 to 3 and four offload ratios) times 2,816 shapes: dense layers, layers, recomputed layers, micro-batches
in flight; a call prices LOT of them, the number of one layout's stages. Searches make this call for every layout and micro-batch,
predictions for their single strategy. Every repeat builds a new evaluator.
A complete stage has all seconds of `pipeline.StageTimes`, those of its optimizer, its bytes by category and their sum.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from moe_overlap.api import problem_of
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.plan.plan import Recompute
from moe_overlap.tuner.cost.analytic import prepare, stage_evaluator
from moe_overlap.tuner.cost.evaluate import StageEvaluator, StageShapes, runs_of
from moe_overlap.tuner.cost.stage import Strategy

MODEL = Path(__file__).parents[1] / "examples" / "deepseek-v3-mtp.args"
GPUS = 1024
ZERO_LEVELS = (1.0, 2.0, 3.0)
RATIOS = {
    "weights": (0.0, 0.25, 0.375, 0.5, 0.75, 1.0),
    "gradients": (0.0, 0.25, 0.375, 0.5, 0.75, 1.0),
    "optimizer": (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0),
    "activations": (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0),
}
"""The ratios of Mist's search; weights are offloaded only where gradients are: 31 pairs."""
MOST_DENSE, MOST_LAYERS, MOST_IN_FLIGHT = 3, 8, 16
LOT = 64
"""Shapes of a call: sixteen stages with four choices of recomputation."""


def strategies(data: float, expert_data: float) -> Strategy:
    """Every strategy of Mist's space, for one layout."""
    rows = np.array(
        [row for row in itertools.product(ZERO_LEVELS, *RATIOS.values()) if not (row[1] > 0 and row[2] == 0)]
    ).T
    count = rows.shape[1]
    return Strategy(
        data=np.full(count, data),
        expert_data=np.full(count, expert_data),
        zero_level=rows[0],
        offload_weights=rows[1],
        offload_gradients=rows[2],
        offload_optimizer=rows[3],
        offload_activations=rows[4],
    )


def stages(gpu: str) -> tuple[Callable[[Strategy], StageEvaluator], StageShapes, Strategy]:
    """A maker of evaluators by strategy, shapes of a middle stage, and the strategies."""
    flags = f"@{MODEL} --recompute-granularity full --recompute-method block --recompute-num-layers 1".split()
    problem = problem_of(flags, shipped_cluster(gpu, GPUS), {})
    # One stage in two chunks: block recomputation of the first layers of each gives all kinds of layers.
    layers = problem.model.num_layers
    stage = replace(
        problem.plan.stages[0],
        chunks=((0, 20), (20, layers)),
        recompute=Recompute(layers=2, granularity="full"),
    )
    plan = replace(problem.plan, stages=(stage,), embedding_stage=0, loss_stage=0, mtp_stage=0)
    (family,) = prepare(plan, problem.model, problem.graphs, problem.features)
    runs = [replace(part, chunk=0) for part in runs_of(family.parts[0])[0]]
    kinds = list(dict.fromkeys(runs))
    assert len(kinds) == len(family.tables)
    # A stage with a number of dense layers first, and the embedding if there are any; its first layers are recomputed.
    names = [table.part.kind for table in family.tables]
    embedding = names.index("embedding")
    of_layers = [row for row, part in enumerate(kinds) if row != embedding and not part.held_once]
    grid = [
        (dense, count, again, in_flight)
        for dense, count in itertools.product(range(MOST_DENSE + 1), range(1, MOST_LAYERS + 1))
        for again, in_flight in itertools.product(range(count + 1), range(1, MOST_IN_FLIGHT + 1))
    ]
    counts = np.zeros((len(kinds), len(grid)))
    for shape, (dense, count, again, _) in enumerate(grid):
        for layer in range(count):
            counts[of_layers[2 * (layer >= dense) + (layer >= again)], shape] += 1
        counts[embedding, shape] = dense > 0
    flying = np.array([row[-1] for row in grid], dtype=np.float64)
    shapes = StageShapes(
        runs=tuple(kinds),
        counts=counts,
        in_flight=flying,
        boundary_bytes=family.boundary_bytes,
    )

    def make_evaluator(strategy: Strategy) -> StageEvaluator:
        return stage_evaluator(plan, problem.model, family, problem.machine, problem.features, strategy)

    return make_evaluator, shapes, strategies(float(stage.data * stage.context), float(stage.expert_data))


def measure(run: Callable[[], object], stages_priced: int, repeats: int) -> dict[str, float]:
    """Stages per CPU second."""
    rates_seen = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        rates_seen.append(stages_priced / (time.process_time() - start))
    return {"min": min(rates_seen), "median": statistics.median(rates_seen), "max": max(rates_seen)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gpu", default="H100")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    make_evaluator, shapes, strategy = stages(arguments.gpu)
    count, size = len(strategy.data), len(shapes.in_flight)

    def price() -> None:
        evaluator = make_evaluator(strategy)
        for start in range(0, size, LOT):
            assert evaluator.costs(shapes.some(slice(start, start + LOT))).peak_bytes.all()

    figures = measure(price, count * size, arguments.repeats)
    if arguments.json:
        print(json.dumps(figures))
        return
    print(f"{len(shapes.runs)} kinds, {count} strategies, {size} shapes; million stages per CPU second")
    print("  ".join(f"{key} {value / 1e6:6.3f}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
