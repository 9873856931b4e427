"""Graphs with recomputation, rewritten from those without: equal to captures; and libraries that answer by rewriting."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from moe_overlap.tuner.capture.cache import CaptureFiles, save_captured
from moe_overlap.tuner.capture.capture import sequence_unit
from moe_overlap.tuner.capture.graph import CapturedModel, Layout, Op, check
from moe_overlap.tuner.capture.library import BlockLibrary, Libraries
from moe_overlap.tuner.capture.recomputation import recomputed
from moe_overlap.tuner.capture.request import FULL, NO_RECOMPUTATION, Request
from moe_overlap.tuner.capture.stretches import NotRewrittenError
from tests.unit.tuner.capture.capture_cases import (
    AHEAD,
    CP2,
    GATED,
    LATENT,
    MOE,
    SHARED,
    TP2_EP2,
    marked_parts,
    recorded,
    request,
)
from tests.unit.tuner.capture.test_capture_library import AXES, requests
from tests.unit.tuner.made_layers import captured

CHEAP = "layernorm+moe_act"
EVERY = "core_attn+layernorm+mla_up_proj+mlp+moe_act+shared_experts"
RANKS = f"{TP2_EP2} {CP2}"
MODELS = {
    "heads in groups": (f"{MOE} {RANKS}", (FULL, CHEAP, "core_attn+layernorm+moe")),
    "biases and windows": (f"{GATED} {RANKS}", (FULL, CHEAP)),
    "latent attention and prediction layers": (f"{LATENT} {SHARED} {AHEAD} {RANKS}", (FULL, EVERY)),
    "latent attention on one rank": (LATENT, ("mla_up_proj",)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_rewritten_layer_is_the_captured_one(name: str) -> None:
    flags, variants = MODELS[name]
    asked = request(f"{flags} --bf16", "te")
    point = (3, sequence_unit(asked.config, asked.model, asked.layout))
    plain = marked_parts(asked, point)
    for variant in variants:
        expected = recorded(replace(asked, variant=variant), [point])
        assert plain.keys() < expected.keys()
        for kind, part in plain.items():
            rewritten = recomputed(part, variant)
            check(rewritten)
            assert rewritten == expected[kind][0], (kind, variant)
            again = [op for op in rewritten.ops if op.is_recomputed]
            assert again and all(op.phase == "backward" for op in again)


@pytest.mark.parametrize("variant", ["layernorm+router", "moe+moe_act"])
def test_variants_that_no_rewrite_knows_are_refused(variant: str) -> None:
    """A module of another release, and one inside of another."""
    asked = request(f"{MOE} {TP2_EP2} --bf16", "te")
    part = marked_parts(asked, (3, sequence_unit(asked.config, asked.model, asked.layout)))["moe"]
    with pytest.raises(NotRewrittenError):
        recomputed(part, variant)


def test_a_layer_without_the_marks_of_a_pass_without_gradients_is_refused() -> None:
    (part,) = captured(requests()[0]).parts
    bare = replace(part, storages=tuple(replace(storage, released_after=None) for storage in part.storages))
    with pytest.raises(NotRewrittenError):
        recomputed(bare, FULL)


# -- libraries of layers made by hand, whose captures are the rewritten layers, or other ones ------------------------------------


Change = Callable[[Request, tuple[Op, ...]], tuple[Op, ...]]


def fully_recomputed(asked: Request, change: Change = lambda _, ops: ops) -> CapturedModel:
    model = captured(asked)
    parts = [recomputed(part, FULL) for part in model.parts]
    return replace(model, parts=tuple(replace(part, ops=change(asked, part.ops)) for part in parts))


def variant_library(change: Change = lambda _, ops: ops) -> BlockLibrary:
    return BlockLibrary(lambda asked: fully_recomputed(asked, change), BlockLibrary(captured))


def asked_for(axes: tuple[tuple[int, int, int, int], ...] = AXES) -> list[Request]:
    return [replace(asked, variant=FULL) for asked in requests(axes)]


def one_operator_less(_: Request, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    return ops[:-1]


def one_without_its_mark(_: Request, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    first = next(op for op in ops if op.is_recomputed)
    return tuple(replace(op, is_recomputed=False) if op is first else op for op in ops)


def test_one_capture_of_a_variant_answers_all_layouts() -> None:
    library = variant_library()
    library.prepare(asked_for())
    assert library.rewrites and len(library.captured_layouts) == 1
    for asked in asked_for():
        assert library.model(asked).parts == fully_recomputed(asked).parts


@pytest.mark.parametrize("change", [one_operator_less, one_without_its_mark])
def test_a_capture_that_differs_from_the_rewritten_graph_ends_rewriting(change: Change) -> None:
    library = variant_library(change)
    library.prepare(asked_for())
    assert not library.rewrites and len(library.captured_layouts) > 1
    for asked in asked_for():
        assert library.model(asked).parts == fully_recomputed(asked, change).parts


def test_a_layout_that_is_parallel_on_an_axis_that_no_capture_has_shown_is_captured() -> None:
    def change(asked: Request, ops: tuple[Op, ...]) -> tuple[Op, ...]:
        return one_without_its_mark(asked, ops) if asked.layout.context > 1 else ops

    library = variant_library(change)
    for asked in asked_for(((1, 1, 1, 1), (2, 1, 4, 1), (4, 1, 2, 1), (2, 2, 2, 1))):
        assert library.model(asked).parts == fully_recomputed(asked, change).parts
    shown = [(layout.tensor, layout.context, layout.expert) for layout in library.captured_layouts]
    assert shown == [(1, 1, 1), (2, 1, 4), (2, 2, 2)] and not library.rewrites


def test_a_layout_that_cannot_be_rewritten_is_captured() -> None:
    """The check has passed under another layout; of this one the pass without gradients was no shorter version."""

    def plain(asked: Request) -> CapturedModel:
        model = captured(asked)
        if asked.layout.tensor > 1:
            return model
        bare = [
            replace(part, storages=tuple(replace(each, released_after=None) for each in part.storages))
            for part in model.parts
        ]
        return replace(model, parts=tuple(bare))

    library = BlockLibrary(fully_recomputed, BlockLibrary(plain))
    shown, other = asked_for(((2, 1, 4, 1), (1, 1, 2, 1)))
    library.prepare([shown])
    assert library.rewrites
    assert library.must_capture(other) and library.model(other).parts == fully_recomputed(other).parts
    assert len(library.captured_layouts) == 2


def test_libraries_capture_a_variant_once(tmp_path: Path) -> None:
    count = dict.fromkeys((NO_RECOMPUTATION, FULL), 0)

    def capture(missing: Mapping[Path, Request]) -> None:
        for path, asked in missing.items():
            count[asked.variant] += 1
            made = captured(asked) if asked.variant == NO_RECOMPUTATION else fully_recomputed(asked)
            save_captured(replace(made, sha256=asked.sha256()), path)

    libraries = Libraries(CaptureFiles(tmp_path, capture=capture))
    libraries.prepare([*asked_for(), *requests()])
    assert count[FULL] == 1 < count[NO_RECOMPUTATION] <= 9
    for asked in asked_for():
        assert libraries.of(asked).model(asked).parts == fully_recomputed(asked).parts
    assert sum(count.values()) <= 10


class Open(BlockLibrary):
    """A library whose captures are said to leave some layouts open."""

    still_open: Collection[Layout] = ()

    def _is_open(self, request: Request) -> bool:
        return request.layout in self.still_open and request.layout not in self.captured_layouts


@pytest.mark.parametrize(("still_open", "chosen"), [([], (4, 1, 2, 2)), ([(8, 1, 2, 1)], (8, 1, 2, 1))])
def test_of_captures_that_show_as_many_ends_one_that_is_open_is_taken(
    still_open: list[tuple[int, int, int, int]], chosen: tuple[int, int, int, int]
) -> None:
    library = Open(captured)
    library.prepare(requests([(8, 2, 8, 2)]))
    library.still_open = [asked.layout for asked in requests(still_open)]
    library.decide(requests())
    assert library.captured_layouts[1] == requests([chosen])[0].layout


def test_of_open_layouts_one_is_captured_that_shows_most_of_what_is_open() -> None:
    """Open are all of 8 tensor and 2 context ranks, and all without expert ranks: one layout is both."""
    library = Open(captured)
    library.prepare(requests())
    before = len(library.captured_layouts)
    library.still_open = [
        layout
        for layout in (asked.layout for asked in requests())
        if (layout.tensor, layout.context) == (8, 2) or layout.expert * layout.expert_tensor == 1
    ]
    library.decide(requests())
    assert library.captured_layouts[before] == requests([(8, 2, 1, 1)])[0].layout
