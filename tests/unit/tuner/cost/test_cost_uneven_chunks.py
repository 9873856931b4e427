"""Interleaved pipelines whose chunks do not take equally long: the closed form against simulated lists."""

from __future__ import annotations

import numpy as np
import pytest

from moe_overlap.api import Options, predict, simulated
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.tuner.cost import uneven_chunks
from moe_overlap.tuner.cost.stage_parts import StagePart
from moe_overlap.tuner.cost.uneven_chunks import chunk_seconds, unevenness
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, JOB, by_hand

OPTIONS: Options = {"graphs": by_hand, "constants": CONSTANTS}
WHOLE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def apart(layout: str, *words: str) -> float:
    """By how much the closed form exceeds the list."""
    layers, parts = layout.count("t"), layout.count("|") + 1
    given = [*JOB, "--num-layers", str(layers), "--pipeline-model-parallel-layout", layout, *words]
    given += f"--pipeline-model-parallel-size {4 if parts > 6 else 2} --global-batch-size 256".split()
    cluster = shipped_cluster("H100", 32)
    listed = simulated(given, cluster, **OPTIONS).simulation.step_seconds
    return predict(given, cluster, **OPTIONS).predicted.step_seconds / listed - 1.0


@pytest.mark.parametrize("recompute", ["", WHOLE])
@pytest.mark.parametrize(
    "layout",
    [
        "Et|t|t|t|t|tt|tt|t|t|t|t|tL",
        "Et|tt|tt|t|t|tt|tt|t|t|t|tt|tL",
        "Et|t|t|t|t|t|t|t|tt|tt|tt|L",
        "Etttt|t|tttt|tL",
    ],
)
def test_the_closed_form_knows_that_stages_wait_for_each_others_long_chunks(layout: str, recompute: str) -> None:
    """Without those waits it is up to 12 % below the list here."""
    assert abs(apart(layout, *recompute.split())) < 0.02


def test_equal_chunks_take_what_the_formula_says() -> None:
    assert unevenness([np.ones((2, 3, 1)) * [[[1.0]], [[2.0]]]] * 4, 16)[0] == pytest.approx(1.0, abs=0.02)
    # One chunk of each stage, or micro-batches that come in no whole rounds, are left to the formula.
    assert unevenness([np.ones((2, 1, 2))] * 4, 16).tolist() == [1.0, 1.0]
    assert unevenness([np.ones((2, 2, 1))] * 4, 18)[0] == 1.0


def test_long_chunks_of_one_row_cost_less_than_scattered_ones() -> None:
    """Three choices of recomputation: equal chunks, every stage's second one long, and another one long on each stage."""
    stages = [np.ones((2, 4, 3)) * [[[1.0]], [[2.0]]] for _ in range(4)]
    for index, stage in enumerate(stages):
        stage[:, 1, 1] *= 2.0
        stage[:, index, 2] *= 2.0
    equal, row, scattered = unevenness(stages, 32)
    assert equal < 1.01 and 1.02 < row < scattered - 0.05


@pytest.mark.parametrize(("stages", "virtual"), [(2, 2), (4, 4), (8, 3), (16, 2)])
def test_every_further_round_takes_as_long_as_the_last_simulated_one(
    monkeypatch: pytest.MonkeyPatch, stages: int, virtual: int
) -> None:
    """Chunks of one to three layers drawn at random, and a head: steps of twelve rounds, complete and from four of them."""
    draws = np.random.default_rng(stages).integers(1, 4, size=(stages, 1, virtual, 40)).astype(float)
    draws[-1, :, -1] += 1.5
    chunks = list(np.concatenate([draws, 2.0 * draws], axis=1))
    few = unevenness(chunks, 12 * stages)
    monkeypatch.setattr(uneven_chunks, "FEW", 12)
    assert few == pytest.approx(unevenness(chunks, 12 * stages), rel=0.008)


def test_chunks_add_up_their_parts() -> None:
    parts = (StagePart(0, 0), StagePart(1, 0), StagePart(1, 1), StagePart(2, 1))
    counts = np.array([[1.0, 1.0], [2.0, 0.0], [1.0, 3.0], [0.0, 1.0]])
    chunks = chunk_seconds(parts, counts, (np.array([0.5, 1.0, 4.0]), np.array([1.0, 2.0, 8.0])), 2)
    assert chunks.tolist() == [[[2.5, 0.5], [1.0, 7.0]], [[5.0, 1.0], [2.0, 14.0]]]
