"""Places of a token's experts, against the choice that megatron-core's router makes."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import group_limited_topk

from moe_overlap.describe.model import expected_places
from moe_overlap.tuner.cost.router import RouterGroups, reached_places


@pytest.mark.parametrize(("experts", "choices", "groups"), [(256, 8, (8, 4)), (160, 6, (8, 3)), (64, 4, (4, 2))])
def test_places_are_those_of_the_router(experts: int, choices: int, groups: tuple[int, int]) -> None:
    tokens, (count, kept) = 8192, groups
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(1))
    _, chosen = group_limited_topk(scores, choices, tokens, experts, count, kept)
    for places in (2, 4, 8, 16, 32):
        places_of_token = chosen // (experts // places)
        reached = torch.nn.functional.one_hot(places_of_token, places).amax(dim=1).sum(dim=1).float().mean()
        assert reached_places(experts, choices, RouterGroups(count, kept), places) == pytest.approx(
            float(reached), rel=0.01
        )


def test_a_router_without_groups_chooses_among_all() -> None:
    assert reached_places(64, 4, RouterGroups(), 8) == expected_places(4, 8)
    # Every group is kept: that is no limit.
    assert reached_places(64, 4, RouterGroups(4, 4), 8) == expected_places(4, 8)
    assert reached_places(256, 8, RouterGroups(8, 4), 1) == 1.0


def test_a_limited_router_reaches_fewer_nodes_and_no_more_than_it_keeps() -> None:
    for nodes in (2, 4, 8):
        limited = reached_places(256, 8, RouterGroups(8, 4), nodes)
        assert 1.0 < limited < min(4.0, expected_places(8, nodes))
