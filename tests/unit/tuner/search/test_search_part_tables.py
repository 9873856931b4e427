"""Tables of a model's parts under the layouts of a search against tables of a capture of each layout."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from moe_overlap.tuner.capture.graph import CapturedModel, Layout
from moe_overlap.tuner.capture.library import BlockLibrary
from moe_overlap.tuner.capture.request import Request
from moe_overlap.tuner.cost.layout_tables import LayoutTables
from moe_overlap.tuner.cost.operators import OpTable, tabulate
from moe_overlap.tuner.search.part_tables import PartTables
from moe_overlap.tuner.search.shares import LayoutShare, share_of
from moe_overlap.tuner.search.space import UniformLayout
from tests.unit.tuner.capture.test_capture_library import AXES, BASE, requests
from tests.unit.tuner.made_layers import Extra, Tape, captured

LENGTH = 512


def model_of(asked: Request, extra: Extra | None = None) -> CapturedModel:
    """A model whose embedding and head are layers, too."""
    layer = captured(asked, extra)
    (part,) = layer.parts
    return replace(layer, parts=tuple(replace(part, kind=kind) for kind in ("embedding", "moe", "head")))


def layouts() -> list[UniformLayout]:
    return [
        UniformLayout(tensor=t, context=c, expert=e, expert_tensor=x, pipeline=1, virtual=1, micro_batch=1 + number % 2)
        for number, (t, c, e, x) in enumerate(AXES)
    ]


def tables(extra: Extra | None = None) -> tuple[PartTables, dict[tuple[int, int, int, int], Request]]:
    library = BlockLibrary(lambda asked: model_of(asked, extra))
    library.prepare(requests())
    by_ranks = dict(zip(AXES, requests(), strict=True))
    return PartTables(library, by_ranks, layouts(), LENGTH), by_ranks


def test_tables_are_those_of_a_capture_of_each_layout() -> None:
    found, by_ranks = tables()
    for layout in random.Random(0).sample(layouts(), 20):
        parts = found.of(layout)
        assert parts is not None and sorted(count for _, count in parts) == [1, 1, BASE.model.num_layers]
        (part, *_) = model_of(by_ranks[layout.ranks]).parts
        expected = tabulate(part, layout.micro_batch, LENGTH)
        for table, _ in parts:
            assert table.flops == pytest.approx(expected.flops, rel=1e-12)
            assert table.bytes == pytest.approx(expected.bytes, rel=1e-12)
            assert [payload for *_, payload in table.collectives] == pytest.approx(
                [payload for *_, payload in expected.collectives], rel=1e-12
            )


def test_a_process_makes_the_tables_of_its_own_share_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that `share_of` deals it; they are the tables of one process."""
    every, by_ranks = tables()
    asked: list[Request] = []
    real = LayoutTables.operators

    def noted(self: LayoutTables, kind: str, requests: Sequence[Request], b: int, s: int) -> list[OpTable | None]:
        asked.extend(requests)
        return real(self, kind, requests, b, s)

    library = BlockLibrary(model_of)
    library.prepare(requests())
    found = PartTables(library, by_ranks, layouts(), LENGTH, shares=3)
    own = share_of(layouts(), LayoutShare(1, 3))
    monkeypatch.setattr(LayoutTables, "operators", noted)
    parts = [found.of(layout) for layout in own]
    assert {*asked} == {by_ranks[layout.ranks] for layout in own} and 0 < len(own) < len(layouts())
    for layout, of_layout in zip(own, parts, strict=True):
        whole = every.of(layout)
        assert whole is not None and of_layout is not None and len(of_layout) == len(whole)
        for (table, count), (expected, how_often) in zip(of_layout, whole, strict=True):
            assert count == how_often and table.bytes == pytest.approx(expected.bytes, rel=1e-12)


def test_a_layout_that_must_be_captured_has_no_tables() -> None:
    def extra(tape: Tape, layout: Layout) -> None:
        if layout.tensor >= 4:
            tape.op("mul", [0], 1024)

    found, _ = tables(extra)
    assert all(found.of(layout) is None for layout in layouts()), (
        "one kind of part that is never put together spoils all"
    )
