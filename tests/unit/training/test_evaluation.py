"""Evaluations in batches of a size of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.cli.arguments import parse
from megatron.training.data.datasets import BatchSource
from megatron.training.report.metrics import MetricsLog
from moe_overlap.commands import train as pretrain_moe
from moe_overlap.describe.errors import ConfigError
from tests.unit.runtime.one_process import MOE, small


def test_the_size_of_its_batches_changes_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(MetricsLog, "log_evaluation", lambda log, split, loss, step, note: told.append((split, loss)))
    for sizes in (
        "--eval-iters 6",
        "--eval-global-batch-size 2 --eval-iters 12",
        "--eval-global-batch-size 12 --eval-iters 2",
    ):
        words = f"{MOE} {sizes} --eval-interval 2 --data-cache-path {tmp_path} --num-workers 0"
        small(words)  # makes the group
        loop = pretrain_moe.assemble(parse(words.split()), 0)
        for evaluated in (1, 2):
            loop.evaluate("valid")
            assert loop.progress.valid_samples == evaluated * 24
    assert told[0] != told[1]
    for evaluation in (0, 1):
        for split, loss in told[evaluation::2]:
            assert split == "valid" and loss == pytest.approx(told[evaluation][1], rel=1e-6)
    assert len(told) == 6


@pytest.mark.parametrize("split", ["valid", "test"])
def test_batches_without_a_token_that_counts_have_no_mean_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    def all_masked(self: BatchSource, split: str, consumed: int) -> Iterator[dict[str, Any]]:
        feed = as_read(self, split, consumed)
        assert feed is not None
        return (batch | {"loss_mask": torch.zeros_like(batch["loss_mask"])} for batch in feed)

    as_read = BatchSource.__call__
    words = f"{MOE} --eval-iters 3 --data-cache-path {tmp_path} --num-workers 0"
    small(words)  # makes the group
    loop = pretrain_moe.assemble(parse(words.split()), 0)
    monkeypatch.setattr(BatchSource, "__call__", all_masked)
    with pytest.raises(ConfigError, match=rf"--eval-iters 3: no token of these batches of the {split} split counts"):
        loop.evaluate(split)


def test_a_resumed_run_evaluates_the_samples_that_it_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a step is both saved and evaluated, the save knows that the samples of the evaluation are consumed."""
    told: list[tuple[int, float]] = []
    monkeypatch.setattr(MetricsLog, "log_evaluation", lambda log, split, loss, step, note: told.append((step, loss)))
    words = f"{MOE} --train-iters 6 --eval-interval 2 --eval-iters 2 --data-cache-path {tmp_path} --num-workers 0"
    small(words)  # makes the group

    def evaluations(flags: str) -> list[tuple[int, float]]:
        told.clear()
        pretrain_moe.assemble(parse(f"{words} {flags}".split()), 0).run()
        return [*told]

    save = f"--save {tmp_path / 'saved'} --save-interval 2"
    whole = evaluations("")
    assert len({loss for _, loss in whole}) == len(whole), "every evaluation has samples of its own"
    assert evaluations(f"{save} --exit-interval 2") + evaluations(f"{save} --load {tmp_path / 'saved'}") == whole
