"""The operators of a model's parts under the layouts of a search, read from captured blocks: no graph is put together for them.

A bound of a layout's step needs the seconds of its parts, and those need sizes alone. `LayoutTables` has them for all layouts
whose blocks run the same operators in one product of matrices; a graph of each layout would number every operator and storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

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
    """

    def __init__(
        self,
        library: BlockLibrary,
        requests: Mapping[Ranks, Request],
        layouts: Sequence[UniformLayout],
        sequence_length: int,
    ) -> None:
        self._requests, self._length = requests, sequence_length
        self._tables = LayoutTables(library)
        self._ranks: dict[int, dict[Ranks, None]] = {}
        for layout in layouts:
            self._ranks.setdefault(layout.micro_batch, {}).setdefault(layout.ranks)
        self._known: dict[int, Mapping[Ranks, list[tuple[OpTable, int]]]] = {}

    def of(self, layout: UniformLayout) -> list[tuple[OpTable, int]] | None:
        """The parts of the whole model, each with how often it is there; None where a graph must be captured for it."""
        if layout.micro_batch not in self._known:
            self._known[layout.micro_batch] = self._of_batch(layout.micro_batch)
        return self._known[layout.micro_batch].get(layout.ranks)

    def _of_batch(self, samples: int) -> Mapping[Ranks, list[tuple[OpTable, int]]]:
        """The parts under all ranks at a micro-batch."""
        requests = {ranks: self._requests[ranks] for ranks in self._ranks[samples]}
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
