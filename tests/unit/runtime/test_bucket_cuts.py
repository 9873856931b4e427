"""Buckets of gradients that are reduced among passes: they cover the whole width, aligned as DDP aligns it."""

from __future__ import annotations

import pytest

from moe_overlap.runtime.state.buckets import CUT_ELEMENTS, _cut


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
