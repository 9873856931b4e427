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
from moe_overlap.commands.train import require_host_memory
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.lowering.optimizer_state import host_bytes
from moe_overlap.plan.plan import Offload, Plan
from tests.multiprocess.store_runs import DENSE, EXPERTS, planned, with_levels

BATCH = "--micro-batch-size 1 --global-batch-size 4"
PIPELINE = f"{DENSE} {BATCH} --pipeline-model-parallel-size 2"


def started(words: str, world: int) -> Plan:
    """The plan that a run of these flags executes."""
    config = with_plan(parse(words.split()), world).config
    return plan_of_run(config, describe_model(config, 256), world)


@pytest.mark.parametrize(("levels", "said"), [((3, 3), "ZeRO-3"), ((0, 2), "ZeRO-0+2")])
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
    rule = "has another ZeRO level than 1 or offloads, and megatron-core's optimizer does not hold its states; drop it"
    assert str(caught.value) == f"{flag}: {words.split()[-1]} {rule}"


def test_moments_of_sgd_are_not_offloaded(tmp_path: Path) -> None:
    words = planned(tmp_path, f"{DENSE} {BATCH} --optimizer sgd", 2, (1,), [Offload(optimizer=0.5)])
    with pytest.raises(ConfigError, match=r"^--optimizer sgd: .* offloads the moments of Adam; use adam$"):
        started(words, 2)


def test_a_plan_that_needs_more_host_memory_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of two ranks; the second keeps eight bytes of each of its parameters there, the first a quarter of four."""
    model = describe_model(parse(PIPELINE.split()).config, 256)
    plan = with_levels(PIPELINE, 4, (1, 1), [Offload(weights=0.25), Offload(optimizer=1.0)])
    needed = 2 * sum(sum(host_bytes(plan, index, model).values()) for index in (0, 1))
    assert needed == pytest.approx(2 * (0.25 * 4 * 57_536 + 8 * 57_600 / 2), rel=0.01)
    require_host_memory(plan, model, "plan.json", 3, int(needed) + 1)
    text = r"^plan.json: needs 0.0 GiB of host memory on node 0, which has 0.0; lower offload.optimizer of stages\[1\]$"
    with pytest.raises(ConfigError, match=text):
        require_host_memory(plan, model, "plan.json", 0, int(needed) - 1)
    # One stage on each of two machines.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    require_host_memory(plan, model, "plan.json", 1, int(needed) // 4)
    with pytest.raises(ConfigError, match="on node 1"):
        require_host_memory(plan, model, "plan.json", 2, int(needed) // 4)


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
