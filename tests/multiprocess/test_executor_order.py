"""The executor does what its list says, partition by partition and to the end of the update; a broken one is noticed."""

from __future__ import annotations

from tests.multiprocess.executor_order import check_refusals, check_rows
from tests.spawn import run

EP2 = "--expert-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
DEFER = "--defer-weight-gradients --max-deferred-bytes 1000000000"
CUT = "--moe-overlap-partitions 2 --moe-overlap-range"
BOUND = "--defer-weight-gradients --max-deferred-bytes"
EXPERTS = {
    "deferred": DEFER,
    "in partitions": f"{CUT} around",
    "in partitions, deferred": f"{CUT} around {DEFER}",
    "in partitions, bounded": f"{CUT} around {BOUND} 20000",
    "two micro-batches, deferred": f"--moe-overlap-micro-batches 2 {DEFER}",
    "capacity chunks": "--moe-overlap-capacity-chunks 2",
    "in partitions, gradients in buckets": f"{CUT} after {DEFER} --overlap-grad-reduce --ddp-bucket-size 4000",
}
LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8"
)
SHAPES = {
    "latent attention": f"{EP2} {LATENT} {DEFER}",
    "shared experts, dense layers": f"{EP2} --moe-shared-expert-intermediate-size 24 --moe-layer-freq 2 {DEFER}",
    "shared experts, a gate over the whole micro-batch": f"{EP2} --moe-shared-expert-intermediate-size 64 "
    f"--moe-gate batch_prioritized --moe-expert-capacity-factor 1.0 {CUT} after {DEFER}",
    "a router in double precision": f"{EP2} --moe-router-dtype fp64 {DEFER}",
    "tensor ranks": f"--tensor-model-parallel-size 2 --sequence-parallel {DEFER}",
    "tensor ranks, experts whole": f"{EP2} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 "
    f"--sequence-parallel {DEFER}",
}
"""Other products, whose operands must hold what the list counts for them."""
PIPELINES = {
    "pipeline, in partitions, deferred": f"{EP2} {PP2} {CUT} around {DEFER}",
    "interleaved pipeline, in partitions": f"{EP2} {PP2} --num-virtual-stages-per-pipeline-rank 2 {CUT} experts",
    "interleaved pipeline, two micro-batches": f"{EP2} {PP2} --num-virtual-stages-per-pipeline-rank 2 "
    f"--moe-overlap-micro-batches 2 {DEFER}",
}
UPDATES = ("deferred", "in partitions, gradients in buckets", "pipeline, in partitions, deferred")
"""Rows that also run with broken updates."""
BROKEN_UPDATES = ("a gather left out", "a step before the reduction", "a swap of two steps")
HASTY = "a first slot that runs everything is noticed"


def test_two_ranks() -> None:
    ranks = run(2, check_rows, {name: f"{EP2} {flags}" for name, flags in EXPERTS.items()} | SHAPES, UPDATES)
    _check(ranks)
    for rows in ranks:
        assert rows["in partitions, bounded"]["early"] > 0 == rows["in partitions, deferred"]["early"]
        assert rows["in partitions, bounded"]["numbers"] == rows["in partitions, deferred"]["numbers"]


def test_a_list_whose_update_is_not_whole_is_refused() -> None:
    for found in run(2, check_refusals, f"{EP2} {EXPERTS['deferred']}"):
        assert found == {
            "without gradients": "the norm is taken of reduced gradients",
            "without optimizer.norm": "the optimizer steps only after the norm of all gradients",
            "without optimizer": "parts without a step: ['embedding']",
            "without parameters": "the list has ended before the replicas have the updated weights",
            "a step before the norm": "the optimizer steps only after the norm of all gradients",
            "a copy": found["a copy"],
        }
        assert "no binding for" in found["a copy"]


def test_pipelines_on_four_ranks() -> None:
    _check(run(4, check_rows, PIPELINES, UPDATES))


def _check(ranks: list[dict]) -> None:
    for rank, rows in enumerate(ranks):
        for name, found in rows.items():
            assert found["order"] == {}, (rank, name)
            assert found["bytes"] == [], (rank, name)
            assert found["waits"] == [] and found["looked at"] > 4, (rank, name, found["looked at"])
            assert found["a wait behind every all-to-all is noticed"], (rank, name)
            assert found.get(HASTY, True), (rank, name)
            for broken in BROKEN_UPDATES if name in UPDATES else ():
                assert found[f"{broken} is noticed"], (rank, name, broken)
    assert any(HASTY in found for rows in ranks for found in rows.values())
