"""A plan with stages of unlike shape beside flags, which say one shape for all: what is taken from it, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron.training.cli.arguments import ParsedArguments, parse
from megatron.training.cli.dry_run import planned_layout_line
from megatron.training.cli.sizes import describe_model
from megatron.training.cli.validation import validate
from megatron.training.plan_argument import with_plan
from megatron.training.plan_flags import hold_unlike_stages, plan_of_run
from megatron.training.plan_values import config_of_stage
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.serialize import save_plan
from tests.multiprocess.unlike_runs import MODEL, UNTIED, Shape, unlike_plan

SHAPES = (Shape(2, samples=2), Shape(2, tensor=2, expert=2, expert_tensor=1))


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.chdir(tmp_path)
    made = unlike_plan(SHAPES, UNTIED)
    save_plan(made, "plan.json")
    return made


def read(words: str, flags: str = UNTIED) -> ParsedArguments:
    padded = f"{MODEL} {flags} --make-vocab-size-divisible-by 128 --plan plan.json"
    return with_plan(parse(f"{padded} {words}".split()), 3)


def run_of(parsed: ParsedArguments) -> Plan:
    return plan_of_run(parsed.config, describe_model(parsed.config, 256), 3)


def refusal(words: str, flags: str = UNTIED) -> str:
    with pytest.raises(ConfigError) as refused:
        run_of(read(words, flags))
    return str(refused.value)


def test_each_stage_has_a_configuration_of_its_own(plan: Plan) -> None:
    parsed = read("")
    validate(parsed.config, parsed.layout_world)
    assert parsed.layout_world == 1 and run_of(parsed) == plan
    assert parsed.config.moe.moe_token_dispatcher_type == "irregular"
    sizes = []
    for index in range(2):
        config = config_of_stage(parsed.config, plan, index)
        parallel = config.parallel
        sizes.append(
            (config.training.micro_batch_size, parallel.tensor_model_parallel_size, parallel.sequence_parallel)
        )
    assert sizes == [(2, 1, False), (1, 2, True)]
    line = planned_layout_line(plan, parsed.config)
    stages = "DP 1, micro-batch 2 × 4 | TP 2 EP 2 ETP 1 DP 1, micro-batch 1 × 8"
    assert line == f"3 processes in 2 stages of unlike shape, with ZeRO-1: {stages}; global batch 8"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--micro-batch-size 2",
            "--micro-batch-size 2: plan.json says 2, 1 for its stages, and a flag one value for all; drop the flag",
        ),
        (
            "--pipeline-model-parallel-size 2",
            "--pipeline-model-parallel-size 2: plan.json has stages of unlike shape, which flags cannot say; drop the flag",
        ),
        ("--global-batch-size 16", "plan.json global_batch_size 8: --global-batch-size says 16; drop the flag"),
        (
            "--moe-token-dispatcher-type alltoall",
            "--moe-token-dispatcher-type alltoall: plan.json has stages of unlike shape, whose list exchanges tokens by the "
            "irregular dispatcher; use irregular",
        ),
        (
            "--moe-router-load-balancing-type aux_loss",
            "plan.json stages[1].micro_batch_size 1: aux_loss is a mean over 1 samples there and over 2 on stages[0]; use "
            "seq_aux_loss or equal micro-batches",
        ),
        ("--overlap-grad-reduce", "--overlap-grad-reduce: plan.json reduces gradients at the end of the step"),
    ],
)
def test_flags_that_disagree_are_one_line(plan: Plan, words: str, line: str) -> None:
    assert refusal(words).startswith(line)


def test_the_vocabulary_is_divided_at_both_ends(plan: Plan) -> None:
    config = read("").config
    model = dataclasses.replace(describe_model(config, 256), vocab_size=255)
    with pytest.raises(ConfigError) as refused:
        hold_unlike_stages(plan, "plan.json", config, model)
    rule = "the vocabulary, padded for stages[0] to 255 rows, is not divisible"
    fix = "give --make-vocab-size-divisible-by a multiple of 2"
    assert str(refused.value) == f"plan.json stages[1].tensor 2: {rule}; {fix}"


def test_tiles_name_ranks_that_have_what_they_send(plan: Plan) -> None:
    first, second = plan.transfers[0].tiles[:2]
    moved = dataclasses.replace(first, target=second.target), dataclasses.replace(second, target=first.target)
    tiles = (*moved, *plan.transfers[0].tiles[2:])
    save_plan(dataclasses.replace(plan, transfers=(dataclasses.replace(plan.transfers[0], tiles=tiles),)), "plan.json")
    with pytest.raises(ConfigError) as refused:
        read("")
    line = "plan.json transfers[0].tiles[0].target 2: tokens [0, 16) are not among its own, [16, 32); name a rank that has the"
    assert str(refused.value).startswith(line)
