"""What the comparison with published plans says of plans, and of bandwidths, on cases that are counted by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest

from tests.validation.plan_quality import (
    PUBLISHED,
    flip_rate,
    largest_term,
    same_runs,
    verdict,
)


def prediction(fits: bool = True, **breakdown: float) -> Any:
    return cast(Any, SimpleNamespace(fits=fits, memory_verdict="does not fit", breakdown=breakdown))


def test_a_plan_that_is_slower_than_the_published_one_is_told() -> None:
    said = [verdict(found, 1.0, prediction()) for found in (0.9, 1.0, 1.005, 1.02)]
    assert said == ["never worse", "never worse", "tie", "WORSE"]
    assert verdict(1.02, 1.0, prediction(fits=False)) == "published one does not fit"


def test_the_term_that_makes_the_difference() -> None:
    fast, slow = (
        prediction(compute_seconds=2.0, bubble_seconds=1.0),
        prediction(compute_seconds=1.5, bubble_seconds=3.0),
    )
    assert largest_term(fast, slow) == ("bubble", 2.0)
    assert largest_term(slow, fast) == ("bubble", -2.0)


def test_the_rate_of_the_flip_lies_on_the_line_between_two_rates() -> None:
    frame = pd.DataFrame({"network GB/s": [25.0, 50.0, 100.0], "EP8 PP16": [10.0, 10.0, 10.0], "x": [30.0, 12.0, 8.0]})
    assert flip_rate(frame, "x") == pytest.approx(75.0)
    assert math.isnan(flip_rate(frame.assign(x=11.0), "x"))


def test_sets_and_configurations_have_rows() -> None:
    """Every configuration is a row of its own kind; further sets have several layouts of one release."""
    assert len({published.number for published in PUBLISHED}) == len(PUBLISHED) <= 12
    for published in PUBLISHED:
        assert published.why.startswith("MoE" if published.row.is_moe else "dense"), published.name
    assert len(same_runs()) >= 5
    assert all(len({row["release"] for row in rows}) == 1 for rows in same_runs().values())
