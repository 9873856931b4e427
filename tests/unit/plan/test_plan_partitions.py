"""Lists with partitions: the worked example, the order, and that they compute what the uncut list computes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections import Counter
from typing import Any

import pytest

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import Instruction, format_list
from moe_overlap.plan.lowering.dependencies import check_races
from moe_overlap.plan.lowering.lower import lower, lower_rank
from moe_overlap.plan.operators import parse_operator
from moe_overlap.plan.overlap import NO_OVERLAP, LayerOverlap, RangeWord, StageOverlap, partitions_of
from moe_overlap.plan.plan import Plan, Recompute
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import load_plan, read_record
from moe_overlap.plan.uniform_overlap import OverlapWords, overlap_from_words
from tests.unit.plan import plan_samples
from tests.unit.plan.dataflow import Interpreter
from tests.unit.plan.list_twins import cuts, has_race, rejects, run_together

EP2 = {"data": 2, "expert": 2}
RECOMPUTES = (
    Recompute(),
    Recompute(layers=1, granularity="full"),
    Recompute(layers=1, granularity="uniform"),
    Recompute(layers=1, granularity="selective", modules=("moe", "mlp")),
    Recompute(layers=1, granularity="selective", modules=("shared_experts",)),
)


def with_words(words: OverlapWords, letters: str, shared: int = 0, **changes: Any) -> tuple[Plan, ModelDescription]:
    """A plan whose stages overlap as the words say."""
    model = plan_samples.model(letters, shared_expert_hidden_size=shared)
    plan = plan_samples.plan(len(letters), **changes)
    last = len(plan.stages) - 1
    stages = tuple(
        dataclasses.replace(
            stage,
            overlap=overlap_from_words(words, stage, model, holds_embedding=index == 0, holds_head=index == last),
        )
        for index, stage in enumerate(plan.stages)
    )
    return dataclasses.replace(plan, stages=stages), model


def uncut(plan: Plan) -> Plan:
    """The plan without overlap."""
    return dataclasses.replace(
        plan, stages=tuple(dataclasses.replace(stage, overlap=NO_OVERLAP) for stage in plan.stages)
    )


@functools.cache
def sweep() -> tuple[tuple[Plan, ModelDescription], ...]:
    """Every number of partitions with every word; the rest in turn."""
    models = (("mm", 1, 1), ("dmdm", 2, 1), ("mdmmdm", 1, 1), ("mdmm", 2, 2))
    kinds = itertools.cycle(itertools.product(models, (0, 64), (False, True)))
    recomputes = itertools.cycle(RECOMPUTES)
    made = []
    words: tuple[RangeWord, ...] = ("experts", "after", "around")
    for partitions, word, _ in itertools.product(range(1, 9), words, range(4)):
        (letters, stages, chunks), shared, defer = next(kinds)
        chosen = OverlapWords(
            partitions=partitions, range_word=word, gate="topk", defer=defer, max_deferred_bytes=1 << 40
        )
        stage = {**EP2, "micro_batch_size": partitions, "recompute": next(recomputes)}
        made.append(with_words(chosen, letters, shared, stages=stages, chunks=chunks, stage=stage))
    return tuple(made)


def line(i: Instruction) -> str:
    """`L0.moe.gate 1`: operator and partition."""
    return " ".join((i.name, ",".join(map(str, i.partition)))).strip()


def test_worked_example() -> None:
    """Written in tests/golden by `tools/show_plan.py pp2_ep2_partitioned.json --model pp2_ep2_model.json --list`."""
    plan = load_plan(plan_samples.GOLDEN / "pp2_ep2_partitioned.json")
    values = json.loads((plan_samples.GOLDEN / "pp2_ep2_model.json").read_text())
    model = read_record(ModelDescription, values, "pp2_ep2_model.json")
    validate_plan(plan, model)
    assert format_list(lower(plan, model, 0)) == (plan_samples.GOLDEN / "pp2_ep2_partitioned_rank0.txt").read_text()


@plan_samples.a_third
def test_every_list_is_sound(third: int) -> None:
    """Accepted by the race check, every rank to its end, and the same operators, expressions and bytes as without partitions."""
    for plan, model in sweep()[third::3]:
        validate_plan(plan, model)
        plain, size = uncut(plan), plan.stages[0].micro_batch_size
        lists = {rank: lower_rank(plan, model, rank) for rank in range(plan.world_size)}
        for rank in range(0, plan.world_size, 2):
            made, reference = lists[rank], lower_rank(plain, model, rank)
            check_races(made)
            assert Interpreter(made, size, model).outcome == Interpreter(reference, size, model).outcome
            assert [i.id for i in made] == list(range(len(made)))
            stage = plan.stages[plan.stage_of(rank)]
            partitions = partitions_of(stage.overlap, stage.layers)
            expected: Counter[tuple[str, int | None]] = Counter()
            for i in reference:
                operator = parse_operator(i.name)
                times = partitions.get((operator.layer or 0, operator.kind), 1) if operator.layer is not None else 1
                expected[i.name, i.micro_batch] += times if i.micro_batch is not None else 1
            kept = [i for i in made if i.kind != "weight-gradient"]
            assert Counter((i.name, i.micro_batch) for i in kept) == expected
            check_partition_numbers(kept)
            sent = Counter({i.name: 0 for i in made})
            for i in made:
                sent[i.name] += i.bytes if not i.name.endswith(("count", "count.recompute")) else 0
            for i in reference:
                sent[i.name] -= i.bytes if not i.name.endswith(("count", "count.recompute")) else 0
            assert not any(sent.values())
        assert run_together({rank: list(made) for rank, made in lists.items()})
        # What `lower` adds: the lists of the stages that meet, checked together.
        assert lower(plan, model, 0) == lists[0]


def check_partition_numbers(made: list[Instruction]) -> None:
    """All partitions of an operator, once each, ascending forward and descending backward."""
    found: dict[tuple[str, int], list[int]] = {}
    for i in made:
        if i.micro_batch is not None and i.partition:
            found.setdefault((i.name, i.micro_batch), []).append(*i.partition)
    for (name, _), numbers in found.items():
        assert len(numbers) > 1
        step = -1 if name.endswith((".backward", ".recompute")) else 1
        assert numbers == list(range(len(numbers)))[::step]


def test_order_of_one_pipeline_across_layers() -> None:
    """Shared experts run under the first all-to-all of either direction; nothing stands between the layers."""
    words = OverlapWords(partitions=2, range_word="around", gate="topk")
    plan, model = with_words(words, "mm", 64, micro_batches=1, stage=EP2)
    made = [line(i) for i in lower(plan, model, 0) if i.name.startswith("L")]
    turn = "L0.moe.experts 0,L0.moe.combine 0"
    forward = (
        "L0.attention 0,L0.moe.gate 0,L0.moe.count 0,L0.moe.dispatch 0,"
        "L0.attention 1,L0.moe.gate 1,L0.moe.count 1,L0.moe.dispatch 1,"
        f"L0.moe.shared 0,{turn},L0.moe.shared 1,{turn.replace('e 0', 'e 1').replace('s 0', 's 1')},"
        "L0.moe.merge 0,L1.attention 0,L1.moe.gate 0,L1.moe.count 0,L1.moe.dispatch 0,"
        "L0.moe.merge 1,L1.attention 1,L1.moe.gate 1,L1.moe.count 1,L1.moe.dispatch 1,"
        "L1.moe.shared 0,L1.moe.experts 0,L1.moe.combine 0,L1.moe.shared 1,L1.moe.experts 1,L1.moe.combine 1,"
        "L1.moe.merge 0,L1.moe.merge 1"
    ).split(",")
    assert made[: len(forward)] == forward
    backward = (
        "L1.moe.merge 1,L1.moe.combine 1,L1.moe.merge 0,L1.moe.combine 0,"
        "L1.moe.shared 1,L1.moe.experts 1,L1.moe.dispatch 1,L1.moe.shared 0,L1.moe.experts 0,L1.moe.dispatch 0,"
        "L1.moe.gate 1,L1.attention 1,L0.moe.merge 1,L0.moe.combine 1,"
        "L1.moe.gate 0,L1.attention 0,L0.moe.merge 0,L0.moe.combine 0,"
        "L0.moe.shared 1,L0.moe.experts 1,L0.moe.dispatch 1,L0.moe.shared 0,L0.moe.experts 0,L0.moe.dispatch 0,"
        "L0.moe.gate 1,L0.attention 1,L0.moe.gate 0,L0.attention 0"
    ).split(",")
    assert [name.replace(".backward", "") for name in made[len(forward) :]] == backward


@pytest.mark.parametrize(
    ("word", "whole"),
    [
        ("experts", {"L0.attention", "L1.attention", "L1.mlp", "L2.attention", "L3.attention"}),
        ("after", {"L0.attention", "L1.mlp", "L2.attention"}),
        ("around", {"L1.attention", "L1.mlp"}),
    ],
)
def test_what_a_word_leaves_whole(word: Any, whole: set[str]) -> None:
    words = OverlapWords(partitions=2, range_word=word, gate="topk")
    plan, model = with_words(words, "mdmm", stage=EP2)
    made = lower(plan, model, 0)
    assert {i.name for i in made if i.name.startswith("L") and "back" not in i.name and not i.partition} == whole


def test_capacity_goes_from_partition_to_partition() -> None:
    words = OverlapWords(partitions=3, range_word="around", gate="switch")
    plan, model = with_words(words, "m", micro_batches=1, stage={**EP2, "micro_batch_size": 3})
    gates = [i for i in lower(plan, model, 0) if i.name == "L0.moe.gate"]
    handed = [tuple(name for name in (*i.reads, "->", *i.writes) if name[0] in "-c") for i in gates]
    assert handed == [
        ("->", "counts.L0.m0.p0", "capacity.L0.m0.p0"),
        ("capacity.L0.m0.p0", "->", "counts.L0.m0.p1", "capacity.L0.m0.p1"),
        ("capacity.L0.m0.p1", "->", "counts.L0.m0.p2"),
    ]


@pytest.mark.parametrize("gate", ["batch_prioritized", "expert_choice"])
def test_a_gate_that_needs_the_whole_batch_runs_once(gate: Any) -> None:
    """It reads all parts of what came before and leaves its rows in parts."""
    plan, model = with_words(
        OverlapWords(partitions=2, range_word="after", gate=gate), "mm", micro_batches=1, stage=EP2
    )
    made = lower(plan, model, 0)
    (gate_forward,) = [i for i in made if i.name == "L1.moe.gate"]
    assert gate_forward.partition == ()
    assert gate_forward.reads == ("a.L1.m0.p0", "a.L1.m0.p1")
    assert gate_forward.writes == ("rows.L1.m0.p0", "rows.L1.m0.p1", "counts.L1.m0.p0", "counts.L1.m0.p1")
    (gate_backward,) = [i for i in made if i.name == "L1.moe.gate.backward"]
    assert gate_backward.reads[:4] == ("drows.L1.m0.p0", "drows.L1.m0.p1", "da.L1.m0.p0", "da.L1.m0.p1")
    assert gate_backward.writes[:2] == ("da.L1.m0.p0", "da.L1.m0.p1")
    assert [line(i) for i in made[3:7]] == [
        "L0.moe.count 0", "L0.moe.dispatch 0", "L0.moe.count 1", "L0.moe.dispatch 1",
    ]  # fmt: skip


def test_neighbours_of_unlike_partitions_meet_at_a_barrier() -> None:
    def cut(layer: int, partitions: int) -> LayerOverlap:
        first, last = f"L{layer}.attention", f"L{layer}.moe.merge"
        return LayerOverlap(
            layer=layer,
            mechanism="partitioned",
            partitions=partitions,
            first_operator=first,
            last_operator=last,
            axis="batch",
        )

    overlap = StageOverlap(layers=(cut(0, 2), cut(1, 4)))
    plan = plan_samples.plan(micro_batches=1, stage={**EP2, "micro_batch_size": 4, "overlap": overlap})
    model = plan_samples.model("mm")
    validate_plan(plan, model)
    made = lower(plan, model, 0)
    check_races(made)
    entries = [i for i in made if i.name == "L1.attention"]
    assert [i.reads for i in entries] == [("h.L1.m0.p0", "h.L1.m0.p1")] * 4
    assert Interpreter(made, 4, model).outcome == Interpreter(lower(uncut(plan), model, 0), 4, model).outcome


def test_needed_dependencies_are_missed() -> None:
    kinds: tuple[tuple[RangeWord, int, bool], ...] = (("around", 64, True), ("after", 0, False), ("experts", 64, True))
    for word, shared, defer in kinds:
        words = OverlapWords(partitions=2, range_word=word, gate="topk", defer=defer, max_deferred_bytes=1 << 40)
        plan, model = with_words(words, "mm", shared, stages=1, micro_batches=1, stage=EP2)
        made = lower(plan, model, 0)
        assert not has_race(made)
        needed = 0
        for broken in cuts(made):
            assert rejects(broken) == has_race(broken)
            needed += has_race(broken)
        assert needed >= 30


def test_weight_gradients_stand_behind_the_last_issue_of_their_slot() -> None:
    words = OverlapWords(partitions=2, range_word="around", gate="topk", defer=True, max_deferred_bytes=1 << 40)
    plan, model = with_words(words, "mm", micro_batches=1, stage=EP2)
    made = [line(i) for i in lower(plan, model, 0)]
    place = made.index("L0.moe.combine.backward 0")
    assert made[place - 1 : place + 5] == [
        "L0.moe.merge.backward 0", "L0.moe.combine.backward 0", "L1.moe.gate.router.dW 0,1", "L1.attention.proj.dW 0,1",
        "L1.attention.qkv.dW 0,1", "L0.moe.experts.backward 1",
    ]  # fmt: skip
    place = made.index("L1.moe.combine.backward 0")
    assert made[place + 1] == "head.loss.output.dW"
    first = next(i for i in lower(plan, model, 0) if i.name == "L1.moe.experts.backward")
    assert "gradient.L1" not in first.writes
    assert first.writes[1:] == ("saved.L1.moe.experts.fc2.m0.p1", "saved.L1.moe.experts.fc1.m0.p1")


def test_a_range_ends_with_its_virtual_stage() -> None:
    """The operator behind the last layer of a chunk is another rank's."""
    words = OverlapWords(partitions=2, range_word="after", gate="topk")
    plan, model = with_words(words, "mmmm", stages=2, chunks=2, stage=EP2)
    made = lower(plan, model, 0)
    sends = [i for i in made if i.name == "send.S0>S1" and i.micro_batch == 0]
    assert [(i.chunk, i.reads) for i in sends] == [
        (0, ("h.L1.m0.p0", "h.L1.m0.p1")),
        (1, ("h.L3.m0.p0", "h.L3.m0.p1")),
    ]
    assert [i.partition for i in made if i.name == "L2.attention"] == [(), ()]
