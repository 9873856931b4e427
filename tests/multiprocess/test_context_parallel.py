"""The zig-zag order, what a rank gets of a batch, and attention over gathered keys against attention over the whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.training.model.layers.attention import SdpaAttention, part_of_batch, positions
from moe_overlap.describe.model import TOKEN_COUNT
from tests.spawn import run


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_place_once_and_equal_work(size: int) -> None:
    length = 4 * 2 * size
    held = [positions(length, size, rank) for rank in range(size)]
    assert sorted(torch.cat(held).tolist()) == list(range(length))
    looked_at = [int((places + 1).sum()) for places in held]
    assert len(set(looked_at)) == 1
    assert all(places.tolist() == sorted(places.tolist()) for places in held)


def test_zigzag() -> None:
    assert positions(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert positions(8, 2, 1).tolist() == [2, 3, 4, 5]


def test_part_of_a_batch() -> None:
    tokens = torch.arange(16).view(2, 8)
    mask = torch.ones(2, 8)
    mask[0, 6:] = 0
    forbidden = torch.ones(8, 8).triu(1).bool().expand(2, 1, 8, 8)
    batch = {"tokens": tokens, "labels": tokens + 1, "loss_mask": mask, "attention_mask": forbidden}
    part = part_of_batch(batch, 2, 0)
    assert part["tokens"].tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert part["labels"].tolist() == [[1, 2, 7, 8], [9, 10, 15, 16]]
    assert part["loss_mask"].sum() == 6 and part[TOKEN_COUNT] == 14
    assert torch.equal(part["attention_mask"], forbidden[:, :, [0, 1, 6, 7]])
    assert TOKEN_COUNT not in part_of_batch(batch, 1, 0)


def attention(group: Any, context: int, window: tuple[int, int] | None, sinks: str) -> SdpaAttention:
    config = SimpleNamespace(
        attention_dropout=0.0,
        sequence_parallel=False,
        context_parallel_size=context,
        window_size=window,
        window_attn_skip_freq=None,
        softmax_type=sinks,
        num_attention_heads=4,
        params_dtype=torch.float32,
    )
    groups = SimpleNamespace(cp=group, tp=SimpleNamespace(size=lambda: 1))
    return SdpaAttention(config, 1, None, "self", pg_collection=groups)


def attend(masked: bool, window: tuple[int, int] | None = None, sinks: str = "vanilla") -> float:
    """Largest difference of outputs and gradients between the shared and the whole sequence on this rank."""
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(3)
    query, key, value, gradient = (torch.randn(12, 2, heads, 4, generator=generator) for heads in (4, 2, 2, 4))
    forbidden = (torch.rand(2, 1, 12, 12, generator=generator) < 0.3).triu(1) | torch.ones(12, 12).triu(1).bool()
    mine = positions(12, dist.get_world_size(), dist.get_rank())
    found = []
    whole_one, shared = attention(None, 1, window, sinks), attention(dist.group.WORLD, 2, window, sinks)
    for rows, module in ((torch.arange(12), whole_one), (mine, shared)):
        inputs = [x.index_select(0, rows).requires_grad_() for x in (query, key, value)]
        mask = forbidden.index_select(2, rows) if masked else None
        out = module(*inputs, mask)
        out.backward(gradient.index_select(0, rows).reshape(out.shape))
        found.append([out.detach(), *(x.grad for x in inputs)])
    (whole, *gradients), (part, *of_part) = found
    pairs = [(whole, part), *zip(gradients, of_part, strict=True)]
    return max(float((a.index_select(0, mine) - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_over_a_shared_sequence(masked: bool) -> None:
    assert max(run(2, attend, masked)) < 1e-6


@pytest.mark.parametrize("masked", [False, True])
def test_windows_and_sinks_over_a_shared_sequence(masked: bool) -> None:
    assert max(run(2, attend, masked, (3, 0), "off-by-one")) < 1e-6
