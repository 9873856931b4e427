"""Fused kernels in plans and lists: a list by hand, its variations, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_overlap.commands import show_plan
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.capabilities import refuse_unsupported
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.dependencies import check_races
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.overlap import KernelBlocks, LayerOverlap, StageOverlap
from moe_overlap.plan.plan import Plan, Recompute
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import save_plan
from moe_overlap.tuner.cost.simulate.engine import simulate
from tests.unit.plan import plan_samples
from tests.unit.plan.list_twins import cuts, has_race, rejects
from tests.unit.plan.printed_lists import parse_list

EP2 = {"data": 2, "expert": 2}
FUSED = LayerOverlap(layer=1, mechanism="fused", kernel_blocks=KernelBlocks(dispatch=20, combine=26))
BY_HAND = """
 0 compute    embedding                    S0 c0 m0 p- compute tokens.m0 -> h.L0.m0 0B @- after -
 1 compute    L0.attention                 S0 c0 m0 p- compute h.L0.m0 -> a.L0.m0 0B @- after 0
 2 compute    L0.moe.gate                  S0 c0 m0 p- compute a.L0.m0 -> rows.L0.m0,counts.L0.m0 0B @- after 1
 3 collective L0.moe.count                 S0 c0 m0 p- ep.counts counts.L0.m0 -> splits.L0.m0 64B @- after 2
 4 collective L0.moe.dispatch              S0 c0 m0 p- ep      rows.L0.m0,splits.L0.m0 -> received.L0.m0 262144B @- after 3
 5 compute    L0.moe.experts               S0 c0 m0 p- compute received.L0.m0 -> computed.L0.m0 0B @- after 4
 6 collective L0.moe.combine               S0 c0 m0 p- ep      computed.L0.m0 -> returned.L0.m0 262144B @- after 5
 7 compute    L0.moe.merge                 S0 c0 m0 p- compute returned.L0.m0,a.L0.m0 -> h.L1.m0 0B @- after 6
 8 compute    L1.attention                 S0 c0 m0 p- compute h.L1.m0 -> a.L1.m0 0B @- after 7
 9 compute    L1.moe.gate                  S0 c0 m0 p- compute a.L1.m0 -> rows.L1.m0,counts.L1.m0 0B @- after 8
10 collective L1.moe.count                 S0 c0 m0 p- ep.counts counts.L1.m0 -> splits.L1.m0 64B @- after 9
11 compute    L1.moe.dispatch_fc1          S0 c0 m0 p- compute rows.L1.m0,splits.L1.m0 -> received.L1.m0,inner.L1.m0 262144B @- after 10
12 compute    L1.moe.fc2_combine           S0 c0 m0 p- compute inner.L1.m0 -> computed.L1.m0,returned.L1.m0 262144B @- after 11
13 compute    L1.moe.merge                 S0 c0 m0 p- compute returned.L1.m0,a.L1.m0 -> h.L2.m0 0B @- after 12
14 compute    head.norm                    S0 c0 m0 p- compute h.L2.m0 -> normed.m0 0B @- after 13
15 compute    head.loss                    S0 c0 m0 p- compute normed.m0,labels.m0 -> loss.m0 0B @- after 14
16 compute    head.loss.backward           S0 c0 m0 p- compute loss.m0,gradient.head -> dnormed.m0,gradient.head 0B @- after 15
17 compute    head.norm.backward           S0 c0 m0 p- compute dnormed.m0,gradient.head -> dh.L2.m0,gradient.head 0B @- after 16
18 compute    L1.moe.merge.backward        S0 c0 m0 p- compute dh.L2.m0 -> dreturned.L1.m0,da.L1.m0 0B @- after 17
19 compute    L1.moe.fc2_combine.backward  S0 c0 m0 p- compute dreturned.L1.m0,gradient.L1 -> dcomputed.L1.m0,dinner.L1.m0,gradient.L1 262144B @- after 18
20 compute    L1.moe.dispatch_fc1.backward S0 c0 m0 p- compute dinner.L1.m0,gradient.L1 -> dreceived.L1.m0,drows.L1.m0,gradient.L1 262144B @- after 19
21 compute    L1.moe.gate.backward         S0 c0 m0 p- compute drows.L1.m0,da.L1.m0,gradient.L1 -> da.L1.m0,gradient.L1 0B @- after 20
22 compute    L1.attention.backward        S0 c0 m0 p- compute da.L1.m0,gradient.L1 -> dh.L1.m0,gradient.L1 0B @- after 21
23 compute    L0.moe.merge.backward        S0 c0 m0 p- compute dh.L1.m0 -> dreturned.L0.m0,da.L0.m0 0B @- after 22
24 collective L0.moe.combine.backward      S0 c0 m0 p- ep      dreturned.L0.m0 -> dcomputed.L0.m0 262144B @- after 23
25 compute    L0.moe.experts.backward      S0 c0 m0 p- compute dcomputed.L0.m0,gradient.L0 -> dreceived.L0.m0,gradient.L0 0B @- after 24
26 collective L0.moe.dispatch.backward     S0 c0 m0 p- ep      dreceived.L0.m0 -> drows.L0.m0 262144B @- after 25
27 compute    L0.moe.gate.backward         S0 c0 m0 p- compute drows.L0.m0,da.L0.m0,gradient.L0 -> da.L0.m0,gradient.L0 0B @- after 26
28 compute    L0.attention.backward        S0 c0 m0 p- compute da.L0.m0,gradient.L0 -> dh.L0.m0,gradient.L0 0B @- after 27
29 compute    embedding.backward           S0 c0 m0 p- compute dh.L0.m0,gradient.embedding -> gradient.embedding 0B @- after 28
"""  # noqa: E501


def plan_of(*layers: LayerOverlap, micro_batches: int = 1, count: int = 2, **changes: Any) -> Plan:
    """Two expert ranks; `changes` of the stage, those of its overlap among them."""
    kept = {name: changes.pop(name) for name in list(changes) if hasattr(StageOverlap, name)}
    overlap = StageOverlap(layers=layers, **kept)
    return plan_samples.plan(count, micro_batches=micro_batches, stage={**EP2, **changes, "overlap": overlap})


def made_of(plan: Plan, **changes: Any) -> tuple[Instruction, ...]:
    model = plan_samples.model("m" * plan.stages[0].chunks[0][1], **changes)
    validate_plan(plan, model)
    made = lower(plan, model, 0)
    check_races(made)
    return made


def test_the_list_by_hand() -> None:
    made = made_of(plan_of(FUSED))
    assert made[:30] == parse_list(BY_HAND)
    assert not has_race(made)
    broken = [cut for cut in cuts(made) if any(i.name.startswith("L1.moe") for i in set(cut) - set(made))]
    across = [cut for cut in broken if has_race(cut)]
    assert len(across) >= 2 and all(rejects(cut) for cut in across)


def test_a_shared_expert_runs_under_the_exchange_of_counts() -> None:
    names = [i.name for i in made_of(plan_of(FUSED), shared_expert_hidden_size=64) if i.name.startswith("L1.moe")]
    forward = ["gate", "count", "shared", "dispatch_fc1", "fc2_combine", "merge"]
    backward = ["merge", "fc2_combine", "dispatch_fc1", "shared", "gate"]
    assert names == [f"L1.moe.{name}" for name in forward] + [f"L1.moe.{name}.backward" for name in backward]


@pytest.mark.parametrize(
    "recompute",
    [Recompute(layers=2, granularity="full"), Recompute(layers=2, granularity="selective", modules=("moe",))],
)
def test_recomputation_runs_the_kernels_again(recompute: Recompute) -> None:
    made = made_of(plan_of(FUSED, recompute=recompute))
    again = [i for i in made if i.name.startswith("L1.moe") and i.name.endswith(".recompute")]
    parts = ["gate", "count", "dispatch_fc1", "fc2_combine", "merge"]
    assert [i.name for i in again] == [f"L1.moe.{part}.recompute" for part in parts]
    assert [i.bytes for i in again] == [0, 64, 262144, 262144, 0]


@pytest.mark.parametrize("deferred", [("fc2", "fc1"), ("fc2",), ("fc1",)])
def test_weight_gradients_may_wait_for_an_exchange_of_another_layer(deferred: tuple[str, ...]) -> None:
    """The inputs of a deferred gradient are saved by its kernel's backward, which then leaves the layer's gradients alone."""
    slots = {"L0.moe.combine.backward": tuple(f"L1.moe.experts.{weight}.dW" for weight in deferred)}
    made = made_of(plan_of(LayerOverlap(layer=0, weight_gradient_slots=slots), FUSED, max_deferred_bytes=1 << 40))
    by_name = {i.name: i for i in made}
    for kernel, weight in (("fc2_combine", "fc2"), ("dispatch_fc1", "fc1")):
        backward = by_name[f"L1.moe.{kernel}.backward"]
        waits = weight in deferred
        assert (f"saved.L1.moe.experts.{weight}.m0" in backward.writes) == waits
        assert ("gradient.L1" in backward.writes) == (not waits)
        if waits:
            gradient = by_name[f"L1.moe.experts.{weight}.dW"]
            assert gradient.reads == (f"saved.L1.moe.experts.{weight}.m0", "gradient.L1")
            assert gradient.id > by_name["L0.moe.combine.backward"].id


def test_gradient_pieces_leave_the_link_to_the_kernels() -> None:
    """A piece travels beside computation, and never while tokens do."""
    fused = [dataclasses.replace(FUSED, layer=number) for number in range(4)]
    made = made_of(plan_of(*fused, count=4, gradient_chunk_bytes=100_000))
    spans = simulate({0: made}, lambda _, i: 1.0).ran
    exchanges = [one for one in spans if one.instruction.channel.startswith("ep") or "_" in one.instruction.name]
    pieces = [one for one in spans if one.instruction.name.startswith("gradients.")]
    assert len(exchanges) == 4 * 5 and len(pieces) > 8
    last = max(one.end for one in exchanges)
    assert sum(one.start < last for one in pieces) == 3, "one in each gap between the exchanges of two layers"
    for piece in pieces:
        assert not any(piece.start < one.end and one.start < piece.end for one in exchanges)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partitions": 2}, "partitions: mechanism fused does not read it; write null"),
        ({"tutel_degree": 2}, "tutel_degree: mechanism fused does not read it; write null"),
        ({"axis": "batch"}, "axis: mechanism fused does not read it; write null"),
        ({"dispatcher": "flex"}, "dispatcher flex: mechanism fused does not read it: its kernels dispatch; write null"),
        (
            {"kernel_blocks": KernelBlocks(dispatch=0, combine=8)},
            "kernel_blocks.dispatch 0: must be at least 1; write 1",
        ),
        (
            {"kernel_blocks": KernelBlocks(dispatch=8, combine=0)},
            "kernel_blocks.combine 0: must be at least 1; write 1",
        ),
        ({"mechanism": "none"}, "kernel_blocks: mechanism none does not read it; write null"),
        (
            {"weight_gradient_slots": {"L1.moe.dispatch.backward": ("L1.moe.experts.fc2.dW",)}},
            "weight_gradient_slots (1 slots): nothing to compute under: the layer's exchanges run inside its fused "
            "kernels; write {} or use slots of other layers",
        ),
    ],
)
def test_wrong_combinations(changes: dict[str, Any], message: str) -> None:
    plan = plan_of(
        dataclasses.replace(FUSED, **changes), max_deferred_bytes=1 << 40 if "weight_gradient_slots" in changes else 0
    )
    with pytest.raises(ConfigError) as caught:
        validate_plan(plan, plan_samples.model())
    assert str(caught.value) == f"plan.json stages[0].overlap.layers[0].{message}"


def test_wrong_neighbours() -> None:
    model = plan_samples.model()
    around = LayerOverlap(layer=0, gate="topk", mechanism="partitioned", partitions=2, axis="batch")
    ends = {"first_operator": "L0.moe.gate", "last_operator": "L1.moe.merge"}
    with pytest.raises(
        ConfigError, match=r"layers\[1\].mechanism fused: the layer runs in the partitions of layers\[0\]"
    ):
        validate_plan(plan_of(dataclasses.replace(around, **ends), FUSED), model)
    ends["last_operator"] = "L1.moe.dispatch_fc1"
    with pytest.raises(ConfigError, match="has no such operator"):
        validate_plan(plan_of(dataclasses.replace(around, **ends), FUSED), model)
    with pytest.raises(ConfigError, match=r"layers\[0\].mechanism fused: with several micro-batches in flight"):
        validate_plan(plan_of(FUSED, micro_batches=2, micro_batches_in_flight=2), model)
    with pytest.raises(ConfigError, match="mechanism fused: nothing to overlap: the stage has one expert rank"):
        validate_plan(plan_of(FUSED, expert=1), model)


def test_a_neighbours_range_may_end_before_the_kernels() -> None:
    around = LayerOverlap(
        layer=0,
        gate="topk",
        mechanism="partitioned",
        partitions=2,
        axis="batch",
        first_operator="L0.moe.gate",
        last_operator="L1.attention",
    )
    by_name = {i.name: i for i in made_of(plan_of(around, FUSED))}
    assert by_name["L1.moe.gate"].reads == ("a.L1.m0.p0", "a.L1.m0.p1")
    assert by_name["L1.moe.dispatch_fc1"].reads == ("rows.L1.m0", "splits.L1.m0")


def test_no_blocks_means_the_best_and_nothing_is_executed() -> None:
    plan = plan_of(dataclasses.replace(FUSED, kernel_blocks=None))
    made_of(plan)
    with pytest.raises(ConfigError) as caught:
        refuse_unsupported(plan)
    rule = "not executed; use none, partitioned, tutel or cross_micro_batch"
    assert str(caught.value) == f"plan.json stages[0].overlap.layers[0].mechanism fused: {rule}"


def test_shown(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    first = dataclasses.replace(FUSED, layer=0, kernel_blocks=None)
    path = str(tmp_path / "plan.json")
    save_plan(plan_of(first, FUSED), path)
    assert show_plan.main([path]) == 0
    assert "L0:fused L1:fused(20/26)" in capsys.readouterr().out
    assert show_plan.main([path, "--list", "--model", str(plan_samples.GOLDEN / "pp2_ep2_model.json")]) == 0
    listed = capsys.readouterr().out
    assert [i.name for i in parse_list(listed) if i.bytes == 262144] == [
        *("L0.moe.dispatch_fc1", "L0.moe.fc2_combine", "L1.moe.dispatch_fc1", "L1.moe.fc2_combine"),
        *("L1.moe.fc2_combine.backward", "L1.moe.dispatch_fc1.backward"),
        *("L0.moe.fc2_combine.backward", "L0.moe.dispatch_fc1.backward"),
    ]
