"""The executor against megatron-core's schedule, bit for bit.

Where the two differ, a sum has more than two terms, and autograd adds them in another order than the list does: what reads the
attention's output (a residual, and an RMSNorm that torch composes of several operators on a CPU: one kernel here, as on a GPU),
and a table that embedding and head share.
"""

from __future__ import annotations

from tests.multiprocess.runner_runs import curves_and_weights
from tests.spawn import run

TIED = "--expert-model-parallel-size 2 --moe-gate topk"
EP = f"{TIED} --untie-embeddings-and-output-weights"
DEFERRED = "--defer-weight-gradients"
VARIANTS = {
    "plain": EP,
    "deferred": f"{EP} {DEFERRED}",
    "two micro-batches, deferred": f"{EP} --moe-overlap-micro-batches 2 {DEFERRED}",
    "tied": TIED,
    "tied, deferred": f"{TIED} {DEFERRED}",
}


def test_without_sums_of_three_terms_the_bits_are_those_of_megatron_core() -> None:
    for found in run(2, curves_and_weights, VARIANTS, True):
        assert found["plain"] == found["deferred"] == found["two micro-batches, deferred"]
        (curve, weights), (other_curve, other_weights) = found["tied"], found["tied, deferred"]
        assert weights != other_weights, "the only sum of three terms is gone: say so"
        for (loss, norm), (other_loss, other_norm) in zip(curve, other_curve, strict=True):
            assert abs(loss - other_loss) <= 2**-23 * loss and abs(norm - other_norm) <= 2**-22 * norm
