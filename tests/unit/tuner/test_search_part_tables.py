"""Tables of a model's parts under the layouts of a search against tables of a capture of each layout."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from moe_overlap.tuner.capture.graph import CapturedModel, Layout
from moe_overlap.tuner.capture.library import BlockLibrary
from moe_overlap.tuner.capture.request import Request
from moe_overlap.tuner.cost.operators import tabulate
from moe_overlap.tuner.search.part_tables import PartTables
from moe_overlap.tuner.search.space import UniformLayout
from tests.unit.tuner.made_layers import Extra, Tape, captured
from tests.unit.tuner.test_capture_library import AXES, BASE, requests

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


def test_a_layout_that_must_be_captured_has_no_tables() -> None:
    def extra(tape: Tape, layout: Layout) -> None:
        if layout.tensor >= 4:
            tape.op("mul", [0], 1024)

    found, _ = tables(extra)
    assert all(found.of(layout) is None for layout in layouts()), (
        "one kind of part that is never put together spoils all"
    )
