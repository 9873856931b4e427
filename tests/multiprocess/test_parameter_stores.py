"""ZeRO 0 to 3 on parameter stores: the losses and norms of DDP and its distributed optimizer, and the lists are followed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.multiprocess.store_runs import BIASED, DENSE, EXPERTS, Trained, planned, trained_each
from tests.spawn import run

ROUNDING = 1e-6
"""Largest relative difference of a loss in fp32 that another order of sums makes."""
NO_CLIP = "--clip-grad 0 --untie-embeddings-and-output-weights"
"""Flags without which the bits depend on the cut of the shards: the norm's order of sums, and the order of a tied weight's."""


def compared(
    folder: Path, flags: str, world: int, levels: Sequence[Sequence[int]], steps: int = 3
) -> dict[str, list[Trained]]:
    """The run of DDP (`ddp`), that of ZeRO 1 on stores (`stored`) and those of plans by their levels; all ranks of each.

    Losses, norms and an evaluation agree with DDP's, and every list is followed.
    """
    runs = {"ddp": (flags, steps, False), "stored": (flags, steps, True)}
    runs |= {"".join(map(str, each)): (planned(folder, flags, world, each), steps, False) for each in levels}
    answers = run(world, trained_each, runs)
    reference = answers[0]["ddp"]
    for name in runs:
        for answer in answers:
            assert answer[name].losses == pytest.approx(reference.losses, rel=ROUNDING), name
            assert answer[name].norms == pytest.approx(reference.norms, rel=2 * ROUNDING), name
            assert answer[name].evaluated == pytest.approx(reference.evaluated, rel=ROUNDING), name
            assert answer[name].follows or name == "ddp", name
    return {name: [answer[name] for answer in answers] for name in runs}


def weights(runs: dict[str, list[Trained]], name: str) -> list[str]:
    """The digests of all ranks' weights."""
    return [trained.weights for trained in runs[name]]


@pytest.mark.parametrize("accumulated", [1, 2, pytest.param(5, marks=pytest.mark.slow)])
def test_levels_share_bits_where_they_sum_alike(accumulated: int, tmp_path: Path) -> None:
    flags = f"{DENSE} {NO_CLIP} --micro-batch-size 1 --global-batch-size {2 * accumulated}"
    runs = compared(tmp_path, flags, 2, [(0,), (2,), (3,)])
    assert weights(runs, "ddp") == weights(runs, "stored") == weights(runs, "0")
    assert weights(runs, "2") == weights(runs, "3")
    # ZeRO 2 and 3 reduce every micro-batch, ZeRO 0 and 1 their sum.
    assert (weights(runs, "2") == weights(runs, "stored")) == (accumulated == 1)


def test_experts_with_bias_and_tokens_that_count(tmp_path: Path) -> None:
    """Experts of one replica have nothing to shard; the division by tokens and the expert bias belong to every list."""
    flags = f"{EXPERTS} {BIASED} --expert-model-parallel-size 2 --calculate-per-token-loss"
    runs = compared(tmp_path, f"{flags} --micro-batch-size 1 --global-batch-size 4", 2, [(2,), (3,)])
    assert weights(runs, "2") == weights(runs, "3")


def test_levels_that_differ_by_stage_and_a_tied_embedding(tmp_path: Path) -> None:
    flags = f"{EXPERTS} --num-layers 2 --moe-layer-freq [0,1] --pipeline-model-parallel-size 2 --micro-batch-size 1"
    runs = compared(tmp_path, f"{flags} --global-batch-size 4", 4, [(0, 3), (2, 1)], steps=2)
    assert len(set(weights(runs, "03"))) == 2
