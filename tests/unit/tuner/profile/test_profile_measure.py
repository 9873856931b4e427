"""Timing with torch: every operator that is said to be measurable can be, and does what its name says."""

from __future__ import annotations

import pytest
import torch

from moe_overlap.tuner.profile.database import BOUND_BY_BYTES, FORMATS, INTEGERS, OperatorKey, Pass, can_be_measured
from moe_overlap.tuner.profile.lookup import operator_grid
from moe_overlap.tuner.profile.measure.operators import BUILDERS, call_of, call_seconds


def test_the_vocabulary_is_what_can_be_called() -> None:
    assert set(BUILDERS) == set(BOUND_BY_BYTES)
    assert len(set(BOUND_BY_BYTES)) == len(BOUND_BY_BYTES)


@pytest.mark.parametrize("dtype", [*FORMATS, *INTEGERS, "bool"])
def test_every_measurable_operator_runs(dtype: str) -> None:
    """At the sizes of the grid, and at sizes where operands are broadcast or empty."""
    ran = set()
    for name in BOUND_BY_BYTES:
        for shape in ((1, 9), (64, 64 * 12), (512, 8192), (8, 8256), (1024, 1024 * 8 + 36)):
            for direction in ("forward", "backward"):
                key = OperatorKey(name, direction, dtype, shape)
                if can_be_measured(key):
                    call_of(key, "cpu")()
                    ran.add(name)
    assert {"clone", "cat", "gather"} <= ran
    assert ("silu" in ran, "add" in ran, "ge" in ran) == (dtype in FORMATS, dtype != "bool", dtype not in FORMATS)


@pytest.mark.parametrize("dtype", FORMATS)
def test_products_and_attention_run(dtype: str) -> None:
    ran = {}
    for key in operator_grid(dtype, "cpu", quick=True):
        if key.kind in ("grouped_gemm", "attention"):
            ran[key.kind] = call_of(key, "cpu")()
    assert set(ran) == {"grouped_gemm", "attention"} and None not in ran.values()


@pytest.mark.parametrize("direction", ["forward", "backward", "weight_gradient"])
def test_a_product_has_the_sizes_of_its_key(direction: Pass) -> None:
    result = call_of(OperatorKey("gemm", direction, "float32", (3, 5, 7)), "cpu")()
    assert isinstance(result, torch.Tensor) and result.shape == (3, 5)


def test_attention_times_the_pass_of_its_key() -> None:
    shape = (1, 4, 2, 16, 16, 8, 8, 0)
    forward = call_of(OperatorKey("attention", "forward", "float32", shape), "cpu")()
    backward = call_of(OperatorKey("attention", "backward", "float32", shape), "cpu")()
    assert isinstance(forward, torch.Tensor) and forward.shape == (1, 4, 16, 8)
    assert isinstance(backward, tuple) and [tuple(g.shape) for g in backward] == [(1, 4, 16, 8), *[(1, 2, 16, 8)] * 2]


def test_reductions_follow_the_bytes() -> None:
    """Rows of norms in the forward pass; their weights, sums of columns, in the backward pass."""
    for direction, shape in (("forward", (1024, 4 * 1024 * 129)), ("backward", (128, 4 * 128 * 1025))):
        result = call_of(OperatorKey("sum", direction, "float32", shape), "cpu")()  # type: ignore[arg-type]
        assert isinstance(result, torch.Tensor) and result.shape == (shape[0],)


def test_the_least_batch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1_000_000))
    monkeypatch.setattr("moe_overlap.tuner.profile.measure.operators.time.perf_counter", lambda: float(next(clock)))
    assert call_seconds(lambda: None, "cpu", 1.0) == 1.0
