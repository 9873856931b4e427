"""Figures that a training step reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.report.metrics import MetricsLog, StepMetrics
from megatron.training.training import TrainingLoop
from moe_overlap.commands import train as pretrain_moe
from tests.unit.runtime.one_process import MOE, SEQUENCE, small

SAMPLES = 4


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[StepMetrics]:
    """What the steps of a run hand to its log."""
    metrics: list[StepMetrics] = []
    monkeypatch.setattr(MetricsLog, "log", lambda log, figures, curves: metrics.append(figures))
    return metrics


def loop_of(words: str, folder: Path) -> TrainingLoop:
    words = f"{MOE} {words} --data-cache-path {folder} --num-workers 0 --eval-iters 0"
    small(words)  # makes the group
    return pretrain_moe.assemble(parse(words.split()), 0)


def first_tokens_alone(feed: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Batches of which only the first four tokens of a sample count in the loss."""
    for batch in feed:
        batch["loss_mask"][:, 4:] = 0
        yield batch


def test_rates_count_every_token_also_where_its_loss_does_not(tmp_path: Path, told: list[StepMetrics]) -> None:
    loop = loop_of("--log-throughput", tmp_path)
    feed = loop.job.batches("train", 0)
    assert feed is not None
    loop.step(1, feed)
    loop.step(2, first_tokens_alone(feed))
    for figures in told:
        assert figures.tokens_per_second * figures.step_seconds == pytest.approx(SAMPLES * SEQUENCE)
        flops = figures.optional["model_tflops_per_device"] * 1e12 * figures.step_seconds
        assert flops == pytest.approx(loop.job.reporting.flops_per_token * SAMPLES * SEQUENCE)
