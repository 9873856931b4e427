"""GPUs that cannot hold the states of any plan are refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan_search.flags import Target
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.search import search_plan

GPT_7B = [f"@{Path(__file__).resolve().parents[3] / 'examples' / 'mist-gpt-7b.args'}"]


def no_capture(*_: Any) -> Any:
    raise AssertionError("layers are captured for a job that fits nowhere")


@pytest.mark.parametrize(
    ("space", "gpus", "text"),
    [
        ("stages", 4, r"weights, gradients .* take 111\.6 GiB, and 4 GPUs hold 80\.2 .*the states alone fill 6\)"),
        ("zero", 4, r"weights, gradients .* take 111\.6 GiB, and 4 GPUs hold 80\.2 .*the states alone fill 6\)"),
        ("full", 1, r"gradients alone take 24\.8 GiB, and 1 GPUs hold 20\.3 .*the states alone fill 2\)"),
    ],
)
def test_too_few_gpus_are_refused_before_a_capture(space: str, gpus: int, text: str) -> None:
    """18 bytes for each of 6.7 billion parameters are more than four L4 have; four of them are for gradients."""
    settings = SearchSettings(target="moe-overlap", space=space)
    with pytest.raises(ConfigError, match=rf"^--num-gpus {gpus} × L4: no plan fits: {text}"):
        search_plan(GPT_7B, shipped_cluster("L4", gpus), settings, graphs=no_capture)


@pytest.mark.parametrize("target", ["any", "moe-overlap"])
def test_states_that_hosts_may_hold_are_no_reason_to_refuse(target: Target) -> None:
    settings = SearchSettings(target=target, space="offload")
    with pytest.raises(AssertionError, match="layers are captured"):
        search_plan(GPT_7B, shipped_cluster("L4", 4), settings, graphs=no_capture)
