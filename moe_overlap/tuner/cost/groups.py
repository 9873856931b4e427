"""Which ranks talk to each other, and over which links: the groups of a stage on a cluster.

Ranks are laid out as in megatron-core: tensor fastest, then context, then data, then pipeline; for the experts
expert-tensor, expert, expert-data, pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass

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
