"""GPUs that cannot hold the states of any plan are refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.search import search_plan

GPT_7B = [f"@{Path(__file__).resolve().parents[3] / 'examples' / 'mist-gpt-7b.args'}"]


def no_capture(*_: Any) -> Any:
    raise AssertionError("layers are captured for a job that fits nowhere")


@pytest.mark.parametrize("space", ["stages", "zero"])
def test_too_few_gpus_are_refused_before_a_capture(space: str) -> None:
    """18 bytes for each of 6.7 billion parameters are more than four L4 have."""
    settings = SearchSettings(target="moe-overlap", space=space)
    text = r"^--num-gpus 4 × L4: no plan fits: .* take 111\.6 GiB, and 4 GPUs hold 80\.2 .*the states alone fill 6\)"
    with pytest.raises(ConfigError, match=text):
        search_plan(GPT_7B, shipped_cluster("L4", 4), settings, graphs=no_capture)


def test_states_that_hosts_may_hold_are_no_reason_to_refuse() -> None:
    settings = SearchSettings(target="any", space="offload")
    with pytest.raises(AssertionError, match="layers are captured"):
        search_plan(GPT_7B, shipped_cluster("L4", 4), settings, graphs=no_capture)
