"""Gradients reduced in buckets among the passes, and weights gathered under the first ones, against both at the step's end."""

from __future__ import annotations

import pytest

from tests.multiprocess.partition_runs import assembled, curves, spans_of_a_step
from tests.spawn import run

EP, DEFER = "--expert-model-parallel-size 2 --moe-gate topk", "--defer-weight-gradients"
PIECES = "--overlap-grad-reduce --ddp-bucket-size 1500"
GATHERED = f"{PIECES} --overlap-param-gather"
AT_ONCE = f"{PIECES} --moe-overlap-grad-reduce at-once"
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
    in_pieces = {f"{name}, in pieces": f"{flags} {PIECES}" for name, flags in rows.items()}
    at_once = {f"{name}, at once": f"{flags} {AT_ONCE}" for name, flags in rows.items()}
    return rows | in_pieces | at_once | {f"{name}, gathered": f"{flags} {GATHERED}" for name, flags in rows.items()}


def gathers_of_two_steps(flags: str) -> tuple[list[str], bool, bool]:
    """Spans of the second step's gathers; whether replicas are equal behind it, and while a checkpoint is saved. Collective."""
    import torch
    import torch.distributed as dist

    job, feed = assembled(flags)
    for step in range(2):
        spans = job.machinery.runner.run(job.schedule.instructions, feed, step).spans
    dense = [
        parameter
        for chunk in job.machinery.chunks
        for parameter in chunk.parameters()
        if getattr(parameter, "allreduce", True)
    ]

    def are_equal() -> bool:
        mine = torch.cat([parameter.detach().flatten() for parameter in dense])
        all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(all_of_them, mine)
        return all(torch.equal(mine, other) for other in all_of_them)

    between = are_equal()
    with job.checkpoints._gathered_weights():
        saved = are_equal()
    # By the span's length nothing is told: it ends with the wait of the first use.
    return [span.name for span in spans if span.name.startswith("parameters.")], between, saved


@pytest.fixture(scope="module")
def found():
    first, second = run(2, curves, with_and_without(OVERLAPPED), None, 2)
    assert first == second, "loss and norm are known to every rank"
    return first


@pytest.mark.parametrize("name", OVERLAPPED)
def test_the_sum_is_bitwise_the_same_on_two_ranks(found, name):
    whole, pieces = found[name], found[f"{name}, in pieces"]
    assert [loss for loss, _ in pieces] == [loss for loss, _ in whole]
    assert [norm for _, norm in pieces] == pytest.approx([norm for _, norm in whole], rel=1e-6)


@pytest.mark.parametrize("name", OVERLAPPED)
def test_pieces_beside_all_to_alls_sum_to_the_same(found, name):
    assert found[f"{name}, at once"] == found[f"{name}, in pieces"]


@pytest.mark.parametrize("name", OVERLAPPED)
def test_weights_that_arrive_under_the_first_passes_are_the_same(found, name):
    """Losses of three steps and of an evaluation behind them, bit for bit."""
    assert found[f"{name}, gathered"] == found[f"{name}, in pieces"]


def test_the_update_leaves_the_gather_to_the_next_step():
    """Else there would be nothing to hide: replicas differ between two steps, unless a checkpoint asks for all weights."""
    for names, between, saved in run(2, gathers_of_two_steps, f"{OVERLAPPED['deferred']} {GATHERED}"):
        assert names == [f"parameters.{part}" for part in ("embedding", "L0", "L1", "L2", "head")]
        assert not between and saved


def test_pieces_travel_alone():
    """No bucket shares the link with an all-to-all, and what is complete before the last one is on its way by then."""
    for spans in run(2, spans_of_a_step, f"{OVERLAPPED['deferred']} {PIECES}"):
        exchanges = [(start, end) for name, channel, start, end in spans if channel == "ep"]
        pieces = [(start, end) for name, channel, start, end in spans if name.startswith("gradients.")]
        between = [name for name, _, start, _ in spans if name.startswith("gradients.") and start < exchanges[-1][0]]
        assert between == ["gradients.head", "gradients.L2", "gradients.L2", "gradients.L2"]
        for start, end in pieces:
            assert not [other for other in exchanges if other[0] < end and start < other[1]]


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGER)
def test_other_layouts_of_four_ranks(name):
    found = run(4, curves, with_and_without({name: LARGER[name]}))[0]
    whole, pieces = found[name], found[f"{name}, in pieces"]
    assert found[f"{name}, gathered"] == found[f"{name}, at once"] == pieces
    assert [value for step in pieces for value in step] == pytest.approx([v for step in whole for v in step], rel=1e-5)
