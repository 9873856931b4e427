"""Loads of experts are those of the whole run: the same file in every layout and with both runners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.load_runs import STEPS, loads
from tests.spawn import run

EP, CAPACITY = "--expert-model-parallel-size 2", "--moe-expert-capacity-factor 0.75 --moe-token-drop-policy position"
STOCK = "--moe-token-dispatcher-type alltoall"
VARIANTS = {
    "EP2": EP,
    "EP2, two parts": f"{EP} --moe-overlap-partitions 2",
    "EP2, deferred": f"{EP} --defer-weight-gradients",
    "TP2": "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
    "PP2": "--pipeline-model-parallel-size 2 --num-layers 4 --moe-layer-freq [0,1,1,1]",
    "DP2": "",
    "DP2 without gate, recomputed": f"{STOCK} --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "dropping": f"{EP} {CAPACITY}",
    "dropping, two parts": f"{EP} {CAPACITY} --moe-overlap-partitions 2",
}
SAME = {
    "EP2": ("EP2, two parts", "EP2, deferred"),
    "DP2": ("DP2 without gate, recomputed",),
    "dropping": ("dropping, two parts",),
}
"""Variants that start from the same weights."""
TOKENS, TOP_K = STEPS * 16 * 32, 2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder: Path = tmp_path_factory.mktemp("loads")
    common = "--eval-iters 1 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --hidden-dropout 0"
    variants = {
        name: f"{flags} {common} --log-expert-load {folder}/{index}.jsonl"
        for index, (name, flags) in enumerate(VARIANTS.items())
    }
    first, second = run(2, loads, variants)
    assert first == second
    return first


@pytest.mark.parametrize(("name", "other"), [(name, other) for name, others in SAME.items() for other in others])
def test_layout_and_runner_change_nothing(found: dict[str, list[dict[str, Any]]], name: str, other: str) -> None:
    assert by_layer(found[other]) == by_layer(found[name])
    for mean in ("entropy", "z_loss"):
        means = [[row[mean] for row in found[which]] for which in (name, other)]
        assert means[1] == pytest.approx(means[0], rel=1e-5)


def by_layer(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["layer"], row["tokens"], row["load"], row["dropped"]) for row in rows]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_token_counts_once(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    assert [row["layer"] for row in found[name]] == ([1, 2, 3] if name == "PP2" else [0, 1, 2])
    for row in found[name]:
        assert (row["first_step"], row["last_step"], row["tokens"]) == (1, STEPS, TOKENS)
        assert sum(row["load"]) + sum(row["dropped"]) == TOP_K * TOKENS
        assert any(row["dropped"]) == name.startswith("dropping")
        assert 0 < row["entropy"] < 1.3863
        assert row["z_loss"] == pytest.approx(1.3863**2, rel=0.1)  # of four logits near 0
