"""The operators of a model's parts under the layouts of a search, read from captured blocks: no graph is put together for them.

A bound of a layout's step needs the seconds of its parts, and those need sizes alone. `LayoutTables` has them for all layouts
whose blocks run the same operators in one product of matrices; a graph of each layout would number every operator and storage.
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
    """Tables of the parts of one model under layouts that are known ahead.

    Args:
        library: prepared for the layouts.
        requests: ranks -> the request for graphs without recomputation.
        layouts: those that may be asked for; layouts of equal ranks have equal graphs.
        sequence_length: of a sample.
        shares: in which processes deal the layouts (shares.py); tables of a share are made once one of it is asked for,
            so that a process makes those of its own share alone.
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
        """The parts of the whole model, each with how often it is there; None where a graph must be captured for it."""
        lot = self._lot(layout)
        if lot not in self._known:
            self._known[lot] = self._together(self._ranks[lot], layout.micro_batch)
        return self._known[lot].get(layout.ranks)

    def _lot(self, layout: UniformLayout) -> tuple[int, int]:
        """Micro-batch and share, of which all tables are made together."""
        return layout.micro_batch, self._share[layout.ranks]

    def _together(self, every: Iterable[Ranks], samples: int) -> Mapping[Ranks, list[tuple[OpTable, int]]]:
        """The parts under some ranks at a micro-batch."""
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
