"""What a plan search is asked, and refuses before it begins."""

from __future__ import annotations

import math

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.plan import Precision
from moe_overlap.plan_search.request import SearchSettings, read_request
from tests.unit.plan_search.test_plan_search import H100, HALF, OPTIONS, SMALL


@pytest.mark.parametrize(
    ("words", "precision", "rule"),
    [
        ([*SMALL, "--moe-ffn-hidden-size", "4096"], "fp8", "precision fp8 is executed with ZeRO 1 on the device alone"),
        (HALF, None, "precision fp16 is executed with ZeRO 1 on the device alone"),
        (
            [*SMALL, "--mtp-num-layers", "1"],
            None,
            "a model with --mtp-num-layers is executed with ZeRO 1 on the device alone",
        ),
    ],
)
def test_zero_levels_are_not_searched_for_what_runs_with_one(
    words: list[str], precision: Precision | None, rule: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_request(words, H100, SearchSettings(space="zero"), math.inf, precision=precision, **OPTIONS)
    assert str(caught.value) == f"--search-space zero: {rule}; use --search-space stages"
