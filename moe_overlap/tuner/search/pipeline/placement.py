"""Sub-meshes of a cluster: their shapes, and the place of each stage's sub-mesh.

Contract. A cluster of N nodes of M devices, M a power of two, is cut into sub-meshes (1, 2^p) inside a node and (n, M) of
complete nodes. Any sub-meshes whose sizes add up to N · M cover the cluster without overlap, and those of the first kind stay in
one node.

Steps of `place`.
1. Larger sub-meshes come first, equal ones in the order of the pipeline, so that neighbouring stages of one shape are neighbours.
2. Each takes the next free devices, counted node by node. Complete nodes come first, so complete nodes remain. The later sizes
   are falling powers of two, so each sub-mesh begins at a multiple of its size and never crosses the end of a node.

If nodes differ, nodes of each type are placed separately. Source: Alpa, section 5.2 and the proof in its appendix A.
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
        """Number of its devices."""
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
        meshes: the sub-meshes of a pipeline's stages; together they have all devices.
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
