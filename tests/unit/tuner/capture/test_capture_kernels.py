"""Operations of registered kernels, against pairs of tokens that are counted one by one."""

from __future__ import annotations

import pytest

from moe_overlap.tuner.capture.expression import B, Expression, S, evaluate
from moe_overlap.tuner.capture.kernels import flops

SAMPLES, LENGTH, HEADS, KEYS, VALUES = 3, 1024, 4, 48, 32


def operations(kernel: str, shape: tuple[Expression | int, ...]) -> float:
    return float(evaluate([flops(kernel, [Expression.of(size) for size in shape])], SAMPLES, LENGTH)[0])


@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(("kernel", "of_keys", "of_values"), [("te.attention", 1, 1), ("te.attention_backward", 3, 2)])
def test_attention_multiplies_pairs_that_see_each_other(
    kernel: str, of_keys: int, of_values: int, window: int, ranks: int
) -> None:
    """Row i sees i keys, or as many as the window lets it; context ranks share the rows. Grouped keys are read by all heads."""
    pairs = sum(min(row, window or row) for row in range(1, LENGTH + 1)) / ranks
    counted = 2 * SAMPLES * HEADS * pairs * (of_keys * KEYS + of_values * VALUES)
    for groups in (1, HEADS):
        shape = (B, HEADS, groups, S / ranks, S, KEYS, VALUES, window)
        # A row sees itself by half in the closed form.
        assert operations(kernel, shape) == pytest.approx(counted, rel=2e-3)


def test_products_multiply_and_add() -> None:
    rows = B * S
    assert operations("mm", (rows, 16, 8)) == 2 * SAMPLES * LENGTH * 16 * 8
    assert operations("te.grouped_gemm", (5, rows, 16, 8)) == 2 * SAMPLES * LENGTH * 16 * 8
    assert operations("te.norm", (rows,)) == operations("hybridep.dispatch", (rows,)) == 0
