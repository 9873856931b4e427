"""Lowering: golden lists, orders, bytes, and whole runs that finish."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription, Share, rank_parameters
from moe_overlap.plan.instructions import Instruction, ScheduleError, format_list
from moe_overlap.plan.lowering import lower as module
from moe_overlap.plan.lowering.dependencies import check_races, in_issue_order
from moe_overlap.plan.lowering.gradient_buckets import optimizer_parts
from moe_overlap.plan.lowering.layers import recompute_groups
from moe_overlap.plan.lowering.lower import lower, lower_rank
from moe_overlap.plan.operators import parse_operator
from moe_overlap.plan.overlap import LayerOverlap, StageOverlap
from moe_overlap.plan.plan import Plan, Recompute
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import load_plan, read_record
from moe_overlap.plan.sizes import part_size
from tests.unit.plan import plan_samples
from tests.unit.plan.list_twins import run_together

EP2 = {"data": 2, "expert": 2}


def names(instructions: tuple[Instruction, ...], channel: str | None = None) -> list[str]:
    return [i.name for i in instructions if channel in (None, i.channel)]


@pytest.mark.parametrize("rank", [0, 2])
def test_golden_list(rank: int) -> None:
    """Written in tests/golden by `tools/show_plan.py pp2_ep2.json --model pp2_ep2_model.json --list --rank R`."""
    plan = load_plan(plan_samples.GOLDEN / "pp2_ep2.json")
    values = json.loads((plan_samples.GOLDEN / "pp2_ep2_model.json").read_text())
    model = read_record(ModelDescription, values, "pp2_ep2_model.json")
    validate_plan(plan, model)
    assert format_list(lower(plan, model, rank)) == (plan_samples.GOLDEN / f"pp2_ep2_rank{rank}.txt").read_text()


SWEEP = [
    (moe, stages, chunks, micro_batches, stage)
    for moe, (stages, chunks), micro_batches, stage in itertools.product(
        ("mmmm", "dmdm"),
        ((1, 1), (2, 1), (4, 1), (2, 2)),
        (2, 4),
        (
            {},
            EP2,
            {"tensor": 2, "expert_tensor": 2},
            {"data": 2, "tensor": 2, "expert": 2},
            {"data": 2, "zero_level": 0},
            {"data": 2, "overlap": StageOverlap(gradient_chunk_bytes=50_000)},
            {**EP2, "recompute": Recompute(layers=1, granularity="full")},
            {**EP2, "recompute": Recompute(layers=1, granularity="uniform")},
            {**EP2, "recompute": Recompute(layers=1, granularity="selective", modules=("moe", "mlp", "core_attn"))},
            {**EP2, "recompute": Recompute(layers=1, granularity="selective", modules=("shared_experts",))},
        ),
    )
    if chunks == 1 or micro_batches % stages == 0
]


def sweep() -> list[tuple[Plan, ModelDescription]]:
    made = []
    for moe, stages, chunks, micro_batches, stage in SWEEP:
        for shared in (0, 64):
            plan = plan_samples.plan(4, stages, chunks, micro_batches, stage)
            made.append((plan, plan_samples.model(moe, shared_expert_hidden_size=shared)))
    return made


@plan_samples.a_third
def test_every_list_is_sound_and_whole_runs_finish(third: int) -> None:
    """One lowering of every plan of the sweep serves all three checks."""
    for plan, model in sweep()[third::3]:
        validate_plan(plan, model)
        lists = {rank: lower_rank(plan, model, rank) for rank in range(plan.world_size)}
        for made in lists.values():
            check_races(made)
            check_names(made, plan.world_size)
            check_mirrors(made)
        assert run_together({rank: list(made) for rank, made in lists.items()})


def check_names(made: Sequence[Instruction], world_size: int) -> None:
    """Numbers follow one another, and what an instruction is follows from its name."""
    assert [i.id for i in made] == list(range(len(made)))
    for instruction in made:
        operator = parse_operator(instruction.name)
        assert operator.is_collective == (instruction.kind == "collective") or world_size == 1
        assert operator.is_point_to_point == (instruction.kind == "point-to-point")
        assert (instruction.channel == "compute") == (instruction.kind in ("compute", "optimizer"))


def check_mirrors(made: Sequence[Instruction]) -> None:
    """Each operator but the counts runs once forward and once backward per micro-batch."""
    passes = [i for i in made if i.micro_batch is not None and not i.name.startswith(("send", "receive"))]
    passes = [i for i in passes if not i.name.endswith(".recompute")]
    forward = {(i.name, i.micro_batch) for i in passes if not i.name.endswith(".backward")}
    backward = {(i.name.removesuffix(".backward"), i.micro_batch) for i in passes if i.name.endswith(".backward")}
    assert len(passes) == len(forward) + len(backward)
    assert {key for key in forward if not key[0].endswith(".count")} == backward


def test_lower_returns_no_list_that_has_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a part of the lowering forgets: here everything that orders the experts behind the rows they compute with."""

    def forgetful(plan: Plan, instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
        ordered = in_issue_order(plan, instructions)
        return tuple(dataclasses.replace(i, after=()) if i.name == "L1.moe.experts" else i for i in ordered)

    plan, model = plan_samples.plan(stage=EP2), plan_samples.model()
    assert lower(plan, model, 0)
    monkeypatch.setattr(module, "in_issue_order", forgetful)
    with pytest.raises(ScheduleError, match=r"L1\.moe\.dispatch and L1\.moe\.experts race for "):
        lower(plan, model, 0)


def test_lower_returns_no_list_that_waits_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks agree without a word because each lowers the lists of all it meets: here the second stage sends in another order."""

    def swapping(plan: Plan, model: ModelDescription, rank: int, updates: bool) -> tuple[Instruction, ...]:
        made = list(lower_rank(plan, model, rank, updates=updates))
        if rank == plan.stages[1].devices.ranks[0]:
            first, second = [n for n, i in enumerate(made) if i.name.startswith("send")][:2]
            made[first], made[second] = (
                dataclasses.replace(made[there], id=made[here].id, after=made[here].after)
                for here, there in ((first, second), (second, first))
            )
        return tuple(made)

    plan, model = plan_samples.plan(stages=2), plan_samples.model()
    assert lower(plan, model, 0)
    monkeypatch.setattr(module, "lower_rank", swapping)
    for stage in plan.stages:
        with pytest.raises(ScheduleError, match="two different operations meet"):
            lower(plan, model, stage.devices.ranks[0])


def test_one_channel_for_all_transfers_would_block() -> None:
    """Why each direction of a boundary is a channel of its own."""
    plan, model = plan_samples.plan(layers=2, stages=2, micro_batches=4), plan_samples.model()
    lists = {
        rank: [dataclasses.replace(i, channel=i.channel.partition(".")[0]) for i in lower(plan, model, rank)]
        for rank in range(2)
    }
    assert not run_together(lists)


def test_single_process() -> None:
    made = lower(plan_samples.plan(micro_batches=1), plan_samples.model("dm"), 0)
    assert names(made) == [
        "embedding", "L0.attention", "L0.mlp", "L1.attention", "L1.moe.gate", "L1.moe.experts", "L1.moe.merge",
        "head.norm", "head.loss", "head.loss.backward", "head.norm.backward", "L1.moe.merge.backward",
        "L1.moe.experts.backward", "L1.moe.gate.backward", "L1.attention.backward", "L0.mlp.backward",
        "L0.attention.backward", "embedding.backward", "gradients", "optimizer.norm", "optimizer.embedding",
        "optimizer.L0", "optimizer.L1", "optimizer.head", "parameters",
    ]  # fmt: skip
    assert {i.channel for i in made} == {"compute"}
    assert sum(i.bytes for i in made) == 0


def test_exchange_channel_with_shared_experts() -> None:
    model = plan_samples.model("m", shared_expert_hidden_size=64)
    made = lower(plan_samples.plan(layers=1, micro_batches=1, stage=EP2), model, 0)
    layer = [name for name in names(made) if name.startswith("L0")]
    assert layer == [
        "L0.attention", "L0.moe.gate", "L0.moe.count", "L0.moe.dispatch", "L0.moe.shared", "L0.moe.experts",
        "L0.moe.combine", "L0.moe.merge", "L0.moe.merge.backward", "L0.moe.combine.backward", "L0.moe.experts.backward",
        "L0.moe.shared.backward", "L0.moe.dispatch.backward", "L0.moe.gate.backward", "L0.attention.backward",
    ]  # fmt: skip
    by_name = {i.name: i for i in made}
    # megatron-core's layer waits for its all-to-alls; a list of our own has the shared experts beside them.
    assert by_name["L0.moe.dispatch"].id in by_name["L0.moe.shared"].after
    assert by_name["L0.moe.shared.backward"].id in by_name["L0.moe.dispatch.backward"].after
    listed = EP2 | {"overlap": StageOverlap(layers=(LayerOverlap(layer=0, mechanism="none"),))}
    ours = {i.name: i for i in lower(plan_samples.plan(layers=1, micro_batches=1, stage=listed), model, 0)}
    assert ours["L0.moe.dispatch"].id not in ours["L0.moe.shared"].after
    for each in (by_name, ours):
        assert {each["L0.moe.shared"].id, each["L0.moe.combine"].id} >= set(each["L0.moe.merge"].after)


def test_megatron_core_recomputes_behind_the_gradient_that_it_receives() -> None:
    """Where transfers run beside computation nothing else would hold the recomputation back."""
    stage = {"recompute": Recompute(layers=1, granularity="full")}
    made = lower(plan_samples.plan(4, 2, 2, 4, stage), plan_samples.model("dddd"), 0)
    receives = {(i.chunk, i.micro_batch): i.id for i in made if i.name.startswith("receive.") and i.in_backward_pass}
    again = [i for i in made if i.operator.phase == "recompute" and (i.chunk, i.micro_batch) in receives]
    first = {(i.chunk, i.micro_batch): i for i in reversed(again)}
    assert len(first) == len(receives) == 8
    assert all(receives[of_pass] in i.after for of_pass, i in first.items())


def test_planned_bytes() -> None:
    """Those of the worked example, which has two partitions per micro-batch: 2 · 131072."""
    made = {i.name: i for i in lower(plan_samples.plan(stages=2, stage=EP2), plan_samples.model(), 0)}
    assert made["L0.moe.count"].bytes == 64
    assert made["L0.moe.dispatch"].bytes == made["L0.moe.combine.backward"].bytes == 2 * 131072
    assert made["send.S0>S1"].bytes == 262144
    assert made["receive.S0>S1.backward"].bytes == 0
    bf16 = {i.name: i for i in lower(plan_samples.plan(stages=2, stage=EP2, precision="bf16"), plan_samples.model(), 0)}
    assert bf16["send.S0>S1"].bytes == 131072
    tensor = {"tensor": 2, "expert": 2, "expert_tensor": 1}
    split = {i.name: i for i in lower(plan_samples.plan(stages=2, stage=tensor), plan_samples.model(), 0)}
    assert split["send.S0>S1"].bytes == 131072
    both = {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 2}
    expert_tensor = {i.name: i for i in lower(plan_samples.plan(stages=2, stage=both), plan_samples.model(), 0)}
    assert expert_tensor["L0.moe.dispatch"].bytes == 131072 + 262144
    assert expert_tensor["L0.moe.count"].bytes == 3 * 64


def test_peers() -> None:
    plan, model = plan_samples.plan(layers=4, stages=2, chunks=2, stage=EP2), plan_samples.model("mmmm")
    transfers = [i for i in lower(plan, model, 3) if i.kind == "point-to-point"]
    assert {i.peers for i in transfers} == {(1,)}
    assert {i.name for i in transfers} == {
        "receive.S0>S1", "send.S1>S0", "receive.S1>S0.backward", "send.S0>S1.backward",
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_embeddings": True},
        {"learned_positions": True, "linear_bias": True},
        {"mtp_layers": 2},
        {"mtp_layers": 1, "tied_embeddings": True},
    ],
)
@pytest.mark.parametrize("stages", [1, 2])
def test_optimizer_parts_hold_every_parameter(changes: dict[str, Any], stages: int) -> None:
    model = plan_samples.model("dmmm", shared_expert_hidden_size=64, **changes)
    mtp_stage = stages - 1 if model.mtp_layers else None
    plan = plan_samples.plan(4, stages, stage={"tensor": 2, "data": 2, "expert": 2}, mtp_stage=mtp_stage)
    for index, stage in enumerate(plan.stages):
        sizes = [part_size(part, plan, stage, model) for part in optimizer_parts(plan, index, model)]
        ends = {"first_stage": index == 0, "last_stage": index == stages - 1}
        share = Share(chunks=stage.chunks, tensor=2, expert=2, **ends)
        assert sum(size.dense + size.experts for size in sizes) == rank_parameters(model, share).total


def test_gradient_reduction_in_pieces() -> None:
    whole = plan_samples.plan(stage={"data": 2})
    pieces = plan_samples.plan(stage={"data": 2, "overlap": StageOverlap(gradient_chunk_bytes=100_000)})
    model = plan_samples.model()
    (one,) = [i for i in lower(whole, model, 0) if i.name == "gradients"]
    many = [i for i in lower(pieces, model, 0) if i.name.startswith("gradients.")]
    (completing,) = [i for i in lower(pieces, model, 0) if i.name == "gradients"]
    assert completing.bytes == 0 and completing.id > many[-1].id, "the replicas have nothing left to send"
    assert sum(i.bytes for i in many) == one.bytes
    assert max(i.bytes for i in many) <= 50_000
    assert list(dict.fromkeys(i.name for i in many)) == [
        "gradients.head", "gradients.L1", "gradients.L0", "gradients.embedding",
    ]  # fmt: skip
    assert [i.partition for i in many if i.name == "gradients.L0"] == [(n,) for n in range(len(many) // 2 - 1)][
        : sum(i.name == "gradients.L0" for i in many)
    ]
    early = next(i for i in many if i.name == "gradients.L1")
    made = lower(pieces, model, 0)
    assert made[early.after[0]].name == "L1.attention.backward"


def test_state_collectives_follow_zero_level() -> None:
    for level, expected in ((0, ["gradients", "optimizer.norm"]), (1, ["gradients", "optimizer.norm", "parameters"])):
        plan = plan_samples.plan(stage={"data": 2, "zero_level": level})
        assert names(lower(plan, plan_samples.model(), 0), "dp") == expected
    alone = [i for i in lower(plan_samples.plan(stages=2), plan_samples.model(), 0) if i.channel == "dp"]
    # Tied embeddings and norms that tensor ranks share are completed, and master weights copied, without replicas too.
    assert [(i.name, i.bytes) for i in alone] == [("gradients", 0), ("optimizer.norm", 4), ("parameters", 0)]
    expert_copies = plan_samples.plan(stage={"tensor": 2})
    assert next(i.bytes for i in lower(expert_copies, plan_samples.model(), 0) if i.name == "gradients") > 0


def test_optimizer_steps_in_layer_order() -> None:
    plan = plan_samples.plan(layers=8, stages=2, chunks=2)
    model = plan_samples.model("m" * 8, mtp_layers=2)
    assert optimizer_parts(plan, 0, model) == ("embedding", "L0", "L1", "L4", "L5")
    assert optimizer_parts(plan, 1, model) == ("L2", "L3", "L6", "L7", "head")
    predicting = plan_samples.plan(layers=8, stages=2, chunks=2, mtp_stage=1)
    assert optimizer_parts(predicting, 0, model) == ("embedding", "L0", "L1", "L4", "L5")
    assert optimizer_parts(predicting, 1, model) == ("embedding", "L2", "L3", "L6", "L7", "mtp0", "mtp1", "head")


def test_predictions_stand_between_norm_and_loss() -> None:
    """Forward each behind the other; backward in reverse, and what they take is given back to what they took it from."""
    plan = plan_samples.plan(stage={"recompute": Recompute(layers=1, granularity="uniform")}, mtp_stage=0)
    made = [i for i in lower(plan, plan_samples.model("dd", mtp_layers=2), 0) if i.micro_batch == 0]
    first = next(n for n, i in enumerate(made) if i.name == "head.norm")
    last = next(n for n, i in enumerate(made) if i.name == "head.norm.backward")
    between = [i.name for i in made[first + 1 : last]]
    forward = [f"mtp{n}.{part}" for n in (0, 1) for part in ("project", "attention", "mlp", "loss")]
    again = ("loss.backward", "project.recompute", "attention.recompute", "mlp.recompute")
    backward = [
        f"mtp{n}.{part}" for n in (1, 0) for part in (*again, "mlp.backward", "attention.backward", "project.backward")
    ]
    assert between == [*forward, "head.loss", "head.loss.backward", *backward]
    by_name = {i.name: i for i in made}
    assert by_name["mtp1.project"].reads == ("h.mtp0.loss.m0", "tokens.m0")
    assert by_name["mtp1.project.backward"].writes == ("dh.mtp0.loss.m0", "gradient.mtp1", "gradient.embedding")
    assert "dh.mtp0.loss.m0" in by_name["mtp0.loss.backward"].reads
    assert by_name["mtp0.project.backward"].writes[0] in by_name["head.norm.backward"].reads


def test_full_recomputation() -> None:
    stage = {**EP2, "recompute": Recompute(layers=1, granularity="full")}
    made = names(lower(plan_samples.plan(micro_batches=1, stage=stage), plan_samples.model(), 0))
    start = made.index("L1.attention.backward")
    assert made[start + 1 : start + 9] == [
        "L0.attention.recompute", "L0.moe.gate.recompute", "L0.moe.count.recompute", "L0.moe.dispatch.recompute",
        "L0.moe.experts.recompute", "L0.moe.combine.recompute", "L0.moe.merge.recompute", "L0.moe.merge.backward",
    ]  # fmt: skip
    assert not [name for name in made if name.startswith("L1") and name.endswith(".recompute")]


def test_recompute_groups() -> None:
    def shown(recompute: Recompute) -> list[tuple[tuple[int, ...], bool, tuple[str, ...]]]:
        return [
            (group.layers, group.recomputes_all, group.modules) for group in recompute_groups(recompute, range(4, 8))
        ]

    assert shown(Recompute()) == [((n,), False, ()) for n in (7, 6, 5, 4)]
    assert shown(Recompute(layers=1, granularity="full")) == [((n,), n == 4, ()) for n in (7, 6, 5, 4)]
    assert shown(Recompute(layers=2, granularity="uniform")) == [((6, 7), True, ()), ((4, 5), True, ())]
    selective = shown(Recompute(layers=3, granularity="selective", modules=("moe",)))
    assert selective == [((7,), False, ()), *(((n,), False, ("moe",)) for n in (6, 5, 4))]


@pytest.mark.parametrize(
    ("stage", "field"),
    [
        (
            {"overlap": StageOverlap(layers=(LayerOverlap(layer=0, axis="sequence"),))},
            "stages[0].overlap.layers[0].axis sequence",
        ),
    ],
)
def test_what_is_not_lowered_is_refused(stage: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lower(plan_samples.plan(stage=stage), plan_samples.model(), 0)
    assert str(caught.value).startswith(f"plan.json {field}: ")
