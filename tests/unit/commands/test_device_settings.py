"""Flags of a GPU's limits against the environment that CUDA, cuBLAS and NCCL read."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.config import Config
from megatron.training.cli.rules.moe import device_limits_are_in_range
from moe_overlap.commands.device_settings import (
    ALLOCATOR,
    CONNECTIONS,
    CTAS,
    FORMER_ALLOCATOR,
    LOADING,
    RING,
    nccl_blocks,
    settle_environment,
)
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.lowering.residency import BlockLimits, Communicators
from tests.multiprocess.unlike_runs import UNTIED, Shape, unlike_plan
from tests.unit.plan import plan_samples

H100 = 132
"""Multiprocessors."""
MOST = Communicators(point_to_point=6, collective=3)
"""Of an inner stage with experts."""


def limits(flags: str, said: dict[str, str], communicators: Communicators | None = MOST) -> BlockLimits | None:
    return nccl_blocks(config(flags), said, H100, plan_samples.plan(4, 2), communicators)


def config(flags: str = "") -> Config:
    return parse(flags.split()).config


def test_without_flags_the_environment_says_it_else_the_default() -> None:
    assert limits("", {}) == BlockLimits(16, 12)
    assert limits("", {CTAS: "4"}) == BlockLimits(4, 4)
    environment: dict[str, str] = {}
    settle_environment(config(), environment)
    assert environment == {}


@pytest.mark.parametrize("flags", ["--plan plan.json", "--defer-weight-gradients", "--moe-overlap-partitions 2"])
def test_streams_of_lists_share_no_queue_unless_the_user_says_so(flags: str) -> None:
    for said, told in (({}, "32"), ({CONNECTIONS: "1"}, "1")):
        settle_environment(config(flags), said)
        assert said == {CONNECTIONS: told, ALLOCATOR: "expandable_segments:True"}


@pytest.mark.parametrize("name", [ALLOCATOR, FORMER_ALLOCATOR])
def test_the_allocator_is_as_the_user_says(name: str) -> None:
    said = {name: "max_split_size_mb:512"}
    settle_environment(config("--defer-weight-gradients"), said)
    assert said == {name: "max_split_size_mb:512", CONNECTIONS: "32"}


def test_ring_attention_sends_and_receives_at_once_unless_the_user_says_so() -> None:
    for flags, unlike, said, told in (
        ("--context-parallel-size 4", False, None, "1"),
        ("--context-parallel-size 4", False, "0", "0"),
        ("", True, None, "1"),
        ("", False, None, None),
    ):
        environment = {} if said is None else {RING: said}
        settle_environment(config(flags), environment, unlike)
        assert environment.get(RING) == told


@pytest.mark.parametrize(
    ("flags", "said", "told"),
    [
        ("--defer-weight-gradients --pipeline-model-parallel-size 2", None, "EAGER"),
        ("--plan plan.json --pipeline-model-parallel-size 2", None, "EAGER"),
        ("--plan plan.json --pipeline-model-parallel-size 2", "LAZY", "LAZY"),
        ("--pipeline-model-parallel-size 2", None, None),
        ("--defer-weight-gradients", None, None),
    ],
)
def test_stages_that_follow_lists_load_no_kernel_in_a_step(flags: str, said: str | None, told: str | None) -> None:
    environment = {} if said is None else {LOADING: said}
    settle_environment(config(flags), environment)
    assert environment.get(LOADING) == told


def test_a_flag_is_what_cuda_is_told() -> None:
    environment: dict[str, str] = {}
    flags = config("--moe-overlap-device-connections 4 --moe-overlap-nccl-ctas 2")
    settle_environment(flags, environment)
    assert environment == {CONNECTIONS: "4"}
    assert limits("--moe-overlap-nccl-ctas 2", {}) == BlockLimits(2, 2)


@pytest.mark.parametrize(
    ("flags", "said", "line"),
    [
        (
            "--moe-overlap-device-connections 8",
            {CONNECTIONS: "1"},
            f"{CONNECTIONS} 1: --moe-overlap-device-connections says 8",
        ),
        *(
            ("--moe-overlap-device-connections 8", {CONNECTIONS: said}, f"{CONNECTIONS} {said}: must be .*from 1 to 32")
            for said in ("0", "33", "-1", "many")
        ),
        ("--moe-overlap-nccl-ctas 8", {CTAS: "16"}, f"{CTAS} 16: --moe-overlap-nccl-ctas says 8"),
        ("--moe-overlap-nccl-ctas 13", {}, "--moe-overlap-nccl-ctas 13: 9 kernels hold 135 .* of 132 .*use 1 to 12"),
        ("", {CTAS: "32"}, f"{CTAS} 32: 9 kernels hold 288 thread blocks then, of 132 multiprocessors"),
        ("", {CTAS: "all"}, f"{CTAS} all: must be a number"),
        ("--deterministic-mode", {"NCCL_ALGO": "NVLS"}, "NCCL_ALGO NVLS: --deterministic-mode .* unset it"),
        ("--deterministic-mode", {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}, "ALGO 1: --deterministic-mode .*set 0"),
    ],
)
def test_a_disagreement_is_one_line(flags: str, said: dict[str, str], line: str) -> None:
    before = dict(said)
    with pytest.raises(ConfigError, match=line):
        settle_environment(config(flags), said)
        limits(flags, said)
    assert {name: said[name] for name in before} == before, "what the user has set is never overwritten"


def test_kernels_need_no_place_together_where_nothing_runs_beside_others() -> None:
    assert limits("--moe-overlap-nccl-ctas 32", {}, None) == BlockLimits(32, 32)
    assert limits("", {}, None) is None, "NCCL chooses, as it does for Megatron-LM"


def test_a_boundary_at_which_a_rank_meets_too_many_is_named() -> None:
    plan = unlike_plan((Shape(2), Shape(2, data=4)), UNTIED)
    met = "plan.json transfers\\[0\\]: 11 communicators of a rank are under way together on 8 multiprocessors; use"
    with pytest.raises(ConfigError, match=met):
        nccl_blocks(config(), {}, 8, plan, Communicators(8, 3))


def test_a_deterministic_run_sets_what_is_not_set() -> None:
    environment = {"NCCL_ALGO": "Ring"}
    settle_environment(config("--deterministic-mode"), environment)
    assert environment == {
        "NCCL_ALGO": "Ring",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }


@pytest.mark.parametrize("field", ["moe_overlap_device_connections", "moe_overlap_nccl_ctas"])
@pytest.mark.parametrize("value", [0, 33, -1])
def test_limits_out_of_range(field: str, value: int) -> None:
    said = dataclasses.replace(Config(), overlap=dataclasses.replace(Config().overlap, **{field: value}))
    with pytest.raises(ConfigError, match="must be from 1 to 32"):
        device_limits_are_in_range(said)


def test_kernels_are_loaded_at_the_start_where_a_plan_joins_stages_of_unlike_shape() -> None:
    environment: dict[str, str] = {}
    settle_environment(config("--plan p.json"), environment, has_unlike_stages=True)
    assert environment["CUDA_MODULE_LOADING"] == "EAGER"
