"""Sharding specs of tensors on a 2-D logical mesh, and the seconds that a change of spec takes.

A spec gives the state of a tensor along each of the two mesh axes: the axis splits one dimension, holds copies (`REPLICATED`), or
holds summands (`PARTIAL`) whose sum is the tensor. If both axes split one dimension, it is cut along axis 0 first, then each
block along axis 1 (Alpa's S01); the other nesting is not used.

A change of spec is a chain of collectives along one axis or along both. `Resharding` prices every pair of specs by the cheapest
chain, a shortest path over all specs of the tensor. Local slices are free, so copies along a fast axis can share the work of a
slow one. A partial result becomes replicated by an all-reduce, or split by a reduce-scatter, which costs half as much; the latter
is Alpa's rewrite of an all-reduce as reduce-scatter and all-gather.

Source: Alpa, section 4.1 (device mesh, sharding spec, resharding); collectives are priced by `cost/links.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import product

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.cost.links import Group, LinkRates, NodeGroup, axis_group, collective_seconds

Floats = NDArray[np.float64]


class Dim(IntEnum):
    """State of a mesh axis: the dimension of an activation or weight that it splits, or copies, or summands."""

    PARTIAL = -2
    """Summands of the tensor."""
    REPLICATED = -1
    """Copies of the tensor."""
    SAMPLES = 0
    TOKENS = 1
    """Positions of a sample. Rows of the experts keep the sample and the position of the token they belong to."""
    WIDTH = 2
    """Hidden, head or vocabulary entries of a token."""
    EXPERT = 3
    """Experts: a dimension of their weights, and of rows sorted by expert."""
    OUTPUT = 4
    """Dimension of a weight that becomes the width of the product."""
    INPUT = 5
    """Dimension of a weight that is summed over."""
    FLAT = 6
    """Any elements of a weight or its states, as ZeRO splits a flat buffer."""


REPLICATED, PARTIAL = Dim.REPLICATED, Dim.PARTIAL
Spec = tuple[Dim, Dim]
"""State of mesh axis 0 and of mesh axis 1."""
AxisWords = tuple[str, str]
"""A spec as text, in lower case; `replicated` for an axis that splits nothing."""
WHOLE: Spec = (REPLICATED, REPLICATED)
Extents = Mapping[Dim, int]
"""Dimension -> its length; a dimension that is absent is not split."""
UNLIMITED = 0
"""Length of a dimension that any number of ranks may split, even unevenly."""


def axis_words(spec: Spec) -> AxisWords:
    """A spec as text."""
    return spec[0].name.lower(), spec[1].name.lower()


@dataclass(frozen=True, slots=True)
class Mesh:
    """A logical view of the devices of a sub-mesh: rank = i · shape[1] + j.

    Attributes:
        axes: the ranks along axis 0 and along axis 1, with their links.
        all_ranks: every rank of the mesh.
    """

    shape: tuple[int, int]
    axes: tuple[Group, Group]
    all_ranks: Group
    rates: LinkRates

    @property
    def devices(self) -> int:
        """All ranks."""
        return self.shape[0] * self.shape[1]

    def shards(self, spec: Spec, dims: tuple[Dim, ...] = ()) -> int:
        """Number of blocks into which a spec cuts a tensor; counts only the splits of `dims` if they are given."""
        sizes = [size for size, dim in zip(self.shape, spec, strict=True) if dim >= 0 and (not dims or dim in dims)]
        return math.prod(sizes)


def logical_meshes(devices: int, world: int, links: NodeGroup, rates: LinkRates) -> tuple[Mesh, ...]:
    """All logical shapes (n, m) with n · m devices; neighbours along axis 1 are neighbouring ranks.

    Args:
        devices: of the sub-mesh, ranks 0 to devices - 1 of the job.
        world: ranks of the job.
    """
    return tuple(
        Mesh(
            (devices // inner, inner),
            (axis_group(devices // inner, inner, world, links), axis_group(inner, 1, world, links)),
            axis_group(devices, 1, world, links),
            rates,
        )
        for inner in range(1, devices + 1)
        if devices % inner == 0
    )


def is_valid(spec: Spec, extents: Extents, mesh: Mesh) -> bool:
    """Whether every split is even and axes of one rank split nothing."""
    for axis, dim in enumerate(spec):
        if mesh.shape[axis] == 1 and dim != REPLICATED:
            return False
        if dim < 0:
            continue
        if dim not in extents or (extents[dim] != UNLIMITED and extents[dim] % mesh.shards(spec, (dim,))):
            return False
    return True


def specs_of(extents: Extents, mesh: Mesh, with_partial: bool = False) -> tuple[Spec, ...]:
    """All valid specs of a tensor."""
    states = (REPLICATED, *((PARTIAL,) if with_partial else ()), *extents)
    return tuple((a, b) for a, b in product(states, states) if is_valid((a, b), extents, mesh))


def moves(spec: Spec, extents: Extents, mesh: Mesh) -> Iterator[tuple[Spec, str, int | None, float]]:
    """Every change of a spec by one collective or one local slice.

    Yields:
        The new spec, the collective (empty for a local slice), its axis (None for both), and the payload as a share of the
        tensor's bytes, as `collective_seconds` expects it.
    """
    for axis in (0, 1):
        other = spec[1 - axis]
        others = mesh.shape[1 - axis] if other >= 0 else 1
        for target in (REPLICATED, *extents):
            state = spec[axis]
            # Axis 0 cuts a dimension before axis 1 does, so it neither joins nor leaves a dimension that axis 1 splits.
            nested = axis == 0 and other >= 0 and other in (state, target)
            after = (target, other) if axis == 0 else (other, target)
            if target == state or nested or not is_valid(after, extents, mesh):
                continue
            if state == REPLICATED:
                yield after, "", axis, 0.0
            elif state == PARTIAL:
                yield after, "all_reduce" if target == REPLICATED else "reduce_scatter", axis, 1.0 / others
            elif target == REPLICATED:
                yield after, "all_gather", axis, 1.0 / others
            else:
                yield after, "all_to_all", axis, 1.0 / others / mesh.shape[axis]
    if min(mesh.shape) > 1:
        yield from _moves_of_both(spec, extents, mesh)


def _moves_of_both(spec: Spec, extents: Extents, mesh: Mesh) -> Iterator[tuple[Spec, str, int | None, float]]:
    """Changes by one collective over all ranks of the mesh."""
    split = min(spec) >= 0
    if not split and spec != (PARTIAL, PARTIAL):
        return
    yield WHOLE, "all_gather" if split else "all_reduce", None, 1.0
    for after in product(extents, extents):
        if not is_valid(after, extents, mesh):
            continue
        if not split:
            yield after, "reduce_scatter", None, 1.0
        elif not set(spec) & set(after):
            # With disjoint dimensions every old block overlaps every new one equally, so all ranks exchange equal shares.
            yield after, "all_to_all", None, 1.0 / mesh.devices


class Resharding:
    """Seconds from every spec of a tensor to every other.

    Args:
        extents: the tensor's dimensions.
        size: bytes of the whole tensor.
    """

    def __init__(self, extents: Extents, size: float, mesh: Mesh) -> None:
        self.specs = specs_of(extents, mesh, with_partial=True)
        self.index = {spec: place for place, spec in enumerate(self.specs)}
        seconds = np.full((len(self.specs), len(self.specs)), np.inf)
        np.fill_diagonal(seconds, 0.0)
        for spec, place in self.index.items():
            for after, kind, axis, share in moves(spec, extents, mesh):
                group = mesh.all_ranks if axis is None else mesh.axes[axis]
                step = float(collective_seconds(kind, size * share, group, mesh.rates)) if kind else 0.0
                seconds[place, self.index[after]] = min(seconds[place, self.index[after]], step)
        # Floyd-Warshall: the cheapest chain may pass through any spec.
        for through in range(len(self.specs)):
            seconds = np.minimum(seconds, seconds[:, through, None] + seconds[None, through, :])
        self.seconds: Floats = seconds

    def between(self, source: Spec, target: Spec) -> float:
        """Seconds of one change of spec; infinite if it is impossible."""
        if source not in self.index or target not in self.index:
            return math.inf
        return float(self.seconds[self.index[source], self.index[target]])

    def added(self, source: Spec, sum_spec: Spec) -> float:
        """Seconds of resharding a tensor so that it can be added to a sum; 0 if both have the same spec.

        Along an axis of the sum that holds summands, the tensor only needs copies: one rank of the axis adds it.
        """
        if source == sum_spec:
            return 0.0
        first, second = (REPLICATED if dim == PARTIAL else dim for dim in sum_spec)
        return self.between(source, (first, second))

    def matrix(self, sources: list[Spec], targets: list[Spec]) -> Floats:
        """[sources, targets] seconds; infinite if a spec is not valid."""
        padded = np.pad(self.seconds, (0, 1), constant_values=math.inf)
        rows = [self.index.get(spec, len(self.specs)) for spec in sources]
        columns = [self.index.get(spec, len(self.specs)) for spec in targets]
        result: Floats = padded[np.ix_(rows, columns)]
        return result
