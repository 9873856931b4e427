"""Weights gathered under the first passes of a step: where the gathers stand, who waits for them, and what they carry."""

from __future__ import annotations

import dataclasses
import random

import pytest

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.gradient_buckets import optimizer_parts
from moe_overlap.plan.lowering.lifetimes import stream_of, uses_to_record
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.plan import Plan
from tests.unit.plan import plan_samples
from tests.unit.plan.test_plan_gradient_gaps import before, made_plan
from tests.unit.plan.test_plan_lifetimes_streams import reused_too_early

SHAPES = [((1, 1), 2), ((2, 1), 4), ((2, 2), 4)]


def gathering(plan: Plan) -> Plan:
    overlaps = [dataclasses.replace(stage.overlap, overlap_param_gather=True) for stage in plan.stages]
    stages = (dataclasses.replace(stage, overlap=one) for stage, one in zip(plan.stages, overlaps, strict=True))
    return dataclasses.replace(plan, stages=tuple(stages))


def lists(shape: tuple[int, int], count: int) -> list[tuple[int, Plan, ModelDescription]]:
    plan, model = made_plan(shape=shape, micro_batches=count, defer=True)
    return [(rank, plan, model) for rank in range(0, plan.world_size, 2)]


def gathers_of(made: tuple[Instruction, ...]) -> list[Instruction]:
    return [i for i in made if i.name.startswith("parameters.")]


@pytest.mark.parametrize(("shape", "count"), SHAPES)
def test_every_group_is_gathered_once_in_front_of_all_passes(shape: tuple[int, int], count: int) -> None:
    for rank, plan, model in lists(shape, count):
        made, at_the_end = lower(gathering(plan), model, rank), lower(plan, model, rank)
        gathers, (whole,) = gathers_of(made), [i for i in at_the_end if i.name == "parameters"]
        stage = plan.stage_of(rank)
        assert sorted(i.operator.group for i in gathers) == sorted(optimizer_parts(plan, stage, model))
        assert [i.id for i in gathers] == list(range(len(gathers))), "nothing stands in front of them"
        assert sum(i.bytes for i in gathers) == whole.bytes > 0 and not gathers_of(at_the_end)
        (copies,) = [i for i in made if i.name == "parameters"]
        assert copies.bytes == 0, "the update copies master weights, and sends nothing"
        # On a device they run beside the passes, not on the stream that computes.
        assert {stream_of(i) for i in gathers} == {"dp"} and not any(i.operator.is_update for i in gathers)


@pytest.mark.parametrize(("shape", "count"), SHAPES)
def test_no_weight_is_used_before_its_gather_has_ended(shape: tuple[int, int], count: int) -> None:
    for rank, plan, model in lists(shape, count):
        made = lower(gathering(plan), model, rank)
        gathers = {i.operator.group: i.id for i in gathers_of(made)}
        computing = [i for i in made if i.kind == "compute" and i.operator.is_of_model]
        assert {i.operator.group for i in computing} == gathers.keys()
        for i in computing:
            assert gathers[i.operator.group] in before(made, i, "dp"), i
        first = {group: next(i for i in computing if i.operator.group == group) for group in gathers}
        assert sorted(gathers, key=gathers.__getitem__) == sorted(gathers, key=lambda group: first[group].id)
        # The first pass waits for its own weights alone: the others arrive under it.
        assert max(gathers.values()) not in before(made, computing[0], "dp")


def test_prediction_layers_wait_for_the_embedding_and_the_head() -> None:
    """Parts that compute with the weights of others. (Lists with them are predicted, not executed.)"""
    from moe_overlap.plan.lowering.dependencies import Draft
    from moe_overlap.plan.lowering.weight_gathers import with_gathers

    plan = gathering(plan_samples.plan(2, stage={"data": 2}, mtp_stage=0))
    model = plan_samples.model("mm", mtp_layers=1)
    names = ("L0.attention", "L1.attention", "mtp0.project", "head.loss", "embedding")
    drafts = [Draft(kind="compute", name=name, micro_batch=0) for name in names]
    written = list(with_gathers(drafts, plan, 0, model))
    assert [draft.name for draft in written[:5]] == [
        f"parameters.{part}" for part in ("L0", "L1", "mtp0", "embedding", "head")
    ]
    assert [draft.reads for draft in written[5:]] == [
        ("parameters.L0",), ("parameters.L1",), ("parameters.mtp0", "parameters.embedding", "parameters.head"), (), (),
    ]  # fmt: skip


def test_a_stage_without_copies_gathers_nothing() -> None:
    plan, model = made_plan(defer=True, data=2)
    alone = [dataclasses.replace(stage, data=1, expert=1, tensor=2, expert_tensor=2) for stage in plan.stages]
    gathered = gathering(dataclasses.replace(plan, stages=tuple(alone)))
    assert not gathers_of(lower(gathered, model, 0))


@pytest.mark.parametrize(("shape", "count"), SHAPES)
def test_lists_for_a_device_end_and_reuse_no_memory_too_early(shape: tuple[int, int], count: int) -> None:
    """With reductions at once, too. `lower` itself refuses a list that would not end on one hardware queue."""
    for rank, plan, model in lists(shape, count):
        overlaps = [dataclasses.replace(stage.overlap, reduce_at_once=True) for stage in gathering(plan).stages]
        stages = (dataclasses.replace(stage, overlap=one) for stage, one in zip(plan.stages, overlaps, strict=True))
        queued = dataclasses.replace(plan, stages=tuple(stages), host_runs_ahead=True)
        made = lower(queued, model, rank)
        assert gathers_of(made)
        recorded, draws = uses_to_record(made), random.Random(0)
        assert not any(reused_too_early(made, recorded, draws) for _ in range(3))
