"""Graphs put together from blocks: equal to captures of the same layout, and captured where they would not be."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest

from moe_overlap.api import read_job
from moe_overlap.tuner.capture import cache
from moe_overlap.tuner.capture.blocks import NotComposableError
from moe_overlap.tuner.capture.cache import CaptureFiles, save_captured
from moe_overlap.tuner.capture.composition import Composer, Sample
from moe_overlap.tuner.capture.expression import B, Expression, S
from moe_overlap.tuner.capture.graph import CapturedModel, Layout
from moe_overlap.tuner.capture.library import BlockLibrary, Libraries
from moe_overlap.tuner.capture.request import Request
from moe_overlap.tuner.capture.scaling import Degrees, Samples, UndeterminedError, dense_products, routed_products
from moe_overlap.tuner.cost.layout_tables import LayoutTables
from moe_overlap.tuner.cost.operators import tabulate
from tests.unit.tuner.capture.capture_cases import MOE, request
from tests.unit.tuner.made_layers import EXPERTS, HEADS, Extra, Tape, captured

WIDE = MOE.replace("--num-attention-heads 4", f"--num-attention-heads {HEADS}").replace(
    "query-groups 2", "query-groups 8"
)
BASE = request(WIDE.replace("--num-experts 4", f"--num-experts {EXPERTS}"), "te")
AXES = tuple(itertools.product((1, 2, 4, 8), (1, 2), (1, 2, 4, 8), (1, 2)))


def requests(axes: Sequence[tuple[int, int, int, int]] = AXES) -> list[Request]:
    layouts = [Layout(tensor=t, context=c, expert=e, expert_tensor=x, sequence_parallel=t > 1) for t, c, e, x in axes]
    return [replace(BASE, layout=layout) for layout in layouts]


def answers(extra: Extra | None = None) -> tuple[BlockLibrary, list[tuple[int, int, int, int]]]:
    """A library that has answered all layouts, and those whose answer differs from their capture."""
    library = BlockLibrary(lambda asked: captured(asked, extra))
    library.prepare(requests())
    wrong = [
        axes
        for axes, asked in zip(AXES, requests(), strict=True)
        if library.model(asked).parts != captured(asked, extra).parts
    ]
    return library, wrong


def test_few_captures_give_the_graphs_of_all_layouts() -> None:
    library, wrong = answers()
    assert wrong == [] and library.unlike == ()
    assert len(library.captured_layouts) <= 10 < len(AXES)


def test_the_class_of_a_layout_that_was_not_captured_is_captured_when_asked_for() -> None:
    library = BlockLibrary(captured)
    library.prepare([asked for asked in requests() if asked.layout.context == 1])
    before = len(library.captured_layouts)
    (ring,) = requests([(2, 2, 2, 1)])
    assert library.model(ring).parts == captured(ring).parts
    assert library.captured_layouts[before:] == (ring.layout,)


def test_operators_that_no_class_foresees_are_noticed() -> None:
    """An operator that is there with four ranks and more: two captures of one class differ, so all layouts are captured."""

    def extra(tape: Tape, layout: Layout) -> None:
        if layout.tensor >= 4:
            tape.op("mul", [0], B * S)

    library, wrong = answers(extra)
    assert "moe" in library.unlike and wrong == []


def test_a_size_that_is_no_short_sum_is_captured_under_every_layout() -> None:
    def extra(tape: Tape, layout: Layout) -> None:
        tape.op("mul", [0], B * S * (layout.tensor**2 + 3 * layout.tensor + 7))

    library, wrong = answers(extra)
    assert wrong == [] and len(library.captured_layouts) > len(AXES) / 2


def of_library(tape: Tape, layout: Layout) -> None:
    """What a dispatch library adds: a map of all ranks' tokens, tables of places, copies; and a sum over an expert's shards."""
    e, x, own = layout.expert, layout.expert_tensor, B * S / (layout.tensor * layout.context)
    copies = own * Degrees.of(layout, BASE.model).copies
    sizes = (
        own * (128 * e * x * x),
        own * (4 * e * x) + own * (128 * x),
        copies * 7 + own * (9 * e * x),
        copies * 16 / e,
    )
    tape.operator = "moe.dispatch"
    tables = [tape.hold(size, "activation") for size in sizes]
    # Of six terms, of which each storage has two at most.
    tape.op("mul", [0], 0, module="mlp", into=tables, touched=[own, *sizes])
    tape.operator = "moe.gate"
    tape.op("mul", [tables[0] if x > 1 else 0], own, module="mlp.router")


def test_sizes_under_a_dispatch_library_are_told_by_what_is_moved_in_each_storage() -> None:
    flex = replace(BASE, config=replace(BASE.config, moe=replace(BASE.config.moe, moe_token_dispatcher_type="flex")))
    asked = [
        replace(flex, layout=each.layout) for each in requests() if each.layout.expert * each.layout.expert_tensor > 1
    ]
    library = BlockLibrary(lambda request: captured(request, of_library))
    library.prepare(asked)
    assert all(library.model(each).parts == captured(each, of_library).parts for each in asked) and library.unlike == ()
    assert len(library.captured_layouts) <= 10 < len(asked)


def test_operators_of_one_expert_after_the_other_are_those_of_any_number_of_experts() -> None:
    library = BlockLibrary(partial(captured, biases=True))
    library.prepare(requests())
    assert all(library.model(asked).parts == captured(asked, biases=True).parts for asked in requests())
    assert library.unlike == () and len(library.captured_layouts) <= 10


@pytest.mark.parametrize("biases", [False, True])
def test_tables_of_many_layouts_are_those_of_each(biases: bool) -> None:
    library = BlockLibrary(partial(captured, biases=biases))
    library.prepare(requests())
    asked, b, s = requests(), 2, 512
    for each, table in zip(asked, LayoutTables(library).operators("moe", asked, b, s), strict=True):
        (part,) = captured(each, biases=biases).parts
        expected = tabulate(part, b, s)
        assert table is not None
        assert table.flops == pytest.approx(expected.flops, rel=1e-12)
        assert table.bytes == pytest.approx(expected.bytes, rel=1e-12)
        assert list(table.shapes) == [pytest.approx(shape, rel=1e-12) for shape in expected.shapes]
        sent, expected_sent = ([bytes_ for _, _, bytes_ in found.collectives] for found in (table, expected))
        assert sent == pytest.approx(expected_sent, rel=1e-12)


def test_libraries_answer_the_cost_model_as_captures_do(tmp_path: Path) -> None:
    def capture(missing: Mapping[Path, Request]) -> None:
        for path, asked in missing.items():
            save_captured(replace(captured(asked), sha256=asked.sha256()), path)

    flags = f"{MOE} --bf16 --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
    job = read_job([*flags.split(), "--expert-tensor-parallel-size", "1", "--vocab-size", "512"], 4)
    said: list[str] = []
    files = CaptureFiles(tmp_path, said.append, capture)
    expected = files.graphs(job.config, job.model, job.plan, job.flags)
    assert len(said) == 1 and said[0].startswith("first use of this model: capturing layout 1 of ")
    again = CaptureFiles(tmp_path, said.append, capture)
    assert again.graphs(job.config, job.model, job.plan, job.flags) == expected
    assert len(said) == 1, "what is kept is not recorded again"
    graphs = Libraries(files).graphs(job.config, job.model, job.plan, job.flags)
    assert graphs.keys() == expected.keys() and all(graphs[i].parts == expected[i].parts for i in graphs)


def test_parts_that_are_remembered_are_those_of_their_layout_and_sizes() -> None:
    """Layouts and sizes in any pairs, those too that go with no run: each is told apart by itself."""
    asked = [replace(BASE, layout=layout) for layout in answers()[0].captured_layouts]
    samples = [Sample.of(captured(one), one.model) for one in asked]
    known, compared = Composer(BASE.model, samples), 0
    cases = [(1, 1, 1, 1), (2, 1, 1, 1), (2, 1, 1, 2), (2, 1, 2, 1), (2, 1, 4, 1), (4, 1, 2, 1), (2, 2, 2, 1)]
    layouts = [one.layout for one in requests(cases)]
    for kind in known.kinds:
        for layout, sizes in itertools.product(layouts, layouts):
            of_sizes = Degrees.of(sizes, BASE.model)
            fresh = Composer(BASE.model, samples)
            try:
                expected = fresh.parts(kind, layout, of_sizes)
            except (NotComposableError, UndeterminedError):
                continue
            assert known.parts(kind, layout, of_sizes) == expected, (kind, layout, sizes)
            compared += 1
    assert compared > 30


def degrees(tensor: int = 1, context: int = 1, expert: int = 1, expert_tensor: int = 1) -> Degrees:
    layout = Layout(tensor=tensor, context=context, expert=expert, expert_tensor=expert_tensor)
    return Degrees.of(layout, replace(BASE.model, vocab_size=192 * tensor, router_topk=2))


def test_a_sum_of_two_products_is_found_exactly() -> None:
    known = [degrees(1), degrees(2, 2), degrees(4), degrees(2, 4)]
    sizes = {
        place: B * S * Fraction(7, 3) / of.context + B * S * 5 / (of.context * of.tensor) + 9
        for place, of in enumerate(known)
    }
    scaling = Samples(known).scaling(sizes, dense_products(of_vocabulary=False))
    assert scaling.at(degrees(8, 8)) == B * S * Fraction(7, 24) + B * S * Fraction(5, 64) + 9


def test_what_samples_do_not_tell_apart_is_not_guessed() -> None:
    """With as many context ranks as tensor ranks in all samples, either may be what halves a size."""
    known = [degrees(), degrees(2, 2), degrees(4, 4)]
    scaling = Samples(known).scaling(
        {place: B * S / of.tensor for place, of in enumerate(known)}, dense_products(of_vocabulary=False)
    )
    assert scaling.at(degrees(8, 8)) == B * S / 8
    with pytest.raises(UndeterminedError):
        scaling.at(degrees(8, 1))


@pytest.mark.parametrize("numbers", [(7,), (4, 6), (4, 5, 7)])
def test_a_size_without_a_value_for_a_check_is_undetermined(numbers: tuple[int, ...]) -> None:
    known = [degrees(expert=2**place) for place in range(len(numbers))]
    sizes = {place: Expression.of(number) for place, number in enumerate(numbers)}
    with pytest.raises(UndeterminedError):
        Samples(known).scaling(sizes, dense_products(of_vocabulary=False))


def test_rows_of_experts_grow_with_the_ranks_they_come_from() -> None:
    known = [degrees(2, 1, 2, 2), degrees(2, 1, 4, 1), degrees(1, 2, 4, 4), degrees(4, 1, 8, 2)]
    sizes = {
        place: 16 * B * S * of.expert_tensor / (of.tensor * of.context) + Expression.of(Fraction(4096, of.expert))
        for place, of in enumerate(known)
    }
    scaling = Samples(known).scaling(sizes, routed_products(of_copies=False))
    assert scaling.at(degrees(8, 2, 16, 8)) == 8 * B * S + 256


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests([(2, 1, 2, 1)])
    whole = replace(captured(asked[0]), sha256=asked[0].sha256())
    save_captured(whole, tmp_path / f"{whole.sha256}.json")
    reads: list[Path] = []
    load = cache.load_captured

    def counted(path: Path, key: str) -> CapturedModel:
        reads.append(path)
        return load(path, key)

    monkeypatch.setattr(cache, "load_captured", counted)
    files = CaptureFiles(tmp_path)
    assert files.captures(asked) == files.captures(asked) == [whole]
    assert len(reads) == 1
