"""Falcon's layer, and query groups that several tensor-parallel ranks share, train as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.feature_runs import Losses, train_alone_then_together
from tests.spawn import run
from tools.compare_layouts import LIMIT

ROTARY = "--position-embedding-type rope --group-query-attention"
AHEAD = "--mtp-num-layers 2 --mtp-loss-scaling-factor 2"
FEATURES = {
    "one-norm": f"{ROTARY} --num-query-groups 1 --disable-bias-linear --parallel-attention-mlp one-norm",
    "two-norms": f"{ROTARY} --num-query-groups 2 --parallel-attention-mlp two-norms --swiglu",
    "predicting": f"{ROTARY} --num-query-groups 1 --disable-bias-linear --parallel-attention-mlp two-norms {AHEAD}",
    "one-group": f"{ROTARY} --num-query-groups 1 --qk-layernorm --normalization RMSNorm",
}
TP2, SPLIT = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
LAYOUTS = (
    ("one-norm", "TP2", SPLIT),
    ("one-norm", "TP2, sequence whole", TP2),
    ("one-norm", "PP2", PP2),
    ("two-norms", "TP2", SPLIT),
    (
        "two-norms",
        "DP2, recomputed",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    ("one-group", "TP2", SPLIT),
    ("predicting", "TP2", SPLIT),
    ("predicting", "PP2", PP2),
)


def trained(place: str) -> dict[str, tuple[Losses, Losses, Losses]]:
    return train_alone_then_together(Path(place), FEATURES, LAYOUTS)


@pytest.mark.slow
def test_losses_equal_those_of_one_process(tmp_path: Path) -> None:
    results = run(2, trained, str(tmp_path))[0]
    assert len(results) == len(LAYOUTS)
    for name, (reference, _, losses) in results.items():
        assert list(losses) == [1, 2, 3]
        for step, loss in losses.items():
            assert loss == pytest.approx(reference[step], rel=LIMIT), name
