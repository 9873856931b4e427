"""A backward and a forward pass interleaved: the same operators, the same results, and each under the other's all-to-alls."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.dependencies import Draft, check_races
from moe_overlap.plan.lowering.interleave import interleave, turns_of
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.lowering.pipeline_order import (
    held_in_pairs,
    interleaved,
    most_in_flight,
    paired,
    pipeline_blocks,
)
from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.uniform_overlap import OverlapWords
from tests.unit.plan import plan_samples
from tests.unit.plan.dataflow import Interpreter
from tests.unit.plan.list_twins import cuts, has_race, rejects, run_together
from tests.unit.plan.pass_orders import fault_of, pass_order
from tests.unit.plan.test_plan_partitions import EP2, RECOMPUTES, uncut, with_words

TWO = OverlapWords(gate="topk", micro_batches=2)


def samples() -> list[tuple[Plan, ModelDescription]]:
    """Plans with two micro-batches in flight, with and without partitions, deferral, recomputation, pipeline and chunks."""
    made = []
    for partitions, defer, stages, chunks, micro_batches in (
        (1, False, 1, 1, 2),
        (1, True, 1, 1, 4),
        (2, False, 1, 1, 3),
        (2, True, 1, 1, 4),
        (1, True, 2, 1, 5),
        (2, True, 2, 1, 3),
        (1, False, 4, 1, 9),
        (1, False, 4, 1, 2),
        (1, True, 2, 2, 4),
        (2, True, 2, 2, 6),
        (2, False, 2, 2, 2),
    ):
        bound = 1 << 40 if defer else 0
        words = dataclasses.replace(
            TWO, partitions=partitions, range_word="around", defer=defer, max_deferred_bytes=bound
        )
        words = dataclasses.replace(words, sends_late=stages > 1 and micro_batches > 4)
        stage = {**EP2, "micro_batch_size": 2, "recompute": RECOMPUTES[len(made) % len(RECOMPUTES)]}
        shape = {"stages": stages, "chunks": chunks, "micro_batches": micro_batches}
        made.append(with_words(words, "mmdm", 64, stage=stage, **shape))
    return made


@pytest.mark.parametrize("number", range(len(samples())))
def test_lists_are_sound_and_compute_the_same(number: int) -> None:
    plan, model = samples()[number]
    validate_plan(plan, model)
    lists = {rank: lower(plan, model, rank) for rank in range(plan.world_size)}
    for rank in range(0, plan.world_size, 2):
        check_races(lists[rank])
        assert not has_race(lists[rank])
        one_by_one = without_interleaving(plan)
        reference = lower(one_by_one, model, rank)
        assert Counter(map(key, lists[rank])) == Counter(map(key, reference))
        if plan.stage_of(rank) == plan.loss_stage:
            assert [key(i) for i in lists[rank]] != [key(i) for i in reference]
        plain = Interpreter(lower(uncut(plan), model, rank), 2, model).outcome
        assert Interpreter(lists[rank], 2, model).outcome == plain
    assert run_together({rank: list(made) for rank, made in lists.items()})


def without_interleaving(plan: Plan) -> Plan:
    stages = []
    for stage in plan.stages:
        layers = tuple(
            dataclasses.replace(layer, mechanism="none") if layer.mechanism == "cross_micro_batch" else layer
            for layer in stage.overlap.layers
        )
        overlap = dataclasses.replace(stage.overlap, micro_batches_in_flight=1, layers=layers)
        stages.append(dataclasses.replace(stage, overlap=overlap))
    return dataclasses.replace(plan, stages=tuple(stages))


def key(i: Instruction) -> tuple[Any, ...]:
    return (i.kind, i.name, i.micro_batch, i.partition, i.bytes)


def test_a_missing_dependency_shows() -> None:
    plan, model = samples()[3]
    made = lower(plan, model, 0)
    assert sum(rejects(shorter) for shorter in cuts(made)) > len(made) // 4


def test_order_of_a_pair() -> None:
    plan, model = with_words(dataclasses.replace(TWO, defer=True, max_deferred_bytes=1 << 40), "m", stage=EP2)
    lines = [f"{i.name} m{i.micro_batch}" for i in lower(plan, model, 0) if i.micro_batch is not None]
    pair = lines[lines.index("head.loss m0") + 1 : lines.index("head.loss m1") + 1]
    assert pair == [
        "head.loss.backward m0",
        "head.norm.backward m0",
        "L0.moe.merge.backward m0",
        "L0.moe.combine.backward m0",
        "embedding m1",
        "L0.attention m1",
        "L0.moe.gate m1",
        "L0.moe.count m1",
        "L0.moe.dispatch m1",
        "head.loss.output.dW m0",
        "L0.moe.experts.backward m0",
        "L0.moe.dispatch.backward m0",
        "L0.moe.experts m1",
        "L0.moe.combine m1",
        "L0.moe.experts.fc2.dW m0",
        "L0.moe.experts.fc1.dW m0",
        "L0.moe.gate.backward m0",
        "L0.attention.backward m0",
        "embedding.backward m0",
        "L0.moe.merge m1",
        "head.norm m1",
        "head.loss m1",
    ]


def test_every_exchange_of_a_pair_has_computation_of_the_other_pass_behind_it() -> None:
    plan, model = with_words(TWO, "mmm", stage=EP2, micro_batches=2)
    made = [i for i in lower(plan, model, 0) if i.micro_batch is not None]
    first = next(n for n, i in enumerate(made) if i.name == "head.loss.backward")
    last = next(n for n, i in enumerate(made) if i.name == "head.loss" and i.micro_batch == 1)
    pair = made[first : last + 1]
    for before, behind in zip(pair, pair[1:], strict=False):
        if before.kind == "collective" and behind.kind == "compute":
            assert before.micro_batch != behind.micro_batch
            assert before.id not in behind.after


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize(("defer", "late"), [(True, False), (False, False), (True, True)])
def test_a_pair_sends_before_its_last_turn_if_weight_gradients_hide_the_exchange(
    stages: int, chunks: int, defer: bool, late: bool
) -> None:
    """What the next stage waits for is under way while attention runs backward; else, or if the plan says so, that hides the
    last all-to-all."""
    words = dataclasses.replace(TWO, defer=defer, max_deferred_bytes=1 << 40 if defer else 0, sends_late=late)
    shape = {"stages": stages, "chunks": chunks, "micro_batches": 4 * stages}
    plan, model = with_words(words, "m" * stages * chunks * 2, stage=EP2, **shape)
    made = [i for i in lower(plan, model, 0) if i.micro_batch is not None]
    looked_at = 0
    for block in pipeline_blocks(plan, 0):
        mine = [i for i in made if any(i.chunk == s.chunk and i.micro_batch == s.micro_batch for s in block)]
        sends = [n for n, i in enumerate(mine) if i.sends and not i.in_backward_pass]
        if len(block) == 1 or not sends:
            continue
        backward, forward = block
        first, _ = plan.stages[0].chunks[backward.chunk]
        (sent,) = (n for n in sends if mine[n].micro_batch == forward.micro_batch and mine[n].chunk == forward.chunk)
        (attention,) = (
            n
            for n, i in enumerate(mine)
            if i.name == f"L{first}.attention.backward" and i.micro_batch == backward.micro_batch
        )
        assert (sent < attention) is (defer and not late)
        looked_at += 1
    assert looked_at >= 2


def test_a_single_stage_sends_nothing_late() -> None:
    overlap = StageOverlap(micro_batches_in_flight=2, sends_late=True)
    for stages in (1, 2):
        plan = plan_samples.plan(stages=stages, micro_batches=4, stage={"overlap": overlap})
        if stages == 2:
            validate_plan(plan, plan_samples.model())
            continue
        with pytest.raises(ConfigError, match=r"overlap.sends_late True: there is no stage to send to; write false"):
            validate_plan(plan, plan_samples.model())


def test_uneven_passes_lose_nothing() -> None:
    """More turns on one side: spread over the other, each pass in its own order."""

    def turn(name: str, number: int) -> list[Draft]:
        return [Draft(kind="compute", name=f"{name}{number}"), Draft(kind="collective", name=f"{name}{number}x")]

    for here in range(1, 6):
        for there in range(1, 6):
            backward = [draft for number in range(here) for draft in turn("b", number)]
            forward = [draft for number in range(there) for draft in turn("f", number)]
            assert len(turns_of(backward)) == here
            mixed = list(interleave(backward, forward))
            assert [d for d in mixed if d.name[0] == "b"] == backward
            assert [d for d in mixed if d.name[0] == "f"] == forward


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_pipeline_of_pairs_runs_and_says_what_it_holds(stages: int) -> None:
    for micro_batches in (1, 2, 3, 2 * stages, 4 * stages + 1):
        blocks = [paired(stages, stage, micro_batches) for stage in range(stages)]
        assert not fault_of([[step for block in of_stage for step in block] for of_stage in blocks], 1, micro_batches)
        held = [most_in_flight(of_stage, [1]) for of_stage in blocks]
        assert held == [min(micro_batches, 2 * (stages - stage) - 1) for stage in range(stages)]
        assert held == [held_in_pairs(stages, stage, micro_batches, (1,)) for stage in range(stages)]


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (2, 3), (4, 2), (3, 4), (8, 3)])
def test_pairs_of_chunks_hold_what_chunks_one_by_one_do(stages: int, chunks: int) -> None:
    """Interleaved 1F1B runs as far ahead as pairs must; of a pair one pass gives back what the other takes."""
    for micro_batches in (stages, 2 * stages, 4 * stages, 9 * stages):
        blocks = [paired(stages, stage, micro_batches, chunks) for stage in range(stages)]
        assert not fault_of(
            [[step for block in of_stage for step in block] for of_stage in blocks], chunks, micro_batches
        )
        for stage, of_stage in enumerate(blocks):
            uneven = tuple(range(1, chunks + 1))
            assert held_in_pairs(stages, stage, micro_batches, uneven) == most_in_flight(of_stage, uneven)
            passes = interleaved(stages, stage, chunks, micro_batches)
            one_by_one = most_in_flight([(step,) for step in passes], [1] * chunks)
            assert most_in_flight(of_stage, [1] * chunks) == one_by_one
            assert {step for block in of_stage for step in block} == set(passes)
            pairs = [block for block in of_stage if len(block) == 2]
            assert all([step.direction for step in block] == ["backward", "forward"] for block in pairs)
            warm = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
            assert len(pairs) == max(0, micro_batches * chunks - warm)


@pytest.mark.parametrize(("stages", "chunks"), [(4, 1), (4, 2), (3, 3), (8, 2)])
def test_pairs_of_all_stages_run_at_the_same_time(stages: int, chunks: int) -> None:
    """With every pass one unit long, a pair takes two: no stage waits once the pipeline is full."""
    micro_batches = 10 * stages
    blocks = [paired(stages, stage, micro_batches, chunks) for stage in range(stages)]
    ended: dict[tuple[int, str, int], float] = {}
    free = [0.0] * stages
    places = [0] * stages
    while any(places[s] < len(blocks[s]) for s in range(stages)):
        for stage in range(stages):
            while places[stage] < len(blocks[stage]):
                block = blocks[stage][places[stage]]
                needs = [
                    (
                        step.chunk * stages + stage + (-1 if step.direction == "forward" else 1),
                        step.direction,
                        step.micro_batch,
                    )
                    for step in block
                ]
                needs = [need for need in needs if 0 <= need[0] < stages * chunks]
                if not all(need in ended for need in needs):
                    break
                end = max([free[stage], *(ended[need] for need in needs)]) + len(block)
                ended |= {(step.chunk * stages + stage, step.direction, step.micro_batch): end for step in block}
                free[stage], places[stage] = end, places[stage] + 1
    assert max(free) <= 2 * micro_batches * chunks + 4 * stages


def test_order_of_a_plan_with_pairs() -> None:
    plan = plan_samples.plan(stages=2, micro_batches=4, stage={"overlap": StageOverlap(micro_batches_in_flight=2)})
    assert " ".join(map(str, pass_order(plan, 1))) == "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3"
    assert " ".join(map(str, pass_order(plan, 0))) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    plan = plan_samples.plan(
        4, 2, chunks=2, micro_batches=4, stage={"overlap": StageOverlap(micro_batches_in_flight=2)}
    )
    assert " ".join(map(str, pass_order(plan, 1))) == "0F0 0F1 1F0 1B0 1F1 1B1 0F2 0B0 0F3 0B1 1F2 1B2 1F3 1B3 0B2 0B3"


@pytest.mark.parametrize(
    ("words", "stage", "message"),
    [
        ({"micro_batches": 3}, EP2, "--moe-overlap-micro-batches 3: one backward and one forward pass"),
        ({"micro_batches": 0}, EP2, "--moe-overlap-micro-batches 0: one backward and one forward pass"),
        ({"micro_batches": 2}, {}, "--moe-overlap-micro-batches 2: nothing to hide"),
    ],
)
def test_bad_flags(words: dict[str, int], stage: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_words(OverlapWords(**words), "mm", stage=stage)


def test_one_micro_batch_has_nothing_beside_it() -> None:
    with pytest.raises(ConfigError, match="--moe-overlap-micro-batches 2: a step has 1 micro-batch; raise"):
        with_words(TWO, "mm", stage=EP2, micro_batches=1)
