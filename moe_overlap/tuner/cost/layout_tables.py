"""Operators and bytes of one part of a model under many layouts at once, from captured blocks. Numpy only.

`layout_tables` groups layouts whose graphs are the same but for sizes and evaluates every size of a group in one product of
matrices. The numbers are those of `operators.tabulate` and `memory.kept_bytes`, `memory.peak_bytes` for each layout, in double
precision. Legend: N operators, L layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.capture.blocks import expert_replicas, is_of_expert, numbered, storage_order
from moe_overlap.tuner.capture.composition import Composite
from moe_overlap.tuner.capture.expression import evaluate
from moe_overlap.tuner.capture.graph import Op, Part
from moe_overlap.tuner.capture.kernels import KERNELS
from moe_overlap.tuner.capture.library import BlockLibrary
from moe_overlap.tuner.capture.request import Request
from moe_overlap.tuner.capture.scaling import Degrees, ScalingMatrix, UndeterminedError
from moe_overlap.tuner.cost.memory import lifetimes
from moe_overlap.tuner.cost.operators import OpTable, tabulate

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutTable:
    """A part under layouts that run the same operators."""

    places: tuple[int, ...]
    """The layouts, by their places among those asked for."""
    first: OpTable
    """The table of the first of them: whatever is no size is the same for all."""
    flops: Floats
    """[N, L]"""
    bytes: Floats
    """[N, L]"""
    shapes: tuple[Floats, ...]
    """[axes, L] for each operator."""
    payloads: Floats
    """[collectives, L], in the order of `first.collectives`."""
    kept_bytes: Floats
    """[L] kept by one micro-batch between the passes."""
    peak_bytes: Floats
    """[L] the larger peak of the two passes."""
    dense_parameter_bytes: Floats
    """[L] of parameters with the replicas of dense layers."""
    expert_parameter_bytes: Floats
    """[L] of parameters with replicas of their own."""


def layout_tables(
    library: BlockLibrary, kind: str, requests: Sequence[Request], b: int, s: int
) -> tuple[LayoutTable, ...]:
    """A part of a model under many layouts.

    Args:
        library: prepared for the requests (`BlockLibrary.prepare`); what it cannot put together is looked up there, one by one.
        kind: of the part.
    Raises:
        CaptureError: a layout must be captured and cannot be.
    """
    groups: dict[int, tuple[Composite, list[int]]] = {}
    alone: list[int] = []
    for place, request in enumerate(requests):
        composite = library.graph_of(kind, request, b)
        if composite is None:
            alone.append(place)
        else:
            groups.setdefault(id(composite), (composite, []))[1].append(place)
    tables = []
    for composite, places in groups.values():
        try:
            tables.append(_of_group(composite, [requests[place] for place in places], places, b, s))
        except UndeterminedError:
            alone += places
    return (*tables, *(_alone(library.model(requests[place]).part(kind, samples=b), place, b, s) for place in alone))


def _of_group(composite: Composite, requests: Sequence[Request], places: Sequence[int], b: int, s: int) -> LayoutTable:
    sizes = list(composite.scalings)
    rows = {size: row for row, size in enumerate(sizes)}
    matrix = ScalingMatrix([composite.scalings[size] for size in sizes])
    values = matrix.values([Degrees.of(r.layout, r.model.vocab_size, r.model.router_topk) for r in requests], b, s)
    whole, layout = composite.whole, requests[0].layout
    degrees = Degrees.of(layout, requests[0].model.vocab_size, requests[0].model.router_topk)
    experts = _experts(requests[0])
    part = numbered(whole, layout, experts, composite.sizes(degrees))
    # Layouts with equal classes that fold nothing have as many experts, so operators stand at the same places.
    names = [named_op.name for named_op in whole.ops]
    moved, shapes, payloads = [], [], []
    for name, op in zip(names, part.ops, strict=True):
        shapes.append(np.array([values[rows[name, "shape", axis]] for axis in range(len(op.shape))]))
        total = values[rows[name, "bytes", 0]]
        if op.collective is not None:
            payloads.append(values[rows[name, "payload", 0]])
            total = total + payloads[-1]
        moved.append(total)
    storages: Floats = np.array([values[rows[name, "bytes", 0]] for name, _ in storage_order(whole, experts)])
    kept, peak = _live(part, storages)
    dense, of_experts = np.zeros(len(requests)), np.zeros(len(requests))
    for name, entry in whole.storages.items():
        if entry.storage.role == "parameter":
            total = values[rows[name, "bytes", 0]]
            if is_of_expert(entry.storage):
                count = np.array([_experts(request) if entry.per_expert else 1 for request in requests])
                own = np.array([expert_replicas(request.layout) == "edp" for request in requests])
                of_experts, dense = of_experts + total * count * own, dense + total * count * ~own
            else:
                dense = dense + total
    return LayoutTable(
        places=tuple(places),
        first=tabulate(part, b, s),
        flops=np.array([_flops(op, shape, len(requests)) for op, shape in zip(part.ops, shapes, strict=True)]),
        bytes=np.array(moved),
        shapes=tuple(shapes),
        payloads=np.array(payloads).reshape(len(payloads), len(requests)),
        kept_bytes=kept,
        peak_bytes=peak,
        dense_parameter_bytes=dense,
        expert_parameter_bytes=of_experts,
    )


def _experts(request: Request) -> int:
    return request.model.num_experts // request.layout.expert


def _live(part: Part, storages: Floats) -> tuple[Floats, Floats]:
    """Bytes kept between the passes and the peak inside of one, [L] each; `storages` [storages, L]."""
    spans = lifetimes(part)
    change = np.zeros((len(part.ops) + 1, len(spans)))
    for column, (first, last) in enumerate(spans.values()):
        change[first, column] += 1
        change[last + 1, column] -= 1
    alive = np.cumsum(change, axis=0)[:-1] @ storages[list(spans)]
    return storages[list(part.saved)].sum(axis=0), alive.max(axis=0)


def _flops(op: Op, shape: Floats, count: int) -> Floats:
    """[L] multiplications and additions, as `kernels.flops` has them."""
    if not op.flops.terms:
        return np.zeros(count)
    if op.cost_class == "gemm":
        return 2.0 * shape.prod(axis=0)
    if op.cost_class == "grouped_gemm":
        return 2.0 * shape[1:].prod(axis=0)
    batch, heads, _, query, key, width, value_width, window = shape
    visible = np.where(window > 0, np.minimum(key, window), key)
    # Sinks stand among the keys as one more of them, of which no rank has a share.
    sinks = float(dict(op.shape[4].terms).get((), 0))
    first, second = KERNELS[op.name].products
    pairs = (visible * key - visible**2 / 2) * query / (key - sinks)
    result: Floats = 2.0 * batch * heads * pairs * (first * width + second * value_width)
    return result


def _alone(part: Part, place: int, b: int, s: int) -> LayoutTable:
    """The table of one layout."""
    table = tabulate(part, b, s)
    sizes: Floats = np.asarray(evaluate([storage.bytes for storage in part.storages], b, s), dtype=np.float64)[:, None]
    kept, peak = _live(part, sizes)
    parameters = {"dp": 0.0, "edp": 0.0}
    for storage in part.storages:
        if storage.role == "parameter":
            parameters[storage.replicas or "dp"] += float(sizes[storage.id, 0])
    return LayoutTable(
        places=(place,),
        first=table,
        flops=table.flops[:, None],
        bytes=table.bytes[:, None],
        shapes=tuple(np.array(shape)[:, None] for shape in table.shapes),
        payloads=np.array([payload for _, _, payload in table.collectives])[:, None],
        kept_bytes=kept,
        peak_bytes=peak,
        dense_parameter_bytes=np.array([parameters["dp"]]),
        expert_parameter_bytes=np.array([parameters["edp"]]),
    )
