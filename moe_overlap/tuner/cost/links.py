"""Seconds of communication: latency and bandwidth per tier, over groups that span domains and nodes.

A collective uses the links inside domains and between them at the same time, so the slower of the two tiers counts. Each GPU has
its own network card. NCCL runs a ring through each card of a domain and does not reduce inside the domains first: (n - 1) / n of
the tensor passes every link, divided among the cards, or among the links of a node that join domains smaller than the node. Rates
are peak rates times a measured efficiency. All functions take arrays of bytes.

Two concurrent collectives slow each other down only on links that both use (`LinkUse`, `crowding`): an all-to-all inside a node
does not slow down gradients on the network.

Groups (`stage_groups`) have the ranks that communicate and their links. Ranks are numbered as in megatron-core: tensor fastest,
then context, then data, then pipeline; for the experts expert-tensor, expert, expert-data, pipeline.

Source: Mist, section 5.2 (latency + bytes / bandwidth); rings as NCCL runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_overlap.describe.cluster import Cluster, NodeGroup
from moe_overlap.plan.plan import Plan, StagePlan


@dataclass(frozen=True, slots=True)
class Group:
    """The position of a process group on the links.

    Attributes:
        size: number of ranks.
        per_domain: ranks in one NVLink domain; 1 if each is in another domain.
        per_node: ranks in one node.
        links: the nodes of the ranks.
    """

    size: int
    per_domain: int
    per_node: int
    links: NodeGroup

    @property
    def nodes(self) -> int:
        """Number of nodes that the group spans."""
        return -(-self.size // self.per_node)

    @property
    def blocks(self) -> int:
        """Number of nodes, or of domains of several nodes, that are connected by the network only."""
        return -(-self.size // max(self.per_domain, self.per_node))


def domain_share(world: int, links: NodeGroup) -> int:
    """GPUs of a job in each domain: of domains larger than a node, schedulers give a job equal parts."""
    most = min(links.domain_gpus, world)
    if links.domain_gpus <= links.gpus_per_node:
        return most
    while most > 1 and world % most:
        most -= 1
    return most


def axis_group(size: int, stride: int, world: int, links: NodeGroup) -> Group:
    """The group of `size` ranks whose numbers differ by `stride`."""

    def inside(block: int) -> int:
        return max(1, min(size, block // stride))

    return Group(size, inside(domain_share(world, links)), inside(min(links.gpus_per_node, world)), links)


def stage_groups(plan: Plan, stage: StagePlan, cluster: Cluster) -> dict[str, Group]:
    """Axis, as in a captured graph -> group of a stage.

    `dp_cp` shares dense gradients and optimizer states, `edp` those of the experts. `pp` is a rank and its peer in the next
    stage; it exists only between stages of equal shape.
    """
    links, world = cluster.group_of(stage.devices.ranks[0]), plan.world_size
    tensor, context, experts = stage.tensor, stage.context, stage.expert * stage.expert_tensor
    shapes = {
        "tp": (tensor, 1),
        "cp": (context, tensor),
        "dp": (stage.data, tensor * context),
        "dp_cp": (stage.data * context, tensor),
        "tp_cp": (tensor * context, 1),
        "tp_dp_cp": (tensor * context * stage.data, 1),
        "ep": (stage.expert, stage.expert_tensor),
        "etp": (stage.expert_tensor, 1),
        "tp_ep": (experts, 1),
        "edp": (stage.expert_data, experts),
    }
    groups = {axis: axis_group(size, stride, world, links) for axis, (size, stride) in shapes.items()}
    if len(plan.stages) > 1 and not plan.transfers:
        groups["pp"] = boundary_group(plan, cluster)
    return groups


def pair_group(source: int, target: int, world: int, links: NodeGroup) -> Group:
    """The group of two ranks; a rank with itself counts as two in one place."""

    def inside(block: int) -> int:
        return 2 if source // block == target // block else 1

    return Group(2, inside(domain_share(world, links)), inside(min(links.gpus_per_node, world)), links)


def boundary_group(plan: Plan, cluster: Cluster) -> Group:
    """The group of a rank and the rank at the same position of the next stage, to which it sends hidden states."""
    stride = plan.stages[1].devices.ranks[0] - plan.stages[0].devices.ranks[0] if len(plan.stages) > 1 else 1
    return axis_group(2, stride, plan.world_size, cluster.group_of(0))


Floats = NDArray[np.float64]
GIGA = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRates:
    """Efficiencies of the links of one GPU type, as fractions of their peak rates, and latencies in seconds."""

    domain: float
    network: float
    all_to_all_domain: float
    all_to_all_network: float
    host: float = 0.8
    latency_seconds: float = 1.0e-5
    """Latency of one collective inside a domain; each doubling of the domains adds the same again."""
    reduce_scatter: float = 1.0
    """Seconds of a reduce-scatter over those of an all-gather of equal bytes; 2 if it is implemented by an all-reduce (gloo)."""
    latencies: tuple[tuple[str, float], ...] = ()
    """(kind, seconds) of collectives with another latency. With gloo an all-reduce has more steps than a transfer."""

    def latency(self, kind: str) -> float:
        """Latency of one collective of a kind inside a domain."""
        return next((seconds for name, seconds in self.latencies if name == kind), self.latency_seconds)


@dataclass(frozen=True, slots=True)
class LinkUse:
    """The shares of a collective's seconds in which links are busy: those inside domains and nodes, and the network.

    The default, for unknown links, is that both are busy all the time.
    """

    domain: float | Floats = 1.0
    network: float | Floats = 1.0


NO_LINK = LinkUse(0.0, 0.0)


def crowding(uses: Sequence[LinkUse]) -> Floats:
    """Slowdown of collectives that run together: the sum of their shares on the busiest link, at least 1."""
    domain, network = (sum((getattr(use, name) for use in uses), start=0.0) for name in ("domain", "network"))
    return np.maximum(1.0, np.maximum(domain, network))


def link_use(kind: str, group: Group, rates: LinkRates, network_share: float = 1.0) -> LinkUse:
    """The links that a large collective uses.

    Args:
        kind, group: as for `collective_seconds`.
        network_share: for an all-to-all, as for `all_to_all_seconds`.
    """
    if group.size == 1:
        return NO_LINK
    many = np.asarray(1e12)
    seconds = (
        _all_to_all_tiers(many, group, rates, network_share) if kind == "all_to_all" else _tiers(many, group, rates)
    )
    longest = float(max(seconds))
    return LinkUse(float(seconds[0]) / longest, float(seconds[1]) / longest)


def point_to_point_use(pair: Group) -> LinkUse:
    """The link of a transfer between two ranks."""
    return LinkUse(1.0, 0.0) if max(pair.per_domain, pair.per_node) > 1 else LinkUse(0.0, 1.0)


def mixed_use(dense: LinkUse, experts: LinkUse, dense_seconds: Floats, expert_seconds: Floats) -> LinkUse:
    """The average links of a collective of dense states followed by one of the experts' states, weighted by their seconds."""
    both = dense_seconds + expert_seconds
    share = np.where(both > 0, dense_seconds / np.where(both > 0, both, 1.0), 0.0)
    return LinkUse(
        share * dense.domain + (1.0 - share) * experts.domain, share * dense.network + (1.0 - share) * experts.network
    )


def collective_seconds(kind: str, held_bytes: ArrayLike, group: Group, rates: LinkRates) -> Floats:
    """Seconds of one collective without interference.

    Args:
        kind: all_gather, reduce_scatter, all_reduce, broadcast or all_to_all.
        held_bytes: bytes of the complete tensor on a rank: after an all-gather; before a reduce-scatter, an all-reduce or a
            broadcast; for an all-to-all all bytes that a rank sends, those to itself included.
        group: the ranks.
    """
    held = np.asarray(held_bytes, dtype=np.float64)
    if group.size == 1:
        return np.zeros_like(held)
    if kind == "all_to_all":
        return all_to_all_seconds(held, group, rates)
    # A ring all-reduce is a reduce-scatter followed by an all-gather.
    factor = {"all_gather": 1.0, "reduce_scatter": rates.reduce_scatter, "all_reduce": 2.0, "broadcast": 1.0}[kind]
    inside, outside = _tiers(factor * held * (group.size - 1) / group.size, group, rates)
    return np.maximum(inside, outside) + _latency(kind, group, rates)


def _tiers(moved: Floats, group: Group, rates: LinkRates) -> tuple[Floats, Floats]:
    """(seconds inside domains, seconds between them) of bytes that pass every link of a ring."""
    links, none = group.links, np.asarray(0.0)
    inside, outside = none, none
    if group.per_domain > 1:
        assert links.domain_gb_per_s is not None
        inside = moved / (links.domain_gb_per_s * GIGA * rates.domain)
    if group.per_node > group.per_domain:
        # Domains smaller than their node, such as bridged pairs: rings through each GPU of a domain share the bytes.
        inside = np.maximum(inside, moved / group.per_domain / (links.node_gb_per_s * GIGA * rates.domain))
    outer, cards = _outer(group)
    if outer > 1:
        outside = moved / cards / (links.network_gb_per_s * GIGA * rates.network)
    return inside, outside


def all_to_all_seconds(sent_bytes: ArrayLike, group: Group, rates: LinkRates, network_share: float = 1.0) -> Floats:
    """Seconds of an all-to-all.

    Args:
        sent_bytes: all bytes that the busiest rank sends, those to itself included, spread evenly over the group.
        network_share: share of the bytes between nodes that crosses the network; below 1 for dispatchers that send a token once
            per node and not once per rank.
    """
    sent = np.asarray(sent_bytes, dtype=np.float64)
    if group.size == 1:
        return np.zeros_like(sent)
    inside, outside = _all_to_all_tiers(sent, group, rates, network_share)
    return np.maximum(inside, outside) + _latency("all_to_all", group, rates)


def _all_to_all_tiers(sent: Floats, group: Group, rates: LinkRates, network_share: float) -> tuple[Floats, Floats]:
    """(seconds inside domains, seconds between them) of an all-to-all."""
    _, inner = _outer(group)
    links, inside = group.links, np.zeros_like(sent)
    if group.per_domain > 1:
        assert links.domain_gb_per_s is not None
        in_domain = sent * (group.per_domain - 1) / group.size
        inside = in_domain / (links.domain_gb_per_s * GIGA * rates.all_to_all_domain)
    if group.per_node > group.per_domain:
        in_node = sent * (group.per_node - group.per_domain) / group.size
        inside = np.maximum(inside, in_node / (links.node_gb_per_s * GIGA * rates.all_to_all_domain))
    across = sent * (group.size - inner) / group.size * network_share
    return inside, across / (links.network_gb_per_s * GIGA * rates.all_to_all_network)


def point_to_point_seconds(bytes_sent: ArrayLike, pair: Group, rates: LinkRates) -> Floats:
    """Seconds of a transfer between two ranks."""
    links = pair.links
    if pair.per_domain > 1:
        assert links.domain_gb_per_s is not None
        rate = links.domain_gb_per_s * rates.domain
    elif pair.per_node > 1:
        rate = links.node_gb_per_s * rates.domain
    else:
        rate = links.network_gb_per_s * rates.network
    return np.asarray(bytes_sent, dtype=np.float64) / (rate * GIGA) + rates.latency("point_to_point")


def host_seconds(copied_bytes: ArrayLike, links: NodeGroup, rates: LinkRates) -> Floats:
    """Seconds of a copy between a GPU and its host, one direction."""
    return np.asarray(copied_bytes, dtype=np.float64) / (links.host_gb_per_s * GIGA * rates.host)


def _outer(group: Group) -> tuple[int, int]:
    """`Group.blocks`, and the ranks in each block."""
    return group.blocks, max(group.per_domain, group.per_node)


def _latency(kind: str, group: Group, rates: LinkRates) -> float:
    outer, _ = _outer(group)
    return rates.latency(kind) * (1.0 + float(np.log2(outer)))
