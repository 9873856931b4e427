"""Gradients reduced in buckets between all-to-alls, against one reduction at the end of the step."""

from __future__ import annotations

import pytest

from tests.multiprocess.partition_runs import curves, spans_of_a_step
from tests.spawn import run

EP, DEFER = "--expert-model-parallel-size 2 --moe-gate topk", "--defer-weight-gradients"
PIECES = "--overlap-grad-reduce --ddp-bucket-size 1500"
# Without clipping the norm, whose squares are summed shard by shard, touches no weight: losses can be compared bitwise.
OVERLAPPED = {
    "deferred": f"{EP} {DEFER} --clip-grad 0",
    "two parts of the experts": f"{EP} --moe-overlap-partitions 2 --moe-overlap-range experts --clip-grad 0",
    "untied, two parts around, deferred": f"{EP} --moe-overlap-partitions 2 {DEFER} --clip-grad 0 "
    "--untie-embeddings-and-output-weights --bf16",
}
LARGER = {
    "pipeline, tied": f"{EP} {DEFER} --pipeline-model-parallel-size 2 --num-layers 4",
    "copies of the experts": f"{EP} {DEFER}",
    "sequence parallel": f"{EP} {DEFER} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
}


def with_and_without(rows: dict[str, str]) -> dict[str, str]:
    return rows | {f"{name}, in pieces": f"{flags} {PIECES}" for name, flags in rows.items()}


@pytest.fixture(scope="module")
def found():
    first, second = run(2, curves, with_and_without(OVERLAPPED), timeout_seconds=400)
    assert first == second, "loss and norm are known to every rank"
    return first


@pytest.mark.parametrize("name", OVERLAPPED)
def test_the_sum_is_bitwise_the_same_on_two_ranks(found, name):
    whole, pieces = found[name], found[f"{name}, in pieces"]
    assert [loss for loss, _ in pieces] == [loss for loss, _ in whole]
    assert [norm for _, norm in pieces] == pytest.approx([norm for _, norm in whole], rel=1e-6)


def test_pieces_travel_alone():
    """No bucket shares the link with an all-to-all, and what is complete before the last one is on its way by then."""
    for spans in run(2, spans_of_a_step, f"{OVERLAPPED['deferred']} {PIECES}", timeout_seconds=200):
        exchanges = [(start, end) for name, channel, start, end in spans if channel == "ep"]
        pieces = [(start, end) for name, channel, start, end in spans if name.startswith("gradients.")]
        between = [name for name, _, start, _ in spans if name.startswith("gradients.") and start < exchanges[-1][0]]
        assert between == ["gradients.head", "gradients.L2", "gradients.L2", "gradients.L2"]
        for start, end in pieces:
            assert not [other for other in exchanges if other[0] < end and start < other[1]]


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGER)
def test_other_layouts_of_four_ranks(name):
    found = run(4, curves, with_and_without({name: LARGER[name]}), timeout_seconds=600)[0]
    whole, pieces = found[name], found[f"{name}, in pieces"]
    assert [value for step in pieces for value in step] == pytest.approx([v for step in whole for v in step], rel=1e-5)
