"""Captured segments between ranks: several micro-batches under way, weight gradients deferred, the same bits."""

from __future__ import annotations

import pytest

from tests.multiprocess.graph_runs import trained
from tests.spawn import run

STATIC = (
    "--expert-model-parallel-size 2 --moe-gate topk --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
)
DEFER = "--defer-weight-gradients"
TWO_RANKS = {
    "interleaved, deferred": f"{STATIC} {DEFER} --moe-overlap-micro-batches 2",
    "chunks of capacity": f"{STATIC} --moe-overlap-capacity-chunks 2 {DEFER}",
}
PIPELINE = f"{STATIC} {DEFER} --pipeline-model-parallel-size 2 --global-batch-size 32"
FOUR_RANKS = {
    "pipeline": f"{PIPELINE} --num-layers 2",
    "pairs of chunks": f"{PIPELINE} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2 --moe-overlap-micro-batches 2",
}


@pytest.mark.parametrize(("ranks", "variants"), [(2, TWO_RANKS), pytest.param(4, FOUR_RANKS, marks=pytest.mark.slow)])
def test_graphs_train_as_segments_do(ranks: int, variants: dict[str, str]) -> None:
    for found in run(ranks, trained, variants):
        for name, ((plain, graphed), captures, replays) in found.items():
            assert graphed == plain, name
            assert captures and replays > 2 * captures, name
