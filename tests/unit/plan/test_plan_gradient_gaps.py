"""Gradient reductions between all-to-alls: where the buckets stand, against an obvious reading of the list."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import pytest

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.dependencies import check_races
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.plan.plan import Plan, Recompute
from moe_overlap.plan.uniform_overlap import OverlapWords, overlap_from_words
from tests.unit.plan import plan_samples

CHUNK_BYTES = 100_000
EP2 = {"data": 2, "expert": 2, "micro_batch_size": 4}
SWEEP = [
    (partitions, word, defer, shape, micro_batches)
    for partitions, word, defer, shape, micro_batches in itertools.product(
        (1, 2), ("experts", "around"), (False, True), ((1, 1), (2, 1), (2, 2)), (2, 4)
    )
    if not (shape[1] > 1 and partitions > 1)
]


def made_plan(
    partitions: int = 1, word: str = "experts", defer: bool = False, shape=(1, 1), micro_batches: int = 1, data: int = 2
) -> tuple[Plan, ModelDescription]:
    """Four layers; `shape`: stages and chunks."""
    chunked = StageOverlap(gradient_chunk_bytes=CHUNK_BYTES)
    plan = plan_samples.plan(4, *shape, micro_batches, {**EP2, "data": data, "overlap": chunked})
    model = plan_samples.model("mdmm")
    words = OverlapWords(partitions=partitions, range_word=word, gate="topk", defer=defer, max_deferred_bytes=1 << 30)
    last = len(plan.stages) - 1
    stages = tuple(
        dataclasses.replace(
            stage,
            overlap=overlap_from_words(words, stage, model, holds_embedding=n == 0, holds_head=n == last),
        )
        for n, stage in enumerate(plan.stages)
    )
    return dataclasses.replace(plan, stages=stages), model


def is_piece(i: Instruction) -> bool:
    return i.name.startswith("gradients.")


@functools.cache
def lists() -> list[tuple[Instruction, ...]]:
    made = []
    for row in SWEEP:
        plan, model = made_plan(*row)
        made += [lower(plan, model, rank) for rank in range(0, plan.world_size, 2)]
    return made


def before(made: Sequence[Instruction], last: Instruction, among: str) -> set[int]:
    """Instructions of a channel that have finished when `last` starts: over `after`, and over the order of channels."""
    found: set[int] = set()
    reached = [last.id]
    while reached:
        i = made[reached.pop()]
        earlier = [j.id for j in made[: i.id] if j.channel == i.channel][-1:]
        for number in (*i.after, *earlier):
            if number not in found:
                found.add(number)
                reached.append(number)
    return {number for number in found if made[number].channel == among}


def test_a_piece_never_shares_the_link() -> None:
    """Every all-to-all listed before a bucket has finished when it starts, and it has when a later all-to-all starts."""
    seen = 0
    for made in lists():
        check_races(made)
        exchanges = [i for i in made if i.channel in ("ep", "ep.counts")]
        for piece in filter(is_piece, made):
            ended = before(made, piece, "ep") | before(made, piece, "ep.counts")
            assert ended >= {i.id for i in exchanges if i.id < piece.id}
            later = next((i for i in exchanges if i.id > piece.id), None)
            if later is not None:
                assert piece.id in before(made, later, "dp")
                seen += 1
    assert seen > 100


def test_counts_that_a_recomputation_sends_wait_for_the_piece_before_them() -> None:
    plan, model = made_plan(micro_batches=2)
    full = Recompute(layers=1, granularity="full")
    stages = tuple(dataclasses.replace(stage, recompute=full) for stage in plan.stages)
    made = lower(dataclasses.replace(plan, stages=stages), model, 0)
    first = next(i for i in made if is_piece(i))
    count = next(i for i in made[first.id :] if i.channel == "ep.counts")
    assert max(i.id for i in made[: count.id] if is_piece(i)) in count.after


def test_pieces_are_those_of_complete_parts() -> None:
    for made in lists():
        writers = {buffer: i.id for i in made if i.micro_batch is not None for buffer in i.writes}
        pieces = list(filter(is_piece, made))
        assert all(piece.id > writers[piece.reads[0]] for piece in pieces)
        for part in {piece.name for piece in pieces}:
            assert [p.partition for p in pieces if p.name == part] == [
                (n,) for n in range(sum(p.name == part for p in pieces))
            ]
        norm = next(i for i in made if i.name == "optimizer.norm")
        assert {piece.reads[0] for piece in pieces} == set(norm.reads)


def gaps(made: Sequence[Instruction]) -> list[list[str]]:
    """The operators from the moment no all-to-all is under way to the next one, gap after gap; the executor's waits."""
    found: list[list[str]] = []
    pending: set[int] = set()
    for i in made:
        waited_for = max((n for n in i.after if n in pending), default=-1)
        if waited_for >= 0:
            pending = {n for n in pending if n > waited_for}
            if not pending:
                found.append([])
        if i.channel == "ep":
            pending.add(i.id)
        elif found and not pending:
            found[-1].append(i.name)
    return found


def test_one_piece_opens_each_gap_before_the_last() -> None:
    for made in lists():
        *inner, last = gaps(made)
        assert all(not any(map(is_named_piece, gap[1:])) for gap in inner)
        opened = [bool(gap) and is_named_piece(gap[0]) for gap in inner]
        first = opened.index(True) if True in opened else len(opened)
        waiting = sum(map(is_named_piece, last[: next((n for n, name in enumerate(last) if "backward" in name), 0)]))
        if waiting > 1:  # more than a gap's worth was left over: no gap after the first was left empty
            assert all(opened[n] or not gap for n, gap in enumerate(inner) if n > first), (opened, inner)


def is_named_piece(name: str) -> bool:
    return name.startswith("gradients.")


@pytest.mark.parametrize("defer", [False, True])
def test_worked_example(defer: bool) -> None:
    plan, model = made_plan(defer=defer)
    found = [gap[:2] for gap in gaps(lower(plan, model, 0)) if gap and is_named_piece(gap[0])]
    assert found[:4] == [
        ["gradients.head", "L3.moe.experts.backward"],
        ["gradients.head", "L3.moe.gate.backward"],
        ["gradients.L3", "L2.moe.experts.backward"],
        ["gradients.L3", "L2.moe.gate.backward"],
    ]


def test_without_exchanges_pieces_follow_their_part() -> None:
    model = plan_samples.model("mm")
    chunked = StageOverlap(gradient_chunk_bytes=1 << 30)
    made = lower(plan_samples.plan(2, stage={"data": 2, "overlap": chunked}), model, 0)
    pieces = {i.name: made[i.id - 1].name for i in made if is_piece(i)}
    assert pieces == {
        "gradients.head": "head.norm.backward",
        "gradients.L1": "L1.attention.backward",
        "gradients.L0": "L0.attention.backward",
        "gradients.embedding": "embedding.backward",
    }


def test_experts_without_copies_are_no_bytes() -> None:
    """Under EP2 on two ranks only the dense layers have a second copy; on four, the experts have one, too."""
    for data in (2, 4):
        plan, model = made_plan(data=data)
        stage = plan.stages[0]
        pieces = [i for i in lower(plan, model, 0) if i.name == "gradients.L3"]
        dense, experts = 50_432, 4 * 3 * 128 * 64
        assert stage.expert_data == data // 2
        taken_in = 4 * (dense + (experts if data == 4 else 0))
        assert len(pieces) == -(-taken_in // CHUNK_BYTES)
        assert sum(piece.bytes for piece in pieces) == 4 * (
            dense * (data - 1) // data + (experts // 2 if data == 4 else 0)
        )


def test_a_plan_that_reduces_at_the_end_stays() -> None:
    plan, model = made_plan()
    stage = dataclasses.replace(plan.stages[0], overlap=StageOverlap())
    names = [i.name for i in lower(dataclasses.replace(plan, stages=(stage,)), model, 0)]
    assert names.count("gradients") == 1 and not any(map(is_named_piece, names))


@pytest.mark.parametrize("row", SWEEP)
def test_pieces_at_once_stand_behind_what_completes_their_group(row: tuple) -> None:
    """The same pieces as in gaps, each where its gradient is complete, waiting for no all-to-all and delaying none."""
    plan, model = made_plan(*row)
    overlaps = [dataclasses.replace(stage.overlap, reduce_at_once=True) for stage in plan.stages]
    stages = (dataclasses.replace(stage, overlap=one) for stage, one in zip(plan.stages, overlaps, strict=True))
    at_once = dataclasses.replace(plan, stages=tuple(stages))
    for rank in range(0, plan.world_size, 2):
        made, in_gaps = lower(at_once, model, rank), lower(plan, model, rank)
        pieces = [i for i in made if is_piece(i)]
        assert sorted((i.name, i.partition, i.bytes) for i in pieces) == sorted(
            (i.name, i.partition, i.bytes) for i in in_gaps if is_piece(i)
        )
        check_races(made)
        for i in pieces:
            writer = max(j.id for j in made[: i.id] if f"gradient.{i.operator.group}" in j.writes and not is_piece(j))
            assert all(is_piece(j) for j in made[writer + 1 : i.id]), "it goes as soon as it can"
            assert not any(made[number].channel == "ep" for number in i.after)
        numbers = {i.id for i in pieces}
        assert not any(numbers & set(j.after) for j in made if j.channel == "ep")
