"""Products that add their weight gradients themselves, in the runs of two ranks: each gradient is added exactly once."""

from __future__ import annotations

import pytest

from tests.multiprocess.fused_runs import train_both
from tests.spawn import run

EP2 = "--expert-model-parallel-size 2"
DEFER = "--defer-weight-gradients --max-deferred-bytes 1000000000"
CASES = {
    "megatron-core's schedule, gradients reduced bucket by bucket": f"{EP2} --overlap-grad-reduce --ddp-bucket-size 4000",
    "partitions, deferred, buckets of the list": f"{EP2} --moe-overlap-partitions 2 --micro-batch-size 2 {DEFER} "
    "--overlap-grad-reduce --ddp-bucket-size 4000",
    "tensor ranks, deferred": f"{EP2} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel {DEFER}",
}


def test_losses_and_norms_are_those_without_fusion() -> None:
    for found in run(2, train_both, CASES):
        for name, case in found.items():
            assert case["unasked"] == 0 < case["calls"], name
            for plain, fused in zip(case["plain"], case["fused"], strict=True):
                # Two products of one weight in one backward pass are added in another order.
                assert fused == pytest.approx(plain, rel=2e-6), name
