"""The executor against megatron-core's schedule: partitions and deferred weight gradients keep losses and gradients."""

from __future__ import annotations

import pytest

from tests.multiprocess.partition_runs import curves, write_plan
from tests.spawn import run

EP, PP = "--expert-model-parallel-size 2", "--pipeline-model-parallel-size 2"
CAPACITY = "--moe-expert-capacity-factor 1.0 --moe-token-drop-policy position"
OVERLAPPED = {
    "two parts around": f"{EP} --moe-overlap-partitions 2",
    "four parts around": f"{EP} --moe-overlap-partitions 4",
    "two parts after": f"{EP} --moe-overlap-partitions 2 --moe-overlap-range after",
    "four parts of the experts": f"{EP} --moe-overlap-partitions 4 --moe-overlap-range experts",
    "deferred": f"{EP} --defer-weight-gradients",
    "two parts around, deferred": f"{EP} --moe-overlap-partitions 2 --defer-weight-gradients",
    "two chunks of capacity": f"{EP} --moe-overlap-capacity-chunks 2",
    "eight chunks of capacity, deferred": f"{EP} --moe-overlap-capacity-chunks 8 --defer-weight-gradients",
}
WITH_CAPACITY = {
    "two parts around": f"{EP} {CAPACITY} --moe-overlap-partitions 2",
    "four parts around, deferred": f"{EP} {CAPACITY} --moe-overlap-partitions 4 --defer-weight-gradients",
}
PRIORITIZED = f"{EP} --moe-gate batch_prioritized --moe-expert-capacity-factor"
CHOICE = f"{EP} --moe-gate expert_choice --moe-expert-capacity-factor 1 --moe-aux-loss-coeff 0"
BEHIND_WHOLE_GATES = {
    f"{PRIORITIZED} 0.5": "--moe-overlap-partitions 4 --moe-overlap-range experts",
    f"{PRIORITIZED} 1": "--moe-overlap-partitions 2 --moe-overlap-range after --defer-weight-gradients",
    CHOICE: "--moe-overlap-partitions 2 --moe-overlap-range after",
}
CROWDED = {
    "two parts around, deferred": "--moe-overlap-partitions 2 --defer-weight-gradients",
    "two chunks of capacity": "--moe-overlap-capacity-chunks 2",
}
WHOLE = {"mechanism": "none", "partitions": None, "first_operator": None, "last_operator": None, "axis": None}
FOUR_EXPERTS = {"partitions": 4, "first_operator": "L1.moe.gate", "last_operator": "L1.moe.merge"}
PLANS = {
    "two parts, four, uncut, deferred": (
        f"{EP} --moe-overlap-partitions 2 --defer-weight-gradients",
        {1: {"partitions": 4}, 2: WHOLE},
    ),
    "two parts to the next attention, four parts of the experts": (
        f"{EP} --moe-overlap-partitions 2 --moe-overlap-range after",
        {1: FOUR_EXPERTS},
    ),
    "two parts, chunks of capacity, four parts": (
        f"{EP} --moe-overlap-partitions 2",
        {1: WHOLE | {"mechanism": "tutel", "tutel_degree": 2}, 2: {"partitions": 4}},
    ),
}
"""Flags whose plan is written to a file, and what is changed there: neighbours that are cut otherwise."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    variants = {"plain": EP, "plain with capacity": f"{EP} {CAPACITY}"}
    one = f"{EP} --micro-batch-size 1 --global-batch-size 4"
    variants |= {
        "one sample": one,
        "one sample, chunks": f"{one} --moe-overlap-capacity-chunks 2 --defer-weight-gradients",
    }
    variants |= OVERLAPPED | {f"capacity: {name}": flags for name, flags in WITH_CAPACITY.items()}
    for gate, cut in BEHIND_WHOLE_GATES.items():
        variants |= {gate: gate, f"{gate} {cut}": f"{gate} {cut}"}
    for number, (name, (flags, layers)) in enumerate(PLANS.items()):
        variants[name] = f"{EP} --plan {write_plan(folder / f'{number}.json', flags, layers)}"
    crowded = {"crowded": EP} | {f"crowded: {name}": f"{EP} {flags}" for name, flags in CROWDED.items()}
    first, second = run(2, curves, variants, crowded, timeout_seconds=400)
    assert first == second, "loss and norm are known to every rank"
    return first


def assert_same(curve, reference):
    for (loss, norm), (expected_loss, expected_norm) in zip(curve, reference, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-5)


@pytest.mark.parametrize("name", OVERLAPPED)
def test_overlap_keeps_the_training(found, name):
    assert_same(found[name], found["plain"])


@pytest.mark.parametrize("name", WITH_CAPACITY)
def test_capacity_passes_from_part_to_part(found, name):
    """The same tokens are dropped as in the whole micro-batch: another C/K split would move the loss."""
    assert found["plain"] != found["plain with capacity"], "the capacity drops nothing, so this shows nothing"
    assert_same(found[f"capacity: {name}"], found["plain with capacity"])


@pytest.mark.parametrize("gate", BEHIND_WHOLE_GATES)
def test_parts_travel_behind_a_gate_of_the_whole_micro_batch(found, gate):
    assert found[gate] != found["plain"]
    assert_same(found[f"{gate} {BEHIND_WHOLE_GATES[gate]}"], found[gate])


@pytest.mark.parametrize("name", PLANS)
def test_neighbours_that_are_cut_otherwise(found, name):
    assert_same(found[name], found["plain"])


@pytest.mark.parametrize("name", CROWDED)
def test_all_tokens_to_one_expert_and_none_to_a_rank(found, name):
    assert_same(found[f"crowded: {name}"], found["crowded"])


def test_a_micro_batch_of_one_sample(found):
    assert_same(found["one sample, chunks"], found["one sample"])


def test_deferral_is_bitwise(found):
    assert found["two parts around, deferred"] == found["two parts around"]


@pytest.mark.slow
def test_a_pipeline_of_four_ranks():
    overlap = "--moe-overlap-partitions 2 --defer-weight-gradients"
    every, late = f"{EP} {PP} --num-layers 4", f"{EP} {PP} --num-layers 4 --moe-layer-freq [0]*2+[1]*2"
    variants = {"every": every, "every, overlapped": f"{every} {overlap}"}
    # A first stage without a MoE layer has nothing to overlap, and still runs like the stage after it.
    variants |= {"late": late, "late, overlapped": f"{late} {overlap}"}
    virtual = f"{every} --num-virtual-stages-per-pipeline-rank 2"
    chunked = f"{virtual} --moe-overlap-capacity-chunks 2 --defer-weight-gradients"
    variants |= {"virtual": virtual, "virtual, overlapped": chunked}
    gate = f"{every} --moe-gate batch_prioritized --moe-expert-capacity-factor 1"
    variants |= {"whole gate": gate, "whole gate, overlapped": f"{gate} {overlap} --moe-overlap-range after"}
    answers = run(4, curves, variants, timeout_seconds=600)
    for name in ("every", "late", "virtual", "whole gate"):
        assert_same(answers[0][f"{name}, overlapped"], answers[0][name])
