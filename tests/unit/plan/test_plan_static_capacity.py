"""Plans of a static capacity: no counts in their lists, the bytes of every place, and what they do not go with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import describe_model
from megatron.training.cli.validation import validate
from megatron.training.plan_flags import plan_from_flags, plan_of_run
from megatron.training.plan_values import arguments_of
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.job import listed_run_of
from moe_overlap.plan.instructions import Instruction, reads_counts
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.operators import COMBINE, COUNT, DISPATCH, EXPERTS, parse_operator
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import load_plan, save_plan
from moe_overlap.plan.sizes import deferred_bytes
from tests.unit.training.flags_from_plan import flags_from_plan

BASE = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2
    --global-batch-size 8 --lr 1e-3 --train-iters 5 --disable-bias-linear --num-experts 8 --moe-router-topk 2
    --moe-ffn-hidden-size 32 --moe-gate topk --moe-token-dispatcher-type irregular --expert-model-parallel-size 2
    --moe-expert-capacity-factor 1.5 --hidden-dropout 0 --attention-dropout 0
"""
PAD = "--moe-pad-expert-input-to-capacity"
TOKENS, CAPACITY, ROW = 2 * 64, 48, 64 * 4
"""Tokens of a micro-batch, places of an expert (128 · 2 / 8 · 1.5), bytes of a row."""
WORDS = {
    "deferred": "--defer-weight-gradients",
    "two micro-batches": "--moe-overlap-micro-batches 2",
    "chunks": "--moe-overlap-capacity-chunks 4",
    "recomputed": "--defer-weight-gradients --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


def plan_of(flags: str) -> tuple[Plan, ModelDescription]:
    config = parse(f"{BASE} {flags}".split()).config
    validate(config, 2)
    model = describe_model(config, 257)
    return plan_from_flags(config, model, 2), model


def shown(instructions: Sequence[Instruction]) -> list[tuple[object, ...]]:
    """Instructions in their order, without what a count gives or takes."""
    kept = [i for i in instructions if i.operator.kind is not COUNT]
    return [(i.kind, i.name, i.channel, i.micro_batch, i.partition) for i in kept]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("words", WORDS)
def test_a_list_is_that_of_counted_rows_without_the_counts(words: str, ahead: bool) -> None:
    plan, model = plan_of(f"{PAD} {WORDS[words]}")
    assert plan.static_capacity_factor == 1.5
    plan = dataclasses.replace(plan, host_runs_ahead=ahead)
    padded = lower(plan, model, 0)
    counted = lower(dataclasses.replace(plan, static_capacity_factor=None), model, 0)
    assert any(i.operator.kind is COUNT for i in counted)
    assert not any(i.operator.kind is COUNT or reads_counts(i.reads) for i in padded)
    assert not any("counts" in name for i in padded for name in i.writes)
    if not ahead:  # Queues are filled in another order where nothing waits.
        assert sorted(map(str, shown(padded))) == sorted(map(str, shown(counted)))
    chunks = 4 if words == "chunks" else 1
    for i in padded:
        if i.operator.kind in (DISPATCH, COMBINE):
            # Half of the experts are on this rank.
            assert i.bytes == 8 * CAPACITY // chunks * ROW // 2


def test_deferred_weight_gradients_hold_every_place() -> None:
    plan, model = plan_of(f"{PAD} --defer-weight-gradients")
    gradient = parse_operator("L1.moe.experts.fc2.dW")
    assert gradient.kind is EXPERTS
    assert deferred_bytes(gradient, plan, plan.stages[0], model) == 8 * CAPACITY * (32 + 64) * 4


def test_without_padding_nothing_is_static() -> None:
    assert plan_of("--defer-weight-gradients")[0].static_capacity_factor is None


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("static_capacity_factor", 0.0, "static_capacity_factor 0.0: must be positive; write null"),
        ("static_capacity_factor", float("inf"), "static_capacity_factor inf: must be positive"),
    ],
)
def test_factors_that_are_none(field: str, value: float, line: str) -> None:
    plan, model = plan_of(f"{PAD} --defer-weight-gradients")
    with pytest.raises(ConfigError, match=line):
        validate_plan(dataclasses.replace(plan, **{field: value}), model)


def test_partitions_may_each_fill_the_capacity() -> None:
    plan, model = plan_of("--moe-overlap-partitions 2")
    with pytest.raises(ConfigError, match=r"layers\[0\].mechanism partitioned: rows of a static capacity travel whole"):
        validate_plan(dataclasses.replace(plan, static_capacity_factor=1.5), model)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (f"{PAD} --moe-overlap-partitions 2", f"{PAD}: any partition may fill .* --moe-overlap-capacity-chunks"),
        (
            f"{PAD} --moe-token-dispatcher-type alltoall",
            f"{PAD}: the rows of our gates .* irregular or drop --moe-gate",
        ),
        (f"{PAD} --moe-token-dispatcher-type allgather", f"{PAD}: the rows of our gates"),
    ],
)
def test_flags_that_do_not_go_with_padding(flags: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        plan_of(flags)


def test_padding_needs_a_capacity_and_a_gate_of_ours() -> None:
    words = f"{BASE} {PAD}"
    without = parse(words.replace("--moe-expert-capacity-factor 1.5", "").split()).config
    with pytest.raises(ConfigError, match=f"{PAD}: needs a capacity; add --moe-expert-capacity-factor"):
        validate(without, 2)
    with pytest.raises(
        ConfigError, match=f"{PAD}: the irregular dispatcher pads the rows of our gates; add --moe-gate"
    ):
        validate(parse(words.replace("--moe-gate topk", "").split()).config, 2)


def test_a_search_offers_no_overlap_to_padding_by_megatron_core() -> None:
    ours = parse(f"{BASE} {PAD}".split()).config
    run = listed_run_of(ours, 2, {})
    assert run.refusal is None and run.static_capacity
    own, stock = "--moe-gate topk --moe-token-dispatcher-type irregular", "--moe-token-dispatcher-type alltoall"
    theirs = f"{BASE} {PAD}".replace(own, stock)
    refusal = listed_run_of(parse(theirs.split()).config, 2, {}).refusal
    assert refusal is not None and str(refusal).startswith(f"{PAD}: overlap pads by the irregular dispatcher")


def test_flags_plans_and_files_say_the_same(tmp_path) -> None:
    plan, model = plan_of(f"{PAD} --defer-weight-gradients")
    assert {PAD, "1.5", "irregular"} <= set(arguments_of(flags_from_plan(plan, model)))
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(str(tmp_path / "plan.json")) == plan
    named = f"{BASE} --plan {tmp_path / 'plan.json'}"
    config = parse(f"{named} {PAD}".split()).config
    assert plan_of_run(config, describe_model(config, 257), 2) == plan
    # A plan does not change the mathematics: flags that do not pad disagree with it.
    config = parse(named.split()).config
    with pytest.raises(ConfigError, match=r"static_capacity_factor 1.5: the flags say None"):
        plan_of_run(config, describe_model(config, 257), 2)
