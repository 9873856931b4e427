"""Seconds of communication: latency and bandwidth per tier, over groups that span domains and nodes.

A collective runs inside the domains and across them at the same time, so the slower of the two counts; each GPU has a network
card of its own. NCCL runs a ring through each of a domain's cards and does not add up inside the domains first: (n - 1) / n of
the whole passes every link, and the cards share it. Rates are peak rates times a measured efficiency. All functions take arrays
of bytes.

Groups (`stage_groups`) say which ranks talk to each other, and over which links. Ranks are laid out as in megatron-core: tensor
fastest, then context, then data, then pipeline; for the experts expert-tensor, expert, expert-data, pipeline.

Source: Mist, section 5.2 (latency + bytes / bandwidth); rings as NCCL runs them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_overlap.describe.cluster import Cluster, NodeGroup
from moe_overlap.plan.plan import Plan, StagePlan


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as the links see it.

    Attributes:
        size: its ranks.
        per_domain: of them in one NVLink domain; 1 where each is in another.
        per_node: of them in one node.
        links: the nodes they stand in.
    """

    size: int
    per_domain: int
    per_node: int
    links: NodeGroup

    @property
    def domains(self) -> int:
        """NVLink domains the group spans."""
        return -(-self.size // self.per_domain)

    @property
    def nodes(self) -> int:
        """Nodes the group spans."""
        return -(-self.size // self.per_node)


def domain_share(world: int, links: NodeGroup) -> int:
    """GPUs a job has in each domain: schedulers deal out equal parts of domains that are larger than a node."""
    most = min(links.domain_gpus, world)
    if links.domain_gpus <= links.gpus_per_node:
        return most
    while most > 1 and world % most:
        most -= 1
    return most


def axis_group(size: int, stride: int, world: int, links: NodeGroup) -> Group:
    """The group of `size` ranks that stand `stride` apart."""

    def inside(block: int) -> int:
        return max(1, min(size, block // stride))

    return Group(size, inside(domain_share(world, links)), inside(min(links.gpus_per_node, world)), links)


def stage_groups(plan: Plan, stage: StagePlan, cluster: Cluster) -> dict[str, Group]:
    """Groups of a stage by axis, as a captured graph names them.

    `dp_cp` shares dense gradients and optimizer states, `edp` those of the experts.
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
    return {axis: axis_group(size, stride, world, links) for axis, (size, stride) in shapes.items()}


def boundary_group(plan: Plan, cluster: Cluster) -> Group:
    """A rank and the one that it sends hidden states to: the ranks of neighbouring stages, in order."""
    apart = plan.stages[1].devices.ranks[0] - plan.stages[0].devices.ranks[0] if len(plan.stages) > 1 else 1
    return axis_group(2, apart, plan.world_size, cluster.group_of(0))


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
    """Latency of one collective inside a domain; each doubling of the domains adds as much again."""
    reduce_scatter: float = 1.0
    """Seconds of a reduce-scatter over those of an all-gather of as many bytes: 2 where it is made of an all-reduce (gloo)."""


def collective_seconds(kind: str, held_bytes: ArrayLike, group: Group, rates: LinkRates) -> Floats:
    """Seconds of one collective without interference.

    Args:
        kind: all_gather, reduce_scatter, all_reduce, broadcast or all_to_all.
        held_bytes: the whole tensor: what a rank has after an all-gather, before a reduce-scatter, before an all-reduce,
            before a broadcast; of an all-to-all all that a rank sends, its own part included.
        group: the ranks.
    """
    held = np.asarray(held_bytes, dtype=np.float64)
    if group.size == 1:
        return np.zeros_like(held)
    if kind == "all_to_all":
        return all_to_all_seconds(held, group, rates)
    # A ring all-reduce is a reduce-scatter followed by an all-gather.
    factor = {"all_gather": 1.0, "reduce_scatter": rates.reduce_scatter, "all_reduce": 2.0, "broadcast": 1.0}[kind]
    links, moved = group.links, factor * held * (group.size - 1) / group.size
    seconds = np.zeros_like(held)
    if group.per_domain > 1:
        assert links.domain_gb_per_s is not None
        seconds = moved / (links.domain_gb_per_s * GIGA * rates.domain)
    elif group.per_node > 1:
        seconds = moved / (links.node_gb_per_s * GIGA * rates.domain)
    outer, cards = _outer(group)
    if outer > 1:
        seconds = np.maximum(seconds, moved / cards / (links.network_gb_per_s * GIGA * rates.network))
    return seconds + _latency(group, rates)


def all_to_all_seconds(sent_bytes: ArrayLike, group: Group, rates: LinkRates, network_share: float = 1.0) -> Floats:
    """Seconds of an all-to-all.

    Args:
        sent_bytes: all that the busiest rank sends, its own part included; rows are spread evenly over the group.
        network_share: of the bytes between nodes, the part that really crosses: dispatchers that send a token once per node,
            however many of its ranks are there, pay less.
    """
    sent = np.asarray(sent_bytes, dtype=np.float64)
    if group.size == 1:
        return np.zeros_like(sent)
    outer, inner = _outer(group)
    links = group.links
    near = links.domain_gb_per_s if group.per_domain > 1 and links.domain_gb_per_s else links.node_gb_per_s
    inside = sent * (inner - 1) / group.size / (near * GIGA * rates.all_to_all_domain)
    across = sent * (group.size - inner) / group.size * network_share
    outside = across / (links.network_gb_per_s * GIGA * rates.all_to_all_network)
    return np.maximum(inside, outside) + _latency(group, rates)


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
    return np.asarray(bytes_sent, dtype=np.float64) / (rate * GIGA) + rates.latency_seconds


def host_seconds(copied_bytes: ArrayLike, links: NodeGroup, rates: LinkRates) -> Floats:
    """Seconds of a copy between a GPU and its host, one direction."""
    return np.asarray(copied_bytes, dtype=np.float64) / (links.host_gb_per_s * GIGA * rates.host)


def _outer(group: Group) -> tuple[int, int]:
    """Blocks that only the network joins, and ranks in each."""
    inner = max(group.per_domain, group.per_node)
    return -(-group.size // inner), inner


def _latency(group: Group, rates: LinkRates) -> float:
    outer, _ = _outer(group)
    return rates.latency_seconds * (1.0 + float(np.log2(outer)))
