"""Flags of a GPU's limits against the environment that CUDA, cuBLAS and NCCL read."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.config import Config
from megatron.training.cli.rules.moe import device_limits_are_in_range
from moe_overlap.commands.device_settings import CONNECTIONS, CTAS, LOADING, nccl_ctas, settle_environment
from moe_overlap.describe.errors import ConfigError

H100 = 132
"""Multiprocessors."""


def config(flags: str = "") -> Config:
    return parse(flags.split()).config


def test_without_flags_the_environment_says_it_else_the_default() -> None:
    assert nccl_ctas(config(), {}, H100, is_listed=True) == 14
    assert nccl_ctas(config(), {CTAS: "4"}, H100, is_listed=True) == 4
    environment: dict[str, str] = {}
    settle_environment(config(), environment)
    assert environment == {}


@pytest.mark.parametrize("flags", ["--plan plan.json", "--defer-weight-gradients", "--moe-overlap-partitions 2"])
def test_streams_of_lists_share_no_queue_unless_the_user_says_so(flags: str) -> None:
    for said, told in (({}, "32"), ({CONNECTIONS: "1"}, "1")):
        settle_environment(config(flags), said)
        assert said == {CONNECTIONS: told}


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
    assert nccl_ctas(flags, {}, H100, is_listed=True) == 2


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
        ("--moe-overlap-nccl-ctas 15", {}, "--moe-overlap-nccl-ctas 15: 9 kernels .* do not fit 132 .*use 1 to 14"),
        ("", {CTAS: "32"}, f"{CTAS} 32: 9 kernels of so many thread blocks do not fit 132 multiprocessors"),
        ("", {CTAS: "all"}, f"{CTAS} all: must be a number"),
        ("--deterministic-mode", {"NCCL_ALGO": "NVLS"}, "NCCL_ALGO NVLS: --deterministic-mode .* unset it"),
        ("--deterministic-mode", {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}, "ALGO 1: --deterministic-mode .*set 0"),
    ],
)
def test_a_disagreement_is_one_line(flags: str, said: dict[str, str], line: str) -> None:
    before = dict(said)
    with pytest.raises(ConfigError, match=line):
        settle_environment(config(flags), said)
        nccl_ctas(config(flags), said, H100, is_listed=True)
    assert {name: said[name] for name in before} == before, "what the user has set is never overwritten"


def test_kernels_need_no_place_together_where_nothing_runs_beside_others() -> None:
    assert nccl_ctas(config("--moe-overlap-nccl-ctas 32"), {}, H100, is_listed=False) == 32


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
