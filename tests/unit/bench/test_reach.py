"""Ranges by number of operators, and what the benchmark compares for each gate."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.lowering.dependencies import check_races
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import load_plan, read_record
from moe_overlap.plan.uniform_overlap import OverlapWords, overlap_from_words
from tools.bench.variants import default_ranges, reaching, variants

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
MOE_LAYERS = (False, True, False, True)


def model() -> ModelDescription:
    values = json.loads((GOLDEN / "pp2_ep2_model.json").read_text())
    tiny = read_record(ModelDescription, values, "model")
    return dataclasses.replace(tiny, num_layers=4, moe_layers=MOE_LAYERS)


def plan(gate: str = "topk") -> Plan:
    """One stage of four layers, every other one a mixture of experts, in two partitions."""
    golden = load_plan(GOLDEN / "pp2_ep2.json")
    stage = dataclasses.replace(golden.stages[0], chunks=((0, 4),), micro_batch_size=2)
    words = OverlapWords(partitions=2, range_word="experts", gate=gate, dispatcher="irregular")  # type: ignore[arg-type]
    stage = dataclasses.replace(stage, overlap=overlap_from_words(words, stage, model()))
    return dataclasses.replace(golden, stages=(stage,), loss_stage=0, transfers=())


def ranges(reach: int, gate: str = "topk") -> list[tuple[str | None, str | None]]:
    reached = reaching(plan(gate), model(), reach)
    validate_plan(reached, model(), "reach")
    check_races(lower(reached, model(), 0))
    return [(layer.first_operator, layer.last_operator) for layer in reached.stages[0].overlap.layers]


@pytest.mark.parametrize(
    ("reach", "expected"),
    [
        (0, [("L1.moe.gate", "L1.moe.merge"), ("L3.moe.gate", "L3.moe.merge")]),
        (1, [("L1.attention", "L2.attention"), ("L3.attention", "L3.moe.merge")]),
        (2, [("L0.mlp", "L2.attention"), ("L2.mlp", "L3.moe.merge")]),
        (3, [("L0.attention", "L1.moe.merge"), ("L2.attention", "L3.moe.merge")]),
        (9, [("L0.attention", "L1.moe.merge"), ("L2.attention", "L3.moe.merge")]),
    ],
)
def test_reach(reach: int, expected: list[tuple[str, str]]) -> None:
    assert ranges(reach) == expected


def test_reach_behind_a_gate_of_the_whole_micro_batch() -> None:
    expected = [("L1.moe.gate", "L2.mlp"), ("L3.moe.gate", "L3.moe.merge")]
    assert ranges(2, "batch_prioritized") == expected


def test_more_reach_cuts_more() -> None:
    """The set of operators that the list holds in partitions grows by exactly those that were reached."""
    cut = [
        {i.name for i in lower(reaching(plan(), model(), reach), model(), 0) if i.partition and "." not in i.name[3:]}
        for reach in range(4)
    ]
    assert cut[0] == set()
    assert cut[1] == {"L1.attention", "L2.attention", "L3.attention"}
    assert cut[2] - cut[1] == {"L0.mlp", "L2.mlp"} and cut[3] - cut[2] == {"L0.attention"}


def test_variants_of_a_gate() -> None:
    assert default_ranges("topk") == ("around",) and default_ranges("batch_prioritized") == ("after",)
    found = variants("topk", [2, 4], ["around"], [2], [0, 1])
    assert len({variant.name for variant in found}) == len(found)
    assert [variant.reach for variant in found if variant.reach is not None] == [0, 0, 1, 1]
