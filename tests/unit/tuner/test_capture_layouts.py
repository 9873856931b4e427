"""Graphs put together from blocks against real captures of small models of four families, under all dispatchers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from moe_overlap.tuner.capture.capture import capture, gives, sequence_unit
from moe_overlap.tuner.capture.graph import CapturedModel, Layout
from moe_overlap.tuner.capture.library import BlockLibrary
from moe_overlap.tuner.capture.recomputation import recomputed
from moe_overlap.tuner.capture.request import FULL, NO_RECOMPUTATION, Request
from tests.unit.tuner.capture_cases import marked_parts, recorded, request

EXAMPLES = Path(__file__).parents[3] / "examples"
FAMILIES = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3-mtp", "gpt-oss-120b")
LAYOUTS = 20
MODULES = {
    "mixtral-8x7b": "layernorm+moe_act",
    "qwen3-30b-a3b": "core_attn+layernorm",
    "deepseek-v3-mtp": "layernorm+mla_up_proj+mlp+moe_act+shared_experts",
    "gpt-oss-120b": "layernorm+moe_act",
}
"""Modules that each family recomputes, but not `moe`: its graphs are captured, as they depend on more than a block's class."""
FEWER_LAYOUTS = 12
REWRITTEN_LAYOUTS = 5
"""Under each of them a family is recorded once for every variant."""
LIBRARIES = ("deepep", "hybridep")
MOST = 10
"""Captures of a model over all layouts."""


def requests_of(family: str, library: str = "", layouts: int = LAYOUTS) -> list[Request]:
    """Layouts of a family, drawn from all that its sizes allow.

    Args:
        library: that dispatches tokens; empty for plain all-to-alls.
        layouts: number of them; 0 for all.
    """
    asked = all_requests(family, library)
    return random.Random(0).sample(asked, layouts) if layouts else asked


def all_requests(family: str, library: str) -> list[Request]:
    """All layouts of a family."""
    lines = (EXAMPLES / f"tiny-{family}.args").read_text().splitlines()
    flags = " ".join(
        line.replace("'", "").replace("query-groups 2", "query-groups 4") for line in lines if not line.startswith("#")
    )
    if library:
        flags = flags.replace(
            "dispatcher-type alltoall", f"dispatcher-type flex --moe-flex-dispatcher-backend {library}"
        )
    base = request(f"{flags} --bf16", "te", vocabulary=512)
    # megatron-core adds biases of experts on one rank of expert tensor parallelism only; four ranks of TP would leave one query
    # head on a rank, whose sinks do not run at this width.
    tensor, context, split = ((1, 2), (1, 2, 4, 8), (1,)) if base.model.linear_bias else ((1, 2, 4), (1, 2), (1, 2))
    # A library dispatches among several ranks.
    axes = [
        (t, c, e, x) for t in tensor for c in context for e in (1, 2, 4, 8) for x in split if e * x > 1 or not library
    ]
    layouts = [Layout(tensor=t, context=c, expert=e, expert_tensor=x, sequence_parallel=t > 1) for t, c, e, x in axes]
    return [replace(base, layout=layout) for layout in layouts]


def captured_in_process(asked: Request) -> CapturedModel:
    """The capture of a request, whatever ran before it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    return capture(asked)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_from_blocks_are_those_of_captures(family: str) -> None:
    compare_with_captures(requests_of(family))


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_graphs_under_a_dispatch_library_are_those_of_captures(family: str, library: str) -> None:
    compare_with_captures(requests_of(family, library, FEWER_LAYOUTS))


CASES = (
    ("mixtral-8x7b", ""),
    pytest.param("deepseek-v3-mtp", "hybridep", marks=pytest.mark.slow),
    pytest.param("gpt-oss-120b", "deepep", marks=pytest.mark.slow),
)


@pytest.mark.parametrize(("family", "library"), CASES)
def test_few_captures_tell_of_all_layouts(family: str, library: str) -> None:
    """The number of captures, and a layout that was not captured, as it is captured; slow tests compare more of them."""
    asked = all_requests(family, library)
    known = BlockLibrary(captured_in_process)
    known.prepare(asked)
    assert known.unlike == () and len(known.captured_layouts) <= MOST < len(asked)
    left = [one for one in asked if one.layout not in known.captured_layouts]
    of_layout = random.Random(1).choice(left)
    assert set(known.composed(of_layout)) == set(captured_in_process(of_layout).parts)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral-8x7b", "deepseek-v3-mtp"])
def test_graphs_that_recompute_modules_are_those_of_captures(family: str) -> None:
    """Graphs of variants that no rewrite answers are put together from captures of their own."""
    asked = requests_of(family)[:FEWER_LAYOUTS]
    compare_with_captures([replace(of_layout, variant=MODULES[family]) for of_layout in asked])


VARIANTS = {
    "mixtral-8x7b": (FULL, "layernorm+moe_act", "layernorm+moe", "core_attn"),
    "qwen3-30b-a3b": (FULL, "layernorm+moe_act", "layernorm+moe", "core_attn"),
    "deepseek-v3-mtp": (
        *(FULL, "layernorm+mla_up_proj+moe_act", "layernorm+mlp+moe"),
        "core_attn+layernorm+mla_up_proj+mlp+moe_act+shared_experts",
    ),
    "gpt-oss-120b": (FULL, "layernorm+moe_act", "layernorm+moe"),
}
"""Variants of each family; core attention with sinks is captured, as gradients of its inputs are copied once more."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "library"), [*((family, "") for family in FAMILIES), ("deepseek-v3-mtp", "hybridep")]
)
def test_rewritten_graphs_are_those_of_captures(family: str, library: str) -> None:
    """Each number of each operator and storage of the layers, at a batch."""
    for asked in requests_of(family, library, REWRITTEN_LAYOUTS):
        point = (3, sequence_unit(asked.config, asked.model, asked.layout))
        plain = marked_parts(asked, point)
        for variant in VARIANTS[family]:
            captured = recorded(replace(asked, variant=variant), [point])
            for kind, part in plain.items():
                assert recomputed(part, variant) == captured[kind][0], (asked.layout, variant, kind)


def compare_with_captures(asked: list[Request]) -> None:
    """Each number of each operator and storage, at a batch at which the layout itself is recorded."""
    library = BlockLibrary(captured_in_process)
    library.prepare(asked)
    # Models as small as these have few numbers of ranks on an axis, so more of their layouts must be captured.
    assert library.unlike == () and len(library.captured_layouts) < len(asked)
    for request_of_layout in asked:
        if request_of_layout.layout in library.captured_layouts:
            continue
        point = (3, sequence_unit(request_of_layout.config, request_of_layout.model, request_of_layout.layout))
        model = library.model(request_of_layout)
        assert {part.kind for part in model.parts} >= {*model.layer_kinds, *model.mtp_kinds}
        expected = {kind: part for kind, (part,) in recorded(request_of_layout, [point]).items()}
        if request_of_layout.variant == NO_RECOMPUTATION:
            expected |= marked_parts(request_of_layout, point)
        for kind, part in expected.items():
            if part.variant != "none" and kind in ("embedding", "head"):
                continue  # They recompute nothing, and are part of the plain capture alone.
            assert gives(model.part(kind, part.variant, samples=point[0]), part, point), (
                request_of_layout.layout,
                kind,
            )
