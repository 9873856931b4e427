"""Sharding specs: every move against who owns which element, and prices against the links."""

from __future__ import annotations

import math
from itertools import product

import pytest

from moe_overlap.tuner.cost.links import collective_seconds
from moe_overlap.tuner.search.layer.sharding_specs import (
    PARTIAL,
    REPLICATED,
    WHOLE,
    Dim,
    Mesh,
    Resharding,
    Spec,
    is_valid,
    logical_meshes,
    moves,
    specs_of,
)
from tests.unit.tuner.search.sharding_cases import CONSTANTS, cluster

EXTENTS = {Dim.SAMPLES: 8, Dim.TOKENS: 8, Dim.EXPERT: 8}
SIZE = 2.0**30
Box = tuple[tuple[int, int], ...]


def mesh_of(shape: tuple[int, int], nodes: int = 2, per_node: int = 4) -> Mesh:
    described = cluster(nodes, per_node)
    meshes = logical_meshes(math.prod(shape), described.gpus, described.group_of(0), CONSTANTS.link_rates)
    return next(mesh for mesh in meshes if mesh.shape == shape)


def box(spec: Spec, place: tuple[int, int], mesh: Mesh) -> Box:
    """First and last element of each dimension on one device."""
    ranges = []
    for dim, length in EXTENTS.items():
        first, last = 0, length
        for axis in (0, 1):
            if spec[axis] == dim:
                part = (last - first) // mesh.shape[axis]
                first, last = first + place[axis] * part, first + (place[axis] + 1) * part
        ranges.append((first, last))
    return tuple(ranges)


def elements(where: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(*bounds) for bounds in where)))


@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (4, 2)])
def test_every_move_delivers_what_its_group_holds(shape: tuple[int, int]) -> None:
    mesh = mesh_of(shape, 1, 8)
    places = list(product(range(shape[0]), range(shape[1])))
    for spec in specs_of(EXTENTS, mesh, with_partial=True):
        for after, kind, axis, _ in moves(spec, EXTENTS, mesh):
            assert is_valid(after, EXTENTS, mesh)
            for place in places:
                others = [p for p in places if axis is None or p[1 - axis] == place[1 - axis]]
                held = elements(box(spec, place, mesh))
                wanted = elements(box(after, place, mesh))
                if not kind:
                    assert wanted <= held, "a slice is on the device already"
                    continue
                # Summands lie in all of the group, so each element is sent by every rank of it.
                assert wanted <= set().union(*(elements(box(spec, other, mesh)) for other in others))
                if kind == "all_gather":
                    assert len(wanted) == len(held) * len(others)
                if kind == "all_to_all":
                    shares = {len(wanted & elements(box(spec, other, mesh))) for other in others}
                    assert shares == {len(wanted) // len(others)}, "every pair of ranks exchanges the same"


def test_prices_are_those_of_the_links_and_of_the_axis() -> None:
    mesh = mesh_of((2, 4))
    assert [mesh.axes[0].nodes, mesh.axes[1].nodes] == [2, 1], "axis 1 stays inside a node"
    prices, rates = Resharding(EXTENTS, SIZE, mesh), mesh.rates

    def seconds(kind: str, share: float, axis: int) -> float:
        return float(collective_seconds(kind, SIZE * share, mesh.axes[axis], rates))

    samples = (REPLICATED, Dim.SAMPLES)
    assert prices.between(samples, WHOLE) == pytest.approx(seconds("all_gather", 1.0, 1))
    assert prices.between(WHOLE, samples) == 0.0
    split = (REPLICATED, Dim.TOKENS)
    assert prices.between((PARTIAL, Dim.TOKENS), split) == pytest.approx(seconds("all_reduce", 1 / 4, 0))
    # Where axis 1 holds copies, each may reduce a slice over the slow axis, and gather the slices over the fast one.
    sliced = seconds("all_reduce", 1 / 4, 0) + seconds("all_gather", 1.0, 1)
    assert prices.between((PARTIAL, REPLICATED), WHOLE) == pytest.approx(sliced)
    assert sliced < seconds("all_reduce", 1.0, 0)
    assert prices.between((Dim.TOKENS, Dim.SAMPLES), (Dim.TOKENS, Dim.EXPERT)) == pytest.approx(
        seconds("all_to_all", 1 / 8, 1)
    )
    # A split result takes half the seconds of a whole one, latency apart: the rewrite of all-reduces.
    scattered = prices.between((REPLICATED, PARTIAL), (REPLICATED, Dim.TOKENS))
    assert scattered == pytest.approx(seconds("reduce_scatter", 1.0, 1))
    assert scattered < 0.6 * prices.between((REPLICATED, PARTIAL), WHOLE)
    assert prices.between((Dim.SAMPLES, REPLICATED), samples) < math.inf, "another nesting needs a gather first"
    assert prices.between(WHOLE, (PARTIAL, REPLICATED)) == math.inf


def test_no_chain_is_cheaper_than_the_price() -> None:
    prices = Resharding(EXTENTS, SIZE, mesh_of((2, 4)))
    through = prices.seconds[:, :, None] + prices.seconds[None, :, :]
    assert (prices.seconds <= through.min(axis=1) + 1e-12).all()


def test_meshes_have_all_shapes_and_no_spec_splits_unevenly() -> None:
    described = cluster(2, 4)
    meshes = logical_meshes(8, 8, described.group_of(0), CONSTANTS.link_rates)
    assert {mesh.shape for mesh in meshes} == {(8, 1), (4, 2), (2, 4), (1, 8)}
    odd = {Dim.SAMPLES: 2, Dim.TOKENS: 12}
    specs = set(specs_of(odd, mesh_of((2, 4))))
    assert (Dim.SAMPLES, Dim.TOKENS) in specs and (Dim.SAMPLES, Dim.SAMPLES) not in specs
    assert (Dim.TOKENS, Dim.TOKENS) not in specs and (Dim.TOKENS, REPLICATED) in specs
    assert all(spec[0] == REPLICATED for spec in specs_of(odd, mesh_of((1, 8))))
