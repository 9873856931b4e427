"""The positional drop: against its slow twin, and handed from partition to partition."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import get_capacity

from moe_overlap.plan.gates import expert_capacity
from moe_overlap.runtime.routing.state import (
    drop_beyond_capacity,
    drop_by_priority,
    expert_slots,
    position_major,
    sample_major,
)
from tests.unit.runtime.routing import reference


def wanted(tokens: int, experts: int, topk: int, seed: int) -> torch.Tensor:
    scores = (
        torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)) + torch.arange(experts) / experts
    )
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, scores.topk(topk).indices, True)


def none_used(experts: int) -> torch.Tensor:
    return torch.zeros(experts, dtype=torch.int64)


@pytest.mark.parametrize("topk", [1, 2, 3, 4])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, None])
def test_equals_the_slow_twin(topk: int, factor: float | None) -> None:
    for seed in range(10):
        map_TE = wanted(37, 6, topk, seed)
        used_E = torch.randint(0, 9, (6,), generator=torch.Generator().manual_seed(seed))
        capacity = None if factor is None else expert_capacity(37, topk, 6, factor)
        if capacity is not None:
            used_E = used_E.clamp(max=capacity)
        kept_TE, after_E = drop_beyond_capacity(map_TE, used_E, capacity)
        assert (kept_TE.tolist(), after_E.tolist()) == reference.dropped(map_TE.tolist(), used_E.tolist(), capacity)
        assert expert_slots(map_TE, used_E).tolist() == reference.slots(map_TE.tolist(), used_E.tolist())
        if capacity is not None:
            priority_T = torch.randint(0, 5, (37,), generator=torch.Generator().manual_seed(seed))
            mine, _ = drop_by_priority(map_TE, priority_T, none_used(6), capacity)
            assert mine.tolist() == reference.dropped_by_priority(map_TE.tolist(), priority_T.tolist(), capacity)


@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
def test_capacity_handed_on_equals_the_whole_and_a_share_of_it_does_not(topk: int, factor: float) -> None:
    unequal = 0
    for partitions in range(2, 9):
        map_TE = wanted(53, 6, topk, seed=partitions)
        capacity = expert_capacity(53, topk, 6, factor)
        whole_TE, whole_E = drop_beyond_capacity(map_TE, none_used(6), capacity)
        used_E, kept, slots, naive = none_used(6), [], [], []
        for part_TE in map_TE.tensor_split(partitions):
            slots.append(expert_slots(part_TE, used_E))
            part_kept_TE, used_E = drop_beyond_capacity(part_TE, used_E, capacity)
            kept.append(part_kept_TE)
            naive.append(drop_beyond_capacity(part_TE, none_used(6), math.ceil(capacity / partitions))[0])
        assert torch.equal(torch.cat(kept), whole_TE) and torch.equal(used_E, whole_E)
        filled = torch.cat(slots).masked_fill(~whole_TE, -1)
        assert torch.equal(filled, expert_slots(map_TE, none_used(6)).masked_fill(~whole_TE, -1))
        unequal += not torch.equal(torch.cat(naive), whole_TE)
    assert unequal == 7


def test_capacity_is_megatron_cores_number() -> None:
    for tokens in (1, 7, 64, 1000, 4097):
        for topk, experts, factor in ((1, 8, 1.0), (2, 6, 1.1), (4, 60, 1.25), (8, 256, 0.5)):
            assert expert_capacity(tokens, topk, experts, factor) == get_capacity(tokens * topk, experts, factor)


def test_edges() -> None:
    map_TE = torch.tensor([[1, 0, 1], [1, 0, 0], [1, 0, 1]], dtype=torch.bool)
    full_E = torch.tensor([2, 2, 2])
    kept_TE, used_E = drop_beyond_capacity(map_TE, full_E, 2)
    assert not kept_TE.any() and torch.equal(used_E, full_E)  # nothing left at entry
    kept_TE, used_E = drop_beyond_capacity(map_TE[:0], torch.tensor([1, 0, 2]), 2)
    assert kept_TE.shape == (0, 3) and used_E.tolist() == [1, 0, 2]  # an empty partition
    kept_TE, used_E = drop_beyond_capacity(map_TE, none_used(3), 2)
    assert kept_TE.tolist() == [[1, 0, 1], [1, 0, 0], [0, 0, 1]] and used_E.tolist() == [2, 0, 2]  # an idle expert
    kept_TE, used_E = drop_beyond_capacity(map_TE, none_used(3), 99)
    assert torch.equal(kept_TE, map_TE) and used_E.tolist() == [3, 0, 2]  # more room than tokens


def test_orders_of_tokens() -> None:
    position_by_position = torch.tensor([[s, b] for s in range(4) for b in range(3)])
    sample_by_sample = torch.tensor([[s, b] for b in range(3) for s in range(4)])
    assert torch.equal(sample_major(position_by_position, 3), sample_by_sample)
    assert torch.equal(position_major(sample_by_sample, 3), position_by_position)
    assert sample_major(position_by_position[:0], 0).shape == (0, 2)
