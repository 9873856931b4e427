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
from moe_overlap.plan.lowering.pipeline_order import check_orders, most_in_flight, paired_1f1b, pipeline_order
from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.uniform_overlap import OverlapWords
from tests.unit.plan import plan_samples
from tests.unit.plan.dataflow import Interpreter
from tests.unit.plan.list_twins import cuts, has_race, rejects, run_together
from tests.unit.plan.test_plan_partitions import EP2, RECOMPUTES, uncut, with_words

TWO = OverlapWords(gate="topk", micro_batches=2)


def samples() -> list[tuple[Plan, ModelDescription]]:
    """Plans with two micro-batches in flight, with and without partitions, deferral, recomputation and a pipeline."""
    made = []
    for partitions, defer, stages, micro_batches in (
        (1, False, 1, 2),
        (1, True, 1, 4),
        (2, False, 1, 3),
        (2, True, 1, 4),
        (1, True, 2, 5),
        (2, True, 2, 3),
        (1, False, 4, 9),
        (1, False, 4, 2),
    ):
        words = dataclasses.replace(
            TWO, partitions=partitions, range_word="around", defer=defer, max_deferred_bytes=1 << 40 if defer else 0
        )
        stage = {**EP2, "micro_batch_size": 2, "recompute": RECOMPUTES[len(made) % len(RECOMPUTES)]}
        made.append(with_words(words, "mmdm", 64, stages=stages, micro_batches=micro_batches, stage=stage))
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
        blocks = [paired_1f1b(stages, stage, micro_batches) for stage in range(stages)]
        check_orders([[step for block in of_stage for step in block] for of_stage in blocks], 1, micro_batches)
        held = [most_in_flight(of_stage) for of_stage in blocks]
        assert held == [min(micro_batches, 2 * (stages - stage)) for stage in range(stages)]


def test_pairs_of_all_stages_run_at_the_same_time() -> None:
    """With every pass one unit long, a pair takes two: no stage waits once the pipeline is full."""
    stages, micro_batches = 4, 40
    blocks = [paired_1f1b(stages, stage, micro_batches) for stage in range(stages)]
    ended: dict[tuple[int, str, int], float] = {}
    free = [0.0] * stages
    places = [0] * stages
    while any(places[s] < len(blocks[s]) for s in range(stages)):
        for stage in range(stages):
            while places[stage] < len(blocks[stage]):
                block = blocks[stage][places[stage]]
                needs = [
                    (stage + (-1 if step.direction == "forward" else 1), step.direction, step.micro_batch)
                    for step in block
                ]
                needs = [need for need in needs if 0 <= need[0] < stages]
                if not all(need in ended for need in needs):
                    break
                end = max([free[stage], *(ended[need] for need in needs)]) + len(block)
                ended |= {(stage, step.direction, step.micro_batch): end for step in block}
                free[stage], places[stage] = end, places[stage] + 1
    assert max(free) <= 2 * micro_batches + 4 * stages


def test_order_of_a_plan_with_pairs() -> None:
    plan = plan_samples.plan(stages=2, micro_batches=4, stage={"overlap": StageOverlap(micro_batches_in_flight=2)})
    assert " ".join(map(str, pipeline_order(plan, 1))) == "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3"
    assert " ".join(map(str, pipeline_order(plan, 0))) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"


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
