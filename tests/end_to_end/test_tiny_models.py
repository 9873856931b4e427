"""The small siblings of the example models train on two ranks: what a family needs is there, and it learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.program import ROOT
from tests.ranks import Ranks
from tests.spawn import HANGS_SECONDS

pytestmark = pytest.mark.slow

MODELS = sorted((ROOT / "examples" / "models").glob("tiny-*.json"))
SHORT = (
    "--train-iters 10 --lr-warmup-fraction 0 --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --eval-iters 0 "
    "--log-interval 1"
)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_ten_steps_lower_the_loss(path: Path, tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    ended = Ranks(["--model", str(path), *SHORT.split(), "--log-json", str(log)], tmp_path).wait(HANGS_SECONDS)
    assert [rank.status for rank in ended] == [0, 0], ended[0].err
    losses = [entry["loss"] for entry in map(json.loads, log.read_text().splitlines()) if "loss" in entry]
    assert len(losses) == 10
    assert sum(losses[-3:]) / 3 < losses[0] - 1.0
