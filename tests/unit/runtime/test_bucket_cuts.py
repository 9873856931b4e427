"""Buckets of gradients that are reduced among passes: they cover the width, aligned as DDP aligns it, and go once each."""

from __future__ import annotations

import pytest

from moe_overlap.runtime.state.buckets import CUT_ELEMENTS, GradientBuckets, _cut
from tests.unit.runtime.fake_ranks import executor_of, two_ranks

__all__ = ["two_ranks"]


@pytest.mark.parametrize(("width", "buckets"), [(88_080_384, 5), (4096, 3), (33_554_432 + 64, 7), (40, 3), (2, 2)])
def test_buckets_begin_where_wide_copies_can(width: int, buckets: int) -> None:
    """88,080,384: what a rank keeps of a layer's experts, Mixtral on 64 GPUs, in five buckets."""
    cuts = [_cut(width, bucket, buckets) for bucket in range(buckets + 1)]
    assert cuts[0] == 0 and cuts[-1] == width
    sizes = [end - begin for begin, end in zip(cuts, cuts[1:], strict=False)]
    assert min(sizes) > 0
    if width >= CUT_ELEMENTS * buckets:
        assert all(cut % CUT_ELEMENTS == 0 for cut in cuts[:-1])
        assert max(sizes) - min(sizes) <= 2 * CUT_ELEMENTS


@pytest.mark.usefixtures("two_ranks")
def test_every_bucket_is_reduced_once_in_a_step() -> None:
    runner, _, _ = executor_of("--defer-weight-gradients --overlap-grad-reduce --ddp-bucket-size 1500")
    buckets = runner.context.bucket_reduction
    assert isinstance(buckets, GradientBuckets)
    with pytest.raises(AssertionError, match="gradients that were not reduced: .*'L0'"):
        buckets.finish()
    buckets.start("L0", 1, 2)()
    with pytest.raises(AssertionError, match="gradients.L0: bucket 1 was reduced before"):
        buckets.start("L0", 1, 2)
    with pytest.raises(AssertionError, match="gradients that were not reduced: .*'L0'"):
        buckets.finish()
