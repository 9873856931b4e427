"""Figures that a training step reports."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.cli.arguments import parse
from megatron.training.report.metrics import MetricsLog, StepMetrics
from megatron.training.training import TrainingLoop
from moe_overlap.commands import train as pretrain_moe
from tests.unit.runtime.one_process import MOE, SEQUENCE, small

SAMPLES, EXPERTS = 4, 4
Told = tuple[StepMetrics, Mapping[str, float]]
"""Figures of a step, and the curves beside them."""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """What the steps of a run hand to its log."""
    metrics: list[Told] = []
    monkeypatch.setattr(MetricsLog, "log", lambda log, figures, curves: metrics.append((figures, curves)))
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


def test_rates_count_every_token_also_where_its_loss_does_not(tmp_path: Path, told: list[Told]) -> None:
    loop = loop_of("--log-throughput", tmp_path)
    feed = loop.job.batches("train", 0)
    assert feed is not None
    loop.step(1, feed)
    loop.step(2, first_tokens_alone(feed))
    for figures, _ in told:
        assert figures.tokens_per_second * figures.step_seconds == pytest.approx(SAMPLES * SEQUENCE)
        flops = figures.optional["model_tflops_per_device"] * 1e12 * figures.step_seconds
        assert flops == pytest.approx(loop.job.reporting.flops_per_token * SAMPLES * SEQUENCE)


ALL_LOSSES = (
    "--moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 1e-2 1e-3 1e-4 "
    "--moe-layer-freq [0,1]"
)


@pytest.mark.parametrize("gate", ["", "--moe-gate topk"])
def test_balancing_losses_are_means_without_coefficients(tmp_path: Path, told: list[Told], gate: str) -> None:
    loop = loop_of(f"{ALL_LOSSES} --moe-per-layer-logging {gate}", tmp_path)
    with torch.no_grad():
        for name, parameter in loop.job.machinery.chunks[0].named_parameters():
            if name.endswith("router.weight"):
                parameter.zero_()  # every expert has the same score
    feed = loop.job.batches("train", 0)
    assert feed is not None
    loop.step(1, feed)
    loop.evaluate("valid")
    loop.step(2, feed)
    alike = {f"{kind}load_balancing_loss": 1.0 for kind in ("", "seq_", "global_")} | {"z_loss": math.log(EXPERTS) ** 2}
    (first, curves), (second, _) = told
    assert {name: first.optional[name] for name in alike} == pytest.approx(alike)
    by_layer = {f"moe/{name}_layer_1": loss for name, loss in alike.items()}
    assert curves == pytest.approx(by_layer | {"batch-size": SAMPLES})
    # What a step reports is its own.
    assert {name: second.optional[name] for name in alike} == pytest.approx(alike, rel=0.1)
