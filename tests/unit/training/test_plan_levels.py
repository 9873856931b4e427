"""ZeRO levels of a plan's file: what flags beside it may say, and what the run says of its layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.dry_run import planned_layout_line
from megatron.training.cli.sizes import describe_model
from megatron.training.plan_argument import with_plan
from megatron.training.plan_flags import plan_of_run
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.plan import Plan
from tests.multiprocess.store_runs import DENSE, EXPERTS, planned, with_levels

BATCH = "--micro-batch-size 1 --global-batch-size 4"
PIPELINE = f"{DENSE} {BATCH} --pipeline-model-parallel-size 2"


def started(words: str, world: int) -> Plan:
    """The plan that a run of these flags executes."""
    config = with_plan(parse(words.split()), world).config
    return plan_of_run(config, describe_model(config, 256), world)


@pytest.mark.parametrize(("levels", "said"), [((3, 3), "ZeRO-3"), ((0, 2), "ZeRO 0, 2 by stage")])
def test_a_file_says_the_levels_of_its_stages(levels: tuple[int, int], said: str, tmp_path: Path) -> None:
    words = planned(tmp_path, PIPELINE, 4, levels)
    plan = started(words, 4)
    assert tuple(stage.zero_level for stage in plan.stages) == levels
    assert f"DP 2 with {said}, " in planned_layout_line(plan, parse(PIPELINE.split()).config)


@pytest.mark.parametrize(
    "flag",
    [
        "--grad-reduce-in-bf16",
        "--use-precision-aware-optimizer",
        "--optimizer-cpu-offload",
        "--moe-overlap-cuda-graphs",
    ],
)
def test_flags_of_megatrons_optimizer_are_refused(flag: str, tmp_path: Path) -> None:
    flags = f"{DENSE} {BATCH} --bf16"
    words = planned(tmp_path, flags, 2, (2,))
    with pytest.raises(ConfigError) as caught:
        started(f"{words} {flag}", 2)
    rule = "has another ZeRO level than 1, whose states megatron-core's optimizer does not hold; drop it"
    assert str(caught.value) == f"{flag}: {words.split()[-1]} {rule}"


def test_experts_travel_by_the_dispatcher_of_lists(tmp_path: Path) -> None:
    flags = EXPERTS.replace("--moe-token-dispatcher-type irregular", "") + BATCH
    words = planned(tmp_path, flags, 2, (3,))
    assert with_plan(parse(words.split()), 2).config.moe.moe_token_dispatcher_type == "irregular"
    with pytest.raises(ConfigError, match="--moe-token-dispatcher-type alltoall: .* exchanges tokens by the irregular"):
        started(f"{words} --moe-token-dispatcher-type alltoall", 2)


def test_stores_hold_all_stages_if_one_has_another_level() -> None:
    plan = with_levels(PIPELINE, 4, (1, 1))
    assert not plan.has_stores and not plan.runs_lists and not plan.is_decoupled
    stages = (plan.stages[0], dataclasses.replace(plan.stages[1], zero_level=0))
    mixed = dataclasses.replace(plan, stages=stages)
    assert mixed.has_stores and mixed.runs_lists and not mixed.is_decoupled
