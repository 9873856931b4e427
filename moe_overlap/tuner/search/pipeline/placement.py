"""Sub-meshes of a cluster: which there are, and where each stage's stands.

Contract. A cluster of N nodes of M devices, M a power of two, is cut into sub-meshes (1, 2^p) inside a node and (n, M) of whole
nodes. However their sizes add up to N · M, they cover the cluster without overlap, and none of the first kind leaves its node.

Steps of `place`.
1. Larger sub-meshes come first; equal ones in the order of the pipeline: neighbouring stages of one shape lie side by side.
2. Each takes the next free devices, counted node by node. Whole nodes come first and leave whole nodes; behind them sizes are
   falling powers of two, so each begins at a multiple of its own size, and a node's end is one too.

Unlike nodes: nodes of each type are placed by themselves. Source: Alpa, section 5.2 and the proof in its appendix A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class SubMesh:
    """n nodes of m devices each."""

    nodes: int
    per_node: int

    @property
    def devices(self) -> int:
        """All of them."""
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True)
class Placed:
    """Devices first_device, first_device + 1, ... of each of the nodes first_node, first_node + 1, ..."""

    mesh: SubMesh
    first_node: int
    first_device: int


def submeshes(nodes: int, per_node: int) -> tuple[SubMesh, ...]:
    """(1, 1), (1, 2), (1, 4), ..., (1, M), (2, M), ..., (N, M)."""
    _require_power_of_two(per_node)
    inside = [SubMesh(1, 1 << power) for power in range(per_node.bit_length())]
    return (*inside, *(SubMesh(count, per_node) for count in range(2, nodes + 1)))


def place(meshes: Sequence[SubMesh], nodes: int, per_node: int) -> list[Placed]:
    """The place of every stage's sub-mesh among the nodes, in the order of `meshes`.

    Args:
        meshes: of the stages of a pipeline, all devices together.
        nodes, per_node: N and M.
    """
    _require_power_of_two(per_node)
    assert sum(mesh.devices for mesh in meshes) == nodes * per_node, (meshes, nodes, per_node)
    assert all(mesh.per_node == per_node or mesh.nodes == 1 for mesh in meshes), meshes
    placed: dict[int, Placed] = {}
    free = 0
    for stage in sorted(range(len(meshes)), key=lambda stage: -meshes[stage].devices):
        placed[stage] = Placed(meshes[stage], free // per_node, free % per_node)
        free += meshes[stage].devices
    return [placed[stage] for stage in range(len(meshes))]


def _require_power_of_two(per_node: int) -> None:
    assert per_node > 0 and per_node & (per_node - 1) == 0, f"{per_node} devices per node are no power of two"
