"""Seconds of communication, against counting bytes rank by rank."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from moe_overlap.api import read_job
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.describe.model import expected_places
from moe_overlap.tuner.cost.links import (
    Group,
    LinkRates,
    LinkUse,
    all_to_all_seconds,
    axis_group,
    collective_seconds,
    crowding,
    link_use,
    mixed_use,
    point_to_point_seconds,
    stage_groups,
)
from tests.unit.tuner.cost.test_cost_predict import JOB

RATES = LinkRates(domain=0.5, network=0.8, all_to_all_domain=0.4, all_to_all_network=0.6, latency_seconds=0.0)
H100 = shipped_cluster("H100", 64).groups[0]
GB200 = shipped_cluster("GB200", 256).groups[0]
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")


def test_groups_know_how_many_of_them_share_a_domain() -> None:
    assert axis_group(8, 1, 64, H100) == Group(8, 8, 8, H100)
    assert axis_group(8, 8, 64, H100) == Group(8, 1, 1, H100)
    assert axis_group(16, 2, 64, H100) == Group(16, 4, 4, H100)
    # A job of 256 GPUs gets 64 of each domain of 72.
    assert axis_group(128, 1, 256, GB200) == Group(128, 64, 4, GB200)
    assert axis_group(64, 4, 256, GB200) == Group(64, 16, 1, GB200)


def test_every_stage_has_the_links_of_its_own_gpus() -> None:
    fast, slow = (shipped_cluster(gpu, 8) for gpu in ("H100", "A100"))
    cluster = dataclasses.replace(fast, groups=(*fast.groups, *slow.groups))
    plan = read_job([*JOB, "--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "4"], 16).plan
    for stage, links in zip(plan.stages, cluster.groups, strict=True):
        groups = stage_groups(plan, stage, cluster)
        assert all(group.links == links for axis, group in groups.items() if axis != "pp")


@pytest.mark.parametrize("group", [axis_group(8, 1, 64, H100), axis_group(16, 2, 64, H100), axis_group(4, 8, 64, H100)])
def test_all_to_all_counts_what_each_rank_sends_to_each(group: Group) -> None:
    """A slow twin: every pair of ranks, by the tier between them."""
    sent = 1e9
    near = far = 0.0
    for peer in range(1, group.size):
        if peer // group.per_domain == 0:
            near += sent / group.size
        else:
            far += sent / group.size
    twin = max(near / (450e9 * 0.4) if group.per_domain > 1 else 0.0, far / (50e9 * 0.6))
    assert all_to_all_seconds(sent, group, RATES) == pytest.approx(twin)


@pytest.mark.parametrize("pair_rate", [1.0, 450.0])
def test_pairs_with_a_bridge_share_their_node_s_own_links(pair_rate: float) -> None:
    """A slow twin of four pairs in a node: every peer by its tier; a ring through either GPU of a pair, as across nodes."""
    node = dataclasses.replace(H100, domain_gpus=2, domain_gb_per_s=pair_rate, node_gb_per_s=30.0)
    group, sent = axis_group(8, 1, 8, node), 1e9
    bridge, own = sent / 8, sum(sent / 8 for peer in range(2, 8))
    twin = max(bridge / (pair_rate * 1e9 * 0.4), own / (30e9 * 0.4))
    assert all_to_all_seconds(sent, group, RATES) == pytest.approx(twin)
    passed = sent * 7 / 8
    twin = max(passed / (pair_rate * 1e9 * 0.5), passed / 2 / (30e9 * 0.5))
    assert collective_seconds("all_gather", sent, group, RATES) == pytest.approx(twin)
    # Inside a pair nothing else counts, and with a domain of the whole node neither.
    assert collective_seconds("all_gather", sent, axis_group(2, 1, 8, node), RATES) == pytest.approx(
        sent / 2 / (pair_rate * 1e9 * 0.5)
    )
    whole = axis_group(8, 1, 8, dataclasses.replace(node, domain_gpus=8))
    assert collective_seconds("all_gather", sent, whole, RATES) == pytest.approx(passed / (pair_rate * 1e9 * 0.5))


def test_a_ring_inside_a_domain_moves_all_but_the_own_part() -> None:
    group = axis_group(8, 1, 64, H100)
    assert collective_seconds("all_gather", 8e9, group, RATES) == pytest.approx(7e9 / (450e9 * 0.5))
    assert collective_seconds("all_reduce", 8e9, group, RATES) == pytest.approx(14e9 / (450e9 * 0.5))


@pytest.mark.parametrize("nodes", [2, 4])
def test_across_nodes_every_card_of_a_node_carries_a_ring(nodes: int) -> None:
    """A slow twin: chunks go around once in each of a node's rings, and a node's last rank sends them over the ring's card."""
    group, held, rings = axis_group(8 * nodes, 1, 64, H100), 8e9, 8
    inside = over_card = 0.0
    for rank in range(group.size):
        for chunk in range(group.size):
            if chunk == (rank + 1) % group.size:
                continue  # the next rank had it first
            sent = held / rings / group.size
            if rank == group.per_node - 1:
                over_card += sent
            elif rank == 0:
                inside += rings * sent
    for network in (0.2, 0.8):
        rates = dataclasses.replace(RATES, network=network)
        twin = max(inside / (450e9 * 0.5), over_card / (50e9 * network))
        assert collective_seconds("reduce_scatter", held, group, rates) == pytest.approx(twin)


def test_collectives_share_the_links_that_both_use() -> None:
    """On 8 H100 nodes: tokens inside a node, tokens across nodes, dense gradients over all ranks, experts' across nodes."""
    inside, across = (axis_group(size, 1, 64, H100) for size in (8, 16))
    near, far = (link_use("all_to_all", group, RATES) for group in (inside, across))
    dense, experts = (
        link_use("all_gather", axis_group(size, step, 64, H100), RATES) for size, step in ((64, 1), (8, 8))
    )
    assert near == LinkUse(1.0, 0.0) and experts == LinkUse(0.0, 1.0) and far.network == 1.0
    assert crowding([near, experts]) == 1.0 and crowding([far, experts]) == 2.0
    # Each of a node's eight cards carries an eighth of the ring, whose whole passes NVLink.
    ring = (50 * 8 * 0.8) / (450 * 0.5)
    assert dense == LinkUse(1.0, pytest.approx(1 / ring)) and ring > 1.0
    assert crowding([near, dense]) == 2.0
    assert crowding([far, dense]) == pytest.approx(max(1.0 + far.domain, 1.0 + 1 / ring))
    assert link_use("all_gather", axis_group(1, 1, 64, H100), RATES) == LinkUse(0.0, 0.0)
    both = mixed_use(dense, experts, np.array([3.0, 0.0]), np.array([1.0, 0.0]))
    assert np.allclose(both.domain, [0.75, 0.0]) and np.allclose(both.network, [0.75 / ring + 0.25, 1.0])


def test_a_transfer_takes_the_best_link_that_joins_its_ends() -> None:
    """NVLink, else the node's own links, else the network."""
    l4 = shipped_cluster("L4", 16).groups[0]
    assert point_to_point_seconds(1e9, axis_group(2, 4, 64, H100), RATES) == pytest.approx(1 / (450 * 0.5))
    assert point_to_point_seconds(1e9, axis_group(2, 8, 64, H100), RATES) == pytest.approx(1 / (50 * 0.8))
    assert point_to_point_seconds(1e9, axis_group(2, 1, 16, l4), RATES) == pytest.approx(1 / (32 * 0.5))
    assert point_to_point_seconds(1e9, axis_group(2, 8, 16, l4), RATES) == pytest.approx(1 / (1.6 * 0.8))


@pytest.mark.parametrize("kind", KINDS)
def test_time_grows_with_bytes_ranks_apart_and_slower_links(kind: str) -> None:
    near, far = axis_group(8, 1, 64, H100), axis_group(8, 8, 64, H100)
    one = collective_seconds(kind, np.array([1e8, 2e8]), near, RATES)
    assert one[1] == pytest.approx(2 * one[0])
    assert collective_seconds(kind, 1e8, far, RATES) > one[0]
    half = LinkRates(domain=0.25, network=0.4, all_to_all_domain=0.2, all_to_all_network=0.3, latency_seconds=0.0)
    assert collective_seconds(kind, 1e8, near, half) == pytest.approx(2 * one[0])
    assert collective_seconds(kind, 1e8, axis_group(1, 1, 64, H100), RATES) == 0


@pytest.mark.parametrize(("topk", "nodes"), [(1, 4), (2, 4), (3, 2), (8, 2)])
def test_copies_of_a_token_that_go_once_to_each_node(topk: int, nodes: int) -> None:
    """Every way a token's experts can fall on the nodes."""
    ways = list(itertools.product(range(nodes), repeat=topk))
    distinct = sum(len(set(way)) for way in ways) / len(ways)
    assert expected_places(topk, nodes) == pytest.approx(distinct)
