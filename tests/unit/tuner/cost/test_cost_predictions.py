"""Multi-token prediction in the cost model: kinds of prediction layers, where they are counted, what they recompute."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import describe_model
from megatron.training.plan_flags import plan_from_flags
from moe_overlap.plan.plan import Plan, Recompute
from moe_overlap.tuner.capture.expression import Expression
from moe_overlap.tuner.capture.graph import CapturedModel, Layout, Storage
from moe_overlap.tuner.capture.request import layer_kinds, prediction_kinds
from moe_overlap.tuner.cost.stage_parts import WORDS, part_counts, stage_variants
from tests.unit.tuner.capture.capture_cases import MOE
from tests.unit.tuner.hand_made import captured_by_hand

WINDOWS = "--window-size 31,0 --window-attn-skip-freq 2"


def planned(words: str = "", ranks: int = 2) -> tuple[Plan, Any]:
    """A plan and its model, two prediction layers behind two layers."""
    config = parse(f"{MOE} --mtp-num-layers 2 {words}".split()).config
    model = describe_model(config, 192)
    return plan_from_flags(config, model, ranks), model


def captured(model: Any) -> CapturedModel:
    """A graph made by hand; the prediction layers run what the others do, and read the word embedding."""
    made = captured_by_hand(model, Layout())
    words = Storage(id=0, bytes=Expression.of(384), role="constant", name=WORDS, replicas="dp")
    ahead = []
    for part in made.parts:
        if part.kind == "moe":
            storages = (*part.storages, dataclasses.replace(words, id=len(part.storages)))
            ahead.append(dataclasses.replace(part, kind="mtp.moe", storages=storages))
    return dataclasses.replace(made, parts=(*made.parts, *ahead), mtp_kinds=prediction_kinds(model))


def test_windows_count_on_behind_the_decoder() -> None:
    _, model = planned(WINDOWS)
    assert layer_kinds(model) == ("moe.window32", "moe")
    assert prediction_kinds(model) == ("mtp.moe.window32", "mtp.moe")
    _, model = planned()
    assert (layer_kinds(model), prediction_kinds(model)) == (("moe", "moe"), ("mtp.moe", "mtp.moe"))


@pytest.mark.parametrize("stages", [1, 2])
def test_the_stage_of_the_loss_counts_them_and_its_copy_of_the_words(stages: int) -> None:
    plan, model = planned(f"--pipeline-model-parallel-size {stages}")
    counts = [part_counts(plan, index, captured(model)) for index in range(stages)]
    found = [[part for part, _ in one if part.kind == "mtp.moe"] for one in counts]
    assert [len(one) for one in found] == [*[0] * (stages - 1), 2]
    copies = [part.holds(WORDS) is not None for part in found[-1]]
    assert copies == [stages == 2, False]


@pytest.mark.parametrize(
    ("recompute", "variant"),
    [
        (Recompute(layers=1, granularity="full"), "none"),
        (Recompute(layers=1, granularity="uniform"), "full"),
        (Recompute(layers=0, granularity="selective", modules=("moe_act", "core_attn")), "core_attn+moe_act"),
    ],
)
def test_what_prediction_layers_recompute(recompute: Recompute, variant: str) -> None:
    plan, model = planned("--pipeline-model-parallel-size 2")
    stage = dataclasses.replace(plan.stages[1], recompute=recompute)
    plan = dataclasses.replace(plan, stages=(plan.stages[0], stage))
    assert {variant, "none"} <= stage_variants(stage)
    graph = captured(model)
    parts = (dataclasses.replace(part, variant=variant) for part in graph.parts if part.kind == "mtp.moe")
    graph = dataclasses.replace(graph, parts=(*graph.parts, *parts))
    assert {part.variant for part, _ in part_counts(plan, 1, graph) if part.kind == "mtp.moe"} == {variant}
