"""Tests of the capabilities: what is not executed is refused by field; what plain flags can say is accepted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.capabilities import (
    ListedRun,
    refuse_unsupported,
    refuse_what_cannot_be_lowered,
    require_listable,
    require_listed_recipe,
)
from moe_overlap.plan.overlap import LayerOverlap, StageOverlap
from moe_overlap.plan.plan import AllGather, Offload, Plan, Recompute
from moe_overlap.plan.serialize import load_plan
from moe_overlap.plan.uniform_overlap import OverlapWords, overlap_from_words
from tests.unit.plan import plan_samples


def refusal(plan: Plan) -> str:
    """Why the runtime refuses a plan; empty if it executes it."""
    try:
        refuse_unsupported(plan)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "recompute",
    [
        Recompute(),
        Recompute(layers=1, granularity="full"),
        Recompute(layers=2, granularity="uniform"),
        Recompute(layers=2, granularity="selective", modules=("core_attn", "moe")),
    ],
)
def test_what_flags_say_is_executed(recompute: Recompute) -> None:
    stage = {"recompute": recompute, "data": 2, "expert": 2}
    assert refusal(plan_samples.plan(layers=4, stages=2, stage=stage)) == ""
    chunks = plan_samples.plan(layers=8, stages=2, chunks=2, precision="bf16", stage={"recompute": recompute})
    assert refusal(chunks) == ""


@pytest.mark.parametrize("levels", [(0, 0), (2, 2), (3, 3), (1, 2), (0, 3)])
def test_every_zero_level_is_executed_on_every_stage(levels: tuple[int, int]) -> None:
    plan = plan_samples.plan(layers=4, stages=2, precision="bf16", stage={"data": 2})
    stages = (dataclasses.replace(stage, zero_level=level) for stage, level in zip(plan.stages, levels, strict=True))
    plan = dataclasses.replace(plan, stages=tuple(stages))
    refuse_unsupported(plan)
    assert plan.has_stores and plan.runs_lists and plan.is_decoupled == (max(levels) > 1)


@pytest.mark.parametrize(
    ("stage", "run", "message"),
    [
        ({"zero_level": 2}, {}, "stages[0].zero_level 2: the stage has one replica, nothing to shard; write 1"),
        ({"zero_level": 3}, {}, "stages[0].zero_level 3: the stage has one replica, nothing to shard; write 1"),
        (
            {"zero_level": 3, "data": 2},
            {"precision": "fp8"},
            "precision fp8: executed with ZeRO 1 on the device alone; use bf16, or write zero_level 1 and no offload",
        ),
        (
            {"zero_level": 0},
            {"mtp_stage": 1},
            "mtp_stage 1: executed with ZeRO 1 on the device alone; write zero_level 1, or drop the prediction layers",
        ),
        (
            {"zero_level": 0, "overlap": StageOverlap(gradient_chunk_bytes=4096)},
            {},
            "stages[0].overlap.gradient_chunk_bytes 4096: buckets are executed with ZeRO 1 on the device alone; write 0",
        ),
        (
            {"zero_level": 2, "data": 2, "overlap": StageOverlap(overlap_param_gather=True)},
            {},
            "stages[0].overlap.overlap_param_gather True: executed with ZeRO 1 on the device alone; write false",
        ),
        (
            {"offload": Offload(gradients=0.5)},
            {},
            "stages[0].offload.gradients 0.5: the norm reads all gradients on the device; write 0.0",
        ),
        (
            {"offload": Offload(activations=0.5), "recompute": Recompute(layers=2, granularity="full")},
            {},
            "stages[0].offload.activations 0.5: the stage recomputes every layer and saves nothing; write 0.0",
        ),
        (
            {"overlap": StageOverlap(gradient_chunk_bytes=4096)},
            {},
            "stages[0].overlap.gradient_chunk_bytes 4096: no layer of this plan overlaps anything; write 0",
        ),
        (
            {"overlap": StageOverlap(reduce_at_once=True)},
            {},
            "stages[0].overlap.reduce_at_once True: no layer of this plan overlaps anything; write false",
        ),
        (
            {"overlap": StageOverlap(overlap_param_gather=True)},
            {},
            "stages[0].overlap.overlap_param_gather True: no layer of this plan overlaps anything; write false",
        ),
        (
            {"overlap": StageOverlap(micro_batches_in_flight=3)},
            {},
            "stages[0].overlap.micro_batches_in_flight 3: two micro-batches are interleaved at most; write 2",
        ),
        (
            {"overlap": StageOverlap(layers=(LayerOverlap(layer=0, mechanism="fused"),))},
            {},
            "stages[0].overlap.layers[0].mechanism fused: not executed; use none, partitioned, tutel or cross_micro_batch",
        ),
        (
            {"overlap": StageOverlap(layers=(LayerOverlap(layer=0, dispatcher="flex"),))},
            {},
            "stages[0].overlap.layers[0].dispatcher flex: not executed; write irregular",
        ),
        (
            {"recompute": Recompute(layers=1, granularity="selective", modules=("moe",))},
            {},
            "stages[0].recompute.layers 1: selective recomputation covers every layer of a chunk (2); write 2",
        ),
        ({}, {"precision": "nvfp4"}, "precision nvfp4: not executed; use bf16, fp8 or mxfp8"),
        ({}, {"mtp_stage": 0}, "mtp_stage 0: prediction layers run on the stage of the loss; write 1"),
        (
            {"overlap": StageOverlap(layers=(LayerOverlap(layer=0, mechanism="cross_micro_batch"),))},
            {"mtp_stage": 1},
            "mtp_stage 1: multi-token prediction is not overlapped, and here layers are; write null or overlap nothing",
        ),
        ({}, {"embedding_stage": 1}, "embedding_stage 1: the embedding runs on the first stage; write 0"),
        ({}, {"loss_stage": 0}, "loss_stage 0: the loss runs on the last stage; write 1"),
    ],
)
def test_refused_by_field(stage: dict[str, Any], run: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_unsupported(plan_samples.plan(layers=4, stages=2, stage=stage, **run))
    assert str(caught.value) == f"plan.json {message}"


def test_partitions_that_are_lowered_and_not_executed() -> None:
    message = "overlap.layers[0].gate null: only a gate of ours hands capacity to the next partition; write topk"
    plan = plan_samples.plan(stage={"data": 2, "expert": 2, "overlap": StageOverlap(layers=(cut(None),))})
    refuse_what_cannot_be_lowered(plan)
    with pytest.raises(ConfigError) as caught:
        refuse_unsupported(plan)
    assert str(caught.value) == f"plan.json stages[0].{message}"


@pytest.mark.parametrize(("precision", "block"), [("fp8", 16), ("mxfp8", 32)])
def test_partitions_are_whole_blocks_of_products_in_8_bits(precision: Any, block: int) -> None:
    stage = {"data": 4, "expert": 2, "tensor": 2, "overlap": StageOverlap(layers=(cut("topk"),))}

    def plan(tokens: int, precision: Any) -> Plan:
        # Two samples in two partitions, and two tensor-parallel ranks that share the tokens of each.
        return plan_samples.plan(stage=stage, precision=precision, sequence_length=2 * tokens)

    refuse_unsupported(plan(block, precision))
    refuse_unsupported(plan(block - 2, "bf16"))
    with pytest.raises(ConfigError) as caught:
        refuse_unsupported(plan(block - 2, precision))
    rule = f"a partition has {block - 2} tokens on a rank, and products in {precision} take {block} at a time"
    path = "plan.json stages[0].overlap.layers[0].partitions 2"
    assert str(caught.value) == f"{path}: {rule}; cut into fewer, or use a larger micro-batch"


def test_recipes_of_lists_scale_a_tensor_by_its_own_values() -> None:
    for recipe in (None, "tensorwise", "blockwise", "mxfp8"):
        require_listed_recipe(ListedRun(fp8_recipe=recipe), "overlap")
    for recipe in ("delayed", "custom"):
        with pytest.raises(ConfigError) as caught:
            require_listable(ListedRun(fp8_recipe=recipe), "--defer-weight-gradients")
        rule = "--defer-weight-gradients cuts passes into operators, and the scales of this recipe may be those of whole passes"
        assert str(caught.value) == f"--fp8-recipe {recipe}: {rule}; use tensorwise, blockwise or mxfp8"
    with pytest.raises(
        ConfigError, match="--fp8-param-gather: overlap sums deferred gradients of, and gathers, weights of"
    ):
        require_listed_recipe(ListedRun(fp8_recipe="mxfp8", weights_in_fp8=True), "overlap")


def cut(gate: Any) -> LayerOverlap:
    return LayerOverlap(
        layer=0,
        gate=gate,
        mechanism="partitioned",
        partitions=2,
        first_operator="L0.moe.gate",
        last_operator="L0.moe.merge",
        axis="batch",
    )


@pytest.mark.parametrize("chunks", [1, 2])
def test_partitions_are_executed_with_recomputation_and_interleaved(chunks: int) -> None:
    again = Recompute(layers=1, granularity="full")
    stage = {"data": 2, "expert": 2, "recompute": again, "overlap": StageOverlap(layers=(cut("topk"),))}
    assert refusal(plan_samples.plan(layers=4, stages=2, chunks=chunks, stage=stage)) == ""


def test_chunks_of_capacity_that_are_recomputed() -> None:
    layer = LayerOverlap(layer=0, mechanism="tutel", tutel_degree=2)
    stage = {"data": 2, "expert": 2, "overlap": StageOverlap(layers=(layer,))}
    refuse_unsupported(plan_samples.plan(stage=stage))
    again = plan_samples.plan(stage=stage | {"recompute": Recompute(layers=1, granularity="full")})
    refuse_what_cannot_be_lowered(again)
    with pytest.raises(ConfigError, match="recompute.granularity full: capacity chunks that are recomputed"):
        refuse_unsupported(again)


@pytest.mark.parametrize(
    ("change", "lowered"),
    [({"expert": 2}, True), ({"tensor": 2}, False)],
)
def test_unlike_stages(change: dict[str, Any], lowered: bool) -> None:
    plan = plan_samples.plan(layers=4, stages=2, stage={"data": 2})
    unlike = dataclasses.replace(plan, stages=(plan.stages[0], dataclasses.replace(plan.stages[1], **change)))
    (field,) = change
    with pytest.raises(ConfigError, match=rf"stages\[1\]\.{field}.*: differs from stages\[0\]"):
        refuse_unsupported(unlike)
    if lowered:
        refuse_what_cannot_be_lowered(unlike)


@pytest.mark.parametrize(
    "recompute", [Recompute(layers=1, granularity="full"), Recompute(layers=2, granularity="selective")]
)
def test_stages_recompute_as_they_like(recompute: Recompute) -> None:
    if recompute.granularity == "selective":
        recompute = dataclasses.replace(recompute, modules=("core_attn",))
    plan = plan_samples.plan(layers=4, stages=2, stage={"data": 2})
    second = dataclasses.replace(plan.stages[1], recompute=recompute)
    assert plan.stages[0].recompute != second.recompute
    refuse_unsupported(dataclasses.replace(plan, stages=(plan.stages[0], second)))


def test_partitions_do_not_go_with_norms_that_their_own_stage_recomputes() -> None:
    plan = plan_samples.plan(layers=4, stages=2, stage={"data": 2, "expert": 2})
    words = OverlapWords(partitions=2, range_word="around", gate="topk", dispatcher="irregular")
    cut = (
        overlap_from_words(words, stage, plan_samples.model("mmmm"), holds_embedding=index == 0, holds_head=index == 1)
        for index, stage in enumerate(plan.stages)
    )
    stages = (dataclasses.replace(stage, overlap=each) for stage, each in zip(plan.stages, cut, strict=True))
    plan = dataclasses.replace(plan, stages=tuple(stages))
    refuse_unsupported(plan)
    again = Recompute(layers=2, granularity="selective", modules=("layernorm", "moe"))
    unlike = dataclasses.replace(plan, stages=(plan.stages[0], dataclasses.replace(plan.stages[1], recompute=again)))
    with pytest.raises(
        ConfigError, match=r"stages\[1\]\.recompute\.modules layernorm moe: a layer keeps one normed input"
    ):
        refuse_unsupported(unlike)


def test_stages_of_unlike_shape_share_the_rest() -> None:
    """The example is executed once its stages reduce their gradients alike; a plan names no all-gather behind its tiles."""
    plan = load_plan(plan_samples.GOLDEN / "example_plan.json")
    with pytest.raises(
        ConfigError, match=r"^plan.json stages\[1\].overlap.gradient_chunk_bytes 0: differs from stages\[0\]"
    ):
        refuse_unsupported(plan)
    alike = tuple(
        dataclasses.replace(stage, overlap=dataclasses.replace(stage.overlap, gradient_chunk_bytes=0))
        for stage in plan.stages
    )
    plan = dataclasses.replace(plan, stages=alike)
    refuse_unsupported(plan)
    gathered = dataclasses.replace(plan.transfers[0], all_gather=AllGather(axis="batch", groups=((0, 1),)))
    with pytest.raises(ConfigError, match=r"transfers\[0\].all_gather: the ranks of a stage are sequence-parallel"):
        refuse_unsupported(dataclasses.replace(plan, transfers=(gathered,)))
