"""Operators of one part of a model under many layouts at once, from captured blocks. Numpy only.

`LayoutTables` groups layouts whose graphs differ only in sizes, and evaluates all sizes of a group by one matrix product. The
numbers equal those of `operators.tabulate` for each layout, in double precision. Legend: L layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.capture.composition import Composite
from moe_overlap.tuner.capture.graph import Op
from moe_overlap.tuner.capture.kernels import KERNELS
from moe_overlap.tuner.capture.library import BlockLibrary
from moe_overlap.tuner.capture.names import numbered, operator_order
from moe_overlap.tuner.capture.request import Request
from moe_overlap.tuner.capture.scaling import Degrees, ScalingMatrix, UndeterminedError
from moe_overlap.tuner.cost.operators import OpTable, resized, tabulate

Floats = NDArray[np.float64]
GroupKey = tuple[int, int]
"""Identity of a composite, and the experts per rank if the number of operators depends on them; else 0."""


class LayoutTables:
    """Tables of the parts of one model, with caches of everything that layouts with equal graphs share.

    Args:
        library: prepared for all requested layouts (`BlockLibrary.prepare`).
    """

    def __init__(self, library: BlockLibrary) -> None:
        self._library = library
        self._groups: dict[GroupKey, _Group] = {}

    def operators(self, kind: str, requests: Sequence[Request], b: int, s: int) -> list[OpTable | None]:
        """The operators of a kind of part under many layouts: `tabulate`'s except for rounding, without their graphs.

        Returns:
            [L] tables; layouts of equal sizes share one. None if the captured blocks do not determine the operators.
        """
        tables: list[OpTable | None] = [None] * len(requests)
        members = self._grouped(kind, requests, b)
        for key, places in members.items():
            group = self._groups[key]
            group_tables: Sequence[OpTable | None]
            try:
                group_tables = group.operators([requests[place] for place in places], b, s)
            except UndeterminedError:
                group_tables = [group.determined(requests[place], b, s) for place in places]
            for place, table in zip(places, group_tables, strict=True):
                tables[place] = table
        return tables

    def _grouped(self, kind: str, requests: Sequence[Request], b: int) -> dict[GroupKey, list[int]]:
        """Group -> indices of its requests; requests without a group are left out."""
        members: dict[GroupKey, list[int]] = {}
        for place, request in enumerate(requests):
            composite = self._library.graph_of(kind, request, b)
            if composite is None:
                continue
            # If operators run for one expert after the other, their number depends on the experts per rank.
            key = id(composite), _experts(request) if composite.runs_each_expert else 0
            if key not in self._groups:
                try:
                    # The group keeps the composite alive, so its id is not reused.
                    self._groups[key] = _Group(composite, request)
                except UndeterminedError:
                    continue
            members.setdefault(key, []).append(place)
        return members


class _Group:
    """Layouts with the same operators.

    Args:
        request: the request of one of them.
    """

    def __init__(self, composite: Composite, request: Request) -> None:
        self._composite, named_part = composite, composite.part
        sizes = list(composite.scalings)
        self._rows = {size: row for row, size in enumerate(sizes)}
        self._matrix = ScalingMatrix([composite.scalings[size] for size in sizes])
        part = numbered(named_part, request.layout, _experts(request), composite.sizes(_degrees(request)))
        self._part = part
        self._names = operator_order(named_part, _experts(request))
        self._first: dict[tuple[int, int], OpTable] = {}
        self._resized: dict[tuple[int, int, bytes], OpTable] = {}

    def operators(self, requests: Sequence[Request], b: int, s: int) -> list[OpTable]:
        """The operators under some layouts.

        Raises:
            UndeterminedError: captured values do not determine the operators of some layout.
        """
        values = self._matrix.values([_degrees(request) for request in requests], b, s)[self._operator_rows]
        keys = [(b, s, sizes.tobytes()) for sizes in np.ascontiguousarray(values.T)]
        new = {key: column for column, key in enumerate(keys) if key not in self._resized}
        self._resized.update(zip(new, self._of_sizes(self._like(b, s), values[:, list(new.values())]), strict=True))
        return [self._resized[key] for key in keys]

    def determined(self, request: Request, b: int, s: int) -> OpTable | None:
        """The operators under one layout; None if captured values do not determine them."""
        try:
            return self.operators([request], b, s)[0]
        except UndeterminedError:
            return None

    @cached_property
    def _operator_rows(self) -> list[int]:
        """Matrix rows of the sizes of all operators: bytes, payload if it is a collective, and shape of each."""
        rows = []
        for name, op in zip(self._names, self._part.ops, strict=True):
            rows.append(self._rows[name, "bytes", 0])
            rows += [self._rows[name, "payload", 0]] if op.collective is not None else []
            rows += [self._rows[name, "shape", axis] for axis in range(len(op.shape))]
        return rows

    def _like(self, b: int, s: int) -> OpTable:
        if (b, s) not in self._first:
            self._first[b, s] = tabulate(self._part, b, s)
        return self._first[b, s]

    def _of_sizes(self, like: OpTable, sizes: Floats) -> Iterator[OpTable]:
        """One table per column of `sizes`, whose rows are those of `_operator_rows`."""
        ops, row = self._part.ops, 0
        moved, payloads, flops = [], [], []
        cuts: list[slice] = []
        for op in ops:
            moved.append(sizes[row])
            if op.collective is not None:
                row += 1
                payloads.append(sizes[row])
            cuts.append(slice(row + 1, row + 1 + len(op.shape)))
            flops.append(_flops(op, sizes[cuts[-1]], sizes.shape[1]))
            row = cuts[-1].stop
        all_flops, all_moved = np.array(flops), np.array(moved)
        for column, numbers in enumerate(sizes.T.tolist()):
            shapes = tuple(tuple(numbers[cut]) for cut in cuts)
            sent = [float(payload[column]) for payload in payloads]
            yield resized(like, shapes, all_flops[:, column], all_moved[:, column], sent)


def _degrees(request: Request) -> Degrees:
    return Degrees.of(request.layout, request.model)


def _experts(request: Request) -> int:
    return request.model.num_experts // request.layout.expert


def _flops(op: Op, shape: Floats, count: int) -> Floats:
    """[L] multiplications and additions; equal to `kernels.flops`."""
    if not op.flops.terms:
        return np.zeros(count)
    if op.cost_class == "gemm":
        return 2.0 * shape.prod(axis=0)
    if op.cost_class == "grouped_gemm":
        return 2.0 * shape[1:].prod(axis=0)
    batch, heads, _, query, key, width, value_width, window = shape
    visible = np.where(window > 0, np.minimum(key, window), key)
    # A sink counts as one more key, which is not divided among ranks.
    sinks = float(dict(op.shape[4].terms).get((), 0))
    first, second = KERNELS[op.name].products
    pairs = (visible * key - visible**2 / 2) * query / (key - sinks)
    result: Floats = 2.0 * batch * heads * pairs * (first * width + second * value_width)
    return result
