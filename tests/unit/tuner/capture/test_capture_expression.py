"""Expressions in b and s: arithmetic against Python's own, text and back, many at once."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest

from moe_overlap.tuner.capture.expression import B, Expression, S, ceil, evaluate, floor, largest, smallest

POINTS = [(1, 16), (2, 64), (3, 4096), (7, 100)]


def random_expression(draw: random.Random, depth: int = 3) -> tuple[Expression, str]:
    """An expression, and the same as Python source over fractions: the slow twin."""
    if depth == 0:
        return draw.choice([(B, "b"), (S, "s"), (Expression.of(5), "F(5)"), (Expression.of(Fraction(3, 4)), "F(3,4)")])
    left, left_text = random_expression(draw, depth - 1)
    right, right_text = random_expression(draw, depth - 1)
    return draw.choice(
        [
            (left + right, f"({left_text} + {right_text})"),
            (left - right, f"({left_text} - {right_text})"),
            (left * right, f"({left_text} * {right_text})"),
            (ceil(left / 8), f"F(-((-{left_text}) // 8))"),
            (floor(left / 3), f"F({left_text} // 3)"),
            (largest(left, right), f"max({left_text}, {right_text})"),
            (smallest(left, 12), f"min({left_text}, F(12))"),
        ]
    )


@pytest.mark.parametrize("seed", range(30))
def test_values_and_text_equal_the_slow_twin(seed: int) -> None:
    expression, source = random_expression(random.Random(seed))
    read = Expression.parse(str(expression))
    assert str(read) == str(expression) and read == expression
    for b, s in POINTS:
        slow = eval(source, {"F": Fraction, "b": Fraction(b), "s": Fraction(s)})
        assert float(expression.value(b, s)) == pytest.approx(float(slow), rel=1e-12, abs=1e-9)


def test_one_form_for_equal_sums() -> None:
    assert (B + S) * (B - S) == B * B - S * S
    assert str(3 * B * S * S / 2 + 4096 * S + largest(B * S, 128)) == "3/2*b*s^2 + max(b*s, 128) + 4096*s"
    assert str(B - B) == "0" and Expression.parse("0") == Expression()
    assert ceil(Expression.of(Fraction(7, 2))) == Expression.of(4)


def test_many_at_once_broadcast() -> None:
    b, s = np.array([[1], [2], [5]]), np.array([16, 32])
    values = evaluate([B * S, ceil(S / 3), Expression()], b, s)
    assert values.shape == (3, 3, 2)
    assert values[0].tolist() == [[16, 32], [32, 64], [80, 160]]
    assert values[1, 0].tolist() == [6, 11] and not values[2].any()


@pytest.mark.parametrize("text", ["", "b +", "x", "b^s", "b/0", "max(b)", "2 b", "__import__('os')", "b)"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expression"):
        Expression.parse(text)
