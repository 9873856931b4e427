"""The operators of a model's parts under the layouts of a search, from captured blocks, without a graph per layout.

A bound of a layout's step needs the seconds of its parts, which depend only on sizes. `LayoutTables` computes the sizes of all
layouts with the same operators by one matrix product; a graph per layout would number every operator and storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from moe_overlap.tuner.capture.library import BlockLibrary
from moe_overlap.tuner.capture.request import Request, layer_kinds, prediction_kinds
from moe_overlap.tuner.cost.layout_tables import LayoutTables
from moe_overlap.tuner.cost.operators import OpTable
from moe_overlap.tuner.search.space import UniformLayout

Ranks = tuple[int, int, int, int]
"""`UniformLayout.ranks`."""


class PartTables:
    """Tables of the parts of one model under a given set of layouts.

    Args:
        library: prepared for the layouts.
        requests: ranks -> the request for graphs without recomputation.
        layouts: all layouts of later calls; layouts of equal ranks have equal graphs.
        sequence_length: tokens of a sample.
        shares: number of processes that share the layouts (shares.py). The tables of a share are computed at its first request,
            so a process computes only those of its share.
    """

    def __init__(
        self,
        library: BlockLibrary,
        requests: Mapping[Ranks, Request],
        layouts: Sequence[UniformLayout],
        sequence_length: int,
        shares: int = 1,
    ) -> None:
        self._requests, self._length = requests, sequence_length
        self._tables = LayoutTables(library)
        every = dict.fromkeys(layout.ranks for layout in layouts)
        self._share = {ranks: number % shares for number, ranks in enumerate(every)}
        self._ranks: dict[tuple[int, int], dict[Ranks, None]] = {}
        for layout in layouts:
            self._ranks.setdefault(self._lot(layout), {}).setdefault(layout.ranks)
        self._known: dict[tuple[int, int], Mapping[Ranks, list[tuple[OpTable, int]]]] = {}

    def of(self, layout: UniformLayout) -> list[tuple[OpTable, int]] | None:
        """The parts of the model, each with its number; None if the layout needs a captured graph."""
        lot = self._lot(layout)
        if lot not in self._known:
            self._known[lot] = self._together(self._ranks[lot], layout.micro_batch)
        return self._known[lot].get(layout.ranks)

    def _lot(self, layout: UniformLayout) -> tuple[int, int]:
        """Micro-batch and share: the tables of one such lot are computed together."""
        return layout.micro_batch, self._share[layout.ranks]

    def _together(self, every: Iterable[Ranks], samples: int) -> Mapping[Ranks, list[tuple[OpTable, int]]]:
        """The parts under some ranks with a micro-batch of `samples`."""
        requests = {ranks: self._requests[ranks] for ranks in every}
        parts: dict[Ranks, list[tuple[OpTable, int]]] = {ranks: [] for ranks in requests}
        model = next(iter(requests.values())).model
        kinds = Counter(("embedding", "head", *layer_kinds(model), *prediction_kinds(model)))
        for kind, count in kinds.items():
            tables = self._tables.operators(kind, list(requests.values()), samples, self._length)
            for ranks, table in zip(requests, tables, strict=True):
                if table is not None and ranks in parts:
                    parts[ranks].append((table, count))
                else:
                    parts.pop(ranks, None)
        return parts
